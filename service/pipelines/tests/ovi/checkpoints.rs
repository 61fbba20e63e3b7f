//! Where the parts of a model are found, and what is refused.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use pipelines::autoencoders::wan::{WanVaeConfig, diffusers_name_of_original};
use pipelines::ovi::{FusionConfig, OviModel, Variant};
use pipelines::{Model, ModelError};
use serde_json::json;
use tempfile::TempDir;

use crate::formula::weights_of_wan;
use crate::gguf_file::write_q8_0;
use crate::given::{Tensors, folder, request};
use crate::numbers::{distance, fixtures, json as fixture, tensors};
use crate::open_model::{Delivered, F32, OpenModel, copy, on_cpu};
use crate::tiny_ovi::{FILE, fusion, save, write_sound};

fn open(path: &Path) -> Result<OviModel, ModelError> {
    Ok(OviModel::open(path, &F32)?.expect("an Ovi model"))
}

fn refused(path: &Path) -> String {
    open(path).expect_err("a refusal").to_string()
}

fn load(path: &Path) -> Tensors {
    candle_core::safetensors::load(path, &candle_core::Device::Cpu).expect("a file")
}

#[test]
fn the_variant_is_declared_by_the_name_or_beside_the_file() {
    let folder = folder();
    let published = folder.path().join(FILE);
    assert_eq!(open(&published).expect("a model").variant(), Variant::Of960For5s);
    let other = folder.path().join("mine.safetensors");
    std::fs::rename(&published, &other).expect("a rename");
    let problem = refused(&other);
    assert!(
        problem.contains("960x960_10s") && problem.contains("moored.json"),
        "{problem}"
    );
    let sidecar = folder.path().join("mine.moored.json");
    std::fs::write(&sidecar, r#"{"variant": "720x720_5s"}"#).expect("a file");
    let model = open(&other).expect("a model");
    assert_eq!(model.variant(), Variant::Of720For5s);
    let defaults = model.defaults();
    let video = defaults.video().expect("a film");
    assert_eq!((video.width, video.height, video.frames), (960, 544, 121));
    std::fs::write(&sidecar, r#"{"variant": "720x720"}"#).expect("a file");
    assert!(refused(&other).contains("720x720_5s"));
    std::fs::write(&sidecar, r#"{"varient": "720x720_5s"}"#).expect("a file");
    assert!(refused(&other).contains("varient"));
}

/// The names of the sound's half with that of their branch.
fn prefixed(tensors: Tensors) -> impl Iterator<Item = (String, Tensor)> {
    tensors.into_iter().map(|(name, tensor)| match name.as_str() {
        "scaled_fp8" => (name, tensor),
        own if own.starts_with("audio_model.") => (name, tensor),
        own => (format!("audio_model.{own}"), tensor),
    })
}

#[test]
fn two_files_are_one_model() {
    let folder = folder();
    let both = load(&folder.path().join(FILE));
    std::fs::remove_file(folder.path().join(FILE)).expect("a file");
    // Names of the halves are with or without that of their branch, and the tables of blocks with or without their module's. Files
    // in fp8 have a marker.
    let marker = Tensor::zeros(0, DType::U8, &Device::Cpu).expect("a marker");
    for (keeps_branch, keeps_module) in [(true, true), (false, true), (false, false), (true, false)] {
        let half = |branch: &str| -> Tensors {
            let own = both.iter().filter_map(|(name, tensor)| {
                let rest = name.strip_prefix(branch)?.strip_prefix('.')?;
                let name = if keeps_branch { name } else { rest };
                let name = match keeps_module {
                    true => name.to_owned(),
                    false => name.replace("modulation.modulation", "modulation"),
                };
                Some((name, tensor.clone()))
            });
            own.chain([("scaled_fp8".to_owned(), marker.clone())]).collect()
        };
        let film = folder.path().join("Wan_2_1_Ovi_video_model_bf16.safetensors");
        let sound = folder.path().join("Wan_2_1_Ovi_audio_model_bf16.safetensors");
        save(&half("video_model"), &film);
        let problem = refused(&film);
        assert!(problem.contains("audio_model_bf16.safetensors"), "{problem}");
        save(&half("audio_model"), &sound);
        let model = open(&film).expect("a model");
        assert_eq!(model.variant(), Variant::Of720For5s);
        let bytes = |model: &OviModel| -> u64 { model.components().iter().map(|c| c.bytes.0).sum() };
        save(&both, &folder.path().join(FILE));
        let whole = open(&folder.path().join(FILE)).expect("a model");
        assert_eq!(bytes(&model), bytes(&whole));
        // One file of both, in which the film's names are those of Wan.
        let mixed = folder.path().join("Wan2_2-5B-Ovi_960x960_5s.safetensors");
        save(
            &half("video_model")
                .into_iter()
                .chain(prefixed(half("audio_model")))
                .collect(),
            &mixed,
        );
        assert_eq!(bytes(&open(&mixed).expect("a model")), bytes(&whole));
        std::fs::remove_file(mixed).expect("a file");
        let problem = refused(&sound);
        assert!(problem.contains("half"), "{problem}");
        std::fs::remove_file(sound).expect("a file");
        std::fs::remove_file(folder.path().join(FILE)).expect("a file");
    }
}

#[test]
fn missing_and_wrong_parts_are_named() {
    let folder = folder();
    let path = folder.path().join(FILE);
    let vae = folder.path().join("v1-16.safetensors");
    let tensors = load(&vae);
    let away = folder.path().join("away");
    std::fs::rename(&vae, &away).expect("a rename");
    let problem = refused(&path);
    assert!(
        problem.contains("v1-16") && problem.contains("audio_vae"),
        "{problem}"
    );
    // In the folder of MMAudio's repository, as the authors' download has it.
    let of_mmaudio = folder.path().join("MMAudio/ext_weights");
    std::fs::create_dir_all(&of_mmaudio).expect("a folder");
    std::fs::rename(&away, of_mmaudio.join("v1-16.safetensors")).expect("a rename");
    assert!(open(&path).is_ok());
    std::fs::rename(of_mmaudio.join("v1-16.safetensors"), &away).expect("a rename");
    // An autoencoder of 44.1 kHz has other bins.
    let mut large = tensors.clone();
    let mean = candle_core::Tensor::zeros((1, 128, 1), candle_core::DType::F32, &candle_core::Device::Cpu);
    large.insert("data_mean".to_owned(), mean.expect("a tensor"));
    save(&large, &vae);
    let problem = refused(&path);
    assert!(problem.contains("44.1 kHz"), "{problem}");
    // A film's file in place of the audio VAE.
    std::fs::copy(&path, &vae).expect("a copy");
    let problem = refused(&path);
    assert!(problem.contains("no audio VAE"), "{problem}");
    std::fs::rename(&away, &vae).expect("a rename");
    std::fs::copy(&vae, folder.path().join("best_netG.safetensors")).expect("a copy");
    let problem = refused(&path);
    assert!(problem.contains("no vocoder"), "{problem}");
}

#[test]
fn files_of_diffusers_have_normalised_weights_of_the_audio_vae() {
    let folder = folder();
    let path = folder.path().join(FILE);
    let vae = folder.path().join("v1-16.safetensors");
    let raw = load(&vae);
    let renamed: Tensors = raw
        .iter()
        .map(|(name, tensor)| (format!("vae.{name}"), tensor.clone()))
        .collect();
    save(&renamed, &vae);
    assert!(open(&path).is_ok());
}

/// The latents of a film and of its sound, from a picture.
fn latents(path: &Path) -> [Tensor; 2] {
    let values = OpenModel::open("ovi", path, &F32)
        .sampled(&request(true), &mut Delivered::default())
        .expect("latents");
    ["latent", "sound_latent"].map(|name| on_cpu(&values[name]))
}

fn assert_same(found: &[Tensor; 2], expected: &[Tensor; 2], most: f64) {
    for (found, expected) in found.iter().zip(expected) {
        let apart = distance(found, expected);
        assert!(apart <= most, "{apart:e}");
    }
}

/// Of the size of Wan 2.2's latents, as files without a configuration have.
struct Published {
    fusion: Tensors,
    vae: WanVaeConfig,
}

impl Published {
    fn new() -> Published {
        let mut config: FusionConfig = fixture("ovi-tiny/config.json");
        (config.video.in_dim, config.video.out_dim) = (48, 48);
        // No file says how wide heads are, so they are as wide as the published ones.
        for branch in [&mut config.video, &mut config.audio] {
            (branch.dim, branch.num_heads) = (256, 2);
        }
        Published {
            fusion: fusion(&config),
            vae: WanVaeConfig {
                base_dim: 8,
                decoder_base_dim: Some(16),
                ..WanVaeConfig::wan_2_2()
            },
        }
    }

    /// The model with a base in diffusers' layout, which writes down all of its settings: the latents of its film.
    fn expected(&self) -> [Tensor; 2] {
        let root = TempDir::new().expect("a folder");
        let base = root.path().join("wan");
        copy(&fixtures().join("wan-ti2v-tiny"), &base);
        for part in ["text_encoder", "tokenizer"] {
            copy(&fixtures().join("wan-tiny").join(part), &base.join(part));
        }
        let config = json!({"attention_head_dim": 128, "num_attention_heads": 2});
        std::fs::write(base.join("transformer/config.json"), config.to_string()).expect("a file");
        let vae = &self.vae;
        let config = json!({"base_dim": 8, "decoder_base_dim": 16, "z_dim": 48, "is_residual": true, "in_channels": 12,
            "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": vae.latents_mean,
            "latents_std": vae.latents_std});
        std::fs::write(base.join("vae/config.json"), config.to_string()).expect("a file");
        save(
            &weights_of_wan(vae),
            &base.join("vae/diffusion_pytorch_model.safetensors"),
        );
        save(&self.fusion, &root.path().join(FILE));
        write_sound(root.path());
        latents(&root.path().join(FILE))
    }

    /// Writes the VAE in the authors' names.
    fn write_vae(&self, path: &Path) {
        let authors: std::collections::HashMap<String, std::collections::HashMap<String, Vec<usize>>> =
            fixture("wan-vae-tiny/authors.json");
        let mut weights = weights_of_wan(&self.vae);
        let renamed = authors["2.2"].keys().map(|name| {
            let ours = diffusers_name_of_original(name).expect("a name");
            (name.clone(), weights.remove(&ours).expect("a weight"))
        });
        save(&renamed.collect(), path);
    }
}

/// The folders that the authors' program downloads into, and files where the pack of nodes for ComfyUI has them.
#[test]
fn the_authors_download_and_a_set_of_files_make_the_film_of_the_pipeline() {
    let model = Published::new();
    let expected = model.expected();
    let root = TempDir::new().expect("a folder");
    let place = |path: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        path
    };
    let text = tensors("wan-tiny/text_encoder/model.safetensors");
    let file = place("ckpts/Ovi/model.safetensors");
    save(&model.fusion, &file);
    model.write_vae(&place("ckpts/Wan2.2-TI2V-5B/Wan2.2_VAE.safetensors"));
    save(
        &text,
        &place("ckpts/Wan2.2-TI2V-5B/models_t5_umt5-xxl-enc-bf16.safetensors"),
    );
    copy(
        &fixtures().join("wan-tiny/tokenizer"),
        &place("ckpts/Wan2.2-TI2V-5B/google/umt5-xxl"),
    );
    std::fs::create_dir_all(place("ckpts/MMAudio/ext_weights")).expect("a folder");
    write_sound(&place("ckpts/MMAudio/ext_weights"));
    assert_same(&latents(&file), &expected, 0.0);
    assert_eq!(open(&file).expect("a model").variant(), Variant::Of720For5s);

    let file = place("ComfyUI/models/diffusion_models/Ovi-960x960-5s.safetensors");
    save(&model.fusion, &file);
    model.write_vae(&place("ComfyUI/models/vae/wan2.2_vae.safetensors"));
    save(
        &text,
        &place("ComfyUI/models/text_encoders/umt5-xxl-enc-bf16.safetensors"),
    );
    let of_mmaudio = place("ComfyUI/custom_nodes/ComfyUI-Ovi/ckpts/MMAudio/ext_weights");
    std::fs::create_dir_all(&of_mmaudio).expect("a folder");
    write_sound(&of_mmaudio);
    let problem = refused(&file);
    assert!(
        problem.contains("tokenizer") && problem.contains("google/umt5-xxl"),
        "{problem}"
    );
    copy(
        &fixtures().join("wan-tiny/tokenizer"),
        &place("ComfyUI/models/text_encoders/google/umt5-xxl"),
    );
    assert_same(&latents(&file), &expected, 0.0);
    // The decoder of the sound in place of that of the film.
    std::fs::copy(
        of_mmaudio.join("v1-16.safetensors"),
        place("ComfyUI/models/vae/wan2.2_vae.safetensors"),
    )
    .expect("a copy");
    let problem = refused(&file);
    assert!(
        problem.contains("wan2.2_vae") && problem.contains("of sound"),
        "{problem}"
    );
}

#[test]
fn any_base_with_the_films_vae_will_do() {
    let folder = folder();
    // Other pipelines of Wan, as a hub cache has them.
    copy(&folder.path().join("wan"), &folder.path().join("wan-again"));
    copy(&fixtures().join("wan-tiny"), &folder.path().join("a-wan-2.1"));
    assert!(open(&folder.path().join(FILE)).is_ok());
}

#[test]
fn gguf_stands_for_its_numbers() {
    let folder = folder();
    let path = folder.path().join(FILE);
    let tensors = load(&path);
    let coded = path.with_extension("gguf");
    let held = write_q8_0(&tensors, &coded);
    let found = latents(&coded);
    save(&held, &path);
    assert_same(&found, &latents(&path), 1e-4);
    let mut left_out = tensors;
    left_out.remove("video_model.patch_embedding.weight");
    write_q8_0(&left_out, &coded);
    let problem = refused(&coded);
    assert!(problem.contains("fix_5d_tensors"), "{problem}");
}
