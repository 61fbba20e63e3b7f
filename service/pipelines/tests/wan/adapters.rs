//! Adapters, in the names that people have, against merged weights.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use pipelines::unipc::{Grid, Schedule};
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
    let strengths: Vec<(AdapterFile, f32)> = files.iter().map(|file| (file.clone(), 1.0)).collect();
    latent_of(model, &strengths, short(made))
}

/// The latent of a request with these adapters, each of its strength.
fn latent_of(model: &Arc<dyn Model>, files: &[(AdapterFile, f32)], request: Request) -> Tensor {
    let all: Vec<AdapterFile> = files.iter().map(|(file, _)| file.clone()).collect();
    let adapted = model.with_adapters(&all).expect("adapters that fit");
    let uses = files.iter().map(|(file, strength)| AdapterUse {
        name: file.name.clone(),
        strength: StrengthCurve::constant(*strength).expect("a strength"),
        text_strength: 1.0,
    });
    let request = Request {
        adapters: uses.collect(),
        ..request
    };
    on_cpu(&OpenModel::of(adapted).film(&request, 0).0["latent"])
}

/// The latent of a model in whose transformers of these names the pairs are merged.
fn merged(made: Made, transformers: &[&str]) -> Tensor {
    let strengths: Vec<(&str, f64)> = transformers.iter().map(|name| (*name, 1.0)).collect();
    merged_of(made, &strengths, &pairs(), &short(made))
}

/// The latent of a request to a model in whose transformers these pairs are merged, each at its strength.
fn merged_of(
    made: Made,
    transformers: &[(&str, f64)],
    pairs: &[(String, Tensor, Tensor)],
    request: &Request,
) -> Tensor {
    let folder = made.folder();
    for (transformer, strength) in transformers {
        let mut tensors: Tensors = weights(made.folder, transformer)
            .into_iter()
            .map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).expect("numbers")))
            .collect();
        for (layer, down, up) in pairs {
            let weight = tensors.get_mut(&format!("{layer}.weight")).expect("a weight");
            let change = up
                .matmul(down)
                .and_then(|change| change * (strength * ALPHA as f64 / RANK as f64));
            *weight = (&*weight + change.expect("a product")).expect("a sum");
        }
        let path = folder
            .path()
            .join(transformer)
            .join("diffusion_pytorch_model.safetensors");
        write(&tensors, &path);
    }
    let model = families().open(folder.path(), &F32).expect("a sound model");
    on_cpu(&OpenModel::of(model).film(request, 0).0["latent"])
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

/// The pairs as Lightning's files have them: in bf16, with an alpha that is a whole number of 64 bits.
fn lightning() -> (Tensors, Vec<(String, Tensor, Tensor)>) {
    let mut file = HashMap::new();
    let mut held = Vec::new();
    for (layer, down, up) in pairs() {
        let name = format!("diffusion_model.{}", authors_layer(&layer));
        let halved = |tensor: &Tensor| tensor.to_dtype(DType::BF16).expect("numbers");
        let (down, up) = (halved(&down), halved(&up));
        file.insert(format!("{name}.lora_down.weight"), down.clone());
        file.insert(format!("{name}.lora_up.weight"), up.clone());
        let alpha = Tensor::new(ALPHA, &Device::Cpu).expect("a number");
        file.insert(format!("{name}.alpha"), alpha);
        let wide = |tensor: Tensor| tensor.to_dtype(DType::F32).expect("numbers");
        held.push((layer, wide(down), wide(up)));
    }
    (file, held)
}

/// Lightning's two files for A14B, each at its strength, in four steps without guidance, which is a pass for each step.
#[test]
fn lightnings_files_change_one_transformer_each() {
    let folder = A14B.folder();
    let model = families().open(folder.path(), &F32).expect("a sound model");
    let (file, held) = lightning();
    let root = TempDir::new().expect("a folder");
    let request = Request {
        steps: 4,
        true_guidance: 1.0,
        guidance: 0.0,
        ..A14B.request()
    };
    let names = ["high_noise_model", "low_noise_model"];
    let files = names.map(|name| {
        let path = root.path().join(format!("{name}.safetensors"));
        write(&file, &path);
        adapter(&path)
    });
    let [high, low] = files;
    let changed = [("transformer", 1.0), ("transformer_2", 0.5)];
    let expected = merged_of(A14B, &changed, &held, &request);
    let apart = distance(
        &latent_of(&model, &[(low, 0.5), (high, 1.0)], request.clone()),
        &expected,
    );
    println!("Lightning: {apart:e}");
    assert!(apart <= 1e-5, "{apart:e}");
    let stages = model.plan(&request).expect("a valid request");
    let steps: Vec<u32> = stages
        .iter()
        .filter(|stage| stage.role == pipelines::Role::Sample)
        .map(|stage| stage.steps)
        .collect();
    assert_eq!(steps, [2, 2]);
    // The times that Lightning was distilled at.
    let schedule = Schedule::new(Grid::Diffusers, 4, 5.0);
    assert_eq!(schedule.times, [999.0, 937.0, 833.0, 625.0]);
}

/// Files of CausVid and of Lightning for Wan 2.1 change biases and norms too.
#[test]
fn differences_of_biases_and_norms_are_refused_or_left_out() {
    let folder = T2V.folder();
    let model = families().open(folder.path(), &F32).expect("a sound model");
    let (file, _) = lightning();
    let root = TempDir::new().expect("a folder");
    let path = root.path().join("lightning.safetensors");
    write(&file, &path);
    let without = latent(&model, &[adapter(&path)], T2V);
    let mut more = file;
    let vector = Tensor::ones(32, DType::BF16, &Device::Cpu).expect("numbers");
    for name in ["self_attn.q.diff_b", "self_attn.norm_q.diff"] {
        more.insert(format!("diffusion_model.blocks.0.{name}"), vector.clone());
    }
    write(&more, &path);
    let strict = adapter(&path);
    let refused = model
        .with_adapters(std::slice::from_ref(&strict))
        .map(|_| ())
        .expect_err("a refusal")
        .to_string();
    for said in ["a difference of a", "diff", "unknown tensors ignored"] {
        assert!(refused.contains(said), "{refused}");
    }
    let lenient = AdapterFile {
        ignores_unknown: true,
        ..strict
    };
    let adapted = model
        .with_adapters(std::slice::from_ref(&lenient))
        .expect("the rest of it");
    assert_eq!(adapted.parts().adapters[0].ignored.len(), 2, "they are told");
    assert_eq!(distance(&latent(&model, &[lenient], T2V), &without), 0.0);
    // Alone they are nothing that is applied.
    more.retain(|name, _| name.ends_with(".diff") || name.ends_with(".diff_b"));
    write(&more, &path);
    let refused = model
        .with_adapters(&[adapter(&path)])
        .map(|_| ())
        .expect_err("a refusal")
        .to_string();
    assert!(refused.contains("not supported"), "{refused}");
}

/// A14B's folder has a shift of its own, and Lightning wants that of its training.
#[test]
fn the_shift_of_a_model_can_be_written_down() {
    let expected = {
        let folder = T2V.folder();
        let path = folder.path().join("scheduler/scheduler_config.json");
        let text = std::fs::read_to_string(&path).expect("a file");
        let text = text.replace("\"flow_shift\": 3.0", "\"flow_shift\": 7.0");
        std::fs::write(&path, text).expect("a file");
        crate::checkpoints::latent(folder.path(), T2V)
    };
    let folder = T2V.folder();
    std::fs::write(folder.path().join("moored.json"), r#"{"shift": 7}"#).expect("a file");
    let found = crate::checkpoints::latent(folder.path(), T2V);
    assert_eq!(distance(&found, &expected), 0.0);
    let (root, path) = crate::checkpoints::beside(T2V, "wan.safetensors");
    write(&weights("wan-tiny", "transformer"), &path);
    std::fs::write(root.path().join("wan.moored.json"), r#"{"shift": 7.0}"#).expect("a file");
    let found = crate::checkpoints::latent(&path, T2V);
    assert_eq!(distance(&found, &expected), 0.0);
    std::fs::write(root.path().join("wan.moored.json"), r#"{"shift": 0}"#).expect("a file");
    let refused = families().open(&path, &F32).map(|_| ()).expect_err("a refusal");
    assert!(refused.to_string().contains("shift is 0"), "{refused}");
}
