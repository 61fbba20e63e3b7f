//! What is read, from where, into which tensors.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use residency::Bytes;

/// How numbers are stored in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// Brain float.
    Bf16,
    /// IEEE double; read as f32.
    F64,
    /// Unsigned bytes.
    U8,
    /// Signed 64-bit integers.
    I64,
}

impl Stored {
    /// Bytes of one number.
    pub fn width(self) -> usize {
        match self {
            Stored::U8 => 1,
            Stored::F16 | Stored::Bf16 => 2,
            Stored::F32 => 4,
            Stored::F64 | Stored::I64 => 8,
        }
    }
}

/// A run of bytes in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// First byte, from the start of the file.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

/// Where one tensor of a component comes from. Ranges are read one behind the other: a slice of a fused
/// weight is one range, a concatenation in another order is several.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSource {
    /// Name within the component, in the words of diffusers.
    pub name: String,
    /// The file.
    pub file: Arc<Path>,
    /// Its bytes, in order.
    pub ranges: Vec<ByteRange>,
    /// How they are stored.
    pub stored: Stored,
    /// Shape of the tensor, row-major.
    pub shape: Vec<usize>,
    /// The dtype that it has on the card.
    pub target: DType,
}

impl TensorSource {
    /// Bytes of the tensor on the card.
    pub fn bytes_on_card(&self) -> Bytes {
        Bytes((self.shape.iter().product::<usize>() * self.target.size_in_bytes()) as u64)
    }

    /// Bytes that are read from the file.
    pub fn bytes_in_file(&self) -> Bytes {
        Bytes(self.ranges.iter().map(|r| r.length).sum())
    }
}

/// How a component is read.
#[derive(Clone, Debug, PartialEq)]
pub enum LoadPlan {
    /// From checkpoint files.
    Files(Vec<TensorSource>),
    /// From nowhere: so many bytes without content. Only a simulated card takes it.
    Synthetic(Bytes),
}

impl LoadPlan {
    /// What is read from files.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for bytes without content: only a simulated card takes them.
    pub(crate) fn files(&self) -> Result<&[TensorSource], LoadError> {
        match self {
            LoadPlan::Files(sources) => Ok(sources),
            LoadPlan::Synthetic(_) => Err(LoadError::Unsupported(
                "bytes without content go to simulated cards only".to_owned(),
            )),
        }
    }

    /// Exact bytes on the card.
    pub fn bytes(&self) -> Bytes {
        match self {
            LoadPlan::Files(sources) => sources.iter().map(TensorSource::bytes_on_card).sum(),
            LoadPlan::Synthetic(bytes) => *bytes,
        }
    }
}

/// How far a load is, in bytes on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Already there.
    pub done: Bytes,
    /// In all.
    pub total: Bytes,
}

/// Why a component could not be loaded. Nothing of it is left on the card.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The caller's progress function said stop.
    #[error("the load was cancelled")]
    Cancelled,
    /// The card has not enough memory.
    #[error("out of memory while loading: {needed} needed, {free} free")]
    OutOfMemory {
        /// Bytes of the allocation that failed.
        needed: Bytes,
        /// Bytes free at that moment.
        free: Bytes,
    },
    /// The file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not what its header says.
    #[error("{} is damaged: {problem}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The card cannot take this plan.
    #[error("this card cannot load that: {0}")]
    Unsupported(String),
    /// The card is lost.
    #[error("the card is lost: {0}")]
    Lost(String),
}
