//! HOLDS. Device memory: the [`Gpu`] trait with its cards, the readers that stream checkpoint bytes into
//! components, and what the driver says is true.
#![deny(clippy::undocumented_unsafe_blocks)]

#[allow(unsafe_code)] // A global allocator is an unsafe trait.
pub mod allocator;
mod card;
mod checkpoint;
#[allow(unsafe_code)] // Numbers are read as bytes.
mod convert;
mod cpu;
mod discover;
mod load;
mod reader;
mod simulated;
mod size;
#[allow(unsafe_code)] // `malloc_trim` is C.
mod system;
mod tensors;

pub use allocator::CountingAllocator;
pub use card::{CardDescription, CardKind, Gpu, GpuError, Unloaded};
pub use checkpoint::{FileStamp, LONGEST_HEADER, SafetensorsFile, TensorEntry};
pub use cpu::{CpuCard, CpuSettings};
pub use discover::{DeviceSpec, DeviceSpecError, OpenError, open};
pub use load::{ByteRange, LoadError, LoadPlan, LoadProgress, Stored, TensorSource};
pub use simulated::{
    FailLoad, Fault, FaultAction, LoadFailure, ManualClock, OutOfMemory, RealClock, ScratchGuard,
    SettingsError, SimulatedAccounts, SimulatedCard, SimulatedClock, SimulatedSettings, SimulatedWorld,
    simulated_scratch,
};
pub use size::{SizeError, exact_bytes, parse_bytes};
pub use tensors::{ComponentTensors, MissingTensor};
