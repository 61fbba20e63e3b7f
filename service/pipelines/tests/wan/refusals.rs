//! Requests and checkpoints that are not valid: each is refused with a message that names the defect.

use std::fs::{remove_dir_all, write as write_file};
use std::path::Path;

use pipelines::{InitImage, Medium, ModelError, Request, families};

use crate::checkpoints::{beside, weights};
use crate::given::{A14B, I2V, Made, T2V, TI2V_PICTURE, open};
use crate::open_model::F32;
use crate::spellings::{authors_name, renamed, write};

fn refused(path: &Path) -> ModelError {
    families().open(path, &F32).map(|_| ()).expect_err("a refusal")
}

/// The fields that are refused of a request that `change` changed, with their problems.
fn problems(made: Made, change: impl FnOnce(&mut Request)) -> Vec<(String, String)> {
    let folder = made.folder();
    let opened = open(folder.path(), &F32);
    let mut request = made.request();
    change(&mut request);
    let refused = opened.model.plan(&request).expect_err("a refusal").into_iter();
    refused.map(|problem| (problem.field, problem.problem)).collect()
}

fn video(request: &mut Request) -> &mut pipelines::Video {
    match &mut request.medium {
        Medium::Video(video) => video,
        _ => panic!("a film"),
    }
}

#[test]
fn requests_out_of_bounds_name_what_is_valid() {
    let sides = problems(TI2V_PICTURE, |request| {
        let video = video(request);
        (video.width, video.height) = (48, 40);
        video.init_image = None;
    });
    let said: Vec<_> = sides
        .iter()
        .map(|(field, problem)| format!("{field} {problem}"))
        .collect();
    assert!(
        said.iter()
            .any(|said| said.starts_with("width is 48; a multiple of 32")),
        "{said:?}"
    );
    assert!(
        said.iter()
            .any(|said| said.starts_with("height is 40; a multiple of 16")),
        "{said:?}"
    );
    for (made, frames, offered) in [(T2V, 80, "77 or 81"), (T2V, 10, "9 or 13"), (I2V, 3, "1 or 5")] {
        let found = problems(made, |request| video(request).frames = frames);
        assert!(
            found[0].0 == "frames" && found[0].1.contains(offered),
            "{found:?}"
        );
    }
    let found = problems(TI2V_PICTURE, |request| video(request).frames = 1);
    assert!(
        found[0].0 == "frames" && found[0].1.contains("at least 5"),
        "{found:?}"
    );
    let found = problems(I2V, |request| video(request).init_image = None);
    assert!(
        found[0].0 == "init_image" && found[0].1.contains("is missing"),
        "{found:?}"
    );
    let found = problems(T2V, |request| {
        video(request).init_image = Some(InitImage::of_size((48, 32)));
    });
    assert_eq!(found[0].0, "init_image");
    let found = problems(T2V, |request| request.max_sequence_length = 513);
    assert_eq!(found[0].0, "max_sequence_length");
    let found = problems(T2V, |request| request.guidance = 3.0);
    assert!(
        found[0].0 == "guidance" && found[0].1.contains("true_guidance"),
        "{found:?}"
    );
}

#[test]
fn what_is_left_out_of_a_prompt_is_told() {
    let folder = T2V.folder();
    let opened = open(folder.path(), &F32);
    let request = Request {
        prompt: "a red cat ".repeat(300),
        ..T2V.request()
    };
    let left_out = opened.model.left_out(&request);
    assert_eq!(left_out.len(), 1);
    assert_eq!(left_out[0].field, "prompt");
    assert!(opened.model.left_out(&T2V.request()).is_empty());
}

#[test]
fn missing_parts_are_named() {
    for part in [
        "vae",
        "text_encoder",
        "tokenizer",
        "scheduler",
        "transformer",
        "transformer_2",
    ] {
        let folder = A14B.folder();
        remove_dir_all(folder.path().join(part)).expect("a folder");
        let error = refused(folder.path());
        assert!(matches!(error, ModelError::Incomplete { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    // The file of one transformer of two.
    let (_root, path) = beside(A14B, "wan_high_noise.safetensors");
    write(
        &renamed(&weights(A14B.folder, "transformer"), authors_name),
        &path,
    );
    let error = refused(&path).to_string();
    assert!(
        error.contains("one of two") && error.contains("wan_high_noise.moored.json"),
        "{error}"
    );
}

#[test]
fn parts_that_do_not_match_are_named() {
    let changed = |file: &str, from: &str, to: &str| {
        let folder = T2V.folder();
        let path = folder.path().join(file);
        let text = std::fs::read_to_string(&path).expect("a file");
        assert!(text.contains(from), "{text}");
        write_file(&path, text.replace(from, to)).expect("a file");
        refused(folder.path()).to_string()
    };
    for (file, from, to, said) in [
        (
            "scheduler/scheduler_config.json",
            "UniPCMultistepScheduler",
            "EulerDiscreteScheduler",
            "EulerDiscreteScheduler",
        ),
        (
            "scheduler/scheduler_config.json",
            "\"flow_shift\": 3.0",
            "\"flow_shift\": 0.0",
            "flow_shift",
        ),
        (
            "transformer/config.json",
            "\"text_dim\": 32",
            "\"text_dim\": 48",
            "text",
        ),
        (
            "transformer/config.json",
            "\"image_dim\": null",
            "\"image_dim\": 1280",
            "CLIP",
        ),
        (
            "model_index.json",
            "\"boundary_ratio\": null",
            "\"boundary_ratio\": 1.5",
            "boundary_ratio",
        ),
        (
            "model_index.json",
            "\"WanPipeline\"",
            "\"WanVACEPipeline\"",
            "another kind of Wan",
        ),
    ] {
        let error = changed(file, from, to);
        assert!(error.contains(said), "{said}: {error}");
    }
}

/// Files of relatives, whose names begin as Wan's do.
#[test]
fn other_kinds_of_wan_are_named() {
    let own = renamed(&weights("wan-tiny", "transformer"), authors_name);
    for (further, said) in [
        ("vace_blocks.0.before_proj.weight", "another kind of Wan"),
        ("blocks.0.cross_attn.k_img.weight", "CLIP"),
    ] {
        let (_root, path) = beside(T2V, "wan.safetensors");
        let mut tensors = own.clone();
        tensors.insert(further.to_owned(), own["blocks.0.cross_attn.k.weight"].clone());
        tensors.insert(
            "vace_patch_embedding.weight".to_owned(),
            own["patch_embedding.weight"].clone(),
        );
        if !further.starts_with("vace") {
            tensors.remove("vace_patch_embedding.weight");
        }
        write(&tensors, &path);
        let error = refused(&path).to_string();
        assert!(error.contains(said), "{error}");
    }
}
