//! Z-Image beside Z-Image-Turbo: which of both a checkpoint is, its schedule, and its guidance.

use std::path::Path;

use pipelines::{Field, Image, Mask, Medium, Request, Unobserved, families};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::checkpoints::comfy_folders;
use crate::device::tolerances;
use crate::given::{base_folder, folder, open, request};
use crate::numbers::{distance, init_image, json, tensors};
use crate::open_model::{F32, on_cpu};

/// An entry of `expected/base.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    negative_prompt: String,
    true_guidance: f32,
    cfg_normalization: f64,
    cfg_truncation: f64,
    width: u32,
    height: u32,
    steps: u32,
    seed: u64,
    strength: f32,
    max_sequence_length: u32,
}

/// Writes settings into a model's folder.
fn set(folder: &Path, settings: &Value) {
    std::fs::write(folder.join("moored.json"), settings.to_string()).expect("a file");
}

#[test]
fn guided_pictures_equal_the_references() {
    let expected = tensors("z-image-tiny/expected/base.safetensors");
    let folder = base_folder();
    for case in json::<Vec<Case>>("z-image-tiny/expected/base.json") {
        let name = &case.name;
        set(
            folder.path(),
            &json!({"cfg_normalization": case.cfg_normalization, "cfg_truncation": case.cfg_truncation}),
        );
        let opened = open(folder.path(), &F32);
        let mask = expected.get(&format!("{name}.mask")).map(|grey| Mask {
            width: case.width,
            height: case.height,
            grey: grey
                .flatten_all()
                .and_then(|grey| grey.to_vec1::<u8>())
                .expect("bytes")
                .into(),
        });
        let image = Image {
            init_image: expected.get(&format!("{name}.init")).map(init_image),
            mask,
            ..Image::of(case.width, case.height)
        };
        let request = Request {
            prompt: case.prompt.clone(),
            negative_prompt: Some(case.negative_prompt.clone()),
            true_guidance: case.true_guidance,
            seed: case.seed,
            strength: case.strength,
            ..Request::of(Medium::Image(image), case.steps, 0.0, case.max_sequence_length)
        };
        let latent = on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"));
        let apart = distance(&latent, &expected[&format!("{name}.latent")]);
        println!("{name}: {apart:.2e}");
        assert!(apart < tolerances().pipeline, "{name}: {apart:e}");
    }
}

/// What a default request is sampled with: steps, true guidance and negative prompt.
fn sampled(path: &Path) -> (u32, f32, Option<String>) {
    let model = families().open(path, &F32).expect("a model");
    for field in [Field::TrueGuidance, Field::NegativePrompt] {
        assert!(model.reads().has(field), "{field:?}");
    }
    let defaults = model.defaults();
    assert!(model.plan(&defaults).is_ok());
    (defaults.steps, defaults.true_guidance, defaults.negative_prompt)
}

#[test]
fn a_checkpoint_is_the_base_model_by_its_scheduler_or_by_the_name_of_its_file() {
    let turbo = (8, 1.0, None);
    let base = (50, 5.0, Some(String::new()));
    assert_eq!(sampled(folder().path()), turbo);
    assert_eq!(sampled(base_folder().path()), base);
    let root = tempfile::TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), "");
    assert_eq!(sampled(&file), turbo);
    let renamed = file.with_file_name("z_image_bf16.safetensors");
    std::fs::rename(&file, &renamed).expect("a file");
    assert_eq!(sampled(&renamed), base);

    // The companions are those of Turbo: the shift is that of the base model nevertheless.
    let latent = |path: &Path| {
        let opened = open(path, &F32);
        opened.latent(&request(), &mut Unobserved).expect("a latent")
    };
    let of_base = latent(base_folder().path());
    assert_eq!(latent(&renamed), of_base);
    assert_ne!(latent(folder().path()), of_base);
    // Unless another is written down.
    std::fs::write(renamed.with_extension("moored.json"), r#"{"shift": 3}"#).expect("a file");
    assert_eq!(latent(&renamed), latent(folder().path()));
}

#[test]
fn a_guidance_that_both_do_not_have_is_refused_with_what_to_set_instead() {
    let folder = base_folder();
    let model = families().open(folder.path(), &F32).expect("a model");
    let with_guidance = Request {
        guidance: 4.0,
        ..request()
    };
    let problems = model.plan(&with_guidance).expect_err("guidance");
    assert_eq!(problems[0].field, "guidance");
    assert!(
        problems[0].problem.contains("its guidance is true_guidance"),
        "{problems:?}"
    );
}

#[test]
fn settings_of_guidance_are_bounded_and_a_files_own_come_first() {
    let folder = base_folder();
    for (key, value) in [
        ("cfg_normalization", json!(-1)),
        ("cfg_truncation", json!(1.5)),
        ("cfg_truncation", json!("half")),
    ] {
        set(folder.path(), &json!({key: value}));
        let refused = families().open(folder.path(), &F32).map(|_| ()).expect_err(key);
        assert!(refused.to_string().contains("moored.json"), "{refused}");
    }

    let root = tempfile::TempDir::new().expect("a folder");
    let file = comfy_folders(root.path(), "");
    let guided = Request {
        negative_prompt: Some("a square".to_owned()),
        true_guidance: 5.0,
        ..request()
    };
    let denoise = || {
        let opened = open(&file, &F32);
        let scratch = opened.stage(&guided, "denoise").rungs[0].scratch;
        (
            opened.latent(&guided, &mut Unobserved).expect("a latent"),
            scratch,
        )
    };
    let (free, scratch) = denoise();
    set(
        &root.path().join("diffusion_models/z-image"),
        &json!({"cfg_normalization": 0.9}),
    );
    let (of_folder, of_both) = denoise();
    assert_ne!(of_folder, free);
    // A combination that is made in host memory comes back to the card.
    assert!(of_both > scratch, "{of_both:?} {scratch:?}");
    std::fs::write(file.with_extension("moored.json"), r#"{"cfg_normalization": 0}"#).expect("a file");
    assert_eq!(denoise().0, free);
}
