//! Whole films against the reference's.

use candle_core::Tensor;
use pipelines::{Medium, Request, Values};
use serde::Deserialize;

use crate::given::{Film, expected, film_folder, open, picture, request, section_folder, start};
use crate::numbers::{distance, json, numbers};
use crate::open_model::{F32, on_cpu};

/// The description of the reference's answers.
#[derive(Deserialize)]
struct Described {
    /// Which frames of a film are kept.
    frames: Vec<usize>,
}

/// Compares the frames that are kept of the reference's film: bytes differ by rounding alone.
fn compare(name: &str, film: &Film, frames: usize) {
    let described: Described = json("hunyuan-tiny/expected/pipelines.json");
    let expected = numbers(&expected()[&format!("{name}.frames")]);
    let found = film.frames();
    assert_eq!(found.len(), frames, "{name}");
    let kept = described.frames.iter().filter(|frame| **frame < frames);
    let kept: Vec<f32> = kept
        .flat_map(|&frame| found[frame].iter().map(|&byte| f32::from(byte)))
        .collect();
    assert_eq!(kept.len(), expected.len(), "{name}");
    let differences: Vec<f32> = kept.iter().zip(&expected).map(|(f, e)| (f - e).abs()).collect();
    let largest = differences.iter().copied().fold(0.0, f32::max);
    let different = differences.iter().filter(|difference| **difference > 0.0).count();
    let share = different as f64 / differences.len() as f64;
    println!("{name}: largest difference {largest}, {share:.5} of bytes");
    assert!(largest <= 1.0 && share < 0.01, "{name}: {largest}, {share}");
}

/// The sampled latent frames of a film in sections, in order of the film.
fn sampled(values: &Values, is_forward: bool) -> Tensor {
    let mut sections: Vec<_> = values
        .iter()
        .filter_map(|(name, value)| {
            let number: usize = name.strip_prefix("latent_")?.parse().expect("a number");
            Some((number, on_cpu(value)))
        })
        .collect();
    sections.sort_by_key(|(number, _)| *number);
    if !is_forward {
        sections.reverse();
    }
    let sections: Vec<Tensor> = sections.into_iter().map(|(_, section)| section).collect();
    Tensor::cat(&sections, 2).expect("a film's latents")
}

#[test]
fn a_film_of_text_equals_the_reference() {
    let folder = film_folder();
    let opened = open(folder.path(), &F32);
    let (values, film) = opened.film(&request(33, None, 3, 5), 0);
    let apart = distance(&on_cpu(&values["latent"]), &expected()["film.latent"]);
    println!("film.latent: {apart:e}");
    assert!(apart <= 1e-5, "{apart:e}");
    compare("film", &film, 33);
    assert_eq!(film.steps, [(1, 3), (2, 3), (3, 3)]);
}

#[test]
fn films_in_sections_equal_the_reference_backward() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    for sections in [1, 3] {
        let frames = 36 * sections + 1;
        let (_, film) = opened.film(&request(frames, Some(start()), 2, 7), 0);
        compare(&format!("i2v.{sections}"), &film, frames as usize);
    }
}

#[test]
fn five_sections_are_sampled_as_the_reference_samples_them() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    let (values, _) = opened.film(&request(181, Some(start()), 2, 7), 0);
    let apart = distance(&sampled(&values, false), &expected()["i2v.5.latent"]);
    println!("i2v.5.latent: {apart:e}");
    assert!(apart <= 1e-5, "{apart:e}");
}

#[test]
fn films_in_sections_equal_the_reference_forward() {
    let folder = section_folder(true);
    let opened = open(folder.path(), &F32);
    for sections in [1, 3] {
        let frames = 36 * sections + 1;
        let (_, film) = opened.film(&request(frames, Some(start()), 2, 7), 0);
        compare(&format!("f1.{sections}"), &film, frames as usize);
        // In order of the film: it can be watched from the first section on.
        let firsts: Vec<u64> = film.pieces.iter().map(|piece| piece.first).collect();
        assert!(firsts.is_sorted(), "{firsts:?}");
    }
}

/// A preview shows the predicted result in the colours of the start, without the autoencoder, and changes nothing.
#[test]
fn previews_need_no_autoencoder() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    let asked = pipelines::Request {
        preview: true,
        ..request(37, Some(start()), 3, 7)
    };
    let (_, film) = opened.film(&asked, 0);
    let sizes: Vec<_> = film
        .previews
        .iter()
        .map(|(w, h, rgb)| (*w, *h, rgb.len()))
        .collect();
    assert_eq!(
        sizes,
        [(24, 16, 24 * 16 * 3); 2],
        "behind every step but the last"
    );
    let (_, without) = opened.film(&request(37, Some(start()), 3, 7), 0);
    assert!(without.previews.is_empty());
    assert_eq!(film.frames(), without.frames());
}

/// Strips change the memory of a decode, and no byte of a film.
#[test]
fn a_film_is_the_same_on_every_exact_rung() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    let asked = request(73, Some(start()), 1, 7);
    let whole = opened.film(&asked, 0).1.frames();
    let plan = opened.model.plan(&asked).expect("a plan");
    let decode = plan.last().expect("a decode");
    for (rung, of_decode) in decode.rungs.iter().enumerate() {
        if !of_decode.approximate {
            assert_eq!(opened.film(&asked, rung).1.frames(), whole, "{}", of_decode.label);
        }
    }
}

/// The reference's answers under a negative prompt.
#[derive(Deserialize)]
struct Guided {
    negatives: std::collections::BTreeMap<String, String>,
    true_guidance: f32,
}

fn guided(request: Request, negative: &str) -> Request {
    Request {
        negative_prompt: Some(negative.to_owned()),
        true_guidance: json::<Guided>("hunyuan-tiny/expected/pipelines.json").true_guidance,
        ..request
    }
}

/// Negative prompts that are longer and shorter than the prompt, and one without words.
#[test]
fn negative_prompts_with_true_guidance_equal_the_references() {
    let folder = film_folder();
    let opened = open(folder.path(), &F32);
    let described: Guided = json("hunyuan-tiny/expected/pipelines.json");
    for (name, negative) in &described.negatives {
        let asked = guided(request(9, None, 2, 5), negative);
        let plan = opened.model.plan(&asked).expect("a valid request");
        let denoise = plan
            .iter()
            .find(|stage| stage.name == "denoise")
            .expect("denoise");
        assert_eq!(denoise.passes.in_step, 2);
        let (values, _) = opened.film(&asked, 0);
        let found = on_cpu(&values["latent"]);
        let apart = distance(&found, &expected()[&format!("film.{name}.latent")]);
        println!("film.{name}.latent: {apart:e}");
        assert!(apart <= 1e-5, "{name}: {apart:e}");
        let (without, _) = opened.film(&request(9, None, 2, 5), 0);
        assert!(distance(&on_cpu(&without["latent"]), &found) > 1e-3, "{name}");
    }
}

#[test]
fn films_that_end_with_a_picture_equal_the_reference() {
    let folder = section_folder(false);
    let opened = open(folder.path(), &F32);
    let described: Guided = json("hunyuan-tiny/expected/pipelines.json");
    let ended = |sections: u32| {
        let mut asked = request(36 * sections + 1, Some(start()), 2, 7);
        if let Medium::Video(video) = &mut asked.medium {
            video.end_image = Some(picture("end"));
        }
        asked
    };
    let longer = &described.negatives["longer"];
    for (name, asked) in [
        ("end.1", ended(1)),
        ("end.3", ended(3)),
        ("both.3", guided(ended(3), longer)),
    ] {
        let (values, _) = opened.film(&asked, 0);
        let found = sampled(&values, false);
        let apart = distance(&found, &expected()[&format!("{name}.latent")]);
        println!("{name}.latent: {apart:e}");
        assert!(apart <= 1e-5, "{name}: {apart:e}");
    }
}
