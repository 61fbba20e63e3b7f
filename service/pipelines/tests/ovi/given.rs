//! The tiny model of the fixtures, with its inputs.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use pipelines::autoencoders::mmaudio::MmAudioConfig;
use pipelines::autoencoders::mmaudio::vocoder::VocoderConfig;
use pipelines::ovi::{FilmTokens, FusionConfig};
use pipelines::{InitImage, Medium, Request, Video};
use serde::Deserialize;
use tempfile::TempDir;

use crate::device::here;
use crate::formula::{mmaudio_weights, numbers as numbers_of, tensor, vocoder_weights};
use crate::numbers::{fixtures, json};
use crate::open_model::copy;

pub(crate) type Tensors = HashMap<String, Tensor>;

/// `ovi-tiny/config.json`.
#[derive(Deserialize)]
pub(crate) struct Given {
    #[serde(flatten)]
    pub(crate) config: FusionConfig,
    /// Latent frames, and cells of a frame.
    pub(crate) size: [usize; 3],
    /// Latent frames of the sound.
    pub(crate) frames: usize,
    /// Tokens of the texts.
    texts: [usize; 3],
    pub(crate) skipped: usize,
    pub(crate) steps: u32,
    pub(crate) time: f32,
    pub(crate) guidance: HashMap<String, f64>,
}

impl Given {
    pub(crate) fn read() -> Given {
        json("ovi-tiny/config.json")
    }

    pub(crate) fn tokens(&self, begins_with_picture: bool) -> FilmTokens {
        let [frames, h, w] = self.size;
        FilmTokens {
            film: [frames, h / 2, w / 2],
            begins_with_picture,
            sound: self.frames,
        }
    }

    /// Weights with everything randomised, by their names here.
    pub(crate) fn weights(&self) -> Tensors {
        let authors = self.config.authors_tensor_shapes().into_iter();
        let named = self.config.tensor_shapes().into_iter().zip(authors);
        named
            .map(|((name, shape), (authors, _))| (name, weight(&authors, &shape)))
            .collect()
    }

    /// The states of a text: of the prompt, of the film's negative one, and of the sound's.
    pub(crate) fn text(&self, number: usize) -> Tensor {
        let shape = [1, self.texts[number], self.config.video.text_dim];
        here(&tensor(&format!("text.{number}"), &shape, 1.0, 0.0))
    }

    /// Noise of the film, `[channels, frames, h, w]`.
    pub(crate) fn film(&self) -> Tensor {
        let [frames, h, w] = self.size;
        tensor("noise.video", &[self.config.video.in_dim, frames, h, w], 1.0, 0.0)
    }

    /// Noise of the sound, `[frames, channels]`.
    pub(crate) fn sound(&self) -> Tensor {
        tensor("noise.audio", &[self.frames, self.config.audio.in_dim], 1.0, 0.0)
    }

    /// The latent of a picture, `[channels, 1, h, w]`.
    pub(crate) fn picture(&self) -> Tensor {
        let [_, h, w] = self.size;
        tensor("picture", &[self.config.video.in_dim, 1, h, w], 1.0, 0.0)
    }
}

/// A tensor of the authors' model.
fn weight(name: &str, shape: &[usize]) -> Tensor {
    let (gain, centre) = match shape {
        _ if name.ends_with("modulation") => (0.4, 0.05),
        [_, row @ ..] if !row.is_empty() => ((row.iter().product::<usize>() as f64).powf(-0.5), 0.0),
        _ if name.ends_with("bias") => (0.2, 0.0),
        _ => (0.4, 1.0),
    };
    tensor(name, shape, gain, centre)
}

/// A latent `[channels, frames, h, w]` as tokens, `[1, frames h/2 w/2, 4 channels]`: cell by cell, channels last.
pub(crate) fn tokens_of(latent: &Tensor) -> Tensor {
    let (channels, frames, h, w) = latent.dims4().unwrap();
    let cells = latent
        .reshape(&[channels, frames, h / 2, 2, w / 2, 2][..])
        .unwrap();
    let cells = cells
        .permute(&[1, 2, 4, 3, 5, 0][..])
        .unwrap()
        .contiguous()
        .unwrap();
    cells
        .reshape((1, frames * (h / 2) * (w / 2), 4 * channels))
        .unwrap()
}

/// Name of the tiny model's file: that of a published one, which declares its variant.
pub(crate) const FILE: &str = "Ovi-960x960-5s.safetensors";

/// A folder with the tiny model, its base and the decoders of its sound.
pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    let (given, fixtures) = (Given::read(), fixtures());
    let base = folder.path().join("wan");
    copy(&fixtures.join("wan-ti2v-tiny"), &base);
    for part in ["text_encoder", "tokenizer"] {
        copy(&fixtures.join("wan-tiny").join(part), &base.join(part));
    }
    let authors = given.config.authors_tensor_shapes().into_iter();
    let fusion = authors.map(|(name, shape)| (name.clone(), weight(&name, &shape)));
    save(&fusion.collect(), &folder.path().join(FILE));
    let configs: Configs = json("mmaudio-tiny/configs.json");
    let vae = mmaudio_weights(&configs.vae["published"]);
    save(&vae, &folder.path().join("v1-16.safetensors"));
    let vocoder = vocoder_weights(&configs.vocoder["published"]);
    save(&vocoder, &folder.path().join("best_netG.safetensors"));
    folder
}

pub(crate) fn save(tensors: &Tensors, path: &Path) {
    candle_core::safetensors::save(tensors, path).expect("a file");
}

/// `mmaudio-tiny/configs.json`.
#[derive(Deserialize)]
struct Configs {
    vae: HashMap<String, MmAudioConfig>,
    vocoder: HashMap<String, VocoderConfig>,
}

/// `ovi-tiny/pipelines.json`.
#[derive(Deserialize)]
struct Asked {
    prompt: String,
    negative_prompts: [String; 2],
    seed: u64,
    steps: u32,
    width: u32,
    height: u32,
    frames: u32,
}

/// The request of the reference's films, from text or from a picture.
pub(crate) fn request(from_picture: bool) -> Request {
    let asked: Asked = json("ovi-tiny/pipelines.json");
    let (width, height) = (asked.width, asked.height);
    let picture = || {
        let levels = numbers_of("start", 3 * (width * height) as usize);
        let byte = |number: f64| ((number / 3.5 + 0.5) * 255.0).floor() as u8;
        InitImage {
            width,
            height,
            rgb: levels.into_iter().map(byte).collect(),
        }
    };
    let video = Video {
        width,
        height,
        frames: asked.frames,
        frames_per_second: 24.0,
        init_image: from_picture.then(picture),
        ..Video::default()
    };
    let [film, sound] = asked.negative_prompts;
    Request {
        prompt: asked.prompt,
        negative_prompt: Some(format!("{film} Audio: {sound}")),
        true_guidance: 4.0,
        seed: asked.seed,
        ..Request::of(Medium::Video(video), asked.steps, 1.0, 512)
    }
}
