//! Where the parts of a model are found, and what is refused.

use std::path::Path;

use pipelines::ovi::{OviModel, Variant};
use pipelines::{Model, ModelError};

use crate::given::{Tensors, folder};
use crate::open_model::F32;
use crate::tiny_ovi::{FILE, save};

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

#[test]
fn two_files_are_one_model() {
    let folder = folder();
    let both = load(&folder.path().join(FILE));
    std::fs::remove_file(folder.path().join(FILE)).expect("a file");
    // Names of the halves are with or without that of their branch.
    for keeps_branch in [true, false] {
        let half = |branch: &str| -> Tensors {
            let own = both.iter().filter_map(|(name, tensor)| {
                let rest = name.strip_prefix(branch)?.strip_prefix('.')?;
                let name = if keeps_branch { name } else { rest };
                Some((name.to_owned(), tensor.clone()))
            });
            own.collect()
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
