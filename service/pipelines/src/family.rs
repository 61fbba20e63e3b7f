//! What a model family is to the rest of the service.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::{ComponentTensors, LoadPlan, Target, TensorSource, WeightFormat};
use residency::{Bytes, Component, ComponentId};

use crate::files::pipeline_class;
use crate::host::HostTensor;
use crate::media::Piece;
use crate::out_of_memory::is_out_of_memory;
use crate::plan::{StagePlan, ValueShape, Values};
use crate::quantization::Quantization;
use crate::request::{Medium, Request, RequestError};

/// How weights are held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Precision {
    /// The dtype that a card computes in: that of activations, and of weights in full precision.
    pub dtype: DType,
    /// What components are quantized to while they are loaded.
    pub quantization: Quantization,
}

impl Precision {
    /// Everything as it is stored, computed in this dtype.
    pub const fn full(dtype: DType) -> Precision {
        Precision {
            dtype,
            quantization: Quantization::NONE,
        }
    }
}

/// How a stage reports, and how it learns that nobody wants it any more.
pub trait Observer {
    /// Step `n` of `of` is done.
    fn step(&mut self, n: u32, of: u32);
    /// Whether a preview is wanted now (throttled by whoever asks for it).
    fn wants_preview(&mut self) -> bool;
    /// A preview: RGB, 8 bits each.
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>);
    /// The next piece of what was asked for. A stage that takes long delivers as it goes: pieces are progress too.
    fn deliver(&mut self, piece: Piece);
    /// Asked between steps and between layers that take long: `true` ends the stage with
    /// [`StageError::Cancelled`].
    fn cancelled(&self) -> bool;
}

/// An observer that sees nothing and never cancels.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn step(&mut self, _n: u32, _of: u32) {}
    fn wants_preview(&mut self) -> bool {
        false
    }
    fn preview(&mut self, _width: u32, _height: u32, _rgb: Vec<u8>) {}
    fn deliver(&mut self, _piece: Piece) {}
    fn cancelled(&self) -> bool {
        false
    }
}

/// Why a folder or file is no model that we can run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// No family recognises it.
    #[error("{} is no pipeline that this version knows: {problem}", path.display())]
    NotAPipeline {
        /// The folder or file.
        path: PathBuf,
        /// What was looked for.
        problem: String,
    },
    /// A file is missing, truncated, or not what its header says.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// It is understood, and not supported.
    #[error("{} is not supported: {problem}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What is not supported and what is.
        problem: String,
    },
    /// What was asked of a component's weights cannot be.
    #[error("{problem}")]
    Quantization {
        /// The component that it was asked of.
        component: String,
        /// What cannot be, and what can.
        problem: String,
    },
}

impl ModelError {
    /// A component is to be quantized that there is not.
    pub(crate) fn no_such_component(component: &str, known: &[&str]) -> ModelError {
        ModelError::Quantization {
            component: component.to_owned(),
            problem: format!(
                "there is no component {component:?} to quantize: there are {}",
                known.join(", ")
            ),
        }
    }

    /// A component is to be quantized that the checkpoint stores quantized.
    pub(crate) fn stored_quantized(component: &str, format: WeightFormat) -> ModelError {
        ModelError::Quantization {
            component: component.to_owned(),
            problem: format!(
                "{component} is stored as {format} already: leave its quantization out, with {component}=full beside a preset"
            ),
        }
    }
}

/// Why a stage failed.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    /// The observer said so.
    #[error("cancelled")]
    Cancelled,
    /// The card has not enough memory for the activations.
    #[error("out of memory in {stage}")]
    OutOfMemory {
        /// The stage.
        stage: String,
    },
    /// A number that is not finite.
    #[error("{component} produced a value that is not finite at step {step}")]
    NotFinite {
        /// The component that produced it.
        component: String,
        /// The denoising step, from 1; 0 outside denoising.
        step: u32,
    },
    /// The stage was given something that does not fit the model.
    #[error("{0}")]
    BadInput(String),
    /// The checkpoint has not the tensor that the mathematics asks for.
    #[error("{component}: {missing}")]
    Missing {
        /// The component.
        component: String,
        /// Which tensor and what is wrong.
        missing: gpu::MissingTensor,
    },
    /// The tensor library failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
}

impl StageError {
    /// As a stage tells it: an error of the tensor library that means that memory ran out says so in its words only.
    pub(crate) fn of_stage(self, stage: &str) -> StageError {
        match self {
            StageError::Tensor(error) if is_out_of_memory(&error) => StageError::OutOfMemory {
                stage: stage.to_owned(),
            },
            other => other,
        }
    }
}

/// Everything that one run of a stage is computed from.
#[derive(Clone, Copy)]
pub struct StageRun<'a> {
    /// The stage.
    pub plan: &'a StagePlan,
    /// Indexes [`StagePlan::rungs`].
    pub rung: usize,
    /// The request, with the seed of the item.
    pub request: &'a Request,
    /// What the stage takes.
    pub values: &'a Values,
    /// The tensors of the stage's components, by name.
    pub tensors: &'a dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
    /// Where they are, and where it computes.
    pub device: &'a candle_core::Device,
}

impl StageRun<'_> {
    /// A value, if the stage takes it.
    ///
    /// # Errors
    /// As [`StageRun::value`], where it takes it.
    pub fn value_if_taken(&self, name: &str) -> Result<Option<&HostTensor>, StageError> {
        let is_taken = self.plan.takes.iter().any(|taken| taken.name == name);
        is_taken.then(|| self.value(name)).transpose()
    }

    /// A value that the stage takes.
    ///
    /// # Errors
    /// [`StageError::BadInput`] where it is not there, or of another shape than the plan says.
    pub fn value(&self, name: &str) -> Result<&HostTensor, StageError> {
        let value = self.values.get(name);
        let value = value.ok_or_else(|| {
            StageError::BadInput(format!("{} takes {name}, which is not there", self.plan.name))
        })?;
        let taken = self.plan.takes.iter().find(|taken| taken.name == name);
        match taken {
            Some(taken) if taken.shape != value.shape => Err(StageError::BadInput(format!(
                "{name} of shape {:?} where {:?} is expected",
                value.shape, taken.shape
            ))),
            _ => Ok(value),
        }
    }
}

/// A checkpoint that a family has recognised, by its headers alone: it holds no weights. It can be asked
/// what it needs, and, given tensors, it computes.
pub trait Model: Send + Sync {
    /// The family's name: `flux`.
    fn family(&self) -> &'static str;

    /// What it generates for a request that leaves everything open; its medium is the one that the model generates.
    fn defaults(&self) -> Request;

    /// Its components, with exact bytes. Identity is provisional (the resolved path) until
    /// [`Model::files_of`] has been hashed; callers may put another identity in.
    fn components(&self) -> &[Component];

    /// How a component is read.
    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan>;

    /// The quantized format that most of a component's quantized bytes are held in, whether it is made at load or
    /// stored so; `None` where nothing is quantized.
    fn format_of(&self, component_name: &str) -> Option<WeightFormat> {
        match self.load_plan(component_name)? {
            LoadPlan::Files(sources) => format_of_plan(sources),
            LoadPlan::Synthetic(_) => None,
        }
    }

    /// The files whose content is the component's identity.
    fn files_of(&self, component_name: &str) -> Vec<Arc<Path>>;

    /// The stages of a request, in order. The values that a [`Role::Decode`](crate::Role::Decode) stage takes are what a client may keep, bring
    /// back, and have decoded later.
    ///
    /// # Errors
    /// Every field of the request that is wrong.
    fn plan(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>>;

    /// A request of defaults whose decode takes values of these shapes; `None`: it takes others.
    fn request_of(&self, values: &[ValueShape]) -> Option<Request>;

    /// What of the same request might fit where the whole does not, each by its label, the closest first.
    fn smaller(&self, request: &Request) -> Vec<(String, Request)>;

    /// The smallest request that it can run, in one step: run through all stages, it proves that the model works.
    fn smallest(&self) -> Request;

    /// Shapes that a stage of a request asks cuDNN for on a card, run on its first rung: what is worth making plans for
    /// before it begins ([`ops::make_plans`]). It is advice: any list does, and the default is none.
    fn planned(&self, _stage: &str, _request: &Request) -> Vec<ops::Planned> {
        Vec::new()
    }

    /// Runs one stage: the values that it gives. What it delivers goes to the observer.
    ///
    /// # Errors
    /// [`StageError`].
    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError>;
}

/// The same request with its sides in three, two and one quarters, rounded down to a multiple of `grain` pixels: what
/// most families of pictures and films can offer instead.
pub(crate) fn smaller_sides(request: &Request, grain: u32) -> Vec<(String, Request)> {
    let smaller = [3, 2, 1].map(|quarters| {
        let side = |side: u32| side * quarters / 4 / grain * grain;
        let mut smaller = request.clone();
        let (width, height, init_image) = match &mut smaller.medium {
            Medium::Image(image) => (&mut image.width, &mut image.height, &mut image.init_image),
            Medium::Video(video) => (&mut video.width, &mut video.height, &mut video.init_image),
            Medium::Audio(_) => return None,
        };
        (*width, *height) = (side(*width), side(*height));
        if *width == 0 || *height == 0 {
            return None;
        }
        if let Some(image) = init_image {
            *image = image.resampled(*width, *height);
        }
        Some((format!("{width}x{height}"), smaller))
    });
    smaller.into_iter().flatten().collect()
}

/// A family of models.
pub trait Family: Send + Sync {
    /// `flux`.
    fn name(&self) -> &'static str;

    /// The classes in `model_index.json` that it opens.
    fn pipelines(&self) -> &'static [&'static str] {
        &[]
    }

    /// The folders of a pipeline in diffusers' layout that it reads; what is beside them it does not need.
    fn folders(&self) -> &'static [&'static str] {
        &[]
    }

    /// Opens a folder or file if it is of this family; `None` if it is of another.
    ///
    /// # Errors
    /// When it is of this family and cannot be run.
    fn open(&self, path: &Path, precision: &Precision) -> Result<Option<Arc<dyn Model>>, ModelError>;
}

/// The same request with three, two and one quarters of its length, rounded down to whole frames or tenths of a second;
/// none for a picture.
pub(crate) fn smaller_lengths(request: &Request) -> Vec<(String, Request)> {
    let shorter = [3, 2, 1].map(|quarters| {
        let mut shorter = request.clone();
        let label = match &mut shorter.medium {
            Medium::Image(_) => return None,
            Medium::Video(video) => {
                video.frames = video.frames * quarters / 4;
                (video.frames > 0).then(|| format!("{} frames", video.frames))
            }
            Medium::Audio(audio) => {
                audio.seconds = (audio.seconds * 10.0 * quarters as f32 / 4.0).floor() / 10.0;
                (audio.seconds > 0.0).then(|| format!("{} s", audio.seconds))
            }
        };
        Some((label?, shorter))
    });
    shorter.into_iter().flatten().collect()
}

/// All families that this build knows, in one explicit list.
pub struct Catalogue {
    families: Vec<Box<dyn Family>>,
}

impl Catalogue {
    /// From a list of families; the first that recognises a checkpoint opens it.
    pub fn new(families: Vec<Box<dyn Family>>) -> Catalogue {
        Catalogue { families }
    }

    /// Names of the families.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.families.iter().map(|family| family.name())
    }

    /// The classes of all families that a `model_index.json` may name.
    pub fn pipelines(&self) -> impl Iterator<Item = &'static str> {
        self.families.iter().flat_map(|f| f.pipelines()).copied()
    }

    /// The folders that a pipeline of this class is read from; `None`: it is of no family.
    pub fn folders_of(&self, class: &str) -> Option<&'static [&'static str]> {
        let family = self.families.iter().find(|f| f.pipelines().contains(&class));
        family.map(|family| family.folders())
    }

    /// Opens a checkpoint by its headers.
    ///
    /// # Errors
    /// [`ModelError`]; [`ModelError::NotAPipeline`] when no family recognises it.
    pub fn open(&self, path: &Path, precision: &Precision) -> Result<Arc<dyn Model>, ModelError> {
        for family in &self.families {
            if let Some(model) = family.open(path, precision)? {
                return Ok(model);
            }
        }
        let problem = match pipeline_class(path)? {
            Some(class) => {
                let found = match class.as_str() {
                    "" => "no pipeline",
                    class => class,
                };
                let known: Vec<&str> = self.pipelines().collect();
                format!(
                    "its model_index.json names {found}, and what is supported is {}",
                    known.join(", ")
                )
            }
            None => format!(
                "it has neither a model_index.json nor the tensors of {}",
                self.names().collect::<Vec<_>>().join(", ")
            ),
        };
        Err(ModelError::NotAPipeline {
            path: path.to_owned(),
            problem,
        })
    }
}

/// The quantized format that most quantized bytes of these tensors are held in.
pub(crate) fn format_of_plan<'a>(
    sources: impl IntoIterator<Item = &'a TensorSource>,
) -> Option<WeightFormat> {
    let mut bytes: BTreeMap<WeightFormat, Bytes> = BTreeMap::new();
    for source in sources {
        if let Target::Quantized(format) = source.target {
            *bytes.entry(format).or_default() += source.bytes_on_card();
        }
    }
    let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes);
    most.map(|(format, _)| format)
}

/// The identity that a component has while the hash of its content is not known.
pub fn provisional_identity(path: &Path, component_name: &str, precision: &Precision) -> ComponentId {
    let (path, dtype) = (path.display(), precision.dtype.as_str());
    ComponentId::new(match precision.quantization.format_of(component_name) {
        None => format!("path:{path}#{component_name}@{dtype}"),
        Some(format) => format!("path:{path}#{component_name}@{dtype}:{format}"),
    })
}
