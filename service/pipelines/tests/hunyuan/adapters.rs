//! Adapters: against diffusers (`fixtures/make_hunyuan_lora_fixtures.py`) and merged weights, and one in every spelling.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use pipelines::{AdapterError, AdapterFile, AdapterUse, ModelError, Request, StrengthCurve, families};

use crate::device::tolerances;
use crate::given::{film_folder, open, request};
use crate::numbers::{distance, fixtures, numbers, tensors};
use crate::open_model::{F32, OpenModel, on_cpu};
use crate::spellings::{FILM, swapped, tencents_layer, write};

const RANK: usize = 4;
const ALPHA: f64 = 2.0;

/// A layer of Tencent's, which may be several of diffusers' in order.
struct Group {
    theirs: String,
    parts: Vec<(String, usize)>,
    down: Tensor,
    up: Tensor,
}

/// Numbers without a pattern, as large as a layer's.
fn scattered(seed: usize, rows: usize, columns: usize) -> Tensor {
    let number = |i: usize| {
        let mixed = ((seed << 20) + i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        (mixed as f32 / (1 << 23) as f32 - 1.0) * (columns as f32).powf(-0.5)
    };
    let numbers: Vec<f32> = (0..rows * columns).map(number).collect();
    Tensor::from_vec(numbers, (rows, columns), &Device::Cpu).expect("numbers")
}

/// A pair for every linear layer of the transformer.
fn groups() -> Vec<Group> {
    let weights = tensors(FILM);
    let mut layers: BTreeMap<String, BTreeMap<usize, (String, usize)>> = BTreeMap::new();
    let mut inputs = HashMap::new();
    for (name, weight) in &weights {
        let Some(layer) = name.strip_suffix(".weight") else {
            continue;
        };
        if let Ok((outputs, columns)) = weight.dims2() {
            let (theirs, part) = tencents_layer(layer);
            inputs.insert(theirs.clone(), columns);
            let parts = layers.entry(theirs).or_default();
            parts.insert(part, (layer.to_owned(), outputs));
        }
    }
    let mut groups = Vec::new();
    for (i, (theirs, parts)) in layers.into_iter().enumerate() {
        let parts: Vec<(String, usize)> = parts.into_values().collect();
        let outputs = parts.iter().map(|(_, outputs)| outputs).sum();
        groups.push(Group {
            down: scattered(2 * i, RANK, inputs[&theirs]),
            up: scattered(2 * i + 1, outputs, RANK),
            parts,
            theirs,
        });
    }
    groups
}

impl Group {
    /// Each layer of diffusers with its rows of `up`.
    fn ups(&self) -> Vec<(&str, Tensor)> {
        let mut first = 0;
        let parts = self.parts.iter().map(|(layer, outputs)| {
            let up = self.up.narrow(0, first, *outputs).expect("rows");
            first += outputs;
            let up = match layer.as_str() {
                "norm_out.linear" => swapped(&up),
                _ => up,
            };
            (layer.as_str(), up.contiguous().expect("rows"))
        });
        parts.collect()
    }
}

fn alpha() -> Tensor {
    Tensor::new(ALPHA as f32, &Device::Cpu).expect("a number")
}

/// Diffusers' names.
fn of_diffusers(groups: &[Group]) -> HashMap<String, Tensor> {
    let mut file = HashMap::new();
    for group in groups {
        for (layer, up) in group.ups() {
            let name = format!("transformer.{layer}");
            file.insert(format!("{name}.lora_A.weight"), group.down.clone());
            file.insert(format!("{name}.lora_B.weight"), up);
            file.insert(format!("{name}.alpha"), alpha());
        }
    }
    file
}

/// Tencent's names, fused.
fn of_tencent(groups: &[Group], rename: impl Fn(&str) -> String, pair: [&str; 2]) -> HashMap<String, Tensor> {
    let mut file = HashMap::new();
    for group in groups {
        let name = rename(&group.theirs);
        file.insert(format!("{name}.{}.weight", pair[0]), group.down.clone());
        file.insert(format!("{name}.{}.weight", pair[1]), group.up.clone());
        file.insert(format!("{name}.alpha"), alpha());
    }
    file
}

/// The tiny pipeline with the adapter of a file.
fn adapted(path: &Path) -> Result<OpenModel, ModelError> {
    let folder = film_folder(); // until its components are loaded
    let model = families().open(folder.path(), &F32).expect("a model");
    let file = AdapterFile {
        name: "one".to_owned(),
        path: path.to_owned(),
        kind: pipelines::AdapterKind::Lora,
        ignores_unknown: false,
    };
    Ok(OpenModel::of(model.with_adapters(&[file])?))
}

fn asked(strength: Option<f32>) -> Request {
    let used = strength.map(|strength| AdapterUse {
        name: "one".to_owned(),
        strength: StrengthCurve::constant(strength).expect("a strength"),
        text_strength: strength,
    });
    Request {
        adapters: used.into_iter().collect(),
        ..request(5, None, 2, 5)
    }
}

#[test]
fn one_adapter_in_every_spelling_is_the_same_tensors() {
    let groups = groups();
    let folder = tempfile::TempDir::new().expect("a folder");
    let kohya = |name: &str| format!("lora_unet_{}", name.replace('.', "_"));
    let spellings = [
        ("diffusers", of_diffusers(&groups)),
        (
            "tencent",
            of_tencent(
                &groups,
                |name| format!("diffusion_model.{name}"),
                ["lora_A", "lora_B"],
            ),
        ),
        ("musubi", of_tencent(&groups, kohya, ["lora_down", "lora_up"])),
    ];
    let mut contents = Vec::new();
    for (name, tensors) in spellings {
        let path = folder.path().join(format!("{name}.safetensors"));
        write(&tensors, &path);
        let opened = adapted(&path).expect("an adapter");
        let report = &opened.model.adapters()[0];
        assert!(report.ignored.is_empty(), "{name}: {:?}", report.ignored);
        let tensors = opened.tensors("adapter:one:transformer");
        let content: BTreeMap<String, Vec<f32>> = tensors
            .names()
            .map(|name| (name.to_owned(), numbers(&tensors.get(name).expect("a tensor"))))
            .collect();
        contents.push((
            name,
            content,
            on_cpu(&opened.film(&asked(Some(0.5)), 0).0["latent"]),
        ));
    }
    let layers: usize = groups.iter().map(|group| group.parts.len()).sum();
    assert_eq!(contents[0].1.len(), 2 * layers);
    for (name, content, latent) in &contents[1..] {
        assert!(*content == contents[0].1, "{name}");
        assert_eq!(numbers(latent), numbers(&contents[0].2), "{name}");
    }
}

#[test]
fn a_film_with_an_adapter_equals_the_reference() {
    let opened =
        adapted(&fixtures().join("hunyuan-lora-tiny/diffusers-peft.safetensors")).expect("an adapter");
    let expected = tensors("hunyuan-lora-tiny/expected.safetensors");
    for (name, strength) in [("base", 0.0), ("adapted", 0.5)] {
        let found = on_cpu(&opened.film(&asked(Some(strength)), 0).0["latent"]);
        let apart = distance(&found, &expected[name]);
        println!("{name}: {apart:.2e}");
        assert!(apart < tolerances().pipeline, "{name}: {apart:e}");
    }
    let apart = distance(&expected["adapted"], &expected["base"]);
    assert!(apart > 100.0 * tolerances().pipeline, "{apart:e}");
}

#[test]
fn a_film_with_an_adapter_equals_merged_weights() {
    let groups = groups();
    let folder = tempfile::TempDir::new().expect("a folder");
    let path = folder.path().join("one.safetensors");
    write(&of_diffusers(&groups), &path);
    let opened = adapted(&path).expect("an adapter");
    let strength = 0.5;
    let mut merged = tensors(FILM);
    for tensor in merged.values_mut() {
        *tensor = tensor.to_dtype(DType::F32).expect("numbers");
    }
    for group in &groups {
        for (layer, up) in group.ups() {
            let delta = up.matmul(&group.down).expect("a product");
            let delta = delta.affine(f64::from(strength) * ALPHA / RANK as f64, 0.0);
            let weight = merged.get_mut(&format!("{layer}.weight")).expect("a weight");
            *weight = weight.add(&delta.expect("numbers")).expect("a sum");
        }
    }
    let whole = film_folder();
    let exact = open(whole.path(), &F32);
    let weights = whole
        .path()
        .join("transformer/diffusion_pytorch_model.safetensors");
    write(&merged, &weights);
    let expected = open(whole.path(), &F32);
    let latent = |opened: &OpenModel, strength| on_cpu(&opened.film(&asked(strength), 0).0["latent"]);
    let (found, expected) = (latent(&opened, Some(strength)), latent(&expected, None));
    let apart = distance(&found, &expected);
    println!("merged: {apart:.2e}");
    assert!(apart < tolerances().pipeline, "{apart:e}");
    let base = latent(&exact, None);
    assert!(distance(&found, &base) > 1e-2);
    // Strength 0 is the base to the bit, as is a request without the adapter.
    for none in [Some(0.0), None] {
        assert_eq!(numbers(&latent(&opened, none)), numbers(&base), "{none:?}");
    }
}

#[test]
fn an_adapter_of_z_image_is_refused() {
    let path = fixtures().join("z-image-lora-tiny/diffusers-peft.safetensors");
    match adapted(&path).map(|_| ()) {
        Err(ModelError::Adapter { error, .. }) => {
            assert!(matches!(error, AdapterError::OtherFamily { .. }), "{error}");
        }
        other => panic!("{other:?}"),
    }
}
