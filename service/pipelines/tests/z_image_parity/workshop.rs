//! A model with all components on a card, and functions that run its stages.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use pipelines::autoencoder_kl::{Chunking, VaeConfig, VaeDecoder};
use pipelines::{
    HostTensor, Image, InitImage, Medium, Model, Observer, Precision, Request, Role, StageError, StagePlan,
    Values, catalogue,
};
use tempfile::TempDir;

use crate::device::here;
use crate::numbers::{fixtures, json};
use crate::resident::{components_of, copy, run_stage};

/// Precision of the fixtures.
pub(crate) const F32: Precision = Precision::full(DType::F32);

/// A folder of the whole pipeline that a test may modify: its autoencoder is FLUX's.
pub(crate) fn folder() -> TempDir {
    let folder = TempDir::new().expect("a folder");
    copy(&fixtures().join("z-image-tiny"), folder.path());
    copy(&fixtures().join("flux-tiny/vae"), &folder.path().join("vae"));
    folder
}

/// A model with all components resident.
pub(crate) struct Workshop {
    pub(crate) model: Arc<dyn Model>,
    components: HashMap<String, Arc<ComponentTensors>>,
}

impl Workshop {
    /// Opens a model, loads it with the CPU card and puts it on the device of the tests.
    pub(crate) fn open(path: &Path, precision: &Precision) -> Workshop {
        let model = catalogue().open(path, precision).expect("a sound model");
        assert_eq!(model.family(), "z-image");
        Workshop::of(model)
    }

    /// With the components of a model resident.
    pub(crate) fn of(model: Arc<dyn Model>) -> Workshop {
        let components = components_of(&*model);
        Workshop { model, components }
    }

    pub(crate) fn tensors(&self, name: &str) -> Arc<ComponentTensors> {
        Arc::clone(&self.components[name])
    }

    /// Runs one stage over the values that it takes, and checks that it used only its named components and gave its
    /// named values.
    pub(crate) fn run(
        &self,
        plan: &StagePlan,
        rung: usize,
        request: &Request,
        values: &Values,
        observer: &mut dyn Observer,
    ) -> Result<Values, StageError> {
        let of = (&*self.model, &self.components);
        run_stage(of, (plan, rung), request, values, observer)
    }

    /// The stages of a valid request, with the memory of the previews that it asks for.
    pub(crate) fn stages(&self, request: &Request) -> Vec<StagePlan> {
        let plan = self.model.plan(request).expect("a valid request");
        plan.into_iter().map(StagePlan::with_previews).collect()
    }

    /// The stage with this name of a valid request.
    pub(crate) fn stage(&self, request: &Request, name: &str) -> StagePlan {
        let mut stages = self.stages(request).into_iter();
        stages.find(|stage| stage.name == name).expect("a stage")
    }

    /// Runs all stages but the decode, and returns the final latent.
    pub(crate) fn denoised(
        &self,
        request: &Request,
        observer: &mut dyn Observer,
    ) -> Result<HostTensor, StageError> {
        let mut values = Values::new();
        for plan in self.stages(request) {
            if plan.role != Role::Decode {
                let given = self.run(&plan, 0, request, &values, observer)?;
                values.extend(given);
            }
        }
        Ok(values.remove("latent").expect("a latent"))
    }

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

/// An init image of a fixture, `[height, width, 3]` bytes.
pub(crate) fn init_image(picture: &Tensor) -> InitImage {
    let (height, width, _) = picture.dims3().expect("a picture");
    let rgb = picture.flatten_all().and_then(|bytes| bytes.to_vec1::<u8>());
    InitImage {
        width: width as u32,
        height: height as u32,
        rgb: rgb.expect("bytes").into(),
    }
}
