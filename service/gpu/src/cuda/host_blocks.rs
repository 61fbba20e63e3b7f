//! Streamed blocks in the machine's memory, from where the card copies them.
//!
//! What lies in a file as it is used is copied from the page cache: the file is mapped, and the pages that hold streamed tensors are
//! registered with the driver, in cells of a fixed size. It costs no memory beside the page cache, and registered pages stay there.
//! What is made at load (quantized, converted, put together), or where the driver does not register pages, has a pinned copy. What is
//! used once in a stage and lies in a file as it is used, or what the machine has no memory for, is read from its file, and made, each time.
//!
//! While pages are registered the driver lets hardly any copy begin. So the system makes them present before, on several threads, which
//! is most of the work where a file lies in small pages, and one thread registers them: more are not faster.

use std::collections::hash_map::Entry;
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

use super::pool::{PinnedRegion, UnpinnedRegion};
use crate::card::Arrival;
use crate::files::open_regular;
use crate::host_tier::HoldsMemory;
use crate::load::{ByteRange, LoadError, SourcePiece, Target, TensorSource};
use crate::reader;
use crate::system::{SystemMemory, SystemReader};

/// Bytes of a file that are registered at a time.
const CELL: u64 = 64 << 20;

/// A run of bytes in the machine's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostRun {
    pub(super) from: *const c_void,
    pub(super) length: usize,
}

// SAFETY: an address of pinned memory, which only the card reads.
unsafe impl Send for HostRun {}

/// A copy of a run of bytes to the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunTo {
    pub(super) run: HostRun,
    pub(super) to: sys::CUdeviceptr,
}

/// The tensors of streamed blocks.
#[derive(Debug, Default)]
pub(super) struct HostBlocks {
    files: HashMap<Arc<Path>, MappedFile>,
    /// Pinned copies, by tensor.
    copies: HashMap<usize, PinnedCopy>,
    /// The memory of all copies.
    regions: Vec<PinnedRegion>,
    /// Cells of files that a stage registers when it comes to them.
    deferred: HashMap<Arc<Path>, BTreeSet<u64>>,
}

/// A copy of a tensor, in pinned memory of several.
#[derive(Clone, Copy, Debug)]
struct PinnedCopy {
    /// Index of its memory.
    region: usize,
    offset: usize,
}

/// Memory for pinned copies of tensors, which is there and not pinned yet.
pub(super) struct RoomForCopies {
    memory: UnpinnedRegion,
    /// Each tensor with its offset.
    places: Vec<(usize, usize)>,
}

impl HostBlocks {
    /// The runs of bytes of a tensor that is held, in order, each with its place on the card, of which the first is `to`.
    pub(super) fn runs(&self, tensor: usize, source: &TensorSource, mut to: sys::CUdeviceptr) -> Vec<RunTo> {
        let mut placed = Vec::new();
        for run in self.runs_held(tensor, source) {
            placed.push(RunTo { run, to });
            to += run.length as u64;
        }
        placed
    }

    fn runs_held(&self, tensor: usize, source: &TensorSource) -> Vec<HostRun> {
        if !self.has(tensor, source) {
            return Vec::new();
        }
        if let Some(copy) = self.copy_of(tensor) {
            return vec![HostRun {
                from: copy.as_ptr().cast::<c_void>().cast_const(),
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
    /// the machine. The others, the last ones, are read from their files, and made, when they are used.
    ///
    /// # Errors
    /// Those of `make_room`, but for [`LoadError::HostMemory`].
    pub(super) fn fit<'t>(
        &self,
        tensors: &'t [usize],
        sources: &[TensorSource],
        mut make_room: impl FnMut(Bytes) -> Result<(), LoadError>,
    ) -> Result<&'t [usize], LoadError> {
        let mut held = tensors;
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
            held = &tensors[..count];
            if held.is_empty() {
                break;
            }
        }
        Ok(held)
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
                    let new = cells_of(*range).filter(|cell| !self.has_room_for(file, *cell));
                    cells.extend(new.map(|cell| (&**file, cell)));
                }
            }
        }
        Bytes(cells.len() as u64 * CELL) + copies
    }

    /// Does what precedes [`HostBlocks::hold`] and needs no driver: pages of these tensors' files are made present, and memory for
    /// pinned copies. `None` if none needs a copy.
    ///
    /// # Errors
    /// [`LoadError::Io`]; [`LoadError::HostMemory`].
    pub(super) fn prepare(
        &mut self,
        context: &Arc<CudaContext>,
        tensors: &[usize],
        sources: &[TensorSource],
    ) -> Result<Option<RoomForCopies>, LoadError> {
        for (file, cells) in mapped_cells(tensors.iter().map(|tensor| &sources[*tensor])) {
            let mapped = match self.files.entry(file) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let mapped = MappedFile::open(context, new.key())?;
                    new.insert(mapped)
                }
            };
            mapped.make_present(&cells);
        }
        let is_missing =
            |tensor: &&usize| !is_as_stored(&sources[**tensor]) && !self.copies.contains_key(tensor);
        let missing: Vec<usize> = tensors.iter().filter(is_missing).copied().collect();
        room_for_copies(&missing, sources)
    }

    /// Holds these tensors, for which there is room and which are [prepared](HostBlocks::prepare), and those that it has already: blocks
    /// that come back to the card are streamed again when it is short of memory. Returns those whose copies are to be filled. What lies in
    /// files may be left to the stage that comes next ([`HostBlocks::register`]); it counts as held from now on.
    ///
    /// # Errors
    /// [`LoadError::HostMemory`].
    pub(super) fn hold(
        &mut self,
        tensors: &[usize],
        sources: &[TensorSource],
        room: Option<RoomForCopies>,
        arrival: Arrival,
    ) -> Result<Vec<usize>, LoadError> {
        let mut missing = self.pin(room)?;
        let of_files = || tensors.iter().map(|tensor| &sources[*tensor]);
        if arrival == Arrival::WithFirstPass {
            for (file, mut cells) in mapped_cells(of_files()) {
                if let Some(mapped) = self.files.get(&file) {
                    cells.retain(|cell| !mapped.cells.contains(cell));
                    self.deferred.entry(file).or_default().extend(cells);
                }
            }
            return Ok(missing);
        }
        // What was left to a stage is among these tensors, or is not streamed any more.
        self.deferred.clear();
        if !self.register(of_files()) {
            tracing::info!("pages of files cannot be registered with the driver: blocks have pinned copies");
            self.files.clear();
            let others = tensors.iter().filter(|tensor| !self.copies.contains_key(tensor));
            let others: Vec<usize> = others.copied().collect();
            missing.extend(self.pin(room_for_copies(&others, sources)?)?);
        }
        Ok(missing)
    }

    /// Whether all bytes of a tensor that is not held yet are left to a stage ([`HostBlocks::register`]): what is not in registered pages
    /// already has its room in the budget. One that only shares a cell with such a tensor has none.
    pub(super) fn is_deferred(&self, source: &TensorSource) -> bool {
        let has_room = |piece: &SourcePiece| match piece {
            SourcePiece::File { file, range } => cells_of(*range).all(|cell| self.has_room_for(file, cell)),
            SourcePiece::Inline(_) => false,
        };
        is_as_stored(source) && source.pieces.iter().all(has_room)
    }

    /// Whether a cell of a file is registered, or left to a stage.
    fn has_room_for(&self, file: &Path, cell: u64) -> bool {
        let registered = self.files.get(file).map(|mapped| &mapped.cells);
        let held = [registered, self.deferred.get(file)];
        held.iter().flatten().any(|held| held.contains(&cell))
    }

    /// Forgets what was left to a stage that has not come to it.
    pub(super) fn forget_deferred(&mut self) {
        self.deferred.clear();
    }

    /// Registers the pages of tensors, also of those that were left to a stage. False if the driver refuses: they are not held then.
    pub(super) fn register<'s>(&mut self, sources: impl Iterator<Item = &'s TensorSource>) -> bool {
        let mut is_registered = true;
        for (file, cells) in mapped_cells(sources) {
            if let Some(deferred) = self.deferred.get_mut(&file) {
                deferred.retain(|cell| !cells.contains(cell));
            }
            if let Some(mapped) = self.files.get_mut(&file) {
                is_registered &= mapped.register(&cells);
            }
        }
        is_registered
    }

    /// Pins memory for copies. Returns the tensors.
    fn pin(&mut self, room: Option<RoomForCopies>) -> Result<Vec<usize>, LoadError> {
        let Some(RoomForCopies { memory, places }) = room else {
            return Ok(Vec::new());
        };
        let needed = Bytes(memory.length() as u64);
        let pinned = memory.pinned().ok_or(LoadError::HostMemory {
            needed,
            available: Bytes::ZERO,
        })?;
        let region = self.regions.len();
        self.regions.push(pinned);
        let copies = places.iter().map(|(tensor, offset)| {
            let offset = *offset;
            (*tensor, PinnedCopy { region, offset })
        });
        self.copies.extend(copies);
        Ok(places.into_iter().map(|(tensor, _)| tensor).collect())
    }

    /// The address of a tensor's pinned copy.
    pub(super) fn copy_of(&self, tensor: usize) -> Option<NonNull<u8>> {
        let copy = self.copies.get(&tensor)?;
        let region = self.regions.get(copy.region)?;
        // SAFETY: the offset is within the region.
        Some(unsafe { region.address().add(copy.offset) })
    }
}

/// Alignment of pinned copies.
const COPY_ALIGNMENT: usize = 256;

/// Memory for pinned copies of these tensors; `None` if there are none.
fn room_for_copies(tensors: &[usize], sources: &[TensorSource]) -> Result<Option<RoomForCopies>, LoadError> {
    let mut length = 0;
    let place = |tensor: &usize| {
        let offset = length;
        length += (sources[*tensor].bytes_on_card().0 as usize).next_multiple_of(COPY_ALIGNMENT);
        (*tensor, offset)
    };
    let places: Vec<(usize, usize)> = tensors.iter().map(place).collect();
    if places.is_empty() {
        return Ok(None);
    }
    let memory = UnpinnedRegion::new(length.max(1), reader::threads()).ok_or(LoadError::HostMemory {
        needed: Bytes(length as u64),
        available: Bytes::ZERO,
    })?;
    Ok(Some(RoomForCopies { memory, places }))
}

/// The cells of files that the tensors which lie there as they are used are in.
fn mapped_cells<'s>(sources: impl Iterator<Item = &'s TensorSource>) -> HashMap<Arc<Path>, BTreeSet<u64>> {
    let mut wanted: HashMap<Arc<Path>, BTreeSet<u64>> = HashMap::new();
    let mapped = sources.filter(|source| is_as_stored(source));
    for piece in mapped.flat_map(|source| &source.pieces) {
        if let SourcePiece::File { file, range } = piece {
            let cells = wanted.entry(Arc::clone(file)).or_default();
            cells.extend(cells_of(*range));
        }
    }
    wanted
}

impl HoldsMemory for HostBlocks {
    /// Bytes of the machine's memory that cannot be taken from it: registered pages and copies.
    fn bytes(&self) -> Bytes {
        let deferred = self.deferred.iter().filter_map(|(file, cells)| {
            let mapped = self.files.get(file)?;
            Some(cells.iter().map(|cell| mapped.cell(*cell).1 as u64).sum::<u64>())
        });
        let cells: u64 = self.files.values().map(MappedFile::registered).sum::<u64>() + deferred.sum::<u64>();
        let copies: u64 = self.regions.iter().map(|region| region.length() as u64).sum();
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
pub(super) fn is_as_stored(source: &TensorSource) -> bool {
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

    /// Makes the pages of these cells present, where the system can: registering them is faster then.
    fn make_present(&self, wanted: &BTreeSet<u64>) {
        let new: Vec<u64> = wanted.difference(&self.cells).copied().collect();
        let part = new.len().div_ceil(reader::threads()).max(1);
        std::thread::scope(|scope| {
            for cells in new.chunks(part) {
                scope.spawn(move || {
                    for (at, length) in cells.iter().map(|cell| self.cell(*cell)) {
                        // SAFETY: the range is mapped; the call only makes its pages present.
                        unsafe { libc::madvise(at.as_ptr(), length, libc::MADV_POPULATE_READ) };
                    }
                });
            }
        });
    }

    /// Registers these cells. False if the driver refuses.
    fn register(&mut self, wanted: &BTreeSet<u64>) -> bool {
        let new: Vec<u64> = wanted.difference(&self.cells).copied().collect();
        for cell in new {
            if let Err(error) = self.pin(cell) {
                tracing::debug!(%error, "pages of a file cannot be registered");
                return false;
            }
            self.cells.insert(cell);
        }
        true
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
