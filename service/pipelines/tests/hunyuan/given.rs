//! Folders, models and requests to begin with.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use pipelines::{InitImage, Medium, Precision, Request, Video};
use tempfile::TempDir;

pub(crate) use crate::film::Film;
use crate::numbers::{fixtures, numbers, tensors};
use crate::open_model::{OpenModel, copy};

/// A folder of HunyuanVideo's pipeline that a test may modify: CLIP is FLUX's.
pub(crate) fn film_folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    let fixtures = fixtures();
    copy(&fixtures.join("hunyuan-tiny"), folder.path());
    copy(
        &fixtures.join("flux-tiny/text_encoder"),
        &folder.path().join("text_encoder_2"),
    );
    copy(
        &fixtures.join("flux-tiny/tokenizer"),
        &folder.path().join("tokenizer_2"),
    );
    folder
}

/// A folder of FramePack's pipeline; the rest of it is HunyuanVideo's.
pub(crate) fn section_folder(is_forward: bool) -> TempDir {
    let folder = film_folder();
    copy(&fixtures().join("framepack-tiny"), folder.path());
    if is_forward {
        let written = r#"{"sampling_order": "forward"}"#;
        std::fs::write(folder.path().join("moored.json"), written).expect("a file");
    }
    folder
}

/// A model of films with all components resident.
pub(crate) fn open(path: &Path, precision: &Precision) -> OpenModel {
    OpenModel::open("hunyuan-video", path, precision)
}

/// Width and height of the reference's films.
pub(crate) const SIZE: (u32, u32) = (48, 32);

/// The reference's answers, by name.
pub(crate) fn expected() -> HashMap<String, Tensor> {
    tensors("hunyuan-tiny/expected/pipelines.safetensors")
}

/// The picture that the reference starts from.
pub(crate) fn start() -> InitImage {
    picture("start")
}

/// A picture of the reference, by its name.
pub(crate) fn picture(name: &str) -> InitImage {
    let rgb = numbers(&expected()[name]);
    InitImage {
        width: SIZE.0,
        height: SIZE.1,
        rgb: rgb.into_iter().map(|byte| byte as u8).collect(),
    }
}

/// A request of `frames` frames, as for the reference.
pub(crate) fn request(frames: u32, init_image: Option<InitImage>, steps: u32, seed: u64) -> Request {
    let video = Video {
        width: SIZE.0,
        height: SIZE.1,
        frames,
        frames_per_second: 30.0,
        init_image,
        ..Video::default()
    };
    Request {
        prompt: "a red circle on the left of a blue square".to_owned(),
        seed,
        ..Request::of(Medium::Video(video), steps, 6.0, 64)
    }
}
