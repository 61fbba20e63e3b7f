//! State dicts as `torch.save` writes them: a zip archive of uncompressed entries, `data.pkl` with the description,
//! and one entry of raw bytes per storage. Sources: PyTorch's notes on serialization semantics, and
//! `torch/serialization.py`.
//!
//! The pickle is interpreted by [`pickle`], which executes nothing. A tensor is a view of a storage: two may share
//! their bytes (tied weights), and only contiguous (row-major) ones are read.

mod pickle;

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};

use zip::read::{ArchiveOffset, Config};
use zip::result::ZipError;
use zip::{CompressionMethod, ZipArchive};

use self::pickle::{ElementType, Pickle, Value};
use super::{FileHeader, Problem, TensorEntry, extent};
use crate::load::ByteRange;

/// Maximum length of a pickle in bytes. A state dict takes some 100 per tensor.
const MAX_PICKLE_BYTES: u64 = 32 << 20;

/// Maximum length in bytes of an archive's directory and the records after it. A storage takes some 100.
const MAX_DIRECTORY_BYTES: u64 = 16 << 20;

/// Minimum bytes of an entry in the directory.
const MIN_ENTRY_BYTES: u64 = 46;

/// Maximum length of the comment after an archive's end record.
const MAX_COMMENT_BYTES: u64 = 0xFFFF;

/// Keys under which training scripts nest the state dict, in the order of lookup.
const NESTED: [&str; 4] = ["state_dict", "model", "module", "generator"];

/// Error for a pickle outside of an archive.
pub(super) fn bare_pickle() -> Problem {
    Problem::Unsupported(
        "it is a bare pickle, as PyTorch wrote before 1.6: load it in PyTorch and save its tensors as safetensors \
         (safetensors.torch.save_file), or again with torch.save"
            .to_owned(),
    )
}

/// Reads and validates the description of a file of `size` bytes.
pub(super) fn read(file: &mut File, size: u64) -> Result<FileHeader, Problem> {
    let mut archive = Archive::open(file, size)?;
    archive.check_byte_order()?;
    let description = archive.range_of("data.pkl")?;
    if description.length > MAX_PICKLE_BYTES {
        return Err(Problem::Damaged(format!(
            "its pickle has {} bytes, more than the {MAX_PICKLE_BYTES} that are allowed",
            description.length
        )));
    }
    let bytes = archive.bytes_of("data.pkl")?;
    let pickle = Pickle::read(&bytes)?;
    let tensors = entries(&pickle, &mut archive)?;
    archive.check_storages(description)?;
    Ok(FileHeader {
        tensors,
        metadata: HashMap::new(),
    })
}

/// The archive, with the storages that tensors have referred to so far.
struct Archive<'a> {
    zip: ZipArchive<BufReader<&'a mut File>>,
    /// Name of the folder of all entries.
    folder: String,
    /// Offset of the archive's directory.
    data_end: u64,
    storages: HashMap<String, ByteRange>,
}

impl<'a> Archive<'a> {
    fn open(file: &'a mut File, size: u64) -> Result<Archive<'a>, Problem> {
        check_directory(file, size)?;
        file.rewind().map_err(Problem::Io)?;
        let config = Config {
            archive_offset: ArchiveOffset::Known(0),
        };
        let zip = ZipArchive::with_config(config, BufReader::new(file)).map_err(unreadable)?;
        if zip.has_duplicate_names() {
            return Err(Problem::Damaged(
                "its archive has two entries of one name".to_owned(),
            ));
        }
        let mut folders = zip.file_names_raw().filter_map(|name| {
            let folder = name.strip_suffix(b"/data.pkl")?;
            (!folder.contains(&b'/')).then_some(folder)
        });
        let folder = match (folders.next(), folders.next()) {
            (Some(folder), None) => String::from_utf8(folder.to_vec())
                .map_err(|_| Problem::Damaged("the name of its folder is not UTF-8".to_owned()))?,
            (None, _) => {
                return Err(Problem::Unsupported(
                    "it is a zip archive without data.pkl, which torch.save did not write".to_owned(),
                ));
            }
            (Some(_), Some(_)) => {
                return Err(Problem::Damaged("its archive has two data.pkl".to_owned()));
            }
        };
        drop(folders);
        let data_end = zip.central_directory_start().min(size);
        let archive = Archive {
            zip,
            folder,
            data_end,
            storages: HashMap::new(),
        };
        if archive.has("constants.pkl") {
            return Err(Problem::Unsupported(
                "it is a TorchScript archive: load it in PyTorch (torch.jit.load) and save its state_dict()"
                    .to_owned(),
            ));
        }
        Ok(archive)
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.folder)
    }

    fn has(&self, name: &str) -> bool {
        self.zip.index_for_name(&self.path(name)).is_some()
    }

    /// Byte range of an entry.
    fn range_of(&mut self, name: &str) -> Result<ByteRange, Problem> {
        let path = self.path(name);
        let index = self
            .zip
            .index_for_name(&path)
            .ok_or_else(|| Problem::Damaged(format!("its archive lacks the entry {path:?}")))?;
        let entry = self.zip.by_index_raw(index).map_err(unreadable)?;
        if entry.encrypted() || entry.compression() != CompressionMethod::Stored {
            return Err(Problem::Unsupported(format!(
                "the entry {path:?} of its archive is compressed or encrypted: save it again with torch.save"
            )));
        }
        let damaged =
            |problem: &str| Problem::Damaged(format!("the entry {path:?} of its archive {problem}"));
        let length = entry.compressed_size();
        if entry.size() != length {
            return Err(damaged("has two lengths"));
        }
        let offset = entry.data_start().ok_or_else(|| damaged("has no beginning"))?;
        match offset.checked_add(length) {
            Some(end) if end <= self.data_end => Ok(ByteRange { offset, length }),
            _ => Err(damaged("ends behind the archive's data (was it cut short?)")),
        }
    }

    /// Content of an entry. Its length was checked against the file's; the caller bounds it.
    fn bytes_of(&mut self, name: &str) -> Result<Vec<u8>, Problem> {
        let range = self.range_of(name)?;
        let path = self.path(name);
        let index = self.zip.index_for_name(&path).unwrap_or(usize::MAX);
        let mut entry = self.zip.by_index_raw(index).map_err(unreadable)?;
        let mut bytes = vec![0; range.length as usize];
        entry.read_exact(&mut bytes).map_err(Problem::reading)?;
        Ok(bytes)
    }

    /// Rejects another byte order. Archives from before PyTorch 2.1 do not state theirs.
    fn check_byte_order(&mut self) -> Result<(), Problem> {
        if !self.has("byteorder") {
            return Ok(());
        }
        if self.range_of("byteorder")?.length <= 16 && self.bytes_of("byteorder")? == b"little" {
            return Ok(());
        }
        Err(Problem::Unsupported(
            "its byte order is not little: save it on a little-endian machine".to_owned(),
        ))
    }

    /// Byte range of storage `key`.
    fn storage(&mut self, key: &str) -> Result<ByteRange, Problem> {
        if let Some(known) = self.storages.get(key) {
            return Ok(*known);
        }
        let range = self.range_of(&format!("data/{key}"))?;
        self.storages.insert(key.to_owned(), range);
        Ok(range)
    }

    /// Checks that no two storages overlap, nor one with the description: views of one storage share its key.
    fn check_storages(&self, description: ByteRange) -> Result<(), Problem> {
        let filled = self.storages.iter().filter(|(_, range)| range.length > 0);
        let mut spans: Vec<(ByteRange, &str)> = filled.map(|(key, range)| (*range, key.as_str())).collect();
        spans.push((description, "data.pkl"));
        spans.sort_unstable_by_key(|(range, _)| range.offset);
        let mut covered = 0;
        for (range, key) in spans {
            if range.offset < covered {
                return Err(Problem::Damaged(format!(
                    "the entry {key} of its archive overlaps the one before it"
                )));
            }
            covered = range.offset + range.length;
        }
        Ok(())
    }
}

/// Validates the archive's claims about its directory before anything is allocated for it: wherever its end record
/// may be, the directory must be short. Source: APPNOTE.TXT of the zip format, 4.3.14 to 4.3.16.
fn check_directory(file: &mut File, size: u64) -> Result<(), Problem> {
    const END: (&[u8], usize) = (b"PK\x05\x06", 22);
    const LOCATOR: (&[u8], usize) = (b"PK\x06\x07", 20);
    const WIDE_END: (&[u8], usize) = (b"PK\x06\x06", 56);
    let damaged = |problem: &str| Problem::Damaged(format!("its archive {problem}"));
    let mut tail = Vec::new();
    let behind = (END.1 + LOCATOR.1) as u64 + MAX_COMMENT_BYTES;
    let begin = size.saturating_sub(behind);
    let cut_off = || {
        let problem = "its archive has no end: was its download interrupted? Download it again";
        Problem::Incomplete(problem.to_owned())
    };
    file.seek(SeekFrom::Start(begin)).map_err(Problem::Io)?;
    file.take(behind)
        .read_to_end(&mut tail)
        .map_err(Problem::reading)?;
    let is_short = |entries: u64, directory: u64| {
        entries <= MAX_DIRECTORY_BYTES / MIN_ENTRY_BYTES
            && size.saturating_sub(directory) <= MAX_DIRECTORY_BYTES
    };
    let mut has_end = false;
    for at in 0..tail.len().saturating_sub(END.1 - 1) {
        if !tail[at..].starts_with(END.0) {
            continue;
        }
        has_end = true;
        let (before, end) = tail.split_at(at);
        let (entries, directory) = (number::<2>(end, 10), number::<4>(end, 16));
        let locator = before.len().checked_sub(LOCATOR.1).map(|at| &before[at..]);
        let Some(locator) = locator.filter(|locator| locator.starts_with(LOCATOR.0)) else {
            if !is_short(entries, directory) {
                return Err(damaged("claims a directory of more than is allowed"));
            }
            continue;
        };
        let wide_at = number::<8>(locator, 8);
        if wide_at.checked_add((WIDE_END.1 + LOCATOR.1) as u64) != Some(begin + at as u64) {
            return Err(damaged("does not end as torch.save ends one"));
        }
        let mut wide = [0; WIDE_END.1];
        file.seek(SeekFrom::Start(wide_at)).map_err(Problem::Io)?;
        file.read_exact(&mut wide).map_err(Problem::reading)?;
        if !wide.starts_with(WIDE_END.0) {
            return Err(damaged("does not end as torch.save ends one"));
        }
        if !is_short(number::<8>(&wide, 32), number::<8>(&wide, 48)) {
            return Err(damaged("claims a directory of more than is allowed"));
        }
    }
    match has_end {
        true => Ok(()),
        false => Err(cut_off()),
    }
}

/// A little-endian number of `N` bytes.
fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(wide)
}

fn unreadable(error: ZipError) -> Problem {
    match error {
        ZipError::Io(error) => Problem::reading(error),
        other => Problem::Damaged(format!(
            "its archive cannot be read: {other} (was the file cut short?)"
        )),
    }
}

/// Name of a tensor that was saved on its own, without a dict.
const ALONE: &str = "tensor";

/// All tensors of the state dict.
fn entries(pickle: &Pickle<'_>, archive: &mut Archive<'_>) -> Result<BTreeMap<String, TensorEntry>, Problem> {
    let mut entries = BTreeMap::new();
    if let Value::Tensor(tensor) = pickle.value(pickle.outermost()) {
        entries.insert(ALONE.to_owned(), entry(pickle, archive, ALONE, tensor)?);
        return Ok(entries);
    }
    for (key, value) in state_dict(pickle)? {
        let Value::Tensor(tensor) = pickle.value(value) else {
            continue; // an epoch, a version, a configuration
        };
        let Value::Text(name) = pickle.value(key) else {
            return Err(Problem::Unsupported(
                "a tensor of its dict has a key that is no text".to_owned(),
            ));
        };
        if entries.contains_key(*name) {
            return Err(Problem::Damaged(format!("tensor {name} is there twice")));
        }
        let entry = entry(pickle, archive, name, tensor)?;
        entries.insert((*name).to_owned(), entry);
    }
    Ok(entries)
}

/// The dict of tensors: the outermost if it has any, else the first of [`NESTED`] that has.
fn state_dict<'p>(pickle: &'p Pickle<'_>) -> Result<impl Iterator<Item = (u32, u32)> + 'p, Problem> {
    let Value::Dict(outermost) = pickle.value(pickle.outermost()) else {
        return Err(Problem::Unsupported(
            "it holds no dict of tensors: save model.state_dict()".to_owned(),
        ));
    };
    let has_tensors = |dict: &[(u32, u32)]| {
        dict.iter()
            .any(|(_, value)| matches!(pickle.value(*value), Value::Tensor(_)))
    };
    let named = |wanted: &str| {
        let is_wanted = |key: u32| matches!(pickle.value(key), Value::Text(name) if *name == wanted);
        let (_, value) = outermost.iter().rev().find(|(key, _)| is_wanted(*key))?;
        match pickle.value(*value) {
            Value::Dict(dict) if has_tensors(dict) => Some(dict),
            _ => None,
        }
    };
    let dict = if outermost.is_empty() || has_tensors(outermost) {
        outermost
    } else {
        NESTED.into_iter().find_map(named).ok_or_else(|| {
            Problem::Unsupported(format!(
                "its dict has no tensors, nor has one under {}: save model.state_dict()",
                NESTED.join(", ")
            ))
        })?
    };
    Ok(dict.iter().copied())
}

/// Element types that are read.
const READABLE: &str =
    "float32, float16, bfloat16, float64, uint8, int8, int64, float8_e4m3fn and float8_e5m2";

/// One tensor, validated against its storage.
fn entry(
    pickle: &Pickle<'_>,
    archive: &mut Archive<'_>,
    name: &str,
    tensor: &pickle::Tensor,
) -> Result<TensorEntry, Problem> {
    let damaged = |problem: String| Problem::Damaged(format!("tensor {name} {problem}"));
    let Value::Storage(storage) = pickle.value(tensor.storage) else {
        return Err(damaged("has no storage".to_owned()));
    };
    let stored = match tensor.element.unwrap_or(storage.element) {
        ElementType::Read(stored) => stored,
        ElementType::Unread(other) => {
            return Err(Problem::UnsupportedTensor {
                tensor: name.to_owned(),
                stored: other.to_string(),
                readable: Some(READABLE.to_owned()),
            });
        }
    };
    let dimensions = pickle
        .dimensions(tensor.shape)
        .ok_or_else(|| damaged("has a shape that is none".to_owned()))?;
    let strides = pickle
        .dimensions(tensor.strides)
        .filter(|strides| strides.len() == dimensions.len())
        .ok_or_else(|| damaged("has strides that do not fit its shape".to_owned()))?;
    let (shape, length) = extent(stored, &dimensions)
        .ok_or_else(|| damaged(format!("has the impossible shape {dimensions:?}")))?;
    if !is_row_major(&dimensions, &strides) {
        return Err(Problem::Unsupported(format!(
            "the numbers of tensor {name} are not in row-major order (shape {dimensions:?}, strides {strides:?}): \
             call contiguous() on it before saving"
        )));
    }

    let whole = archive.storage(storage.key)?;
    // The length of an untyped storage is in bytes.
    let counted_in = match storage.element {
        ElementType::Read(stored) => stored.width() as u64,
        ElementType::Unread(_) => 1,
    };
    if storage.length.checked_mul(counted_in) != Some(whole.length) {
        return Err(damaged(format!(
            "has a storage of {} numbers of {counted_in} bytes, and the archive has {} bytes of it",
            storage.length, whole.length
        )));
    }
    let begin = tensor.offset.checked_mul(stored.width() as u64);
    let end = begin.and_then(|begin| begin.checked_add(length));
    let (Some(begin), Some(true)) = (begin, end.map(|end| end <= whole.length)) else {
        return Err(damaged(format!(
            "takes {length} bytes from number {} of its storage on, which has {} bytes",
            tensor.offset, whole.length
        )));
    };
    let range = ByteRange {
        offset: whole.offset + begin,
        length,
    };
    Ok(TensorEntry { stored, shape, range })
}

/// Whether these strides, in elements, are row-major. The stride of a dimension of 1 is ignored.
fn is_row_major(shape: &[u64], strides: &[u64]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = 1;
    for (&dimension, &stride) in shape.iter().zip(strides).rev() {
        if dimension != 1 && stride != expected {
            return false;
        }
        // Cannot overflow: `extent` multiplied the same factors.
        expected *= dimension;
    }
    true
}
