//! [`crate::euler`] on a CUDA device.

use candle_core::{Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::{Card, THREADS, address_of, kernel_dtype};
use crate::Finite;

/// As `euler.cuh` has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    latent: u64,
    velocity: u64,
    seen: u64,
    not_finite: u64,
    by: f32,
    count: u32,
}

// SAFETY: plain data, laid out as C lays it out.
unsafe impl DeviceRepr for Arguments {}

/// Shapes and dtypes were checked.
pub(crate) fn euler(
    latent: &Tensor,
    velocity: &Tensor,
    by: f32,
    seen: &Tensor,
    finite: &Finite,
) -> Result<()> {
    let count = latent.elem_count();
    let arguments = Arguments {
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
    // SAFETY: the structure is that of `euler.cuh`; each tensor has so many numbers without gaps, of these dtypes.
    unsafe { card.launch(&device.cuda_stream(), name, (blocks, 1, 1), THREADS, &arguments) }
}
