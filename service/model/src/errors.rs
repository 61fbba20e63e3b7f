//! Why a model cannot be opened, and why a stage fails.

use std::path::PathBuf;

use gpu::{LoadError, WeightFormat};

use crate::adapter::AdapterError;
use crate::out_of_memory::is_out_of_memory;
use crate::request::RequestError;

/// Why a folder or file cannot be opened as a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Not recognized by any family.
    #[error("{} is no pipeline that this version knows: {problem}", path.display())]
    NotAPipeline {
        path: PathBuf,
        /// The files that were searched for.
        problem: String,
    },
    /// A file is missing or truncated, or a placeholder for a file.
    #[error("{} is not complete: {problem}", path.display())]
    Incomplete {
        path: PathBuf,
        /// The missing part, and how to get it.
        problem: String,
    },
    /// A file contradicts its header, or another.
    #[error("{} is damaged: {problem}", path.display())]
    Damaged { path: PathBuf, problem: String },
    /// Recognized and not supported.
    #[error("{} is not supported: {problem}", path.display())]
    Unsupported {
        path: PathBuf,
        /// The unsupported part, and the supported ones.
        problem: String,
    },
    /// The requested quantization is not possible.
    #[error("{problem}")]
    Quantization {
        component: String,
        /// The impossible format, and the possible ones.
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
    pub fn no_such_component(component: &str, known: &[&str]) -> ModelError {
        ModelError::Quantization {
            component: component.to_owned(),
            problem: format!(
                "there is no component {component:?} to quantize: there are {}",
                known.join(", ")
            ),
        }
    }

    /// Error for a requested format of a component that the checkpoint stores quantized.
    pub fn stored_quantized(component: &str, format: WeightFormat) -> ModelError {
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
    /// The bytes of a streamed block cannot be read.
    #[error("weights that are streamed: {0}")]
    Weights(#[from] LoadError),
    /// An operation of the tensor library failed.
    #[error("tensor operation failed: {0}")]
    Tensor(#[from] candle_core::Error),
}

impl StageError {
    /// The error for a tensor that a component lacks, for `map_err`.
    pub fn missing_in(component: &str) -> impl Fn(gpu::MissingTensor) -> StageError + Copy {
        move |missing| StageError::Missing {
            component: component.to_owned(),
            missing,
        }
    }
}

impl From<RequestError> for StageError {
    fn from(error: RequestError) -> StageError {
        StageError::BadInput(error.to_string())
    }
}

impl StageError {
    /// Converts an error of a stage: the tensor library reports exhausted memory in its message only.
    pub fn of_stage(self, stage: &str) -> StageError {
        match self {
            StageError::Tensor(error) if is_out_of_memory(&error) => StageError::OutOfMemory {
                stage: stage.to_owned(),
            },
            other => other,
        }
    }
}
