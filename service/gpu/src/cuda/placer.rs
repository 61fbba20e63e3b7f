//! Memory for the tensors of a component, ahead of the lanes that fill it: the driver maps some hundred megabytes at a time,
//! on a thread of its own, so that no lane waits for memory while there is something to read.

use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, sys};
use residency::Bytes;

use super::pool::Pool;
use super::quantize::Making;
use super::staging::{Allocation, Place, READING, lost, out_of_memory_or_lost};
use crate::load::{LoadError, TensorSource};
use crate::timeline::Timeline;

/// Memory is mapped for so many bytes of tensors at a time. Each call into the driver while copies are asked for waits its
/// turn, so that a thousand small tensors, mapped one by one, cost more than their copies; and the first bytes travel while
/// memory for the last is mapped.
const MAPPED_AT_ONCE: u64 = 512 << 20;

/// Batches that have their memory before a lane asks for them.
pub(super) const AHEAD: usize = 1;

/// Addresses that the driver gives out are multiples of this.
const ALIGNMENT: u64 = 512;

/// A tensor that has its memory.
pub(super) struct Placed<'a> {
    pub(super) source: &'a TensorSource,
    /// How it is made, if it is not taken as it is stored.
    pub(super) making: Option<Making>,
    pub(super) place: Place,
}

/// Allocates the tensors of a load, in their order.
pub(super) struct Placer<'a, 'b> {
    pub(super) sources: &'a [TensorSource],
    pub(super) makings: Vec<Option<Making>>,
    pub(super) pool: &'b Pool,
    pub(super) stream: &'b CudaStream,
    /// Recorded behind each batch, before it is handed on.
    pub(super) allocated: &'b CudaEvent,
    /// Each allocation is here as soon as it exists.
    pub(super) made: &'b mut Vec<Allocation<'a>>,
}

impl<'a> Placer<'a, '_> {
    /// Hands on all tensors by batches, until there are none left, one has no memory, which is handed on as well, or nobody
    /// listens.
    pub(super) fn run(mut self, to: &SyncSender<Result<Vec<Placed<'a>>, LoadError>>) {
        let total: Bytes = self.sources.iter().map(TensorSource::bytes_on_card).sum();
        let makings = std::mem::take(&mut self.makings);
        let mut sources = self.sources.iter().zip(makings).peekable();
        let (mut booked, mut mapping) = (Bytes::ZERO, Duration::ZERO);
        while sources.peek().is_some() {
            let began = Instant::now();
            let (mut batch, mut bytes, left) = (Vec::new(), 0, total - booked);
            while bytes < MAPPED_AT_ONCE
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
        Timeline::tell(READING, "map memory, beside the lanes", mapping);
    }

    /// Allocates one batch, of so many bytes; `left` is what the load lacks before it.
    fn place(
        &mut self,
        batch: Vec<(&'a TensorSource, Option<Making>)>,
        bytes: u64,
        mut left: Bytes,
    ) -> Result<Vec<Placed<'a>>, LoadError> {
        self.stream.context().bind_to_thread().map_err(lost)?;
        self.pool.map(bytes, self.stream).map_err(lost)?;
        let among = self.made.len() + batch.len();
        let mut placed = Vec::with_capacity(batch.len());
        for (source, making) in batch {
            let bytes = source.bytes_on_card();
            let pointer = self.pool.allocate(bytes.0, self.stream);
            let pointer = pointer.map_err(|error| out_of_memory_or_lost(error, left))?;
            self.made.push(Allocation { source, pointer });
            left -= bytes;
            if making.is_some_and(|making| making.numbers() == 0) {
                // SAFETY: the allocation is of so many bytes. No kernel comes to the scales of rows without numbers.
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
        self.allocated.record(self.stream).map_err(lost)?;
        Ok(placed)
    }
}
