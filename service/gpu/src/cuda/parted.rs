//! Components that can be on the card in part. Every block has a piece of memory of its own, and so has the ring; whatever is in no
//! block shares one. Tensors lie in a block as they do in the ring, so that products over several of them are the same products
//! wherever the block is.

use std::collections::{HashMap, HashSet};
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use cudarc::driver::{CudaEvent, DriverError, sys};
use residency::{Bytes, Component, HostMemory, HostShare, Part};

use super::arriving::{self, Unread};
use super::host_blocks::{self, HostBlocks, RunTo};
use super::placer::Places;
use super::pool::is_out_of_memory;
use super::region::Region;
use super::staging::{Reading, Staging, Temporary, lost};
use super::streaming::{CudaWeightStream, FileSource, ReadTo, Runs, Unowned};
use super::{CudaCard, LOAD_MARGIN, tensor_at};
use crate::blocks::{ALIGNMENT, BlockPlace, Placement, RING_BLOCKS, StreamedBlock, Uses};
use crate::card::{Arrival, GpuError, Unloaded};
use crate::host_tier::HoldsMemory;
use crate::load::{LoadError, LoadPlan, LoadProgress, TensorSource};
use crate::reader::{self, LoadedFrom, OpenFiles, Progress};
use crate::tensors::{ComponentTensors, Streams, WeightStream};
use crate::timeline::Timeline;

/// A component that can be on the card in part.
pub(super) struct PartedComponent {
    component: Component,
    pub(super) tensors: Arc<ComponentTensors>,
    pub(super) booked: Bytes,
    part: Part,
    from: LoadedFrom,
    /// Its files, as they were when it was loaded.
    files: Arc<OpenFiles>,
    pub(super) stream: Option<Arc<CudaWeightStream>>,
    layout: RegionLayout,
    region: Region,
    /// Shared with the stream.
    host: Arc<Mutex<HostBlocks>>,
}

impl PartedComponent {
    /// Bytes that its region has from the driver.
    pub(super) fn reserved(&self) -> Bytes {
        self.region.allocated()
    }
}

/// The blocks of a component in the machine's memory, with what they were read from.
pub(super) struct KeptBlocks {
    component: Component,
    from: LoadedFrom,
    host: Arc<Mutex<HostBlocks>>,
}

fn locked(host: &Mutex<HostBlocks>) -> MutexGuard<'_, HostBlocks> {
    // Each of its changes is whole, even if what came after it panicked.
    host.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HoldsMemory for KeptBlocks {
    fn bytes(&self) -> Bytes {
        locked(&self.host).bytes()
    }
}

/// The offsets of everything in the region of a component.
struct RegionLayout {
    /// Tensors that are in no block, with their places.
    rest: Vec<(usize, u64)>,
    rest_bytes: u64,
    /// All blocks, streamed or not.
    blocks: Vec<StreamedBlock>,
    /// Offset of each block.
    offsets: Vec<u64>,
    ring: u64,
}

impl RegionLayout {
    fn new(
        context: &Arc<cudarc::driver::CudaContext>,
        sources: &[TensorSource],
    ) -> Result<(RegionLayout, Region), DriverError> {
        let all = Placement::of_all(sources);
        let mut rest_bytes = 0;
        let place = |tensor: usize| {
            let at = rest_bytes;
            rest_bytes += sources[tensor].bytes_on_card().0.next_multiple_of(ALIGNMENT);
            (tensor, at)
        };
        let rest = all.staying(sources).into_iter().map(place).collect();
        let blocks = all.streamed;
        let largest = blocks.iter().map(|block| block.bytes).max().unwrap_or(0);
        let lengths = std::iter::once(rest_bytes)
            .chain(blocks.iter().map(|block| block.bytes))
            .chain([RING_BLOCKS * largest]);
        let (region, offsets) = Region::new(context, &lengths.collect::<Vec<_>>())?;
        let layout = RegionLayout {
            rest,
            rest_bytes,
            ring: offsets.last().copied().unwrap_or(0),
            offsets: offsets[1..=blocks.len()].to_vec(),
            blocks,
        };
        Ok((layout, region))
    }

    /// The blocks that stay in a part, with their offsets.
    fn staying<'a>(&'a self, placement: &'a Placement) -> impl Iterator<Item = (&'a StreamedBlock, u64)> {
        let blocks = self.blocks.iter().zip(self.offsets.iter().copied());
        blocks.filter(|(block, _)| !placement.streams(block.place))
    }

    /// Allocates what a part needs. What was there before stays.
    fn allocate(&self, region: &mut Region, placement: &Placement) -> Result<(), DriverError> {
        region.allocate(0, self.rest_bytes)?;
        for (block, offset) in self.staying(placement) {
            region.allocate(offset, block.bytes)?;
        }
        region.allocate(self.ring, placement.ring_bytes)
    }

    /// The address of each tensor in a part.
    fn addresses(&self, region: &Region, placement: &Placement) -> HashMap<usize, sys::CUdeviceptr> {
        let rest = self.rest.iter().map(|(tensor, at)| (*tensor, region.at(*at)));
        let staying = self.staying(placement).flat_map(|(block, offset)| {
            let tensors = block.tensors.iter();
            tensors.map(move |(tensor, at)| (*tensor, region.at(offset + at)))
        });
        let streamed = placement.streamed.iter().flat_map(|block| {
            let tensors = block.tensors.iter();
            tensors.map(move |(tensor, at)| (*tensor, region.at(self.ring + block.at + at)))
        });
        rest.chain(staying).chain(streamed).collect()
    }
}

/// The tensors that pass through the ring and are held in the machine's memory, if there is room: not those that are used once in a stage
/// and lie in a file as they are used. To read these costs no more than to copy them.
fn to_hold(placement: &Placement, sources: &[TensorSource]) -> Vec<usize> {
    let blocks = placement.streamed.iter().flat_map(|block| {
        let tensors = block.tensors.iter();
        tensors.map(|(tensor, _)| (block.place.uses, *tensor))
    });
    let held = blocks
        .filter(|(uses, tensor)| *uses == Uses::EachPass || !host_blocks::is_as_stored(&sources[*tensor]));
    held.map(|(_, tensor)| tensor).collect()
}

/// Bytes that are read before a load leaves the rest to the first pass: as many tell how long the rest takes.
const READ_AT_FIRST: Bytes = Bytes::mib(256);
/// Of all that stays, at least this part is read at first.
const SHARE_AT_FIRST: u64 = 8;
/// The longest that the rest may take, in seconds: a client sees no progress of it.
const LEFT_SECONDS: f64 = 1.0;

/// What stays on the card, in the order in which it is read.
#[derive(Default)]
struct Staying {
    /// Read by the load.
    now: Vec<usize>,
    /// Read by the load too, or when a stage comes to it.
    later: Vec<(BlockPlace, Vec<usize>)>,
}

impl Staying {
    /// What is read of a part: all that stays and is not in the machine's memory.
    fn of(
        layout: &RegionLayout,
        placement: &Placement,
        host: &HostBlocks,
        sources: &[TensorSource],
        arrival: Arrival,
    ) -> Staying {
        let is_read = |tensor: &usize| !host.has(*tensor, &sources[*tensor]);
        let mut staying = Staying::default();
        let rest = layout.rest.iter().map(|(tensor, _)| *tensor);
        staying.now.extend(rest.filter(is_read));
        let blocks: Vec<(BlockPlace, Vec<usize>)> = layout
            .staying(placement)
            .map(|(block, _)| {
                let tensors = block.tensors.iter().map(|(tensor, _)| *tensor);
                (block.place, tensors.filter(is_read).collect())
            })
            .filter(|(_, tensors): &(BlockPlace, Vec<usize>)| !tensors.is_empty())
            .collect();
        let bytes = |tensors: &[usize]| -> Bytes {
            let of = |tensor: &usize| sources[*tensor].bytes_on_card();
            tensors.iter().map(of).sum()
        };
        let all: Bytes = blocks.iter().map(|(_, tensors)| bytes(tensors)).sum();
        let at_first = match arrival {
            Arrival::Now => Bytes(u64::MAX),
            Arrival::WithFirstPass => Bytes(all.0 / SHARE_AT_FIRST).max(READ_AT_FIRST),
        };
        let mut read = Bytes::ZERO;
        for (place, tensors) in blocks {
            if read < at_first {
                read += bytes(&tensors);
                staying.now.extend(tensors);
            } else {
                staying.later.push((place, tensors));
            }
        }
        staying
    }

    fn later(&self) -> impl Iterator<Item = usize> {
        self.later.iter().flat_map(|(_, tensors)| tensors.iter().copied())
    }

    /// The blocks that are left to the first pass, with the places of their tensors.
    fn unread(&self, sources: &[TensorSource], addresses: &HashMap<usize, sys::CUdeviceptr>) -> Unread {
        let read_to = |tensor: &usize| {
            Some(ReadTo {
                tensor: *tensor,
                source: sources[*tensor].clone(),
                to: *addresses.get(tensor)?,
            })
        };
        let block = |(place, tensors): &(BlockPlace, Vec<usize>)| {
            (*place, tensors.iter().filter_map(read_to).collect())
        };
        self.later.iter().map(block).collect()
    }
}

/// What a load reads from, and where to.
struct Filling<'a> {
    sources: &'a [TensorSource],
    addresses: HashMap<usize, sys::CUdeviceptr>,
    files: &'a OpenFiles,
    /// Bytes on the card that may be used meanwhile.
    room: Bytes,
}

impl Filling<'_> {
    fn cloned(&self, tensors: impl Iterator<Item = usize>) -> Vec<TensorSource> {
        tensors.map(|tensor| self.sources[tensor].clone()).collect()
    }

    fn places(&self) -> Places<'_> {
        let named = self.sources.iter().enumerate();
        let places =
            named.filter_map(|(tensor, source)| Some((source.name.as_str(), *self.addresses.get(&tensor)?)));
        Places(places.collect())
    }
}

impl CudaCard {
    /// As [`crate::Gpu::load`], for a component that has parts. Returns the bytes that are left to the first pass over it.
    pub(super) fn load_parted(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        arrival: Arrival,
        progress: Progress<'_>,
    ) -> Result<Bytes, LoadError> {
        let mut timeline = Timeline::begin("load");
        let sources = plan.files()?;
        let files = Arc::new(reader::open(sources)?);
        let placement = plan.placement(part);
        let booked = placement.bytes_on_card(sources);
        reader::report_progress(progress, Bytes::ZERO, booked)?;
        let workspace = self.staging().min_workspace(sources)?;
        let needed = booked + workspace;
        let free = self.free()?;
        if needed > free {
            return Err(LoadError::OutOfMemory { needed, free });
        }
        let room = free - booked - LOAD_MARGIN;
        let (layout, mut region) = RegionLayout::new(&self.context, sources).map_err(lost)?;
        timeline.part("open files, reserve addresses");
        let kept = self.host.take(&component.id);
        let host = kept
            .filter(|kept| kept.from.is_of(plan, &files))
            .map_or_else(Arc::default, |kept| kept.host);
        let in_use = self.in_use_on_host();
        // What is quantized needs memory of the card meanwhile, which belongs to the stage once the load is over.
        let arrival = if workspace > Bytes::ZERO {
            Arrival::Now
        } else {
            arrival
        };
        let filled = layout
            .allocate(&mut region, &placement)
            .map_err(|error| match is_out_of_memory(error) {
                true => LoadError::OutOfMemory { needed, free },
                false => lost(error),
            })
            .and_then(|()| {
                timeline.part("map memory");
                let mut held_on_host = locked(&host);
                let filling = Filling {
                    sources,
                    addresses: layout.addresses(&region, &placement),
                    files: &files,
                    room,
                };
                for tensor in placement.staying(sources) {
                    if held_on_host.has(tensor, &sources[tensor])
                        && let Some(to) = filling.addresses.get(&tensor)
                    {
                        self.copy_from_host(&held_on_host, tensor, &sources[tensor], *to)?;
                    }
                }
                let staying = Staying::of(&layout, &placement, &held_on_host, sources, arrival);
                let (wanted, in_use) = (to_hold(&placement, sources), in_use + held_on_host.bytes());
                let held = held_on_host.fit(&wanted, sources, |needed| {
                    self.host.make_room(needed, in_use, host_blocks::available())
                })?;
                let context = Arc::clone(&self.context);
                // Pages are made present while others are read.
                let (unread, room) = std::thread::scope(|scope| {
                    let host = &mut *held_on_host;
                    let preparing = scope.spawn(move || host.prepare(&context, held, sources));
                    let unread = self.read_staying(staying, &filling, progress);
                    let gone = || LoadError::Lost("a thread that reads pages of files has ended".to_owned());
                    let prepared = preparing.join().map_err(|_| gone());
                    Ok::<_, LoadError>((unread?, prepared??))
                })?;
                self.copies.synchronize().map_err(lost)?;
                timeline.part("read and copy");
                let missing = held_on_host.hold(held, sources, room, arrival)?;
                timeline.part("hold streamed blocks in the machine's memory");
                self.keep_made(&held_on_host, &missing, &placement, &filling)?;
                timeline.part("copy what was made to the machine's memory");
                reader::check_unchanged(&files)?;
                reader::report_progress(progress, booked, booked)?;
                let left = unread
                    .values()
                    .flatten()
                    .map(|tensor| tensor.source.bytes_on_card())
                    .sum();
                let reading = (unread, Arc::clone(&files));
                drop(held_on_host);
                let made = self.parted_tensors(&layout, &region, &placement, &host, sources, reading)?;
                Ok((made, left))
            });
        match filled {
            Ok(((tensors, stream), left)) => {
                self.parted.insert(
                    component.id.clone(),
                    PartedComponent {
                        component: component.clone(),
                        tensors: Arc::new(tensors),
                        booked,
                        part,
                        from: LoadedFrom::new(plan, &files),
                        files,
                        stream,
                        layout,
                        region,
                        host,
                    },
                );
                timeline.end();
                Ok(left)
            }
            Err(LoadError::Lost(why)) => {
                self.lose(&why, (region, host));
                Err(LoadError::Lost(why))
            }
            Err(error) => {
                let closed = self.settle().and_then(|()| region.close());
                self.latch(closed)
                    .map_err(|error| LoadError::Lost(error.to_string()))?;
                Err(error)
            }
        }
    }

    /// Reads what stays on the card. Blocks are left to the first pass if they take no longer than [`LEFT_SECONDS`] at the speed of what
    /// was read before them.
    fn read_staying(
        &self,
        staying: Staying,
        filling: &Filling<'_>,
        progress: Progress<'_>,
    ) -> Result<Unread, LoadError> {
        let (now, later) = (
            filling.cloned(staying.now.iter().copied()),
            filling.cloned(staying.later()),
        );
        let bytes = |sources: &[TensorSource]| sources.iter().map(TensorSource::bytes_on_card).sum::<Bytes>();
        let (first, rest) = (bytes(&now), bytes(&later));
        let total = first + rest;
        let began = Instant::now();
        self.fill(&now, filling, &mut |at: LoadProgress| {
            progress(LoadProgress { done: at.done, total })
        })?;
        let seconds = began.elapsed().as_secs_f64() * rest.0 as f64 / first.0.max(1) as f64;
        if seconds <= LEFT_SECONDS {
            return Ok(staying.unread(filling.sources, &filling.addresses));
        }
        self.fill(&later, filling, &mut |at: LoadProgress| {
            let done = first + at.done;
            progress(LoadProgress { done, total })
        })?;
        Ok(Unread::new())
    }

    /// Waits until nothing that was queued is under way.
    fn settle(&self) -> Result<(), DriverError> {
        self.stream.synchronize()?;
        self.copies.synchronize()
    }

    /// Reads sources to their places.
    fn fill(
        &self,
        wanted: &[TensorSource],
        filling: &Filling<'_>,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let mut made = Vec::with_capacity(wanted.len());
        let places = filling.places();
        let reading = Reading {
            sources: wanted,
            files: filling.files,
            memory: &places,
        };
        self.staging().load(reading, &mut made, filling.room, progress)
    }

    /// Makes the pinned copies of streamed tensors that do not lie in files as they are used: each block is made in the ring, and
    /// copied from there while the next is made.
    fn keep_made(
        &mut self,
        host: &HostBlocks,
        missing: &[usize],
        placement: &Placement,
        filling: &Filling<'_>,
    ) -> Result<(), LoadError> {
        if missing.is_empty() {
            return Ok(());
        }
        let mut staging = self.staging();
        let temporary = staging.temporary(&filling.cloned(missing.iter().copied()), filling.room)?;
        let missing: HashSet<usize> = missing.iter().copied().collect();
        match self.make_blocks(host, &missing, placement, filling, (&mut staging, &temporary)) {
            Err(LoadError::Lost(why)) => Err(LoadError::Lost(why)),
            made => staging.end(temporary).and(made),
        }
    }

    fn make_blocks(
        &self,
        host: &HostBlocks,
        missing: &HashSet<usize>,
        placement: &Placement,
        filling: &Filling<'_>,
        (staging, temporary): (&mut Staging, &Temporary),
    ) -> Result<(), LoadError> {
        let places = filling.places();
        let mut copied: Vec<(Range<u64>, CudaEvent)> = Vec::new();
        for block in &placement.streamed {
            let tensors = block.tensors.iter().map(|(tensor, _)| *tensor);
            let tensors: Vec<usize> = tensors.filter(|tensor| missing.contains(tensor)).collect();
            if tensors.is_empty() {
                continue;
            }
            let range = block.at..block.at + block.bytes;
            let is_overwritten =
                |(other, _): &mut (Range<u64>, CudaEvent)| other.start < range.end && range.start < other.end;
            for (_, copied) in copied.extract_if(.., is_overwritten) {
                copied.synchronize().map_err(lost)?;
            }
            let wanted = filling.cloned(tensors.iter().copied());
            let mut go_on = |_| ControlFlow::Continue(());
            let mut made = Vec::with_capacity(wanted.len());
            let reading = Reading {
                sources: &wanted,
                files: filling.files,
                memory: &places,
            };
            staging.load_with(temporary, reading, &mut made, &mut go_on)?;
            self.copy_to_host(host, &tensors, filling.sources, &filling.addresses)?;
            let done = self.copies.record_event(None).map_err(lost)?;
            copied.push((range, done));
        }
        self.copies.synchronize().map_err(lost)
    }

    /// Bytes that may be allocated on the card.
    pub(super) fn free(&mut self) -> Result<Bytes, LoadError> {
        // The driver has more where only a part of the card may be used.
        let truth = crate::card::Gpu::memory(self);
        truth
            .map(|truth| truth.free)
            .map_err(|error| LoadError::Lost(error.to_string()))
    }

    /// Bytes of the machine's memory that components on the card hold.
    fn in_use_on_host(&self) -> Bytes {
        self.parted
            .values()
            .map(|parted| locked(&parted.host).bytes())
            .sum()
    }

    /// Queues the copy of a tensor from the machine's memory to its place on the card. The caller waits for it.
    fn copy_from_host(
        &self,
        host: &HostBlocks,
        tensor: usize,
        source: &TensorSource,
        to: sys::CUdeviceptr,
    ) -> Result<(), LoadError> {
        for RunTo { run, to } in host.runs(tensor, source, to) {
            // SAFETY: pinned memory of the component, and a place of as many bytes; both outlive the copy, which the caller waits
            // for.
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, run.from, run.length, self.copies.cu_stream()) }
                .result()
                .map_err(lost)?;
        }
        Ok(())
    }

    /// Queues copies of tensors from the card to their pinned memory. The caller waits for them.
    fn copy_to_host(
        &self,
        host: &HostBlocks,
        tensors: &[usize],
        sources: &[TensorSource],
        addresses: &HashMap<usize, sys::CUdeviceptr>,
    ) -> Result<(), LoadError> {
        for tensor in tensors {
            let (Some(from), Some(to)) = (addresses.get(tensor), host.copy_of(*tensor)) else {
                continue;
            };
            // SAFETY: the tensor has as many bytes on the card, and its copy on the machine; both outlive the copy, which the caller
            // waits for.
            unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    to.as_ptr().cast(),
                    *from,
                    sources[*tensor].bytes_on_card().0 as usize,
                    self.copies.cu_stream(),
                )
            }
            .result()
            .map_err(lost)?;
        }
        Ok(())
    }

    /// The tensors of a part, with the stream of its blocks.
    fn parted_tensors(
        &self,
        layout: &RegionLayout,
        region: &Region,
        placement: &Placement,
        shared: &Arc<Mutex<HostBlocks>>,
        sources: &[TensorSource],
        (unread, files): (Unread, Arc<OpenFiles>),
    ) -> Result<(ComponentTensors, Option<Arc<CudaWeightStream>>), LoadError> {
        let candle_core::Device::Cuda(device) = &self.device else {
            return Err(LoadError::Lost("the card is not a CUDA device".to_owned()));
        };
        let addresses = layout.addresses(region, placement);
        let host = locked(shared);
        let mut weights = HashMap::with_capacity(sources.len());
        let mut unowned = Unowned(Vec::with_capacity(sources.len()));
        for (tensor, source) in sources.iter().enumerate() {
            let made = addresses
                .get(&tensor)
                .and_then(|at| tensor_at(source, *at, &self.stream, device));
            let made = made.ok_or_else(|| LoadError::Unsupported(source.without_form()))?;
            unowned.0.push(made.clone());
            weights.insert(source.name.clone(), reader::weight_of(source, made));
        }
        let tensors = ComponentTensors::of_weights(weights).owned_by(Box::new(unowned));
        if placement.streamed.is_empty() && unread.is_empty() {
            return Ok((tensors, None));
        }
        let runs = placement.streamed.iter().map(|block| {
            let mut runs = Runs::default();
            for (tensor, _) in &block.tensors {
                let source = &sources[*tensor];
                let to = addresses.get(tensor).copied().unwrap_or_default();
                runs.on_host.extend(host.runs(*tensor, source, to));
                if !host.has(*tensor, source) {
                    let read = ReadTo {
                        tensor: *tensor,
                        source: source.clone(),
                        to,
                    };
                    match host.is_deferred(source) {
                        true => runs.deferred.push(read),
                        false => runs.read.push(read),
                    }
                }
            }
            runs
        });
        let on = (&self.stream, &self.copies);
        let source = Arc::new(FileSource {
            staging: Arc::clone(&self.staging),
            files,
        });
        let runs = runs.collect();
        let arriving = match unread.is_empty() {
            true => None,
            false => Some(arriving::of_unread(&self.context, unread, Arc::clone(&source))?),
        };
        let from = (source, Arc::clone(shared));
        let stream = CudaWeightStream::new(&placement.streamed, runs, arriving, from, on)?;
        let stream = Arc::new(stream);
        let streaming = WeightStream::new(Arc::clone(&stream) as Arc<dyn Streams>);
        Ok((tensors.streaming(streaming), Some(stream)))
    }

    /// As [`crate::Gpu::resize`]. Blocks that stay from now on are copied from the machine's memory, where they were for the
    /// stream.
    pub(super) fn resize_parted(
        &mut self,
        component: &Component,
        part: Part,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let gone = |error: GpuError| LoadError::Lost(error.to_string());
        let held = self.parted.remove(&component.id);
        let mut held = held.ok_or_else(|| crate::cpu::not_there(component))?;
        let others = Arc::strong_count(&held.tensors) - 1;
        let outcome = match others {
            0 => self.change(&mut held, part, progress),
            others => Err(LoadError::StillInUse(others)),
        };
        if let Err(LoadError::Lost(why)) = &outcome {
            self.lose(why, held);
            return outcome;
        }
        self.parted.insert(component.id.clone(), held);
        self.check_alive().map_err(gone)?;
        outcome
    }

    fn change(
        &mut self,
        held: &mut PartedComponent,
        part: Part,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let mut timeline = Timeline::begin("resize");
        let LoadedFrom { plan, .. } = &held.from;
        let sources = plan.files()?;
        let (before, after) = (plan.placement(held.part), plan.placement(part));
        let booked = after.bytes_on_card(sources);
        let grown = booked - held.booked;
        let free = self.free()?;
        if grown > free {
            return Err(LoadError::OutOfMemory { needed: grown, free });
        }
        reader::report_progress(progress, Bytes::ZERO, grown)?;
        if let Some(stream) = &held.stream {
            stream.read_the_rest()?;
        }
        self.settle().map_err(lost)?;
        // What is there from now on comes from where it was streamed from.
        let (mut new, mut from_files) = (Vec::new(), Vec::new());
        for (block, offset) in held.layout.staying(&after) {
            if before.streams(block.place) {
                if let Err(error) = held.region.allocate(offset, block.bytes) {
                    for offset in new {
                        held.region.free(offset).map_err(lost)?;
                    }
                    return Err(match is_out_of_memory(error) {
                        true => LoadError::OutOfMemory { needed: grown, free },
                        false => lost(error),
                    });
                }
                new.push(offset);
                for (tensor, at) in &block.tensors {
                    let to = held.region.at(offset + at);
                    let host = locked(&held.host);
                    match host.has(*tensor, &sources[*tensor]) {
                        true => self.copy_from_host(&host, *tensor, &sources[*tensor], to)?,
                        false => from_files.push((sources[*tensor].clone(), to)),
                    }
                }
            }
        }
        if !from_files.is_empty() {
            let (wanted, places): (Vec<TensorSource>, Vec<sys::CUdeviceptr>) = from_files.into_iter().unzip();
            let filling = Filling {
                sources: &wanted,
                addresses: (0..).zip(places).collect(),
                files: &held.files,
                room: free - grown - LOAD_MARGIN,
            };
            self.fill(&wanted, &filling, &mut |_| ControlFlow::Continue(()))?;
            reader::check_unchanged(&held.files)?;
        }
        self.copies.synchronize().map_err(lost)?;
        timeline.part("copy blocks that stay");
        let addresses = held.layout.addresses(&held.region, &before);
        let mut host = locked(&held.host);
        // The component itself is not among those on the card now.
        let in_use = self.in_use_on_host() + host.bytes();
        let wanted = to_hold(&after, sources);
        let fitting = host.fit(&wanted, sources, |needed| {
            self.host.make_room(needed, in_use, host_blocks::available())
        })?;
        let room = host.prepare(&self.context, fitting, sources)?;
        let missing = host.hold(fitting, sources, room, Arrival::Now)?;
        self.copy_to_host(&host, &missing, sources, &addresses)?;
        self.copies.synchronize().map_err(lost)?;
        drop(host);
        timeline.part("hold streamed blocks in the machine's memory");
        for (block, offset) in held.layout.staying(&before) {
            if after.streams(block.place) {
                held.region.free(offset).map_err(lost)?;
            }
        }
        if before.ring_bytes != after.ring_bytes {
            held.region.free(held.layout.ring).map_err(lost)?;
            let ring = held.region.allocate(held.layout.ring, after.ring_bytes);
            ring.map_err(lost)?;
        }
        timeline.part("free the rest");
        let reading = (Unread::new(), Arc::clone(&held.files));
        let (tensors, stream) =
            self.parted_tensors(&held.layout, &held.region, &after, &held.host, sources, reading)?;
        let left = std::mem::replace(&mut held.tensors, Arc::new(tensors));
        held.stream = stream;
        self.drop_unowned(left).map_err(lost)?;
        (held.part, held.booked) = (part, booked);
        timeline.end();
        reader::report_progress(progress, grown, grown).or(Ok(()))
    }

    /// Drops tensors whose memory is a region's, and leaves the activations as much memory as before: for each tensor that is dropped a
    /// single number is allocated there, and freed ([`Unowned`]).
    fn drop_unowned(&self, tensors: Arc<ComponentTensors>) -> Result<(), DriverError> {
        let had = self.activations.mapped();
        drop(tensors);
        self.activations.trim(had).map(|_| ())
    }

    /// As [`crate::Gpu::unload`], for a component that has parts.
    pub(super) fn unload_parted(&mut self, id: &residency::ComponentId) -> Result<Unloaded, GpuError> {
        let held = self
            .parted
            .remove(id)
            .ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        let others = Arc::strong_count(&held.tensors) - 1;
        if others > 0 {
            self.parted.insert(id.clone(), held);
            return Err(GpuError::StillInUse(id.clone(), others));
        }
        let mut timeline = Timeline::begin("unload");
        let stopped = held.stream.as_ref().map_or(Ok(()), |stream| stream.stop());
        if let Err(error) = stopped.and_then(|()| self.settle().map_err(lost)) {
            let why = error.to_string();
            self.lose(&why, held);
            return Err(GpuError::Lost(why));
        }
        timeline.part("synchronise");
        let PartedComponent {
            component,
            tensors,
            booked,
            from,
            region,
            host,
            ..
        } = held;
        let dropped = self.drop_unowned(tensors);
        self.latch(dropped)?;
        timeline.part("drop tensors");
        let closed = region.close();
        self.latch(closed)?;
        timeline.part("free the memory");
        locked(&host).forget_deferred();
        let in_use = self.in_use_on_host();
        self.host.keep(
            id.clone(),
            KeptBlocks {
                component,
                from,
                host,
            },
            in_use,
        );
        timeline.part("keep its blocks in the machine's memory");
        // Every piece has been given back to the driver, each by its own call.
        let freed = booked;
        Ok(Unloaded { booked, freed })
    }

    /// As [`crate::Gpu::on_host`].
    pub(super) fn memory_on_host(&self) -> HostMemory {
        let on_card = self.parted.values();
        let on_card = on_card.map(|parted| (&parted.component, locked(&parted.host).bytes()));
        let kept = self.host.kept().map(|(_, kept)| (&kept.component, kept.bytes()));
        let held = on_card.chain(kept).filter(|(_, bytes)| *bytes > Bytes::ZERO);
        let held = held.map(|(component, bytes)| {
            let component = component.clone();
            (component.id.clone(), HostShare { component, bytes })
        });
        HostMemory {
            limit: self.host.limit,
            components: held.collect(),
        }
    }
}
