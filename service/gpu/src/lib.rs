//! HOLDS. Device memory: the [`Gpu`] trait with its cards, the readers that stream checkpoint bytes into
//! components, and the driver's figures, which are authoritative.
#![deny(clippy::undocumented_unsafe_blocks)]

#[allow(unsafe_code)] // A global allocator is an unsafe trait.
pub mod allocator;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))] // Only activations of a real card live in one.
mod arena;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
// Only on a real card does anything arrive while it computes.
mod arriving;
mod blocks;
mod card;
mod checkpoint;
#[allow(unsafe_code)] // Numbers are read as bytes.
mod convert;
mod cpu;
#[cfg(feature = "cuda")]
#[allow(unsafe_code)] // The driver's allocator is C.
mod cuda;
mod cuda_settings;
mod discover;
mod faults;
mod files;
mod format;
mod holders;
mod host_stream;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
// A simulated card has no others that are short of memory.
mod host_tier;
mod kept;
mod load;
#[cfg(feature = "cuda")]
pub mod nvml;
mod profile;
#[allow(unsafe_code)] // Wider registers are asked for.
mod quantize;
mod reader;
mod schedule;
mod simulated;
mod size;
#[allow(unsafe_code)] // `malloc_trim` and `_exit` are C.
mod system;
mod tensors;
mod timeline;

pub use allocator::CountingAllocator;
pub use blocks::{BlockPlace, BlockSize, Uses, parts_of_blocks};
pub use card::{CardDescription, CardKind, CardSpeeds, FP8_PRODUCTS_SINCE, Gpu, GpuError, Peers, Unloaded};
pub use checkpoint::{CheckpointFile, MAX_HEADER_BYTES, TensorEntry, git_lfs_pointer};
pub use cpu::{CpuCard, CpuSettings};
#[cfg(feature = "cuda")]
pub use cuda::{OpenedMemory, SHARED_HANDLE_BYTES, SharedMemory, SharedNumber, library_workspace};
pub use cuda_settings::{CudaDtype, CudaSettings, CudaSettingsError, CudaWhich};
pub use discover::{DeviceChoice, DeviceSpec, DeviceSpecError, Discovered, OpenError, open};
pub use faults::{Fault, FaultAction};
pub use files::{
    FileStamp, all_text_of, create_private_folder, open_private, open_regular, read_bounded, text_bounded,
};
pub use format::{
    ColumnFactors, FP8_BLOCK, Fp8Scales, GgufType, GroupNumbers, INT8_STEP, InputShift, Int4Order,
    Int8Scales, MXFP8_BLOCK, NF4_BLOCK, NF4_NESTED_BLOCK, NVFP4_BLOCK, Nvfp4Order, Rotation,
    SVDQUANT_FP4_GROUP, SVDQUANT_INT4_GROUP, ScaleOrder, SvdquantCodes, W4A8Codes, W4A8Scales, WeightFormat,
    WeightFormatError, WeightPart, autoawq_nibble, e2m1_to_f32, e4m3_to_f32, e5m2_to_f32, e8m0_to_f32,
    rows_and_columns, svdquant_down, svdquant_fp4_scale, svdquant_nibble, svdquant_number, svdquant_up,
    swizzled, tinychat_word,
};
pub use holders::{CardProcess, UNLISTED, UNSEEN, foreign_holders, process_name};
pub use kept::{KeepError, KeptFolder, keep, kept_bytes, kept_plan};
pub use load::{
    ByteRange, LoadError, LoadPlan, LoadProgress, SourcePiece, Stored, Synthetic, Target, TensorSource,
};
pub use profile::{MemoryProfile, ProfileError, ProfileName};
pub use quantize::{E4M3_MAX, QuantizeError, f32_to_e4m3, nested_table, nf4_table, quantize};
pub use simulated::{
    FailLoad, LoadFailure, ManualClock, OutOfMemory, RealClock, ScratchGuard, SettingsError,
    SimulatedAccounts, SimulatedCard, SimulatedClock, SimulatedSettings, SimulatedWorld, simulated_scratch,
};
pub use size::{SizeError, exact_bytes, parse_bytes};
pub use system::{SystemMemory, SystemReader, close_inherited, end_process, refuses_call};
pub use tensors::{ComponentTensors, MissingTensor, QuantizedWeight, Weight, WeightStream, to_device};
pub use timeline::Timeline;
