//! The tiny model of the fixtures, with its inputs.

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::Tensor;
use pipelines::ovi::{FilmTokens, FusionConfig};
use pipelines::{InitImage, Medium, Request, Video};
use serde::Deserialize;
use tempfile::TempDir;

use crate::device::here;
use crate::formula::{numbers as numbers_of, tensor};
use crate::numbers::json;
use crate::tiny_ovi::{FILE, weight, write};

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

/// The tiny model's file.
pub(crate) fn file(folder: &TempDir) -> PathBuf {
    folder.path().join(FILE)
}

/// A folder with the tiny model, its base and the decoders of its sound.
pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    write(folder.path());
    folder
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
