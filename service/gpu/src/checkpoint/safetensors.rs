//! Safetensors headers. The parser of the `safetensors` crate is not used: it keeps the last of two tensors with
//! one name, and does not say which tensor an error is about.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::Read;

use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use super::{Contents, LONGEST_HEADER, Problem, TensorEntry, extent};
use crate::load::{ByteRange, Stored};

/// Bytes in front of the header that say how long it is.
const PREFIX: u64 = 8;

/// Reads and checks the header of a file of `size` bytes.
pub(super) fn read(file: &mut File, size: u64) -> Result<Contents, Problem> {
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
    let data = Data {
        start: PREFIX + header_length,
        length: size - PREFIX - header_length,
    };
    Ok(Contents {
        tensors: data.entries(raw.tensors)?,
        metadata: raw.metadata,
    })
}

/// Reads the length in front of the header and checks it before anything is allocated for it.
fn header_length(file: &mut File, size: u64) -> Result<u64, Problem> {
    if size < PREFIX {
        return Err(Problem::Damaged(format!(
            "it has {} bytes, fewer than its own length needs",
            size
        )));
    }
    let mut prefix = [0; PREFIX as usize];
    file.read_exact(&mut prefix).map_err(Problem::reading)?;
    let length = u64::from_le_bytes(prefix);
    if length > LONGEST_HEADER {
        return Err(Problem::Damaged(format!(
            "its header claims {length} bytes, more than the {LONGEST_HEADER} that are allowed \
             (is it a safetensors, GGUF or .pth file?)"
        )));
    }
    if length > size - PREFIX {
        return Err(Problem::Damaged(format!(
            "its header claims {length} bytes, and the file has {} behind its length",
            size - PREFIX
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
        "U8" => Stored::U8,
        "I8" => Stored::I8,
        "F8_E4M3" => Stored::F8E4M3,
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
