//! An NVIDIA card.
//!
//! Each component has a memory pool of its own, allocated from explicitly; activations live in an arena. The bytes used and
//! reserved by both, with the driver's free bytes, are the source of the ledger's figures. One thread owns the card and frees all memory; reading threads only fill pinned
//! memory and enqueue copies.

mod activations;
mod arriving;
mod host_blocks;
mod parted;
mod placer;
mod pool;
mod quantize;
mod region;
mod shared;
mod speeds;
mod staging;
mod streaming;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Storage, Tensor};
use cudarc::driver::{CudaContext, CudaStream, DriverError, PushKernelArg as _, sys};
use residency::{Bytes, Component, ComponentId, DriverTruth, HostMemory, Part};

use crate::arena::Limit;
use crate::card::{Arrival, CardDescription, CardSpeeds, Gpu, GpuError, Unloaded};
use crate::cuda_settings::CudaSettings;
use crate::faults::{FaultAction, FaultSchedule};
use crate::host_tier::HostTier;
use crate::load::{LoadError, LoadPlan, LoadProgress, TensorSource};
use crate::nvml::NvmlCard;
use crate::profile::MemoryProfile;
use crate::reader::{self, Progress};
use crate::tensors::{ComponentTensors, Pinning};
use crate::timeline::Timeline;
use activations::{Activations, Peak};
use parted::{KeptBlocks, PartedComponent};
use pool::{PinnedInPlace, Pool, has_in_one_piece, is_allocated, is_out_of_memory};
use quantize::Kernels;
pub use shared::{OpenedMemory, SHARED_HANDLE_BYTES, SharedMemory, SharedNumber};
use staging::{Allocation, PinnedRing, Reading, Staging};

/// cuBLAS allocates a hidden workspace unless the caller sets one. This is its size on compute capability 9; older cards
/// need less and lose nothing.
const CUBLAS_WORKSPACE: Bytes = Bytes::mib(32);

/// Maximum growth of the context within one stage, by code and stacks of newly loaded kernels. If NVML does not list
/// our process, the excess counts as foreign.
const CONTEXT_GROWTH: Bytes = Bytes::mib(256);

/// What a load's workspace leaves free: the pools of the component and of the workspace grow in steps of 32 MiB, and the context by
/// the code of kernels that quantize and of the stage that follows.
const LOAD_MARGIN: Bytes = Bytes::mib(256);

/// Bytes of a service's limit that nothing is planned into: pools grow in steps of 32 MiB, of which a plan knows nothing. On a whole card
/// the driver refuses what is too much; a limit has only this.
const ROUNDING: Bytes = Bytes::mib(96);

/// Precision of the search for the largest allocation.
const PROBE_STEP: Bytes = Bytes::mib(16);

/// An NVIDIA card, with its context in this process.
pub(crate) struct CudaCard {
    description: CardDescription,
    speeds: CardSpeeds,
    dtype: DType,
    device: Device,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    activations: Activations,
    /// Pool of library workspaces, allocated once.
    workspaces: Pool,
    /// Streams of components read with it too, while a stage runs.
    staging: Arc<Mutex<Staging>>,
    /// Copies of streamed blocks, beside the computation.
    copies: Arc<CudaStream>,
    held: HashMap<ComponentId, CudaComponent>,
    /// Components that can be on the card in part.
    parted: HashMap<ComponentId, PartedComponent>,
    /// Blocks of those that left the card.
    host: HostTier<KeptBlocks>,
    nvml: NvmlCard,
    /// Bytes of the context when the card was opened.
    context_at_start: Bytes,
    /// The last readings of it.
    context_readings: [Bytes; 3],
    /// Bytes that activations may keep after a stage.
    kept_activations: Bytes,
    /// Bytes of activations when the current stage began.
    stage_baseline: Bytes,
    /// Maximum bytes of the card's memory that the service uses.
    limit: Option<Bytes>,
    faults: FaultSchedule,
    /// Set once the card is lost; nothing of it may be touched then. cudarc reports an error once and looks healthy
    /// afterwards.
    lost: Option<String>,
}

struct CudaComponent {
    tensors: Arc<ComponentTensors>,
    /// Name and address of each tensor, to name leaked ones.
    addresses: Vec<(String, sys::CUdeviceptr)>,
    pool: Pool,
    booked: Bytes,
}

/// The computing libraries and the stream that they allocate on.
struct Libraries {
    device: Device,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    activations: Activations,
    workspaces: Pool,
    kernels: Kernels,
}

impl Libraries {
    fn open(ordinal: usize, dtype: DType, timeline: &mut Timeline) -> Result<Libraries, GpuError> {
        let device = CudaDevice::new_with_stream(ordinal).map_err(|e| GpuError::Lost(e.to_string()))?;
        timeline.part("cuBLAS and cuRAND handles");
        // SAFETY: one stream computes and one thread frees; the copy streams are synchronized before anything that
        // they wrote is used or freed.
        unsafe { device.disable_event_tracking() };
        let stream = device.cuda_stream();
        let context = Arc::clone(stream.context());
        let activations = Activations::of(&context, &stream).map_err(lost)?;
        let workspaces = Pool::new(&context).map_err(lost)?;
        give_workspace(&device, &workspaces, &stream)?;
        timeline.part("pools and cuBLAS's workspace");
        let kernels = Kernels::new(&context).map_err(|error| {
            GpuError::Lost(format!(
                "its kernels cannot be loaded ({error}): moored needs compute capability 7.5 or newer"
            ))
        })?;
        timeline.part("kernels that quantize");
        let device = Device::Cuda(device);
        warm_up(&device, dtype).map_err(|error| GpuError::Lost(error.to_string()))?;
        timeline.part("first product");
        Ok(Libraries {
            device,
            context,
            stream,
            activations,
            workspaces,
            kernels,
        })
    }
}

/// Makes the libraries load the modules that every stage needs, so that the context has its final size from the start. Uses no
/// kernel of the tensor library: the driver would compile its module, which takes seconds on a new machine.
fn warm_up(device: &Device, dtype: DType) -> candle_core::Result<()> {
    let ones = Tensor::ones((64, 64), dtype, &Device::Cpu)?.to_device(device)?;
    ones.matmul(&ones)?.to_device(&Device::Cpu)?;
    Ok(())
}

/// Makes cuBLAS load its f32 code, used by the canary, in parallel with that of the computation dtype. Uses its own
/// handles, which are dropped here. Best effort: an error recurs where it matters.
fn warm_up_in_f32(ordinal: usize) {
    let began = std::time::Instant::now();
    let device = CudaDevice::new_with_stream(ordinal);
    if let Err(error) = device.and_then(|device| warm_up(&Device::Cuda(device), DType::F32)) {
        tracing::debug!(%error, "no first product in f32");
    }
    Timeline::log(
        "open the card",
        "first product in f32, on a thread of its own",
        began.elapsed(),
    );
}

impl CudaCard {
    /// Opens a card on this thread, which will own it. `generation` counts the worker processes of the card from 1.
    ///
    /// # Errors
    /// [`GpuError::Lost`] if there is no such card or it does not respond.
    pub(crate) fn new(
        settings: &CudaSettings,
        profile: &MemoryProfile,
        generation: u64,
    ) -> Result<CudaCard, GpuError> {
        let mut timeline = Timeline::begin("open the card");
        // Two libraries of the driver, each of which queries all cards. Neither creates a context.
        let (nvml, driver) = std::thread::scope(|scope| {
            let driver = scope.spawn(cudarc::driver::result::init);
            let nvml = NvmlCard::open(&settings.which);
            (nvml, driver.join())
        });
        let nvml = nvml.map_err(|e| GpuError::Lost(e.to_string()))?;
        driver
            .map_err(|_| GpuError::Lost("the driver's start panicked".to_owned()))?
            .map_err(lost)?;
        timeline.part("NVML and the driver, beside each other");
        let free_before = nvml.memory().map_err(|e| GpuError::Lost(e.to_string()))?.free;
        let ordinal = ordinal_of(nvml.uuid())?;
        timeline.part("find the card");
        // Another handle of the primary context, which the libraries use too.
        let primary = CudaContext::new(ordinal).map_err(lost)?;
        timeline.part("context");
        let dtype = settings.compute_dtype(nvml.compute_capability);
        // Memory is pinned while the libraries load their code.
        let (pinned, libraries) = std::thread::scope(|scope| {
            let pinned =
                scope.spawn(|| PinnedRing::new(&primary, profile.staging_bytes, profile.staging_chunk));
            let in_f32 = (dtype != DType::F32).then(|| scope.spawn(|| warm_up_in_f32(ordinal)));
            let libraries = Libraries::open(ordinal, dtype, &mut timeline);
            if let Some(Err(_)) = in_f32.map(std::thread::ScopedJoinHandle::join) {
                tracing::debug!("a first product in f32 panicked");
            }
            (pinned.join(), libraries)
        });
        drop(primary);
        let Libraries {
            device,
            context,
            stream,
            activations,
            workspaces,
            kernels,
        } = libraries?;
        let pinned = pinned
            .map_err(|_| GpuError::Lost("pinning memory panicked".to_owned()))?
            .map_err(lost)?;
        let staging =
            Staging::new(&stream, kernels, pinned).map_err(|error| GpuError::Lost(error.to_string()))?;
        let copies = context.new_stream().map_err(lost)?;
        timeline.part("the rest of the pinned memory, streams");
        let speeds = speeds::measure(&staging, &activations, (&device, dtype), &stream);
        timeline.part("how fast it copies and multiplies");
        let mut description = nvml.describe();
        dtype.as_str().clone_into(&mut description.compute_dtype);
        let mut card = CudaCard {
            description,
            speeds,
            dtype,
            device,
            context,
            stream,
            activations,
            workspaces,
            staging: Arc::new(Mutex::new(staging)),
            copies,
            held: HashMap::new(),
            parted: HashMap::new(),
            host: HostTier::default(),
            nvml,
            context_at_start: Bytes::ZERO,
            context_readings: [Bytes::ZERO; 3],
            kept_activations: profile.release_threshold.unwrap_or(Bytes(u64::MAX)),
            stage_baseline: Bytes::ZERO,
            limit: settings.limit,
            faults: FaultSchedule::new(settings.faults.clone(), generation, settings.die_generations),
            lost: None,
        };
        let free_now = card
            .nvml
            .memory()
            .map_err(|e| GpuError::Lost(e.to_string()))?
            .free;
        let pools = card.pools()?;
        card.context_at_start = (free_before - free_now) - pools.reserved();
        let total = card.driver_memory()?.1;
        card.description.total = card.limit.map_or(total, |limit| total.min(limit));
        tracing::info!(
            card = card.description.id, context = %card.context_bytes(), pinned = %card.staging().bytes(), %profile,
            link = card.speeds.link.map_or(0, |link| link.0), flops = card.speeds.flops.unwrap_or(0), "the card is open"
        );
        timeline.part("measure the context");
        timeline.end();
        Ok(card)
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        // A load that panicked left lanes that wait for nothing: the next begins with its own work.
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_alive(&self) -> Result<(), GpuError> {
        match &self.lost {
            Some(why) => Err(GpuError::Lost(why.clone())),
            None => Ok(()),
        }
    }

    /// Records that the card is lost, if the result says so.
    fn latch<T>(&mut self, result: Result<T, DriverError>) -> Result<T, GpuError> {
        result.map_err(|error| {
            let why = error.to_string();
            self.lose(&why, ());
            GpuError::Lost(why)
        })
    }

    /// Records that the card is lost. `held` stays as it is: nothing of a lost card may be touched, not even to free it.
    fn lose<T>(&mut self, why: &str, held: T) {
        std::mem::forget(held);
        self.lost.get_or_insert_with(|| why.to_owned());
    }

    /// The driver's figures of the whole card, without those who hold the rest of it.
    fn whole_truth(&self) -> Result<DriverTruth, GpuError> {
        let pools = self.pools()?;
        let (free, total) = self.driver_memory()?;
        let besides = total - free - pools.reserved();
        Ok(DriverTruth {
            total,
            free,
            components: pools.components,
            scratch: pools.scratch,
            slack: pools.scratch_reserved - pools.scratch,
            // The driver's granularity: bytes that a component's pool reserves beyond its tensors are unusable by others.
            workspaces: pools.workspaces + (pools.components_reserved - pools.components),
            context: self.context_bytes().min(besides),
            holders: Vec::new(),
            layout: None,
        })
    }

    /// The same, within the service's limit. What pools may round up counts among the workspaces.
    fn within_limit(&self, mut truth: DriverTruth) -> DriverTruth {
        let Some(limit) = self.limit else {
            return truth;
        };
        truth.workspaces += ROUNDING;
        truth.limited_to(limit)
    }

    /// Free and total bytes according to the driver.
    fn driver_memory(&self) -> Result<(Bytes, Bytes), GpuError> {
        let (free, total) = self.context.mem_get_info().map_err(lost)?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }

    fn pools(&self) -> Result<Pools, GpuError> {
        let mut components = (Bytes::ZERO, Bytes::ZERO);
        for held in self.held.values() {
            components.0 += held.booked;
            components.1 += held.pool.reserved().map_err(lost)?;
        }
        for parted in self.parted.values() {
            components.0 += parted.booked;
            components.1 += parted.reserved();
        }
        Ok(Pools {
            components: components.0,
            components_reserved: components.1,
            scratch: self.activations.used(),
            scratch_reserved: self.activations.reserved(),
            workspaces: self.workspaces.reserved().map_err(lost)?,
        })
    }

    /// Measures the context again, so that growth by a stage's kernels does not count as foreign.
    fn measure_context(&mut self, may_have_grown: bool) -> Result<(), GpuError> {
        let pools = self.pools()?;
        let (free, total) = self.driver_memory()?;
        let besides = total - free - pools.reserved();
        let own = self.nvml.own_bytes().map(|own| own - pools.reserved());
        let before = self.context_bytes();
        let measured = match own {
            Some(own) => own.min(besides),
            None if may_have_grown && besides - before <= CONTEXT_GROWTH => besides,
            None => before.min(besides),
        };
        self.context_readings.rotate_right(1);
        self.context_readings[0] = measured;
        let context = self.context_bytes();
        if context != before || measured != context {
            tracing::debug!(
                %context, %measured, %besides, ?own, reserved = %pools.reserved(), "memory of the context"
            );
        }
        Ok(())
    }

    /// Memory of the context. Pools and NVML are read one after the other, and a single reading may be half a gigabyte too low. Code that is
    /// loaded stays, so the largest of some readings counts.
    fn context_bytes(&self) -> Bytes {
        self.context_readings
            .iter()
            .copied()
            .fold(self.context_at_start, Bytes::max)
    }

    fn free_all(&mut self, allocations: &[Allocation<'_>], pool: Pool) -> Result<(), GpuError> {
        for allocation in allocations {
            // SAFETY: allocated for a load that failed; all copies to it have completed.
            let freed = unsafe { pool::free(allocation.pointer, &self.stream) };
            self.latch(freed)?;
        }
        let done = self.stream.synchronize().and_then(|()| pool.trim());
        self.latch(done)
    }

    /// Loads a component, and returns the bytes that are left to the first pass over it.
    fn load_component(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        arrival: Arrival,
        progress: Progress<'_>,
    ) -> Result<Bytes, LoadError> {
        let mut timeline = Timeline::begin("load");
        let gone = |error: GpuError| LoadError::Lost(error.to_string());
        self.check_alive().map_err(gone)?;
        let sources = plan.files()?;
        if self.held.contains_key(&component.id) || self.parted.contains_key(&component.id) {
            return Err(LoadError::Unsupported(format!(
                "component {} is already there",
                component.id
            )));
        }
        if !plan.parts().sizes().is_empty() {
            return self.load_parted(component, plan, part, arrival, progress);
        }
        let booked = plan.bytes();
        let files = reader::open(sources)?;
        reader::report_progress(progress, Bytes::ZERO, booked)?;
        // Temporary memory of this load, out of the planned headroom: a load that quantizes works with the free memory.
        let needed = booked + self.staging().min_workspace(sources)?;
        let free = self.free()?;
        if needed > free {
            return Err(LoadError::OutOfMemory { needed, free });
        }
        let room = free - booked - LOAD_MARGIN;
        let pool = Pool::new(&self.context);
        let pool = self.latch(pool).map_err(gone)?;
        timeline.part("open files, make a pool");
        let mut made = Vec::with_capacity(sources.len());
        let loaded = self.staging().load(
            Reading {
                sources,
                files: &files,
                memory: &pool,
            },
            &mut made,
            room,
            progress,
        );
        timeline.part("read and copy");
        let outcome = loaded
            .and_then(|()| reader::check_unchanged(&files))
            .and_then(|()| reader::report_progress(progress, booked, booked))
            .and_then(|()| self.tensors_of(&made));
        timeline.part("check files, make tensors");
        match outcome {
            Ok(tensors) => {
                let trimmed = pool.trim();
                self.latch(trimmed).map_err(gone)?;
                let named = |a: &Allocation<'_>| (a.source.name.clone(), a.pointer);
                self.held.insert(
                    component.id.clone(),
                    CudaComponent {
                        tensors: Arc::new(tensors),
                        addresses: made.iter().map(named).collect(),
                        pool,
                        booked,
                    },
                );
                timeline.part("trim");
                timeline.end();
                Ok(Bytes::ZERO)
            }
            Err(LoadError::Lost(why)) => {
                self.lose(&why, pool);
                Err(LoadError::Lost(why))
            }
            Err(error) => {
                self.free_all(&made, pool).map_err(gone)?;
                Err(error)
            }
        }
    }

    /// Makes tensors of filled allocations.
    fn tensors_of(&self, allocations: &[Allocation<'_>]) -> Result<ComponentTensors, LoadError> {
        let Device::Cuda(device) = &self.device else {
            return Err(LoadError::Lost("the card is not a CUDA device".to_owned()));
        };
        let mut tensors = HashMap::with_capacity(allocations.len());
        for Allocation { source, pointer } in allocations {
            // The plan was checked against the readable dtypes, a subset of those with a CUDA form. An error other
            // than a loss would free twice the memory of existing tensors.
            let tensor = tensor_at(source, *pointer, &self.stream, device)
                .ok_or_else(|| LoadError::Lost(source.without_form()))?;
            tensors.insert(source.name.clone(), reader::weight_of(source, tensor));
        }
        Ok(ComponentTensors::of_weights(tensors))
    }
}

/// Bytes of the pools, by account.
struct Pools {
    /// Booked bytes of components.
    components: Bytes,
    components_reserved: Bytes,
    scratch: Bytes,
    scratch_reserved: Bytes,
    workspaces: Bytes,
}

impl Pools {
    /// Bytes reserved by all pools.
    fn reserved(&self) -> Bytes {
        self.components_reserved + self.scratch_reserved + self.workspaces
    }
}

impl Gpu for CudaCard {
    fn describe(&self) -> &CardDescription {
        &self.description
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn compute_dtype(&self) -> DType {
        self.dtype
    }

    fn speeds(&self) -> CardSpeeds {
        self.speeds
    }

    fn memory(&mut self) -> Result<DriverTruth, GpuError> {
        self.check_alive()?;
        let mut truth = self.whole_truth()?;
        let own = truth.components + truth.scratch + truth.slack + truth.workspaces + truth.context;
        truth.holders = self.nvml.holders(truth.total - truth.free - own);
        Ok(self.within_limit(truth))
    }

    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        self.load_component(component, plan, part, Arrival::Now, progress)
            .map(|_| ())
    }

    fn load_for_a_stage(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Bytes, LoadError> {
        self.load_component(component, plan, part, Arrival::WithFirstPass, progress)
    }

    fn has_unread(&self, id: &ComponentId) -> bool {
        let stream = self.parted.get(id).and_then(|parted| parted.stream.as_ref());
        stream.is_some_and(|stream| stream.has_unread())
    }

    fn resize(
        &mut self,
        component: &Component,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        self.check_alive()
            .map_err(|error| LoadError::Lost(error.to_string()))?;
        self.resize_parted(component, part, progress)
    }

    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError> {
        self.check_alive()?;
        if let Some(parted) = self.parted.get(id) {
            if let Some(stream) = &parted.stream {
                stream.begin();
            }
            return Ok(Arc::clone(&parted.tensors));
        }
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        Ok(Arc::clone(&held.tensors))
    }

    fn read_on_host(
        &mut self,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<ComponentTensors, LoadError> {
        let read = crate::cpu::read_on_host(plan, progress)?;
        let context = &self.context;
        let pin = |begin: *const u8, bytes: usize| {
            // SAFETY: the memory is that of the tensors, which are dropped after the guard that pins it.
            let pinned = unsafe { PinnedInPlace::new(context, begin, bytes) };
            pinned.map(|pinned| Box::new(pinned) as Box<dyn Pinning>)
        };
        let tensors = read.in_one_piece(pin);
        tensors.map_err(|error| LoadError::Unsupported(format!("tensors in the machine's memory: {error}")))
    }

    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError> {
        self.check_alive()?;
        if self.parted.contains_key(id) {
            return self.unload_parted(id);
        }
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        let others = Arc::strong_count(&held.tensors) - 1;
        if others > 0 {
            return Err(GpuError::StillInUse(id.clone(), others));
        }
        let Some(CudaComponent {
            tensors,
            addresses,
            pool,
            booked,
        }) = self.held.remove(id)
        else {
            return Err(GpuError::NotLoaded(id.clone()));
        };
        if self.faults.at("unload") == Some(FaultAction::Leak) {
            let kept = addresses.first().and_then(|(name, _)| tensors.get(name).ok());
            std::mem::forget(kept);
        }
        let mut timeline = Timeline::begin("unload");
        drop(tensors);
        timeline.part("drop tensors");
        // A failed free is recorded in the context and surfaces at this synchronization.
        let synchronised = self.stream.synchronize();
        self.latch(synchronised)?;
        timeline.part("synchronise");
        let trimmed = pool.trim().and_then(|()| Ok((pool.used()?, pool.reserved()?)));
        let (used, reserved) = self.latch(trimmed)?;
        timeline.part("trim");
        if used > Bytes::ZERO {
            let names = addresses.into_iter().filter(|(_, at)| is_allocated(*at));
            return Err(GpuError::Leaked {
                component: id.clone(),
                bytes: used,
                tensors: names.map(|(name, _)| name).collect(),
            });
        }
        drop(pool);
        timeline.part("end the pool");
        Ok(Unloaded {
            booked,
            freed: booked - reserved,
        })
    }

    fn trim(&mut self) -> Result<Bytes, GpuError> {
        self.check_alive()?;
        let trimmed = self.activations.trim(Bytes::ZERO);
        self.latch(trimmed)
    }

    fn on_host(&self) -> HostMemory {
        self.memory_on_host()
    }

    fn limit_on_host(&mut self, limit: Option<Bytes>) {
        self.host.limit = limit;
    }

    fn forget_on_host(&mut self, id: &ComponentId) {
        self.host.forget(id);
    }

    fn relieve_host(&mut self) {
        self.host.relieve(host_blocks::short());
    }

    fn largest_allocation(&mut self, enough: Bytes) -> Result<Bytes, GpuError> {
        // On a card of which only a part may be used, the driver would give more.
        let most = enough.min(self.memory()?.free);
        let has = has_in_one_piece(&self.context, most);
        if self.latch(has)? {
            return Ok(most);
        }
        let (mut least, mut most) = (Bytes::ZERO, most);
        while most - least > PROBE_STEP {
            let middle = Bytes(least.0 + (most.0 - least.0) / 2);
            let has = has_in_one_piece(&self.context, middle);
            if self.latch(has)? {
                least = middle;
            } else {
                most = middle;
            }
        }
        Ok(least)
    }

    fn reserve_scratch(&mut self, bytes: Bytes) -> Result<(), GpuError> {
        self.check_alive()?;
        let reserved = self.activations.reserve(bytes);
        self.latch(reserved)
    }

    fn begin_stage(&mut self) {
        self.activations.forget_peak();
        self.stage_baseline = self.activations.used();
        match self.limit_of_activations() {
            Ok(limit) => self.activations.limit(limit),
            Err(error) => tracing::warn!(%error, "activations have no limit"),
        }
    }

    fn stage_peak(&mut self) -> Bytes {
        for stream in self.parted.values().filter_map(|parted| parted.stream.as_ref()) {
            stream.pause();
        }
        let over = self.stream.synchronize();
        let over = over.and_then(|()| self.activations.trim(self.kept_activations));
        if let Err(error) = self.latch(over) {
            tracing::warn!(%error, "memory of activations stays with them");
        }
        self.activations.limit(Limit::NONE);
        let peak = self.activations.peak();
        self.log_stage_peak(peak);
        if let Err(error) = self.measure_context(true) {
            tracing::warn!(%error, "the size of the context is not known");
        }
        peak.used - self.stage_baseline
    }

    fn fault_at(&mut self, place: &str) -> Option<FaultAction> {
        let action = self.faults.at(place)?;
        match action {
            FaultAction::Poison => {
                if let Err(error) = self.poison() {
                    tracing::error!(%error, "the card could not be poisoned");
                }
            }
            FaultAction::Lose => self.lost = Some(format!("its settings say so, at {place}")),
            FaultAction::Die | FaultAction::Hang | FaultAction::Leak | FaultAction::Escape => {}
        }
        Some(action)
    }
}

impl CudaCard {
    /// The most memory that the activations of a stage may have: what they have now and what is free, within the service's limit.
    /// As much as the context may grow by is taken last.
    fn limit_of_activations(&self) -> Result<Limit, GpuError> {
        let truth = self.within_limit(self.whole_truth()?);
        let reserved = truth.scratch + truth.slack;
        let most = reserved + truth.free;
        Ok(Limit {
            wanted: (most - CONTEXT_GROWTH).max(reserved),
            most,
        })
    }

    /// Logs what activations had beyond what a stage used.
    fn log_stage_peak(&self, peak: Peak) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        if let Ok(pools) = self.pools() {
            tracing::debug!(
                peak = %peak.used, reserved = %peak.reserved, moved = %peak.moved, reserved_now = %pools.scratch_reserved,
                components = %pools.components_reserved, workspaces = %pools.workspaces,
                context = %self.context_bytes(), "peak of activations"
            );
        }
    }

    /// Writes to an unmapped address, as a faulty kernel does. Everything on the card fails afterwards.
    fn poison(&mut self) -> candle_core::Result<()> {
        const KERNEL: &str = "
            .version 7.0
            .target sm_70
            .address_size 64
            .visible .entry poison(.param .u64 address) {
                .reg .u64 %address;
                .reg .u32 %value;
                ld.param.u64 %address, [address];
                mov.u32 %value, 1;
                st.global.u32 [%address], %value;
                ret;
            }";
        let Device::Cuda(device) = &self.device else {
            return Ok(());
        };
        let kernel = device.get_or_load_custom_func("poison", "moored_poison", KERNEL)?;
        let address = 0x10_u64;
        let mut launch = kernel.builder();
        launch.arg(&address);
        let one = cudarc::driver::LaunchConfig::for_num_elems(1);
        // SAFETY: none, on purpose: the worker's settings request an illegal access, and the worker ends by it.
        // Nothing is written: the address is unmapped.
        unsafe { launch.launch(one) }.map_err(candle_core::Error::wrap)?;
        Ok(())
    }
}

/// The card's ordinal in CUDA's order, which differs from NVML's. No context is created.
fn ordinal_of(uuid: &str) -> Result<usize, GpuError> {
    cudarc::driver::result::init().map_err(lost)?;
    let count = cudarc::driver::result::device::get_count().map_err(lost)?;
    for ordinal in 0..count {
        let device = cudarc::driver::result::device::get(ordinal).map_err(lost)?;
        let found = cudarc::driver::result::device::get_uuid(device).map_err(lost)?;
        if digits_of(uuid).eq_ignore_ascii_case(digits_of(&uuid_text(&found))) {
            return Ok(ordinal as usize);
        }
    }
    Err(GpuError::Lost(format!(
        "CUDA shows {count} card(s), and {uuid} is none of them: is CUDA_VISIBLE_DEVICES set?"
    )))
}

/// The UUID without its prefix: `GPU-`, or `MIG-` for a slice.
fn digits_of(uuid: &str) -> &str {
    uuid.split_once('-').map_or(uuid, |(_, digits)| digits)
}

/// In NVML's notation: `GPU-` and 32 hexadecimal digits in five groups.
fn uuid_text(uuid: &sys::CUuuid) -> String {
    let digits: String = uuid.bytes.iter().map(|b| format!("{:02x}", *b as u8)).collect();
    let [a, b, c, d, e] = [
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..],
    ];
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// Sets a booked workspace for cuBLAS.
fn give_workspace(device: &CudaDevice, pool: &Pool, stream: &CudaStream) -> Result<(), GpuError> {
    let workspace = pool.allocate(CUBLAS_WORKSPACE.0, stream).map_err(|error| {
        if is_out_of_memory(error) {
            GpuError::Lost(format!("there is not even {CUBLAS_WORKSPACE} for cuBLAS"))
        } else {
            lost(error)
        }
    })?;
    stream.synchronize().map_err(lost)?;
    let blas = device.cublas_handle();
    // SAFETY: the handle is alive; the workspace has this size, in this context, and is never freed: both live until
    // the process ends.
    let set = unsafe {
        cudarc::cublas::sys::cublasSetWorkspace_v2(
            *blas.handle(),
            workspace as *mut std::ffi::c_void,
            CUBLAS_WORKSPACE.0 as usize,
        )
    };
    set.result()
        .map_err(|e| GpuError::Lost(format!("cuBLAS takes no workspace: {e:?}")))?;
    let mut workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
    workspaces.insert(
        stream.context().cu_ctx() as usize,
        (workspace, CUBLAS_WORKSPACE.0 as usize),
    );
    Ok(())
}

/// Workspace of each context: address and bytes.
static WORKSPACES: LazyLock<Mutex<HashMap<usize, (u64, usize)>>> = LazyLock::new(Mutex::default);

/// Address and bytes of the workspace of a card opened here, for libraries that compute on its only stream. Never
/// freed.
pub fn library_workspace(context: &CudaContext) -> Option<(u64, usize)> {
    let workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
    workspaces.get(&(context.cu_ctx() as usize)).copied()
}

/// A tensor that owns an allocation. `None` for a dtype without a CUDA form.
fn tensor_at(
    source: &TensorSource,
    pointer: sys::CUdeviceptr,
    stream: &Arc<CudaStream>,
    device: &CudaDevice,
) -> Option<Tensor> {
    let dtype = reader::read_as(source.target);
    let count = source.bytes_on_card().0 as usize / dtype.size_in_bytes();
    macro_rules! slice {
        ($variant:ident) => {
            // SAFETY: the allocation is live, has this many numbers of this width, is filled, and has no other owner.
            CudaStorageSlice::$variant(unsafe { stream.upgrade_device_ptr(pointer, count) })
        };
    }
    let slice = match dtype {
        DType::U8 => slice!(U8),
        DType::I64 => slice!(I64),
        DType::F16 => slice!(F16),
        DType::BF16 => slice!(BF16),
        DType::F32 => slice!(F32),
        DType::F64 => slice!(F64),
        _ => return None,
    };
    let storage = CudaStorage {
        slice,
        device: device.clone(),
    };
    Some(Tensor::from_storage(
        Storage::Cuda(storage),
        source.shape_on_card(),
        BackpropOp::none(),
        false,
    ))
}

fn lost(error: DriverError) -> GpuError {
    GpuError::Lost(error.to_string())
}
