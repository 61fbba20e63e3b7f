//! The fixtures' tensors as other programs write them: Tencent's names, and GGUF.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use tempfile::TempDir;

use crate::given::{film_folder, section_folder};
use crate::numbers::{numbers, tensors};
use crate::open_model::copy;

pub(crate) const FILM: &str = "hunyuan-tiny/transformer/diffusion_pytorch_model.safetensors";
pub(crate) const FRAMEPACK: &str = "framepack-tiny/transformer/diffusion_pytorch_model.safetensors";

/// Where diffusers' converter (`convert_hunyuan_video_to_diffusers.py`) takes a layer from, and which of the parts that
/// are fused there.
pub(crate) fn tencents_layer(layer: &str) -> (String, usize) {
    let fused = |name: &str| match name {
        "to_k" | "add_k_proj" => 1,
        "to_v" | "add_v_proj" => 2,
        "proj_mlp" => 3,
        _ => 0,
    };
    let parts: Vec<&str> = layer.split('.').collect();
    match parts.as_slice() {
        ["x_embedder", "proj"] => ("img_in.proj".to_owned(), 0),
        ["proj_out"] => ("final_layer.linear".to_owned(), 0),
        ["norm_out", "linear"] => ("final_layer.adaLN_modulation.1".to_owned(), 0),
        ["time_text_embed", embedder, linear] => {
            let name = match (*embedder, *linear) {
                ("timestep_embedder", "linear_1") => "time_in.mlp.0",
                ("timestep_embedder", "linear_2") => "time_in.mlp.2",
                ("guidance_embedder", "linear_1") => "guidance_in.mlp.0",
                ("guidance_embedder", "linear_2") => "guidance_in.mlp.2",
                ("text_embedder", "linear_1") => "vector_in.in_layer",
                _ => "vector_in.out_layer",
            };
            (name.to_owned(), 0)
        }
        ["context_embedder", "proj_in"] => ("txt_in.input_embedder".to_owned(), 0),
        ["context_embedder", "time_text_embed", embedder, linear] => {
            let name = match (*embedder, *linear) {
                ("timestep_embedder", "linear_1") => "txt_in.t_embedder.mlp.0".to_owned(),
                ("timestep_embedder", "linear_2") => "txt_in.t_embedder.mlp.2".to_owned(),
                (_, linear) => format!("txt_in.c_embedder.{linear}"),
            };
            (name, 0)
        }
        [
            "context_embedder",
            "token_refiner",
            "refiner_blocks",
            i,
            rest @ ..,
        ] => {
            let (name, part) = match rest {
                ["attn", "to_out", "0"] => ("self_attn_proj", 0),
                ["attn", projection] => ("self_attn_qkv", fused(projection)),
                ["ff", "net", "0", "proj"] => ("mlp.fc1", 0),
                ["ff", "net", "2"] => ("mlp.fc2", 0),
                ["norm_out", "linear"] => ("adaLN_modulation.1", 0),
                [norm] => (*norm, 0),
                _ => panic!("{layer}"),
            };
            (format!("txt_in.individual_token_refiner.blocks.{i}.{name}"), part)
        }
        ["transformer_blocks", i, rest @ ..] => {
            let (name, part) = match rest {
                ["norm1", "linear"] => ("img_mod.linear", 0),
                ["norm1_context", "linear"] => ("txt_mod.linear", 0),
                ["attn", "to_out", "0"] => ("img_attn_proj", 0),
                ["attn", "to_add_out"] => ("txt_attn_proj", 0),
                ["attn", "norm_q"] => ("img_attn_q_norm", 0),
                ["attn", "norm_k"] => ("img_attn_k_norm", 0),
                ["attn", "norm_added_q"] => ("txt_attn_q_norm", 0),
                ["attn", "norm_added_k"] => ("txt_attn_k_norm", 0),
                ["attn", to] if to.starts_with("to_") => ("img_attn_qkv", fused(to)),
                ["attn", add] => ("txt_attn_qkv", fused(add)),
                ["ff", "net", "0", "proj"] => ("img_mlp.fc1", 0),
                ["ff", "net", "2"] => ("img_mlp.fc2", 0),
                ["ff_context", "net", "0", "proj"] => ("txt_mlp.fc1", 0),
                ["ff_context", "net", "2"] => ("txt_mlp.fc2", 0),
                _ => panic!("{layer}"),
            };
            (format!("double_blocks.{i}.{name}"), part)
        }
        ["single_transformer_blocks", i, rest @ ..] => {
            let (name, part) = match rest {
                ["norm", "linear"] => ("modulation.linear", 0),
                ["attn", "norm_q"] => ("q_norm", 0),
                ["attn", "norm_k"] => ("k_norm", 0),
                ["attn", to] => ("linear1", fused(to)),
                ["proj_mlp"] => ("linear1", 3),
                ["proj_out"] => ("linear2", 0),
                _ => panic!("{layer}"),
            };
            (format!("single_blocks.{i}.{name}"), part)
        }
        _ => (layer.to_owned(), 0), // FramePack's own
    }
}

/// Exchanges the halves of rows: Tencent's last modulation has shift before scale.
pub(crate) fn swapped(tensor: &Tensor) -> Tensor {
    let halves = tensor.chunk(2, 0).expect("halves");
    Tensor::cat(&[&halves[1], &halves[0]], 0).expect("a tensor")
}

/// Tensors of diffusers in Tencent's names.
pub(crate) fn tencents(source: &HashMap<String, Tensor>, prefix: &str) -> HashMap<String, Tensor> {
    let mut fused: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (name, tensor) in source {
        let (layer, kind) = name.rsplit_once('.').expect("a layer");
        let (theirs, part) = tencents_layer(layer);
        let tensor = match layer {
            "norm_out.linear" => swapped(tensor),
            _ => tensor.clone(),
        };
        fused
            .entry(format!("{prefix}{theirs}.{kind}"))
            .or_default()
            .insert(part, tensor);
    }
    let cat = |parts: BTreeMap<usize, Tensor>| {
        let parts: Vec<Tensor> = parts.into_values().collect();
        Tensor::cat(&parts, 0).expect("a tensor")
    };
    fused
        .into_iter()
        .map(|(name, parts)| (name, cat(parts)))
        .collect()
}

pub(crate) fn write(tensors: &HashMap<String, Tensor>, path: &Path) {
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    candle_core::safetensors::save(tensors, path).expect("a file");
}

/// A HunyuanVideo pipeline's folder without the weights of its transformer.
pub(crate) fn base(folder: &Path) {
    copy(film_folder().path(), folder);
    std::fs::remove_file(folder.join("transformer/diffusion_pytorch_model.safetensors")).expect("weights");
}

/// A single file in ComfyUI's folders, with its base beside it.
pub(crate) fn single_file(name: &str, tensors: &HashMap<String, Tensor>) -> (TempDir, PathBuf) {
    let root = TempDir::new().expect("a folder");
    let models = root.path().join("diffusion_models");
    base(&models.join("HunyuanVideo"));
    let file = models.join(name);
    write(tensors, &file);
    (root, file)
}

/// FramePack's own repository (a transformer in two shards) in a folder of this name, with HunyuanVideo and SigLIP beside
/// it, each as published.
pub(crate) fn framepack_repositories(name: &str) -> (TempDir, PathBuf) {
    let root = TempDir::new().expect("a folder");
    let whole = section_folder(false);
    base(&root.path().join("HunyuanVideo"));
    for part in ["image_encoder", "feature_extractor"] {
        copy(
            &whole.path().join(part),
            &root.path().join("flux_redux_bfl").join(part),
        );
    }
    let folder = root.path().join(name);
    let mut shards = [HashMap::new(), HashMap::new()];
    let mut weight_map = BTreeMap::new();
    for (i, (tensor_name, tensor)) in tensors(FRAMEPACK).into_iter().enumerate() {
        let shard = format!("diffusion_pytorch_model-0000{}-of-00002.safetensors", i % 2 + 1);
        weight_map.insert(tensor_name.clone(), shard);
        shards[i % 2].insert(tensor_name, tensor);
    }
    for (i, shard) in shards.iter().enumerate() {
        let shard_name = format!("diffusion_pytorch_model-0000{}-of-00002.safetensors", i + 1);
        write(shard, &folder.join(shard_name));
    }
    let index = serde_json::json!({"weight_map": weight_map}).to_string();
    let config = std::fs::read_to_string(whole.path().join("transformer/config.json")).expect("a file");
    // The class of the published configuration.
    let config = config.replace(
        "HunyuanVideoFramepackTransformer3DModel",
        "HunyuanVideoTransformer3DModelPacked",
    );
    std::fs::write(folder.join("config.json"), config).expect("a file");
    let path = folder.join("diffusion_pytorch_model.safetensors.index.json");
    std::fs::write(path, index).expect("a file");
    (root, folder)
}

/// How a tensor is stored in GGUF.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum InGguf {
    F32,
    F16,
    Bf16,
    Q8_0,
    /// f32 in four dimensions, with the shape in the metadata.
    Reshaped,
}

/// A GGUF file, version 3.
pub(crate) fn write_gguf(
    tensors: &HashMap<String, Tensor>,
    as_stored: impl Fn(&str, &Tensor) -> InGguf,
    path: &Path,
) {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let (mut keys, mut infos, mut data) = (vec![], Vec::new(), Vec::new());
    keys.push(
        [
            text("general.architecture"),
            8u32.to_le_bytes().to_vec(),
            text("hyvid"),
        ]
        .concat(),
    );
    for (name, tensor) in tensors {
        let stored = as_stored(name, tensor);
        let mut dims = tensor.dims().to_vec();
        if stored == InGguf::Reshaped {
            let mut key = text(&format!("comfy.gguf.orig_shape.{name}"));
            key.extend([9u32.to_le_bytes(), 5u32.to_le_bytes()].concat());
            key.extend((dims.len() as u64).to_le_bytes());
            key.extend(dims.iter().flat_map(|&n| (n as i32).to_le_bytes()));
            keys.push(key);
            dims = vec![dims[0], dims[1..].iter().product()];
        }
        let values = numbers(tensor);
        let floats = || values.iter();
        let (number, bytes): (u32, Vec<u8>) = match stored {
            InGguf::F32 | InGguf::Reshaped => (0, floats().flat_map(|v| v.to_le_bytes()).collect()),
            InGguf::F16 | InGguf::Bf16 => {
                let (number, dtype) = match stored {
                    InGguf::F16 => (1, DType::F16),
                    _ => (30, DType::BF16),
                };
                let half = tensor.to_dtype(dtype).expect("a cast");
                (number, bytes_of(&half))
            }
            InGguf::Q8_0 => (8, values.chunks(32).flat_map(q8_0).collect()),
        };
        data.resize(data.len().next_multiple_of(32), 0u8);
        let mut info = text(name);
        info.extend((dims.len() as u32).to_le_bytes());
        info.extend(dims.iter().rev().flat_map(|&n| (n as u64).to_le_bytes()));
        info.extend(number.to_le_bytes());
        info.extend((data.len() as u64).to_le_bytes());
        infos.push(info);
        data.extend(bytes);
    }
    let counts = [infos.len() as u64, keys.len() as u64].map(u64::to_le_bytes);
    let mut file = [&b"GGUF"[..], &3u32.to_le_bytes(), &counts.concat()].concat();
    file.extend(keys.concat());
    file.extend(infos.concat());
    file.resize(file.len().next_multiple_of(32), 0);
    file.extend(data);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::write(path, file).expect("a file");
}

/// A block of Q8_0: a scale in f16, and 32 codes.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
    let scale = half::f16::from_f32(largest / 127.0);
    let codes = values
        .iter()
        .map(|value| (value / scale.to_f32().max(1e-9)).round() as i8 as u8);
    scale.to_le_bytes().into_iter().chain(codes).collect()
}

/// The bytes of a tensor of f16, bf16 or f32.
pub(crate) fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let flat = tensor.flatten_all().expect("a tensor");
    match tensor.dtype() {
        DType::F16 => {
            let values = flat.to_vec1::<half::f16>().expect("numbers");
            values.into_iter().flat_map(half::f16::to_le_bytes).collect()
        }
        DType::BF16 => {
            let values = flat.to_vec1::<half::bf16>().expect("numbers");
            values.into_iter().flat_map(half::bf16::to_le_bytes).collect()
        }
        _ => numbers(tensor).into_iter().flat_map(f32::to_le_bytes).collect(),
    }
}
