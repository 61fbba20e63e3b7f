//! Kept copies: an on-disk cache of quantized components, so that the next load reads only the small bytes.
//!
//! A copy is a safetensors file. A full-precision tensor is stored in its dtype on the card, a quantized one as the
//! bytes of its layout, `U8`; formats and shapes are in the metadata, under one key. There is no checksum: a copy
//! gets its name only when it is complete.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, TryLockError};
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use candle_core::DType;
use residency::Bytes;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::checkpoint::{CheckpointFile, MAX_HEADER_BYTES, TensorEntry};
use crate::format::WeightFormat;
use crate::load::{LoadError, LoadPlan, SourcePiece, Stored, Target, TensorSource};
use crate::reader::{check_unchanged, open, read_numbers};

/// Version of the layout of quantized weights in a copy. Incremented when a layout or the quantization changes: older
/// copies are stale then.
const LAYOUT: u32 = 2;

/// Key in the safetensors metadata.
const KEY: &str = "moored.kept";

/// Suffixes of complete copies, and of copies being written. No other file in the folder is touched.
const SUFFIX: &str = ".kept.safetensors";
const UNFINISHED: &str = ".kept.part";

/// Batch size in bytes for making a copy; exceeded by a single larger tensor.
const BATCH_BYTES: Bytes = Bytes(64 << 20);

/// Why a copy was not kept. No partial copy remains.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// The caller cancelled.
    #[error("the copy was cancelled")]
    Cancelled,
    /// The copy exceeds the capacity of the folder.
    #[error("a copy needs {needed}, and {limit} may be kept: raise the limit, or load without a copy")]
    TooLarge {
        needed: Bytes,
        /// Capacity of the folder.
        limit: Bytes,
    },
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Load(LoadError),
    /// The copy cannot be written.
    #[error("cannot write {}: {source}; see that there is room and that the folder can be written", file.display())]
    Write {
        /// The file, or its folder.
        file: PathBuf,
        source: std::io::Error,
    },
}

impl From<LoadError> for KeepError {
    fn from(error: LoadError) -> KeepError {
        match error {
            LoadError::Cancelled => KeepError::Cancelled,
            error => KeepError::Load(error),
        }
    }
}

fn write_error(file: &Path) -> impl Fn(std::io::Error) -> KeepError + use<> {
    let file = file.to_owned();
    move |source| KeepError::Write {
        file: file.clone(),
        source,
    }
}

/// The metadata of a copy.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CopyMetadata {
    layout: u32,
    quantized: BTreeMap<String, QuantizedEntry>,
}

/// A quantized weight in the metadata of a copy.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct QuantizedEntry {
    format: WeightFormat,
    shape: Vec<usize>,
}

impl CopyMetadata {
    fn of(sources: &[TensorSource]) -> CopyMetadata {
        let quantized = sources.iter().filter_map(|source| match source.target {
            Target::Quantized(format) => {
                let shape = source.shape.clone();
                Some((source.name.clone(), QuantizedEntry { format, shape }))
            }
            Target::Full(_) => None,
        });
        CopyMetadata {
            layout: LAYOUT,
            quantized: quantized.collect(),
        }
    }
}

/// Dtype, stored type and shape of a tensor in a copy.
fn kept(source: &TensorSource) -> Result<(Dtype, Stored, Vec<usize>), LoadError> {
    let (dtype, stored) = match source.target {
        Target::Quantized(_) => {
            let bytes = source.bytes_on_card().0 as usize;
            return Ok((Dtype::U8, Stored::U8, vec![bytes]));
        }
        Target::Full(DType::F32) => (Dtype::F32, Stored::F32),
        Target::Full(DType::F64) => (Dtype::F64, Stored::F64),
        Target::Full(DType::F16) => (Dtype::F16, Stored::F16),
        Target::Full(DType::BF16) => (Dtype::BF16, Stored::Bf16),
        Target::Full(DType::U8) => (Dtype::U8, Stored::U8),
        Target::Full(DType::I64) => (Dtype::I64, Stored::I64),
        target @ Target::Full(_) => {
            let name = &source.name;
            return Err(LoadError::Unsupported(format!(
                "tensor {name} as {target:?} is not kept"
            )));
        }
    };
    Ok((dtype, stored, source.shape.clone()))
}

/// Length prefix and header of a copy, padded so that the data begins at a multiple of 8.
fn header(sources: &[TensorSource]) -> Result<Vec<u8>, LoadError> {
    let refuse = |problem: String| LoadError::Unsupported(format!("no copy of this can be kept: {problem}"));
    let contents = serde_json::to_string(&CopyMetadata::of(sources)).map_err(|e| refuse(e.to_string()))?;
    let (mut end, mut tensors) = (0, Vec::with_capacity(sources.len()));
    for source in sources {
        if source.name == "__metadata__" {
            return Err(refuse("a tensor has the name of the metadata".to_owned()));
        }
        let (dtype, _, shape) = kept(source)?;
        let begin = end;
        end += source.bytes_on_card().0 as usize;
        let data_offsets = (begin, end);
        tensors.push((
            source.name.clone(),
            TensorInfo {
                dtype,
                shape,
                data_offsets,
            },
        ));
    }
    let metadata = HashMap::from([(KEY.to_owned(), contents)]);
    let metadata = Metadata::new(Some(metadata), tensors).map_err(|e| refuse(e.to_string()))?;
    let mut text = serde_json::to_vec(&metadata).map_err(|e| refuse(e.to_string()))?;
    text.resize(text.len().next_multiple_of(8), b' ');
    if text.len() as u64 > MAX_HEADER_BYTES {
        return Err(refuse("its header would be too long".to_owned()));
    }
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend(text);
    Ok(header)
}

/// Exact bytes of the file that [`keep`] writes.
///
/// # Errors
/// [`LoadError::Unsupported`] for a plan without files, or one that cannot be copied.
pub fn kept_bytes(plan: &LoadPlan) -> Result<Bytes, LoadError> {
    Ok(Bytes(header(plan.files()?)?.len() as u64) + plan.bytes())
}

/// Quantizes the tensors that a plan loads and writes it to `to`, replacing an existing file atomically: the data goes to a
/// temporary file in the same folder, which is synced and renamed. `go_on` is called before each group of tensors
/// and, within larger groups, after every 32 MiB; false cancels. Returns the length of the file.
///
/// # Errors
/// [`KeepError`]; no partial copy remains then.
pub fn keep(plan: &LoadPlan, to: &Path, go_on: &dyn Fn() -> bool) -> Result<Bytes, KeepError> {
    let folder = match to.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let file = temporary(folder).map_err(write_error(folder))?;
    write_copy(plan, file, folder, to, go_on)
}

/// Makes the folder for this user alone, if it is missing: whoever may write in it may exchange weights. One that is there may be shared,
/// as whoever made it wants.
fn make_folder(folder: &Path) -> std::io::Result<()> {
    match folder.is_dir() {
        true => Ok(()),
        false => crate::create_private_folder(folder),
    }
}

/// A temporary file, locked while it is being written, so that cleanup by other processes leaves it alone. Deleted
/// when dropped.
fn temporary(folder: &Path) -> std::io::Result<NamedTempFile> {
    loop {
        let file = tempfile::Builder::new()
            .prefix("copy-")
            .suffix(UNFINISHED)
            .tempfile_in(folder)?;
        // Cleanup by another process may have removed it between creation and locking.
        match file.as_file().try_lock() {
            Ok(()) if file.path().try_exists()? => return Ok(file),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

fn write_copy(
    plan: &LoadPlan,
    file: NamedTempFile,
    folder: &Path,
    to: &Path,
    go_on: &dyn Fn() -> bool,
) -> Result<Bytes, KeepError> {
    let sources = plan.files()?;
    let header = header(sources)?;
    let length = Bytes(header.len() as u64) + plan.bytes();
    let files = open(sources)?;
    let failed = write_error(to);
    // Its full length from the start, so that other processes count it.
    file.as_file().set_len(length.0).map_err(&failed)?;
    let mut writer = BufWriter::with_capacity(1 << 20, file.as_file());
    writer.write_all(&header).map_err(&failed)?;
    let mut rest = sources;
    while !rest.is_empty() {
        let (group, behind) = rest.split_at(group_of(rest));
        rest = behind;
        if !go_on() {
            return Err(KeepError::Cancelled);
        }
        let numbers = read_numbers(group, &files, &mut |_| match go_on() {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })?;
        for numbers in numbers {
            writer.write_all(numbers.bytes()).map_err(&failed)?;
        }
    }
    writer.flush().map_err(&failed)?;
    drop(writer);
    check_unchanged(&files)?;
    file.as_file().sync_all().map_err(&failed)?;
    if !go_on() {
        return Err(KeepError::Cancelled);
    }
    file.persist(to).map_err(|e| failed(e.error))?;
    // The rename is durable once the folder is synced.
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(write_error(folder))?;
    Ok(length)
}

/// Number of tensors that are quantized together: at least one.
fn group_of(sources: &[TensorSource]) -> usize {
    let mut bytes = Bytes::ZERO;
    let fits = |source: &&TensorSource| {
        bytes += source.bytes_on_card();
        bytes <= BATCH_BYTES
    };
    sources.iter().take_while(fits).count().max(1)
}

/// A plan that reads the same tensors from a copy.
///
/// # Errors
/// [`LoadError::Damaged`] if the copy does not match this plan (names, shapes, formats, dtypes, or layout version),
/// or its header contradicts itself or the file. [`LoadError::Io`] if it cannot be read, and
/// [`LoadError::Unsupported`] for a plan without files.
pub fn kept_plan(path: &Path, plan: &LoadPlan) -> Result<LoadPlan, LoadError> {
    let sources = plan.files()?;
    let copy = CheckpointFile::open(path)?;
    let refuse = |problem: String| LoadError::Damaged {
        file: path.to_owned(),
        problem: format!("it is no copy of this component: {problem}"),
    };
    let contents = copy
        .metadata()
        .get(KEY)
        .ok_or_else(|| refuse(format!("it does not say {KEY}")))?;
    let contents: CopyMetadata = serde_json::from_str(contents).map_err(|e| refuse(format!("{KEY}: {e}")))?;
    if contents.layout != LAYOUT {
        let found = contents.layout;
        return Err(refuse(format!(
            "its layout is of version {found}, and {LAYOUT} is read"
        )));
    }
    if contents != CopyMetadata::of(sources) {
        return Err(refuse(
            "other tensors are quantized, or to another format".to_owned(),
        ));
    }
    let there = copy.tensors().count();
    if there != sources.len() {
        return Err(refuse(format!(
            "it has {there} tensors, and {} are needed",
            sources.len()
        )));
    }
    let from_copy = |source: &TensorSource| {
        let (_, stored, shape) = kept(source)?;
        let name = &source.name;
        let entry = copy
            .get(name)
            .ok_or_else(|| refuse(format!("tensor {name} is missing")))?;
        let range = match entry {
            TensorEntry {
                stored: found,
                shape: its,
                range,
            } if *found == stored && *its == shape => *range,
            TensorEntry {
                stored: found,
                shape: its,
                ..
            } => {
                let problem =
                    format!("tensor {name} is {found:?} {its:?}, and {stored:?} {shape:?} is needed");
                return Err(refuse(problem));
            }
        };
        Ok(TensorSource {
            block: source.block,
            name: name.clone(),
            pieces: vec![SourcePiece::File {
                file: Arc::clone(copy.path()),
                range,
            }],
            stored,
            shape: source.shape.clone(),
            target: source.target,
        })
    };
    Ok(LoadPlan::Files(
        sources.iter().map(from_copy).collect::<Result<_, _>>()?,
    ))
}

/// A folder of copies with a bounded size and LRU eviction. Several processes may share it; no other files in it are
/// touched.
#[derive(Clone, Debug)]
pub struct KeptFolder {
    folder: PathBuf,
    limit: Bytes,
    /// When this process last used copies. For copies of other processes the file's time of access counts. It is not set here:
    /// that would change the time of change, by which running loads notice a replaced file.
    uses: Arc<Mutex<BTreeMap<PathBuf, SystemTime>>>,
}

/// A complete copy in a folder.
struct KeptCopy {
    path: PathBuf,
    bytes: Bytes,
    used: SystemTime,
}

impl KeptFolder {
    /// Opens or creates a folder, and removes unfinished files of dead processes.
    ///
    /// # Errors
    /// [`KeepError::Write`].
    pub fn open(folder: impl Into<PathBuf>, limit: Bytes) -> Result<KeptFolder, KeepError> {
        let kept = KeptFolder {
            folder: folder.into(),
            limit,
            uses: Arc::default(),
        };
        let failed = write_error(&kept.folder);
        make_folder(&kept.folder).map_err(&failed)?;
        kept.remove_abandoned().map_err(&failed)?;
        Ok(kept)
    }

    /// Removes unfinished files of dead processes.
    fn remove_abandoned(&self) -> std::io::Result<()> {
        for path in self.files_ending(UNFINISHED)? {
            // A file is locked while its process writes. Files that vanish or cannot be opened are skipped.
            let abandoned = File::open(&path).is_ok_and(|file| match file.try_lock() {
                Ok(()) => std::fs::remove_file(&path).is_ok(),
                Err(_) => false,
            });
            if abandoned {
                tracing::info!(file = %path.display(), "removed an unfinished copy of a process that is gone");
            }
        }
        Ok(())
    }

    /// The path of a key's copy, present or not: a readable prefix of the key, and a hash of the key and the layout
    /// version. Versions of moored with different layouts may share a folder without mixing up their copies.
    pub fn path_of(&self, key: &str) -> PathBuf {
        const READABLE: usize = 80;
        let readable = |c: char| match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '-' | '_' => c,
            _ => '_',
        };
        let name: String = key.chars().take(READABLE).map(readable).collect();
        let hash = blake3::hash(format!("{LAYOUT} {key}").as_bytes()).to_hex();
        self.folder.join(format!("{name}-{}{SUFFIX}", &hash[..32]))
    }

    /// The copy of this key, if present. Marks it as used.
    pub fn find(&self, key: &str) -> Option<PathBuf> {
        let path = self.path_of(key);
        path.is_file().then(|| {
            let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
            uses.insert(path.clone(), SystemTime::now());
            path
        })
    }

    /// Removes unfinished files of dead processes, and evicts copies, least recently used first, until `needed` more
    /// bytes fit.
    ///
    /// # Errors
    /// [`KeepError::TooLarge`] if `needed` bytes cannot fit together with copies that are being written; then no copy is removed.
    /// [`KeepError::Write`] if the folder cannot be read or a copy cannot be removed.
    pub fn make_room(&self, needed: Bytes) -> Result<(), KeepError> {
        self.make_room_beside(needed, None)
    }

    /// Makes room for a copy of a plan, writes it under this key, and returns its path.
    ///
    /// # Errors
    /// As [`keep`], and [`KeepError::TooLarge`].
    pub fn keep(&self, key: &str, plan: &LoadPlan, go_on: &dyn Fn() -> bool) -> Result<PathBuf, KeepError> {
        let to = self.path_of(key);
        // The folder may have been deleted meanwhile.
        make_folder(&self.folder).map_err(write_error(&self.folder))?;
        self.make_room(kept_bytes(plan)?)?;
        keep(plan, &to, go_on)?;
        // Another process may have written a copy at the same time.
        self.make_room_beside(Bytes::ZERO, Some(&to))?;
        Ok(to)
    }

    /// Removes the copy of this key, if present: it was rejected.
    ///
    /// # Errors
    /// [`KeepError::Write`].
    pub fn remove(&self, key: &str) -> Result<(), KeepError> {
        remove(&self.path_of(key))
    }

    fn make_room_beside(&self, needed: Bytes, beside: Option<&Path>) -> Result<(), KeepError> {
        let failed = write_error(&self.folder);
        let mut held = needed;
        self.remove_abandoned().map_err(&failed)?;
        for path in self.files_ending(UNFINISHED).map_err(&failed)? {
            held += std::fs::metadata(&path).map_or(Bytes::ZERO, |facts| Bytes(facts.len()));
        }
        let limit = self.limit;
        if needed > Bytes::ZERO && held > limit {
            return Err(KeepError::TooLarge { needed, limit });
        }
        let mut copies = self.copies().map_err(&failed)?;
        copies.sort_by(|a, b| (a.used, &a.path).cmp(&(b.used, &b.path)));
        held += copies.iter().map(|copy| copy.bytes).sum();
        for copy in copies {
            if held <= limit {
                break;
            }
            if beside != Some(copy.path.as_path()) {
                remove(&copy.path)?;
                held -= copy.bytes;
                tracing::info!(file = %copy.path.display(), "removed a kept copy to make room");
            }
        }
        Ok(())
    }

    fn copies(&self) -> std::io::Result<Vec<KeptCopy>> {
        let copy = |path: PathBuf| {
            // A file that another process has just removed is no error.
            let facts = std::fs::metadata(&path).ok()?;
            let accessed = facts.accessed().or_else(|_| facts.modified()).ok()?;
            let uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
            Some(KeptCopy {
                bytes: Bytes(facts.len()),
                used: uses.get(&path).map_or(accessed, |used| accessed.max(*used)),
                path,
            })
        };
        Ok(self.files_ending(SUFFIX)?.into_iter().filter_map(copy).collect())
    }

    fn files_ending(&self, ending: &str) -> std::io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            let named = entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.ends_with(ending));
            // A file that is gone meanwhile is skipped.
            if named && entry.file_type().is_ok_and(|kind| kind.is_file()) {
                files.push(entry.path());
            }
        }
        Ok(files)
    }
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> Result<(), KeepError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(write_error(path)(error)),
        _ => Ok(()),
    }
}
