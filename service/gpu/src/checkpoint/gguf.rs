//! GGUF headers, versions 2 and 3, little-endian. Sources: the format's description in the ggml project (`gguf.md`),
//! and for type numbers the `gguf` Python package, `constants.py`.
//!
//! The file's dimensions, fastest first, are reversed into row-major order. A tensor that ComfyUI's converter
//! reshaped so that its rows divide into blocks has its original shape under `comfy.gguf.orig_shape.<name>`: that is
//! the shape it gets here. The order of its numbers is the same in both.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read};

use super::{FileHeader, MAX_HEADER_BYTES, Problem, TensorEntry, extent};
use crate::format::GgufType;
use crate::load::{ByteRange, Stored};

/// Prefix of the metadata keys of original shapes.
const ORIGINAL_SHAPE: &str = "comfy.gguf.orig_shape.";
/// Default alignment of tensor data.
const ALIGNMENT: u32 = 32;
/// Maximum of dimensions of a tensor. ggml has four; files for ComfyUI have the convolutions of films in five, or in
/// four with their shape under [`ORIGINAL_SHAPE`].
const MAX_DIMENSIONS: u32 = 8;
/// Maximum of dimensions of a shape under [`ORIGINAL_SHAPE`].
const MAX_ORIGINAL_DIMENSIONS: u64 = MAX_DIMENSIONS as u64;
/// Maximum of tensors, and of metadata keys. An entry takes ten times its bytes in the file.
const MAX_ENTRIES: u64 = 1 << 18;
/// Maximum nesting of arrays.
const MAX_ARRAY_DEPTH: usize = 4;

/// Type numbers of metadata values.
mod kind {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

/// Reads and checks the header of a file of `size` bytes.
pub(super) fn read(file: &mut File, size: u64) -> Result<FileHeader, Problem> {
    let mut header = HeaderReader {
        from: BufReader::new(file),
        position: 0,
        size,
    };
    header.skip(4)?; // the magic, by which the caller recognized the format
    let version = header.u32()?;
    match version {
        2 | 3 => {}
        _ if (1..=0xFFFF).contains(&version.swap_bytes()) => {
            return Err(Problem::Unsupported(
                "it is a big-endian GGUF file; only little-endian ones are read".to_owned(),
            ));
        }
        _ => {
            return Err(Problem::Unsupported(format!(
                "it is GGUF of version {version}; versions 2 and 3 are read"
            )));
        }
    }
    let tensors = header.u64()?;
    let keys = header.u64()?;
    // Minimum bytes of each: name, number of dimensions, type, offset; key, type, value.
    for (count, what) in [(tensors, "tensors"), (keys, "metadata keys")] {
        if count > MAX_ENTRIES {
            return Err(Problem::Damaged(format!(
                "its header claims {count} {what}, and {MAX_ENTRIES} are allowed"
            )));
        }
    }
    header.can_hold(tensors, 8 + 4 + 4 + 8, "tensors")?;
    header.can_hold(keys, 8 + 4 + 1, "metadata keys")?;
    let metadata = Metadata::read(&mut header, keys)?;
    let mut infos = BTreeMap::new();
    for _ in 0..tensors {
        let (name, info) = TensorInfo::read(&mut header)?;
        match infos.entry(name) {
            Entry::Occupied(there) => {
                return Err(Problem::Damaged(format!("tensor {} is there twice", there.key())));
            }
            Entry::Vacant(place) => {
                place.insert(info);
            }
        }
    }
    let start = header.position.next_multiple_of(u64::from(metadata.alignment));
    let data = GgufData {
        start,
        size,
        alignment: u64::from(metadata.alignment),
    };
    Ok(FileHeader {
        tensors: data.entries(infos, &metadata.original_shapes)?,
        metadata: metadata.text,
    })
}

/// A reader over the header's bytes.
struct HeaderReader<'a> {
    from: BufReader<&'a mut File>,
    position: u64,
    /// Bytes of the whole file.
    size: u64,
}

impl HeaderReader<'_> {
    /// Checks that the next `length` bytes exist and are within the limit of a header.
    fn has(&self, length: u64) -> Result<(), Problem> {
        let end = self.position.saturating_add(length);
        if end > self.size {
            return Err(Problem::Incomplete(format!(
                "its header ends after the end of the file: it claims {length} bytes at byte {}, and the file has \
                 {} in all (was it cut short?): download it again",
                self.position, self.size
            )));
        }
        if end > MAX_HEADER_BYTES {
            return Err(Problem::Damaged(format!(
                "its header is longer than the {MAX_HEADER_BYTES} bytes that are allowed"
            )));
        }
        Ok(())
    }

    /// Checks that `count` elements of at least `each` bytes can follow.
    fn can_hold(&self, count: u64, each: u64, what: &str) -> Result<(), Problem> {
        let left = self.size.min(MAX_HEADER_BYTES) - self.position;
        match count.checked_mul(each) {
            Some(bytes) if bytes <= left => Ok(()),
            _ => Err(Problem::Incomplete(format!(
                "its header claims {count} {what}, and {left} bytes are left for it (was it cut short?): download it again"
            ))),
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Problem> {
        self.has(N as u64)?;
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).map_err(Problem::reading)?;
        self.position += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Problem> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, Problem> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    /// Skips `length` bytes.
    fn skip(&mut self, length: u64) -> Result<(), Problem> {
        self.has(length)?;
        // At most `MAX_HEADER_BYTES`.
        self.from.seek_relative(length as i64).map_err(Problem::Io)?;
        self.position += length;
        Ok(())
    }

    /// Bytes with a length prefix.
    fn string(&mut self) -> Result<Vec<u8>, Problem> {
        let length = self.u64()?;
        self.has(length)?;
        let mut bytes = vec![0; length as usize];
        self.from.read_exact(&mut bytes).map_err(Problem::reading)?;
        self.position += length;
        Ok(bytes)
    }

    /// A name, which must be UTF-8.
    fn name(&mut self) -> Result<String, Problem> {
        let position = self.position;
        String::from_utf8(self.string()?)
            .map_err(|_| Problem::Damaged(format!("the name at byte {position} of its header is not UTF-8")))
    }

    /// Skips an array whose element type and count were read.
    fn skip_array(&mut self, element: u32, count: u64, depth: usize) -> Result<(), Problem> {
        match element {
            kind::STRING => {
                self.can_hold(count, 8, "strings")?;
                for _ in 0..count {
                    let length = self.u64()?;
                    self.skip(length)?;
                }
            }
            kind::ARRAY => {
                if depth == MAX_ARRAY_DEPTH {
                    return Err(Problem::Damaged(format!(
                        "its metadata has arrays in arrays, more than {MAX_ARRAY_DEPTH} deep"
                    )));
                }
                self.can_hold(count, 4 + 8, "arrays")?;
                for _ in 0..count {
                    let (element, count) = (self.u32()?, self.u64()?);
                    self.skip_array(element, count, depth + 1)?;
                }
            }
            scalar => {
                let width = scalar_width(scalar)?;
                self.can_hold(count, width, "numbers")?;
                self.skip(count * width)?;
            }
        }
        Ok(())
    }

    /// A number or a boolean, as text.
    fn scalar(&mut self, kind: u32) -> Result<String, Problem> {
        Ok(match kind {
            kind::U8 => u8::from_le_bytes(self.bytes()?).to_string(),
            kind::I8 => i8::from_le_bytes(self.bytes()?).to_string(),
            kind::U16 => u16::from_le_bytes(self.bytes()?).to_string(),
            kind::I16 => i16::from_le_bytes(self.bytes()?).to_string(),
            kind::U32 => self.u32()?.to_string(),
            kind::I32 => i32::from_le_bytes(self.bytes()?).to_string(),
            kind::F32 => f32::from_le_bytes(self.bytes()?).to_string(),
            kind::BOOL => (self.bytes::<1>()? != [0]).to_string(),
            kind::U64 => self.u64()?.to_string(),
            kind::I64 => i64::from_le_bytes(self.bytes()?).to_string(),
            kind::F64 => f64::from_le_bytes(self.bytes()?).to_string(),
            other => return Err(unknown_kind(other)),
        })
    }
}

/// Bytes of a number or a boolean.
fn scalar_width(kind: u32) -> Result<u64, Problem> {
    Ok(match kind {
        kind::U8 | kind::I8 | kind::BOOL => 1,
        kind::U16 | kind::I16 => 2,
        kind::U32 | kind::I32 | kind::F32 => 4,
        kind::U64 | kind::I64 | kind::F64 => 8,
        other => return Err(unknown_kind(other)),
    })
}

fn unknown_kind(kind: u32) -> Problem {
    Problem::Damaged(format!(
        "its metadata has a value of type {kind}, which does not exist"
    ))
}

/// Metadata of the header.
struct Metadata {
    alignment: u32,
    original_shapes: HashMap<String, Vec<u64>>,
    text: HashMap<String, String>,
}

impl Metadata {
    fn read(header: &mut HeaderReader<'_>, keys: u64) -> Result<Metadata, Problem> {
        let mut metadata = Metadata {
            alignment: ALIGNMENT,
            original_shapes: HashMap::new(),
            text: HashMap::new(),
        };
        for _ in 0..keys {
            let key = header.name()?;
            let value = header.u32()?;
            let again = match value {
                kind::STRING => {
                    // Free text that is only displayed.
                    let text = String::from_utf8_lossy(&header.string()?).into_owned();
                    metadata.text.insert(key.clone(), text).is_some()
                }
                kind::ARRAY => match key.strip_prefix(ORIGINAL_SHAPE) {
                    Some(name) => {
                        let shape = original_shape(header, name)?;
                        metadata.original_shapes.insert(name.to_owned(), shape).is_some()
                    }
                    None => {
                        let (element, count) = (header.u32()?, header.u64()?);
                        header.skip_array(element, count, 1)?;
                        false
                    }
                },
                scalar => {
                    let text = header.scalar(scalar)?;
                    if key == "general.alignment" {
                        metadata.alignment = alignment(scalar, &text)?;
                    }
                    metadata.text.insert(key.clone(), text).is_some()
                }
            };
            if again {
                return Err(Problem::Damaged(format!("its metadata has the key {key} twice")));
            }
        }
        Ok(metadata)
    }
}

/// The array under `comfy.gguf.orig_shape.<name>`.
fn original_shape(header: &mut HeaderReader<'_>, name: &str) -> Result<Vec<u64>, Problem> {
    let damaged = |problem: &str| Problem::Damaged(format!("the original shape of tensor {name} {problem}"));
    let (element, count) = (header.u32()?, header.u64()?);
    if element != kind::I32 {
        return Err(damaged("is not an array of i32"));
    }
    if count > MAX_ORIGINAL_DIMENSIONS {
        return Err(damaged(&format!("has {count} dimensions")));
    }
    (0..count)
        .map(|_| {
            let dimension = i32::from_le_bytes(header.bytes()?);
            u64::try_from(dimension).map_err(|_| damaged(&format!("has the dimension {dimension}")))
        })
        .collect()
}

fn alignment(kind: u32, text: &str) -> Result<u32, Problem> {
    let value = text.parse::<u32>().ok();
    value
        .filter(|value| kind == kind::U32 && value.is_power_of_two())
        .ok_or_else(|| {
            Problem::Damaged(format!(
                "general.alignment is {text}, which is not a power of two in u32"
            ))
        })
}

/// One tensor as the header describes it.
struct TensorInfo {
    stored: Stored,
    /// Row-major.
    dimensions: Vec<u64>,
    /// Offset from the start of the data.
    offset: u64,
}

impl TensorInfo {
    fn read(header: &mut HeaderReader<'_>) -> Result<(String, TensorInfo), Problem> {
        let name = header.name()?;
        let count = header.u32()?;
        if count > MAX_DIMENSIONS {
            return Err(Problem::Damaged(format!("tensor {name} has {count} dimensions")));
        }
        let mut dimensions = (0..count).map(|_| header.u64()).collect::<Result<Vec<_>, _>>()?;
        // The file has the fastest dimension first.
        dimensions.reverse();
        let number = header.u32()?;
        let stored = stored(number).ok_or_else(|| {
            let type_name = UNREAD
                .iter()
                .find(|(unread, _)| *unread == number)
                .map_or_else(|| format!("type {number}"), |(_, name)| (*name).to_owned());
            let blocks = GgufType::ALL.map(GgufType::as_str).join(", ");
            Problem::UnsupportedTensor {
                tensor: name.clone(),
                stored: type_name,
                readable: Some(format!("F32, F16, BF16, F64, I8, I64, {blocks}")),
            }
        })?;
        let offset = header.u64()?;
        let info = TensorInfo {
            stored,
            dimensions,
            offset,
        };
        Ok((name, info))
    }
}

/// The part of the file after the header.
struct GgufData {
    start: u64,
    /// Bytes of the whole file. A file without tensors may end before `start`.
    size: u64,
    alignment: u64,
}

impl GgufData {
    /// Checks each tensor, then that no two overlap. Padding between them is allowed.
    fn entries(
        &self,
        infos: BTreeMap<String, TensorInfo>,
        original_shapes: &HashMap<String, Vec<u64>>,
    ) -> Result<BTreeMap<String, TensorEntry>, Problem> {
        let mut entries = BTreeMap::new();
        for (name, info) in infos {
            let entry = self.entry(&name, &info, original_shapes.get(&name))?;
            entries.insert(name, entry);
        }
        let mut spans: Vec<(ByteRange, &str)> = entries
            .iter()
            .map(|(name, entry)| (entry.range, name.as_str()))
            .filter(|(range, _)| range.length > 0)
            .collect();
        spans.sort_unstable_by_key(|(range, _)| range.offset);
        let mut covered = 0;
        for (range, name) in spans {
            if range.offset < covered {
                return Err(Problem::Damaged(format!(
                    "tensor {name} overlaps the one before it"
                )));
            }
            covered = range.offset + range.length;
        }
        Ok(entries)
    }

    fn entry(
        &self,
        name: &str,
        info: &TensorInfo,
        original: Option<&Vec<u64>>,
    ) -> Result<TensorEntry, Problem> {
        let damaged = |problem: String| Problem::Damaged(format!("tensor {name} {problem}"));
        let (in_block, _) = info.stored.block();
        let columns = info.dimensions.last().copied().unwrap_or(1);
        if !columns.is_multiple_of(in_block as u64) {
            return Err(damaged(format!(
                "has rows of {columns}, which do not divide into blocks of {in_block}"
            )));
        }
        let (mut shape, length) = extent(info.stored, &info.dimensions)
            .ok_or_else(|| damaged(format!("has the impossible shape {:?}", info.dimensions)))?;
        if !info.offset.is_multiple_of(self.alignment) {
            return Err(damaged(format!(
                "begins at {}, which is no multiple of {}",
                info.offset, self.alignment
            )));
        }
        // Saturating: an offset that does not fit in 64 bits is beyond the end of any file.
        let end = self.start.saturating_add(info.offset).saturating_add(length);
        let missing = end.saturating_sub(self.size);
        if missing > 0 {
            return Err(Problem::Incomplete(format!(
                "tensor {name} ends {missing} bytes after the end of the file (was it cut short?): download it again"
            )));
        }
        if let Some(original) = original {
            let fits = extent(info.stored, original).filter(|(_, bytes)| *bytes == length);
            (shape, _) = fits.ok_or_else(|| {
                damaged(format!(
                    "has the shape {:?}, and its original shape {original:?} has another number of elements",
                    info.dimensions
                ))
            })?;
        }
        let range = ByteRange {
            offset: self.start + info.offset,
            length,
        };
        Ok(TensorEntry {
            stored: info.stored,
            shape,
            range,
        })
    }
}

/// Type of a number, for those that this build reads.
fn stored(number: u32) -> Option<Stored> {
    Some(match number {
        0 => Stored::F32,
        1 => Stored::F16,
        2 => Stored::Gguf(GgufType::Q4_0),
        3 => Stored::Gguf(GgufType::Q4_1),
        6 => Stored::Gguf(GgufType::Q5_0),
        7 => Stored::Gguf(GgufType::Q5_1),
        8 => Stored::Gguf(GgufType::Q8_0),
        10 => Stored::Gguf(GgufType::Q2K),
        11 => Stored::Gguf(GgufType::Q3K),
        12 => Stored::Gguf(GgufType::Q4K),
        13 => Stored::Gguf(GgufType::Q5K),
        14 => Stored::Gguf(GgufType::Q6K),
        20 => Stored::Gguf(GgufType::IQ4NL),
        23 => Stored::Gguf(GgufType::IQ4XS),
        24 => Stored::I8,
        27 => Stored::I64,
        28 => Stored::F64,
        39 => Stored::Gguf(GgufType::Mxfp4),
        40 => Stored::Gguf(GgufType::Nvfp4),
        30 => Stored::Bf16,
        _ => return None,
    })
}

/// Names of the types that are not read, for messages.
const UNREAD: [(u32, &str); 14] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (25, "I16"),
    (26, "I32"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (41, "Q1_0"),
];
