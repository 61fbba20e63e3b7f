//! LoRAs of the UNet and of both text encoders, in the names of diffusers and of kohya.

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use pipelines::{
    AdapterFile, AdapterKind, AdapterUse, Image, Medium, Model, ModelError, Request, StrengthCurve,
    Unobserved, families,
};
use serde::Deserialize;

use crate::device::tolerances;
use crate::numbers::{distance, fixtures, json, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

#[derive(Deserialize)]
struct Expected {
    prompt: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    file: Option<String>,
    strength: f32,
}

fn file(path: &Path) -> AdapterFile {
    AdapterFile {
        name: "a".to_owned(),
        path: path.to_owned(),
        kind: AdapterKind::Lora,
        ignores_unknown: false,
    }
}

fn of_fixture(name: &str) -> AdapterFile {
    file(&fixtures().join("sdxl-lora-tiny").join(name))
}

fn with(files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
    families()
        .open(&fixtures().join("sdxl-tiny"), &F32)
        .expect("a model")
        .with_adapters(files)
}

fn request(prompt: &str, strength: Option<f32>) -> Request {
    let uses = strength.map(|strength| AdapterUse {
        name: "a".to_owned(),
        strength: StrengthCurve::constant(strength).expect("a strength"),
        text_strength: strength,
    });
    Request {
        prompt: prompt.to_owned(),
        negative_prompt: Some(String::new()),
        true_guidance: 5.0,
        seed: 7,
        adapters: uses.into_iter().collect(),
        ..Request::of(Medium::Image(Image::of(48, 32)), 3, 0.0, 225)
    }
}

#[test]
fn adapted_pipelines_equal_the_references() {
    let Expected { prompt, cases } = json("sdxl-lora-tiny/expected.json");
    let expected = tensors("sdxl-lora-tiny/expected.safetensors");
    for case in cases {
        let files: Vec<AdapterFile> = case.file.iter().map(|name| of_fixture(name)).collect();
        let strength = case.file.is_some().then_some(case.strength);
        let opened = OpenModel::of(with(&files).expect("a model"));
        let request = request(&prompt, strength);
        let latent = on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"));
        let apart = distance(&latent, &expected[&format!("{}.latent", case.name)]);
        println!("{}: {apart:.2e}", case.name);
        assert!(apart < tolerances().pipeline, "{}: {apart:e}", case.name);
    }
}

#[test]
fn every_spelling_changes_the_same_layers() {
    let Expected { prompt, .. } = json("sdxl-lora-tiny/expected.json");
    let latent = |name: &str| {
        let opened = OpenModel::of(with(&[of_fixture(name)]).expect("a model"));
        on_cpu(
            &opened
                .latent(&request(&prompt, Some(1.0)), &mut Unobserved)
                .expect("a latent"),
        )
    };
    let first = latent("diffusers-peft.safetensors");
    for other in ["kohya-ldm.safetensors", "kohya-diffusers.safetensors"] {
        let apart = distance(&latent(other), &first);
        assert!(apart < 1e-6, "{other}: {apart:e}");
    }
}

#[test]
fn layers_of_text_encoders_change_the_encoded_text_alone() {
    let model = with(&[of_fixture("kohya-texts.safetensors")]).expect("a model");
    let reports = model.adapters();
    let [report] = reports.as_slice() else {
        panic!("one adapter")
    };
    let layers: Vec<(&str, usize)> = report
        .layers
        .iter()
        .map(|(name, count)| (name.as_str(), *count))
        .collect();
    assert_eq!(layers, [("text_encoder", 3), ("text_encoder_2", 3), ("unet", 8)]);
    let request = request("a red circle", Some(0.5));
    let stages = model.plan(&request).expect("a plan");
    assert_eq!(
        stages[0].components,
        [
            "text_encoder",
            "text_encoder_2",
            "adapter:a:text_encoder",
            "adapter:a:text_encoder_2"
        ]
    );
    assert!(stages[1].components.contains(&"adapter:a:unet".to_owned()));
}

#[test]
fn convolutions_of_an_adapter_equal_the_references_in_every_spelling() {
    let folder = fixtures().join("sdxl-convolution-lora-tiny");
    let Expected { prompt, cases } = json("sdxl-convolution-lora-tiny/expected.json");
    let expected = tensors("sdxl-convolution-lora-tiny/expected.safetensors");
    for name in ["kohya.safetensors", "ldm.safetensors", "peft.safetensors"] {
        let model = with(&[file(&folder.join(name))]).expect("a model");
        assert_eq!(model.adapters()[0].layers["unet"], 11, "{name}");
        let opened = OpenModel::of(model);
        for case in &cases {
            let request = request(&prompt, Some(case.strength));
            let latent = on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"));
            let apart = distance(&latent, &expected[&format!("{}.latent", case.name)]);
            println!("{name}, {}: {apart:.2e}", case.name);
            assert!(apart < tolerances().pipeline, "{name}, {}: {apart:e}", case.name);
        }
    }
}

#[test]
fn convolutions_are_off_at_a_strength_of_zero_and_add_up() {
    let kohya = fixtures().join("sdxl-convolution-lora-tiny/kohya.safetensors");
    let second = AdapterFile {
        name: "b".to_owned(),
        ..file(&kohya)
    };
    let opened = OpenModel::of(with(&[file(&kohya), second]).expect("a model"));
    let latent = |strengths: &[(&str, f32)]| {
        let uses = strengths.iter().map(|(name, strength)| AdapterUse {
            name: (*name).to_owned(),
            strength: StrengthCurve::constant(*strength).expect("a strength"),
            text_strength: *strength,
        });
        let request = Request {
            adapters: uses.collect(),
            ..request("a red circle", None)
        };
        opened.latent(&request, &mut Unobserved).expect("a latent")
    };
    assert_eq!(latent(&[("a", 0.0)]), latent(&[]));
    let once = on_cpu(&latent(&[("a", 0.75)]));
    let twice = on_cpu(&latent(&[("a", 0.5), ("b", 0.25)]));
    let apart = distance(&twice, &once);
    assert!(apart < tolerances().pipeline, "{apart:e}");
}

#[test]
fn convolutions_of_another_size_are_refused_by_name() {
    let root = tempfile::tempdir().expect("a folder");
    let path = root.path().join("locon.safetensors");
    let layer = "lora_unet_input_blocks_1_0_in_layers_2";
    for (down, up, expected) in [
        (&[2, 8, 1, 1][..], &[8, 2, 1, 1][..], "[rank, 8, 3, 3]"),
        (&[2, 8, 3], &[8, 2, 1, 1], "[rank, 8, 3, 3]"),
        (&[2, 9, 3, 3], &[8, 2, 1, 1], "[rank, 8, 3, 3]"),
        (&[2, 8, 3, 3], &[8, 2, 3, 3], "[8, 2]"),
        (&[2, 8, 3, 3], &[8, 3, 1, 1], "[8, 2]"),
    ] {
        let mut weights = tensors("sdxl-lora-tiny/kohya-ldm.safetensors");
        let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("numbers");
        weights.insert(format!("{layer}.lora_down.weight"), zeros(down));
        weights.insert(format!("{layer}.lora_up.weight"), zeros(up));
        candle_core::safetensors::save(&weights, &path).expect("a file");
        let refused = with(&[file(&path)])
            .map(|_| ())
            .expect_err("a convolution")
            .to_string();
        assert!(refused.contains(layer) && refused.contains(expected), "{refused}");
    }
}
