//! Safetensors headers. Only the header is read here, and all of it is checked before anybody trusts an
//! offset: a checkpoint comes from the internet, and a header that lies must cost an error, never a crash
//! or somebody else's bytes.
//!
//! The parser of the `safetensors` crate is not used: it keeps the last of two tensors with one name, and
//! does not say which tensor an error is about.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use candle_core::DType;
use residency::Bytes;
use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use crate::load::{ByteRange, LoadError, Stored, TensorSource};

/// The longest header that is read, in bytes: the limit of the format's own implementation.
pub const LONGEST_HEADER: u64 = 100_000_000;

/// Bytes in front of the header that say how long it is.
const PREFIX: u64 = 8;

/// One tensor of a checkpoint file, as its header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// How its numbers are stored.
    pub stored: Stored,
    /// Its shape, row-major. Empty for a scalar.
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
    /// fused weight is named. `None` if the tensor is a scalar or does not have so many rows.
    pub fn rows(&self, first: usize, count: usize) -> Option<TensorEntry> {
        let (rows, rest) = self.shape.split_first()?;
        if first.checked_add(count)? > *rows {
            return None;
        }
        let row_bytes = (rest.iter().product::<usize>() * self.stored.width()) as u64;
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

/// A safetensors file whose header was read and found true. No descriptor is kept open.
#[derive(Clone, Debug)]
pub struct SafetensorsFile {
    path: Arc<Path>,
    stamp: FileStamp,
    tensors: BTreeMap<String, TensorEntry>,
    metadata: HashMap<String, String>,
}

impl SafetensorsFile {
    /// Reads and checks the header of a file. The tensors' own bytes are not touched.
    ///
    /// # Errors
    /// [`LoadError::Io`] if it cannot be opened or read, [`LoadError::Damaged`] if it is cut short or its
    /// header contradicts itself or the file, [`LoadError::Unsupported`] if a tensor is stored in a way that
    /// this build cannot read. The message names the tensor that is meant.
    pub fn open(path: &Path) -> Result<SafetensorsFile, LoadError> {
        let io = |source| LoadError::Io {
            file: path.to_owned(),
            source,
        };
        let damaged = |problem: String| LoadError::Damaged {
            file: path.to_owned(),
            problem,
        };
        let mut file = File::open(path).map_err(io)?;
        let stamp = FileStamp::of(&file).map_err(io)?;
        let header_length = header_length(&mut file, &stamp).map_err(|p| p.at(path))?;

        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header)
            .map_err(|e| Problem::reading(e).at(path))?;
        if header.first() != Some(&b'{') {
            return Err(damaged("the header does not begin with {".to_owned()));
        }
        let text = std::str::from_utf8(&header).map_err(|e| {
            damaged(format!(
                "the header is not UTF-8 from its byte {} on",
                e.valid_up_to()
            ))
        })?;
        let raw: RawHeader =
            serde_json::from_str(text).map_err(|e| damaged(format!("the header cannot be parsed: {e}")))?;

        let data = Data {
            start: PREFIX + header_length,
            length: stamp.length - PREFIX - header_length,
        };
        let tensors = data.entries(raw.tensors).map_err(|p| p.at(path))?;
        Ok(SafetensorsFile {
            path: path.into(),
            stamp,
            tensors,
            metadata: raw.metadata,
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

    /// The free text of `__metadata__`.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// The whole of tensor `name` as the source of a tensor that is called `to` within its component and has
    /// dtype `target` on the card. `None` if there is no such tensor.
    pub fn source(&self, name: &str, to: impl Into<String>, target: DType) -> Option<TensorSource> {
        let entry = self.get(name)?;
        Some(TensorSource {
            name: to.into(),
            file: Arc::clone(&self.path),
            ranges: vec![entry.range],
            stored: entry.stored,
            shape: entry.shape.clone(),
            target,
        })
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
                problem,
            },
            Problem::Unsupported(problem) => LoadError::Unsupported(format!("{}: {problem}", path.display())),
            Problem::Io(source) => LoadError::Io {
                file: path.to_owned(),
                source,
            },
        }
    }
}

/// Reads the length in front of the header and checks it before anything is allocated for it.
fn header_length(file: &mut File, stamp: &FileStamp) -> Result<u64, Problem> {
    if stamp.length < PREFIX {
        return Err(Problem::Damaged(format!(
            "it has {} bytes, fewer than its own length needs",
            stamp.length
        )));
    }
    let mut prefix = [0; PREFIX as usize];
    file.read_exact(&mut prefix).map_err(Problem::reading)?;
    let length = u64::from_le_bytes(prefix);
    if length > LONGEST_HEADER {
        return Err(Problem::Damaged(format!(
            "its header claims {length} bytes, more than the {LONGEST_HEADER} that are allowed \
             (is it a safetensors file?)"
        )));
    }
    if length > stamp.length - PREFIX {
        return Err(Problem::Damaged(format!(
            "its header claims {length} bytes, and the file has {} behind its length",
            stamp.length - PREFIX
        )));
    }
    Ok(length)
}

/// The part of the file behind the header.
struct Data {
    start: u64,
    length: u64,
}

impl Data {
    /// Checks every tensor for itself, then that together they cover the data without overlap or gap.
    fn entries(&self, raw: Vec<(String, RawEntry)>) -> Result<BTreeMap<String, TensorEntry>, Problem> {
        let mut spans: Vec<(u64, u64, &str)> = raw
            .iter()
            .map(|(name, e)| (e.data_offsets.0, e.data_offsets.1, name.as_str()))
            .collect();
        spans.sort_unstable();

        let mut entries = BTreeMap::new();
        for (name, entry) in &raw {
            let entry = self.entry(name, entry)?;
            if entries.insert(name.clone(), entry).is_some() {
                return Err(Problem::Damaged(format!("tensor {name} is there twice")));
            }
        }
        let mut covered = 0;
        for (begin, end, name) in spans {
            if begin < covered {
                return Err(Problem::Damaged(format!(
                    "tensor {name} overlaps the one before it"
                )));
            }
            if begin > covered {
                let gap = begin - covered;
                return Err(Problem::Damaged(format!(
                    "{gap} bytes before tensor {name} belong to no tensor"
                )));
            }
            covered = end;
        }
        if covered != self.length {
            return Err(Problem::Damaged(format!(
                "the last {} bytes belong to no tensor",
                self.length.saturating_sub(covered)
            )));
        }
        Ok(entries)
    }

    fn entry(&self, name: &str, raw: &RawEntry) -> Result<TensorEntry, Problem> {
        let damaged = |problem: String| Problem::Damaged(format!("tensor {name} {problem}"));
        let stored = stored(&raw.dtype)
            .ok_or_else(|| Problem::Unsupported(format!("tensor {name} is stored as {}", raw.dtype)))?;
        let (begin, end) = raw.data_offsets;
        if begin > end {
            return Err(damaged(format!("begins at {begin}, behind its end at {end}")));
        }
        if end > self.length {
            let missing = end - self.length;
            return Err(damaged(format!(
                "ends {missing} bytes behind the end of the file"
            )));
        }
        let bytes = raw
            .shape
            .iter()
            .try_fold(1u64, |product, &n| product.checked_mul(n))
            .and_then(|elements| elements.checked_mul(stored.width() as u64))
            .ok_or_else(|| damaged(format!("has the impossible shape {:?}", raw.shape)))?;
        if bytes != end - begin {
            return Err(damaged(format!(
                "has {} bytes, and its shape {:?} of {} needs {bytes}",
                end - begin,
                raw.shape,
                raw.dtype
            )));
        }
        // A zero hides the other factors from the product: they must still be addressable by themselves, or
        // whoever multiplies them in another order overflows.
        let shape = raw
            .shape
            .iter()
            .map(|&n| usize::try_from(n))
            .collect::<Result<Vec<_>, _>>();
        let shape = shape
            .ok()
            .filter(|s| strides_fit(s))
            .ok_or_else(|| damaged(format!("has the impossible shape {:?}", raw.shape)))?;
        let range = ByteRange {
            offset: self.start + begin,
            length: end - begin,
        };
        Ok(TensorEntry { stored, shape, range })
    }
}

/// Whether the product of all dimensions that are not zero can be addressed.
fn strides_fit(shape: &[usize]) -> bool {
    shape
        .iter()
        .filter(|&&n| n > 0)
        .try_fold(8usize, |product, &n| product.checked_mul(n))
        .is_some_and(|bytes| bytes <= isize::MAX as usize)
}

/// The dtypes of the format that this build reads.
fn stored(dtype: &str) -> Option<Stored> {
    Some(match dtype {
        "F64" => Stored::F64,
        "F32" => Stored::F32,
        "F16" => Stored::F16,
        "BF16" => Stored::Bf16,
        "I64" => Stored::I64,
        "U8" => Stored::U8,
        _ => return None,
    })
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header as it is written: in order, with names that may repeat.
#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, RawEntry)>,
    metadata: HashMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<RawHeader, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader::default();
                while let Some(name) = map.next_key::<String>()? {
                    let named = |e: A::Error| de::Error::custom(format!("in {name}: {e}"));
                    if name == "__metadata__" {
                        // Some writers say null where they have nothing to say.
                        let metadata: Option<HashMap<String, String>> = map.next_value().map_err(named)?;
                        header.metadata = metadata.unwrap_or_default();
                    } else {
                        let entry = map.next_value().map_err(named)?;
                        header.tensors.push((name, entry));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}
