//! Folders and single files.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use gpu::LoadPlan;
use pipelines::{FULL, Model, ModelError, Precision, Preset, Quantization, Unobserved, families};

use crate::device::tolerances;
use crate::given::{edit, folder, from_picture, open, request, single_file};
use crate::numbers::{distance, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

fn refusal(path: &Path) -> String {
    match families().open(path, &F32) {
        Ok(model) => panic!("opened as {}", model.family()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_single_file_is_the_same_model() {
    let (folder, root) = (folder(), single_file(&[]));
    let file = root.path().join("model.safetensors");
    let (one, other) = (open(folder.path(), &F32), open(&file, &F32));
    for request in [request(), from_picture()] {
        let latent =
            |opened: &OpenModel| on_cpu(&opened.latent(&request, &mut Unobserved).expect("a latent"));
        let apart = distance(&latent(&other), &latent(&one));
        assert!(apart == 0.0, "{apart:e}");
    }
    // Its projection is transposed, so that the second text encoder is another set of tensors; the others are the same.
    for component in ["unet", "vae", "text_encoder"] {
        assert_eq!(
            bytes(&*one.model, component),
            bytes(&*other.model, component),
            "{component}"
        );
    }
}

/// Both text encoders in the names of transformers, as ComfyUI has them beside other models.
#[test]
fn text_encoders_may_be_in_the_names_of_transformers() {
    let (folder, root) = (folder(), single_file(&[]));
    let file = root.path().join("model.safetensors");
    let mut all: HashMap<String, Tensor> =
        candle_core::safetensors::load(&file, &Device::Cpu).expect("a file");
    all.retain(|name, _| !name.starts_with("conditioner."));
    for (prefix, encoder) in [("clip_l", "text_encoder"), ("clip_g", "text_encoder_2")] {
        let own = tensors(&format!("sdxl-tiny/{encoder}/model.safetensors")).into_iter();
        all.extend(own.map(|(name, tensor)| (format!("text_encoders.{prefix}.transformer.{name}"), tensor)));
    }
    candle_core::safetensors::save(&all, &file).expect("a file");
    let latent = |opened: &OpenModel| on_cpu(&opened.latent(&request(), &mut Unobserved).expect("a latent"));
    let apart = distance(&latent(&open(&file, &F32)), &latent(&open(folder.path(), &F32)));
    assert!(apart == 0.0, "{apart:e}");
}

fn bytes(model: &dyn Model, component: &str) -> u64 {
    let plan: &LoadPlan = model.load_plan(component).expect("a plan");
    plan.bytes().0
}

#[test]
fn a_unet_alone_takes_the_other_components_of_its_base() {
    let root = tempfile::tempdir().expect("a folder");
    crate::open_model::copy(
        &crate::numbers::fixtures().join("sdxl-tiny"),
        &root.path().join("base"),
    );
    let file = root.path().join("alone.safetensors");
    let unet = "base/unet/diffusion_pytorch_model.safetensors";
    std::fs::copy(root.path().join(unet), &file).expect("a file");
    let (one, other) = (open(&root.path().join("base"), &F32), open(&file, &F32));
    let latent = |opened: &OpenModel| on_cpu(&opened.latent(&request(), &mut Unobserved).expect("a latent"));
    assert!(distance(&latent(&other), &latent(&one)) == 0.0);
}

#[test]
fn a_single_file_says_what_it_predicts() {
    let plain = single_file(&[]);
    let latent = |root: &Path| {
        let opened = open(&root.join("model.safetensors"), &F32);
        on_cpu(&opened.latent(&request(), &mut Unobserved).expect("a latent"))
    };
    let epsilon = latent(plain.path());
    let velocity = latent(single_file(&["v_pred"]).path());
    let zero = latent(single_file(&["v_pred", "ztsnr"]).path());
    assert!(distance(&velocity, &epsilon) > 1e-2 && distance(&zero, &velocity) > 1e-2);

    std::fs::write(
        plain.path().join("model.moored.json"),
        r#"{"base": "base", "prediction_type": "v_prediction"}"#,
    )
    .expect("a sidecar");
    let declared = latent(plain.path());
    assert!(distance(&declared, &velocity) < tolerances().component);
}

#[test]
fn other_models_and_unsupported_settings_are_refused_by_name() {
    for (file, change, told) in [
        (
            "model_index.json",
            (|value| value["requires_aesthetics_score"] = true.into()) as fn(&mut serde_json::Value),
            "refiner",
        ),
        (
            "model_index.json",
            |value| value["_class_name"] = "StableDiffusionXLControlNetPipeline".into(),
            "StableDiffusionXLControlNetPipeline",
        ),
        (
            "unet/config.json",
            |value| value["addition_embed_type"] = serde_json::Value::Null,
            "text_time",
        ),
        (
            "unet/config.json",
            |value| value["in_channels"] = 8.into(),
            "8 channels",
        ),
        (
            "unet/config.json",
            |value| value["time_cond_proj_dim"] = 256.into(),
            "time_cond_proj_dim",
        ),
        (
            "unet/config.json",
            |value| value["attention_head_dim"] = vec![1, 2].into(),
            "resolutions",
        ),
        (
            "scheduler/scheduler_config.json",
            |value| value["_class_name"] = "LCMScheduler".into(),
            "LCMScheduler",
        ),
        (
            "text_encoder_2/config.json",
            |value| value["projection_dim"] = 15.into(),
            "projection",
        ),
    ] {
        let folder = folder();
        edit(folder.path(), file, change);
        let refused = refusal(folder.path());
        assert!(refused.contains(told), "{file}: {refused}");
    }
    let root = single_file(&["conditioner.embedders.0.model.ln_final.weight"]);
    assert!(refusal(&root.path().join("model.safetensors")).contains("refiner"));
}

#[test]
fn a_missing_tensor_is_named() {
    let folder = folder();
    let path = folder.path().join("unet/diffusion_pytorch_model.safetensors");
    let mut weights = crate::numbers::tensors("sdxl-tiny/unet/diffusion_pytorch_model.safetensors");
    weights.remove("mid_block.attentions.0.proj_in.bias");
    candle_core::safetensors::save(&weights, &path).expect("a file");
    match families().open(folder.path(), &F32).map(|_| ()) {
        Err(ModelError::Damaged { problem, .. }) => {
            assert!(
                problem.contains("mid_block.attentions.0.proj_in.bias"),
                "{problem}"
            );
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_unet_may_be_quantized_at_load() {
    let folder = folder();
    let quantized: Precision = Precision {
        quantization: Quantization::of(Preset::named(FULL).expect("a preset"), [("unet", "int8")])
            .expect("formats"),
        ..F32
    };
    let (whole, quantized) = (open(folder.path(), &F32), open(folder.path(), &quantized));
    assert!(bytes(&*quantized.model, "unet") < bytes(&*whole.model, "unet"));
    let latent = |opened: &OpenModel| on_cpu(&opened.latent(&request(), &mut Unobserved).expect("a latent"));
    let apart = distance(&latent(&quantized), &latent(&whole));
    println!("int8: {apart:.2e}");
    assert!(apart > 0.0 && apart < 0.2, "{apart:e}");
}
