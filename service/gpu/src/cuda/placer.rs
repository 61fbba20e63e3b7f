//! Allocates the tensors of a component ahead of the lanes that fill them: the driver maps some hundred megabytes at
//! a time, on a separate thread, so that no lane waits for memory while there is something to read.

use std::collections::HashMap;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, sys};
use residency::Bytes;

use super::pool::Pool;
use super::quantize::Making;
use super::staging::{Allocation, Place, READING, lost, out_of_memory_or_lost};
use crate::load::{LoadError, TensorSource};
use crate::timeline::Timeline;

/// Bytes of tensors mapped at a time. Driver calls contend with the enqueueing of copies, so that mapping a thousand
/// small tensors one by one costs more than copying them; and copying the first bytes overlaps with mapping the last.
const MAP_BATCH: u64 = 512 << 20;

/// Batches allocated ahead of the lanes.
pub(super) const AHEAD: usize = 1;

/// Alignment of the driver's allocations.
const ALIGNMENT: u64 = 512;

/// A tensor with its memory.
pub(super) struct Placed<'a> {
    pub(super) source: &'a TensorSource,
    /// How the tensor is quantized; `None` if it is not.
    pub(super) making: Option<Making>,
    pub(super) place: Place,
}

/// Memory on the card for the tensors of a load.
pub(super) trait Allocates: Sync {
    /// Prepares memory for the next `bytes` bytes.
    fn map(&self, bytes: u64, stream: &CudaStream) -> Result<(), DriverError>;

    /// The place of a tensor.
    fn allocate(&self, source: &TensorSource, stream: &CudaStream) -> Result<sys::CUdeviceptr, DriverError>;

    /// Whether all places were usable before the load, so that no copy has to wait for the work that is queued on the stream.
    fn is_usable(&self) -> bool {
        false
    }
}

impl Allocates for Pool {
    fn map(&self, bytes: u64, stream: &CudaStream) -> Result<(), DriverError> {
        Pool::map(self, bytes, stream)
    }

    fn allocate(&self, source: &TensorSource, stream: &CudaStream) -> Result<sys::CUdeviceptr, DriverError> {
        Pool::allocate(self, source.bytes_on_card().0, stream)
    }
}

/// Places that are there already, by the names of the tensors.
pub(super) struct Places<'a>(pub(super) HashMap<&'a str, sys::CUdeviceptr>);

impl Allocates for Places<'_> {
    fn map(&self, _: u64, _: &CudaStream) -> Result<(), DriverError> {
        Ok(())
    }

    fn allocate(&self, source: &TensorSource, _: &CudaStream) -> Result<sys::CUdeviceptr, DriverError> {
        let place = self.0.get(source.name.as_str()).copied();
        place.ok_or(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))
    }

    fn is_usable(&self) -> bool {
        true
    }
}

/// Allocates the tensors of a load, in order.
pub(super) struct Placer<'a, 'b> {
    pub(super) sources: &'a [TensorSource],
    pub(super) makings: Vec<Option<Making>>,
    pub(super) memory: &'b dyn Allocates,
    pub(super) stream: &'b CudaStream,
    /// Recorded after the allocations of each batch, before the batch is sent.
    pub(super) allocated: &'b CudaEvent,
    /// Each allocation is pushed as soon as it exists.
    pub(super) made: &'b mut Vec<Allocation<'a>>,
}

impl<'a> Placer<'a, '_> {
    /// Sends all tensors in batches, until none are left, an allocation fails (the error is sent too), or the
    /// receiver is gone.
    pub(super) fn run(mut self, to: &SyncSender<Result<Vec<Placed<'a>>, LoadError>>) {
        let total: Bytes = self.sources.iter().map(TensorSource::bytes_on_card).sum();
        let makings = std::mem::take(&mut self.makings);
        let mut sources = self.sources.iter().zip(makings).peekable();
        let (mut booked, mut mapping) = (Bytes::ZERO, Duration::ZERO);
        while sources.peek().is_some() {
            let began = Instant::now();
            let (mut batch, mut bytes, left) = (Vec::new(), 0, total - booked);
            while bytes < MAP_BATCH
                && let Some((source, making)) = sources.next()
            {
                bytes += source.bytes_on_card().0.max(1).next_multiple_of(ALIGNMENT);
                booked += source.bytes_on_card();
                batch.push((source, making));
            }
            let placed = self.place(batch, bytes, left);
            mapping += began.elapsed();
            let is_last = placed.is_err();
            if to.send(placed).is_err() || is_last {
                break;
            }
        }
        Timeline::log(READING, "map memory, beside the lanes", mapping);
    }

    /// Allocates one batch of `bytes`; `left` are the bytes that the load still has to allocate, this batch included.
    fn place(
        &mut self,
        batch: Vec<(&'a TensorSource, Option<Making>)>,
        bytes: u64,
        mut left: Bytes,
    ) -> Result<Vec<Placed<'a>>, LoadError> {
        self.stream.context().bind_to_thread().map_err(lost)?;
        self.memory.map(bytes, self.stream).map_err(lost)?;
        let among = match self.memory.is_usable() {
            true => 0,
            false => self.made.len() + batch.len(),
        };
        let mut placed = Vec::with_capacity(batch.len());
        for (source, making) in batch {
            let bytes = source.bytes_on_card();
            let pointer = self.memory.allocate(source, self.stream);
            let pointer = pointer.map_err(|error| out_of_memory_or_lost(error, left))?;
            self.made.push(Allocation { source, pointer });
            left -= bytes;
            if making.is_some_and(|making| making.numbers() == 0) {
                // SAFETY: the allocation has this length. (No kernel writes the scales of rows without numbers.)
                unsafe { sys::cuMemsetD8Async(pointer, 0, bytes.0 as usize, self.stream.cu_stream()) }
                    .result()
                    .map_err(lost)?;
            }
            let place = Place { pointer, among };
            placed.push(Placed {
                source,
                making,
                place,
            });
        }
        if among > 0 {
            self.allocated.record(self.stream).map_err(lost)?;
        }
        Ok(placed)
    }
}
