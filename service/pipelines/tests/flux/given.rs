//! Folders, models and requests to begin with.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use pipelines::autoencoders::kl::{Chunking, VaeConfig, VaeDecoder};
use pipelines::flux::FluxModel;
use pipelines::{Image, InitImage, Medium, Precision, Request, StagePlan, Values};
use tempfile::TempDir;

use crate::device::here;
use crate::numbers::{fixtures, json};
use crate::open_model::{F32, OpenModel, copy};

/// Precision of a card.
pub(crate) const BF16: Precision = Precision::full(DType::BF16);

/// A copy of fixture folders, overlaid, that a test may modify.
pub(crate) fn copy_of(folders: &[&str]) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    folders
        .iter()
        .for_each(|name| copy(&fixtures().join(name), folder.path()));
    folder
}

/// A folder that is permanent, or deleted on drop.
pub(crate) enum Folder {
    Fixture(PathBuf),
    Copy(TempDir),
}

impl Folder {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Folder::Fixture(path) => path,
            Folder::Copy(folder) => folder.path(),
        }
    }
}

/// The fixture of this kind: `dev` or `schnell`.
pub(crate) fn folder(kind: &str) -> Folder {
    match kind {
        "dev" => Folder::Fixture(fixtures().join("flux-tiny")),
        _ => Folder::Copy(copy_of(&["flux-tiny", "flux-tiny-schnell"])),
    }
}

/// A FLUX model in f32 with all components resident.
pub(crate) fn open(path: &Path) -> OpenModel<FluxModel> {
    open_in(path, F32)
}

/// A FLUX model in another precision.
pub(crate) fn open_in(path: &Path, precision: Precision) -> OpenModel<FluxModel> {
    let model = FluxModel::open(path, &precision)
        .expect("a sound model")
        .expect("a FLUX model");
    OpenModel::of(Arc::new(model))
}

impl OpenModel<FluxModel> {
    /// Decodes a latent to floats of 0 to 1, as `output_type="pt"`.
    pub(crate) fn picture(&self, latent: &Tensor) -> Tensor {
        let config: VaeConfig = json("flux-tiny/vae/config.json");
        let latent = here(&config.unscaled(latent).expect("a latent"));
        let decoder = VaeDecoder::new(&config, &self.tensors("vae")).expect("a decoder");
        let picture = decoder
            .decode(&latent, Chunking::Whole, &|| false)
            .expect("a picture");
        picture
            .affine(0.5, 0.5)
            .and_then(|picture| picture.clamp(0f32, 1f32))
            .expect("a picture")
    }
}

/// A small request.
pub(crate) fn request() -> Request {
    Request {
        prompt: "a red circle on a blue square".to_owned(),
        seed: 7,
        ..Request::of(Medium::Image(Image::of(64, 64)), 4, 3.5, 48)
    }
}

/// The same request for a picture of another size.
pub(crate) fn sized(width: u32, height: u32) -> Request {
    Request {
        medium: Medium::Image(Image::of(width, height)),
        ..request()
    }
}

/// The same request, starting from a picture with a strength.
pub(crate) fn from_image(image: InitImage, strength: f32) -> Request {
    Request {
        strength,
        medium: Medium::Image(Image {
            width: image.width,
            height: image.height,
            init_image: Some(image),
            ..Image::default()
        }),
        ..request()
    }
}

/// A black starting picture.
pub(crate) fn black(width: u32, height: u32) -> InitImage {
    InitImage {
        width,
        height,
        rgb: vec![0; (3 * width * height) as usize].into(),
    }
}

/// Names of all possible stages of a request.
pub(crate) const STAGES: [&str; 4] = ["encode_text", "encode_image", "denoise", "decode"];

/// Runs all stages of a request through `run`, and passes their values on.
pub(crate) fn through_stages(
    opened: &OpenModel<FluxModel>,
    request: &Request,
    mut run: impl FnMut(&StagePlan, &Values) -> Values,
) {
    let mut values = Values::new();
    for plan in opened.stages(request) {
        let given = run(&plan, &values);
        values.extend(given);
    }
}

/// An odd size, so that no dimensions are confused.
pub(crate) fn odd() -> Request {
    Request {
        max_sequence_length: 40,
        steps: 2,
        ..sized(96, 48)
    }
}

/// The same from a picture, with previews.
pub(crate) fn with_picture() -> Request {
    let (width, height) = (96, 48);
    let rgb = (0..3 * width * height).map(|i| (i % 251) as u8);
    let image = InitImage {
        width,
        height,
        rgb: rgb.collect(),
    };
    Request {
        max_sequence_length: 40,
        preview: true,
        ..from_image(image, 0.8)
    }
}
