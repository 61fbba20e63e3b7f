//! An NVIDIA card.
//!
//! Each component has a memory pool of its own, allocated from explicitly; activations live in the device's default pool,
//! which nothing of ours ever replaces. What the pools have in use and in reserve, together with the driver's free bytes,
//! is the ledger's truth. One thread owns the card and makes every allocation's last drop; reading threads only fill
//! pinned memory and ask for copies.

mod placer;
mod pool;
mod quantize;
mod staging;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Storage, Tensor};
use cudarc::driver::{CudaContext, CudaStream, DriverError, PushKernelArg as _, sys};
use residency::{Bytes, Component, ComponentId, DriverTruth};

use crate::card::{CardDescription, Gpu, GpuError, Unloaded};
use crate::cuda_settings::CudaSettings;
use crate::faults::{FaultAction, FaultSchedule};
use crate::load::{LoadError, LoadPlan, LoadProgress, Target, TensorSource};
use crate::nvml::NvmlCard;
use crate::profile::MemoryProfile;
use crate::reader;
use crate::tensors::ComponentTensors;
use crate::timeline::Timeline;
use pool::{Pool, has_in_one_piece, is_allocated, is_out_of_memory};
use quantize::Kernels;
use staging::{Allocation, PinnedRing, Staging};

/// cuBLAS takes a workspace of its own, unseen, unless it is given one. This is what it takes on compute capability 9;
/// older cards need less and lose nothing.
const CUBLAS_WORKSPACE: Bytes = Bytes::mib(32);

/// What code and stacks of newly loaded kernels may add to the context within one stage. Where NVML does not show our own
/// process, what exceeds it is taken for somebody else's.
const CONTEXT_GROWTH: Bytes = Bytes::mib(256);

/// What the pools of a component and of the load's own workspace may take beside what is allocated from them: each grows
/// by pieces of 32 MiB.
const POOL_ROUNDING: Bytes = Bytes::mib(64);

/// How close the search for the largest allocation comes.
const PROBE_STEP: Bytes = Bytes::mib(16);

/// An NVIDIA card, with its context in this process.
pub(crate) struct CudaCard {
    description: CardDescription,
    dtype: DType,
    device: Device,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    activations: Pool,
    /// Library workspaces: allocated once.
    workspaces: Pool,
    staging: Staging,
    held: HashMap<ComponentId, Held>,
    nvml: NvmlCard,
    context_bytes: Bytes,
    /// Allocated from the activation pool when the stage that is measured began.
    stage_began: Bytes,
    faults: FaultSchedule,
    /// Why nothing of the card may be touched any more. cudarc tells of an error once and then looks healthy.
    lost: Option<String>,
}

struct Held {
    tensors: Arc<ComponentTensors>,
    /// Name and address of each tensor, to name those that do not come back.
    addresses: Vec<(String, sys::CUdeviceptr)>,
    pool: Pool,
    booked: Bytes,
}

/// What computes on a card, and what it allocates from.
struct Libraries {
    device: Device,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    activations: Pool,
    workspaces: Pool,
    kernels: Kernels,
}

impl Libraries {
    fn open(
        ordinal: usize,
        dtype: DType,
        profile: &MemoryProfile,
        timeline: &mut Timeline,
    ) -> Result<Libraries, GpuError> {
        let device = CudaDevice::new_with_stream(ordinal).map_err(|e| GpuError::Lost(e.to_string()))?;
        timeline.part("cuBLAS and cuRAND handles");
        // SAFETY: one stream computes and one thread drops; the copy streams are synchronised before anything that they
        // wrote is used or freed.
        unsafe { device.disable_event_tracking() };
        let stream = device.cuda_stream();
        let context = Arc::clone(stream.context());
        let activations = Pool::of_activations(&context, profile.release_threshold).map_err(lost)?;
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

/// Makes the libraries load what every stage needs, so that the context is its size from the start. No kernel of the tensor
/// library's own: the driver would compile its module here, for seconds on a machine that never has.
fn warm_up(device: &Device, dtype: DType) -> candle_core::Result<()> {
    let ones = Tensor::ones((64, 64), dtype, &Device::Cpu)?.to_device(device)?;
    ones.matmul(&ones)?.to_device(&Device::Cpu)?;
    Ok(())
}

/// Makes cuBLAS load its code for f32, which the card is proved by, beside that for what stages compute in: the driver loads
/// both in the time of one. By handles of its own, which end here. It is advice: what fails here fails again where it counts.
fn warm_up_in_f32(ordinal: usize) {
    let began = std::time::Instant::now();
    let device = CudaDevice::new_with_stream(ordinal);
    if let Err(error) = device.and_then(|device| warm_up(&Device::Cuda(device), DType::F32)) {
        tracing::debug!(%error, "no first product in f32");
    }
    Timeline::tell(
        "open the card",
        "first product in f32, on a thread of its own",
        began.elapsed(),
    );
}

impl CudaCard {
    /// Opens a card on this thread, which is to own it. `generation` is the how manieth worker process this is for it.
    ///
    /// # Errors
    /// [`GpuError::Lost`] if there is no such card or it does not answer.
    pub(crate) fn new(
        settings: &CudaSettings,
        profile: &MemoryProfile,
        generation: u64,
    ) -> Result<CudaCard, GpuError> {
        let mut timeline = Timeline::begin("open the card");
        // Two libraries of the driver, each with questions of its own to ask of all cards. Neither makes a context.
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
        // Another handle of the context that the libraries get theirs of.
        let primary = CudaContext::new(ordinal).map_err(lost)?;
        timeline.part("context");
        let dtype = settings.compute_dtype(nvml.compute_capability);
        // The system locks memory while libraries find their code.
        let (pinned, libraries) = std::thread::scope(|scope| {
            let pinned =
                scope.spawn(|| PinnedRing::new(&primary, profile.staging_bytes, profile.staging_chunk));
            let in_f32 = (dtype != DType::F32).then(|| scope.spawn(|| warm_up_in_f32(ordinal)));
            let libraries = Libraries::open(ordinal, dtype, profile, &mut timeline);
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
        let staging = Staging::new(&stream, kernels, pinned).map_err(lost)?;
        timeline.part("the rest of the pinned memory, streams");
        let mut description = nvml.describe();
        dtype.as_str().clone_into(&mut description.compute_dtype);
        let mut card = CudaCard {
            description,
            dtype,
            device,
            context,
            stream,
            activations,
            workspaces,
            staging,
            held: HashMap::new(),
            nvml,
            context_bytes: Bytes::ZERO,
            stage_began: Bytes::ZERO,
            faults: FaultSchedule::new(settings.faults.clone(), generation, settings.die_generations),
            lost: None,
        };
        let free_now = card
            .nvml
            .memory()
            .map_err(|e| GpuError::Lost(e.to_string()))?
            .free;
        let pools = card.pools()?;
        card.context_bytes = (free_before - free_now) - pools.reserved();
        card.description.total = card.driver_memory()?.1;
        tracing::info!(
            card = card.description.id, context = %card.context_bytes, pinned = %card.staging.bytes(), %profile,
            "the card is open"
        );
        timeline.part("measure the context");
        timeline.end();
        Ok(card)
    }

    fn alive(&self) -> Result<(), GpuError> {
        match &self.lost {
            Some(why) => Err(GpuError::Lost(why.clone())),
            None => Ok(()),
        }
    }

    /// Remembers that the card is lost, if this says so.
    fn latch<T>(&mut self, result: Result<T, DriverError>) -> Result<T, GpuError> {
        result.map_err(|error| {
            let why = error.to_string();
            self.lost.get_or_insert_with(|| why.clone());
            GpuError::Lost(why)
        })
    }

    /// Free and total bytes, as the driver has them.
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
        Ok(Pools {
            components: components.0,
            components_reserved: components.1,
            scratch: self.activations.used().map_err(lost)?,
            scratch_reserved: self.activations.reserved().map_err(lost)?,
            workspaces: self.workspaces.reserved().map_err(lost)?,
        })
    }

    /// Sees to it that what a stage's kernels added to the context is not taken for somebody else's memory.
    fn measure_context(&mut self, may_have_grown: bool) -> Result<(), GpuError> {
        let pools = self.pools()?;
        let (free, total) = self.driver_memory()?;
        let besides = total - free - pools.reserved();
        let own = self.nvml.own_bytes().map(|own| own - pools.reserved());
        self.context_bytes = match own {
            Some(own) => own.min(besides),
            None if may_have_grown && besides - self.context_bytes <= CONTEXT_GROWTH => besides,
            None => self.context_bytes.min(besides),
        };
        Ok(())
    }

    fn free_all(&mut self, allocations: &[Allocation<'_>], pool: Pool) -> Result<(), GpuError> {
        for allocation in allocations {
            // SAFETY: allocated for a load that came to nothing; all copies to it have been waited for.
            let freed = unsafe { pool::free(allocation.pointer, &self.stream) };
            self.latch(freed)?;
        }
        let done = self.stream.synchronize().and_then(|()| pool.trim());
        self.latch(done)
    }

    /// Makes tensors of allocations, each of which is filled.
    fn tensors_of(&self, allocations: &[Allocation<'_>]) -> Result<ComponentTensors, LoadError> {
        let Device::Cuda(device) = &self.device else {
            return Err(LoadError::Lost("the card is not a CUDA device".to_owned()));
        };
        let mut tensors = HashMap::with_capacity(allocations.len());
        for Allocation { source, pointer } in allocations {
            // The plan was checked against what can be read, which is less than what CUDA has forms for. An error other
            // than a loss would free twice what is a tensor already.
            let tensor = tensor_at(source, *pointer, &self.stream, device).ok_or_else(|| {
                LoadError::Lost(format!("tensor {} has no form {:?}", source.name, source.target))
            })?;
            tensors.insert(source.name.clone(), reader::weight_of(source, tensor));
        }
        Ok(ComponentTensors::of_weights(tensors))
    }
}

/// What the pools have, each by its own account.
struct Pools {
    /// As booked.
    components: Bytes,
    components_reserved: Bytes,
    scratch: Bytes,
    scratch_reserved: Bytes,
    workspaces: Bytes,
}

impl Pools {
    /// All that they have of the card.
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

    fn memory(&mut self) -> Result<DriverTruth, GpuError> {
        self.alive()?;
        let pools = self.pools()?;
        let (free, total) = self.driver_memory()?;
        let besides = total - free - pools.reserved();
        let context = self.context_bytes.min(besides);
        Ok(DriverTruth {
            total,
            free,
            components: pools.components,
            scratch: pools.scratch,
            slack: pools.scratch_reserved - pools.scratch,
            // The driver hands memory out in pieces: what a component's pool has beyond its tensors is of no use to
            // anybody else while it is there.
            workspaces: pools.workspaces + (pools.components_reserved - pools.components),
            context,
            holders: self.nvml.holders(besides - context),
        })
    }

    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let mut timeline = Timeline::begin("load");
        let gone = |error: GpuError| LoadError::Lost(error.to_string());
        self.alive().map_err(gone)?;
        let sources = plan.files()?;
        if self.held.contains_key(&component.id) {
            return Err(LoadError::Unsupported(format!(
                "component {} is already there",
                component.id
            )));
        }
        let booked = plan.bytes();
        let files = reader::open(sources)?;
        reader::tell(progress, Bytes::ZERO, booked)?;
        // Some of it for the load alone, out of what plans leave free: a load that quantizes makes do with what is there.
        let needed = booked + self.staging.least_workspace(sources)?;
        let (free, _) = self.driver_memory().map_err(gone)?;
        if needed > free {
            return Err(LoadError::OutOfMemory { needed, free });
        }
        let room = free - booked - POOL_ROUNDING;
        let pool = Pool::new(&self.context);
        let pool = self.latch(pool).map_err(gone)?;
        timeline.part("open files, make a pool");
        let mut made = Vec::with_capacity(sources.len());
        let loaded = self
            .staging
            .load(sources, &files, &pool, &mut made, room, progress);
        timeline.part("read and copy");
        let outcome = loaded
            .and_then(|()| reader::check_unchanged(&files))
            .and_then(|()| reader::tell(progress, booked, booked))
            .and_then(|()| self.tensors_of(&made));
        timeline.part("check files, make tensors");
        match outcome {
            Ok(tensors) => {
                let trimmed = pool.trim();
                self.latch(trimmed).map_err(gone)?;
                let named = |a: &Allocation<'_>| (a.source.name.clone(), a.pointer);
                self.held.insert(
                    component.id.clone(),
                    Held {
                        tensors: Arc::new(tensors),
                        addresses: made.iter().map(named).collect(),
                        pool,
                        booked,
                    },
                );
                timeline.part("trim");
                timeline.end();
                Ok(())
            }
            Err(LoadError::Lost(why)) => {
                // Nothing of a lost card may be touched, not even to free it.
                std::mem::forget(pool);
                self.lost.get_or_insert_with(|| why.clone());
                Err(LoadError::Lost(why))
            }
            Err(error) => {
                self.free_all(&made, pool).map_err(gone)?;
                Err(error)
            }
        }
    }

    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError> {
        self.alive()?;
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        Ok(Arc::clone(&held.tensors))
    }

    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError> {
        self.alive()?;
        let held = self.held.get(id).ok_or_else(|| GpuError::NotLoaded(id.clone()))?;
        let others = Arc::strong_count(&held.tensors) - 1;
        if others > 0 {
            return Err(GpuError::StillInUse(id.clone(), others));
        }
        let Some(Held {
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
        // A failed drop is recorded in the context and comes out of this synchronisation.
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
        self.alive()?;
        let before = self.activations.reserved();
        let before = self.latch(before)?;
        let trimmed = self.stream.synchronize().and_then(|()| self.activations.trim());
        self.latch(trimmed)?;
        let after = self.activations.reserved();
        Ok(before - self.latch(after)?)
    }

    fn largest_allocation(&mut self, enough: Bytes) -> Result<Bytes, GpuError> {
        self.alive()?;
        let (free, _) = self.driver_memory()?;
        let most = enough.min(free);
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

    fn begin_stage(&mut self) {
        let began = self
            .activations
            .forget_peak()
            .and_then(|()| self.activations.used());
        self.stage_began = self.latch(began).unwrap_or(Bytes::ZERO);
    }

    fn stage_peak(&mut self) -> Bytes {
        let peak = self.stream.synchronize().and_then(|()| self.activations.peak());
        let peak = self.latch(peak).unwrap_or(self.stage_began);
        if let Err(error) = self.measure_context(true) {
            tracing::warn!(%error, "the size of the context is not known");
        }
        peak - self.stage_began
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
            FaultAction::Die | FaultAction::Hang | FaultAction::Leak => {}
        }
        Some(action)
    }
}

impl CudaCard {
    /// Writes to an address that nobody has, as a faulty kernel does. What follows on the card fails.
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
        // SAFETY: none at all, which is the point: the worker's settings ask for an illegal access, and the worker is
        // ended for it. It writes nothing: the address is mapped nowhere.
        unsafe { launch.launch(one) }.map_err(candle_core::Error::wrap)?;
        Ok(())
    }
}

/// The card's number in the order of CUDA, which is not NVML's. No context is made for any of those that are asked.
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

/// A UUID without the word before it: `GPU-`, or `MIG-` for a part of a card.
fn digits_of(uuid: &str) -> &str {
    uuid.split_once('-').map_or(uuid, |(_, digits)| digits)
}

/// As NVML writes it: `GPU-` and 32 hexadecimal digits in five groups.
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

/// Hands cuBLAS a workspace that is booked.
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
    // SAFETY: the handle is alive; the workspace is of this size, in this context, and is never freed: it ends with the
    // process, as the handle does.
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

/// Workspaces of contexts: address and bytes.
static WORKSPACES: LazyLock<Mutex<HashMap<usize, (u64, usize)>>> = LazyLock::new(Mutex::default);

/// The address and bytes of the workspace of a card that was opened here, for the libraries that compute on its one
/// stream. It is never freed.
pub fn library_workspace(context: &CudaContext) -> Option<(u64, usize)> {
    let workspaces = WORKSPACES.lock().unwrap_or_else(PoisonError::into_inner);
    workspaces.get(&(context.cu_ctx() as usize)).copied()
}

/// A tensor over an allocation, which it frees when its last clone is dropped. `None` for a dtype that has no CUDA form.
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
            // SAFETY: the allocation is live, of this many numbers of this width, filled, and freed by nobody else.
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
    let shape = match source.target {
        Target::Full(_) => source.shape.clone(),
        Target::Quantized(_) => vec![count],
    };
    Some(Tensor::from_storage(
        Storage::Cuda(storage),
        shape,
        BackpropOp::none(),
        false,
    ))
}

fn lost(error: DriverError) -> GpuError {
    GpuError::Lost(error.to_string())
}
