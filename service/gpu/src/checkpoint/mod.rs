//! Headers of checkpoint files: safetensors, GGUF, and the zip archives of `torch.save`. Only the descriptions of
//! tensors are read here, and all of them are validated before an offset is used: a checkpoint is untrusted input,
//! and a malformed header must cause an error, never a crash or a read out of bounds.
//!
//! All formats are read into the same representation: tensors by name, each a byte range with a shape and a stored
//! type. The format is detected by the first bytes, not by the file's name.

mod gguf;
mod no_checkpoint;
mod pth;
mod safetensors;

pub use no_checkpoint::git_lfs_pointer;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek};
use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use residency::Bytes;

use crate::files::{FileStamp, open_regular};
use crate::load::{ByteRange, LoadError, Stored, TensorSource};

/// Maximum length of a header in bytes, of safetensors and GGUF: the limit of the reference implementation of
/// safetensors.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a checkpoint file, as its header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub stored: Stored,
    /// Shape, row-major; empty for a scalar. For a tensor in GGUF it is the model's shape, even if the file stores it
    /// reshaped (`comfy.gguf.orig_shape`): its blocks are then those of the flattened tensor, and may cross the end
    /// of a row (see [`crate::WeightFormat::fits`]).
    pub shape: Vec<usize>,
    /// Byte range, from the start of the file (not of the data).
    pub range: ByteRange,
}

impl TensorEntry {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        // Cannot overflow: `open` multiplied the same factors and got the length of a part of the file.
        self.shape.iter().product()
    }

    /// `count` rows of the first dimension, from row `first` on, as an entry: a slice of a fused weight. `None` if
    /// the tensor is a scalar, has fewer rows, or is stored in blocks that cross the end of a row.
    pub fn rows(&self, first: usize, count: usize) -> Option<TensorEntry> {
        let (rows, rest) = self.shape.split_first()?;
        if first.checked_add(count)? > *rows {
            return None;
        }
        let columns = rest.iter().product::<usize>();
        let (in_block, width) = self.stored.block();
        if !columns.is_multiple_of(in_block) {
            return None;
        }
        let row_bytes = (columns / in_block * width) as u64;
        let mut shape = self.shape.clone();
        shape[0] = count;
        let range = ByteRange {
            offset: self.range.offset + first as u64 * row_bytes,
            length: count as u64 * row_bytes,
        };
        Some(TensorEntry {
            stored: self.stored,
            shape,
            range,
        })
    }
}

/// A safetensors, GGUF or PyTorch file with a validated header. No descriptor is kept open.
#[derive(Clone, Debug)]
pub struct CheckpointFile {
    path: Arc<Path>,
    stamp: FileStamp,
    tensors: BTreeMap<String, TensorEntry>,
    metadata: HashMap<String, String>,
}

impl CheckpointFile {
    /// Reads and validates the header of a file, in the format that its first bytes indicate: safetensors, GGUF of
    /// version 2 or 3, or a zip archive of `torch.save`. Tensor data is not read, and no code of a pickle is
    /// executed.
    ///
    /// # Errors
    /// [`LoadError::Io`] if it cannot be opened or read, [`LoadError::Incomplete`] if it is truncated or a placeholder for a
    /// file, [`LoadError::Damaged`] if its header contradicts itself or the file, [`LoadError::UnsupportedTensor`] if a tensor
    /// is stored in a type that this build cannot read, [`LoadError::Unsupported`] if a pickle is more than a state dict.
    pub fn open(path: &Path) -> Result<CheckpointFile, LoadError> {
        let io = |source| LoadError::Io {
            file: path.to_owned(),
            source,
        };
        let mut file = open_regular(path).map_err(io)?;
        let stamp = FileStamp::of(&file).map_err(io)?;
        let contents = contents(&mut file, stamp.size).map_err(|problem| problem.at(path))?;
        Ok(CheckpointFile {
            path: path.into(),
            stamp,
            tensors: contents.tensors,
            metadata: contents.metadata,
        })
    }

    /// Path of the file.
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Length of the whole file.
    pub fn size(&self) -> Bytes {
        Bytes(self.stamp.size)
    }

    /// Stamp of the file when its header was read.
    pub fn stamp(&self) -> &FileStamp {
        &self.stamp
    }

    /// All tensors, ordered by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// A tensor by name.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// Metadata as text: `__metadata__` of safetensors; all keys of GGUF with a string or scalar value; empty for
    /// PyTorch.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// The whole tensor `name` as the source of a tensor called `to` in its component, with dtype `target` on the
    /// card. `None` if there is no such tensor.
    pub fn source(&self, name: &str, to: impl Into<String>, target: DType) -> Option<TensorSource> {
        let entry = self.get(name)?;
        let shape = entry.shape.clone();
        Some(TensorSource::full(
            to,
            &self.path,
            [entry.range],
            entry.stored,
            shape,
            target,
        ))
    }
}

/// A problem before it is attributed to a file.
enum Problem {
    Damaged(String),
    /// The file ends early, or is a placeholder for a file.
    Incomplete(String),
    Unsupported(String),
    UnsupportedTensor {
        tensor: String,
        stored: String,
        readable: Option<String>,
    },
    Io(std::io::Error),
}

impl Problem {
    /// A file that ends early was truncated while we read it: its length had been checked.
    fn reading(error: std::io::Error) -> Problem {
        match error.kind() {
            ErrorKind::UnexpectedEof => Problem::Damaged("it became shorter while it was read".to_owned()),
            _ => Problem::Io(error),
        }
    }

    fn at(self, path: &Path) -> LoadError {
        match self {
            Problem::Damaged(problem) => LoadError::Damaged {
                file: path.to_owned(),
                problem: shortened(problem),
            },
            Problem::Incomplete(problem) => LoadError::Incomplete {
                file: path.to_owned(),
                problem: shortened(problem),
            },
            Problem::Unsupported(problem) => {
                LoadError::Unsupported(format!("{}: {}", path.display(), shortened(problem)))
            }
            Problem::UnsupportedTensor {
                tensor,
                stored,
                readable,
            } => LoadError::UnsupportedTensor {
                file: path.to_owned(),
                tensor: shortened(tensor),
                stored: shortened(stored),
                readable,
            },
            Problem::Io(source) => LoadError::Io {
                file: path.to_owned(),
                source,
            },
        }
    }
}

/// Truncates a long text in the middle: names and shapes are arbitrary input, and end up in logs and responses.
fn shortened(text: String) -> String {
    const ENDS: usize = 500;
    if text.len() <= 4 * ENDS {
        return text;
    }
    let head: String = text.chars().take(ENDS).collect();
    let tail = text.char_indices().rev().nth(ENDS - 1).map_or(0, |(at, _)| at);
    let tail = &text[tail..];
    format!("{head} … {tail}")
}

/// The content of a file's header.
struct FileHeader {
    tensors: BTreeMap<String, TensorEntry>,
    metadata: HashMap<String, String>,
}

/// Reads the header of a file of `size` bytes, in the format that its first bytes indicate.
fn contents(file: &mut File, size: u64) -> Result<FileHeader, Problem> {
    let mut beginning = Vec::new();
    Read::by_ref(file)
        .take(no_checkpoint::BEGINNING)
        .read_to_end(&mut beginning)
        .map_err(Problem::reading)?;
    file.rewind().map_err(Problem::Io)?;
    let mut first = [0; 8];
    let known = first.len().min(beginning.len());
    first[..known].copy_from_slice(&beginning[..known]);
    if let Some(problem) = no_checkpoint::problem(&beginning) {
        return Err(problem);
    }
    match first {
        [b'G', b'G', b'U', b'F', ..] => gguf::read(file, size),
        // An archive begins with its first entry, or with its directory if it is empty.
        [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..] => pth::read(file, size),
        // As the length of a safetensors header this would exceed the limit.
        [0x80, 2..=5, ..] if u64::from_le_bytes(first) > MAX_HEADER_BYTES => Err(pth::bare_pickle()),
        _ => safetensors::read(file, size),
    }
}

/// Shape and exact bytes of a tensor of these dimensions; `None` if they cannot be addressed or are not a whole
/// number of blocks.
fn extent(stored: Stored, dimensions: &[u64]) -> Option<(Vec<usize>, u64)> {
    let (in_block, width) = stored.block();
    let elements = dimensions
        .iter()
        .try_fold(1u64, |product, &n| product.checked_mul(n))?;
    if !elements.is_multiple_of(in_block as u64) {
        return None;
    }
    let bytes = (elements / in_block as u64).checked_mul(width as u64)?;
    let shape = dimensions
        .iter()
        .map(|&n| usize::try_from(n).ok())
        .collect::<Option<Vec<_>>>()?;
    strides_fit(&shape).then_some((shape, bytes))
}

/// Whether the product of all nonzero dimensions can be addressed. A zero hides the other factors, which must not
/// overflow when multiplied in another order.
fn strides_fit(shape: &[usize]) -> bool {
    shape
        .iter()
        .filter(|&&n| n > 0)
        .try_fold(8usize, |product, &n| product.checked_mul(n))
        .is_some_and(|bytes| bytes <= isize::MAX as usize)
}
