//! Quantized weights, made at load and stored in GGUF, against the same weights dequantized.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::{GgufType, Weight, WeightFormat};
use pipelines::{Precision, Preset, Quantization, families};

use crate::device::tolerances;
use crate::given::{film_folder, open, request, section_folder, start};
use crate::numbers::{distance, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};
use crate::spellings::{FILM, InGguf, single_file, tencents, write, write_gguf};

/// f32, with the transformer and the text encoder in a format.
fn quantized(format: &str) -> Precision {
    let components = [("transformer", format), ("text_encoder", format)];
    Precision {
        quantization: Quantization::of(Preset::Full, components).expect("formats"),
        ..F32
    }
}

/// A component's weights in full precision.
fn dequantized(opened: &OpenModel, component: &str) -> HashMap<String, Tensor> {
    let tensors = opened.tensors(component);
    let weights = tensors.names().map(|name| {
        let tensor = match tensors.weight(name).expect("a tensor") {
            Weight::Full(tensor) => tensor,
            Weight::Quantized(weight) => ops::dequantize(&weight, DType::F32).expect("numbers"),
        };
        (name.to_owned(), tensor.to_device(&Device::Cpu).expect("a copy"))
    });
    weights.collect()
}

fn latent(opened: &OpenModel) -> Tensor {
    on_cpu(&opened.film(&request(5, None, 2, 5), 0).0["latent"])
}

/// The latents of a pipeline with these weights of the transformer and the text encoder.
fn latent_with(weights: &[(&str, HashMap<String, Tensor>)]) -> Tensor {
    let folder = film_folder();
    for (file, tensors) in weights {
        write(tensors, &folder.path().join(file));
    }
    latent(&open(folder.path(), &F32))
}

const TRANSFORMER: &str = "transformer/diffusion_pytorch_model.safetensors";
const LLAMA: &str = "text_encoder/model.safetensors";

fn format_of(opened: &OpenModel, component: &str, tensor: &str) -> Option<WeightFormat> {
    match opened.tensors(component).weight(tensor).expect("a tensor") {
        Weight::Full(_) => None,
        Weight::Quantized(weight) => Some(weight.format),
    }
}

#[test]
fn components_quantized_at_load_equal_their_dequantized_weights() {
    let folder = film_folder();
    let exact = latent(&open(folder.path(), &F32));
    for name in ["int8", "fp8", "nf4", "nf4-double"] {
        let opened = open(folder.path(), &quantized(name));
        let format: Option<WeightFormat> = name.parse().ok();
        for layer in [
            "transformer_blocks.0.norm1.linear",
            "transformer_blocks.1.attn.to_k",
            "single_transformer_blocks.1.proj_out",
            "norm_out.linear",
        ] {
            let weight = format!("{layer}.weight");
            assert_eq!(format_of(&opened, "transformer", &weight), format, "{layer}");
        }
        for full in [
            "x_embedder.proj.weight",
            "context_embedder.proj_in.weight",
            "proj_out.weight",
        ] {
            assert_eq!(format_of(&opened, "transformer", full), None, "{full}");
        }
        assert_eq!(opened.model.format_of("transformer"), format);
        assert_eq!(opened.model.format_of("text_encoder"), format);
        assert_eq!(opened.model.format_of("vae"), None);
        let expected = latent_with(&[
            (TRANSFORMER, dequantized(&opened, "transformer")),
            (LLAMA, dequantized(&opened, "text_encoder")),
        ]);
        let found = latent(&opened);
        let apart = distance(&found, &expected);
        let far = distance(&found, &exact);
        println!("{name}: {apart:.2e} from dequantized weights, {far:.2e} from full precision");
        assert!(apart < tolerances().pipeline, "{name}: {apart:e}");
        assert!(far > 1e-3, "{name}: {far:e}");
    }
}

/// A layer of it is in full precision while it runs, to encode as to decode.
#[test]
fn stages_of_a_quantized_autoencoder_have_room_for_a_layer_in_full_precision() {
    let folder = section_folder(false);
    let scratch = |precision: &Precision, name: &str| -> Vec<u64> {
        let model = families().open(folder.path(), precision).expect("a sound model");
        let plan = model.plan(&request(37, Some(start()), 1, 7)).expect("a plan");
        let stage = plan.iter().find(|stage| stage.name == name).expect("a stage");
        stage.rungs.iter().map(|rung| rung.scratch.0).collect()
    };
    for format in ["int8", "nf4"] {
        let quantized = Precision {
            quantization: Quantization::of(Preset::Full, [("vae", format)]).expect("formats"),
            ..F32
        };
        let further = ["encode_image", "decode"].map(|name| {
            let (full, quantized) = (scratch(&F32, name), scratch(&quantized, name));
            assert_eq!(full.len(), quantized.len(), "{format} {name}");
            let further: Vec<u64> = quantized
                .iter()
                .zip(&full)
                .map(|(one, other)| one - other)
                .collect();
            assert!(
                further.iter().all(|bytes| *bytes == further[0]),
                "{format} {name}"
            );
            further[0]
        });
        assert!(further[0] > 0, "{format}");
        assert_eq!(further[0], further[1], "{format}");
    }
}

#[test]
fn quantized_gguf_equals_its_dequantized_weights() {
    let (root, file) = single_file("unused.safetensors", &tensors(FILM));
    std::fs::remove_file(&file).expect("a file");
    let path = root
        .path()
        .join("diffusion_models/hunyuan-video-t2v-720p-Q8_0.gguf");
    let stored = |name: &str, tensor: &Tensor| match tensor.rank() {
        5 => InGguf::F32,
        1 => InGguf::F32,
        _ if name.starts_with("final_layer.linear") => InGguf::F16,
        _ => InGguf::Q8_0,
    };
    write_gguf(&tencents(&tensors(FILM), ""), stored, &path);
    let opened = open(&path, &F32);
    let q8 = Some(WeightFormat::Gguf(GgufType::Q8_0));
    for layer in [
        "transformer_blocks.0.attn.add_k_proj",
        "single_transformer_blocks.0.proj_mlp",
        "norm_out.linear",
        "context_embedder.token_refiner.refiner_blocks.0.attn.to_v",
    ] {
        assert_eq!(
            format_of(&opened, "transformer", &format!("{layer}.weight")),
            q8,
            "{layer}"
        );
    }
    assert_eq!(format_of(&opened, "transformer", "x_embedder.proj.weight"), None);
    let expected = latent_with(&[(TRANSFORMER, dequantized(&opened, "transformer"))]);
    let apart = distance(&latent(&opened), &expected);
    println!("Q8_0: {apart:.2e}");
    assert!(apart < tolerances().pipeline, "{apart:e}");
    // It is not quantized again.
    let said = crate::checkpoints::refused(&path, &quantized("nf4")).to_string();
    assert!(said.contains("transformer is stored as Q8_0 already"), "{said}");
}
