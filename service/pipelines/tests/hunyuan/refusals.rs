//! Damaged and unsupported checkpoints: each is refused when it is opened, with a message that names the defect.

use std::path::Path;

use pipelines::ModelError;
use tempfile::TempDir;

use crate::checkpoints::refused;
use crate::given::{film_folder, section_folder};
use crate::numbers::tensors;
use crate::open_model::F32;
use crate::spellings::{FILM, framepack_repositories, single_file, write};

fn says(path: &Path, words: &[&str]) -> ModelError {
    let error = refused(path, &F32);
    for word in words {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
    error
}

#[test]
fn a_truncated_or_missing_shard_is_refused() {
    let (_root, folder) = framepack_repositories("FramePackI2V_HY");
    let shard = folder.join("diffusion_pytorch_model-00002-of-00002.safetensors");
    let bytes = std::fs::read(&shard).expect("a file");
    for kept in [bytes.len() - 1, 100, 4, 0] {
        std::fs::write(&shard, &bytes[..kept]).expect("a file");
        let error = says(&folder, &["00002-of-00002"]);
        assert!(matches!(error, ModelError::Incomplete { .. }), "{error}");
    }
    std::fs::remove_file(&shard).expect("a file");
    let error = says(&folder, &["00002-of-00002"]);
    assert!(matches!(error, ModelError::Incomplete { .. }), "{error}");
}

#[test]
fn missing_parts_are_named() {
    for part in [
        "vae",
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
        "scheduler",
        "image_encoder",
        "feature_extractor",
        "transformer",
    ] {
        let whole = section_folder(false);
        std::fs::remove_dir_all(whole.path().join(part)).expect("a folder");
        let error = says(whole.path(), &[part]);
        assert!(matches!(error, ModelError::Incomplete { .. }), "{error}");
    }
    let root = TempDir::new().expect("a folder");
    let file = root.path().join("hunyuan.safetensors");
    write(&tensors(FILM), &file);
    let error = says(&file, &["0 folders beside it", "hunyuan.moored.json"]);
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
}

#[test]
fn missing_and_unknown_tensors_are_named() {
    let mut some = tensors(FILM);
    let name = "single_transformer_blocks.1.proj_mlp.weight";
    let weight = some.remove(name).expect("a weight");
    let (_root, file) = single_file("one.safetensors", &some);
    says(&file, &[name, "missing"]);
    some.insert(
        name.to_owned(),
        weight.t().and_then(|t| t.contiguous()).expect("a tensor"),
    );
    write(&some, &file);
    says(&file, &[name, "is expected"]);
    some.insert(name.to_owned(), weight.clone());
    some.insert("transformer_blocks.0.attn.gate.weight".to_owned(), weight);
    write(&some, &file);
    says(
        &file,
        &["attn.gate.weight", "no part of a HunyuanVideo transformer"],
    );
}

#[test]
fn parts_that_do_not_match_and_odd_configurations_are_refused() {
    for (part, field, value, words) in [
        ("text_encoder", "hidden_size", "64", &["LLaMA's width: 64"][..]),
        ("text_encoder", "num_hidden_layers", "2", &["2 layers"]),
        ("text_encoder", "hidden_act", "\"gelu\"", &["silu"]),
        ("text_encoder", "num_key_value_heads", "3", &["text_encoder"]),
        ("text_encoder_2", "hidden_size", "64", &["CLIP's width: 64"]),
        (
            "text_encoder_2",
            "max_position_embeddings",
            "8",
            &["position_embedding"],
        ),
        ("vae", "latent_channels", "8", &["latent channels: 8"]),
        ("vae", "temporal_compression_ratio", "8", &["8 frames"]),
        (
            "image_encoder",
            "hidden_size",
            "64",
            &["picture encoder's width: 64"],
        ),
        ("image_encoder", "image_size", "56", &["processor's width: 28"]),
        (
            "transformer",
            "qk_norm",
            "\"layer_norm\"",
            &["qk_norm is layer_norm"],
        ),
        ("transformer", "patch_size", "1", &["patch_size is 1"]),
        (
            "transformer",
            "image_condition_type",
            "\"latent_concat\"",
            &["image_condition_type"],
        ),
        (
            "transformer",
            "has_clean_x_embedder",
            "false",
            &["FramePack has both"],
        ),
        ("transformer", "rope_axes_dim", "[4, 6, 4]", &["do not add up"]),
        (
            "transformer",
            "num_layers",
            "4000000000",
            &["beyond the supported maximum"],
        ),
        (
            "transformer",
            "num_layers",
            "2",
            &["transformer_blocks.1", "missing"],
        ),
        ("transformer", "num_attention_heads", "-1", &["cannot be parsed"]),
        ("transformer", "in_channels", "[]", &["cannot be parsed"]),
    ] {
        let whole = section_folder(false);
        let path = whole.path().join(part).join("config.json");
        let text = std::fs::read_to_string(&path).expect("a configuration");
        let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        config[field] = serde_json::from_str(value).expect("a value");
        std::fs::write(&path, config.to_string()).expect("a configuration");
        says(whole.path(), words);
    }
}

#[test]
fn other_pipelines_of_the_family_are_named() {
    let whole = film_folder();
    let index = whole.path().join("model_index.json");
    let text = std::fs::read_to_string(&index).expect("an index");
    let other = text.replace("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline");
    std::fs::write(&index, other).expect("an index");
    let error = says(whole.path(), &["it is a HunyuanVideoImageToVideoPipeline"]);
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
}
