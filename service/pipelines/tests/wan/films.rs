//! Whole films against the reference's.

use pipelines::Request;

use crate::film::Film;
use crate::given::{A14B, ALL, I2V, Made, T2V, TI2V_PICTURE, expected, open};
use crate::numbers::{distance, numbers};
use crate::open_model::{F32, on_cpu};

/// Compares a film with the reference's: bytes differ by rounding alone.
fn compare(made: Made, film: &Film) {
    let expected = numbers(&expected()[&format!("{}.frames", made.name)]);
    let found: Vec<f32> = film
        .frames()
        .concat()
        .iter()
        .map(|&byte| f32::from(byte))
        .collect();
    assert_eq!(found.len(), expected.len(), "{}", made.name);
    let apart: Vec<f32> = found.iter().zip(&expected).map(|(f, e)| (f - e).abs()).collect();
    let largest = apart.iter().copied().fold(0.0, f32::max);
    let share = apart.iter().filter(|apart| **apart > 0.0).count() as f64 / apart.len() as f64;
    println!("{}: largest difference {largest}, {share:.5} of bytes", made.name);
    assert!(
        largest <= 1.0 && share < 0.01,
        "{}: {largest}, {share}",
        made.name
    );
}

/// Text to film and picture to film, of one transformer and of two, each in both ways to compute a step.
#[test]
fn films_equal_the_reference() {
    for made in ALL {
        let folder = made.folder();
        let opened = open(folder.path(), &F32);
        for rung in [0, 1] {
            let (values, film) = opened.film(&made.request(), rung);
            let latent = &expected()[&format!("{}.latent", made.name)];
            let apart = distance(&on_cpu(&values["latent"]), latent);
            println!("{} on rung {rung}: {apart:e}", made.name);
            assert!(apart <= 1e-4, "{}: {apart:e}", made.name);
            compare(made, &film);
        }
    }
}

/// Two transformers are two stages, each with one of them, and the steps are divided at the boundary.
#[test]
fn transformers_are_switched_at_the_boundary() {
    let folder = A14B.folder();
    let opened = open(folder.path(), &F32);
    // Times 999, 937, 833 and 625, and the boundary is 875.
    let plan = opened.model.plan(&A14B.request()).expect("a plan");
    let samplings: Vec<_> = plan
        .iter()
        .filter(|stage| stage.name.starts_with("denoise"))
        .map(|stage| (stage.name.as_str(), stage.components.join(" "), stage.steps))
        .collect();
    assert_eq!(
        samplings,
        [
            ("denoise", "transformer".to_owned(), 2),
            ("denoise_low_noise", "transformer_2".to_owned(), 2)
        ]
    );
    let (_, film) = opened.film(&A14B.request(), 0);
    assert_eq!(film.steps, [(1, 2), (2, 2), (1, 2), (2, 2)]);
    let one = Request {
        steps: 1,
        ..A14B.request()
    };
    let plan = opened.model.plan(&one).expect("a plan");
    assert!(plan.iter().all(|stage| stage.name != "denoise_low_noise"));
}

/// The guidance of the second transformer is that of the first unless it is given.
#[test]
fn each_transformer_has_its_guidance() {
    let folder = A14B.folder();
    let opened = open(folder.path(), &F32);
    let latent = |guidance: f32| {
        let request = Request {
            guidance,
            ..A14B.request()
        };
        on_cpu(&opened.film(&request, 0).0["latent"])
    };
    let alike = latent(0.0);
    assert_eq!(distance(&alike, &latent(4.0)), 0.0);
    assert!(distance(&alike, &latent(3.0)) > 1e-3);
}

/// Without guidance there is one pass, and a negative prompt changes nothing.
#[test]
fn without_guidance_there_is_one_pass() {
    let folder = T2V.folder();
    let opened = open(folder.path(), &F32);
    let of = |negative: Option<&str>| {
        let request = Request {
            true_guidance: 1.0,
            negative_prompt: negative.map(str::to_owned),
            steps: 2,
            ..T2V.request()
        };
        let plan = opened.model.plan(&request).expect("a plan");
        let sampling = plan
            .iter()
            .find(|stage| stage.name == "denoise")
            .expect("a stage");
        assert_eq!(sampling.rungs.len(), 1);
        on_cpu(&opened.film(&request, 0).0["latent"])
    };
    assert_eq!(distance(&of(None), &of(Some("small green hat"))), 0.0);
}

/// The picture stays the first latent frame, and a film of text has no such frame.
#[test]
fn a_picture_stays_the_first_frame() {
    let folder = TI2V_PICTURE.folder();
    let opened = open(folder.path(), &F32);
    let (values, _) = opened.film(&TI2V_PICTURE.request(), 0);
    let first = on_cpu(&values["latent"]).narrow(2, 0, 1).expect("a frame");
    assert_eq!(
        distance(&first.contiguous().expect("a frame"), &on_cpu(&values["start"])),
        0.0
    );
}

/// A preview shows the predicted result in the colours of the start, and changes nothing.
#[test]
fn previews_have_the_colours_of_the_picture() {
    for made in [I2V, TI2V_PICTURE] {
        let folder = made.folder();
        let opened = open(folder.path(), &F32);
        let asked = Request {
            preview: true,
            ..made.request()
        };
        let (_, film) = opened.film(&asked, 0);
        assert!(!film.previews.is_empty(), "{}", made.name);
        for (width, height, rgb) in &film.previews {
            assert_eq!(rgb.len() as u32, 3 * width * height);
        }
        let (_, without) = opened.film(&made.request(), 0);
        assert!(without.previews.is_empty());
        assert_eq!(film.frames(), without.frames());
    }
}

/// Frames are delivered as their latents are decoded, and at most as many at a time as asked.
#[test]
fn frames_are_delivered_as_they_are_decoded() {
    let folder = T2V.folder();
    let opened = open(folder.path(), &F32);
    let mut request = Request {
        steps: 1,
        ..T2V.request()
    };
    let lengths = |request: &Request| -> (Vec<u64>, Vec<Vec<u8>>) {
        let (_, film) = opened.film(request, 0);
        let pieces = film.pieces.iter().map(|piece| piece.units().expect("frames"));
        (pieces.collect(), film.frames())
    };
    let (whole, frames) = lengths(&request);
    assert_eq!(whole, [1, 4, 4]);
    if let pipelines::Medium::Video(video) = &mut request.medium {
        video.frames_at_a_time = 3;
    }
    assert_eq!(lengths(&request), (vec![1, 3, 1, 3, 1], frames));
}
