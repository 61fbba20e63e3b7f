//! Detection, reading and refusal of checkpoints.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use pipelines::flux::{Flux, FluxModel};
use pipelines::{FamilyList, Image, Medium, Model, ModelError, ModelFile, Request};

use crate::given::{copy_of, folder, open};
use crate::numbers::{fixtures, numbers, tensors};
use crate::open_model::{F32, OpenModel};

const WEIGHTS: &str = "transformer/diffusion_pytorch_model.safetensors";

fn try_open(path: &Path) -> Result<Option<FluxModel>, ModelError> {
    FluxModel::open(path, &F32)
}

/// Asserts that every tensor of a component is bit-identical to this one.
fn assert_tensors(opened: &OpenModel<FluxModel>, expected: &HashMap<String, Tensor>) {
    let found = opened.tensors("transformer");
    assert_eq!(found.names().count(), expected.len());
    for (name, expected) in expected {
        let found = found.shaped(name, expected.dims()).expect("the tensor");
        assert_eq!(numbers(&found), numbers(expected), "{name}");
    }
}

pub(crate) fn write_json(path: &Path, value: serde_json::Value) {
    std::fs::write(path, value.to_string()).expect("a file");
}

/// Changes one value of a JSON file.
pub(crate) fn set(path: &Path, key: &str, value: serde_json::Value) {
    let text = std::fs::read_to_string(path).expect("a file");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    json[key] = value;
    write_json(path, json);
}

#[test]
fn a_folder_is_opened_with_exact_component_sizes() {
    let model = try_open(folder("dev").path()).expect("sound").expect("FLUX");
    let names: Vec<_> = model
        .components()
        .iter()
        .map(|component| component.name.as_str())
        .collect();
    assert_eq!(names, ["transformer", "vae", "text_encoder", "text_encoder_2"]);
    for component in model.components() {
        assert_eq!(
            model.load_plan(&component.name).expect("a plan").bytes(),
            component.bytes
        );
        let files = model.files_of(&component.name);
        assert!(
            files.iter().any(|file| file.path.ends_with("config.json")),
            "{files:?}"
        );
        assert!(
            files.iter().all(ModelFile::is_current) && files.len() == 2,
            "{files:?}"
        );
    }
    let half = FluxModel::open(
        folder("dev").path(),
        &pipelines::Precision::full(candle_core::DType::BF16),
    );
    let half = half.expect("sound").expect("FLUX");
    assert_eq!(half.components()[0].bytes.0 * 2, model.components()[0].bytes.0);
    assert_ne!(half.components()[0].id, model.components()[0].id);
}

#[test]
fn a_single_file_has_the_same_tensors_as_the_folder() {
    let expected = tensors(&format!("flux-tiny/{WEIGHTS}"));
    let beside = copy_of(&["flux-tiny-bfl"]);
    let file = beside.path().join("flux-tiny.safetensors");

    // Without a sidecar the companions are unknown.
    let Err(ModelError::Unsupported { problem, .. }) = try_open(&file) else {
        panic!("opened")
    };
    assert!(
        problem.contains("flux-tiny.moored.json") && problem.contains("base"),
        "{problem}"
    );

    // With a sidecar.
    let sidecar = beside.path().join("flux-tiny.moored.json");
    write_json(
        &sidecar,
        serde_json::json!({"base": fixtures().join("flux-tiny")}),
    );
    assert_tensors(&open(&file), &expected);
    write_json(&sidecar, serde_json::json!({"base": "nowhere"}));
    assert!(matches!(try_open(&file), Err(ModelError::Damaged { path, .. }) if path == sidecar));

    // In a diffusers folder no sidecar is needed, and a single such folder beside the file is enough.
    let inside = copy_of(&["flux-tiny", "flux-tiny-bfl"]);
    assert_tensors(&open(&inside.path().join("flux-tiny.safetensors")), &expected);
    std::fs::remove_file(&sidecar).expect("no sidecar");
    std::fs::rename(inside.path(), beside.path().join("base")).expect("a folder beside");
    assert_tensors(&open(&file), &expected);
}

#[test]
fn a_single_file_with_prefixed_names_and_other_tensors_is_read() {
    let folder = copy_of(&["flux-tiny"]);
    let file = folder.path().join("whole.safetensors");
    let bfl = tensors("flux-tiny-bfl/flux-tiny.safetensors");
    let mut prefixed: HashMap<String, Tensor> = bfl
        .iter()
        .map(|(name, tensor)| (format!("model.diffusion_model.{name}"), tensor.clone()))
        .collect();
    prefixed.insert("vae.decoder.conv_in.bias".to_owned(), bfl["img_in.bias"].clone());
    candle_core::safetensors::save(&prefixed, &file).expect("a file");
    assert_tensors(&open(&file), &tensors(&format!("flux-tiny/{WEIGHTS}")));
}

/// A whole model as ComfyUI saves it.
#[test]
fn a_file_of_the_whole_model_has_its_text_encoders_and_autoencoder() {
    let folder = copy_of(&["flux-tiny"]);
    let file = folder.path().join("whole.safetensors");
    let names = |opened: &OpenModel<FluxModel>| {
        ["vae", "text_encoder", "text_encoder_2"].map(|component| {
            let tensors = opened.tensors(component);
            tensors.names().map(str::to_owned).collect::<BTreeSet<String>>()
        })
    };
    let expected = names(&open(folder.path()));
    let mut all: HashMap<String, Tensor> = HashMap::new();
    for (prefix, part, component) in [
        (
            "model.diffusion_model.",
            "flux-tiny-bfl/flux-tiny.safetensors",
            None,
        ),
        (
            "vae.",
            "flux-tiny/vae/diffusion_pytorch_model.safetensors",
            Some("vae"),
        ),
        (
            "text_encoders.clip_l.transformer.",
            "flux-tiny/text_encoder/model.safetensors",
            Some("text_encoder"),
        ),
        (
            "text_encoders.t5xxl.transformer.",
            "flux-tiny/text_encoder_2/model.safetensors",
            Some("text_encoder_2"),
        ),
    ] {
        let own = tensors(part).into_iter();
        all.extend(own.map(|(name, tensor)| (format!("{prefix}{name}"), tensor)));
        if let Some(component) = component {
            let weights = part.rsplit('/').next().expect("a file");
            std::fs::remove_file(folder.path().join(component).join(weights)).expect("a file");
        }
    }
    candle_core::safetensors::save(&all, &file).expect("a file");
    let opened = open(&file);
    assert_eq!(names(&opened), expected);
    assert_tensors(&opened, &tensors(&format!("flux-tiny/{WEIGHTS}")));
}

/// Splits the transformer of a copy into two shards with an index.
pub(crate) fn shard(folder: &Path) -> PathBuf {
    let whole = folder.join(WEIGHTS);
    let tensors: BTreeMap<String, Tensor> = candle_core::safetensors::load(&whole, &candle_core::Device::Cpu)
        .expect("tensors")
        .into_iter()
        .collect();
    std::fs::remove_file(&whole).expect("no whole file");
    let mut weight_map = BTreeMap::new();
    for part in 0..2 {
        let file = format!("diffusion_pytorch_model-0000{}-of-00002.safetensors", part + 1);
        let shard: HashMap<_, _> = tensors
            .iter()
            .skip(part)
            .step_by(2)
            .map(|(n, t)| (n.clone(), t.clone()))
            .collect();
        weight_map.extend(shard.keys().map(|name| (name.clone(), file.clone())));
        candle_core::safetensors::save(&shard, folder.join("transformer").join(file)).expect("a shard");
    }
    let index = folder.join("transformer/diffusion_pytorch_model.safetensors.index.json");
    write_json(
        &index,
        serde_json::json!({"metadata": {"total_size": 0}, "weight_map": weight_map}),
    );
    index
}

#[test]
fn sharded_files_are_one_component() {
    let folder = copy_of(&["flux-tiny"]);
    let index = shard(folder.path());
    let opened = open(folder.path());
    assert_tensors(&opened, &tensors(&format!("flux-tiny/{WEIGHTS}")));
    assert_eq!(opened.model.files_of("transformer").len(), 3);

    // Three contradictory indexes.
    let sound = std::fs::read_to_string(&index).expect("the index");
    for (from, to) in [
        ("-00002-of-", "-00001-of-"),
        (
            "diffusion_pytorch_model-00002",
            "../transformer/diffusion_pytorch_model-00002",
        ),
        ("diffusion_pytorch_model-00002", "diffusion_pytorch_model-00007"),
    ] {
        std::fs::write(&index, sound.replace(from, to)).expect("the index");
        let result = try_open(folder.path());
        assert!(
            matches!(
                result,
                Err(ModelError::Damaged { .. } | ModelError::Incomplete { .. })
            ),
            "{to}: {:?}",
            result.err()
        );
    }
}

#[test]
fn of_two_sets_of_weights_the_index_counts_or_neither() {
    let folder = copy_of(&["flux-tiny"]);
    let index = shard(folder.path());
    let sound = std::fs::read_to_string(&index).expect("the index");
    // An older file of the same weights, negated, beside the shards: diffusers takes the shards.
    let stray = tensors(&format!("flux-tiny/{WEIGHTS}"));
    let stray: HashMap<String, Tensor> = stray
        .into_iter()
        .map(|(name, tensor)| (name, tensor.neg().expect("a tensor")))
        .collect();
    candle_core::safetensors::save(&stray, folder.path().join(WEIGHTS)).expect("a file");
    assert_tensors(&open(folder.path()), &tensors(&format!("flux-tiny/{WEIGHTS}")));
    // Transformers takes the single file, so of its weights there must be one kind.
    let text = folder.path().join("text_encoder_2/model.safetensors.index.json");
    std::fs::write(&text, sound).expect("an index");
    let refused = try_open(folder.path());
    let Err(ModelError::Unsupported { problem, .. }) = refused else {
        panic!("{:?}", refused.err())
    };
    assert!(problem.contains("two sets of weights"), "{problem}");
}

#[test]
fn weights_that_are_not_read_are_reported_and_variants_alone_are_read() {
    let weights = "transformer/diffusion_pytorch_model";
    let of = |ending: &str| {
        let folder = copy_of(&["flux-tiny"]);
        let to = folder.path().join(format!("{weights}.{ending}"));
        std::fs::rename(folder.path().join(WEIGHTS), to).expect("a file");
        try_open(folder.path())
    };
    for variant in ["fp16.safetensors", "bf16.safetensors"] {
        assert!(matches!(of(variant), Ok(Some(_))), "{variant}");
    }
    for (ending, told) in [
        ("bin", "its weights are in diffusion_pytorch_model.bin"),
        ("safetensors.incomplete", "has not ended"),
        (
            "ema.safetensors",
            "it has diffusion_pytorch_model.ema.safetensors",
        ),
        ("txt", "its weights are missing"),
    ] {
        let error = of(ending).map(|_| ()).expect_err("no weights").to_string();
        assert!(error.contains(told) && !error.contains("damaged"), "{error}");
    }
}

#[test]
fn damaged_files_are_named() {
    let truncated = |path: &Path| {
        let bytes = std::fs::read(path).expect("a file");
        std::fs::write(path, &bytes[..bytes.len() - 4]).expect("a file");
    };
    let lying = |path: &Path| {
        let mut bytes = std::fs::read(path).expect("a file");
        bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        std::fs::write(path, bytes).expect("a file");
    };
    let missing = |path: &Path| std::fs::remove_file(path).expect("a file");
    let files = [
        WEIGHTS,
        "vae/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "text_encoder_2/model.safetensors",
    ];
    let spoil: [&dyn Fn(&Path); 3] = [&truncated, &lying, &missing];
    for file in files {
        for spoil in spoil {
            let folder = copy_of(&["flux-tiny"]);
            spoil(&folder.path().join(file));
            let result = try_open(folder.path());
            let (Err(ModelError::Damaged { path, .. }) | Err(ModelError::Incomplete { path, .. })) = &result
            else {
                panic!("{file}: {:?}", result.err())
            };
            let component = file.split('/').next().expect("a folder");
            assert!(path.to_string_lossy().contains(component), "{}", path.display());
        }
    }
    for file in [
        "transformer/config.json",
        "vae/config.json",
        "tokenizer/vocab.json",
        "tokenizer_2/tokenizer.json",
    ] {
        let folder = copy_of(&["flux-tiny"]);
        std::fs::write(folder.path().join(file), "{").expect("a file");
        assert!(
            matches!(try_open(folder.path()), Err(ModelError::Incomplete { .. })),
            "{file}"
        );
    }
}

#[test]
fn a_configuration_that_contradicts_the_weights_is_damage() {
    for (key, value) in [
        ("num_layers", 3),
        ("num_attention_heads", 3),
        ("pooled_projection_dim", 31),
    ] {
        let folder = copy_of(&["flux-tiny"]);
        set(&folder.path().join("transformer/config.json"), key, value.into());
        let result = try_open(folder.path());
        assert!(
            matches!(
                result,
                Err(ModelError::Damaged { .. } | ModelError::Unsupported { .. })
            ),
            "{key}: {:?}",
            result.err()
        );
    }
}

#[test]
fn unsupported_checkpoints_are_refused_with_the_reason() {
    let cases = [
        (
            "scheduler/scheduler_config.json",
            "shift_terminal",
            serde_json::json!(1.5),
            "shift_terminal",
        ),
        (
            "scheduler/scheduler_config.json",
            "_class_name",
            "DDIMScheduler".into(),
            "DDIMScheduler",
        ),
        ("transformer/config.json", "patch_size", 2.into(), "patch_size"),
        (
            "vae/config.json",
            "latent_channels",
            8.into(),
            "the VAE's latent channels",
        ),
        (
            "transformer/config.json",
            "num_layers",
            serde_json::json!(1u64 << 60),
            "beyond the supported maximum",
        ),
        (
            "transformer/config.json",
            "num_layers",
            1.into(),
            "no part of a FLUX transformer",
        ),
        (
            "tokenizer/tokenizer_config.json",
            "model_max_length",
            78.into(),
            "77 positions for 78 tokens",
        ),
        (
            "model_index.json",
            "_class_name",
            "FluxControlPipeline".into(),
            "FluxControlPipeline",
        ),
    ];
    for (file, key, value, words) in cases {
        let folder = copy_of(&["flux-tiny"]);
        set(&folder.path().join(file), key, value);
        let Err(ModelError::Unsupported { problem, .. }) = try_open(folder.path()) else {
            panic!("{key}")
        };
        assert!(problem.contains(words), "{key}: {problem}");
    }
}

#[test]
fn a_transformer_with_additional_input_channels_is_not_supported() {
    // Canny and Depth: twice as wide in as out.
    let folder = copy_of(&["flux-tiny"]);
    let file = folder.path().join("canny.safetensors");
    let mut bfl = tensors("flux-tiny-bfl/flux-tiny.safetensors");
    let wide = Tensor::cat(&[&bfl["img_in.weight"]; 2], 1).expect("a tensor");
    bfl.insert("img_in.weight".to_owned(), wide);
    candle_core::safetensors::save(&bfl, &file).expect("a file");
    let Err(ModelError::Unsupported { problem, .. }) = try_open(&file) else {
        panic!("opened")
    };
    assert!(problem.contains("Canny"), "{problem}");
}

#[test]
fn other_paths_are_not_recognized() {
    let empty = tempfile::TempDir::new().expect("a folder");
    assert!(matches!(try_open(empty.path()), Ok(None)));
    assert!(matches!(try_open(Path::new("/nowhere")), Ok(None)));
    let autoencoder = "vae/diffusion_pytorch_model.safetensors";
    assert!(matches!(
        try_open(&fixtures().join("flux-tiny").join(autoencoder)),
        Ok(None)
    ));
    write_json(
        &empty.path().join("model_index.json"),
        serde_json::json!({"_class_name": "WanVACEPipeline"}),
    );
    assert!(matches!(try_open(empty.path()), Ok(None)));
    let families = FamilyList::new(vec![Box::new(Flux)]);
    assert!(matches!(
        families.open(empty.path(), &F32),
        Err(ModelError::Unsupported { problem, .. }) if problem.starts_with("it is another kind of Wan")
    ));
    write_json(
        &empty.path().join("model_index.json"),
        serde_json::json!({"_class_name": "NobodysPipeline"}),
    );
    assert!(matches!(
        families.open(empty.path(), &F32),
        Err(ModelError::NotAPipeline { .. })
    ));
    assert!(
        families
            .open(folder("dev").path(), &F32)
            .is_ok_and(|model| model.family() == "flux")
    );
}

#[test]
fn defaults_depend_on_the_model() {
    let dev = try_open(folder("dev").path())
        .expect("sound")
        .expect("FLUX")
        .defaults();
    assert_eq!(
        dev,
        Request::of(Medium::Image(Image::of(1024, 1024)), 28, 3.5, 512)
    );
    let copy = folder("schnell");
    let schnell = try_open(copy.path()).expect("sound").expect("FLUX").defaults();
    assert_eq!(
        (schnell.steps, schnell.guidance, schnell.max_sequence_length),
        (4, 0.0, 256)
    );

    write_json(
        &copy.path().join("moored.json"),
        serde_json::json!({"steps": 8, "width": 128, "height": 96}),
    );
    let told = try_open(copy.path()).expect("sound").expect("FLUX").defaults();
    assert_eq!(told, Request::of(Medium::Image(Image::of(128, 96)), 8, 0.0, 256));
    write_json(
        &copy.path().join("moored.json"),
        serde_json::json!({"negative_prompt": "blurred", "true_guidance": 4.0}),
    );
    let away = try_open(copy.path()).expect("sound").expect("FLUX").defaults();
    assert_eq!((away.negative(), away.true_guidance), (Some("blurred"), 4.0));
    write_json(
        &copy.path().join("moored.json"),
        serde_json::json!({"steps": "many"}),
    );
    assert!(matches!(try_open(copy.path()), Err(ModelError::Damaged { .. })));
}
