//! One model in every layout, in other formats, and with an adapter.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use gpu::WeightFormat;
use pipelines::ace_step::AceStepModel;
use pipelines::{
    AdapterFile, AdapterUse, AudioTask, ModelError, Precision, Preset, Quantization, StrengthCurve,
    Unobserved, Values, families,
};
use serde_json::json;
use tempfile::TempDir;

use crate::given::{folder, new_track, of_source, open};
use crate::numbers::{distance, fixtures, json as fixture, tensors};
use crate::open_model::{F32, OpenModel, copy, on_cpu};

/// The values of a cover by a model: a cover uses every component.
fn cover(opened: &OpenModel) -> Values {
    let request = of_source(AudioTask::Cover);
    opened.sampled(&request, &mut Unobserved).expect("a latent")
}

/// The authors' name of a tensor of a component of the fixture.
fn original(prefix: &str, name: &str) -> String {
    if name == "null_condition_emb" {
        return name.to_owned();
    }
    let pairs = [
        ("proj_in_conv.", "proj_in.1."),
        ("proj_out_conv.", "proj_out.1."),
        (".to_q.", ".q_proj."),
        (".to_k.", ".k_proj."),
        (".to_v.", ".v_proj."),
        (".to_out.0.", ".o_proj."),
        (".norm_q.", ".q_norm."),
        (".norm_k.", ".k_norm."),
    ];
    let renamed = pairs
        .iter()
        .fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
    format!("{prefix}{renamed}")
}

/// The tensors of the authors' file, which has none of silence.
fn authors_tensors() -> HashMap<String, Tensor> {
    let mut all = HashMap::new();
    for (component, prefix) in [
        ("transformer", "decoder."),
        ("condition_encoder", "encoder."),
        ("audio_tokenizer", "tokenizer."),
        ("audio_token_detokenizer", "detokenizer."),
    ] {
        let path = format!("ace-tiny/{component}/diffusion_pytorch_model.safetensors");
        all.extend(
            tensors(&path)
                .into_iter()
                .map(|(name, tensor)| (original(prefix, &name), tensor)),
        );
    }
    all.remove("encoder.silence_latent").expect("silence");
    all
}

/// Writes silence, the autoencoder, the text encoder and its tokenizer as the authors have them.
fn write_companions(root: &Path, silence: &Path) {
    std::fs::copy(fixtures().join("ace-tiny/expected/silence_latent.pt"), silence).expect("a file");
    copy(&fixtures().join("ace-tiny/vae"), &root.join("vae"));
    let qwen = root.join("Qwen3-Embedding-0.6B");
    copy(&fixtures().join("ace-tiny/text_encoder"), &qwen);
    copy(&fixtures().join("ace-tiny/tokenizer"), &qwen);
}

/// The authors' folder: its root, and that of the model in it.
fn authors_folder() -> (TempDir, PathBuf) {
    let root = TempDir::new().expect("a folder");
    let model = root.path().join("acestep-v15-turbo");
    std::fs::create_dir(&model).expect("a folder");
    let all = authors_tensors();
    candle_core::safetensors::save(&all, model.join("model.safetensors")).expect("a file");
    let mut config: serde_json::Value = fixture("ace-tiny/transformer/config.json");
    config["architectures"] = json!(["AceStepConditionGenerationModel"]);
    config["model_type"] = json!("acestep");
    // Layers of the encoders have another window in the fixture, which the authors' have not.
    config["sliding_window"] = json!(2);
    std::fs::write(model.join("config.json"), config.to_string()).expect("a file");
    write_companions(root.path(), &model.join("silence_latent.pt"));
    (root, model)
}

/// The fixture with the same window in all layers.
fn diffusers_folder() -> TempDir {
    let folder = folder(false);
    for component in ["condition_encoder", "audio_tokenizer", "audio_token_detokenizer"] {
        let path = folder.path().join(component).join("config.json");
        crate::given::edit(&path, "sliding_window", 2.into());
    }
    folder
}

#[test]
fn the_authors_layouts_make_the_same_tracks() {
    let diffusers = diffusers_folder();
    let expected = cover(&open(diffusers.path(), &F32));
    let (root, model) = authors_folder();
    for path in [root.path(), model.as_path()] {
        let found = cover(&open(path, &F32));
        assert_eq!(found["latent"], expected["latent"], "{}", path.display());
    }
    std::fs::remove_file(model.join("silence_latent.pt")).expect("a file");
    let error = families().open(&model, &F32).err().expect("a refusal");
    assert!(matches!(error, ModelError::Unsupported { .. }));
    assert!(error.to_string().contains("silence_latent.pt"), "{error}");
}

#[test]
fn a_single_file_for_comfyui_takes_its_companions_beside_it() {
    let root = TempDir::new().expect("a folder");
    let models = root.path().join("diffusion_models");
    std::fs::create_dir(&models).expect("a folder");
    let file = models.join("acestep_v1.5_turbo.safetensors");
    let all = authors_tensors();
    let write = |rename: &dyn Fn(&str) -> String| {
        let all = all.iter().map(|(name, tensor)| (rename(name), tensor.clone()));
        candle_core::safetensors::save(&all.collect::<HashMap<_, _>>(), &file).expect("a file");
    };
    write(&|name| format!("model.diffusion_model.{name}"));
    write_companions(root.path(), &models.join("silence_latent.pt"));
    let model = families().open(&file, &F32).expect("a sound model");
    assert_eq!(model.defaults().steps, 8, "its name says turbo");
    // Windows of 128 are those of the published models: here all layers see everything.
    let opened = OpenModel::of(model);
    let expected = cover(&opened)["latent"].clone();
    // Under the names of other programs it is the same.
    let in_diffusers = |name: &str| {
        name.replace(".q_proj.", ".to_q.")
            .replace(".o_proj.", ".to_out.0.")
            .replace(".k_norm.weight", ".norm_k.scale")
            .replace("proj_in.1.", "proj_in_conv.")
    };
    let under = |prefix: &'static str| move |name: &str| format!("{prefix}{name}");
    let renamings: [&dyn Fn(&str) -> String; 4] = [
        &in_diffusers,
        &under("diffusion_model."),
        &under("module."),
        &under("model._orig_mod."),
    ];
    for rename in renamings {
        write(rename);
        let found = cover(&OpenModel::of(
            families().open(&file, &F32).expect("a sound model"),
        ));
        assert_eq!(found["latent"], expected);
    }
    let latent = on_cpu(&expected);
    let finite = latent.abs().and_then(|latent| latent.max_all());
    assert!(finite.and_then(|most| most.to_scalar::<f32>()).expect("a number") < 100.0);
}

#[test]
fn formats_at_load_make_about_the_same_tracks() {
    let folder = folder(false);
    let request = new_track();
    let full = open(folder.path(), &F32);
    let expected = full.sampled(&request, &mut Unobserved).expect("a latent");
    let expected = on_cpu(&expected["latent"]);
    let components = ["transformer", "condition_encoder", "text_encoder"];
    for (name, tolerance) in [("int8", 0.1), ("fp8", 0.4), ("nf4", 0.8)] {
        let asked = components.map(|component| (component, name));
        let precision = Precision {
            dtype: DType::F32,
            quantization: Quantization::of(Preset::Full, asked).expect("a quantization"),
        };
        let opened = open(folder.path(), &precision);
        let model = &opened.model;
        let format: WeightFormat = name.parse().expect("a format");
        for component in components {
            assert_eq!(model.format_of(component), Some(format), "{component}");
        }
        assert_eq!(model.format_of("vae"), None);
        let values = opened.sampled(&request, &mut Unobserved).expect("a latent");
        let apart = distance(&on_cpu(&values["latent"]), &expected);
        println!("{name}: {apart:.2e}");
        assert!(apart > 1e-6 && apart < tolerance, "{name}: {apart:e}");
    }
}

/// A folder of peft with an adapter of one layer in the authors' names; its alpha is in its configuration alone.
fn adapter(alpha: f64) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    let layer = "base_model.model.layers.1.self_attn.q_proj";
    let ones = |shape: (usize, usize)| {
        let count = shape.0 * shape.1;
        let numbers: Vec<f32> = (0..count).map(|i| 0.05 * (1.0 + (i % 7) as f32)).collect();
        Tensor::from_vec(numbers, shape, &Device::Cpu).expect("numbers")
    };
    let pair = HashMap::from([
        (format!("{layer}.lora_A.weight"), ones((2, 24))),
        (format!("{layer}.lora_B.weight"), ones((32, 2))),
    ]);
    candle_core::safetensors::save(&pair, folder.path().join("adapter_model.safetensors")).expect("a file");
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q_proj"]});
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).expect("a file");
    folder
}

#[test]
fn an_adapter_of_peft_has_the_alpha_of_its_configuration() {
    let base = folder(false);
    let adapted = |alpha: f64, strength: f32| {
        let adapter = adapter(alpha);
        let model = AceStepModel::open(base.path(), &F32)
            .expect("a sound model")
            .expect("ACE-Step");
        let model = model
            .adapted(&[AdapterFile {
                name: "one".to_owned(),
                path: adapter.path().to_owned(),
                kind: pipelines::AdapterKind::Lora,
                ignores_unknown: false,
            }])
            .expect("an adapter");
        let opened = OpenModel::of(Arc::new(model));
        let mut request = new_track();
        request.adapters = vec![AdapterUse {
            name: "one".to_owned(),
            strength: StrengthCurve::constant(strength).expect("a strength"),
            text_strength: 0.0,
        }];
        let values = opened.sampled(&request, &mut Unobserved).expect("a latent");
        on_cpu(&values["latent"])
    };
    let plain = adapted(4.0, 0.0);
    let (twice, once) = (adapted(4.0, 1.0), adapted(2.0, 1.0));
    assert!(distance(&twice, &plain) > 1e-3, "it changes the track");
    assert!(distance(&twice, &once) > 1e-4, "alpha counts");
    assert!(distance(&adapted(2.0, 2.0), &twice) < 1e-6, "as strength does");
}
