//! A model with all components on a card, and functions that run its stages.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use pipelines::flux::{FluxModel, Stage};
use pipelines::{
    HostTensor, Image, InitImage, Medium, Model, Observer, Precision, Request, Role, StageError, StagePlan,
    StageRun, Unobserved, Values,
};
use tempfile::TempDir;

use crate::device::{here, test_device};
use crate::numbers::{fixtures, resident};
use crate::resident::{components_of, copy};

/// Precision of the fixtures.
pub(crate) const F32: Precision = Precision::full(DType::F32);
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

/// A model with all components resident.
pub(crate) struct Workshop {
    pub(crate) model: FluxModel,
    components: RefCell<HashMap<String, Arc<ComponentTensors>>>,
    /// Components requested since the last call.
    pub(crate) asked: RefCell<Vec<String>>,
}

impl Workshop {
    /// Opens a model in f32, loads it with the CPU card and puts it on the device of the tests.
    pub(crate) fn open(path: &Path) -> Workshop {
        Workshop::open_in(path, F32)
    }

    /// Opens a model in another precision.
    pub(crate) fn open_in(path: &Path, precision: Precision) -> Workshop {
        let model = FluxModel::open(path, &precision)
            .expect("a sound model")
            .expect("a FLUX model");
        Workshop::of(model)
    }

    /// With the components of a model resident.
    pub(crate) fn of(model: FluxModel) -> Workshop {
        let components = components_of(&model);
        Workshop {
            model,
            components: RefCell::new(components),
            asked: RefCell::default(),
        }
    }

    /// Replaces the tensors of a component.
    pub(crate) fn replace(&self, name: &str, tensors: HashMap<String, Tensor>) {
        self.components
            .borrow_mut()
            .insert(name.to_owned(), Arc::new(resident(&tensors)));
    }

    pub(crate) fn tensors(&self, name: &str) -> Arc<ComponentTensors> {
        Arc::clone(&self.components.borrow()[name])
    }

    fn give(&self, name: &str) -> Result<Arc<ComponentTensors>, StageError> {
        self.asked.borrow_mut().push(name.to_owned());
        Ok(self.tensors(name))
    }

    /// Runs one stage over the values that it takes, without the data of media that it does not read, and checks that it used
    /// only its named components and gave its named values.
    pub(crate) fn run(
        &self,
        plan: &StagePlan,
        rung: usize,
        request: &Request,
        values: &Values,
        observer: &mut dyn Observer,
    ) -> Result<Values, StageError> {
        self.asked.borrow_mut().clear();
        let tensors = |name: &str| self.give(name);
        let taken = plan.takes.iter().filter_map(|taken| {
            let value = values.get(&taken.name)?;
            Some((taken.name.clone(), value.clone()))
        });
        let without_data = request.without_media_data();
        let stage = StageRun {
            plan,
            rung,
            request: match plan.reads_media {
                true => request,
                false => &without_data,
            },
            values: &taken.collect(),
            tensors: &tensors,
            device: test_device(),
        };
        let result = self.model.run(&stage, observer);
        for asked in self.asked.borrow().iter() {
            assert!(plan.components.contains(asked), "{asked}");
        }
        if let Ok(given) = &result {
            let mut named: Vec<&String> = plan.gives.iter().collect();
            named.sort();
            assert!(given.keys().eq(named), "{} gave {:?}", plan.name, given.keys());
        }
        result
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

    /// Runs all stages but the decode, and returns all values.
    pub(crate) fn values(
        &self,
        request: &Request,
        observer: &mut dyn Observer,
    ) -> Result<Values, StageError> {
        let mut values = Values::new();
        for plan in self.stages(request) {
            if plan.role == Role::Decode {
                break;
            }
            let given = self.run(&plan, 0, request, &values, observer)?;
            values.extend(given);
        }
        Ok(values)
    }

    /// Runs all stages but the decode, and returns the final latent.
    pub(crate) fn denoised(
        &self,
        request: &Request,
        observer: &mut dyn Observer,
    ) -> Result<HostTensor, StageError> {
        let values = self.values(request, observer)?;
        Ok(values["latent"].clone())
    }

    /// Decodes a latent to floats of 0 to 1, as `output_type="pt"`.
    pub(crate) fn picture(&self, request: &Request, latent: &Tensor) -> Tensor {
        let tensors = |name: &str| self.give(name);
        let mut observer = Unobserved;
        let stage = Stage {
            model: &self.model,
            request,
            tensors: &tensors,
            device: test_device(),
            observer: &mut observer,
        };
        let picture = stage
            .decoded(&here(latent), pipelines::autoencoder_kl::Chunking::Whole)
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

/// An init image of a fixture, `[height, width, 3]` bytes.
pub(crate) fn init_image(picture: &Tensor) -> InitImage {
    let (height, width, _) = picture.dims3().expect("a picture");
    let rgb = picture
        .flatten_all()
        .and_then(|bytes| bytes.to_vec1::<u8>())
        .expect("bytes");
    InitImage {
        width: width as u32,
        height: height as u32,
        rgb: rgb.into(),
    }
}
