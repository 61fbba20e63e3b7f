//! Components that can be on the card in part. Every block has a piece of memory of its own, and so has the ring; whatever is in no
//! block shares one. Tensors lie in a block as they do in the ring, so that products over several of them are the same products
//! wherever the block is.

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::{DriverError, sys};
use residency::{Bytes, Component, HostMemory, HostShare, Part};

use super::host_blocks::{self, HostBlocks};
use super::placer::Places;
use super::pool::is_out_of_memory;
use super::region::Region;
use super::staging::lost;
use super::streaming::{CudaWeightStream, RunTo, Runs, Unowned};
use super::{CudaCard, POOL_ROUNDING, tensor_at};
use crate::blocks::{ALIGNMENT, Placement, RING_BLOCKS, StreamedBlock};
use crate::card::{GpuError, Unloaded};
use crate::host_tier::HoldsMemory;
use crate::load::{LoadError, LoadPlan, TensorSource};
use crate::reader::{self, LoadedFrom, OpenFiles, Progress};
use crate::tensors::{ComponentTensors, WeightStream};
use crate::timeline::Timeline;

/// A component that can be on the card in part.
pub(super) struct PartedComponent {
    component: Component,
    pub(super) tensors: Arc<ComponentTensors>,
    pub(super) booked: Bytes,
    part: Part,
    from: LoadedFrom,
    layout: RegionLayout,
    region: Region,
    host: HostBlocks,
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
    host: HostBlocks,
}

impl HoldsMemory for KeptBlocks {
    fn bytes(&self) -> Bytes {
        self.host.bytes()
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

/// Indices of all tensors that pass through the ring.
fn streamed(placement: &Placement) -> Vec<usize> {
    let tensors = placement.streamed.iter().flat_map(|block| &block.tensors);
    tensors.map(|(tensor, _)| *tensor).collect()
}

impl CudaCard {
    /// As [`crate::Gpu::load`], for a component that has parts.
    pub(super) fn load_parted(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let mut timeline = Timeline::begin("load");
        let sources = plan.files()?;
        let files = reader::open(sources)?;
        let placement = plan.placement(part);
        let booked = placement.bytes_on_card(sources);
        reader::report_progress(progress, Bytes::ZERO, booked)?;
        let needed = booked + self.staging.min_workspace(sources)?;
        let free = self.free()?;
        if needed > free {
            return Err(LoadError::OutOfMemory { needed, free });
        }
        let room = free - booked - POOL_ROUNDING;
        let (layout, mut region) = RegionLayout::new(&self.context, sources).map_err(lost)?;
        timeline.part("open files, reserve addresses");
        let kept = self.host.take(&component.id);
        let mut host = kept
            .filter(|kept| kept.from.is_of(plan, &files))
            .map_or_else(HostBlocks::default, |kept| kept.host);
        let (from_host, staying): (Vec<usize>, Vec<usize>) = placement
            .staying(sources)
            .into_iter()
            .partition(|tensor| host.has(*tensor, &sources[*tensor]));
        let staying: Vec<TensorSource> = staying
            .into_iter()
            .map(|tensor| sources[tensor].clone())
            .collect();
        let in_use = self.in_use_on_host();
        let filled = layout
            .allocate(&mut region, &placement)
            .map_err(|error| match is_out_of_memory(error) {
                true => LoadError::OutOfMemory { needed, free },
                false => lost(error),
            })
            .and_then(|()| {
                timeline.part("map memory");
                let addresses = layout.addresses(&region, &placement);
                for tensor in &from_host {
                    if let Some(to) = addresses.get(tensor) {
                        self.copy_from_host(&host, *tensor, &sources[*tensor], *to)?;
                    }
                }
                let (streamed, in_use) = (streamed(&placement), in_use + host.bytes());
                let held = host.fit(&streamed, sources, |needed| {
                    self.host.make_room(needed, in_use, host_blocks::available())
                })?;
                // Pages are registered while others are read.
                let context = Arc::clone(&self.context);
                let missing = std::thread::scope(|scope| {
                    let host = &mut host;
                    let registering = scope.spawn(move || host.hold(&context, held, sources));
                    let filled = self.fill(&staying, sources, &addresses, &files, room, progress);
                    let gone = || LoadError::Lost("a thread that registers pages has ended".to_owned());
                    let missing = registering.join().map_err(|_| gone())?;
                    filled.and(missing)
                })?;
                self.copies.synchronize().map_err(lost)?;
                timeline.part("read and copy, hold streamed blocks in the machine's memory");
                self.keep_made(&mut host, &missing, &placement, sources, &addresses, &files, room)?;
                timeline.part("copy what was made to the machine's memory");
                reader::check_unchanged(&files)?;
                reader::report_progress(progress, booked, booked)
            })
            .and_then(|()| self.parted_tensors(&layout, &region, &placement, &host, sources));
        match filled {
            Ok(tensors) => {
                self.parted.insert(
                    component.id.clone(),
                    PartedComponent {
                        component: component.clone(),
                        tensors: Arc::new(tensors),
                        booked,
                        part,
                        from: LoadedFrom::new(plan, &files),
                        layout,
                        region,
                        host,
                    },
                );
                timeline.end();
                Ok(())
            }
            Err(LoadError::Lost(why)) => {
                // Nothing of a lost card may be touched, not even to free it.
                std::mem::forget((region, host));
                self.lost.get_or_insert_with(|| why.clone());
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

    /// Waits until nothing that was queued is under way.
    fn settle(&self) -> Result<(), DriverError> {
        self.stream.synchronize()?;
        self.copies.synchronize()
    }

    /// Reads sources to their addresses.
    fn fill(
        &mut self,
        wanted: &[TensorSource],
        sources: &[TensorSource],
        addresses: &HashMap<usize, sys::CUdeviceptr>,
        files: &OpenFiles,
        room: Bytes,
        progress: Progress<'_>,
    ) -> Result<(), LoadError> {
        let named = sources.iter().enumerate();
        let places =
            named.filter_map(|(tensor, source)| Some((source.name.as_str(), *addresses.get(&tensor)?)));
        let places = Places(places.collect());
        let mut made = Vec::with_capacity(wanted.len());
        self.staging
            .load(wanted, files, &places, &mut made, room, progress)
    }

    /// Makes the pinned copies of streamed tensors that do not lie in files as they are used: each block is made in the ring, and
    /// copied from there.
    #[allow(clippy::too_many_arguments)] // All of it is the state of one load.
    fn keep_made(
        &mut self,
        host: &mut HostBlocks,
        missing: &[usize],
        placement: &Placement,
        sources: &[TensorSource],
        addresses: &HashMap<usize, sys::CUdeviceptr>,
        files: &OpenFiles,
        room: Bytes,
    ) -> Result<(), LoadError> {
        for block in &placement.streamed {
            let tensors = block.tensors.iter().map(|(tensor, _)| *tensor);
            let tensors: Vec<usize> = tensors.filter(|tensor| missing.contains(tensor)).collect();
            let wanted: Vec<TensorSource> = tensors.iter().map(|tensor| sources[*tensor].clone()).collect();
            if wanted.is_empty() {
                continue;
            }
            let mut go_on = |_| std::ops::ControlFlow::Continue(());
            self.fill(&wanted, sources, addresses, files, room, &mut go_on)?;
            self.keep_from(host, &tensors, sources, addresses)?;
        }
        Ok(())
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
        self.parted.values().map(|parted| parted.host.bytes()).sum()
    }

    /// Queues the copy of a tensor from the machine's memory to its place on the card. The caller waits for it.
    fn copy_from_host(
        &self,
        host: &HostBlocks,
        tensor: usize,
        source: &TensorSource,
        mut to: sys::CUdeviceptr,
    ) -> Result<(), LoadError> {
        for run in host.runs(tensor, source) {
            // SAFETY: pinned memory of the component, and a place of as many bytes; both outlive the copy, which the caller waits
            // for.
            unsafe { sys::cuMemcpyHtoDAsync_v2(to, run.from, run.length, self.copies.cu_stream()) }
                .result()
                .map_err(lost)?;
            to += run.length as u64;
        }
        Ok(())
    }

    /// Copies tensors from the card to pinned memory of the machine.
    fn keep_from(
        &self,
        host: &mut HostBlocks,
        tensors: &[usize],
        sources: &[TensorSource],
        addresses: &HashMap<usize, sys::CUdeviceptr>,
    ) -> Result<(), LoadError> {
        for tensor in tensors {
            let Some(from) = addresses.get(tensor) else {
                continue;
            };
            let bytes = sources[*tensor].bytes_on_card();
            let no_memory = LoadError::HostMemory {
                needed: bytes,
                available: Bytes::ZERO,
            };
            let to = host.keep(*tensor, bytes).ok_or(no_memory)?;
            // SAFETY: the tensor has as many bytes on the card, and the pinned memory on the machine; both outlive the copy, which
            // is waited for below.
            unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    to.as_ptr().cast(),
                    *from,
                    bytes.0 as usize,
                    self.copies.cu_stream(),
                )
            }
            .result()
            .map_err(lost)?;
        }
        self.copies.synchronize().map_err(lost)
    }

    /// The tensors of a part, with the stream of its blocks.
    fn parted_tensors(
        &self,
        layout: &RegionLayout,
        region: &Region,
        placement: &Placement,
        host: &HostBlocks,
        sources: &[TensorSource],
    ) -> Result<ComponentTensors, LoadError> {
        let candle_core::Device::Cuda(device) = &self.device else {
            return Err(LoadError::Lost("the card is not a CUDA device".to_owned()));
        };
        let addresses = layout.addresses(region, placement);
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
        if placement.streamed.is_empty() {
            return Ok(tensors);
        }
        let runs = placement.streamed.iter().map(|block| {
            let mut runs = Runs::default();
            for (tensor, _) in &block.tensors {
                let source = &sources[*tensor];
                let mut to = addresses.get(tensor).copied().unwrap_or_default();
                for run in host.runs(*tensor, source) {
                    runs.on_host.push(RunTo { run, to });
                    to += run.length as u64;
                }
                for run in host.disk_runs(*tensor, source) {
                    let length = run.length;
                    runs.on_disk.push((run, to));
                    to += length;
                }
            }
            runs
        });
        let on = (&self.stream, &self.copies);
        let stream = CudaWeightStream::new(&placement.streamed, runs.collect(), on)?;
        Ok(tensors.streaming(WeightStream::new(Arc::new(stream))))
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
            std::mem::forget(held);
            self.lost.get_or_insert_with(|| why.clone());
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
                    match held.host.has(*tensor, &sources[*tensor]) {
                        true => self.copy_from_host(&held.host, *tensor, &sources[*tensor], to)?,
                        false => from_files.push((sources[*tensor].clone(), to)),
                    }
                }
            }
        }
        if !from_files.is_empty() {
            let (wanted, places): (Vec<TensorSource>, Vec<sys::CUdeviceptr>) = from_files.into_iter().unzip();
            let files = reader::open(&wanted)?;
            held.from.check_versions(&files)?;
            let addresses = (0..).zip(places).collect();
            let mut go_on = |_| std::ops::ControlFlow::Continue(());
            self.fill(&wanted, &wanted, &addresses, &files, free - grown, &mut go_on)?;
        }
        self.copies.synchronize().map_err(lost)?;
        timeline.part("copy blocks that stay");
        let addresses = held.layout.addresses(&held.region, &before);
        // The component itself is not among those on the card now.
        let in_use = self.in_use_on_host() + held.host.bytes();
        let wanted = streamed(&after);
        let fitting = held.host.fit(&wanted, sources, |needed| {
            self.host.make_room(needed, in_use, host_blocks::available())
        })?;
        let missing = held.host.hold(&self.context, fitting, sources)?;
        self.keep_from(&mut held.host, &missing, sources, &addresses)?;
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
        let tensors = self.parted_tensors(&held.layout, &held.region, &after, &held.host, sources)?;
        (held.tensors, held.part, held.booked) = (Arc::new(tensors), part, booked);
        timeline.end();
        reader::report_progress(progress, grown, grown).or(Ok(()))
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
        let settled = self.settle();
        self.latch(settled)?;
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
        drop(tensors);
        timeline.part("drop tensors");
        let closed = region.close();
        self.latch(closed)?;
        timeline.part("free the memory");
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
        let on_card = on_card.map(|parted| (&parted.component, parted.host.bytes()));
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
