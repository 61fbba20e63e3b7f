//! Headers of checkpoint files: safetensors, GGUF, and the zip archives of `torch.save`. Only what describes the
//! tensors is read here, and all of it is checked before anybody trusts an offset: a checkpoint comes from the
//! internet, and a header that lies must cost an error, never a crash or somebody else's bytes.
//!
//! Whatever the format, a file is the same afterwards: tensors by name, each a run of bytes with a shape and a way
//! of storing numbers. Which format a file has is told by its first bytes, not by its name.

mod gguf;
mod pth;
mod safetensors;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use candle_core::DType;
use residency::Bytes;

use crate::load::{ByteRange, LoadError, Stored, TensorSource};

/// The longest header that is read, in bytes, of a safetensors or a GGUF file: the limit of the first format's own
/// implementation.
pub const LONGEST_HEADER: u64 = 100_000_000;

/// One tensor of a checkpoint file, as its header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// How its numbers are stored.
    pub stored: Stored,
    /// Its shape, row-major. Empty for a scalar. Of a tensor in GGUF this is the shape of the model, also where the
    /// file holds it reshaped (`comfy.gguf.orig_shape`): blocks then lie one behind the other over the flattened
    /// tensor, and may reach over the end of a row (see [`crate::WeightFormat::fits`]).
    pub shape: Vec<usize>,
    /// Its bytes; the offset counts from the start of the file, not of the data.
    pub range: ByteRange,
}

impl TensorEntry {
    /// How many numbers it has.
    pub fn elements(&self) -> usize {
        // Cannot overflow: `open` multiplied the same factors and got the length of a part of the file.
        self.shape.iter().product()
    }

    /// `count` rows of the first dimension, from row `first` on, as an entry of its own: how a slice of a
    /// fused weight is named. `None` if the tensor is a scalar, does not have so many rows, or is stored in blocks
    /// that reach over the end of a row.
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

/// What tells one version of a file from another without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Its length in bytes.
    pub length: u64,
    /// When it was last written, where the file system says so.
    pub modified: Option<SystemTime>,
    /// Device and inode: a file that was replaced under the same name differs here.
    pub identity: (u64, u64),
}

impl FileStamp {
    /// The stamp of an open file.
    ///
    /// # Errors
    /// What the system said.
    pub fn of(file: &File) -> std::io::Result<FileStamp> {
        let facts = file.metadata()?;
        #[cfg(unix)]
        let identity = {
            use std::os::unix::fs::MetadataExt;
            (facts.dev(), facts.ino())
        };
        #[cfg(not(unix))]
        let identity = (0, 0);
        Ok(FileStamp {
            length: facts.len(),
            modified: facts.modified().ok(),
            identity,
        })
    }
}

/// A safetensors, GGUF or PyTorch file whose header was read and found true. No descriptor is kept open.
#[derive(Clone, Debug)]
pub struct CheckpointFile {
    path: Arc<Path>,
    stamp: FileStamp,
    tensors: BTreeMap<String, TensorEntry>,
    metadata: HashMap<String, String>,
}

impl CheckpointFile {
    /// Reads and checks the header of a file, in the format that its first bytes tell: safetensors, GGUF of version
    /// 2 or 3, or a zip archive of `torch.save`. The tensors' own bytes are not touched, and nothing that a pickle
    /// asks for is executed.
    ///
    /// # Errors
    /// [`LoadError::Io`] if it cannot be opened or read, [`LoadError::Damaged`] if it is cut short or its
    /// header contradicts itself or the file, [`LoadError::Unsupported`] if a tensor is stored in a way that
    /// this build cannot read, or a pickle is more than a state dict. The message names the tensor that is meant.
    pub fn open(path: &Path) -> Result<CheckpointFile, LoadError> {
        let io = |source| LoadError::Io {
            file: path.to_owned(),
            source,
        };
        let mut file = File::open(path).map_err(io)?;
        let stamp = FileStamp::of(&file).map_err(io)?;
        let contents = contents(&mut file, stamp.length).map_err(|problem| problem.at(path))?;
        Ok(CheckpointFile {
            path: path.into(),
            stamp,
            tensors: contents.tensors,
            metadata: contents.metadata,
        })
    }

    /// Where the file is.
    pub fn path(&self) -> &Arc<Path> {
        &self.path
    }

    /// Length of the whole file.
    pub fn size(&self) -> Bytes {
        Bytes(self.stamp.length)
    }

    /// What the file was when its header was read.
    pub fn stamp(&self) -> &FileStamp {
        &self.stamp
    }

    /// All tensors, by name in order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// One tensor.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// Free text beside the tensors: `__metadata__` of safetensors; of GGUF every key whose value is text or one
    /// number, as text; nothing of PyTorch's.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// The whole of tensor `name` as the source of a tensor that is called `to` within its component and has
    /// dtype `target` on the card. `None` if there is no such tensor.
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

    /// Whether the file is still the one whose header was read.
    ///
    /// # Errors
    /// [`LoadError::Damaged`] if it was replaced or written since, [`LoadError::Io`] if it is gone.
    pub fn verify_unchanged(&self) -> Result<(), LoadError> {
        let io = |source| LoadError::Io {
            file: self.path.to_path_buf(),
            source,
        };
        let now = FileStamp::of(&File::open(&self.path).map_err(io)?).map_err(io)?;
        if now == self.stamp {
            return Ok(());
        }
        Err(Problem::Damaged("it changed since its header was read".to_owned()).at(&self.path))
    }
}

/// What is wrong, before it is said of which file.
enum Problem {
    Damaged(String),
    Unsupported(String),
    Io(std::io::Error),
}

impl Problem {
    /// A file that ends early was cut while we read it: its length had been checked.
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
            Problem::Unsupported(problem) => {
                LoadError::Unsupported(format!("{}: {}", path.display(), shortened(problem)))
            }
            Problem::Io(source) => LoadError::Io {
                file: path.to_owned(),
                source,
            },
        }
    }
}

/// A text with a middle left out where it is long: names and shapes are whatever the file says, and end up in logs and
/// answers.
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

/// What a file's header says.
struct Contents {
    tensors: BTreeMap<String, TensorEntry>,
    metadata: HashMap<String, String>,
}

/// Reads the header of a file of `size` bytes in the format that its first bytes tell.
fn contents(file: &mut File, size: u64) -> Result<Contents, Problem> {
    let mut first = [0; 8];
    let known = first.len().min(usize::try_from(size).unwrap_or(usize::MAX));
    file.read_exact(&mut first[..known]).map_err(Problem::reading)?;
    file.rewind().map_err(Problem::Io)?;
    match first {
        [b'G', b'G', b'U', b'F', ..] => gguf::read(file, size),
        // An archive begins with its first entry, or with its directory if it has none.
        [b'P', b'K', 3, 4, ..] | [b'P', b'K', 5, 6, ..] => pth::read(file, size),
        // As the length of a safetensors header this would be more than is allowed.
        [0x80, 2..=5, ..] if u64::from_le_bytes(first) > LONGEST_HEADER => Err(pth::bare_pickle()),
        _ => safetensors::read(file, size),
    }
}

/// The shape and the exact bytes of a tensor of these dimensions; `None` if they cannot be addressed or are no whole
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

/// Whether the product of all dimensions that are not zero can be addressed. A zero hides the other factors from the
/// product: whoever multiplies them in another order must not overflow.
fn strides_fit(shape: &[usize]) -> bool {
    shape
        .iter()
        .filter(|&&n| n > 0)
        .try_fold(8usize, |product, &n| product.checked_mul(n))
        .is_some_and(|bytes| bytes <= isize::MAX as usize)
}
