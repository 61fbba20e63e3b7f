//! Folders, models and requests to begin with.

use std::path::Path;

use candle_core::Tensor;
use pipelines::autoencoders::kl::{Chunking, VaeConfig, VaeDecoder};
use pipelines::{Image, InitImage, Medium, Precision, Request};
use tempfile::TempDir;

use crate::device::here;
use crate::numbers::{fixtures, json};
use crate::open_model::{OpenModel, copy};

/// A folder of the whole pipeline that a test may modify: its autoencoder is FLUX's.
pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    copy(&fixtures().join("z-image-tiny"), folder.path());
    copy(&fixtures().join("flux-tiny/vae"), &folder.path().join("vae"));
    folder
}

/// The same pipeline with the scheduler of the base model.
pub(crate) fn base_folder() -> TempDir {
    let folder = folder();
    let path = folder.path().join("scheduler/scheduler_config.json");
    let text = std::fs::read_to_string(&path).expect("a scheduler");
    let shifted = text.replace(r#""shift": 3.0"#, r#""shift": 6.0"#);
    assert_ne!(shifted, text);
    std::fs::write(&path, shifted).expect("a scheduler");
    folder
}

/// A Z-Image model with all components resident.
pub(crate) fn open(path: &Path, precision: &Precision) -> OpenModel {
    OpenModel::open("z-image", path, precision)
}

impl OpenModel {
    /// Decodes a latent to floats of 0 to 1, as `output_type="pt"`.
    pub(crate) fn picture(&self, latent: &Tensor) -> Tensor {
        let config: VaeConfig = json("flux-tiny/vae/config.json");
        let latent = here(&config.unscaled(latent).expect("a latent"));
        let decoder = VaeDecoder::new(&config, &self.tensors("vae")).expect("a decoder");
        decoder
            .decode(&latent, Chunking::Whole, &|| false)
            .expect("a picture")
            .affine(0.5, 0.5)
            .and_then(|picture| picture.clamp(0f32, 1f32))
            .expect("a picture")
    }
}

/// A small request, with sides that are not confused with others.
pub(crate) fn request() -> Request {
    Request {
        prompt: "a red circle on a blue square".to_owned(),
        seed: 7,
        ..Request::of(Medium::Image(Image::of(80, 48)), 3, 0.0, 512)
    }
}

/// The same request from a picture, with previews.
pub(crate) fn from_picture() -> Request {
    let (width, height) = (80, 48);
    let rgb = (0..3 * width * height).map(|i| (i % 251) as u8);
    let image = Image {
        init_image: Some(InitImage {
            width,
            height,
            rgb: rgb.collect(),
        }),
        ..Image::of(width, height)
    };
    Request {
        preview: true,
        steps: 5,
        strength: 0.8,
        medium: Medium::Image(image),
        ..request()
    }
}
