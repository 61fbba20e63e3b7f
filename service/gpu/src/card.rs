//! What a card is to the rest of the house.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_core::{DType, Device};
use residency::{Bytes, Component, ComponentId, DriverTruth};
use serde::{Deserialize, Serialize};

use crate::faults::FaultAction;
use crate::load::{LoadError, LoadPlan, LoadProgress};
use crate::tensors::ComponentTensors;

/// What sort of card it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CardKind {
    /// System memory and the processor.
    Cpu,
    /// A card that exists in arithmetic only: capacity, transfer speed and faults are settings.
    Simulated,
    /// An NVIDIA card.
    Cuda,
}

/// A card, as it is named to users.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CardDescription {
    /// `cpu`, `sim:0`, or a CUDA card's UUID.
    pub id: String,
    /// What sort of card it is.
    pub kind: CardKind,
    /// The product's name, for people.
    pub name: String,
    /// Capacity.
    pub total: Bytes,
    /// CUDA compute capability (major, minor).
    pub compute_capability: Option<(u32, u32)>,
    /// The dtype that pipelines compute in here: `f32` on the CPU, `bf16` on a GPU.
    pub compute_dtype: String,
}

/// How an unload ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unloaded {
    /// Bytes that were booked to the component.
    pub booked: Bytes,
    /// Bytes that the driver shows as free since.
    pub freed: Bytes,
}

/// A failure of the card itself.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The component is not on this card.
    #[error("component {0} is not on this card")]
    NotLoaded(ComponentId),
    /// Someone still holds tensors of the component: unloading would free nothing.
    #[error("component {0} is still in use by {1} holder(s) of its tensors")]
    StillInUse(ComponentId, usize),
    /// A component has left, and its memory has not: somebody keeps tensors of it. Only a new worker process brings
    /// these bytes back.
    #[error("component {component} left {bytes} behind, in {}", tensors.join(", "))]
    Leaked {
        /// What was unloaded.
        component: ComponentId,
        /// What stayed.
        bytes: Bytes,
        /// Its tensors that are still allocated.
        tensors: Vec<String>,
    },
    /// The driver's figures cannot be had.
    #[error("the memory figures of the card cannot be read: {0}")]
    Truth(String),
    /// The card is lost: only a new worker process helps.
    #[error("the card is lost: {0}")]
    Lost(String),
}

/// One card, owned by one thread. Every byte that a component takes goes through [`Gpu::load`] and leaves
/// through [`Gpu::unload`].
pub trait Gpu {
    /// Identity and capacity.
    fn describe(&self) -> &CardDescription;

    /// The device that tensors of this card live on.
    fn device(&self) -> &Device;

    /// The dtype that pipelines compute in on this card.
    fn compute_dtype(&self) -> DType;

    /// What the driver says now.
    ///
    /// # Errors
    /// [`GpuError::Truth`] or [`GpuError::Lost`].
    fn memory(&mut self) -> Result<DriverTruth, GpuError>;

    /// Reads one component into memory of its own. `progress` is called at least every 64 MiB and answers
    /// whether to go on; a cancelled or failed load leaves no byte behind.
    ///
    /// # Errors
    /// [`LoadError`]; the component is then not on the card.
    fn load(
        &mut self,
        component: &Component,
        plan: &LoadPlan,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError>;

    /// The tensors of a component that is loaded. The handle must be dropped before [`Gpu::unload`].
    ///
    /// # Errors
    /// [`GpuError::NotLoaded`].
    fn tensors(&self, id: &ComponentId) -> Result<Arc<ComponentTensors>, GpuError>;

    /// Drops a component and verifies by the driver's figures that its bytes came back.
    ///
    /// # Errors
    /// [`GpuError::StillInUse`] when tensor handles are still out; nothing is freed then. [`GpuError::Leaked`] when it
    /// left and its memory did not.
    fn unload(&mut self, id: &ComponentId) -> Result<Unloaded, GpuError>;

    /// Hands slack back to the driver and says how much.
    ///
    /// # Errors
    /// [`GpuError::Lost`].
    fn trim(&mut self) -> Result<Bytes, GpuError>;

    /// The largest single allocation that would succeed now, as far as `enough`: free memory that is there but not in
    /// one piece is of no use to whoever needs one piece. Slack of the activation pool is not counted.
    ///
    /// # Errors
    /// [`GpuError::Lost`] or [`GpuError::Truth`].
    fn largest_allocation(&mut self, enough: Bytes) -> Result<Bytes, GpuError> {
        Ok(self.memory()?.free.min(enough))
    }

    /// Starts measuring activation memory for a stage, which [`Gpu::stage_peak`] ends.
    fn begin_stage(&mut self);

    /// Ends the stage, whose tensors are dropped by now: the highest activation bytes since [`Gpu::begin_stage`].
    /// Asked once for each stage.
    fn stage_peak(&mut self) -> Bytes;

    /// What must go wrong here, on a simulated card whose settings say so. The worker asks before each stage
    /// (by the stage's name) and before each load (`load`), and carries out what it is told. Real cards need
    /// no help with going wrong.
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
