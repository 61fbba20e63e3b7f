//! Folders, models and requests to begin with.

use std::collections::HashMap;
use std::path::Path;

use candle_core::Tensor;
use pipelines::{InitImage, Medium, Observer, Piece, Precision, Request, Values, Video};
use tempfile::TempDir;

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

impl OpenModel {
    /// Runs all stages on their rungs of this number: all values, and the film.
    pub(crate) fn film(&self, request: &Request, rung: usize) -> (Values, Film) {
        let plan = self.model.plan(request).expect("a valid request");
        let mut values = Values::new();
        let mut film = Film::default();
        for stage in &plan {
            let rung = rung.min(stage.rungs.len() - 1);
            let given = self
                .run(stage, rung, request, &values, &mut film)
                .expect("a stage");
            values.extend(given);
        }
        (values, film)
    }
}

/// A film as it is delivered.
#[derive(Default)]
pub(crate) struct Film {
    pub(crate) pieces: Vec<Piece>,
    pub(crate) steps: Vec<(u32, u32)>,
    /// Width, height and bytes of each preview.
    pub(crate) previews: Vec<(u32, u32, Vec<u8>)>,
}

impl Film {
    /// All frames, each of which was delivered once.
    pub(crate) fn frames(&self) -> Vec<Vec<u8>> {
        let format = self.pieces[0].format;
        let mut frames: Vec<Option<Vec<u8>>> = vec![None; format.units() as usize];
        for piece in &self.pieces {
            assert_eq!(piece.format, format);
            let bytes = format.unit_bytes() as usize;
            assert!(piece.units().is_some_and(|units| units > 0));
            for (frame, data) in frames[piece.first as usize..]
                .iter_mut()
                .zip(piece.data.chunks_exact(bytes))
            {
                assert!(frame.is_none(), "a frame was delivered twice");
                *frame = Some(data.to_vec());
            }
        }
        let frames = frames.into_iter();
        frames.map(|frame| frame.expect("a delivered frame")).collect()
    }
}

impl Observer for Film {
    fn step(&mut self, n: u32, of: u32) {
        self.steps.push((n, of));
    }
    fn wants_preview(&mut self) -> bool {
        true
    }
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>) {
        self.previews.push((width, height, rgb));
    }
    fn deliver(&mut self, piece: Piece) {
        self.pieces.push(piece);
    }
    fn cancelled(&self) -> bool {
        false
    }
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
