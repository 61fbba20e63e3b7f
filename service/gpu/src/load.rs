//! Load plans: which bytes of which files become which tensors.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::DType;
use residency::{Bytes, Part, Parts};

use crate::blocks::{BlockPlace, BlockSize, Placement, block_sizes, parts_of};
use crate::format::{GgufType, WeightFormat, rows_and_columns};

/// How numbers are stored in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stored {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary64; read as f32.
    F64,
    U8,
    I8,
    /// E4M3: 1 sign, 4 exponent, 3 mantissa bits; no infinities.
    F8E4M3,
    /// E5M2: 1 sign, 5 exponent, 2 mantissa bits.
    F8E5M2,
    /// E8M0: the exponents of powers of two. Read as scales only.
    F8E8M0,
    I64,
    /// Read as a single number only: the alpha of an adapter.
    I32,
    /// Block-quantized types of llama.cpp.
    Gguf(GgufType),
}

impl Stored {
    /// Block size in numbers and bytes; (1, width) for types without blocks.
    pub fn block(self) -> (usize, usize) {
        match self {
            Stored::U8 | Stored::I8 | Stored::F8E4M3 | Stored::F8E5M2 | Stored::F8E8M0 => (1, 1),
            Stored::F16 | Stored::Bf16 => (1, 2),
            Stored::F32 | Stored::I32 => (1, 4),
            Stored::F64 | Stored::I64 => (1, 8),
            Stored::Gguf(kind) => kind.block(),
        }
    }

    /// Bytes of one number, or of one block of llama.cpp.
    pub fn width(self) -> usize {
        self.block().1
    }

    /// Whether this is a full-precision float type.
    pub fn is_float(self) -> bool {
        matches!(self, Stored::F32 | Stored::F16 | Stored::Bf16 | Stored::F64)
    }
}

/// A byte range in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// Offset of the first byte from the start of the file.
    pub offset: u64,
    pub length: u64,
}

/// One contiguous piece of a tensor's source.
#[derive(Clone, Debug, PartialEq)]
pub enum SourcePiece {
    /// Bytes of a file.
    File { file: Arc<Path>, range: ByteRange },
    /// Bytes taken from the header, or constants.
    Inline(Arc<[u8]>),
}

impl SourcePiece {
    /// Length in bytes.
    pub fn length(&self) -> u64 {
        match self {
            SourcePiece::File { range, .. } => range.length,
            SourcePiece::Inline(bytes) => bytes.len() as u64,
        }
    }
}

/// Representation of a tensor on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Full precision, of this dtype.
    Full(DType),
    /// A quantized weight. If the source is [`Stored::U8`], the pieces are the parts of its layout, taken over
    /// unchanged; if it is a float type, the weight is quantized at load.
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

/// Source of one tensor of a component. Pieces are concatenated: a slice of a fused weight is one piece, a
/// concatenation in another order is several.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSource {
    /// Name within the component, in the naming of diffusers.
    pub name: String,
    pub pieces: Vec<SourcePiece>,
    /// Type of the stored numbers. [`Stored::U8`] for a weight that is stored quantized.
    pub stored: Stored,
    /// Shape of the tensor, row-major.
    pub shape: Vec<usize>,
    /// Representation on the card.
    pub target: Target,
    /// The block that it belongs to; `None` if it always stays on the card.
    pub block: Option<BlockPlace>,
}

impl TensorSource {
    /// Source of a full-precision tensor, from ranges of one file.
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
            block: None,
        }
    }

    /// Bytes of the tensor on the card.
    pub fn bytes_on_card(&self) -> Bytes {
        self.target.bytes(&self.shape)
    }

    /// Shape of the tensor on the card: quantized weights are a row of bytes.
    pub(crate) fn shape_on_card(&self) -> Vec<usize> {
        match self.target {
            Target::Full(_) => self.shape.clone(),
            Target::Quantized(_) => vec![self.bytes_on_card().0 as usize],
        }
    }

    /// What a card says that has no tensors of the target's dtype.
    pub(crate) fn without_form(&self) -> String {
        format!("tensor {} has no form {:?}", self.name, self.target)
    }

    /// The files of its pieces, in order.
    pub fn files(&self) -> impl Iterator<Item = &Arc<Path>> {
        self.pieces.iter().filter_map(|piece| match piece {
            SourcePiece::File { file, .. } => Some(file),
            SourcePiece::Inline(_) => None,
        })
    }

    /// Whether it is quantized at load.
    pub fn is_made_at_load(&self) -> bool {
        matches!(self.target, Target::Quantized(_)) && self.stored != Stored::U8
    }
}

/// How a component is loaded.
#[derive(Clone, Debug, PartialEq)]
pub enum LoadPlan {
    Files(Vec<TensorSource>),
    /// Bytes without content, on a simulated card only.
    Synthetic(Synthetic),
}

/// A component without content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synthetic {
    pub bytes: Bytes,
    /// Blocks of equal size, of which it consists; 0: it has none.
    pub blocks: u32,
}

impl Synthetic {
    /// Its blocks, and the rest, as tensors that no file has.
    fn tensors(self) -> Vec<TensorSource> {
        let nowhere: Arc<Path> = Path::new("").into();
        let each = self.bytes.0 / u64::from(self.blocks.max(1));
        let tensor = |bytes: u64, block| TensorSource {
            block,
            // Of two dimensions: what has one is small, and stays.
            ..TensorSource::full("", &nowhere, [], Stored::U8, vec![1, bytes as usize], DType::U8)
        };
        let blocks =
            (0..self.blocks as usize).map(|number| tensor(each, Some(BlockPlace::each_pass(number))));
        let rest = self.bytes.0 - each * u64::from(self.blocks);
        blocks.chain([tensor(rest, None)]).collect()
    }
}

impl LoadPlan {
    /// The plan of bytes without content, in no blocks.
    pub fn synthetic(bytes: Bytes) -> LoadPlan {
        LoadPlan::Synthetic(Synthetic { bytes, blocks: 0 })
    }

    /// What it consists of, whether it has content or not.
    pub(crate) fn tensors(&self) -> Cow<'_, [TensorSource]> {
        match self {
            LoadPlan::Files(sources) => Cow::Borrowed(sources),
            LoadPlan::Synthetic(synthetic) => Cow::Owned(synthetic.tensors()),
        }
    }

    /// The tensor sources.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for a synthetic plan.
    pub(crate) fn files(&self) -> Result<&[TensorSource], LoadError> {
        match self {
            LoadPlan::Files(sources) => Ok(sources),
            LoadPlan::Synthetic(_) => Err(LoadError::Unsupported(
                "bytes without content go to simulated cards only".to_owned(),
            )),
        }
    }

    /// The parts in which the component can be on a card.
    pub fn parts(&self) -> Parts {
        parts_of(&self.tensors())
    }

    /// Sizes of its blocks, in the order of their places.
    pub fn blocks(&self) -> Vec<BlockSize> {
        match self {
            LoadPlan::Files(sources) => block_sizes(sources),
            LoadPlan::Synthetic(_) => Vec::new(),
        }
    }

    /// Where the tensors are in a part.
    pub(crate) fn placement(&self, part: Part) -> Placement {
        Placement::of(&self.tensors(), part)
    }

    /// Says to which blocks the tensors belong, by their names.
    pub fn in_blocks(&mut self, block_of: impl Fn(&str) -> Option<BlockPlace>) {
        if let LoadPlan::Files(sources) = self {
            for source in sources {
                source.block = block_of(&source.name);
            }
        }
    }

    /// Exact bytes on the card of all of it.
    pub fn bytes(&self) -> Bytes {
        match self {
            LoadPlan::Files(sources) => sources.iter().map(TensorSource::bytes_on_card).sum(),
            LoadPlan::Synthetic(synthetic) => synthetic.bytes,
        }
    }
}

/// Progress of a load, in bytes on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub done: Bytes,
    pub total: Bytes,
}

/// Why a component could not be loaded. Nothing more of it is on the card than before.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Cancelled by the progress callback.
    #[error("the load was cancelled")]
    Cancelled,
    /// Tensor handles of the component are still alive, so that no other part of it can be loaded.
    #[error(
        "{0} holder(s) of the component's tensors still use it: try again when the stage that runs on them has ended"
    )]
    StillInUse(usize),
    /// The card has not enough memory.
    #[error("out of memory while loading: {needed} needed, {free} free")]
    OutOfMemory {
        /// Bytes of the failed allocation.
        needed: Bytes,
        /// Bytes free at that moment.
        free: Bytes,
    },
    /// The card has the memory, and not in one piece.
    #[error(
        "out of memory while loading: {needed} needed in one piece, {free} free, at most {largest} of them in one piece"
    )]
    Fragmented {
        /// Bytes of the failed allocation.
        needed: Bytes,
        /// Bytes free at that moment.
        free: Bytes,
        /// The largest allocation that would have succeeded.
        largest: Bytes,
    },
    /// The machine has not enough memory to stream from.
    #[error(
        "to stream its weights, the component needs {needed} of the machine's memory, and {available} are available: end other \
         programs, raise cards.host_memory if it is set, or choose a smaller quantization"
    )]
    HostMemory {
        needed: Bytes,
        /// Bytes that can be taken without making the machine swap.
        available: Bytes,
    },
    /// The file cannot be read.
    #[error("cannot read {}: {source}", file.display())]
    Io { file: PathBuf, source: std::io::Error },
    /// The file contradicts its header.
    #[error("{} is damaged: {problem}", file.display())]
    Damaged { file: PathBuf, problem: String },
    /// The file is not complete: it was cut off, or it is a placeholder for a file that is yet to be fetched.
    #[error("{} is not complete: {problem}", file.display())]
    Incomplete { file: PathBuf, problem: String },
    /// A tensor is stored in a type that this build cannot read.
    #[error(
        "cannot read {}: tensor {tensor} is stored as {stored}{}",
        file.display(),
        readable.as_ref().map(|readable| format!("; what is read is {readable}")).unwrap_or_default()
    )]
    UnsupportedTensor {
        file: PathBuf,
        /// Name in the file.
        tensor: String,
        /// Name of the type.
        stored: String,
        /// The types that are read from files of this format, where it has many others.
        readable: Option<String>,
    },
    /// A weight to be quantized contains NaN or an infinity. (Weights that are stored quantized or stay in full
    /// precision may contain them.)
    #[error(
        "tensor {tensor} has a number that is not finite, and cannot be quantized: load it in full precision"
    )]
    NotFinite {
        /// Name within the component.
        tensor: String,
    },
    /// The card cannot load this plan.
    #[error("this card cannot load that: {0}")]
    Unsupported(String),
    /// The card is lost.
    #[error("the card is lost: {0}")]
    Lost(String),
}
