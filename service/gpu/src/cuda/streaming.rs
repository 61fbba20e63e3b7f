//! Copies streamed blocks into the ring of a component while the card computes, on a stream of their own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};
use residency::Bytes;

use super::host_blocks::HostRun;
use super::staging::lost;
use crate::blocks::{BlockPlace, StreamedBlock};
use crate::load::LoadError;
use crate::schedule::Schedule;
use crate::tensors::{Owner, Streams};

/// A copy of a run of bytes to the card.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunTo {
    pub(super) run: HostRun,
    pub(super) to: sys::CUdeviceptr,
}

/// The stream of the blocks of one component.
#[derive(Debug)]
pub(super) struct CudaWeightStream {
    /// The streamed blocks, by their place.
    index: HashMap<BlockPlace, usize>,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    on_host: Bytes,
    state: Mutex<StreamState>,
}

#[derive(Debug)]
struct StreamState {
    schedule: Schedule,
    blocks: Vec<BlockCopy>,
}

#[derive(Debug)]
struct BlockCopy {
    runs: Vec<RunTo>,
    /// Recorded when its bytes are in the ring.
    arrived: CudaEvent,
    /// Recorded when the work that uses them is over.
    used: CudaEvent,
}

impl CudaWeightStream {
    /// The stream of these blocks, in the order of their use; `runs` has the copies of each.
    pub(super) fn new(
        blocks: &[StreamedBlock],
        runs: Vec<Vec<RunTo>>,
        (compute, copies): (&Arc<CudaStream>, &Arc<CudaStream>),
        on_host: Bytes,
    ) -> Result<CudaWeightStream, DriverError> {
        let context = compute.context();
        let copy = |runs: Vec<RunTo>| -> Result<BlockCopy, DriverError> {
            Ok(BlockCopy {
                runs,
                arrived: context.new_event(None)?,
                used: context.new_event(None)?,
            })
        };
        Ok(CudaWeightStream {
            index: blocks.iter().map(|block| block.place).zip(0..).collect(),
            compute: Arc::clone(compute),
            copies: Arc::clone(copies),
            on_host,
            state: Mutex::new(StreamState {
                schedule: Schedule::of(blocks),
                blocks: runs.into_iter().map(copy).collect::<Result<_, _>>()?,
            }),
        })
    }

    fn turn(&self, place: BlockPlace) -> Result<(), DriverError> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let StreamState { schedule, blocks } = &mut *state;
        let turn = schedule.enter(self.index.get(&place).copied());
        if let Some(left) = turn.left.and_then(|left| blocks.get(left)) {
            left.used.record(&self.compute)?;
        }
        for copy in turn.copies {
            for before in copy.after.into_iter().filter_map(|before| blocks.get(before)) {
                self.copies.wait(&before.used)?;
            }
            let Some(block) = blocks.get(copy.block) else {
                continue;
            };
            for RunTo { run, to } in &block.runs {
                // SAFETY: the run is pinned memory of the component, and its place in the ring has as many bytes; both outlive the
                // copy, since whoever frees them waits for this stream. The work that used these bytes before is over by then.
                unsafe { sys::cuMemcpyHtoDAsync_v2(*to, run.from, run.length, self.copies.cu_stream()) }
                    .result()?;
            }
            block.arrived.record(&self.copies)?;
        }
        match turn.entered.and_then(|entered| blocks.get(entered)) {
            Some(entered) => self.compute.wait(&entered.arrived),
            None => Ok(()),
        }
    }
}

impl Streams for CudaWeightStream {
    fn enter(&self, place: BlockPlace) -> Result<(), LoadError> {
        self.turn(place).map_err(lost)
    }

    fn bytes_on_host(&self) -> Bytes {
        self.on_host
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
