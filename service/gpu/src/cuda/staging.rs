//! Copies files to the card, through a small ring of pinned memory that lives as long as the card is open.
//!
//! Each reading thread has a *lane*: a few pinned slots and a stream of its own. It reads a piece of a file into a
//! slot, enqueues an asynchronous copy, and continues with the next slot, while the card's copy engine works through
//! all lanes. Nothing is pageable, nothing is pinned per load, and there is no wait per tensor: a lane waits only for
//! the slot that it is about to fill, and the load waits once, at its end.
//!
//! Numbers to be quantized are copied to temporary memory of the lane on the card, and a kernel after the copy
//! writes their codes and scales to the tensor, while the next bytes arrive.

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use candle_core::DType;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, sys};
use residency::Bytes;

use super::placer::{self, Allocates, Placed, Placer};
use super::pool::{PinnedBuffer, is_out_of_memory};
use super::quantize::{Arrived, Kernels, LaneMemory, Making, Workspace, WorkspaceSize};
use crate::convert;
use crate::load::{LoadError, LoadProgress, TensorSource};
use crate::reader::{self, Chunk, OpenFiles, Progress, Read};
use crate::timeline::Timeline;

/// Minimum of slots per lane: one is filled while others are copied from.
const MIN_SLOTS: usize = 2;

/// Alignment of the parts of a slot, for any dtype.
const PART_ALIGNMENT: usize = 64;

/// Name of the reading lanes' part in the timeline.
pub(super) const READING: &str = "read and copy";

/// The pinned ring with its streams.
#[derive(Debug)]
pub(super) struct Staging {
    lanes: Vec<Lane>,
    /// One for each lane, and one that maps memory. They stay as long as the card is open: with threads of its own a read of a block
    /// took 25 ms more.
    threads: rayon::ThreadPool,
    chunk: usize,
    /// The computing stream: memory is allocated in its order.
    stream: Arc<CudaStream>,
    /// Recorded when all allocations so far are usable, for any stream.
    allocated: CudaEvent,
    kernels: Kernels,
}

#[derive(Debug)]
struct Lane {
    stream: Arc<CudaStream>,
    slots: Vec<Slot>,
    next: usize,
    /// Recorded when copies are queued that somebody else waits for.
    queued: CudaEvent,
    /// Tensors that its stream has waited for: their memory is usable.
    waited_for: usize,
    /// Timing of its thread in this load.
    spent: LaneTiming,
}

/// Time that a lane's thread spent, for the log.
#[derive(Clone, Copy, Debug, Default)]
struct LaneTiming {
    /// Waiting for a slot that is being copied from: the link is the bottleneck.
    waiting: Duration,
    /// Reading files into slots: the page cache, or the disk, is the bottleneck.
    reading: Duration,
    /// Enqueueing copies and kernels.
    asking: Duration,
}

#[derive(Debug)]
struct Slot {
    memory: PinnedBuffer,
    /// Recorded after the last copy out of it, and the kernels that use the copy.
    copied: CudaEvent,
}

/// What a load reads, and where to.
#[derive(Clone, Copy)]
pub(super) struct Reading<'a, 'm> {
    pub(super) sources: &'a [TensorSource],
    pub(super) files: &'a OpenFiles,
    pub(super) memory: &'m dyn Allocates,
}

/// Is told what lanes queue of a read.
pub(super) trait Follows: Sync {
    /// Copies of so many bytes of these tensors, by name, are queued before this event.
    ///
    /// # Errors
    /// Those of the driver: they end the read.
    fn queued(&self, pieces: &[(&str, u64)], before: &CudaEvent) -> Result<(), LoadError>;
}

/// Memory on the card for what is quantized, and the number of lanes that it is enough for.
pub(super) struct Temporary {
    workspace: Option<Workspace>,
    lanes: usize,
}

/// A tensor with its memory.
#[derive(Debug)]
pub(super) struct Allocation<'a> {
    pub(super) source: &'a TensorSource,
    pub(super) pointer: sys::CUdeviceptr,
}

/// Unit of work of a lane.
enum Piece<'a> {
    /// One slot full of data to copy, usually of several tensors. With a slot per tensor, a lane would wait for the copies of
    /// others after every few bytes: that costs a third of the throughput for a model with many small tensors.
    Copy(Vec<SlotPart<'a>>),
    /// Numbers to quantize: one chunk, or the whole tensor if scales must be known first.
    Make {
        source: &'a TensorSource,
        place: Place,
        making: Making,
        chunks: Vec<Chunk<'a>>,
    },
}

impl<'a> Piece<'a> {
    /// The tensors of a piece of so many bytes on the card, by name, with the bytes of each.
    fn tensors(&self, bytes: u64) -> Vec<(&'a str, u64)> {
        match self {
            Piece::Copy(parts) => {
                let of_part = |part: &SlotPart<'a>| (part.source.name.as_str(), part.at.len() as u64);
                parts.iter().map(of_part).collect()
            }
            Piece::Make { source, .. } => vec![(source.name.as_str(), bytes)],
        }
    }
}

/// One read, and one copy to its final place.
struct SlotPart<'a> {
    source: &'a TensorSource,
    place: Place,
    read: Read<'a>,
    /// Byte range in the slot.
    at: Range<usize>,
    to: sys::CUdeviceptr,
}

/// Destination of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) pointer: sys::CUdeviceptr,
    /// Tensors allocated up to and including this one; 0 if its memory was usable before the load.
    pub(super) among: usize,
}

/// State shared by the lanes during a load.
#[derive(Clone, Copy)]
struct LoadContext<'a> {
    allocated: &'a CudaEvent,
    kernels: &'a Kernels,
    /// The load was cancelled: long work may stop early.
    cancelled: &'a AtomicBool,
}

/// Pinned memory that is not assigned to lanes yet.
#[derive(Debug)]
pub(super) struct PinnedRing {
    /// Slots by lane.
    lanes: Vec<Vec<PinnedBuffer>>,
    chunk: usize,
}

impl PinnedRing {
    /// About `total` bytes in chunks of about `chunk` bytes, for all reading threads. Pinning is slow: any thread may
    /// do it while the card is being prepared.
    pub(super) fn new(context: &CudaContext, total: Bytes, chunk: Bytes) -> Result<PinnedRing, DriverError> {
        let began = Instant::now();
        let chunk = (chunk.0.max(64 << 10) as usize).next_multiple_of(4096);
        let threads = reader::threads();
        let slots = (total.0 as usize / chunk / threads).max(MIN_SLOTS);
        let mut buffers = PinnedBuffer::several(context, threads * slots, chunk, threads)?.into_iter();
        let lanes = (0..threads)
            .map(|_| buffers.by_ref().take(slots).collect())
            .collect();
        Timeline::log(
            "open the card",
            "pin memory, on a thread of its own",
            began.elapsed(),
        );
        Ok(PinnedRing { lanes, chunk })
    }
}

impl Staging {
    /// Creates lanes over a ring. Memory is allocated in the order of `stream`.
    pub(super) fn new(
        stream: &Arc<CudaStream>,
        kernels: Kernels,
        ring: PinnedRing,
    ) -> Result<Staging, LoadError> {
        let context = stream.context();
        let slot = |memory: PinnedBuffer| -> Result<Slot, DriverError> {
            Ok(Slot {
                memory,
                // Lanes sleep until their slot is free: there may be more lanes than idle cores.
                copied: context.new_event(Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC))?,
            })
        };
        let lane = |slots: Vec<PinnedBuffer>| -> Result<Lane, DriverError> {
            Ok(Lane {
                stream: context.new_stream()?,
                slots: slots.into_iter().map(slot).collect::<Result<_, _>>()?,
                next: 0,
                queued: context.new_event(None)?,
                waited_for: 0,
                spent: LaneTiming::default(),
            })
        };
        let lanes: Result<Vec<Lane>, DriverError> = ring.lanes.into_iter().map(lane).collect();
        let lanes = lanes.map_err(lost)?;
        Ok(Staging {
            threads: reader::start_threads(lanes.len() + 1)?,
            lanes,
            chunk: ring.chunk,
            stream: Arc::clone(stream),
            allocated: context.new_event(None).map_err(lost)?,
            kernels,
        })
    }

    /// Bytes of pinned memory.
    pub(super) fn bytes(&self) -> Bytes {
        let slots: usize = self.lanes.iter().map(|lane| lane.slots.len()).sum();
        Bytes((slots * self.chunk) as u64)
    }

    /// Bytes of each buffer of pinned memory.
    pub(super) fn chunk(&self) -> usize {
        self.chunk
    }

    /// The buffers of pinned memory.
    pub(super) fn pinned(&self) -> impl Iterator<Item = &PinnedBuffer> {
        let slots = self.lanes.iter().flat_map(|lane| &lane.slots);
        slots.map(|slot| &slot.memory)
    }

    /// Minimum of temporary bytes on the card during a load of these sources, in addition to the tensors: those of one lane.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] if one of them is to be quantized in an unknown way, or does not fit the ring.
    pub(super) fn min_workspace(&self, sources: &[TensorSource]) -> Result<Bytes, LoadError> {
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

    /// Allocates temporary memory for loads of these sources if any of them is quantized, for as many lanes as fit in `room`: at
    /// least one. It is usable when this returns.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`]; as [`Staging::min_workspace`].
    pub(super) fn temporary(&self, sources: &[TensorSource], room: Bytes) -> Result<Temporary, LoadError> {
        let all = self.lanes.len();
        let makings = self.makings(sources)?;
        let fits = |lanes: &usize| {
            let size = self.workspace_size(&makings, *lanes);
            size.is_none_or(|size| size.bytes() <= room)
        };
        let lanes = (1..=all).rev().find(fits).unwrap_or(1);
        let Some(size) = self.workspace_size(&makings, lanes) else {
            return Ok(self.no_workspace());
        };
        if lanes < all {
            tracing::info!(lanes, all, "little memory is left to quantize in");
        }
        let total: Bytes = sources.iter().map(TensorSource::bytes_on_card).sum();
        let workspace = Workspace::new(size, &self.stream)
            .map_err(|error| out_of_memory_or_lost(error, size.bytes() + total))?;
        // Lanes use it without waiting for this stream.
        self.stream.synchronize().map_err(lost)?;
        Ok(Temporary {
            workspace: Some(workspace),
            lanes,
        })
    }

    /// For loads of which nothing is quantized: all lanes, without memory.
    fn no_workspace(&self) -> Temporary {
        Temporary {
            workspace: None,
            lanes: self.lanes.len(),
        }
    }

    /// Frees temporary memory. No load uses it any more.
    pub(super) fn end(&self, temporary: Temporary) -> Result<(), LoadError> {
        match temporary.workspace {
            Some(workspace) => workspace.close(&self.stream).map_err(lost),
            None => Ok(()),
        }
    }

    /// Allocates every source from `memory` and fills it, as [`Staging::load_with`] does. Temporary memory is at most `room`, or that
    /// of one lane, and is freed when this returns (unless the card is lost).
    pub(super) fn load<'a>(
        &mut self,
        reading: Reading<'a, '_>,
        made: &mut Vec<Allocation<'a>>,
        room: Bytes,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let temporary = self.temporary(reading.sources, room)?;
        let outcome = self.load_with(&temporary, reading, made, progress);
        match outcome {
            Err(LoadError::Lost(_)) => outcome,
            outcome => self.end(temporary).and(outcome),
        }
    }

    /// Reads sources to places that are usable once these events have happened, and has `then` wait for their copies, which may be under
    /// way when this returns. What is quantized is there by then: its temporary memory, of at most `room` or that of one lane, is freed.
    pub(super) fn load_between(
        &mut self,
        after: &[&CudaEvent],
        reading: Reading<'_, '_>,
        room: Bytes,
        then: &CudaStream,
    ) -> Result<(), LoadError> {
        for lane in &self.lanes {
            for event in after {
                lane.stream.wait(event).map_err(lost)?;
            }
        }
        let mut made = Vec::with_capacity(reading.sources.len());
        let mut go_on = |_| ControlFlow::Continue(());
        if self.min_workspace(reading.sources)? > Bytes::ZERO {
            return self.load(reading, &mut made, room, &mut go_on);
        }
        self.read(&self.no_workspace(), reading, &mut made, &mut go_on, None)?;
        for lane in &mut self.lanes {
            lane.queued.record(&lane.stream).map_err(lost)?;
            then.wait(&lane.queued).map_err(lost)?;
        }
        Ok(())
    }

    /// Reads sources to places that are usable, while `follower` is told what is queued. None of them is quantized at load. Copies may be
    /// under way when this returns.
    pub(super) fn read_following(
        &mut self,
        reading: Reading<'_, '_>,
        follower: &dyn Follows,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let mut made = Vec::with_capacity(reading.sources.len());
        // Whoever waited for the lanes may not want the read any more.
        let total = reading.sources.iter().map(TensorSource::bytes_on_card).sum();
        reader::report_progress(progress, Bytes::ZERO, total)?;
        self.read(&self.no_workspace(), reading, &mut made, progress, Some(follower))
    }

    /// Allocates every source from `memory` and fills it. Each allocation is pushed to `made` as soon as it exists, even if the
    /// load fails later. When this returns, no copy and no kernel is in flight (unless the card is lost). `temporary` was made for
    /// sources of which these are some.
    pub(super) fn load_with<'a>(
        &mut self,
        temporary: &Temporary,
        reading: Reading<'a, '_>,
        made: &mut Vec<Allocation<'a>>,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let outcome = self.read(temporary, reading, made, progress, None);
        self.finish()?;
        if matches!(outcome, Err(LoadError::Lost(_))) {
            return outcome;
        }
        let not_finite = match &temporary.workspace {
            Some(workspace) => workspace.take_not_finite().map_err(lost)?,
            None => None,
        };
        outcome?;
        match not_finite.and_then(|number| reading.sources.get(number)) {
            Some(source) => Err(LoadError::NotFinite {
                tensor: source.name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Waits until no copy and no kernel of the lanes is in flight.
    fn finish(&mut self) -> Result<(), LoadError> {
        let mut timeline = Timeline::begin(READING);
        for lane in &mut self.lanes {
            lane.stream.synchronize().map_err(lost)?;
            lane.waited_for = 0;
        }
        timeline.part("until all is copied");
        Ok(())
    }

    /// Reads every source and queues its copy.
    fn read<'a>(
        &mut self,
        temporary: &Temporary,
        reading: Reading<'a, '_>,
        made: &mut Vec<Allocation<'a>>,
        progress: Progress<'_>,
        follower: Option<&dyn Follows>,
    ) -> Result<(), LoadError> {
        let Reading {
            sources,
            files,
            memory,
        } = reading;
        let total = sources.iter().map(TensorSource::bytes_on_card).sum();
        let makings = self.makings(sources)?;
        let workspace = temporary.workspace.as_ref();
        let placer = Placer {
            sources,
            makings,
            memory,
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
        let shared = LoadContext {
            allocated: &self.allocated,
            kernels: &self.kernels,
            cancelled: &cancelled,
        };
        let workers = self
            .lanes
            .iter_mut()
            .take(temporary.lanes)
            .enumerate()
            .map(|(number, lane)| {
                let lane_memory = workspace.map(|workspace| workspace.lane_memory(number));
                move |piece: Result<Piece<'a>, LoadError>| {
                    let piece = piece?;
                    let bytes = lane.carry(&piece, lane_memory.as_ref(), shared)?;
                    if let Some(follower) = follower {
                        lane.queued.record(&lane.stream).map_err(lost)?;
                        follower.queued(&piece.tensors(bytes), &lane.queued)?;
                    }
                    Ok(bytes)
                }
            });
        let mut listening = |at: LoadProgress| -> ControlFlow<()> {
            let answer = progress(at);
            cancelled.fetch_or(answer.is_break(), Relaxed);
            answer
        };
        let mut timeline = Timeline::begin(READING);
        let threads = &self.threads;
        let outcome = threads.in_place_scope(|scope| {
            scope.spawn(move |_| placer.run(&to_lanes));
            reader::run(threads, pieces, workers, total, &mut listening)
        });
        timeline.part("until all is read");
        self.log_timing();
        if outcome.is_err() {
            // Whoever frees the places waits for no lane.
            self.finish()?;
        }
        outcome
    }
}

impl Staging {
    /// Logs the mean timing of the lanes in this load, and resets it.
    fn log_timing(&mut self) {
        let (mut sum, count) = (LaneTiming::default(), self.lanes.len().max(1) as u32);
        for lane in &mut self.lanes {
            let spent = std::mem::take(&mut lane.spent);
            sum.waiting += spent.waiting;
            sum.reading += spent.reading;
            sum.asking += spent.asking;
        }
        Timeline::log(READING, "a lane, waiting for the link", sum.waiting / count);
        Timeline::log(READING, "a lane, reading files", sum.reading / count);
        Timeline::log(READING, "a lane, asking for copies", sum.asking / count);
    }
}

impl Lane {
    /// Reads one piece and enqueues its copy, and its quantization. Returns its bytes on the card.
    fn carry(
        &mut self,
        piece: &Piece<'_>,
        lane_memory: Option<&LaneMemory>,
        shared: LoadContext<'_>,
    ) -> Result<u64, LoadError> {
        match piece {
            Piece::Copy(parts) => self.copy(parts, shared),
            Piece::Make {
                source,
                place,
                making,
                chunks,
            } => {
                let lane_memory = lane_memory.ok_or_else(|| {
                    LoadError::Unsupported(format!("tensor {} has no room to be quantized in", source.name))
                })?;
                self.make(source, *place, making, chunks, lane_memory, shared)
            }
        }
    }

    fn copy(&mut self, parts: &[SlotPart<'_>], shared: LoadContext<'_>) -> Result<u64, LoadError> {
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
            // SAFETY: `to` is in an allocation of the source's size, which is not freed before this lane's stream is
            // synchronized; the slot is not touched before `copied`, recorded after the copies, has completed.
            unsafe { slot.memory.copy_to(part.at.clone(), part.to, &self.stream) }.map_err(lost)?;
            length += part.at.len() as u64;
        }
        self.pass_on()?;
        self.spent.asking += began.elapsed();
        Ok(length)
    }

    /// Copies chunks to the lane's memory, each followed by the kernel that quantizes it.
    fn make(
        &mut self,
        source: &TensorSource,
        place: Place,
        making: &Making,
        chunks: &[Chunk<'_>],
        lane_memory: &LaneMemory,
        shared: LoadContext<'_>,
    ) -> Result<u64, LoadError> {
        let LoadContext {
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
                at: lane_memory.input(self.next),
                first: chunk.first,
                count: chunk.count,
            };
            // SAFETY: the lane's memory has as many bytes for this slot as the slot itself, and the work on the last copy to
            // them is done, since `copied` is recorded after it; otherwise as for `copy`.
            unsafe { slot.memory.copy_to(bytes, arrived.at, &self.stream) }.map_err(lost)?;
            // SAFETY: the allocation has the source's size, and the chunk is one of the source; neither allocation
            // nor the lane's memory is freed before this lane's stream is synchronized.
            unsafe { kernels.quantize(making, arrived, place.pointer, lane_memory, &self.stream) }
                .map_err(lost)?;
            self.pass_on()?;
            self.spent.asking += began.elapsed();
        }
        if making.is_nested() {
            // SAFETY: all chunks of the tensor precede this in the stream; those of the next tensor follow.
            unsafe { kernels.nest(making, place.pointer, lane_memory, &self.stream) }.map_err(lost)?;
        }
        Ok(share_of(source.bytes_on_card(), making.numbers(), chunks))
    }

    /// Waits until the next slot is no longer copied from.
    fn empty_slot(&mut self) -> Result<&mut [u8], LoadError> {
        let slot = &mut self.slots[self.next];
        let began = Instant::now();
        slot.copied.synchronize().map_err(lost)?;
        self.spent.waiting += began.elapsed();
        // SAFETY: the last copy out of the slot was waited for just now.
        Ok(unsafe { slot.memory.fill() })
    }

    /// Makes the stream wait until this place is usable.
    fn wait_for(&mut self, place: Place, allocated: &CudaEvent) -> Result<(), LoadError> {
        if self.waited_for < place.among {
            self.stream.wait(allocated).map_err(lost)?;
            self.waited_for = place.among;
        }
        Ok(())
    }

    /// Frees the slot when all work enqueued so far is done, and advances to the next.
    fn pass_on(&mut self) -> Result<(), LoadError> {
        self.slots[self.next].copied.record(&self.stream).map_err(lost)?;
        self.next = (self.next + 1) % self.slots.len();
        Ok(())
    }
}

/// Fills a part of a slot, one read after the other.
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

/// The share of these chunks in a tensor's bytes on the card. The shares of all chunks sum up exactly.
fn share_of(bytes: Bytes, numbers: usize, chunks: &[Chunk<'_>]) -> u64 {
    let until = |number: usize| (u128::from(bytes.0) * number as u128 / numbers.max(1) as u128) as u64;
    let of_chunk = |chunk: &Chunk<'_>| until(chunk.first + chunk.count) - until(chunk.first);
    chunks.iter().map(of_chunk).sum()
}

/// Splits allocated tensors into the work of lanes.
struct Pieces<'a> {
    batches: mpsc::Receiver<Result<Vec<Placed<'a>>, LoadError>>,
    files: &'a OpenFiles,
    chunk: usize,
    /// Allocated tensors that no lane has begun.
    placed: VecDeque<Placed<'a>>,
    /// Parts of the next slot to copy, until it is full.
    filling: Vec<SlotPart<'a>>,
    waiting: VecDeque<Piece<'a>>,
    has_failed: bool,
    /// Time in which lanes had nothing to fill.
    without_memory: Duration,
}

impl<'a> Pieces<'a> {
    /// Waits for the next allocated tensors; false if there are no more.
    fn await_memory(&mut self) -> Result<bool, LoadError> {
        let began = Instant::now();
        let batch = self.batches.recv();
        self.without_memory += began.elapsed();
        match batch {
            Ok(placed) => {
                self.placed.extend(placed?);
                Ok(true)
            }
            Err(mpsc::RecvError) => Ok(false), // no more tensors
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
            // Without numbers there are still tables.
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
                        Timeline::log(READING, "lanes without memory to fill", waited);
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

/// Classifies a failed allocation.
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

/// Error for any driver failure but a lack of memory: the process is no longer usable.
pub(super) fn lost(error: DriverError) -> LoadError {
    LoadError::Lost(error.to_string())
}
