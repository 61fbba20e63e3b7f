//! [`crate::euler()`] on a CUDA device.

use candle_core::{Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::{Card, THREADS, address_of, kernel_dtype};
use crate::Finite;

/// Mirrors the struct in `euler.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct EulerArguments {
    latent: u64,
    velocity: u64,
    seen: u64,
    not_finite: u64,
    by: f32,
    count: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for EulerArguments {}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn euler(
    latent: &Tensor,
    velocity: &Tensor,
    by: f32,
    seen: &Tensor,
    finite: &Finite,
) -> Result<()> {
    let count = latent.elem_count();
    let arguments = EulerArguments {
        latent: address_of(latent)?,
        velocity: address_of(velocity)?,
        seen: address_of(seen)?,
        not_finite: address_of(finite.flag()?)?,
        by,
        count: u32::try_from(count).map_err(candle_core::Error::wrap)?,
    };
    let device = latent.device().as_cuda_device()?;
    let card = Card::of(device)?;
    let name = format!("euler_{}", kernel_dtype(velocity.dtype())?);
    let blocks = count.div_ceil(THREADS);
    // SAFETY: the structure mirrors `euler.cuh`; the tensors are contiguous, with this many elements of these dtypes.
    unsafe { card.launch(&device.cuda_stream(), name, (blocks, 1, 1), THREADS, &arguments) }
}
