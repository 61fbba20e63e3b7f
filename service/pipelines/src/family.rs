//! The interface between model families and the other crates.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use gpu::{CheckpointFile, ComponentTensors, LoadPlan, Target, TensorSource, WeightFormat};
use residency::{Bytes, Component};

use crate::adapters::{AdapterError, AdapterFile, AdapterReport, is_control_net_class};
use crate::bounds::{self, too_many_references};
use crate::checkpoint::{
    checkpoint_stem, class_not_run, file_not_run, is_lora, open_single_file, part_in_file,
};
use crate::files::{
    UNFINISHED, incomplete, pipeline_class, recorded, root_class, transformer_class, unsupported,
};
use crate::host::HostTensor;
use crate::identity::ModelFile;
use crate::media::{Piece, SampleFormat};
use crate::out_of_memory::is_out_of_memory;
use crate::parts::ModelParts;
use crate::plan::{StagePlan, ValueShape, Values};
use crate::quantization::{Formats, Quantization};
use crate::request::{Medium, PictureSlot, Request, RequestError};
use crate::text::tokenizers::TokenizeError;

/// Dtype and quantization of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Computation dtype of the card: of activations and full-precision weights.
    pub dtype: DType,
    /// Formats to which components are quantized at load.
    pub quantization: Quantization,
}

impl Precision {
    /// Everything as stored, computed in this dtype.
    pub const fn full(dtype: DType) -> Precision {
        Precision {
            dtype,
            quantization: Quantization::NONE,
        }
    }
}

/// Receives a stage's progress and results, and cancels it.
pub trait Observer {
    /// Reports that step `n` of `of` is done.
    fn step(&mut self, n: u32, of: u32);
    /// Whether a preview is wanted now (throttled by the implementation).
    fn wants_preview(&mut self) -> bool;
    /// Receives a preview: RGB, 8 bits each.
    fn preview(&mut self, width: u32, height: u32, rgb: Vec<u8>);
    /// Receives the next piece of the result. A slow stage delivers pieces as they are ready: they are progress too.
    fn deliver(&mut self, piece: Piece);
    /// Polled between steps and between slow layers: `true` makes the stage fail with [`StageError::Cancelled`].
    fn cancelled(&self) -> bool;
    /// Ends a stage that is cancelled.
    ///
    /// # Errors
    /// [`StageError::Cancelled`].
    fn check_cancelled(&self) -> Result<(), StageError> {
        match self.cancelled() {
            true => Err(StageError::Cancelled),
            false => Ok(()),
        }
    }
    /// As [`Observer::step`], of one of several stages in shared passes, by its place among them.
    fn step_of(&mut self, _stage: usize, n: u32, of: u32) {
        self.step(n, of);
    }
    /// As [`Observer::cancelled`], of one of several stages in shared passes: it leaves them, and the others go on.
    fn is_cancelled(&self, _stage: usize) -> bool {
        self.cancelled()
    }
}

/// An observer that discards everything and never cancels.
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

/// Why a folder or file cannot be opened as a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Not recognized by any family.
    #[error("{} is no pipeline that this version knows: {problem}", path.display())]
    NotAPipeline {
        path: PathBuf,
        /// What was searched for.
        problem: String,
    },
    /// A file is missing or truncated, or only stands for one.
    #[error("{} is not complete: {problem}", path.display())]
    Incomplete {
        path: PathBuf,
        /// What is missing, and what to do.
        problem: String,
    },
    /// A file contradicts its header, or another.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged { path: PathBuf, problem: String },
    /// Recognized and not supported.
    #[error("{} is not supported: {problem}", path.display())]
    Unsupported {
        path: PathBuf,
        /// What is not supported, and what is.
        problem: String,
    },
    /// The requested quantization is not possible.
    #[error("{problem}")]
    Quantization {
        component: String,
        /// What is not possible, and what is.
        problem: String,
    },
    /// An adapter cannot be attached to the model.
    #[error("adapter {name}: {error}")]
    Adapter {
        name: String,
        #[source]
        error: AdapterError,
    },
}

impl ModelError {
    /// Error for a requested format of an unknown component.
    pub(crate) fn no_such_component(component: &str, known: &[&str]) -> ModelError {
        ModelError::Quantization {
            component: component.to_owned(),
            problem: format!(
                "there is no component {component:?} to quantize: there are {}",
                known.join(", ")
            ),
        }
    }

    /// Error for a requested format of a component that the checkpoint stores quantized.
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
    /// Cancelled by the observer.
    #[error("cancelled")]
    Cancelled,
    /// The card has not enough memory for the activations.
    #[error("out of memory in {stage}")]
    OutOfMemory { stage: String },
    /// A result is NaN or infinite.
    #[error("{component} produced a value that is not finite at step {step}")]
    NotFinite {
        component: String,
        /// The denoising step, from 1; 0 outside denoising.
        step: u32,
    },
    /// An input of the stage does not match the model.
    #[error("{0}")]
    BadInput(String),
    /// A tensor of the component is missing.
    #[error("{component}: {missing}")]
    Missing {
        component: String,
        /// The tensor and the problem.
        missing: gpu::MissingTensor,
    },
    /// An operation of the tensor library failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
}

impl From<RequestError> for StageError {
    fn from(error: RequestError) -> StageError {
        StageError::BadInput(error.to_string())
    }
}

impl From<TokenizeError> for StageError {
    fn from(error: TokenizeError) -> StageError {
        StageError::BadInput(error.to_string())
    }
}

impl StageError {
    /// Converts an error of a stage: the tensor library reports exhausted memory in its message only.
    pub(crate) fn of_stage(self, stage: &str) -> StageError {
        match self {
            StageError::Tensor(error) if is_out_of_memory(&error) => StageError::OutOfMemory {
                stage: stage.to_owned(),
            },
            other => other,
        }
    }
}

/// The end of a text that a model does not read: the text is longer than its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The field of the text: `prompt`, `lyrics`.
    pub field: &'static str,
    /// Tokens that are left out.
    pub tokens: usize,
    /// Tokens that are read, with those that the model adds.
    pub limit: usize,
    /// The field that sets the limit; `None` for one of the model.
    pub set_by: Option<&'static str>,
}

impl LeftOut {
    /// Of a prompt, as many tokens beyond the request's limit; none for 0, or where they cannot be counted.
    pub(crate) fn of_prompt(tokens: Result<usize, TokenizeError>, request: &Request) -> Option<LeftOut> {
        let tokens = tokens.ok().filter(|tokens| *tokens > 0)?;
        Some(LeftOut {
            field: "prompt",
            tokens,
            limit: request.max_sequence_length as usize,
            set_by: Some("max_sequence_length"),
        })
    }
}

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (last, are) = match self.tokens {
            1 => ("last token".to_owned(), "is"),
            several => (format!("last {several} tokens"), "are"),
        };
        write!(
            f,
            "the {last} of the {} {are} left out: the model reads {}",
            self.field, self.limit
        )?;
        match self.set_by {
            Some(field) => write!(f, " ({field})"),
            None => Ok(()),
        }
    }
}

/// Inputs of one run of a stage.
#[derive(Clone, Copy)]
pub struct StageRun<'a> {
    pub plan: &'a StagePlan,
    /// Index into [`StagePlan::rungs`].
    pub rung: usize,
    /// The request, with the seed of the item.
    pub request: &'a Request,
    /// The stage's input values.
    pub values: &'a Values,
    /// Looks up the tensors of a component by name.
    pub tensors: &'a dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
    /// Device of the tensors, and of the computation.
    pub device: &'a candle_core::Device,
}

impl StageRun<'_> {
    /// A value by name, or `None` if the stage does not take it.
    ///
    /// # Errors
    /// As [`StageRun::value`], if the stage takes it.
    pub fn value_if_taken(&self, name: &str) -> Result<Option<&HostTensor>, StageError> {
        let is_taken = self.plan.takes.iter().any(|taken| taken.name == name);
        is_taken.then(|| self.value(name)).transpose()
    }

    /// An input value by name.
    ///
    /// # Errors
    /// [`StageError::BadInput`] if it is missing, or of another shape than planned.
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

/// An open checkpoint, known by its headers alone: it holds no weights. It plans requests, and computes stages over
/// given tensors.
pub trait Model: Send + Sync {
    /// What it has in common with models of all families.
    fn parts(&self) -> &ModelParts;

    /// The family's name: `flux`.
    fn family(&self) -> &'static str {
        self.parts().family
    }

    /// The default request; its medium is the one that the model generates.
    fn defaults(&self) -> Request {
        self.parts().defaults.clone()
    }

    /// The request with stand-ins for the pictures that the model requires and the request lacks. They have sizes and no data:
    /// such a request can be planned, and not run.
    fn with_required_pictures(&self, request: Request) -> Request {
        request
    }

    /// Its components, with exact bytes. Their identity is provisional ([`provisional_identity`](crate::provisional_identity)) until [`Model::files_of`]
    /// has been hashed; callers may substitute another identity.
    fn components(&self) -> &[Component] {
        self.parts().components.all()
    }

    /// Load plan of a component.
    fn load_plan(&self, component_name: &str) -> Option<&LoadPlan> {
        self.parts().components.load_plan(component_name)
    }

    /// The format that most of a component's quantized bytes have, made at load or stored; `None` if it is not
    /// quantized.
    fn format_of(&self, component_name: &str) -> Option<WeightFormat> {
        match self.load_plan(component_name)? {
            LoadPlan::Files(sources) => format_of_plan(sources),
            LoadPlan::Synthetic(_) => None,
        }
    }

    /// The components with most of the bytes, which presets quantize.
    fn large_components(&self) -> &[&str] {
        &self.parts().large
    }

    /// The formats to which its components are quantized at load, as asked for when it was opened.
    fn formats(&self) -> &Formats {
        self.parts().components.formats()
    }

    /// A quantization with the large components in `format` where they would otherwise have a more accurate one, those
    /// apart that are stored quantized.
    fn reduced(&self, from: &Quantization, format: WeightFormat) -> Quantization {
        let large = self.large_components();
        let is_stored = |name: &str| self.format_of(name).is_some() && self.formats().of(name).is_none();
        let reducible: Vec<&str> = large.iter().copied().filter(|name| !is_stored(name)).collect();
        from.reduced(format, large, &reducible)
    }

    /// The same model with these adapters attached, each as components of its own beside the others.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] for the first that cannot be attached.
    fn with_adapters(&self, files: &[AdapterFile]) -> Result<Arc<dyn Model>, ModelError> {
        let name = files.first().map(|file| file.name.clone());
        Err(ModelError::Adapter {
            name: name.unwrap_or_default(),
            error: AdapterError::NotTaken {
                family: self.family(),
            },
        })
    }

    /// What its adapters change.
    fn adapters(&self) -> Vec<AdapterReport> {
        self.parts().adapters.reports()
    }

    /// The files whose content identifies the component.
    fn files_of(&self, component_name: &str) -> Vec<ModelFile> {
        self.parts().components.files_of(component_name)
    }

    /// The stages of a request, in order. The values that a [`Role::Decode`](crate::Role::Decode) stage takes are the
    /// latents that a client may keep, bring back, and decode later. Only formats and sizes of media count: their data may be left
    /// out ([`Request::without_media_data`]), but for the memos of what encodes them.
    ///
    /// # Errors
    /// All invalid fields of the request.
    fn plan(&self, request: &Request) -> Result<Vec<StagePlan>, Vec<RequestError>>;

    /// A default request whose decode takes values of these shapes; `None` if there is none.
    fn request_of(&self, values: &[ValueShape]) -> Option<Request>;

    /// The ends of a request's texts that the model does not read. What one encoder leaves out and another reads (CLIP reads
    /// the beginning of a prompt for its mood, 77 tokens by design) is not among them.
    fn left_out(&self, _request: &Request) -> Vec<LeftOut> {
        Vec::new()
    }

    /// Most reference pictures of one request.
    fn most_references(&self) -> usize {
        0
    }

    /// The refusal of so many reference pictures; `None` if the model takes them.
    fn too_many_references(&self, count: usize) -> Option<RequestError> {
        too_many_references(count, self.most_references())
    }

    /// How the tracks that it makes are sampled; `None` if it makes none.
    fn track_format(&self) -> Option<SampleFormat> {
        None
    }

    /// The size in which the model takes a reference picture of this size; `None` if it prefers none.
    ///
    /// # Errors
    /// When the picture is too small or too narrow.
    fn reference_size(&self, _width: u32, _height: u32) -> Result<Option<(u32, u32)>, RequestError> {
        Ok(None)
    }

    /// The size of pictures and films that it makes next to this one: no larger, but where that is too small.
    fn size_near(&self, width: u32, height: u32) -> (u32, u32) {
        bounds::size_near(width, height)
    }

    /// Frames of a film of about this length, of the lengths that the model makes; at least one.
    fn frames_of(&self, seconds: f32, frames_per_second: f32) -> u32 {
        nearest_frames(seconds, frames_per_second)
    }

    /// Smaller variants of a request that may fit where it does not, each with a label, the closest first: to be planned, without
    /// the data of media. The queue's task asks for them.
    fn smaller(&self, request: &Request) -> Vec<(String, Request)>;

    /// The smallest valid request, in one step: running all its stages proves that the model works.
    fn smallest(&self) -> Request;

    /// The cuDNN shapes of a stage of a request on its first rung, to be compiled before it begins
    /// ([`ops::make_plans`]). Best effort: any list is valid, and the default is empty.
    fn planned(&self, _stage: &str, _request: &Request) -> Vec<ops::Planned> {
        Vec::new()
    }

    /// Runs one stage and returns the values that it gives. Pieces are delivered to the observer.
    ///
    /// # Errors
    /// [`StageError`].
    fn run(&self, stage: &StageRun<'_>, observer: &mut dyn Observer) -> Result<Values, StageError>;

    /// Runs stages of several requests in shared passes, on the first rung of each; their plans have equal keys
    /// ([`SharedPass::key`](crate::SharedPass::key)). Returns what each gives, in their order: one may fail or be cancelled
    /// alone. Steps and cancellation are each stage's own ([`Observer::step_of`], [`Observer::is_cancelled`]).
    ///
    /// # Errors
    /// [`StageError`], where it concerns all of them.
    fn run_shared(
        &self,
        stages: &[StageRun<'_>],
        _observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Values, StageError>>, StageError> {
        let name = stages.first().map_or("", |stage| stage.plan.name.as_str());
        Err(StageError::BadInput(format!(
            "{name} runs alone in {}",
            self.family()
        )))
    }
}

/// Frames in so many seconds, rounded; at least one.
pub(crate) fn nearest_frames(seconds: f32, frames_per_second: f32) -> u32 {
    let frames = (f64::from(seconds) * f64::from(frames_per_second)).round();
    (frames as u32).max(1)
}

/// The same request with its sides in three, two and one quarters, rounded down to a multiple of `grain` pixels, and without
/// the data of its pictures: the fallbacks of most picture and video families.
pub(crate) fn smaller_sides(request: &Request, grain: u32) -> Vec<(String, Request)> {
    let smaller = [3, 2, 1].map(|quarters| {
        let side = |side: u32| side * quarters / 4 / grain * grain;
        let mut smaller = request.clone();
        let (width, height) = match &mut smaller.medium {
            Medium::Image(image) => (&mut image.width, &mut image.height),
            Medium::Video(video) => (&mut video.width, &mut video.height),
            Medium::Audio(_) => return None,
        };
        (*width, *height) = (side(*width), side(*height));
        let size = (*width, *height);
        if size.0 == 0 || size.1 == 0 {
            return None;
        }
        for picture in smaller.medium.pictures_mut() {
            picture.data.clear();
            match picture.slot {
                PictureSlot::Start | PictureSlot::Mask | PictureSlot::Control(_) => {
                    (*picture.width, *picture.height) = size;
                }
                PictureSlot::Reference(_) => {} // of a size of its own
            }
        }
        Some((format!("{}x{}", size.0, size.1), smaller))
    });
    smaller.into_iter().flatten().collect()
}

/// What is read of a repository in the layout of a model's authors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnLayout {
    /// Folders, each with its configuration and weights.
    pub folders: Vec<String>,
    /// Further files.
    pub files: Vec<String>,
}

/// A model family.
pub trait Family: Send + Sync {
    /// The family's identifier: `flux`.
    fn name(&self) -> &'static str;

    /// What people call its models; `None` for a family that has none to be downloaded.
    fn title(&self) -> Option<&'static str> {
        None
    }

    /// The `model_index.json` classes that it opens.
    fn pipelines(&self) -> &'static [&'static str] {
        &[]
    }

    /// The folders that it reads of a pipeline of this class in diffusers' layout; others are not needed.
    fn folders(&self, _class: &str) -> &'static [&'static str] {
        &[]
    }

    /// Classes of other pipelines that have parts of its own, with the folders that it reads of them.
    fn parts(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[]
    }

    /// Of the folders that it reads of a pipeline of this class, those that a model may lack.
    fn optional_folders(&self, _class: &str) -> &'static [&'static str] {
        &[]
    }

    /// What it reads of a repository in its authors' own layout, from the names of all files there; `None` if it is no such
    /// repository.
    fn own_layout(&self, _files: &[&str]) -> Option<OwnLayout> {
        None
    }

    /// Whether a folder holds a model in its authors' own layout.
    fn has_own_layout(&self, _folder: &Path) -> bool {
        false
    }

    /// Classes of its transformers that come alone, in a folder of their own.
    fn transformers(&self) -> &'static [&'static str] {
        &[]
    }

    /// File name endings of its models in one file, beside the extensions of checkpoints, which every family has.
    fn file_endings(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether a single file with tensors of these names holds one of its transformers.
    fn is_transformer_file(&self, _names: &[&str]) -> bool {
        false
    }

    /// Opens a folder or file of this family; `None` if it is of another.
    ///
    /// # Errors
    /// When it is of this family and not supported or damaged.
    fn open(&self, path: &Path, precision: &Precision) -> Result<Option<Arc<dyn Model>>, ModelError>;

    /// As [`Family::open`], of a single file whose header has been read.
    ///
    /// # Errors
    /// As [`Family::open`].
    fn open_file(
        &self,
        file: &CheckpointFile,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        self.open(file.path(), precision)
    }
}

/// The same request with three, two and one quarters of its length, rounded down to whole frames or tenths of a
/// second; none for a picture.
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

/// The folder of a pipeline's transformer.
const TRANSFORMER: &str = "transformer";

/// The configuration of a pipeline's transformer, such as the axes of its rotary embedding.
pub const BASE_CONFIGURATION: &str = "transformer/config.json";

/// All families of this build, as an explicit list.
pub struct Catalogue {
    families: Vec<Box<dyn Family>>,
}

impl Catalogue {
    /// From a list of families; the first that recognizes a checkpoint opens it.
    pub fn new(families: Vec<Box<dyn Family>>) -> Catalogue {
        Catalogue { families }
    }

    /// Names of the families.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.families.iter().map(|family| family.name())
    }

    /// What people call the models of all families that have some to be downloaded.
    fn titles(&self) -> impl Iterator<Item = &'static str> {
        self.families.iter().filter_map(|family| family.title())
    }

    /// The `model_index.json` classes of all families.
    pub fn pipelines(&self) -> impl Iterator<Item = &'static str> {
        self.families.iter().flat_map(|f| f.pipelines()).copied()
    }

    /// The folders that are read of a pipeline of this class; `None` if it is of no family, and has no parts of one.
    pub fn folders_of(&self, class: &str) -> Option<&'static [&'static str]> {
        let family = self.families.iter().find(|f| f.pipelines().contains(&class));
        let mut parts = self.families.iter().flat_map(|family| family.parts());
        family
            .map(|family| family.folders(class))
            .or_else(|| parts.find(|(of, _)| *of == class).map(|(_, folders)| *folders))
    }

    /// Of the folders that are read of a pipeline of this class, those that a model may lack.
    pub fn optional_folders_of(&self, class: &str) -> &'static [&'static str] {
        let family = self.families.iter().find(|f| f.pipelines().contains(&class));
        family.map_or(&[], |family| family.optional_folders(class))
    }

    /// The folders that a transformer in a single file takes from a pipeline of this class, its base; `None` if it is of no
    /// family. From [`BASE_CONFIGURATION`] it takes what its tensors do not tell.
    pub fn base_folders_of(&self, class: &str) -> Option<Vec<&'static str>> {
        let folders = self.folders_of(class)?.iter().copied();
        Some(folders.filter(|folder| *folder != TRANSFORMER).collect())
    }

    /// Whether a folder holds parts of another pipeline that a family reads, and nothing that is run by itself.
    pub fn holds_parts_alone(&self, folder: &Path) -> bool {
        let class = pipeline_class(folder).ok().flatten().unwrap_or_default();
        let mut parts = self.families.iter().flat_map(|family| family.parts());
        !self.pipelines().any(|known| known == class) && parts.any(|(known, _)| *known == class)
    }

    /// Whether a single file with tensors of these names holds a transformer that a family opens.
    pub fn is_transformer_file(&self, names: &[&str]) -> bool {
        // A LoRA of all layers has names that begin as those of the transformer do.
        !is_lora(names)
            && self
                .families
                .iter()
                .any(|family| family.is_transformer_file(names))
    }

    /// Whether a path is a single file with such a transformer, by its header. A damaged file is none.
    pub fn holds_transformer(&self, file: &Path) -> bool {
        let opened = open_single_file(file).ok().flatten();
        opened.is_some_and(|opened| self.is_transformer(&opened))
    }

    fn is_transformer(&self, file: &CheckpointFile) -> bool {
        let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
        self.is_transformer_file(&names)
    }

    /// What a single file is that is no model that runs here, in words; `None` for one that runs, and where the file cannot be
    /// read, which opening it tells.
    pub fn what_else(&self, file: &Path) -> Option<String> {
        const UNKNOWN: &str = "not known here";
        let what = match open_single_file(file).ok()? {
            None => Some(UNKNOWN),
            Some(file) => file_not_run(&file)
                .or_else(|| (!self.is_transformer(&file)).then(|| part_in_file(&file).unwrap_or(UNKNOWN))),
        };
        what.map(str::to_owned)
    }

    /// What is read of a repository in the layout of a family's authors, from the names of all files there.
    pub fn own_layout(&self, files: &[&str]) -> Option<OwnLayout> {
        self.families.iter().find_map(|family| family.own_layout(files))
    }

    /// Whether a folder holds a model in the layout of a family's authors.
    pub fn has_own_layout(&self, folder: &Path) -> bool {
        self.families.iter().any(|family| family.has_own_layout(folder))
    }

    /// Whether this is the class of what opens without a pipeline: a transformer of a family, or a ControlNet.
    pub fn opens_without_pipeline(&self, class: &str) -> bool {
        self.is_transformer_class(class) || is_control_net_class(class)
    }

    fn is_transformer_class(&self, class: &str) -> bool {
        self.families.iter().any(|f| f.transformers().contains(&class))
    }

    /// The name of a model in one file: the file's name without its ending. `None` for a file of another kind.
    pub fn single_file_stem<'a>(&self, name: &'a str) -> Option<&'a str> {
        let mut endings = self.families.iter().flat_map(|family| family.file_endings());
        endings
            .find_map(|ending| name.strip_suffix(ending))
            .or_else(|| checkpoint_stem(name))
    }

    /// Whether a folder has a transformer of a family at its root, and no pipeline.
    pub fn has_transformer(&self, folder: &Path) -> bool {
        transformer_class(folder).is_some_and(|class| self.is_transformer_class(&class))
    }

    /// Refuses what is known and not run: another model, by its class or its tensors, and a download that has not ended.
    fn check_is_run(&self, path: &Path, file: Option<&CheckpointFile>) -> Result<(), ModelError> {
        let ending = path.extension().and_then(|ending| ending.to_str());
        if ending.is_some_and(|ending| UNFINISHED.contains(&ending)) {
            return Err(incomplete(path, "its download has not ended: download it again"));
        }
        let class = match pipeline_class(path)? {
            None => root_class(path),
            class => class,
        };
        let is_run =
            |class: &str| self.pipelines().any(|run| run == class) || self.is_transformer_class(class);
        let relative = match class.filter(|class| !is_run(class)) {
            Some(class) => class_not_run(&class).map(|name| format!("{name} ({class})")),
            None => file.and_then(file_not_run).map(str::to_owned),
        };
        match relative {
            None => Ok(()),
            Some(relative) => {
                let run: Vec<&str> = self.families.iter().filter_map(|family| family.title()).collect();
                let problem = format!(
                    "it is {relative}; the models that run here are {}",
                    run.join(", ")
                );
                Err(unsupported(path, problem))
            }
        }
    }

    /// Opens a checkpoint by its headers.
    ///
    /// # Errors
    /// [`ModelError`]; [`ModelError::NotAPipeline`] if no family recognizes it.
    pub fn open(&self, path: &Path, precision: &Precision) -> Result<Arc<dyn Model>, ModelError> {
        let file = open_single_file(path)?;
        self.check_is_run(path, file.as_ref())?;
        for family in &self.families {
            let (opened, read) = recorded(|| match &file {
                Some(file) => family.open_file(file, precision),
                None => family.open(path, precision),
            });
            if let Some(model) = opened? {
                model.parts().set_read(read);
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
            None => match file.as_ref().and_then(part_in_file) {
                Some(part) => format!("it is {part}"),
                None => format!(
                    "it has neither a model_index.json nor the tensors of {}",
                    self.titles().collect::<Vec<_>>().join(", ")
                ),
            },
        };
        Err(ModelError::NotAPipeline {
            path: path.to_owned(),
            problem,
        })
    }
}

/// The format that most quantized bytes of these tensors have.
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
