//! Repositories of Wan's authors, and sets of single files without a folder of a pipeline: each makes the film that the same model
//! in diffusers' layout makes.

use std::collections::HashMap;
use std::fs::{self, create_dir_all, remove_dir_all, remove_file, rename};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use pipelines::autoencoders::wan::WanVaeConfig;
use pipelines::text::t5::T5Config;
use pipelines::wan::TransformerConfig;
use pipelines::{Families as _, InitImage, Medium, ModelError, Request, Video, families};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::film::Film;
use crate::formula::{numbers as numbers_of, randomised, weights_of_wan};
use crate::gguf_file::write_f32;
use crate::numbers::{distance, fixtures};
use crate::open_model::{F32, OpenModel, on_cpu};
use crate::spellings::{Tensors, authors_name, authors_name_of_umt5, authors_names_of_vae, renamed, write};

/// A kind of model that the authors publish, tiny, with what their programs have for it.
#[derive(Clone, Copy)]
struct Kind {
    /// Channels of the latents, and of what a transformer reads.
    channels: (usize, usize),
    has_two: bool,
    shift: f64,
    boundary: Option<f64>,
}

const fn kind(channels: (usize, usize), boundary: Option<f64>, shift: f64) -> Kind {
    Kind {
        channels,
        has_two: boundary.is_some(),
        shift,
        boundary,
    }
}

const T2V: Kind = kind((16, 16), None, 5.0);
const TI2V: Kind = kind((48, 48), None, 5.0);
const A14B: Kind = kind((16, 16), Some(0.875), 12.0);
const I2V: Kind = kind((16, 36), Some(0.9), 5.0);

impl Kind {
    fn transformer(self) -> Value {
        json!({"num_attention_heads": 1, "attention_head_dim": 128, "in_channels": self.channels.1,
            "out_channels": self.channels.0, "text_dim": 32, "ffn_dim": 40, "num_layers": 2})
    }

    fn vae(self) -> WanVaeConfig {
        let published = match self.channels.0 {
            48 => WanVaeConfig::wan_2_2(),
            _ => WanVaeConfig::default(),
        };
        WanVaeConfig {
            base_dim: 8,
            decoder_base_dim: published.decoder_base_dim.map(|_| 16),
            ..published
        }
    }

    /// The version of its autoencoder.
    fn version(self) -> &'static str {
        if self.channels.0 == 48 { "2.2" } else { "2.1" }
    }

    /// The weights of its autoencoder in the authors' names.
    fn authors_vae(self) -> Tensors {
        let names = authors_names_of_vae(self.version());
        renamed(&weights_of_wan(&self.vae()), |name| names[name].clone())
    }

    /// The transformer, or that of high noise and that of low noise.
    fn transformers(self) -> Vec<Tensors> {
        let config: TransformerConfig = serde_json::from_value(self.transformer()).expect("a configuration");
        let of = |name: &str| -> Tensors {
            let shapes = config
                .tensor_shapes()
                .map(|(tensor, shape)| (format!("{name}.{tensor}"), shape));
            let prefix = format!("{name}.");
            let own = |(tensor, numbers): (String, Tensor)| {
                (
                    tensor.strip_prefix(&prefix).expect("a prefix").to_owned(),
                    numbers,
                )
            };
            randomised(shapes.collect(), |_| 1.0)
                .into_iter()
                .map(own)
                .collect()
        };
        let names = ["high", "low"];
        names[..1 + usize::from(self.has_two)]
            .iter()
            .map(|name| of(name))
            .collect()
    }

    fn request(self) -> Request {
        let (width, height) = (64, 32);
        let picture = || InitImage {
            width,
            height,
            rgb: numbers_of("start", 3 * 64 * 32)
                .into_iter()
                .map(|number| ((number / 3.5 + 0.5) * 255.0).floor() as u8)
                .collect(),
        };
        let video = Video {
            width,
            height,
            frames: 5,
            frames_per_second: 16.0,
            init_image: (self.channels.1 == 36).then(picture),
            ..Video::default()
        };
        Request {
            prompt: "a ﬁne red circle".to_owned(),
            negative_prompt: Some("green 北京".to_owned()),
            true_guidance: 4.0,
            guidance: if self.has_two { 3.0 } else { 0.0 },
            seed: 5,
            ..Request::of(Medium::Video(video), 4, 0.0, 512)
        }
    }
}

fn text_config() -> Value {
    json!({"vocab_size": 320, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4,
        "feed_forward_proj": "gated-gelu", "model_type": "umt5"})
}

fn text_encoder() -> Tensors {
    let config: T5Config = serde_json::from_value(text_config()).expect("a configuration");
    randomised(config.tensor_shapes(&|_| false), |_| 1.0)
}

fn write_json(path: &Path, value: &Value) {
    create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(path, value.to_string()).expect("a file");
}

fn write_tokenizer(folder: &Path) {
    create_dir_all(folder).expect("a folder");
    fs::copy(
        fixtures().join("spiece-tiny/spiece.model"),
        folder.join("spiece.model"),
    )
    .expect("a copy");
}

/// The model in diffusers' layout, which writes down all of its settings.
fn diffusers(kind: Kind) -> TempDir {
    let root = TempDir::new().expect("a folder");
    let folder = root.path();
    let index = json!({"_class_name": "WanPipeline", "boundary_ratio": kind.boundary,
        "expand_timesteps": kind.channels == (48, 48)});
    write_json(&folder.join("model_index.json"), &index);
    let scheduler = json!({"_class_name": "UniPCMultistepScheduler", "flow_shift": kind.shift,
        "prediction_type": "flow_prediction", "use_flow_sigmas": true});
    write_json(&folder.join("scheduler/scheduler_config.json"), &scheduler);
    for (part, tensors) in ["transformer", "transformer_2"]
        .into_iter()
        .zip(kind.transformers())
    {
        write_json(&folder.join(part).join("config.json"), &kind.transformer());
        write(
            &tensors,
            &folder.join(part).join("diffusion_pytorch_model.safetensors"),
        );
    }
    let vae = kind.vae();
    let config = json!({"base_dim": vae.base_dim, "decoder_base_dim": vae.decoder_base_dim, "z_dim": vae.z_dim,
        "is_residual": vae.is_residual, "in_channels": vae.in_channels, "out_channels": vae.out_channels,
        "patch_size": vae.patch_size, "scale_factor_spatial": vae.scale_factor_spatial,
        "latents_mean": vae.latents_mean, "latents_std": vae.latents_std});
    write_json(&folder.join("vae/config.json"), &config);
    write(
        &weights_of_wan(&vae),
        &folder.join("vae/diffusion_pytorch_model.safetensors"),
    );
    write_json(&folder.join("text_encoder/config.json"), &text_config());
    write(&text_encoder(), &folder.join("text_encoder/model.safetensors"));
    write_tokenizer(&folder.join("tokenizer"));
    root
}

/// Writes a transformer as the authors do: in shards with an index, and a configuration in their words.
fn write_shards(tensors: &Tensors, folder: &Path) {
    let config =
        json!({"_class_name": "WanModel", "model_type": "t2v", "dim": 128, "num_heads": 1, "eps": 1e-6});
    write_json(&folder.join("config.json"), &config);
    let authors = renamed(tensors, authors_name);
    let mut names: Vec<&String> = authors.keys().collect();
    names.sort();
    let mut map = serde_json::Map::new();
    for (number, part) in names.chunks(names.len().div_ceil(2)).enumerate() {
        let shard = format!("diffusion_pytorch_model-{:05}-of-00002.safetensors", number + 1);
        let own = part.iter().map(|name| ((*name).clone(), authors[*name].clone()));
        write(&own.collect::<HashMap<_, _>>(), &folder.join(&shard));
        map.extend(
            part.iter()
                .map(|name| ((*name).clone(), Value::from(shard.as_str()))),
        );
    }
    write_json(
        &folder.join("diffusion_pytorch_model.safetensors.index.json"),
        &json!({"weight_map": map}),
    );
}

/// The VAE and the text encoder of the authors' repositories.
fn write_parts(kind: Kind, folder: &Path) {
    write(
        &kind.authors_vae(),
        &folder.join(format!("Wan{}_VAE.safetensors", kind.version())),
    );
    let text = renamed(&text_encoder(), authors_name_of_umt5);
    write(&text, &folder.join("models_t5_umt5-xxl-enc-bf16.safetensors"));
    write_tokenizer(&folder.join("google/umt5-xxl"));
}

/// A repository of the authors.
fn authors(kind: Kind) -> TempDir {
    let root = TempDir::new().expect("a folder");
    match kind.transformers().as_slice() {
        [one] => write_shards(one, root.path()),
        two => {
            for (part, tensors) in ["high_noise_model", "low_noise_model"].into_iter().zip(two) {
                write_shards(tensors, &root.path().join(part));
            }
        }
    }
    write_parts(kind, root.path());
    root
}

/// A set of single files in ComfyUI's folders, without the folder of a pipeline and without that of a tokenizer: the path of the
/// transformer. The autoencoders of both versions are there.
fn comfy(kind: Kind, root: &Path) -> PathBuf {
    for folder in ["diffusion_models", "text_encoders", "vae"] {
        create_dir_all(root.join(folder)).expect("a folder");
    }
    let name = |noise: &str| root.join(format!("diffusion_models/wan2.2_{noise}14B_fp16.safetensors"));
    let transformers = kind.transformers();
    let first = if kind.has_two {
        name("high_noise_")
    } else {
        name("")
    };
    write(&renamed(&transformers[0], authors_name), &first);
    if let Some(second) = transformers.get(1) {
        write(&renamed(second, authors_name), &name("low_noise_"));
    }
    for of in [T2V, TI2V] {
        let name = if of.version() == "2.2" {
            "wan2.2_vae"
        } else {
            "wan_2.1_vae"
        };
        write(&of.authors_vae(), &root.join(format!("vae/{name}.safetensors")));
    }
    let mut text = text_encoder();
    let bytes = fs::read(fixtures().join("spiece-tiny/spiece.model")).expect("a fixture");
    let count = bytes.len();
    text.insert(
        "spiece_model".to_owned(),
        Tensor::from_vec(bytes, count, &Device::Cpu).expect("bytes"),
    );
    write(
        &text,
        &root.join("text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors"),
    );
    first
}

/// Latent and frames of the kind's request.
fn film(path: &Path, kind: Kind) -> (Tensor, Vec<Vec<u8>>) {
    let (values, film): (_, Film) = OpenModel::open("wan", path, &F32).film(&kind.request(), 0);
    let opened = if kind.has_two { "sampled" } else { "latent" };
    assert!(values.contains_key(opened), "both transformers sample");
    (on_cpu(&values["latent"]), film.frames())
}

fn assert_same(path: &Path, kind: Kind, expected: &(Tensor, Vec<Vec<u8>>)) {
    let found = film(path, kind);
    assert_eq!(distance(&found.0, &expected.0), 0.0, "{}", path.display());
    assert!(found.1 == expected.1, "{}", path.display());
}

fn refused(path: &Path) -> ModelError {
    families().open(path, &F32).map(|_| ()).expect_err("a refusal")
}

#[test]
fn a_repository_of_the_authors_and_a_set_of_files_make_the_film_of_the_pipeline() {
    for kind in [TI2V, A14B, I2V] {
        let expected = film(diffusers(kind).path(), kind);
        let repository = authors(kind);
        assert!(families().has_own_layout(repository.path()));
        assert_same(repository.path(), kind, &expected);
        let root = TempDir::new().expect("a folder");
        assert_same(&comfy(kind, root.path()), kind, &expected);
    }
    let kind = T2V;
    let expected = film(diffusers(kind).path(), kind);
    let root = TempDir::new().expect("a folder");
    let path = comfy(kind, root.path());
    assert_same(&path, kind, &expected);
    // A folder in diffusers' layout beside them that has settings and a tokenizer alone.
    let base = root.path().join("diffusion_models/Wan");
    crate::open_model::copy(diffusers(kind).path(), &base);
    for part in ["transformer", "text_encoder", "vae"] {
        remove_dir_all(base.join(part)).expect("a folder");
    }
    assert_same(&path, kind, &expected);
    // A file beside a repository of the authors takes the rest from there.
    let root = TempDir::new().expect("a folder");
    create_dir_all(root.path().join("Wan2.1-T2V-1.3B")).expect("a folder");
    write_parts(kind, &root.path().join("Wan2.1-T2V-1.3B"));
    let beside = root.path().join("wan.gguf");
    write_f32(&renamed(&kind.transformers()[0], authors_name), &beside);
    assert_same(&beside, kind, &expected);
}

#[test]
fn the_base_whose_latents_fit_is_taken() {
    let root = TempDir::new().expect("a folder");
    for (kind, name) in [(T2V, "a"), (TI2V, "b")] {
        crate::open_model::copy(diffusers(kind).path(), &root.path().join(name));
    }
    for kind in [T2V, TI2V] {
        let path = root.path().join("c.safetensors");
        write(&kind.transformers()[0], &path);
        let opened = OpenModel::open("wan", &path, &F32);
        assert_eq!(
            opened.stages(&kind.request()).last().expect("a stage").takes[0].shape[1],
            kind.channels.0
        );
    }
}

#[test]
fn what_is_missing_of_a_repository_or_of_a_set_is_named() {
    type Change = fn(&Path);
    let of_repository: [(Change, &str); 5] = [
        (
            |root| remove_dir_all(root.join("low_noise_model")).expect("a folder"),
            "low_noise_model",
        ),
        (
            |root| {
                remove_file(root.join("high_noise_model/diffusion_pytorch_model-00002-of-00002.safetensors"))
                    .expect("a file")
            },
            "00002-of-00002",
        ),
        (
            |root| remove_file(root.join("Wan2.1_VAE.safetensors")).expect("a file"),
            "vae is not there",
        ),
        (
            |root| remove_file(root.join("models_t5_umt5-xxl-enc-bf16.safetensors")).expect("a file"),
            "text_encoder is not there",
        ),
        (
            |root| remove_dir_all(root.join("google")).expect("a folder"),
            "google/umt5-xxl",
        ),
    ];
    for (change, said) in of_repository {
        let repository = authors(A14B);
        change(repository.path());
        let error = refused(repository.path());
        assert!(error.to_string().contains(said), "{said}: {error}");
    }
    let root = TempDir::new().expect("a folder");
    let path = comfy(A14B, root.path());
    let low = root
        .path()
        .join("diffusion_models/wan2.2_low_noise_14B_fp16.safetensors");
    let away = root.path().join("away");
    rename(&low, &away).expect("a rename");
    let error = refused(&path);
    assert!(matches!(error, ModelError::Incomplete { .. }), "{error}");
    assert!(error.to_string().contains("one of two transformers"), "{error}");
    rename(&away, &low).expect("a rename");
    // The decoder of a sound in place of the VAE, and T5 in place of UMT5.
    let vae = root.path().join("vae/wan_2.1_vae.safetensors");
    let sound: Tensors = [(
        "decoder.conv_in.weight".to_owned(),
        Tensor::zeros((4, 4, 3), candle_core::DType::F32, &Device::Cpu).expect("zeros"),
    )]
    .into();
    write(&sound, &vae);
    let error = refused(&path).to_string();
    assert!(
        error.contains("wan_2.1_vae") && error.contains("of sound"),
        "{error}"
    );
    remove_file(&vae).expect("a file");
    let error = refused(&path).to_string();
    assert!(
        error.contains("48, and the pipeline takes 16"),
        "the other one is there: {error}"
    );
    let root = TempDir::new().expect("a folder");
    let path = comfy(T2V, root.path());
    let text = root
        .path()
        .join("text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors");
    let mut t5 = text_encoder();
    t5.remove("encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight");
    write(&t5, &text);
    assert!(refused(&path).to_string().contains("of T5"));
    let of_llama_cpp = renamed(&text_encoder(), |name| format!("enc.blk.{name}"));
    write(&of_llama_cpp, &text);
    assert!(refused(&path).to_string().contains("GGUF"));
    write(&text_encoder(), &text);
    let error = refused(&path).to_string();
    assert!(
        error.contains("umt5_xxl_fp8_e4m3fn_scaled") && error.contains("google/umt5-xxl"),
        "{error}"
    );
}

/// Relatives of the authors, whose repositories have the same files.
#[test]
fn repositories_that_do_not_run_are_named() {
    let repository = authors(T2V);
    let config = repository.path().join("config.json");
    write_json(
        &config,
        &json!({"_class_name": "VaceWanModel", "dim": 128, "num_heads": 1}),
    );
    assert!(!families().has_own_layout(repository.path()));
    let error = refused(repository.path()).to_string();
    assert!(error.contains("another kind of Wan"), "{error}");
    let kind = families().class_not_run("VaceWanModel");
    assert!(kind.is_some_and(|kind| kind.contains("another kind of Wan")));
    assert_eq!(families().class_not_run("WanModel"), None);
}
