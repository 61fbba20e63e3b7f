//! Folders and single files of a text encoder, by their headers.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use candle_core::{DType, Device, Tensor};
use gpu::{SourcePiece, TensorSource};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use tempfile::TempDir;

use super::super::role;
use super::*;
use crate::checkpoint::RoleOf;

/// A tensor of a file that is made up: its name, type, shape and bytes.
type Made = (String, Dtype, Vec<usize>);

fn wanted(component: &'static str, role_of: RoleOf) -> Requested {
    Requested {
        component,
        dtype: DType::F32,
        format: None,
        role_of,
    }
}

fn sources(files: ComponentFiles) -> BTreeMap<String, TensorSource> {
    let LoadPlan::Files(sources) = files.plan else {
        panic!("no files")
    };
    let by_name = sources.into_iter().map(|source| (source.name.clone(), source));
    by_name.collect()
}

fn text_of(place: &Place) -> Result<BTreeMap<String, TensorSource>, ModelError> {
    place.files(wanted("text_encoder", role)).map(sources)
}

fn vision_of(place: &Place) -> Result<BTreeMap<String, TensorSource>, ModelError> {
    place.vision_files(wanted("vision", qwen2_vl::role)).map(sources)
}

/// The bytes of a source.
fn content(source: &TensorSource) -> Vec<u8> {
    let piece = |piece: &SourcePiece| match piece {
        SourcePiece::Inline(bytes) => bytes.to_vec(),
        SourcePiece::File { file, range } => {
            let mut bytes = vec![0; range.length as usize];
            let file = std::fs::File::open(file).unwrap();
            file.read_exact_at(&mut bytes, range.offset).unwrap();
            bytes
        }
    };
    source.pieces.iter().flat_map(piece).collect()
}

#[test]
fn a_folder_has_both_components() {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/qwen-vl-tiny");
    let place = Place::of(&base, None).unwrap();
    assert_eq!(place.config.num_hidden_layers, 4);
    assert_eq!(text_of(&place).unwrap().len(), 2 + 4 * 12);
    let vision = vision_of(&place).unwrap();
    assert_eq!(vision.len(), 6 + 9 * 16);
    // Queries, keys and values are thirds of one tensor.
    let weights = base.join("text_encoder/model.safetensors");
    let all = candle_core::safetensors::load(weights, &Device::Cpu).unwrap();
    for (number, part) in ["q", "k", "v"].into_iter().enumerate() {
        for kind in ["weight", "bias"] {
            let whole = &all[&format!("model.visual.blocks.3.attn.qkv.{kind}")];
            let rows: Tensor = whole.narrow(0, 32 * number, 32).unwrap();
            let numbers = rows.flatten_all().unwrap().to_vec1::<half::bf16>().unwrap();
            let expected: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let found = content(&vision[&format!("blocks.3.attn.{part}.{kind}")]);
            assert_eq!(found, expected, "{part}.{kind}");
        }
    }
}

/// Small sizes that a file without a configuration may have: heads have the published widths.
fn small() -> Qwen2VlConfig {
    Qwen2VlConfig {
        vocab_size: 4,
        hidden_size: 256,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        vision: QwenVisionConfig {
            depth: 1,
            hidden_size: 64,
            intermediate_size: 12,
            out_hidden_size: 256,
            ..QwenVisionConfig::default()
        },
        ..Qwen2VlConfig::default()
    }
}

/// All tensors in the names of ComfyUI's file.
fn made() -> Vec<Made> {
    let text = small().tensor_shapes(&|_| false);
    let mut all: BTreeMap<String, Vec<usize>> = text.into_iter().collect();
    all.insert("lm_head.weight".to_owned(), vec![4, 256]);
    for spec in small().vision.specs(&|_| false) {
        let name = spec.tensor.replace("model.visual.", "visual.");
        let rows = spec.shape[0] * if name.contains("qkv") { 3 } else { 1 };
        all.insert(name, [&[rows], &spec.shape[1..]].concat());
    }
    let made = |(name, shape)| (name, Dtype::BF16, shape);
    all.into_iter().map(made).collect()
}

/// A folder as ComfyUI has it, with a transformer, and a base without a text encoder.
fn folders() -> (TempDir, PathBuf, PathBuf) {
    let root = TempDir::new().unwrap();
    for folder in ["diffusion_models", "text_encoders", "base"] {
        std::fs::create_dir(root.path().join(folder)).unwrap();
    }
    let transformer = root.path().join("diffusion_models/qwen_image.safetensors");
    save(&[("img_in.weight".to_owned(), Dtype::F32, vec![1])], &transformer);
    let base = root.path().join("base");
    (root, transformer, base)
}

fn save(tensors: &[Made], path: &Path) {
    let zeros = vec![0u8; 1 << 20];
    let views = tensors.iter().map(|(name, dtype, shape)| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let view = TensorView::new(*dtype, shape.clone(), &zeros[..bytes]);
        (name.clone(), view.unwrap())
    });
    serialize_to_file(views.collect::<Vec<_>>(), None, path).unwrap();
}

#[test]
fn a_single_file_of_comfyui_has_both_components() {
    let (root, transformer, base) = folders();
    let file = root.path().join("text_encoders/qwen_2.5_vl_7b.safetensors");
    save(&made(), &file);
    let place = Place::of(&base, Some(&transformer)).unwrap();
    assert_eq!(place.config, small());
    let text = text_of(&place).unwrap();
    assert!(text.contains_key("model.norm.weight") && !text.contains_key("lm_head.weight"));
    assert_eq!(vision_of(&place).unwrap().len(), 6 + 16);
}

#[test]
fn scaled_fp8_is_read_under_both_names_of_scales() {
    let is_layer = |name: &str| {
        let is_in_block = name.contains("layers.") || name.contains("blocks.");
        is_in_block && name.ends_with(".weight") && !name.contains("norm")
    };
    for (marker, behind) in [(Some("scaled_fp8"), "scale_weight"), (None, "weight_scale")] {
        let (root, transformer, base) = folders();
        let mut tensors: Vec<Made> = Vec::new();
        for (name, dtype, shape) in made() {
            if is_layer(&name) {
                let scale = name.replace(".weight", &format!(".{behind}"));
                tensors.push((scale, Dtype::F32, vec![]));
                tensors.push((name, Dtype::F8_E4M3, shape));
            } else {
                tensors.push((name, dtype, shape));
            }
        }
        tensors.extend(marker.map(|name| (name.to_owned(), Dtype::F8_E4M3, vec![2])));
        let file = root
            .path()
            .join("text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors");
        save(&tensors, &file);
        let place = Place::of(&base, Some(&transformer)).unwrap();
        let is_fp8 = |source: &TensorSource| matches!(source.target, Target::Quantized(WeightFormat::Fp8(_)));
        let (text, vision) = (text_of(&place).unwrap(), vision_of(&place).unwrap());
        assert!(
            is_fp8(&text["model.layers.1.self_attn.k_proj.weight"]),
            "{behind}"
        );
        assert!(!is_fp8(&text["model.embed_tokens.weight"]), "{behind}");
        assert!(is_fp8(&vision["blocks.0.attn.k.weight"]), "{behind}");
        // The scale, and the codes of the second third.
        let codes = vision["blocks.0.attn.k.weight"]
            .pieces
            .iter()
            .map(SourcePiece::length);
        assert_eq!(codes.max(), Some(64 * 64));
    }
}

/// A GGUF file with these tensors of f32 zeros; those whose names end as `coded` are in Q8_0.
fn save_gguf(tensors: &[(String, Vec<usize>)], coded: &str, path: &Path) {
    const KINDS: [u32; 2] = [0, 8];
    let text = |bytes: &mut Vec<u8>, text: &str| {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    };
    let mut header = b"GGUF".to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend(1u64.to_le_bytes());
    text(&mut header, "general.architecture");
    header.extend(8u32.to_le_bytes());
    text(&mut header, "qwen2vl");
    let mut length = 0u64;
    for (name, shape) in tensors {
        text(&mut header, name);
        header.extend((shape.len() as u32).to_le_bytes());
        for side in shape.iter().rev() {
            header.extend((*side as u64).to_le_bytes());
        }
        let is_coded = name.ends_with(coded);
        header.extend(KINDS[usize::from(is_coded)].to_le_bytes());
        header.extend(length.to_le_bytes());
        let numbers = shape.iter().product::<usize>() as u64;
        let bytes = if is_coded { numbers / 32 * 34 } else { 4 * numbers };
        length = (length + bytes).next_multiple_of(32);
    }
    header.resize(header.len().next_multiple_of(32), 0);
    header.resize(header.len() + length as usize, 0);
    std::fs::write(path, header).unwrap();
}

/// The language model in the names of llama.cpp.
fn gguf_text() -> Vec<(String, Vec<usize>)> {
    let mut tensors: Vec<(String, Vec<usize>)> = Vec::new();
    let layers = [
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ];
    for (name, shape) in small().tensor_shapes(&|_| false) {
        let mut name = name
            .replace("model.embed_tokens", "token_embd")
            .replace("model.norm", "output_norm")
            .replace("model.layers", "blk");
        for (own, theirs) in layers {
            name = name.replace(own, theirs);
        }
        tensors.push((name, shape));
    }
    tensors.push(("output.weight".to_owned(), vec![4, 256]));
    tensors
}

/// The tower in the names of llama.cpp.
fn gguf_tower() -> Vec<(String, Vec<usize>)> {
    let mut tensors: Vec<(String, Vec<usize>)> = ["v.patch_embd.weight", "v.patch_embd.weight.1"]
        .map(|name| (name.to_owned(), vec![64, 3, 14, 14]))
        .to_vec();
    let mut linear = |name: &str, outputs: usize, inputs: usize| {
        tensors.push((format!("{name}.weight"), vec![outputs, inputs]));
        tensors.push((format!("{name}.bias"), vec![outputs]));
    };
    for part in ["q", "k", "v", "out"] {
        linear(&format!("v.blk.0.attn_{part}"), 64, 64);
    }
    linear("v.blk.0.ffn_gate", 12, 64);
    linear("v.blk.0.ffn_up", 12, 64);
    linear("v.blk.0.ffn_down", 64, 12);
    linear("mm.0", 256, 256);
    linear("mm.2", 256, 256);
    for norm in ["v.blk.0.ln1", "v.blk.0.ln2", "v.post_ln"] {
        tensors.push((format!("{norm}.weight"), vec![64]));
    }
    tensors
}

#[test]
fn a_gguf_file_has_its_tower_beside_it() {
    let (root, transformer, base) = folders();
    let folder = root.path().join("text_encoders");
    let text = folder.join("Qwen2.5-VL-7B-Instruct-q8_0.gguf");
    save_gguf(&gguf_text(), ".weight", &text);
    let norms_are_coded = Place::of(&base, Some(&transformer)).and_then(|place| text_of(&place));
    assert!(norms_are_coded.is_err());
    save_gguf(&gguf_text(), "_embd.weight", &text);

    let place = Place::of(&base, Some(&transformer)).unwrap();
    let embedding = text_of(&place).unwrap()["model.embed_tokens.weight"].target;
    assert!(matches!(embedding, Target::Quantized(WeightFormat::Gguf(_))));
    // Text alone needs no tower; editing does.
    let told = vision_of(&place).unwrap_err().to_string();
    assert!(told.contains("mmproj") && told.contains("q8_0.gguf"), "{told}");

    // Its name is before the text encoder's.
    let tower = folder.join("Qwen2.5-VL-7B-Instruct-mmproj-F16.gguf");
    save_gguf(&gguf_tower(), "nothing", &tower);
    let place = Place::of(&base, Some(&transformer)).unwrap();
    assert_eq!(place.config, small());
    let vision = vision_of(&place).unwrap();
    assert_eq!(vision.len(), 7 + 16);
    assert_eq!(vision["patch_embed.proj.1.weight"].shape, [64, 3, 14, 14]);
}

#[test]
fn a_pipeline_without_a_text_encoder_is_refused() {
    let (_root, transformer, base) = folders();
    assert!(Place::of(&base, Some(&transformer)).is_err());
    assert!(Place::of(&base, None).is_err());
}
