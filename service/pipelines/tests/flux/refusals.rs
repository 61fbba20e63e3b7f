//! Checkpoints that are refused when opened, with the name of the file.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use gpu::LoadPlan;
use pipelines::autoencoders::kl::{VaeConfig, diffusers_name_of_bfl};
use pipelines::flux::FluxModel;
use pipelines::text::clip::ClipConfig;
use pipelines::text::t5::T5Config;
use pipelines::{Model, ModelError, Unobserved, Values, families};

use crate::checkpoints::{set, write_json};
use crate::device::crate_folder;
use crate::given::{copy_of, open, request};
use crate::numbers::tensors;
use crate::open_model::F32;

fn refusal(path: &Path) -> ModelError {
    match FluxModel::open(path, &F32) {
        Err(error) => error,
        Ok(model) => panic!("opened: {}", model.is_some()),
    }
}

/// Asserts that a folder is damaged, and that the error names this file.
fn assert_damaged(folder: &Path, file: &str) {
    let error = refusal(folder);
    let named = matches!(&error, ModelError::Damaged { path, .. } | ModelError::Incomplete { path, .. } if path.ends_with(file));
    assert!(named, "{file}: {error}");
}

#[test]
fn a_malformed_tokenizer_is_damaged() {
    let cases = [
        ("tokenizer_2/tokenizer.json", r#"{"model": 7}"#),
        ("tokenizer_2/tokenizer.json", r#"{"model": []}"#),
        ("tokenizer_2/tokenizer.json", r#"{"model": {"vocab": 7}}"#),
        (
            "tokenizer_2/tokenizer.json",
            r#"{"added_tokens": 7, "normalizer": 7}"#,
        ),
        ("tokenizer_2/tokenizer.json", "{}"),
        ("tokenizer_2/tokenizer.json", "[]"),
        ("tokenizer_2/tokenizer.json", "7"),
        ("tokenizer_2/tokenizer_config.json", "[]"),
        ("tokenizer_2/special_tokens_map.json", "[]"),
        ("tokenizer/tokenizer.json", r#"{"model": 7}"#),
        ("tokenizer/tokenizer.json", "[]"),
        ("tokenizer/vocab.json", "[]"),
        ("tokenizer/vocab.json", "7"),
        ("tokenizer/vocab.json", "{}"),
        ("tokenizer/vocab.json", r#"{"a": "b"}"#),
        ("tokenizer/merges.txt", "one\n"),
        ("tokenizer/merges.txt", "\u{1}\u{2} \u{3}\u{4}\n"),
        ("tokenizer/tokenizer_config.json", "[]"),
        ("tokenizer/tokenizer_config.json", "7"),
        (
            "tokenizer/tokenizer_config.json",
            r#"{"added_tokens_decoder": {"3": {"content": 7}}}"#,
        ),
    ];
    for (file, content) in cases {
        let folder = copy_of(&["flux-tiny"]);
        std::fs::write(folder.path().join(file), content).expect("a file");
        assert_damaged(folder.path(), file);
    }
    let folder = copy_of(&["flux-tiny"]);
    std::fs::write(folder.path().join("tokenizer/merges.txt"), [0xff, 0xfe]).expect("a file");
    assert_damaged(folder.path(), "tokenizer/merges.txt");
}

#[test]
fn a_configuration_that_is_not_an_object_is_damaged() {
    for file in [
        "model_index.json",
        "moored.json",
        "transformer/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "text_encoder_2/config.json",
        "scheduler/scheduler_config.json",
    ] {
        for content in ["[]", " [7]", "7", "null", ""] {
            let folder = copy_of(&["flux-tiny"]);
            std::fs::write(folder.path().join(file), content).expect("a file");
            assert_damaged(folder.path(), file);
        }
    }
    let folder = copy_of(&["flux-tiny", "flux-tiny-bfl"]);
    let sidecar = "flux-tiny.moored.json";
    write_json(&folder.path().join(sidecar), serde_json::json!(["."]));
    assert_damaged(&folder.path().join("flux-tiny.safetensors"), sidecar);
}

#[test]
fn an_unsupported_pipeline_is_named_with_the_supported_ones() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let said = |class: serde_json::Value| {
        write_json(
            &folder.path().join("model_index.json"),
            serde_json::json!({ "_class_name": class }),
        );
        match families().open(folder.path(), &F32) {
            Err(error @ ModelError::NotAPipeline { .. }) => error.to_string(),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("opened"),
        }
    };
    let text = said("NobodysPipeline".into());
    for words in [
        "NobodysPipeline",
        "FluxPipeline",
        "FluxImg2ImgPipeline",
        "model_index.json",
    ] {
        assert!(text.contains(words), "{text}");
    }
    assert!(!text.contains("neither"), "{text}");
    assert!(said("".into()).contains("names no pipeline"));
}

/// The tensors of a component's file.
type Tensors = HashMap<String, Tensor>;

#[test]
fn every_tensor_is_looked_up_when_a_checkpoint_is_opened() {
    let files = [
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "text_encoder_2/model.safetensors",
    ];
    let folder = copy_of(&["flux-tiny"]);
    for file in files {
        let sound: Tensors = tensors(&format!("flux-tiny/{file}"));
        let mut names: Vec<&String> = sound.keys().collect();
        names.sort();
        let every = if names.len() > 100 { 7 } else { 1 };
        let path = folder.path().join(file);
        for name in names.into_iter().step_by(every) {
            let spoil: [fn(Tensor) -> Option<Tensor>; 3] = [
                |_| None,
                |tensor| Some(Tensor::cat(&[&tensor, &tensor], 0).expect("a tensor")),
                |tensor| Some(tensor.to_dtype(candle_core::DType::I64).expect("a tensor")),
            ];
            for spoil in spoil {
                let mut spoilt = sound.clone();
                let tensor = spoilt.remove(name).expect("the tensor");
                spoilt.extend(spoil(tensor).map(|tensor| (name.clone(), tensor)));
                candle_core::safetensors::save(&spoilt, &path).expect("a file");
                let error = refusal(folder.path());
                let named = matches!(&error, ModelError::Damaged { path, problem }
                    if path.ends_with(file) && problem.contains(&format!("tensor {name} is ")));
                assert!(named, "{file} {name}: {error}");
            }
        }
        candle_core::safetensors::save(&sound, &path).expect("a file");
    }
    assert!(FluxModel::open(folder.path(), &F32).is_ok());
}

#[test]
fn additional_tensors_and_alternative_names_of_encoders_are_accepted() {
    let folder = copy_of(&["flux-tiny"]);
    let rewrite = |file: &str, change: &dyn Fn(&mut Tensors)| {
        let path = folder.path().join(file);
        let mut found = candle_core::safetensors::load(&path, &Device::Cpu).expect("tensors");
        change(&mut found);
        candle_core::safetensors::save(&found, &path).expect("a file");
    };
    let bytes = || -> Vec<u64> {
        let opened = open(folder.path());
        let plan = opened.stage(&request(), "encode_text");
        let text = opened.run(&plan, 0, &request(), &Values::new(), &mut Unobserved);
        assert!(text.is_ok(), "{:?}", text.err());
        opened.model.components().iter().map(|c| c.bytes.0).collect()
    };
    let usual = bytes();
    let (clip, t5) = (
        "text_encoder/model.safetensors",
        "text_encoder_2/model.safetensors",
    );
    let some = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu).expect("a tensor");
    rewrite(clip, &|found| {
        found.insert("text_projection.weight".to_owned(), some.clone());
        found.insert(
            "text_model.embeddings.position_ids".to_owned(),
            Tensor::new(&[[0i64, 1]], &Device::Cpu).expect("a tensor"),
        );
    });
    rewrite(t5, &|found| {
        found.insert("lm_head.weight".to_owned(), some.clone());
        found.insert(
            "encoder.embed_tokens.weight".to_owned(),
            found["shared.weight"].clone(),
        );
    });
    assert_eq!(bytes(), usual, "what is not needed is not loaded");

    // As transformers 5 saves CLIP, and a T5 whose embedding has only its other name.
    rewrite(clip, &|found| {
        *found = found
            .drain()
            .map(|(name, tensor)| (name.replace("text_model.", ""), tensor))
            .collect();
    });
    rewrite(t5, &|found| {
        found.remove("shared.weight");
    });
    assert_eq!(bytes(), usual);
}

#[test]
fn published_companions_have_their_published_sizes() {
    let count = |shapes: Vec<(String, Vec<usize>)>| -> usize {
        shapes
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum()
    };
    let clip = ClipConfig {
        hidden_size: 768,
        intermediate_size: 3072,
        num_attention_heads: 12,
        ..ClipConfig::default()
    };
    let t5 = T5Config {
        d_model: 4096,
        d_ff: 10240,
        num_layers: 24,
        num_heads: 64,
        feed_forward_proj: "gated-gelu".to_owned(),
        ..T5Config::default()
    };
    assert_eq!(count(VaeConfig::flux().tensor_shapes()), 83_819_683);
    assert_eq!(count(clip.tensor_shapes(&|_| true)), 123_060_480);
    assert_eq!(count(t5.tensor_shapes(&|_| true)), 4_762_310_656);
    assert!(VaeConfig::flux().check().is_ok() && clip.check().is_ok() && t5.check().is_ok());
}

#[test]
fn implausible_sizes_are_refused() {
    let enormous = serde_json::json!(1u64 << 62);
    for (file, keys) in [
        (
            "vae/config.json",
            ["layers_per_block", "latent_channels", "in_channels"],
        ),
        (
            "text_encoder/config.json",
            ["num_hidden_layers", "intermediate_size", "vocab_size"],
        ),
        ("text_encoder_2/config.json", ["num_layers", "d_kv", "num_heads"]),
    ] {
        for key in keys {
            let folder = copy_of(&["flux-tiny"]);
            set(&folder.path().join(file), key, enormous.clone());
            let error = refusal(folder.path());
            let named = matches!(&error, ModelError::Unsupported { path, .. } if path.ends_with(file));
            assert!(named, "{key}: {error}");
        }
    }
}

/// Writes a sparse safetensors file of zeros.
fn write_hollow(path: &Path, dtype: &str, width: usize, shapes: &[(String, Vec<usize>)]) {
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in shapes {
        let begin = end;
        end += shape.iter().product::<usize>() * width;
        let entry = serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
        header.insert(name.clone(), entry);
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    std::fs::write(path, &bytes).expect("a file");
    let file = std::fs::File::options().write(true).open(path).expect("a file");
    file.set_len((bytes.len() + end) as u64).expect("a length");
}

#[test]
fn an_error_contains_the_path_once() {
    let folder = copy_of(&["flux-tiny"]);
    let path = folder.path().join("text_encoder_2/model.safetensors");
    write_hollow(&path, "I16", 2, &[("shared.weight".to_owned(), vec![4, 2])]);
    let error = refusal(folder.path());
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
    let text = error.to_string();
    assert_eq!(text.matches("model.safetensors").count(), 1, "{text}");
    assert!(text.contains("shared.weight is stored as I16"), "{text}");
}

#[test]
fn invalid_defaults_are_damage() {
    let folder = copy_of(&["flux-tiny"]);
    let file = folder.path().join("moored.json");
    for (key, value) in [
        ("steps", serde_json::json!(0)),
        ("steps", 201.into()),
        ("guidance", serde_json::json!(-1.0)),
        ("guidance", serde_json::json!(1e39)),
        ("true_guidance", serde_json::json!(-1.0)),
        ("max_sequence_length", 513.into()),
        ("width", 1000.into()),
        ("height", 8192.into()),
    ] {
        write_json(&file, serde_json::json!({ key: value }));
        assert_damaged(folder.path(), "moored.json");
        assert!(refusal(folder.path()).to_string().contains(key), "{key}");
    }
    write_json(&file, serde_json::json!({"steps": 200, "width": 4096}));
    assert!(FluxModel::open(folder.path(), &F32).is_ok());
}

/// BFL's name and shape of a tensor with a diffusers name.
fn of_bfl(name: &str, mut shape: Vec<usize>) -> (String, Vec<usize>) {
    let mut bfl = name.replace("conv_norm_out", "norm_out");
    for (theirs, ours) in [
        ("mid_block.resnets.0", "mid.block_1"),
        ("mid_block.resnets.1", "mid.block_2"),
        ("mid_block.attentions.0", "mid.attn_1"),
        ("group_norm", "norm"),
        ("to_out.0", "proj_out"),
        ("to_", ""),
        ("down_blocks.", "down."),
        ("downsamplers.0", "downsample"),
        ("upsamplers.0", "upsample"),
        ("resnets.", "block."),
        ("conv_shortcut", "nin_shortcut"),
    ] {
        bfl = bfl.replace(theirs, ours);
    }
    for level in 0..4 {
        bfl = bfl.replace(&format!("up_blocks.{level}"), &format!("up.{}", 3 - level));
    }
    if name.contains("attentions") && shape.len() == 2 {
        shape.extend([1, 1]);
    }
    (bfl, shape)
}

#[test]
fn the_autoencoder_of_a_single_file_may_use_bfl_names() {
    let folder = copy_of(&["flux-tiny", "flux-tiny-bfl"]);
    let file = folder.path().join("flux-tiny.safetensors");
    std::fs::remove_dir_all(folder.path().join("vae")).expect("no VAE");
    assert_damaged(&file, "vae/config.json");

    let shapes = VaeConfig::flux().tensor_shapes();
    let renamed: Vec<_> = shapes
        .iter()
        .map(|(name, shape)| of_bfl(name, shape.clone()))
        .collect();
    for ((bfl, _), (name, _)) in renamed.iter().zip(&shapes) {
        assert_eq!(diffusers_name_of_bfl(bfl).as_ref(), Some(name));
    }
    let autoencoder = folder.path().join("ae.safetensors");
    write_hollow(&autoencoder, "BF16", 2, &renamed);
    let open = |file: &Path| FluxModel::open(file, &F32).expect("sound").expect("FLUX");
    let model = open(&file);
    let Some(LoadPlan::Files(sources)) = model.load_plan("vae") else {
        panic!("no plan")
    };
    let read: Vec<_> = sources
        .iter()
        .map(|source| (source.name.clone(), source.shape.clone()))
        .collect();
    assert_eq!(read, shapes);
    assert_eq!(model.components()[1].bytes.0, 4 * 83_819_683);
    assert_eq!(model.files_of("vae").len(), 1);

    // Beside the file rather than in its base.
    let beside = tempfile::TempDir::new().expect("a folder");
    let moved = beside.path().join("flux-tiny.safetensors");
    std::fs::copy(&file, &moved).expect("a copy");
    write_json(
        &beside.path().join("flux-tiny.moored.json"),
        serde_json::json!({"base": folder.path()}),
    );
    std::fs::rename(&autoencoder, beside.path().join("ae.safetensors")).expect("a move");
    assert!(open(&moved).files_of("vae")[0].path.starts_with(beside.path()));

    // A missing tensor is refused as in any file.
    write_hollow(&beside.path().join("ae.safetensors"), "BF16", 2, &renamed[1..]);
    assert_damaged(&moved, "ae.safetensors");
}

#[test]
fn the_shipped_model_opens() {
    let demo = crate_folder().join("../../demo/model");
    assert!(matches!(FluxModel::open(&demo, &F32), Ok(Some(_))));
}
