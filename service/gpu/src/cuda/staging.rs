//! From files to the card, through a small ring of pinned memory that lives as long as the card is open.
//!
//! Each reading thread has a *lane*: a few pinned slots and a stream of its own. It reads a piece of a file into a slot,
//! asks for an asynchronous copy, and goes on with the next slot, while the card's copy engine works through all lanes.
//! Nothing is pageable, nothing is pinned for a load, and nobody waits for a tensor: a lane waits only for the slot that
//! it is about to fill, and the load waits once, at its end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};
use residency::Bytes;

use super::pool::{PinnedBuffer, Pool, is_out_of_memory};
use crate::convert::Part;
use crate::load::{LoadError, TensorSource};
use crate::reader::{self, OpenFile, OpenFiles, Progress, Read};

/// Slots of a lane: one is read into while others are copied from.
const LEAST_SLOTS: usize = 2;

/// The pinned ring with its streams.
#[derive(Debug)]
pub(super) struct Staging {
    lanes: Vec<Lane>,
    chunk: usize,
    /// What computes, and allocates: memory is handed out in its order.
    stream: Arc<CudaStream>,
    /// Says, in any stream, that all allocations so far may be used.
    allocated: CudaEvent,
}

#[derive(Debug)]
struct Lane {
    stream: Arc<CudaStream>,
    slots: Vec<Slot>,
    next: usize,
    /// The allocation that its stream has waited for last: those before it are there as well.
    waited_for: Option<sys::CUdeviceptr>,
}

#[derive(Debug)]
struct Slot {
    memory: PinnedBuffer,
    /// The last copy out of it.
    copied: CudaEvent,
}

/// A tensor that has its place on the card.
#[derive(Debug)]
pub(super) struct Allocation<'a> {
    pub(super) source: &'a TensorSource,
    pub(super) pointer: sys::CUdeviceptr,
}

/// One read and one copy.
struct Piece<'a> {
    source: &'a TensorSource,
    file: &'a OpenFile,
    read: Read,
    /// The tensor's place.
    allocation: sys::CUdeviceptr,
    to: sys::CUdeviceptr,
}

impl Staging {
    /// A ring of about `total` bytes in chunks of about `chunk` bytes, for as many threads as read. What is loaded is
    /// allocated in the order of `stream`.
    pub(super) fn new(stream: &Arc<CudaStream>, total: Bytes, chunk: Bytes) -> Result<Staging, DriverError> {
        let context = stream.context();
        let chunk = (chunk.0.max(64 << 10) as usize).next_multiple_of(4096);
        let threads = reader::threads();
        let slots = (total.0 as usize / chunk / threads).max(LEAST_SLOTS);
        let lane = || -> Result<Lane, DriverError> {
            let slot = || -> Result<Slot, DriverError> {
                Ok(Slot {
                    memory: PinnedBuffer::new(context, chunk)?,
                    // Lanes sleep until their slot is free: they are more than the processor may have to spare.
                    copied: context.new_event(Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC))?,
                })
            };
            Ok(Lane {
                stream: context.new_stream()?,
                slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?,
                next: 0,
                waited_for: None,
            })
        };
        Ok(Staging {
            lanes: (0..threads).map(|_| lane()).collect::<Result<_, _>>()?,
            chunk,
            stream: Arc::clone(stream),
            allocated: context.new_event(None)?,
        })
    }

    /// Pinned bytes that it holds.
    pub(super) fn bytes(&self) -> Bytes {
        let slots: usize = self.lanes.iter().map(|lane| lane.slots.len()).sum();
        Bytes((slots * self.chunk) as u64)
    }

    /// Allocates every source from `pool` and fills it. Each allocation is in `made` as soon
    /// as it exists, whatever the outcome; when this returns, no copy is under way.
    pub(super) fn load<'a>(
        &mut self,
        sources: &'a [TensorSource],
        files: &'a OpenFiles,
        pool: &Pool,
        made: &mut Vec<Allocation<'a>>,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let total = sources.iter().map(TensorSource::bytes_on_card).sum();
        let pieces = Pieces {
            sources: sources.iter(),
            files,
            pool,
            stream: &self.stream,
            allocated: &self.allocated,
            chunk: self.chunk,
            made,
            waiting: VecDeque::new(),
            total,
            booked: Bytes::ZERO,
            allocating: Duration::ZERO,
        };
        let allocated = &self.allocated;
        let workers = self.lanes.iter_mut().map(|lane| {
            move |piece: Result<Piece<'a>, LoadError>| piece.and_then(|piece| lane.carry(&piece, allocated))
        });
        let outcome = reader::run(pieces, workers, total, progress);
        for lane in &mut self.lanes {
            lane.stream.synchronize().map_err(lost)?;
            lane.waited_for = None; // an address may be given out again
        }
        outcome
    }
}

impl Lane {
    /// Reads one piece and asks for its copy. Says how many bytes on the card that is.
    fn carry(&mut self, piece: &Piece<'_>, allocated: &CudaEvent) -> Result<u64, LoadError> {
        let Piece {
            source,
            file,
            read,
            allocation,
            to,
        } = piece;
        let slot = &mut self.slots[self.next];
        slot.copied.synchronize().map_err(lost)?;
        let length = read.count * source.target.size_in_bytes();
        // SAFETY: the last copy out of the slot was waited for just now.
        let memory = unsafe { slot.memory.fill() };
        let part = memory
            .get_mut(..length)
            .and_then(|bytes| Part::over(bytes, source.target))
            .ok_or_else(|| {
                LoadError::Unsupported(format!("tensor {} has no place in pinned memory", source.name))
            })?;
        reader::read_part(part, source, file, read.offset)?;
        if self.waited_for != Some(*allocation) {
            self.stream.wait(allocated).map_err(lost)?;
            self.waited_for = Some(*allocation);
        }
        // SAFETY: `to` lies in an allocation of the source's size, which is not freed before this lane's stream has been
        // synchronised; the slot is not touched before `copied`, recorded behind the copy, has happened.
        unsafe { slot.memory.copy_to(*to, length, &self.stream) }.map_err(lost)?;
        slot.copied.record(&self.stream).map_err(lost)?;
        self.next = (self.next + 1) % self.slots.len();
        Ok(length as u64)
    }
}

/// Allocates tensor after tensor as the lanes come to them, so that the first bytes travel while the card still maps
/// memory for the last.
struct Pieces<'a, 'b> {
    sources: std::slice::Iter<'a, TensorSource>,
    files: &'a OpenFiles,
    pool: &'b Pool,
    stream: &'b CudaStream,
    allocated: &'b CudaEvent,
    chunk: usize,
    made: &'b mut Vec<Allocation<'a>>,
    waiting: VecDeque<Piece<'a>>,
    total: Bytes,
    booked: Bytes,
    /// Time that the driver took to map memory.
    allocating: Duration,
}

impl<'a> Pieces<'a, '_> {
    fn allocate(&mut self, source: &'a TensorSource) -> Result<(), LoadError> {
        let file = reader::file_of(source, self.files)?;
        let bytes = source.bytes_on_card();
        let began = Instant::now();
        let pointer = self.pool.allocate(bytes.0, self.stream);
        self.allocating += began.elapsed();
        let pointer = pointer.map_err(|error| {
            if is_out_of_memory(error) {
                let free = cudarc::driver::result::mem_get_info().map_or(0, |(free, _)| free as u64);
                LoadError::OutOfMemory {
                    needed: self.total - self.booked,
                    free: Bytes(free),
                }
            } else {
                lost(error)
            }
        })?;
        self.made.push(Allocation { source, pointer });
        self.booked += bytes;
        self.allocated.record(self.stream).map_err(lost)?;
        let width = source.target.size_in_bytes();
        // A conversion never reads more at a time than a slot holds of either dtype.
        let most = self.chunk / width.max(source.stored.width());
        self.waiting
            .extend(reader::reads(source, most).into_iter().map(|read| Piece {
                source,
                file,
                read,
                allocation: pointer,
                to: pointer + (read.first * width) as u64,
            }));
        Ok(())
    }
}

impl<'a> Iterator for Pieces<'a, '_> {
    type Item = Result<Piece<'a>, LoadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(piece) = self.waiting.pop_front() {
                return Some(Ok(piece));
            }
            let Some(source) = self.sources.next() else {
                let (tensors, allocating) = (self.made.len(), std::mem::take(&mut self.allocating));
                if allocating > Duration::ZERO {
                    tracing::debug!(tensors, ?allocating, "all of a component has its place");
                }
                return None;
            };
            if let Err(error) = self.allocate(source) {
                self.sources = [].iter();
                return Some(Err(error));
            }
        }
    }
}

/// Any failure of the driver but a lack of memory: the process cannot be trusted any more.
fn lost(error: DriverError) -> LoadError {
    LoadError::Lost(error.to_string())
}
