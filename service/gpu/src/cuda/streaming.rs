//! Copies streamed blocks into the ring of a component while the card computes, on a stream of their own.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};
use residency::Bytes;

use super::host_blocks::{DiskRun, HostRun, unreadable};
use super::pool::PinnedRegion;
use super::staging::lost;
use crate::blocks::{BlockPlace, StreamedBlock};
use crate::load::LoadError;
use crate::reader;
use crate::schedule::Schedule;
use crate::tensors::{Owner, Streams};

/// A copy of a run of bytes to the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunTo {
    pub(super) run: HostRun,
    pub(super) to: sys::CUdeviceptr,
}

/// The copies of one block.
#[derive(Debug, Default)]
pub(super) struct Runs {
    pub(super) on_host: Vec<RunTo>,
    /// Runs of files, with their places on the card.
    pub(super) on_disk: Vec<(DiskRun, sys::CUdeviceptr)>,
}

impl Runs {
    fn disk_bytes(&self) -> u64 {
        self.on_disk.iter().map(|(run, _)| run.length).sum()
    }
}

/// Pinned memory that runs of files go through, for one block at a time.
#[derive(Debug)]
struct Through {
    region: PinnedRegion,
    /// Recorded when its bytes have been copied.
    copied: CudaEvent,
}

/// The stream of the blocks of one component.
#[derive(Debug)]
pub(super) struct CudaWeightStream {
    /// The streamed blocks, by their place.
    index: HashMap<BlockPlace, usize>,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    state: Mutex<StreamState>,
}

#[derive(Debug)]
struct StreamState {
    schedule: Schedule,
    blocks: Vec<BlockCopy>,
    /// Two, used by turns, if blocks are read from files: one is read into while the other is copied.
    through: Vec<Through>,
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
    /// The stream of these blocks, in the order of their use; `runs` has the copies of each.
    pub(super) fn new(
        blocks: &[StreamedBlock],
        runs: Vec<Runs>,
        (compute, copies): (&Arc<CudaStream>, &Arc<CudaStream>),
    ) -> Result<CudaWeightStream, LoadError> {
        let context = compute.context();
        let event = || context.new_event(None).map_err(lost);
        let largest = runs.iter().map(Runs::disk_bytes).max().unwrap_or(0);
        let through = |_| -> Result<Through, LoadError> {
            let no_memory = LoadError::HostMemory {
                needed: Bytes(largest),
                available: Bytes::ZERO,
            };
            Ok(Through {
                region: PinnedRegion::new(largest as usize, reader::threads()).ok_or(no_memory)?,
                copied: event()?,
            })
        };
        let slots = if largest > 0 { 0..2 } else { 0..0 };
        let through = slots.map(through).collect::<Result<_, _>>()?;
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
            state: Mutex::new(StreamState {
                schedule: Schedule::of(blocks),
                blocks: runs.into_iter().map(copy).collect::<Result<_, _>>()?,
                through,
            }),
        })
    }

    fn turn(&self, place: BlockPlace) -> Result<(), LoadError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let StreamState {
            schedule,
            blocks,
            through,
        } = &mut *state;
        let turn = schedule.enter(self.index.get(&place).copied());
        if let Some(left) = turn.left.and_then(|left| blocks.get(left)) {
            left.used.record(&self.compute).map_err(lost)?;
        }
        for copy in turn.copies {
            for before in copy.after.into_iter().filter_map(|before| blocks.get(before)) {
                self.copies.wait(&before.used).map_err(lost)?;
            }
            let Some(block) = blocks.get(copy.block) else {
                continue;
            };
            for RunTo { run, to } in &block.runs.on_host {
                // SAFETY: the run is pinned memory of the component, and its place in the ring has as many bytes; both outlive the
                // copy, since whoever frees them waits for this stream. The work that used these bytes before is over by then.
                unsafe { self.queue(run.from, run.length, *to) }.map_err(lost)?;
            }
            if !block.runs.on_disk.is_empty() {
                through.reverse();
                if let Some(through) = through.first() {
                    self.copy_from_files(&block.runs.on_disk, through)?;
                }
            }
            block.arrived.record(&self.copies).map_err(lost)?;
        }
        match turn.entered.and_then(|entered| blocks.get(entered)) {
            Some(entered) => self.compute.wait(&entered.arrived).map_err(lost),
            None => Ok(()),
        }
    }

    /// Reads runs of files, and queues their copies.
    fn copy_from_files(
        &self,
        runs: &[(DiskRun, sys::CUdeviceptr)],
        through: &Through,
    ) -> Result<(), LoadError> {
        through.copied.synchronize().map_err(lost)?;
        let mut at = 0;
        let mut placed = Vec::with_capacity(runs.len());
        for (run, to) in runs {
            placed.push((run, at, *to));
            at += run.length as usize;
        }
        let threads = reader::threads().min(placed.len()).max(1);
        let address = Address(through.region.address().as_ptr());
        std::thread::scope(|scope| -> Result<(), LoadError> {
            let readers: Vec<_> = placed
                .chunks(placed.len().div_ceil(threads))
                .map(|runs| {
                    scope.spawn(move || {
                        for (run, at, _) in runs {
                            let address = address;
                            // SAFETY: each run has bytes of its own in the pinned memory, which is as long as all of them and is not
                            // read by the card: the copies before have been waited for.
                            let into = unsafe {
                                std::slice::from_raw_parts_mut(address.0.add(*at), run.length as usize)
                            };
                            let read = run.file.read_exact_at(into, run.offset);
                            read.map_err(|error| unreadable(&run.path, error))?;
                        }
                        Ok::<(), LoadError>(())
                    })
                })
                .collect();
            for reader in readers {
                let gone = || LoadError::Lost("a thread that reads a file has ended".to_owned());
                reader.join().map_err(|_| gone())??;
            }
            Ok(())
        })?;
        for (run, at, to) in placed {
            // SAFETY: pinned memory of this stream, and a place in the ring of as many bytes; both outlive the copy, since the stream of
            // copies is waited for before either is freed.
            unsafe { self.queue(address.0.add(at).cast(), run.length as usize, to) }.map_err(lost)?;
        }
        through.copied.record(&self.copies).map_err(lost)
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

/// The address of pinned memory, for threads that each write bytes of their own.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: memory of the process and not of a thread; who writes where is for the user of the address.
unsafe impl Send for Address {}

impl Streams for CudaWeightStream {
    fn enter(&self, place: BlockPlace) -> Result<(), LoadError> {
        self.turn(place)
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
