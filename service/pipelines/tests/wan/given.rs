//! Folders, models and requests to begin with.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use pipelines::{Medium, Precision, Request, Video};
use tempfile::TempDir;

use crate::numbers::{fixtures, init_image, tensors};
use crate::open_model::{OpenModel, copy};

/// A model of the fixtures.
#[derive(Clone, Copy)]
pub(crate) struct Made {
    /// Name of the reference's answers.
    pub(crate) name: &'static str,
    /// The folder whose files are copied over those of `wan-tiny`.
    pub(crate) folder: &'static str,
    pub(crate) width: u32,
    /// Guidance of the second transformer.
    pub(crate) guidance: f32,
    pub(crate) has_start: bool,
}

const fn made(name: &'static str, folder: &'static str, width: u32, guidance: f32, has_start: bool) -> Made {
    Made {
        name,
        folder,
        width,
        guidance,
        has_start,
    }
}

pub(crate) const T2V: Made = made("t2v", "wan-tiny", 48, 0.0, false);
pub(crate) const TI2V: Made = made("ti2v", "wan-ti2v-tiny", 64, 0.0, false);
pub(crate) const TI2V_PICTURE: Made = made("ti2v.picture", "wan-ti2v-tiny", 64, 0.0, true);
pub(crate) const A14B: Made = made("a14b", "wan-a14b-tiny", 48, 3.0, false);
pub(crate) const I2V: Made = made("i2v", "wan-i2v-tiny", 48, 3.0, true);

pub(crate) const ALL: [Made; 5] = [T2V, TI2V, TI2V_PICTURE, A14B, I2V];

/// The reference's answers, by name.
pub(crate) fn expected() -> HashMap<String, Tensor> {
    tensors("wan-tiny/expected/pipelines.safetensors")
}

/// A model with all components resident.
pub(crate) fn open(path: &Path, precision: &Precision) -> OpenModel {
    OpenModel::open("wan", path, precision)
}

impl Made {
    /// Its pipeline's folder, which a test may modify.
    pub(crate) fn folder(self) -> TempDir {
        let folder = TempDir::new().expect("a folder");
        for from in ["wan-tiny", self.folder] {
            copy(&fixtures().join(from), folder.path());
        }
        folder
    }

    /// The request of the reference.
    pub(crate) fn request(self) -> Request {
        let start = |name: &str| init_image(&expected()[&format!("{name}.start")]);
        let video = Video {
            width: self.width,
            height: 32,
            frames: 9,
            frames_per_second: 16.0,
            init_image: self.has_start.then(|| start(self.name)),
            ..Video::default()
        };
        Request {
            prompt: "a red circle on the left of a blue square".to_owned(),
            negative_prompt: Some("small green hat".to_owned()),
            true_guidance: 4.0,
            guidance: self.guidance,
            seed: 5,
            ..Request::of(Medium::Video(video), 4, 0.0, 512)
        }
    }
}
