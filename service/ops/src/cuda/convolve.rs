//! [`crate::convolve()`] on a CUDA device: by cuDNN if it has a plan for the shape, otherwise by matrix products over
//! patches that are unrolled in batches.

use candle_core::{CudaDevice, DType, Result, Tensor};
use cudarc::driver::DeviceRepr;
use half::{bf16, f16};

use super::apply_norm::add_rows;
use super::moments::is_wide;
use super::{Card, UNIT, address_of, kernel_dtype, tensor};
use crate::convolve::{Filter, MapShape, Onto, TapOrder, unrolled_positions};
use crate::cudnn::{self, ConvolutionAt};
use crate::planned::uses_cudnn_in;

const THREADS: usize = 256;

/// Mirrors the struct in `convolve.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TapsArguments {
    weight: u64,
    out: u64,
    numbers: u64,
    inputs: u32,
    frames: u32,
    rows: u32,
    columns: u32,
    before: u32,
    all: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for TapsArguments {}

/// Mirrors the struct in `convolve.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UnrollArguments {
    x: u64,
    out: u64,
    first: u64,
    positions: u32,
    channels: u32,
    sides: [i32; 3],
    kernel: [i32; 3],
    before: [i32; 3],
    strides: [i32; 3],
    out_sides: [i32; 3],
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for UnrollArguments {}

/// An uninitialized tensor, which work on the device's stream will overwrite completely.
pub(crate) fn unwritten(shape: &[usize], dtype: DType, device: &CudaDevice) -> Result<Tensor> {
    let count = shape.iter().product();
    // SAFETY: the caller overwrites all of it before it is read, on the same stream.
    Ok(unsafe {
        match dtype {
            DType::F32 => tensor(device.alloc::<f32>(count)?, device, shape),
            DType::F16 => tensor(device.alloc::<f16>(count)?, device, shape),
            DType::BF16 => tensor(device.alloc::<bf16>(count)?, device, shape),
            DType::U8 => tensor(device.alloc::<u8>(count)?, device, shape),
            other => candle_core::bail!("maps are in f32, f16 or bf16, not {other:?}"),
        }
    })
}

/// Permutes `[out, in, taps]` to `[out, taps, in]`, with those taps that the order has.
pub(crate) fn taps_first(weight: &Tensor, order: TapOrder) -> Result<Tensor> {
    let (outputs, inputs, all) = weight.dims3()?;
    let taps = order.kernel.iter().product::<usize>();
    let device = weight.device().as_cuda_device()?;
    let [frames, rows, columns] = order.sides().map(|side| side as u32);
    let held = unwritten(&[outputs, taps, inputs], weight.dtype(), device)?;
    let arguments = TapsArguments {
        weight: address_of(weight)?,
        out: address_of(&held)?,
        numbers: held.elem_count() as u64,
        inputs: inputs as u32,
        frames,
        rows,
        columns,
        before: order.before as u32,
        all: all as u32,
    };
    let name = format!("taps_first_{}", kernel_dtype(weight.dtype())?);
    let grid = (held.elem_count().div_ceil(THREADS), 1, 1);
    // SAFETY: the arguments have the kernel's layout, and point to the elements that are written and to those of the weight,
    // of which each is read at most once; both tensors live until this is enqueued.
    unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, grid, THREADS, &arguments)? };
    Ok(held)
}

/// A convolution with validated shapes.
pub(crate) fn convolve(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    shape: &MapShape,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    let device = x.device().as_cuda_device()?;
    if filter.held.dtype() != x.dtype() {
        candle_core::bail!(
            "a map of {:?} and a filter of {:?}",
            x.dtype(),
            filter.held.dtype()
        );
    }
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let bias = bias.as_ref();
    if shape.is_product() {
        let rows = x.reshape((shape.positions(), shape.inputs))?;
        let product = rows.matmul(&filter.held.reshape((shape.outputs, shape.inputs))?.t()?)?;
        return add_rows(&product, 1.0, bias, onto == Onto::Itself, out);
    }
    if uses_cudnn_in(x.dtype()) {
        match onto {
            Onto::Nothing => {
                if by_cudnn(x, filter, bias, shape, out)? {
                    return Ok(());
                }
            }
            Onto::Itself => {
                let sum = unwritten(out.dims(), out.dtype(), device)?;
                if by_cudnn(x, filter, bias, shape, &sum)? {
                    return add_rows(&sum, 1.0, None, true, out);
                }
            }
        }
    }
    by_patches(x, filter, bias, shape, out, onto)
}

/// Returns whether cuDNN computed it; otherwise nothing was written. All tensors are contiguous, `out` may be a view.
fn by_cudnn(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    shape: &MapShape,
    out: &Tensor,
) -> Result<bool> {
    let Some(wanted) = shape.planned(x.dtype(), bias.is_some()) else {
        return Ok(false);
    };
    let at = ConvolutionAt {
        x: address_of(x)?,
        filter: address_of(&filter.held)?,
        bias: bias.map(address_of).transpose()?,
        out: address_of(out)?,
    };
    let device = x.device().as_cuda_device()?;
    let card = Card::of(device)?;
    let done = card
        .cudnn
        .with(device, |cudnn| cudnn::convolve(cudnn, &wanted, &at))?;
    Ok(done == Some(true))
}

/// Unrolls the patches of some positions at a time into rows, and multiplies them by one product.
fn by_patches(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    shape: &MapShape,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    let device = x.device().as_cuda_device()?;
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    let number = x.dtype().size_in_bytes();
    let patch = shape.taps() * shape.inputs;
    let weight = filter.held.reshape((shape.outputs, patch))?.t()?;
    let rows_out = out.reshape((shape.positions(), shape.outputs))?;
    let at_a_time = unrolled_positions(x.elem_count() * number, patch * number).min(shape.positions());
    let all = unwritten(&[at_a_time, patch], x.dtype(), device)?;
    let wide = is_wide(address_of(x)?, &[], shape.inputs, x.dtype());
    let name = format!(
        "unroll_{}{}",
        if wide { "wide_" } else { "" },
        kernel_dtype(x.dtype())?
    );
    let small = |sides: [usize; 3]| sides.map(|side| side as i32);
    if shape.sides.iter().chain(&shape.out).any(|side| *side > 1 << 30) {
        candle_core::bail!("a map of {:?}", x.dims());
    }
    for first in (0..shape.positions()).step_by(at_a_time) {
        let positions = at_a_time.min(shape.positions() - first);
        let patches = all.narrow(0, 0, positions)?;
        let arguments = UnrollArguments {
            x: address_of(x)?,
            out: address_of(&patches)?,
            first: first as u64,
            positions: positions as u32,
            channels: shape.inputs as u32,
            sides: small(shape.sides),
            kernel: small(shape.kernel),
            before: small(shape.steps.before),
            strides: small(shape.steps.strides),
            out_sides: small(shape.out),
        };
        let units = positions * shape.taps() * shape.inputs.div_ceil(UNIT);
        let grid = (units.div_ceil(THREADS), 1, 1);
        // SAFETY: the arguments have the kernel's layout. Reads are bounded by the map's dimensions, and one patch
        // per position is written; both tensors live until this is enqueued.
        unsafe { card.launch(&stream, name.clone(), grid, THREADS, &arguments)? };
        let product = patches.matmul(&weight)?;
        add_rows(
            &product,
            1.0,
            bias,
            onto == Onto::Itself,
            &rows_out.narrow(0, first, positions)?,
        )?;
    }
    Ok(())
}
