//! Copies streamed blocks into the ring of a component while the card computes, on a stream of their own.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};
use residency::Bytes;

use super::arriving::Arriving;
use super::host_blocks::{HostBlocks, RunTo};
use super::placer::Places;
use super::staging::{Follows, Reading, Staging, lost};
use crate::blocks::{BlockPlace, StreamedBlock};
use crate::load::{LoadError, TensorSource};
use crate::reader::{OpenFiles, Progress};
use crate::schedule::Schedule;
use crate::tensors::{Owner, Streams};

/// A tensor that is read from its files, and its place on the card.
#[derive(Clone, Debug)]
pub(super) struct ReadTo {
    /// Index of the tensor in its component.
    pub(super) tensor: usize,
    pub(super) source: TensorSource,
    pub(super) to: sys::CUdeviceptr,
}

/// How the tensors of one block reach the card.
#[derive(Debug, Default)]
pub(super) struct Runs {
    /// Runs of pinned memory.
    pub(super) on_host: Vec<RunTo>,
    /// Tensors that are held nowhere.
    pub(super) read: Vec<ReadTo>,
    /// Tensors that are to be held. The first copy is read from the files, so that a first pass waits for no registration; the second
    /// registers their pages.
    pub(super) deferred: Vec<ReadTo>,
    was_read: bool,
}

impl Runs {
    /// Called before each copy of the block. From the second on, what was deferred is held.
    fn begin_copy(&mut self, host: &Mutex<HostBlocks>) {
        if !std::mem::replace(&mut self.was_read, true) || self.deferred.is_empty() {
            return;
        }
        let deferred = std::mem::take(&mut self.deferred);
        let mut host = host.lock().unwrap_or_else(PoisonError::into_inner);
        if !host.register(deferred.iter().map(|tensor| &tensor.source)) {
            tracing::info!(
                "pages of files cannot be registered with the driver: blocks are read from their files"
            );
            self.read.extend(deferred);
            return;
        }
        for ReadTo { tensor, source, to } in &deferred {
            self.on_host.extend(host.runs(*tensor, source, *to));
        }
    }

    /// What is read now.
    fn to_read(&self) -> Vec<&ReadTo> {
        self.read.iter().chain(&self.deferred).collect()
    }
}

/// Reads tensors from the files of a component while a stage runs. The files stay open, so that one that is replaced by another keeps
/// what was opened.
pub(super) struct FileSource {
    pub(super) staging: Arc<Mutex<Staging>>,
    pub(super) files: Arc<OpenFiles>,
}

impl std::fmt::Debug for FileSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileSource").finish_non_exhaustive()
    }
}

/// Bytes of the card in which tensors are made while a stage runs: for some reading threads, out of the card's headroom.
const ROOM_TO_MAKE: Bytes = Bytes::mib(64);

impl FileSource {
    /// Reads tensors to their places, which are usable once these events have happened, and has `then` wait for them.
    fn read(&self, tensors: &[&ReadTo], after: &[&CudaEvent], then: &CudaStream) -> Result<(), LoadError> {
        self.reading(tensors, |staging, reading| {
            staging.load_between(after, reading, ROOM_TO_MAKE, then)
        })
    }

    /// Reads tensors to their places, which are usable. `follower` is told what is queued; none of it has to be made at load.
    pub(super) fn read_with(
        &self,
        tensors: &[&ReadTo],
        follower: &dyn Follows,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        self.reading(tensors, |staging, reading| {
            staging.read_following(reading, follower, progress)
        })
    }

    fn reading<T>(&self, tensors: &[&ReadTo], read: impl FnOnce(&mut Staging, Reading<'_, '_>) -> T) -> T {
        let sources: Vec<TensorSource> = tensors.iter().map(|tensor| tensor.source.clone()).collect();
        let places = sources.iter().map(|source| source.name.as_str());
        let places = Places(places.zip(tensors.iter().map(|tensor| tensor.to)).collect());
        let reading = Reading {
            sources: &sources,
            files: &self.files,
            memory: &places,
        };
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        read(&mut staging, reading)
    }
}

/// The stream of the blocks of one component.
#[derive(Debug)]
pub(super) struct CudaWeightStream {
    /// The streamed blocks, by their place.
    index: HashMap<BlockPlace, usize>,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    files: Arc<FileSource>,
    host: Arc<Mutex<HostBlocks>>,
    state: Mutex<StreamState>,
    /// Blocks that have a place of their own and are not there yet.
    arriving: Option<Arriving>,
}

#[derive(Debug)]
struct StreamState {
    schedule: Schedule,
    blocks: Vec<BlockCopy>,
}

#[derive(Debug)]
struct BlockCopy {
    runs: Runs,
    /// Recorded when its bytes are in the ring.
    arrived: CudaEvent,
    /// Recorded when the work that uses them is over.
    used: CudaEvent,
}

impl CudaWeightStream {
    /// The stream of these blocks, in the order of their use; `runs` has the copies of each. `arriving` are blocks that have places of
    /// their own.
    pub(super) fn new(
        blocks: &[StreamedBlock],
        runs: Vec<Runs>,
        arriving: Option<Arriving>,
        (files, host): (Arc<FileSource>, Arc<Mutex<HostBlocks>>),
        (compute, copies): (&Arc<CudaStream>, &Arc<CudaStream>),
    ) -> Result<CudaWeightStream, LoadError> {
        let context = compute.context();
        let event = || context.new_event(None).map_err(lost);
        let copy = |runs: Runs| -> Result<BlockCopy, LoadError> {
            Ok(BlockCopy {
                runs,
                arrived: event()?,
                used: event()?,
            })
        };
        Ok(CudaWeightStream {
            index: blocks.iter().map(|block| block.place).zip(0..).collect(),
            compute: Arc::clone(compute),
            copies: Arc::clone(copies),
            files,
            host,
            state: Mutex::new(StreamState {
                schedule: Schedule::of(blocks),
                blocks: runs.into_iter().map(copy).collect::<Result<_, _>>()?,
            }),
            arriving,
        })
    }

    /// Whether there are blocks that have a place of their own and are not there yet.
    pub(super) fn has_unread(&self) -> bool {
        self.arriving.as_ref().is_some_and(Arriving::has_unread)
    }

    /// A stage takes the component: the blocks that are not there yet begin to be read, unless others pass through the ring.
    pub(super) fn begin(&self) {
        if let Some(arriving) = self.arriving.as_ref().filter(|_| self.index.is_empty()) {
            arriving.begin();
        }
    }

    /// The stage is over: what it has not come to is left to the next.
    pub(super) fn pause(&self) {
        if let Some(arriving) = &self.arriving {
            arriving.pause();
        }
    }

    /// Reads the blocks that no stage has come to.
    pub(super) fn read_the_rest(&self) -> Result<(), LoadError> {
        match &self.arriving {
            Some(arriving) => arriving.wait_for_all(&self.compute),
            None => Ok(()),
        }
    }

    /// Reads no more of what is still to come, and waits for its copies: the component leaves the card.
    ///
    /// # Errors
    /// The card is lost.
    pub(super) fn stop(&self) -> Result<(), LoadError> {
        self.arriving.as_ref().map_or(Ok(()), Arriving::stop)
    }

    fn turn(&self, place: BlockPlace) -> Result<(), LoadError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.index.get(&place).copied();
        let turn = state.schedule.enter(index);
        for copy in &turn.copies {
            if let Some(block) = state.blocks.get_mut(copy.block) {
                block.runs.begin_copy(&self.host);
            }
        }
        let blocks = &state.blocks;
        if let Some(left) = turn.left.and_then(|left| blocks.get(left)) {
            left.used.record(&self.compute).map_err(lost)?;
        }
        for copy in turn.copies {
            let Some(block) = blocks.get(copy.block) else {
                continue;
            };
            let before = || copy.after.iter().filter_map(|before| blocks.get(*before));
            for before in before() {
                self.copies.wait(&before.used).map_err(lost)?;
            }
            for RunTo { run, to } in &block.runs.on_host {
                // SAFETY: the run is pinned memory of the component, and its place in the ring has as many bytes; both outlive the
                // copy, since whoever frees them waits for this stream. The work that used these bytes before is over by then.
                unsafe { self.queue(run.from, run.length, *to) }.map_err(lost)?;
            }
            let read = block.runs.to_read();
            if !read.is_empty() {
                let after: Vec<&CudaEvent> = before()
                    .flat_map(|before| [&before.arrived, &before.used])
                    .collect();
                self.files.read(&read, &after, &self.copies)?;
            }
            block.arrived.record(&self.copies).map_err(lost)?;
        }
        if let Some(entered) = turn.entered.and_then(|entered| blocks.get(entered)) {
            self.compute.wait(&entered.arrived).map_err(lost)?;
        }
        drop(state);
        match (&self.arriving, self.index.is_empty()) {
            (None, _) => Ok(()),
            (Some(arriving), true) => arriving.wait_for(place, &self.compute),
            (Some(arriving), false) => arriving.read_one(place, &self.compute),
        }
    }

    /// Queues a copy to the card.
    ///
    /// # Safety
    /// `from` is pinned memory of `length` bytes, `to` memory of the card of as many; both outlive the copy.
    unsafe fn queue(
        &self,
        from: *const c_void,
        length: usize,
        to: sys::CUdeviceptr,
    ) -> Result<(), DriverError> {
        // SAFETY: as the caller promises.
        unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, length, self.copies.cu_stream()) }.result()
    }
}

impl Streams for CudaWeightStream {
    fn enter(&self, place: BlockPlace) -> Result<(), LoadError> {
        self.turn(place)
    }

    fn is_whole(&self) -> bool {
        self.index.is_empty() && self.arriving.as_ref().is_none_or(Arriving::is_over)
    }
}

/// Tensors whose memory is a region's: they must not free it.
#[derive(Debug)]
pub(super) struct Unowned(pub(super) Vec<Tensor>);

impl Owner for Unowned {}

impl Drop for Unowned {
    fn drop(&mut self) {
        for tensor in self.0.drain(..) {
            if let Err(error) = tensor.inplace_op1(&LetGo) {
                tracing::error!(%error, "a tensor keeps memory that is not its own");
                std::mem::forget(tensor); // it must not free what it does not own
            }
        }
    }
}

/// Takes the memory from a tensor without freeing it, and leaves one number in its place.
struct LetGo;

impl InplaceOp1 for LetGo {
    fn name(&self) -> &'static str {
        "let go of memory"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let stream = storage.device.cuda_stream();
        macro_rules! replaced {
            ($slice:ident) => {{
                // SAFETY: one number, which nothing reads.
                let one = unsafe { stream.alloc(1) }.map_err(candle_core::Error::wrap)?;
                std::mem::replace($slice, one).leak();
            }};
        }
        match &mut storage.slice {
            CudaStorageSlice::U8(slice) => replaced!(slice),
            CudaStorageSlice::I64(slice) => replaced!(slice),
            CudaStorageSlice::F16(slice) => replaced!(slice),
            CudaStorageSlice::BF16(slice) => replaced!(slice),
            CudaStorageSlice::F32(slice) => replaced!(slice),
            CudaStorageSlice::F64(slice) => replaced!(slice),
            _ => candle_core::bail!("a tensor of a dtype that is never loaded"),
        }
        Ok(())
    }
}
