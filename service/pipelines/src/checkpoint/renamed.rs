//! Whole checkpoints and adapters, renamed by every row of a family's names: each must have the same tensors.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use gpu::{LoadPlan, SourcePiece, TensorSource};
use tempfile::TempDir;

use super::{LayerNames, TensorSpec};
use crate::{AdapterFile, Model, Precision, families};

const TRANSFORMER: &str = "transformer";
const UNET: &str = "unet";

/// Prefixes that programs add to all names of a checkpoint.
const IN_FRONT: [&str; 8] = [
    "diffusion_model.",
    "model.diffusion_model.",
    "transformer.",
    "module.",
    "model.",
    "_orig_mod.",
    "module._orig_mod.",
    "base_model.model.",
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

/// A pipeline's folder of these fixtures: pairs of a fixture and the folder it is copied into.
fn pipeline(folders: &[(&str, &str)]) -> TempDir {
    let root = TempDir::new().unwrap();
    for (from, to) in folders {
        copy(&fixtures().join(from), &root.path().join("base").join(to));
    }
    root
}

/// The tensors of a transformer or UNet in its authors' names.
fn in_authors_names(base: &Path, component: &str, specs: &[TensorSpec]) -> BTreeMap<String, Tensor> {
    let weights = base.join(component).join("diffusion_pytorch_model.safetensors");
    let ours: HashMap<String, Tensor> = candle_core::safetensors::load(weights, &Device::Cpu).unwrap();
    let mut rows: BTreeMap<&str, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for spec in specs {
        let mut first = 0;
        for range in &spec.rows {
            let part = ours[&spec.name].narrow(0, first, range.count).unwrap();
            rows.entry(&spec.tensor).or_default().insert(range.first, part);
            first += range.count;
        }
    }
    let whole = |(name, parts): (&str, BTreeMap<usize, Tensor>)| {
        let parts: Vec<Tensor> = parts.into_values().collect();
        (name.to_owned(), Tensor::cat(&parts, 0).unwrap())
    };
    rows.into_iter().map(whole).collect()
}

/// The bytes of the sources of a plan, by name.
fn content(plan: &LoadPlan) -> BTreeMap<String, Vec<u8>> {
    let LoadPlan::Files(sources) = plan else {
        panic!("no files")
    };
    let bytes = |source: &TensorSource| {
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
    };
    sources
        .iter()
        .map(|source| (source.name.clone(), bytes(source)))
        .collect()
}

/// A renaming: its label in the message of a failure, and the new name of a name.
type Renaming = (String, Box<dyn Fn(&str) -> String>);

/// The names of a file by every row of a family's names, each with its label in the message of a failure.
fn renamings(names: LayerNames) -> Vec<Renaming> {
    let mut all: Vec<Renaming> = Vec::new();
    for row in names.0 {
        for other in row.1 {
            let one: &'static [(&str, &[&str])] = Box::leak(Box::new([(row.0, std::slice::from_ref(other))]));
            let one = LayerNames(one);
            all.push((
                (*other).to_owned(),
                Box::new(move |name| match name.strip_suffix(".weight") {
                    // Without the other name of norms, which is a separate renaming.
                    Some(layer) => format!("{}.weight", one.all(layer).pop().unwrap()),
                    None => one.all(name).pop().unwrap(),
                }),
            ));
        }
    }
    all.push((
        "norms".to_owned(),
        Box::new(|name| LayerNames(&[]).all(name).pop().unwrap()),
    ));
    all.push((
        "every row".to_owned(),
        Box::new(move |name| names.all(name).pop().unwrap()),
    ));
    for prefix in IN_FRONT {
        all.push((prefix.to_owned(), Box::new(move |name| format!("{prefix}{name}"))));
    }
    all
}

fn opened(path: &Path) -> std::sync::Arc<dyn Model> {
    families().open(path, &Precision::full(DType::F32)).unwrap()
}

/// Asserts that a file of the authors' tensors has the same tensors after every renaming.
fn assert_checkpoints(root: &Path, component: &str, names: LayerNames, specs: &[TensorSpec]) {
    let tensors = in_authors_names(&root.join("base"), component, specs);
    let file = root.join("single.safetensors");
    let read = |tensors: &HashMap<String, Tensor>| {
        candle_core::safetensors::save(tensors, &file).unwrap();
        content(opened(&file).load_plan(component).unwrap())
    };
    let expected = read(&tensors.clone().into_iter().collect());
    assert!(!expected.is_empty());
    for (told, rename) in renamings(names) {
        let renamed: HashMap<String, Tensor> = tensors.iter().map(|(n, t)| (rename(n), t.clone())).collect();
        assert_eq!(renamed.len(), tensors.len(), "{told}");
        assert!(read(&renamed) == expected, "{told}");
    }
    // Dimensions of one, in front and after.
    let with_ones = |tensor: &Tensor| match tensor.dims() {
        [1, _] => tensor.squeeze(0).unwrap(),
        [_, _] => tensor
            .unsqueeze(2)
            .and_then(|tensor| tensor.unsqueeze(3))
            .unwrap(),
        _ => tensor.clone(),
    };
    let reshaped: HashMap<String, Tensor> = tensors.iter().map(|(n, t)| (n.clone(), with_ones(t))).collect();
    assert!(read(&reshaped) == expected, "dimensions of one");
}

/// Asserts that an adapter of every linear layer has the same tensors after every renaming, with dots and as kohya writes names.
fn assert_adapters(base: &Path, component: &str, names: LayerNames, specs: &[TensorSpec]) {
    let folder = TempDir::new().unwrap();
    let model = opened(base);
    let mut pairs: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for spec in specs {
        if let (Some(layer), &[rows, inputs]) = (spec.tensor.strip_suffix(".weight"), spec.shape.as_slice()) {
            pairs.entry(layer.to_owned()).or_insert([0, inputs])[0] += rows;
        }
    }
    let scattered = |seed: usize, rows: usize, columns: usize| {
        let numbers = (0..rows * columns).map(|i| ((i * 31 + seed * 7) % 97) as f32 - 48.0);
        Tensor::from_vec(numbers.collect::<Vec<f32>>(), (rows, columns), &Device::Cpu).unwrap()
    };
    let read = |rename: &dyn Fn(&str) -> String| {
        let tensors = pairs
            .iter()
            .enumerate()
            .flat_map(|(i, (layer, [outputs, inputs]))| {
                let layer = rename(layer);
                [
                    (format!("{layer}.lora_A.weight"), scattered(i, 2, *inputs)),
                    (format!("{layer}.lora_B.weight"), scattered(i + 1, *outputs, 2)),
                ]
            });
        let path = folder.path().join("one.safetensors");
        candle_core::safetensors::save(&tensors.collect::<HashMap<_, _>>(), &path).unwrap();
        let file = AdapterFile {
            name: "one".to_owned(),
            path,
            kind: crate::AdapterKind::Lora,
            ignores_unknown: false,
        };
        let adapted = model.with_adapters(&[file]).unwrap();
        content(adapted.load_plan(&format!("adapter:one:{component}")).unwrap())
    };
    let expected = read(&str::to_owned);
    assert!(!expected.is_empty());
    for (told, rename) in renamings(names) {
        assert!(read(&rename) == expected, "{told}");
        let joined = |name: &str| format!("lora_unet_{}", rename(name).replace('.', "_"));
        assert!(read(&joined) == expected, "{told}, joined");
    }
}

#[test]
fn flux_gives_the_same_under_every_name() {
    let root = pipeline(&[("flux-tiny", "")]);
    let base = root.path().join("base");
    let config = crate::files::read_json(&base.join("transformer/config.json")).unwrap();
    let (names, xlabs, specs) = crate::flux::names_and_layout(&config);
    assert_checkpoints(root.path(), TRANSFORMER, names, &specs);
    assert_adapters(&base, TRANSFORMER, xlabs, &specs);
}

#[test]
fn flux2_gives_the_same_under_every_name() {
    let root = pipeline(&[("flux2-tiny", "")]);
    let base = root.path().join("base");
    let config = crate::files::read_json(&base.join("transformer/config.json")).unwrap();
    let (names, specs) = crate::flux2::names_and_layout(&config);
    assert_checkpoints(root.path(), TRANSFORMER, names, &specs);
    assert_adapters(&base, TRANSFORMER, names, &specs);
}

#[test]
fn sdxl_gives_the_same_under_every_name() {
    let root = pipeline(&[("sdxl-tiny", "")]);
    let base = root.path().join("base");
    let config = crate::files::read_json(&base.join("unet/config.json")).unwrap();
    let (names, specs) = crate::sdxl::names_and_layout(&config);
    assert_checkpoints(root.path(), UNET, names, &specs);
    assert_adapters(&base, UNET, names, &specs);
}

#[test]
fn hunyuan_video_gives_the_same_under_every_name() {
    let root = pipeline(&[
        ("hunyuan-tiny", ""),
        ("flux-tiny/text_encoder", "text_encoder_2"),
        ("flux-tiny/tokenizer", "tokenizer_2"),
    ]);
    let base = root.path().join("base");
    let config = crate::files::read_json(&base.join("transformer/config.json")).unwrap();
    let (names, specs) = crate::hunyuan::names_and_layout(&config);
    assert_checkpoints(root.path(), TRANSFORMER, names, &specs);
    assert_adapters(&base, TRANSFORMER, names, &specs);
}

#[test]
fn z_image_gives_the_same_under_every_name() {
    let root = pipeline(&[("z-image-tiny", ""), ("flux-tiny/vae", "vae")]);
    let base = root.path().join("base");
    let mut config: crate::z_image::TransformerConfig =
        crate::files::read_json(&base.join("transformer/config.json")).unwrap();
    let weights = base.join("transformer/diffusion_pytorch_model.safetensors");
    let weights = gpu::CheckpointFile::open(&weights).unwrap();
    config.timestep_inner = weights.get("t_embedder.mlp.0.weight").unwrap().shape[0];
    let (names, specs) = crate::z_image::names_and_layout(&config);
    assert_checkpoints(root.path(), TRANSFORMER, names, &specs);
    assert_adapters(&base, TRANSFORMER, names, &specs);
}

#[test]
fn wan_gives_the_same_under_every_name() {
    let root = pipeline(&[("wan-tiny", "")]);
    let base = root.path().join("base");
    let config = crate::files::read_json(&base.join("transformer/config.json")).unwrap();
    let (names, specs) = crate::wan::names_and_layout(&config);
    assert_checkpoints(root.path(), TRANSFORMER, names, &specs);
    assert_adapters(&base, TRANSFORMER, names, &specs);
}

#[test]
fn ace_step_takes_adapters_under_every_name() {
    let root = pipeline(&[("ace-tiny", "")]);
    let base = root.path().join("base");
    let config = crate::files::read_json(&base.join("transformer/config.json")).unwrap();
    let (names, specs) = crate::ace_step::names_and_layout(&config);
    assert_adapters(&base, TRANSFORMER, names, &specs);
    // Authors' names begin with the component, or do not.
    let bare: Vec<TensorSpec> = specs
        .into_iter()
        .map(|spec| TensorSpec {
            tensor: spec.tensor.trim_start_matches("decoder.").to_owned(),
            ..spec
        })
        .collect();
    assert_adapters(&base, TRANSFORMER, names, &bare);
}
