//! Folders, models and requests to begin with.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use pipelines::autoencoders::kl::{Chunking, VaeConfig, VaeDecoder};
use pipelines::{Image, InitImage, Medium, Precision, Request};
use tempfile::TempDir;

use crate::device::here;
use crate::numbers::{fixtures, json, tensors};
use crate::open_model::{OpenModel, copy};

/// A folder of the whole pipeline that a test may modify.
pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    copy(&fixtures().join("flux2-tiny"), folder.path());
    folder
}

/// The same pipeline, not distilled.
pub(crate) fn base_folder() -> TempDir {
    let folder = folder();
    let index = folder.path().join("model_index.json");
    let text = std::fs::read_to_string(&index).expect("an index");
    let text = text.replace(r#""is_distilled": true"#, r#""is_distilled": false"#);
    std::fs::write(&index, text).expect("an index");
    folder
}

/// A FLUX.2 model with all components resident.
pub(crate) fn open(path: &Path, precision: &Precision) -> OpenModel {
    OpenModel::open("flux2", path, precision)
}

/// The autoencoder's latent `[1, c, 2 h, 2 w]` of a transformer's, by a second implementation of the statistics.
pub(crate) fn of_autoencoder(latent: &Tensor) -> Tensor {
    let weights = tensors("flux2-tiny/vae/diffusion_pytorch_model.safetensors");
    let (_, patch, rows, columns) = latent.dims4().expect("a latent");
    let read = |name: &str| -> Vec<f32> {
        let tensor = weights[name].to_dtype(DType::F32).expect("numbers");
        tensor.to_vec1().expect("numbers")
    };
    let (mean, variance) = (read("bn.running_mean"), read("bn.running_var"));
    let numbers = crate::numbers::numbers(latent);
    let (channels, height, width) = (patch / 4, 2 * rows, 2 * columns);
    let mut own = vec![0f32; channels * height * width];
    for (place, number) in numbers.iter().enumerate() {
        let (of_patch, cell) = (place / (rows * columns), place % (rows * columns));
        let (channel, corner) = (of_patch / 4, of_patch % 4);
        let (y, x) = (
            2 * (cell / columns) + corner / 2,
            2 * (cell % columns) + corner % 2,
        );
        let deviation = (f64::from(variance[of_patch]) + 1e-4).sqrt();
        own[(channel * height + y) * width + x] =
            (f64::from(*number) * deviation + f64::from(mean[of_patch])) as f32;
    }
    Tensor::from_vec(own, (1, channels, height, width), &Device::Cpu).expect("a latent")
}

impl OpenModel {
    /// Decodes a latent of the autoencoder to floats of 0 to 1, as `output_type="pt"`.
    pub(crate) fn picture(&self, latent: &Tensor) -> Tensor {
        let config: VaeConfig = json("flux2-tiny/vae/config.json");
        let decoder = VaeDecoder::new(&config, &self.tensors("vae")).expect("a decoder");
        decoder
            .decode(&here(latent), Chunking::Whole, &|| false)
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
        ..Request::of(Medium::Image(Image::of(80, 48)), 3, 0.0, 64)
    }
}

/// A picture of this size.
pub(crate) fn picture(width: u32, height: u32) -> InitImage {
    let rgb = (0..3 * width * height).map(|i| (i % 251) as u8);
    InitImage {
        width,
        height,
        rgb: rgb.collect(),
    }
}

/// The same request from a picture, with previews.
pub(crate) fn from_picture() -> Request {
    let image = Image {
        init_image: Some(picture(80, 48)),
        ..Image::of(80, 48)
    };
    Request {
        preview: true,
        steps: 5,
        strength: 0.8,
        medium: Medium::Image(image),
        ..request()
    }
}

/// The same request with two reference pictures.
pub(crate) fn with_references() -> Request {
    let image = Image {
        references: vec![picture(64, 96), picture(80, 64)],
        ..Image::of(80, 48)
    };
    Request {
        medium: Medium::Image(image),
        ..request()
    }
}
