//! From files to the card, through a small ring of pinned memory that lives as long as the card is open.
//!
//! Each reading thread has a *lane*: a few pinned slots and a stream of its own. It reads a piece of a file into a slot,
//! asks for an asynchronous copy, and goes on with the next slot, while the card's copy engine works through all lanes.
//! Nothing is pageable, nothing is pinned for a load, and nobody waits for a tensor: a lane waits only for the slot that
//! it is about to fill, and the load waits once, at its end.
//!
//! Numbers that are to be quantized take the same way to memory of the lane's own on the card, and a kernel behind their
//! copy makes codes and scales of them at the tensor's place, while the next bytes arrive.

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use candle_core::DType;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};
use residency::Bytes;

use super::placer::{self, Placed, Placer};
use super::pool::{PinnedBuffer, Pool, is_out_of_memory};
use super::quantize::{Arrived, Bench, Kernels, Making, Workspace, WorkspaceSize};
use crate::convert;
use crate::load::{LoadError, LoadProgress, TensorSource};
use crate::reader::{self, Chunk, OpenFiles, Progress, Read};
use crate::timeline::Timeline;

/// Slots of a lane: one is read into while others are copied from.
const LEAST_SLOTS: usize = 2;

/// Parts of a slot begin at multiples of this, whatever their dtype.
const PART_ALIGNMENT: usize = 64;

/// What the log calls the reading lanes' part of a load.
pub(super) const READING: &str = "read and copy";

/// The pinned ring with its streams.
#[derive(Debug)]
pub(super) struct Staging {
    lanes: Vec<Lane>,
    chunk: usize,
    /// What computes, and allocates: memory is handed out in its order.
    stream: Arc<CudaStream>,
    /// Says, in any stream, that all allocations so far may be used.
    allocated: CudaEvent,
    kernels: Kernels,
}

#[derive(Debug)]
struct Lane {
    stream: Arc<CudaStream>,
    slots: Vec<Slot>,
    next: usize,
    /// Tensors that its stream has waited for: so many are there.
    waited_for: usize,
    /// What its thread did in this load.
    spent: Spent,
}

/// What a lane's thread spent its time on, for the log.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    /// Waiting for a slot that is still copied from: the link is what is slow.
    waiting: Duration,
    /// Reading from files into slots: the page cache, or the disk, is what is slow.
    reading: Duration,
    /// Asking the driver for copies and kernels.
    asking: Duration,
}

#[derive(Debug)]
struct Slot {
    memory: PinnedBuffer,
    /// The last copy out of it, and what was made of the copy.
    copied: CudaEvent,
}

/// A tensor that has its place on the card.
#[derive(Debug)]
pub(super) struct Allocation<'a> {
    pub(super) source: &'a TensorSource,
    pub(super) pointer: sys::CUdeviceptr,
}

/// What one lane does at a time.
enum Piece<'a> {
    /// One slot full of what is only copied, most often of several tensors. A slot for each would leave its lane waiting for
    /// the copies of others behind a few bytes: a third of the speed where a model has many small tensors.
    Copy(Vec<SlotPart<'a>>),
    /// Numbers that are quantized: one chunk, or, where scales must be known first, all of the tensor.
    Make {
        source: &'a TensorSource,
        place: Place,
        making: Making,
        chunks: Vec<Chunk<'a>>,
    },
}

/// One read, and one copy to where the numbers stay.
struct SlotPart<'a> {
    source: &'a TensorSource,
    place: Place,
    read: Read<'a>,
    /// Where in the slot its bytes lie.
    at: Range<usize>,
    to: sys::CUdeviceptr,
}

/// Where a tensor goes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) pointer: sys::CUdeviceptr,
    /// Tensors that had their memory when this one's was allocated, it included.
    pub(super) among: usize,
}

/// What lanes share while a load is under way.
#[derive(Clone, Copy)]
struct Shared<'a> {
    allocated: &'a CudaEvent,
    kernels: &'a Kernels,
    /// The load was cancelled: what is long need not be done to its end.
    cancelled: &'a AtomicBool,
}

/// Pinned memory that no lane has yet.
#[derive(Debug)]
pub(super) struct PinnedRing {
    /// Slots, by lane.
    lanes: Vec<Vec<PinnedBuffer>>,
    chunk: usize,
}

impl PinnedRing {
    /// About `total` bytes in chunks of about `chunk` bytes, for as many threads as read. The system takes its time: any
    /// thread may ask for them while the card is made ready otherwise.
    pub(super) fn new(context: &CudaContext, total: Bytes, chunk: Bytes) -> Result<PinnedRing, DriverError> {
        let began = Instant::now();
        let chunk = (chunk.0.max(64 << 10) as usize).next_multiple_of(4096);
        let threads = reader::threads();
        let slots = (total.0 as usize / chunk / threads).max(LEAST_SLOTS);
        let mut buffers = PinnedBuffer::several(context, threads * slots, chunk, threads)?.into_iter();
        let lanes = (0..threads)
            .map(|_| buffers.by_ref().take(slots).collect())
            .collect();
        Timeline::tell(
            "open the card",
            "pin memory, on a thread of its own",
            began.elapsed(),
        );
        Ok(PinnedRing { lanes, chunk })
    }
}

impl Staging {
    /// Lanes over a ring. What is loaded is allocated in the order of `stream`.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        kernels: Kernels,
        ring: PinnedRing,
    ) -> Result<Staging, DriverError> {
        let context = stream.context();
        let slot = |memory: PinnedBuffer| -> Result<Slot, DriverError> {
            Ok(Slot {
                memory,
                // Lanes sleep until their slot is free: they are more than the processor may have to spare.
                copied: context.new_event(Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC))?,
            })
        };
        let lane = |slots: Vec<PinnedBuffer>| -> Result<Lane, DriverError> {
            Ok(Lane {
                stream: context.new_stream()?,
                slots: slots.into_iter().map(slot).collect::<Result<_, _>>()?,
                next: 0,
                waited_for: 0,
                spent: Spent::default(),
            })
        };
        Ok(Staging {
            lanes: ring.lanes.into_iter().map(lane).collect::<Result<_, _>>()?,
            chunk: ring.chunk,
            stream: Arc::clone(stream),
            allocated: context.new_event(None)?,
            kernels,
        })
    }

    /// Pinned bytes that it holds.
    pub(super) fn bytes(&self) -> Bytes {
        let slots: usize = self.lanes.iter().map(|lane| lane.slots.len()).sum();
        Bytes((slots * self.chunk) as u64)
    }

    /// The least bytes on the card that a load of these sources takes besides its tensors, while it lasts: those of one
    /// lane.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] if one of them is to be quantized in a way that is not known, or does not fit the ring.
    pub(super) fn least_workspace(&self, sources: &[TensorSource]) -> Result<Bytes, LoadError> {
        let size = self.workspace_size(&self.makings(sources)?, 1);
        Ok(size.map_or(Bytes::ZERO, WorkspaceSize::bytes))
    }

    fn makings(&self, sources: &[TensorSource]) -> Result<Vec<Option<Making>>, LoadError> {
        let numbered = sources.iter().enumerate();
        numbered
            .map(|(number, source)| Making::of(source, number, self.chunk))
            .collect()
    }

    fn workspace_size(&self, makings: &[Option<Making>], lanes: usize) -> Option<WorkspaceSize> {
        let slots = self.lanes.first().map_or(0, |lane| lane.slots.len());
        WorkspaceSize::of(makings, lanes, slots, self.chunk)
    }

    /// Takes the memory for what is quantized, if anything is, for as many lanes as have it within `room`: one at least. Says
    /// how many lanes may work.
    fn workspace(
        &self,
        makings: &[Option<Making>],
        total: Bytes,
        room: Bytes,
    ) -> Result<(Option<Workspace>, usize), LoadError> {
        let all = self.lanes.len();
        let fits = |lanes: &usize| {
            let size = self.workspace_size(makings, *lanes);
            size.is_none_or(|size| size.bytes() <= room)
        };
        let lanes = (1..=all).rev().find(fits).unwrap_or(1);
        let Some(size) = self.workspace_size(makings, lanes) else {
            return Ok((None, all));
        };
        if lanes < all {
            tracing::info!(lanes, all, "little memory is left to quantize in");
        }
        Workspace::new(size, &self.stream)
            .map(|workspace| (Some(workspace), lanes))
            .map_err(|error| out_of_memory_or_lost(error, size.bytes() + total))
    }

    /// Allocates every source from `pool` and fills it. Each allocation is in `made` as soon as it exists, whatever the
    /// outcome; when this returns, no copy and no kernel is under way, and what a load has besides is given back (but on
    /// a card that is lost). That is no more than `room`, or what one lane needs.
    pub(super) fn load<'a>(
        &mut self,
        sources: &'a [TensorSource],
        files: &'a OpenFiles,
        pool: &Pool,
        made: &mut Vec<Allocation<'a>>,
        room: Bytes,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let total = sources.iter().map(TensorSource::bytes_on_card).sum();
        let makings = self.makings(sources)?;
        let (workspace, lanes) = self.workspace(&makings, total, room)?;
        let placer = Placer {
            sources,
            makings,
            pool,
            stream: &self.stream,
            allocated: &self.allocated,
            made,
        };
        let (to_lanes, batches) = mpsc::sync_channel(placer::AHEAD);
        let pieces = Pieces {
            batches,
            files,
            chunk: self.chunk,
            placed: VecDeque::new(),
            filling: Vec::new(),
            waiting: VecDeque::new(),
            has_failed: false,
            without_memory: Duration::ZERO,
        };
        let cancelled = AtomicBool::new(false);
        let shared = Shared {
            allocated: &self.allocated,
            kernels: &self.kernels,
            cancelled: &cancelled,
        };
        let workers = self
            .lanes
            .iter_mut()
            .take(lanes)
            .enumerate()
            .map(|(number, lane)| {
                let bench = workspace.as_ref().map(|workspace| workspace.bench(number));
                move |piece: Result<Piece<'a>, LoadError>| {
                    piece.and_then(|piece| lane.carry(&piece, bench.as_ref(), shared))
                }
            });
        let mut listening = |at: LoadProgress| -> ControlFlow<()> {
            let answer = progress(at);
            cancelled.fetch_or(answer.is_break(), Relaxed);
            answer
        };
        let mut timeline = Timeline::begin(READING);
        let outcome = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("moored-map".to_owned());
            thread
                .spawn_scoped(scope, move || placer.run(&to_lanes))
                .map_err(|error| {
                    LoadError::Lost(format!("no thread can be started to map memory with: {error}"))
                })?;
            reader::run(pieces, workers, total, &mut listening)
        });
        timeline.part("until all is read");
        for lane in &mut self.lanes {
            lane.stream.synchronize().map_err(lost)?;
            lane.waited_for = 0;
        }
        timeline.part("until all is copied");
        self.tell_spent();
        if matches!(outcome, Err(LoadError::Lost(_))) {
            return outcome;
        }
        let not_finite = match workspace {
            Some(workspace) => workspace.close(&self.stream).map_err(lost)?,
            None => None,
        };
        outcome?;
        match not_finite.and_then(|number| sources.get(number)) {
            Some(source) => Err(LoadError::NotFinite {
                tensor: source.name.clone(),
            }),
            None => Ok(()),
        }
    }
}

impl Staging {
    /// Says what the lanes spent this load's time on, the mean of all, and forgets it.
    fn tell_spent(&mut self) {
        let (mut sum, count) = (Spent::default(), self.lanes.len().max(1) as u32);
        for lane in &mut self.lanes {
            let spent = std::mem::take(&mut lane.spent);
            sum.waiting += spent.waiting;
            sum.reading += spent.reading;
            sum.asking += spent.asking;
        }
        Timeline::tell(READING, "a lane, waiting for the link", sum.waiting / count);
        Timeline::tell(READING, "a lane, reading files", sum.reading / count);
        Timeline::tell(READING, "a lane, asking for copies", sum.asking / count);
    }
}

impl Lane {
    /// Reads one piece and asks for its copy, and for what is made of it. Says how many bytes on the card that is.
    fn carry(
        &mut self,
        piece: &Piece<'_>,
        bench: Option<&Bench>,
        shared: Shared<'_>,
    ) -> Result<u64, LoadError> {
        match piece {
            Piece::Copy(parts) => self.copy(parts, shared),
            Piece::Make {
                source,
                place,
                making,
                chunks,
            } => {
                let bench = bench.ok_or_else(|| {
                    LoadError::Unsupported(format!("tensor {} has no room to be quantized in", source.name))
                })?;
                self.make(source, *place, making, chunks, bench, shared)
            }
        }
    }

    fn copy(&mut self, parts: &[SlotPart<'_>], shared: Shared<'_>) -> Result<u64, LoadError> {
        let memory = self.empty_slot()?;
        let began = Instant::now();
        for part in parts {
            let dtype = reader::read_as(part.source.target);
            let reads = std::slice::from_ref(&part.read);
            fill(memory, part.at.clone(), part.source, dtype, reads)?;
        }
        self.spent.reading += began.elapsed();
        let began = Instant::now();
        let mut length = 0;
        for part in parts {
            self.wait_for(part.place, shared.allocated)?;
            let slot = &self.slots[self.next];
            // SAFETY: `to` lies in an allocation of the source's size, which is not freed before this lane's stream has been
            // synchronised; the slot is not touched before `copied`, recorded behind the copies, has happened.
            unsafe { slot.memory.copy_to(part.at.clone(), part.to, &self.stream) }.map_err(lost)?;
            length += part.at.len() as u64;
        }
        self.pass_on()?;
        self.spent.asking += began.elapsed();
        Ok(length)
    }

    /// Takes chunks to the bench, each followed by the kernel that quantizes it.
    fn make(
        &mut self,
        source: &TensorSource,
        place: Place,
        making: &Making,
        chunks: &[Chunk<'_>],
        bench: &Bench,
        shared: Shared<'_>,
    ) -> Result<u64, LoadError> {
        let Shared {
            allocated,
            kernels,
            cancelled,
        } = shared;
        for chunk in chunks {
            if cancelled.load(Relaxed) {
                return Err(LoadError::Cancelled);
            }
            let dtype = making.dtype();
            let bytes = 0..chunk.count * dtype.size_in_bytes();
            let memory = self.empty_slot()?;
            let began = Instant::now();
            fill(memory, bytes.clone(), source, dtype, &chunk.reads)?;
            self.spent.reading += began.elapsed();
            let began = Instant::now();
            self.wait_for(place, allocated)?;
            let slot = &self.slots[self.next];
            let arrived = Arrived {
                at: bench.input(self.next),
                first: chunk.first,
                count: chunk.count,
            };
            // SAFETY: the bench has as many bytes for this slot as it has itself, and what was made of the last copy to
            // them is done, since `copied` is recorded behind that; for the rest, as for `copy`.
            unsafe { slot.memory.copy_to(bytes, arrived.at, &self.stream) }.map_err(lost)?;
            // SAFETY: the allocation is of the source's size, and the chunk one of its; neither allocation nor bench is
            // freed before this lane's stream has been synchronised.
            unsafe { kernels.quantize(making, arrived, place.pointer, bench, &self.stream) }.map_err(lost)?;
            self.pass_on()?;
            self.spent.asking += began.elapsed();
        }
        if making.is_nested() {
            // SAFETY: all chunks of the tensor went before, in this stream; the next tensor's come behind.
            unsafe { kernels.nest(making, place.pointer, bench, &self.stream) }.map_err(lost)?;
        }
        Ok(share_of(source.bytes_on_card(), making.numbers(), chunks))
    }

    /// Waits until nothing is copied from the next slot any more.
    fn empty_slot(&mut self) -> Result<&mut [u8], LoadError> {
        let slot = &mut self.slots[self.next];
        let began = Instant::now();
        slot.copied.synchronize().map_err(lost)?;
        self.spent.waiting += began.elapsed();
        // SAFETY: the last copy out of the slot was waited for just now.
        Ok(unsafe { slot.memory.fill() })
    }

    /// Has the stream wait until this place may be used.
    fn wait_for(&mut self, place: Place, allocated: &CudaEvent) -> Result<(), LoadError> {
        if self.waited_for < place.among {
            self.stream.wait(allocated).map_err(lost)?;
            self.waited_for = place.among;
        }
        Ok(())
    }

    /// Lets the slot go once all that was asked for by now is done, and goes on to the next.
    fn pass_on(&mut self) -> Result<(), LoadError> {
        self.slots[self.next].copied.record(&self.stream).map_err(lost)?;
        self.next = (self.next + 1) % self.slots.len();
        Ok(())
    }
}

/// Fills a part of a slot, read behind read.
fn fill(
    memory: &mut [u8],
    at: Range<usize>,
    source: &TensorSource,
    dtype: DType,
    reads: &[Read<'_>],
) -> Result<(), LoadError> {
    let part = memory
        .get_mut(at)
        .and_then(|bytes| convert::Part::over(bytes, dtype));
    let mut rest = part.ok_or_else(|| {
        LoadError::Unsupported(format!("tensor {} has no place in pinned memory", source.name))
    })?;
    for read in reads {
        let (part, behind) = rest.split(read.count);
        reader::read_part(part, source, read)?;
        rest = behind;
    }
    debug_assert_eq!(rest.len(), 0, "the reads fill what was counted for them");
    Ok(())
}

/// The bytes on the card of these chunks, out of all of a tensor: what its chunks have in all is exact.
fn share_of(bytes: Bytes, numbers: usize, chunks: &[Chunk<'_>]) -> u64 {
    let until = |number: usize| (u128::from(bytes.0) * number as u128 / numbers.max(1) as u128) as u64;
    let of_chunk = |chunk: &Chunk<'_>| until(chunk.first + chunk.count) - until(chunk.first);
    chunks.iter().map(of_chunk).sum()
}

/// Cuts tensors that have their memory into what one lane does at a time.
struct Pieces<'a> {
    batches: mpsc::Receiver<Result<Vec<Placed<'a>>, LoadError>>,
    files: &'a OpenFiles,
    chunk: usize,
    /// Tensors that have their memory, and of which no lane has a piece yet.
    placed: VecDeque<Placed<'a>>,
    /// What is copied next, as soon as it is a slot full.
    filling: Vec<SlotPart<'a>>,
    waiting: VecDeque<Piece<'a>>,
    has_failed: bool,
    /// Time in which lanes had nothing to fill.
    without_memory: Duration,
}

impl<'a> Pieces<'a> {
    /// Waits for the next tensors that have their memory; says whether there are any.
    fn await_memory(&mut self) -> Result<bool, LoadError> {
        let began = Instant::now();
        let batch = self.batches.recv();
        self.without_memory += began.elapsed();
        match batch {
            Ok(placed) => {
                self.placed.extend(placed?);
                Ok(true)
            }
            Err(mpsc::RecvError) => Ok(false), // those were all
        }
    }

    fn copy(&mut self, source: &'a TensorSource, place: Place) -> Result<(), LoadError> {
        let width = reader::read_as(source.target).size_in_bytes();
        // A conversion never reads more at a time than a slot holds of either dtype.
        let most = self.chunk / width.max(source.stored.width());
        for whole in reader::reads(source, self.files, usize::MAX)? {
            let mut done = 0;
            while done < whole.count {
                let end = self.filling.last().map_or(0, |part| part.at.end);
                let begin = end.next_multiple_of(PART_ALIGNMENT);
                let count = (whole.count - done)
                    .min(most)
                    .min(self.chunk.saturating_sub(begin) / width);
                if count == 0 {
                    self.waiting
                        .push_back(Piece::Copy(std::mem::take(&mut self.filling)));
                    continue;
                }
                let read = whole.part(done, count, source.stored.width());
                self.filling.push(SlotPart {
                    source,
                    place,
                    at: begin..begin + count * width,
                    to: place.pointer + (read.first * width) as u64,
                    read,
                });
                done += count;
            }
        }
        Ok(())
    }

    fn make(&mut self, source: &'a TensorSource, making: Making, place: Place) -> Result<(), LoadError> {
        let mut chunks = reader::chunks(source, self.files, making.unit(), making.most(self.chunk))?;
        if chunks.is_empty() {
            // Without numbers there are tables still.
            chunks.push(Chunk {
                first: 0,
                count: 0,
                reads: Vec::new(),
            });
        }
        let piece = |chunks| Piece::Make {
            source,
            place,
            making,
            chunks,
        };
        if making.is_nested() {
            self.waiting.push_back(piece(chunks));
        } else {
            self.waiting
                .extend(chunks.into_iter().map(|chunk| piece(vec![chunk])));
        }
        Ok(())
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Result<Piece<'a>, LoadError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(piece) = self.waiting.pop_front() {
                return Some(Ok(piece));
            }
            if self.has_failed {
                return None;
            }
            let outcome = match self.placed.pop_front() {
                Some(Placed {
                    source,
                    making: Some(making),
                    place,
                }) => self.make(source, making, place).map(|()| true),
                Some(Placed { source, place, .. }) => self.copy(source, place).map(|()| true),
                None => self.await_memory(),
            };
            match outcome {
                Ok(true) => {}
                Ok(false) if !self.filling.is_empty() => {
                    self.waiting
                        .push_back(Piece::Copy(std::mem::take(&mut self.filling)));
                }
                Ok(false) => {
                    let waited = std::mem::take(&mut self.without_memory);
                    if waited > Duration::ZERO {
                        Timeline::tell(READING, "lanes without memory to fill", waited);
                    }
                    return None;
                }
                Err(error) => {
                    self.has_failed = true;
                    return Some(Err(error));
                }
            }
        }
    }
}

/// What it means that so many bytes could not be allocated.
pub(super) fn out_of_memory_or_lost(error: DriverError, needed: Bytes) -> LoadError {
    if !is_out_of_memory(error) {
        return lost(error);
    }
    let free = cudarc::driver::result::mem_get_info().map_or(0, |(free, _)| free as u64);
    LoadError::OutOfMemory {
        needed,
        free: Bytes(free),
    }
}

/// Any failure of the driver but a lack of memory: the process cannot be trusted any more.
pub(super) fn lost(error: DriverError) -> LoadError {
    LoadError::Lost(error.to_string())
}
