//! What a model family is to the rest of the service.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::{ComponentTensors, LoadPlan, Target, TensorSource, WeightFormat};
use residency::{Bytes, Component, ComponentId};
use serde::{Deserialize, Serialize};

use crate::files::pipeline_class;
use crate::host::HostTensor;
use crate::quantization::Quantization;
use crate::request::{Defaults, ImageRequest, RequestError};

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

/// A stage of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageKind {
    /// Prompt to encodings.
    EncodeText,
    /// Init image to latent.
    EncodeImage,
    /// Noise to latent.
    Denoise,
    /// Latent to picture.
    Decode,
}

impl StageKind {
    /// All, in the order in which a job runs those that it has.
    pub const ALL: [StageKind; 4] = [
        StageKind::EncodeText,
        StageKind::EncodeImage,
        StageKind::Denoise,
        StageKind::Decode,
    ];

    /// `encode_text`, `encode_image`, `denoise`, `decode`.
    pub fn name(self) -> &'static str {
        match self {
            StageKind::EncodeText => "encode_text",
            StageKind::EncodeImage => "encode_image",
            StageKind::Denoise => "denoise",
            StageKind::Decode => "decode",
        }
    }
}

/// One way to run a stage. A later rung of the ladder needs less memory than the one before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rung {
    /// `whole`, `strips of 16`, `tiles of 64`.
    pub label: String,
    /// Predicted activation bytes at the peak.
    pub scratch: Bytes,
    /// Whether the result differs from the whole's by more than rounding.
    pub approximate: bool,
}

/// One stage of a request: its components, and the ways to run it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// Which.
    pub kind: StageKind,
    /// What must be resident.
    pub components: Vec<Component>,
    /// At least one; the best first.
    pub rungs: Vec<Rung>,
    /// What the peak depends on besides the model, e.g. `1024x1024 t512`: the key of what is learned.
    pub shape: String,
    /// Steps within the stage, for progress; 1 where there are none.
    pub steps: u32,
}

/// The output of the text encoders: named host tensors (`pooled`, `sequence`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodedText {
    /// Tensors by name.
    pub tensors: Vec<(String, HostTensor)>,
}

/// What a stage is given beside the request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageInput {
    /// For denoise.
    pub text: Option<EncodedText>,
    /// For decode: the latent to decode. For denoise of image to image: the encoded init image.
    pub latent: Option<HostTensor>,
}

/// What a stage gives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum StageOutput {
    /// From `encode_text`.
    Text(EncodedText),
    /// From `encode_image` and `denoise`: `[1, channels, height / 8, width / 8]`, scaled as the transformer
    /// sees it.
    Latent(HostTensor),
    /// From `decode`.
    Picture {
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
        /// RGB, 8 bits each, row-major.
        rgb: bytes::Bytes,
    },
}

/// How a stage reports, and how it learns that nobody wants it any more.
pub trait Observer {
    /// Step `n` of `of` is done.
    fn step(&mut self, n: u32, of: u32);
    /// Whether a preview is wanted now (throttled by whoever asks for it).
    fn wants_preview(&mut self) -> bool;
    /// A preview: RGB, 8 bits each.
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>);
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
        stage: &'static str,
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

/// A checkpoint that a family has recognised, by its headers alone: it holds no weights. It can be asked
/// what it needs, and, given tensors, it computes.
pub trait Model: Send + Sync {
    /// The family's name: `flux`.
    fn family(&self) -> &'static str;

    /// Defaults for requests.
    fn defaults(&self) -> Defaults;

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

    /// Whether a request can be run at all.
    ///
    /// # Errors
    /// Every field that is wrong.
    fn validate(&self, request: &ImageRequest) -> Result<(), Vec<RequestError>>;

    /// The stages of a valid request, in order.
    fn stages(&self, request: &ImageRequest) -> Vec<StagePlan>;

    /// The plan of a decode or an encode alone, for latents that clients bring or ask for.
    fn lone_stage(&self, kind: StageKind, width: u32, height: u32) -> StagePlan;

    /// Shapes that a stage of a request asks cuDNN for on a card, run on its first rung: what is worth making plans for
    /// before it begins ([`ops::make_plans`]). It is advice: any list does, and the default is none.
    fn planned(&self, _kind: StageKind, _request: &ImageRequest) -> Vec<ops::Planned> {
        Vec::new()
    }

    /// Identity of what `encode_text` would give: same key, same encodings. Covers the tokens, not the
    /// weights: callers add the encoders' identities.
    ///
    /// # Errors
    /// When the tokenizer refuses the prompt.
    fn text_key(&self, request: &ImageRequest) -> Result<String, RequestError>;

    /// Shape of a latent for a picture of this size.
    fn latent_shape(&self, width: u32, height: u32) -> Vec<usize>;

    /// The smallest picture that it can make, in one step: run through all stages, it proves that the model works.
    fn canary_request(&self) -> ImageRequest {
        let defaults = self.defaults();
        let square = |side: u32| ImageRequest {
            prompt: "a canary".to_owned(),
            width: side,
            height: side,
            steps: 1,
            ..defaults.request()
        };
        let sides = (4..10).map(|power| square(1 << power));
        sides
            .into_iter()
            .find(|request| self.validate(request).is_ok())
            .unwrap_or_else(|| ImageRequest {
                width: defaults.width,
                height: defaults.height,
                ..square(0)
            })
    }

    /// Runs one stage. `tensors` are those of the stage's components by name; `rung` indexes
    /// [`StagePlan::rungs`].
    ///
    /// # Errors
    /// [`StageError`].
    #[allow(clippy::too_many_arguments)] // A stage's whole world, each part by its name.
    fn run(
        &self,
        plan: &StagePlan,
        rung: usize,
        request: &ImageRequest,
        input: &StageInput,
        tensors: &dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
        device: &candle_core::Device,
        observer: &mut dyn Observer,
    ) -> Result<StageOutput, StageError>;
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
