//! The [`Gpu`] trait: the interface between a card and the other crates.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::{DType, Device};
use residency::{Bytes, Component, ComponentId, DriverTruth, HostMemory, Part};
use serde::{Deserialize, Serialize};

use crate::cpu::read_on_host;
use crate::faults::FaultAction;
use crate::load::{LoadError, LoadPlan, LoadProgress};
use crate::tensors::ComponentTensors;

/// Kind of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CardKind {
    /// System memory and the processor.
    Cpu,
    /// Simulated: capacity, transfer speed and faults are settings.
    Simulated,
    Cuda,
}

/// Public description of a card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CardDescription {
    /// `cpu`, `sim:0`, or a CUDA card's UUID.
    pub id: String,
    pub kind: CardKind,
    /// Product name, for display.
    pub name: String,
    pub total: Bytes,
    /// CUDA compute capability (major, minor).
    pub compute_capability: Option<(u32, u32)>,
    /// Default computation dtype: `f32` on the CPU, `bf16` on a GPU.
    pub compute_dtype: String,
    pub peers: Peers,
}

/// The other cards to whose memory a card can write by itself (peer access), by NVLink or PCIe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Peers {
    /// Every card of its kind.
    All,
    /// Those with these ids.
    Only(BTreeSet<String>),
}

impl Peers {
    /// No card, as of a processor.
    pub fn none() -> Peers {
        Peers::Only(BTreeSet::new())
    }

    /// Whether it can write to the memory of this card of its kind.
    pub fn has(&self, id: &str) -> bool {
        match self {
            Peers::All => true,
            Peers::Only(ids) => ids.contains(id),
        }
    }
}

/// The first compute capability whose cards multiply in fp8.
pub const FP8_PRODUCTS_SINCE: (u32, u32) = (8, 9);

impl CardDescription {
    /// Whether the card multiplies in fp8, so that products of such weights are faster than of others.
    pub fn has_fp8_products(&self) -> bool {
        self.compute_capability
            .is_some_and(|capability| capability >= FP8_PRODUCTS_SINCE)
    }
}

/// How fast a card is, as far as that is known: what the time of a stage is predicted from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardSpeeds {
    /// Bytes a second at which streamed blocks reach the card.
    pub link: Option<Bytes>,
    /// Floating-point operations a second, of large products in the dtype that the card computes in.
    pub flops: Option<u64>,
}

/// When the bytes of a component reach the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) enum Arrival {
    /// Before its load ends.
    Now,
    /// Some of them while a stage goes over their blocks for the first time.
    WithFirstPass,
}

/// Result of an unload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unloaded {
    /// Bytes booked for the component.
    pub booked: Bytes,
    /// Bytes that the driver shows as free since the unload.
    pub freed: Bytes,
}

/// A failure of the card.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The component is not loaded.
    #[error("component {0} is not on this card")]
    NotLoaded(ComponentId),
    /// Tensor handles of the component are still alive: unloading would free nothing.
    #[error("component {0} is still in use by {1} holder(s) of its tensors")]
    StillInUse(ComponentId, usize),
    /// A component was unloaded and its memory was not freed, because tensors of it are still alive. Only a new
    /// worker process recovers these bytes.
    #[error("component {component} left {bytes} behind, in {}", tensors.join(", "))]
    Leaked {
        component: ComponentId,
        bytes: Bytes,
        /// Names of its tensors that are still allocated.
        tensors: Vec<String>,
    },
    /// The driver's memory figures are unavailable.
    #[error("the memory figures of the card cannot be read: {0}")]
    Truth(String),
    /// The card is lost: only a new worker process recovers it.
    #[error("the card is lost: {0}")]
    Lost(String),
}

/// One card, owned by one thread. All memory of components is allocated by [`Gpu::load`] and freed by
/// [`Gpu::unload`].
pub trait Gpu {
    /// Identity and capacity of the card.
    fn describe(&self) -> &CardDescription;

    /// The device that tensors of this card live on.
    fn device(&self) -> &Device;

    /// The dtype that pipelines compute in on this card.
    fn compute_dtype(&self) -> DType;

    /// How fast the card is, as it was measured once, or as its settings say.
    fn speeds(&self) -> CardSpeeds {
        CardSpeeds::default()
    }

    /// The driver's current memory figures.
    ///
    /// # Errors
    /// [`GpuError::Truth`] or [`GpuError::Lost`].
    fn memory(&mut self) -> Result<DriverTruth, GpuError>;

    /// Loads one component, or a part of it, into separate memory. Calls `progress` at least every 64 MiB; `Break` cancels. A
    /// cancelled or failed load leaves no byte allocated. The blocks that the part lacks are streamed while a stage runs
    /// ([`ComponentTensors::stream`]).
    ///
    /// # Errors
    /// [`LoadError`]; the component is not on the card then.
    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError>;

    /// As [`Gpu::load`], for a component that a stage goes over next. Blocks that take less than a second may be left: they are read
    /// once the stage has taken the tensors, while the card computes those before them. Returns their bytes.
    ///
    /// # Errors
    /// As [`Gpu::load`].
    fn load_for_a_stage(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<Bytes, LoadError> {
        self.load(component, plan, part, progress).map(|()| Bytes::ZERO)
    }

    /// Whether blocks of a component are left that [`Gpu::load_for_a_stage`] has not read, nor a stage since.
    fn has_unread(&self, _id: &ComponentId) -> bool {
        false
    }

    /// Keeps another part of a loaded component on the card. What is in both parts is not loaded again; what is in the new one
    /// alone is read as it was by [`Gpu::load`], and memory that it does not need is freed. After an error the component is on the
    /// card as before.
    ///
    /// # Errors
    /// [`LoadError`]; [`LoadError::StillInUse`] if tensor handles are alive.
    fn resize(
        &mut self,
        component: &Component,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError>;

    /// The tensors of a loaded component. The handle must be dropped before [`Gpu::unload`].
    ///
    /// # Errors
    /// [`GpuError::NotLoaded`].
    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError>;

    /// Reads a component into host memory, from where the card reads it while it computes. For components for which the card
    /// has no memory. The handle frees the memory when it is dropped. Calls `progress` as [`Gpu::load`] does.
    ///
    /// # Errors
    /// [`LoadError`].
    fn read_on_host(
        &mut self,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<ComponentTensors, LoadError> {
        read_on_host(plan, progress)
    }

    /// Frees a component and verifies by the driver's figures that its memory was freed.
    ///
    /// # Errors
    /// [`GpuError::StillInUse`] if tensor handles are alive; nothing is freed then. [`GpuError::Leaked`] if the
    /// component was removed and its memory was not freed.
    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError>;

    /// The machine's memory that components hold: see [`HostMemory`].
    fn on_host(&self) -> HostMemory {
        HostMemory::default()
    }

    /// The most of the machine's memory that components may hold; `None`: what is available, less a share for others.
    fn limit_on_host(&mut self, _limit: Option<Bytes>) {}

    /// Frees the memory of the machine that is kept for a component that is not on the card.
    fn forget_on_host(&mut self, _id: &ComponentId) {}

    /// Frees memory of the machine that is kept for components that are not on the card, as far as others are short of it.
    fn relieve_host(&mut self) {}

    /// Returns slack to the driver and returns its bytes.
    ///
    /// # Errors
    /// [`GpuError::Lost`].
    fn trim(&mut self) -> Result<Bytes, GpuError>;

    /// The largest single allocation that would succeed now, up to `enough`. Smaller than free memory where that is
    /// fragmented. Slack of activations is not counted.
    ///
    /// # Errors
    /// [`GpuError::Lost`] or [`GpuError::Truth`].
    fn largest_allocation(&mut self, enough: Bytes) -> Result<Bytes, GpuError> {
        Ok(self.memory()?.free.min(enough))
    }

    /// Makes activations have one free block of these bytes, from which the next stage allocates. If the card lacks memory for it, they
    /// are given memory as the stage allocates.
    ///
    /// # Errors
    /// [`GpuError::Lost`].
    fn reserve_scratch(&mut self, _bytes: Bytes) -> Result<(), GpuError> {
        Ok(())
    }

    /// Starts measuring the activation peak of a stage; [`Gpu::stage_peak`] ends it.
    fn begin_stage(&mut self);

    /// Says how many floating-point operations a pass of the stage that begins takes; 0 where that is unknown. A simulated card,
    /// which computes nothing, takes the time for them.
    fn expect_passes_of(&mut self, _flops: u64) {}

    /// Ends the measurement: the maximum of activation bytes since [`Gpu::begin_stage`]. Called once per stage, after
    /// its tensors were dropped.
    fn stage_peak(&mut self) -> Bytes;

    /// The fault to inject at this point, on a card whose settings ask for one. The worker calls it before each stage
    /// (with the stage's name) and before each load (`load`), and carries the fault out.
    fn fault_at(&mut self, _place: &str) -> Option<FaultAction> {
        None
    }
}

impl fmt::Debug for dyn Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("id", &self.describe().id)
            .finish_non_exhaustive()
    }
}
