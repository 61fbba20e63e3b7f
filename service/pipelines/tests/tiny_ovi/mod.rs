//! A tiny Ovi model with its base and the decoders of its sound. Its weights are not stored: they are functions of a name and an
//! index, as in fixtures/make_ovi_fixtures.py and fixtures/make_mmaudio_fixtures.py.
#![allow(dead_code, clippy::expect_used)] // Each binary takes what it needs; what tests share is outside of them.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use pipelines::autoencoders::mmaudio::MmAudioConfig;
use pipelines::autoencoders::mmaudio::vocoder::VocoderConfig;
use pipelines::ovi::FusionConfig;
use serde::Deserialize;

use crate::formula::{mmaudio_weights, tensor, vocoder_weights};
use crate::numbers::{fixtures, json};
use crate::open_model::copy;

/// Name of the model's file: that of a published one, which declares its variant.
pub(crate) const FILE: &str = "Ovi-960x960-5s.safetensors";

/// `mmaudio-tiny/configs.json`.
#[derive(Deserialize)]
struct Configs {
    vae: HashMap<String, MmAudioConfig>,
    vocoder: HashMap<String, VocoderConfig>,
}

/// Writes the model into a folder.
pub(crate) fn write(folder: &Path) {
    let base = folder.join("wan");
    copy(&fixtures().join("wan-ti2v-tiny"), &base);
    for part in ["text_encoder", "tokenizer"] {
        copy(&fixtures().join("wan-tiny").join(part), &base.join(part));
    }
    save(&fusion(&json("ovi-tiny/config.json")), &folder.join(FILE));
    write_sound(folder);
}

/// The fusion model of a configuration, in the authors' names.
pub(crate) fn fusion(config: &FusionConfig) -> HashMap<String, Tensor> {
    let authors = config.authors_tensor_shapes().into_iter();
    let weights = authors.map(|(name, shape)| (name.clone(), weight(&name, &shape)));
    weights.collect()
}

/// Writes the decoders of the sound into a folder.
pub(crate) fn write_sound(folder: &Path) {
    let configs: Configs = json("mmaudio-tiny/configs.json");
    let vae = mmaudio_weights(&configs.vae["published"]);
    save(&vae, &folder.join("v1-16.safetensors"));
    let vocoder = vocoder_weights(&configs.vocoder["published"]);
    save(&vocoder, &folder.join("best_netG.safetensors"));
}

pub(crate) fn save(tensors: &HashMap<String, Tensor>, path: &Path) {
    candle_core::safetensors::save(tensors, path).expect("a file");
}

/// A tensor of the authors' model.
pub(crate) fn weight(name: &str, shape: &[usize]) -> Tensor {
    let (gain, centre) = match shape {
        _ if name.ends_with("modulation") => (0.4, 0.05),
        [_, row @ ..] if !row.is_empty() => ((row.iter().product::<usize>() as f64).powf(-0.5), 0.0),
        _ if name.ends_with("bias") => (0.2, 0.0),
        _ => (0.4, 1.0),
    };
    tensor(name, shape, gain, centre)
}
