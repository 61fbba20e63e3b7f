//! What is read, from where, into which tensors.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use residency::Bytes;

use crate::format::{GgufType, WeightFormat, rows_and_columns};

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
    /// Signed bytes.
    I8,
    /// Floats of 8 bits: 1 sign, 4 exponent, 3 mantissa; no infinities.
    F8E4M3,
    /// Signed 64-bit integers.
    I64,
    /// Blocks of llama.cpp.
    Gguf(GgufType),
}

impl Stored {
    /// Numbers that are stored together, and their bytes: one number and its width but in blocks.
    pub fn block(self) -> (usize, usize) {
        match self {
            Stored::U8 | Stored::I8 | Stored::F8E4M3 => (1, 1),
            Stored::F16 | Stored::Bf16 => (1, 2),
            Stored::F32 => (1, 4),
            Stored::F64 | Stored::I64 => (1, 8),
            Stored::Gguf(kind) => kind.block(),
        }
    }

    /// Bytes of one number; of one block of llama.cpp.
    pub fn width(self) -> usize {
        self.block().1
    }

    /// Whether these are floats that are held in full precision.
    pub fn is_float(self) -> bool {
        matches!(self, Stored::F32 | Stored::F16 | Stored::Bf16 | Stored::F64)
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

/// A part of what a tensor is read from.
#[derive(Clone, Debug, PartialEq)]
pub enum SourcePiece {
    /// Bytes of a file.
    File {
        /// The file.
        file: Arc<Path>,
        /// Which of its bytes.
        range: ByteRange,
    },
    /// Bytes that the header gave, or that are the same for every checkpoint.
    Inline(Arc<[u8]>),
}

impl SourcePiece {
    /// How many bytes it has.
    pub fn length(&self) -> u64 {
        match self {
            SourcePiece::File { range, .. } => range.length,
            SourcePiece::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// What a tensor is on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Numbers of this dtype.
    Full(DType),
    /// A quantized weight. From [`Stored::U8`] the pieces are the parts of its layout, taken as they are; from floats
    /// it is made while it is loaded.
    Quantized(WeightFormat),
}

impl Target {
    /// Bytes of a tensor of this shape.
    pub fn bytes(self, shape: &[usize]) -> Bytes {
        match self {
            Target::Full(dtype) => Bytes((shape.iter().product::<usize>() * dtype.size_in_bytes()) as u64),
            Target::Quantized(format) => {
                let (rows, columns) = rows_and_columns(shape);
                format.bytes(rows, columns)
            }
        }
    }
}

/// Where one tensor of a component comes from. Pieces are read one behind the other: a slice of a fused
/// weight is one piece, a concatenation in another order is several.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSource {
    /// Name within the component, in the words of diffusers.
    pub name: String,
    /// Its bytes, in order.
    pub pieces: Vec<SourcePiece>,
    /// How they are stored. [`Stored::U8`] where a quantized weight is read as it is stored.
    pub stored: Stored,
    /// Shape of the tensor, row-major.
    pub shape: Vec<usize>,
    /// What it is on the card.
    pub target: Target,
}

impl TensorSource {
    /// One that is in full precision on the card, from ranges of one file.
    pub fn full(
        name: impl Into<String>,
        file: &Arc<Path>,
        ranges: impl IntoIterator<Item = ByteRange>,
        stored: Stored,
        shape: Vec<usize>,
        dtype: DType,
    ) -> TensorSource {
        let piece = |range| SourcePiece::File {
            file: Arc::clone(file),
            range,
        };
        TensorSource {
            name: name.into(),
            pieces: ranges.into_iter().map(piece).collect(),
            stored,
            shape,
            target: Target::Full(dtype),
        }
    }

    /// Bytes of the tensor on the card.
    pub fn bytes_on_card(&self) -> Bytes {
        self.target.bytes(&self.shape)
    }

    /// Bytes that are read for it.
    pub fn bytes_in_file(&self) -> Bytes {
        Bytes(self.pieces.iter().map(SourcePiece::length).sum())
    }

    /// The files that it is read from, in the order of its pieces.
    pub fn files(&self) -> impl Iterator<Item = &Arc<Path>> {
        self.pieces.iter().filter_map(|piece| match piece {
            SourcePiece::File { file, .. } => Some(file),
            SourcePiece::Inline(_) => None,
        })
    }

    /// Whether it is quantized while it is loaded.
    pub fn is_made_at_load(&self) -> bool {
        matches!(self.target, Target::Quantized(_)) && self.stored != Stored::U8
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
    /// A number that is not finite, in a weight that was to be quantized. (What is stored quantized is taken as it is,
    /// and what stays in full precision keeps such numbers.)
    #[error(
        "tensor {tensor} has a number that is not finite, and cannot be quantized: load it in full precision"
    )]
    NotFinite {
        /// Its name within the component.
        tensor: String,
    },
    /// The card cannot take this plan.
    #[error("this card cannot load that: {0}")]
    Unsupported(String),
    /// The card is lost.
    #[error("the card is lost: {0}")]
    Lost(String),
}
