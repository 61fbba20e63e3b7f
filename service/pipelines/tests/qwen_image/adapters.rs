//! Adapters: in every spelling what merged weights are, and alpha.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use pipelines::noise::Generator;
use pipelines::{AdapterFile, AdapterKind, AdapterUse, Request, StrengthCurve, Unobserved, families};
use tempfile::TempDir;

use crate::components::WEIGHTS;
use crate::device::tolerances;
use crate::given::{folder, guided, open};
use crate::numbers::{distance, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};

/// Rank and alpha: those of Lightning's files are as 8 to 1.
const RANK: usize = 4;
const ALPHA: f32 = 0.5;

type Tensors = HashMap<String, Tensor>;

/// The layers that Lightning's files change in each block.
const OF_BLOCK: [&str; 12] = [
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
];

/// The layers, each with its factors. Others change modulators too.
fn pairs(of_block: &[&str]) -> Vec<(String, Tensor, Tensor)> {
    let weights = tensors(WEIGHTS);
    let mut generator = Generator::new(9);
    let mut random = |rows: usize, columns: usize| {
        let numbers = generator.normal(rows * columns);
        let numbers = numbers.iter().map(|number| number * 0.3).collect();
        Tensor::from_vec(numbers, (rows, columns), &Device::Cpu).expect("a tensor")
    };
    let blocks = (0..2).flat_map(|i| {
        of_block
            .iter()
            .map(move |layer| format!("transformer_blocks.{i}.{layer}"))
    });
    blocks
        .map(|layer| {
            let (outputs, inputs) = weights[&format!("{layer}.weight")].dims2().expect("a matrix");
            (layer, random(RANK, inputs), random(outputs, RANK))
        })
        .collect()
}

/// A file of pairs in a spelling.
fn file_of(
    pairs: &[(String, Tensor, Tensor)],
    rename: impl Fn(&str) -> String,
    [down_name, up_name]: [&str; 2],
) -> Tensors {
    let mut file = Tensors::new();
    for (layer, down, up) in pairs {
        let name = rename(layer);
        file.insert(format!("{name}.{down_name}.weight"), down.clone());
        file.insert(format!("{name}.{up_name}.weight"), up.clone());
        let alpha = Tensor::new(ALPHA, &Device::Cpu).expect("a number");
        file.insert(format!("{name}.alpha"), alpha);
    }
    file
}

fn adapter(path: &Path) -> AdapterFile {
    AdapterFile {
        name: "one".to_owned(),
        path: path.to_owned(),
        kind: AdapterKind::Lora,
        ignores_unknown: false,
    }
}

fn used(points: Vec<(f32, f32)>) -> Request {
    Request {
        adapters: vec![AdapterUse {
            name: "one".to_owned(),
            strength: StrengthCurve::of(points).expect("a curve"),
            text_strength: 1.0,
        }],
        ..guided()
    }
}

/// The latent with a file of these tensors.
fn latent(tensors: &Tensors, request: &Request) -> Tensor {
    let (folder, root) = (folder(), TempDir::new().expect("a folder"));
    let path = root.path().join("one.safetensors");
    candle_core::safetensors::save(tensors, &path).expect("a file");
    let model = families().open(folder.path(), &F32).expect("a sound model");
    let adapted = model
        .with_adapters(&[adapter(&path)])
        .expect("an adapter that fits");
    on_cpu(
        &OpenModel::of(adapted)
            .latent(request, &mut Unobserved)
            .expect("a latent"),
    )
}

/// The latent of a model in which the pairs are merged.
fn merged(pairs: &[(String, Tensor, Tensor)]) -> Tensor {
    let folder = folder();
    let wide = |tensor: Tensor| tensor.to_dtype(DType::F32).expect("numbers");
    let mut all: Tensors = tensors(WEIGHTS)
        .into_iter()
        .map(|(name, tensor)| (name, wide(tensor)))
        .collect();
    for (layer, down, up) in pairs {
        let weight = all.get_mut(&format!("{layer}.weight")).expect("a weight");
        let change = up
            .matmul(down)
            .and_then(|change| change * f64::from(ALPHA / RANK as f32));
        *weight = (&*weight + change.expect("a product")).expect("a sum");
    }
    let path = folder
        .path()
        .join("transformer/diffusion_pytorch_model.safetensors");
    candle_core::safetensors::save(&all, path).expect("a file");
    let latent = open(folder.path(), &F32).latent(&guided(), &mut Unobserved);
    on_cpu(&latent.expect("a latent"))
}

#[test]
fn an_adapter_in_every_spelling_is_that_of_merged_weights() {
    let pairs = pairs(&OF_BLOCK);
    let expected = merged(&pairs);
    let plain = {
        let folder = folder();
        let latent = open(folder.path(), &F32).latent(&guided(), &mut Unobserved);
        on_cpu(&latent.expect("a latent"))
    };
    assert!(distance(&plain, &expected) > 100.0 * tolerances().pipeline);
    let (down_up, ab) = (["lora_down", "lora_up"], ["lora_A", "lora_B"]);
    for (name, file) in [
        ("lightning", file_of(&pairs, str::to_owned, down_up)),
        (
            "diffusers",
            file_of(&pairs, |layer| format!("transformer.{layer}"), ab),
        ),
        (
            "comfy",
            file_of(&pairs, |layer| format!("diffusion_model.{layer}"), ab),
        ),
        (
            "kohya",
            file_of(
                &pairs,
                |layer| format!("lora_unet_{}", layer.replace('.', "_")),
                down_up,
            ),
        ),
        (
            "peft",
            file_of(&pairs, str::to_owned, ["lora_A.default", "lora_B.default"]),
        ),
    ] {
        let apart = distance(&latent(&file, &used(vec![(0.0, 1.0)])), &expected);
        println!("{name}: {apart:.2e}");
        assert!(apart < tolerances().pipeline, "{name}: {apart:e}");
    }
}

#[test]
fn modulators_are_adapted_and_strengths_change_from_step_to_step() {
    let pairs = pairs(&["img_mod.1", "txt_mod.1", "attn.to_q"]);
    let file = file_of(&pairs, str::to_owned, ["lora_down", "lora_up"]);
    let expected = merged(&pairs);
    let constant = latent(&file, &used(vec![(0.0, 1.0)]));
    let apart = distance(&constant, &expected);
    println!("modulators: {apart:.2e}");
    assert!(apart < tolerances().pipeline, "{apart:e}");
    // Computed step by step, and the same.
    let nearly = latent(&file, &used(vec![(0.0, 1.0), (1.0, 1.000_001)]));
    assert!(distance(&nearly, &constant) < tolerances().pipeline);
    let ramp = latent(&file, &used(vec![(0.0, 1.0), (1.0, 0.0)]));
    assert!(distance(&ramp, &constant) > 100.0 * tolerances().pipeline);
}
