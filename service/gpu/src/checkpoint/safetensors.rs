//! Safetensors headers. The parser of the `safetensors` crate is not used: of two tensors with one name it keeps the
//! last, and its errors do not name the tensor.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::Read;

use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use super::{FileHeader, MAX_HEADER_BYTES, Problem, TensorEntry, extent};
use crate::load::{ByteRange, Stored};

/// Length in bytes of the header's length prefix.
const PREFIX: u64 = 8;

/// Most tensors of one file. The largest checkpoints have a tenth of it. Each tensor costs time and memory before the file can
/// be judged.
const MOST_TENSORS: usize = 200_000;

/// Reads and checks the header of a file of `size` bytes.
pub(super) fn read(file: &mut File, size: u64) -> Result<FileHeader, Problem> {
    let damaged = |problem: String| Problem::Damaged(problem);
    let header_length = header_length(file, size)?;
    let mut header = vec![0; header_length as usize];
    file.read_exact(&mut header).map_err(Problem::reading)?;
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
    let data = SafetensorsData {
        start: PREFIX + header_length,
        length: size - PREFIX - header_length,
    };
    Ok(FileHeader {
        tensors: data.entries(raw.tensors)?,
        metadata: raw.metadata,
    })
}

/// Reads the length prefix and validates it before anything is allocated for the header.
fn header_length(file: &mut File, size: u64) -> Result<u64, Problem> {
    if size < PREFIX {
        return Err(Problem::Incomplete(format!(
            "it has {size} bytes, fewer than its own length needs: download it again"
        )));
    }
    let mut prefix = [0; PREFIX as usize];
    file.read_exact(&mut prefix).map_err(Problem::reading)?;
    let length = u64::from_le_bytes(prefix);
    if length > MAX_HEADER_BYTES {
        return Err(Problem::Damaged(format!(
            "its header claims more than the {MAX_HEADER_BYTES} bytes that are allowed \
             (is it a safetensors, GGUF or .pth file?)"
        )));
    }
    if length > size - PREFIX {
        return Err(Problem::Incomplete(format!(
            "its header claims more bytes than the file has after its length, which are {}: download it again",
            size - PREFIX
        )));
    }
    Ok(length)
}

/// The part of the file after the header.
struct SafetensorsData {
    start: u64,
    length: u64,
}

impl SafetensorsData {
    /// Validates each tensor, then that together they cover the data without overlap or gap.
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
        let stored = stored(&raw.dtype).ok_or_else(|| Problem::UnsupportedTensor {
            tensor: name.to_owned(),
            stored: raw.dtype.to_string(),
            readable: None,
        })?;
        let (begin, end) = raw.data_offsets;
        if begin > end {
            return Err(damaged(format!("begins at {begin}, behind its end at {end}")));
        }
        if end > self.length {
            let missing = end - self.length;
            return Err(Problem::Incomplete(format!(
                "tensor {name} ends {missing} bytes after the end of the file: was its download interrupted? Download \
                 it again"
            )));
        }
        let (shape, bytes) = extent(stored, &raw.shape)
            .ok_or_else(|| damaged(format!("has the impossible shape {:?}", raw.shape)))?;
        if bytes != end - begin {
            return Err(damaged(format!(
                "has {} bytes, and its shape {:?} of {} needs {bytes}",
                end - begin,
                raw.shape,
                raw.dtype
            )));
        }
        let range = ByteRange {
            offset: self.start + begin,
            length: end - begin,
        };
        Ok(TensorEntry { stored, shape, range })
    }
}

/// The dtypes of the format that this build reads.
fn stored(dtype: &str) -> Option<Stored> {
    Some(match dtype {
        "F64" => Stored::F64,
        "F32" => Stored::F32,
        "F16" => Stored::F16,
        "BF16" => Stored::Bf16,
        "I64" => Stored::I64,
        "I32" => Stored::I32,
        "U8" => Stored::U8,
        "I8" => Stored::I8,
        "F8_E4M3" => Stored::F8E4M3,
        "F8_E5M2" => Stored::F8E5M2,
        "F8_E8M0" => Stored::F8E8M0,
        _ => return None,
    })
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header as written: in order, with possibly repeated names.
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
                        // Some writers have null for absent metadata.
                        let metadata: Option<HashMap<String, String>> = map.next_value().map_err(named)?;
                        header.metadata = metadata.unwrap_or_default();
                    } else if header.tensors.len() >= MOST_TENSORS {
                        return Err(de::Error::custom(format!(
                            "it has more than {MOST_TENSORS} tensors"
                        )));
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
