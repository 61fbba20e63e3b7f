//! Streamed blocks in the machine's memory, from where the card copies them.
//!
//! What lies in a file as it is used is copied from the page cache: the file is mapped, and the pages that hold streamed tensors are
//! registered with the driver, in cells of a fixed size. It costs no memory beside the page cache, and registered pages stay there.
//! What is made at load (quantized, converted, put together), or where the driver does not register pages, has a pinned copy. What the
//! machine has no memory for is read from its file each time that it is used, if it lies there as it is used.

use std::collections::{BTreeSet, HashMap};
use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, sys};
use residency::Bytes;

use super::pool::PinnedRegion;
use crate::files::open_regular;
use crate::host_tier::HoldsMemory;
use crate::load::{ByteRange, LoadError, SourcePiece, Target, TensorSource};
use crate::reader;
use crate::system::{SystemMemory, SystemReader};

/// Bytes of a file that are registered at a time.
const CELL: u64 = 64 << 20;

/// Threads that register pages: one registers 14 to 22 GB/s, four 31.
const THREADS: usize = 4;

/// A run of bytes in the machine's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostRun {
    pub(super) from: *const c_void,
    pub(super) length: usize,
}

// SAFETY: an address of pinned memory, which only the card reads.
unsafe impl Send for HostRun {}

/// The tensors of streamed blocks.
#[derive(Debug, Default)]
pub(super) struct HostBlocks {
    files: HashMap<Arc<Path>, MappedFile>,
    /// Pinned copies, by tensor.
    copies: HashMap<usize, PinnedRegion>,
    /// Files of which tensors are read when they are used.
    on_disk: HashMap<Arc<Path>, Arc<File>>,
}

/// A run of bytes of a file.
#[derive(Clone, Debug)]
pub(super) struct DiskRun {
    pub(super) path: Arc<Path>,
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl HostBlocks {
    /// The runs of bytes of a tensor that is read from its file when it is used, in order; none if it is held.
    pub(super) fn disk_runs(&self, tensor: usize, source: &TensorSource) -> Vec<DiskRun> {
        if self.has(tensor, source) {
            return Vec::new();
        }
        let pieces = source.pieces.iter();
        let runs = pieces.filter_map(|piece| match piece {
            SourcePiece::File { file: path, range } => Some(DiskRun {
                path: Arc::clone(path),
                file: Arc::clone(self.on_disk.get(path)?),
                offset: range.offset,
                length: range.length,
            }),
            SourcePiece::Inline(_) => None,
        });
        runs.collect()
    }

    /// The runs of bytes of a tensor that is held, in order.
    pub(super) fn runs(&self, tensor: usize, source: &TensorSource) -> Vec<HostRun> {
        if !self.has(tensor, source) {
            return Vec::new();
        }
        if let Some(copy) = self.copies.get(&tensor) {
            return vec![HostRun {
                from: copy.address().as_ptr().cast(),
                length: source.bytes_on_card().0 as usize,
            }];
        }
        let mut runs = Vec::new();
        for piece in &source.pieces {
            if let SourcePiece::File { file, range } = piece
                && let Some(mapped) = self.files.get(file)
            {
                runs.extend(mapped.runs(range.offset..range.offset + range.length));
            }
        }
        runs
    }

    /// Whether all bytes of a tensor are held: copied, or in registered pages.
    pub(super) fn has(&self, tensor: usize, source: &TensorSource) -> bool {
        let in_registered_pages = |piece: &SourcePiece| match piece {
            SourcePiece::File { file, range } => {
                let mapped = self.files.get(file);
                mapped.is_some_and(|mapped| cells_of(*range).all(|cell| mapped.cells.contains(&cell)))
            }
            SourcePiece::Inline(_) => false,
        };
        self.copies.contains_key(&tensor)
            || is_as_stored(source) && source.pieces.iter().all(in_registered_pages)
    }

    /// Which of these tensors are to be held ([`HostBlocks::hold`]): all of them, as far as `make_room` has room for what that takes from
    /// the machine. The others, the last ones, are read from their files when they are used.
    ///
    /// # Errors
    /// [`LoadError::Io`]; [`LoadError::HostMemory`] if there is no room for the copies of what is made at load.
    pub(super) fn fit<'t>(
        &mut self,
        tensors: &'t [usize],
        sources: &[TensorSource],
        mut make_room: impl FnMut(Bytes) -> Result<(), LoadError>,
    ) -> Result<&'t [usize], LoadError> {
        let mut held = tensors;
        let mut left: &[usize] = &[];
        while let Err(refused) = make_room(self.bytes_to_hold(held, sources)) {
            let LoadError::HostMemory { available, .. } = refused else {
                return Err(refused);
            };
            let fits = |count: &usize| self.bytes_to_hold(&tensors[..*count], sources) <= available;
            // Bytes grow with the number of tensors.
            let count = (0..held.len())
                .collect::<Vec<_>>()
                .partition_point(fits)
                .saturating_sub(1);
            (held, left) = tensors.split_at(count);
            if held.is_empty() {
                break;
            }
        }
        if let Some(made) = left.iter().find(|tensor| !is_as_stored(&sources[**tensor])) {
            let needed = self.bytes_to_hold(tensors, sources);
            let available = self.bytes_to_hold(held, sources);
            tracing::debug!(
                name = sources[*made].name,
                "a copy of what is made at load has no room"
            );
            return Err(LoadError::HostMemory { needed, available });
        }
        self.read_from_files(left, sources)?;
        Ok(held)
    }

    /// Opens the files of tensors that are read when they are used.
    fn read_from_files(&mut self, tensors: &[usize], sources: &[TensorSource]) -> Result<(), LoadError> {
        for piece in tensors.iter().flat_map(|tensor| &sources[*tensor].pieces) {
            if let SourcePiece::File { file: path, .. } = piece
                && !self.on_disk.contains_key(path)
            {
                let file = open_regular(path).map_err(|error| unreadable(path, error))?;
                self.on_disk.insert(Arc::clone(path), Arc::new(file));
            }
        }
        Ok(())
    }

    /// Bytes that holding these tensors takes from the machine, beyond what is held already.
    fn bytes_to_hold(&self, tensors: &[usize], sources: &[TensorSource]) -> Bytes {
        let mut cells: BTreeSet<(&Path, u64)> = BTreeSet::new();
        let mut copies = Bytes::ZERO;
        for tensor in tensors {
            let source = &sources[*tensor];
            if !is_as_stored(source) {
                let is_new = !self.copies.contains_key(tensor);
                copies += if is_new {
                    source.bytes_on_card()
                } else {
                    Bytes::ZERO
                };
                continue;
            }
            for piece in &source.pieces {
                if let SourcePiece::File { file, range } = piece {
                    let here = self.files.get(file).map(|mapped| &mapped.cells);
                    let new = cells_of(*range).filter(|cell| here.is_none_or(|here| !here.contains(cell)));
                    cells.extend(new.map(|cell| (&**file, cell)));
                }
            }
        }
        Bytes(cells.len() as u64 * CELL) + copies
    }

    /// Holds these tensors, for which there is room, and those that it has already: blocks that come back to the card are streamed again
    /// when it is short of memory. Returns those that need a pinned copy ([`HostBlocks::keep`]).
    ///
    /// # Errors
    /// [`LoadError::Io`].
    pub(super) fn hold(
        &mut self,
        context: &Arc<CudaContext>,
        tensors: &[usize],
        sources: &[TensorSource],
    ) -> Result<Vec<usize>, LoadError> {
        let (mapped, mut copied): (Vec<usize>, Vec<usize>) = tensors
            .iter()
            .partition(|tensor| is_as_stored(&sources[**tensor]));
        let mut wanted: HashMap<Arc<Path>, BTreeSet<u64>> = HashMap::new();
        for tensor in &mapped {
            for piece in &sources[*tensor].pieces {
                if let SourcePiece::File { file, range } = piece {
                    let cells = wanted.entry(Arc::clone(file)).or_default();
                    cells.extend(cells_of(*range));
                }
            }
        }
        copied.retain(|tensor| !self.copies.contains_key(tensor));
        let mut is_registered = true;
        for (file, cells) in wanted {
            if !self.files.contains_key(&file) {
                self.files
                    .insert(Arc::clone(&file), MappedFile::open(context, &file)?);
            }
            if let Some(mapped) = self.files.get_mut(&file) {
                is_registered &= mapped.register(&cells);
            }
        }
        if !is_registered {
            tracing::info!("pages of files cannot be registered with the driver: blocks have pinned copies");
            self.files.clear();
            copied.extend(mapped.iter().filter(|tensor| !self.copies.contains_key(tensor)));
        }
        Ok(copied)
    }

    /// A pinned copy of a tensor, to be filled; `None` if the machine has no such memory.
    pub(super) fn keep(&mut self, tensor: usize, bytes: Bytes) -> Option<NonNull<u8>> {
        let copy = PinnedRegion::new((bytes.0 as usize).max(1), reader::threads())?;
        let address = copy.address();
        self.copies.insert(tensor, copy);
        Some(address)
    }
}

impl HoldsMemory for HostBlocks {
    /// Bytes of the machine's memory that cannot be taken from it: registered pages and copies.
    fn bytes(&self) -> Bytes {
        let cells: u64 = self.files.values().map(MappedFile::registered).sum();
        let copies: u64 = self.copies.values().map(|copy| copy.length() as u64).sum();
        Bytes(cells + copies)
    }
}

/// Share of the machine's memory that stays available to others.
const LEFT_TO_OTHERS: u64 = 16;

/// Bytes that can be taken from the machine without making it swap; `None` where the system does not say: the driver refuses what it
/// cannot pin. (Registered pages of files count as available until they are registered.)
pub(super) fn available() -> Option<Bytes> {
    let memory = SystemReader::new().and_then(|mut system| system.read()).ok()?;
    Some(memory.available - left_to_others(memory))
}

/// Bytes that others are short of: they have less than their share of the machine's memory.
pub(super) fn short() -> Bytes {
    let memory = SystemReader::new().and_then(|mut system| system.read());
    memory.map_or(Bytes::ZERO, |memory| left_to_others(memory) - memory.available)
}

fn left_to_others(memory: SystemMemory) -> Bytes {
    Bytes(memory.total.0 / LEFT_TO_OTHERS)
}

pub(super) fn unreadable(path: &Path, source: std::io::Error) -> LoadError {
    LoadError::Io {
        file: path.to_owned(),
        source,
    }
}

/// The cells of a file that these bytes lie in.
fn cells_of(range: ByteRange) -> Range<u64> {
    range.offset / CELL..(range.offset + range.length).div_ceil(CELL)
}

/// Whether the bytes of a tensor lie in files as they are used.
fn is_as_stored(source: &TensorSource) -> bool {
    use crate::load::Stored;
    use candle_core::DType;
    let is_same = match source.target {
        Target::Quantized(_) => source.stored == Stored::U8,
        Target::Full(dtype) => matches!(
            (source.stored, dtype),
            (Stored::F32, DType::F32)
                | (Stored::F16, DType::F16)
                | (Stored::Bf16, DType::BF16)
                | (Stored::F64, DType::F64)
                | (Stored::U8, DType::U8)
                | (Stored::I64, DType::I64)
        ),
    };
    is_same
        && source
            .pieces
            .iter()
            .all(|piece| matches!(piece, SourcePiece::File { .. }))
}

/// A file whose pages the card can read.
#[derive(Debug)]
struct MappedFile {
    context: Arc<CudaContext>,
    at: NonNull<c_void>,
    length: u64,
    /// Cells that are registered.
    cells: BTreeSet<u64>,
}

// SAFETY: it owns its mapping, which is the process's and not a thread's.
unsafe impl Send for MappedFile {}
// SAFETY: the mapping is only read, by the card.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    fn open(context: &Arc<CudaContext>, path: &Path) -> Result<MappedFile, LoadError> {
        let io = |error| unreadable(path, error);
        let file: File = open_regular(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        // SAFETY: a new mapping at an address of the system's choice, of a file that stays open until it is mapped. Shared: of a
        // private one the system would copy each page that is registered.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length as usize,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        let at = NonNull::new(at).filter(|at| at.as_ptr() != libc::MAP_FAILED);
        let at = at.ok_or_else(|| io(std::io::Error::last_os_error()))?;
        Ok(MappedFile {
            context: Arc::clone(context),
            at,
            length,
            cells: BTreeSet::new(),
        })
    }

    fn cell(&self, number: u64) -> (NonNull<c_void>, usize) {
        let begin = number * CELL;
        let length = CELL.min(self.length.saturating_sub(begin));
        // SAFETY: the offset is within the mapping, or one past its end.
        (
            unsafe { self.at.byte_add(begin.min(self.length) as usize) },
            length as usize,
        )
    }

    fn registered(&self) -> u64 {
        self.cells.iter().map(|cell| self.cell(*cell).1 as u64).sum()
    }

    /// Registers these cells. False if the driver refuses.
    fn register(&mut self, wanted: &BTreeSet<u64>) -> bool {
        let new: Vec<u64> = wanted.difference(&self.cells).copied().collect();
        let this = &*self;
        let outcomes: Vec<(u64, Result<(), DriverError>)> = std::thread::scope(|scope| {
            let part = new.len().div_ceil(THREADS).max(1);
            let threads: Vec<_> = new
                .chunks(part)
                .map(|cells| {
                    scope.spawn(move || {
                        cells
                            .iter()
                            .map(|cell| (*cell, this.pin(*cell)))
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            let joined = threads.into_iter().filter_map(|thread| thread.join().ok());
            joined.flatten().collect()
        });
        let mut all = outcomes.len() == new.len();
        for (cell, outcome) in outcomes {
            match outcome {
                Ok(()) => {
                    self.cells.insert(cell);
                }
                Err(error) => {
                    tracing::debug!(%error, "pages of a file cannot be registered");
                    all = false;
                }
            }
        }
        all
    }

    fn pin(&self, cell: u64) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        let (at, length) = self.cell(cell);
        // SAFETY: the range is mapped, and stays so until it is unregistered.
        unsafe { sys::cuMemHostRegister_v2(at.as_ptr(), length, sys::CU_MEMHOSTREGISTER_READ_ONLY) }.result()
    }

    fn unregister(&mut self, cell: u64) {
        if !self.cells.remove(&cell) {
            return;
        }
        let (at, _) = self.cell(cell);
        // SAFETY: registered by `pin`, and unregistered once. The copies from it are over: the caller has waited for them.
        let done = self
            .context
            .bind_to_thread()
            .and_then(|()| unsafe { sys::cuMemHostUnregister(at.as_ptr()) }.result());
        if let Err(error) = done {
            tracing::error!(%error, "pages of a file stay registered");
        }
    }

    /// The bytes of a range of the file, cut where cells end: the driver copies from one registration at a time.
    fn runs(&self, range: Range<u64>) -> Vec<HostRun> {
        let mut runs = Vec::new();
        let mut begin = range.start;
        while begin < range.end.min(self.length) {
            let end = ((begin / CELL + 1) * CELL).min(range.end).min(self.length);
            runs.push(HostRun {
                // SAFETY: the offset is within the mapping.
                from: unsafe { self.at.as_ptr().byte_add(begin as usize) },
                length: (end - begin) as usize,
            });
            begin = end;
        }
        runs
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        let cells: Vec<u64> = self.cells.iter().copied().collect();
        for cell in cells {
            self.unregister(cell);
        }
        // SAFETY: mapped by `open`, unmapped once, and nothing of it is registered.
        unsafe { libc::munmap(self.at.as_ptr(), self.length as usize) };
    }
}
