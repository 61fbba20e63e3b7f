//! Adapters, in the names that people have, against merged weights.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use pipelines::{AdapterFile, AdapterKind, AdapterUse, Model, Request, StrengthCurve, families};
use tempfile::TempDir;

use crate::checkpoints::{short, weights};
use crate::given::{A14B, Made, T2V};
use crate::numbers::distance;
use crate::open_model::{F32, OpenModel, on_cpu};
use crate::spellings::{Tensors, authors_name, write};

const RANK: usize = 4;
const ALPHA: i64 = 2;

/// Numbers without a pattern.
fn scattered(seed: usize, rows: usize, columns: usize) -> Tensor {
    let number = |i: usize| {
        let mixed = ((seed << 20) + i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        (mixed as f32 / (1 << 23) as f32 - 1.0) * (columns as f32).powf(-0.5)
    };
    let numbers: Vec<f32> = (0..rows * columns).map(number).collect();
    Tensor::from_vec(numbers, (rows, columns), &Device::Cpu).expect("numbers")
}

/// A pair for every linear layer of the blocks: name in diffusers, down, up.
fn pairs() -> Vec<(String, Tensor, Tensor)> {
    let mut layers: Vec<(String, (usize, usize))> = weights("wan-tiny", "transformer")
        .iter()
        .filter_map(|(name, weight)| {
            let layer = name
                .strip_suffix(".weight")
                .filter(|_| name.starts_with("blocks."))?;
            Some((layer.to_owned(), weight.dims2().ok()?))
        })
        .collect();
    layers.sort();
    let pair = |(i, (layer, (outputs, inputs))): (usize, (String, (usize, usize)))| {
        let down = scattered(2 * i, RANK, inputs);
        (layer, down, scattered(2 * i + 1, outputs, RANK))
    };
    layers.into_iter().enumerate().map(pair).collect()
}

/// The authors' name of a layer.
fn authors_layer(layer: &str) -> String {
    let name = authors_name(&format!("{layer}.weight"));
    name.trim_end_matches(".weight").to_owned()
}

/// A file of all pairs, with `alpha` as Lightning's files have it: a whole number of 64 bits.
fn file_of(rename: impl Fn(&str) -> String, pair: [&str; 2]) -> Tensors {
    let mut file = HashMap::new();
    for (layer, down, up) in pairs() {
        let name = rename(&layer);
        file.insert(format!("{name}.{}.weight", pair[0]), down);
        file.insert(format!("{name}.{}.weight", pair[1]), up);
        file.insert(
            format!("{name}.alpha"),
            Tensor::new(ALPHA, &Device::Cpu).expect("a number"),
        );
    }
    file
}

fn adapter(path: &Path) -> AdapterFile {
    AdapterFile {
        name: path.file_stem().expect("a name").to_string_lossy().into_owned(),
        path: path.to_owned(),
        kind: AdapterKind::Lora,
        ignores_unknown: false,
    }
}

/// The latent with these adapters, of strength one.
fn latent(model: &Arc<dyn Model>, files: &[AdapterFile], made: Made) -> Tensor {
    let adapted = model.with_adapters(files).expect("adapters that fit");
    let request = Request {
        adapters: files
            .iter()
            .map(|file| AdapterUse {
                name: file.name.clone(),
                strength: StrengthCurve::constant(1.0).expect("a strength"),
                text_strength: 1.0,
            })
            .collect(),
        ..short(made)
    };
    on_cpu(&OpenModel::of(adapted).film(&request, 0).0["latent"])
}

/// The latent of a model in whose transformers of these names the pairs are merged.
fn merged(made: Made, transformers: &[&str]) -> Tensor {
    let folder = made.folder();
    for transformer in transformers {
        let mut tensors: Tensors = weights(made.folder, transformer)
            .into_iter()
            .map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).expect("numbers")))
            .collect();
        for (layer, down, up) in pairs() {
            let weight = tensors.get_mut(&format!("{layer}.weight")).expect("a weight");
            let change = up
                .matmul(&down)
                .and_then(|change| change * (ALPHA as f64 / RANK as f64));
            *weight = (&*weight + change.expect("a product")).expect("a sum");
        }
        let path = folder
            .path()
            .join(transformer)
            .join("diffusion_pytorch_model.safetensors");
        write(&tensors, &path);
    }
    let model = families().open(folder.path(), &F32).expect("a sound model");
    on_cpu(&OpenModel::of(model).film(&short(made), 0).0["latent"])
}

#[test]
fn an_adapter_in_every_spelling_is_that_of_merged_weights() {
    let folder = T2V.folder();
    let model = families().open(folder.path(), &F32).expect("a sound model");
    let expected = merged(T2V, &["transformer"]);
    let root = TempDir::new().expect("a folder");
    let pair = ["lora_down", "lora_up"];
    let files = [
        ("lightning", file_of(authors_layer, pair)),
        (
            "comfy",
            file_of(
                |layer| format!("diffusion_model.{}", authors_layer(layer)),
                ["lora_A", "lora_B"],
            ),
        ),
        (
            "kohya",
            file_of(
                |layer| format!("lora_unet_{}", authors_layer(layer).replace('.', "_")),
                pair,
            ),
        ),
        (
            "diffusers",
            file_of(|layer| format!("transformer.{layer}"), ["lora_A", "lora_B"]),
        ),
    ];
    for (name, tensors) in files {
        let path = root.path().join(format!("{name}.safetensors"));
        write(&tensors, &path);
        let apart = distance(&latent(&model, &[adapter(&path)], T2V), &expected);
        println!("{name}: {apart:e}");
        assert!(apart <= 1e-5, "{name}: {apart:e}");
    }
}

/// A file for one transformer of two changes that one, by its name; a file for neither changes both.
#[test]
fn each_transformer_takes_the_adapters_that_are_its() {
    let folder = A14B.folder();
    let model = families().open(folder.path(), &F32).expect("a sound model");
    let root = TempDir::new().expect("a folder");
    let tensors = file_of(authors_layer, ["lora_down", "lora_up"]);
    for (name, changed) in [
        ("wan2.2_t2v_high_noise", &["transformer"][..]),
        ("Wan2.2-LOW", &["transformer_2"]),
        ("style", &["transformer", "transformer_2"]),
    ] {
        let path = root.path().join(format!("{name}.safetensors"));
        write(&tensors, &path);
        let apart = distance(&latent(&model, &[adapter(&path)], A14B), &merged(A14B, changed));
        println!("{name}: {apart:e}");
        assert!(apart <= 1e-5, "{name}: {apart:e}");
    }
}
