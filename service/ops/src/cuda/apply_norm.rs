//! [`crate::apply_norm()`] and [`crate::add_rows()`] on a CUDA device.

use candle_core::{D, Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::moments::is_wide;
use super::{Card, UNIT, address_of, kernel_dtype};
use crate::apply_norm::{ChannelNorm, Enlarge, MapReading, Pad, sides};
use crate::place::Rows;

/// As in `apply_norm.cuh`.
const THREADS: usize = 256;
const POSITIONS: usize = 4;

/// Mirrors the struct in `apply_norm.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ApplyNormArguments {
    x: u64,
    out: u64,
    factors: u64,
    summands: u64,
    weight: u64,
    x_frame: u64,
    x_row: u64,
    x_column: u64,
    out_frame: u64,
    out_row: u64,
    frames: i32,
    height: i32,
    width: i32,
    from: [i32; 3],
    out_height: u32,
    out_width: u32,
    positions: u32,
    channels: u32,
    epsilon: f32,
    silu: u32,
    enlarge: [u32; 3],
    replicate: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for ApplyNormArguments {}

/// Strides of frames and rows of a map.
fn strides(map: &Tensor) -> (usize, usize) {
    match *map.stride() {
        [row, ..] if map.rank() == 3 => (0, row),
        [frame, row, ..] => (frame, row),
        _ => (0, 0),
    }
}

/// Stride of columns of a map whose positions are contiguous.
fn stride_of_columns(map: &Tensor) -> Result<usize> {
    match *map.stride() {
        [.., columns, 1] => Ok(columns),
        _ => candle_core::bail!("a map of {:?} with strides {:?}", map.dims(), map.stride()),
    }
}

fn kernel_enlarge(enlarge: Enlarge) -> u32 {
    match enlarge {
        Enlarge::Not => 0,
        Enlarge::Twice => 1,
        Enlarge::TwiceButFirst => 2,
    }
}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn apply_norm(x: &Tensor, reading: &MapReading<'_>, from: [i64; 3], out: &Tensor) -> Result<()> {
    let ([frames, height, width, channels], [frames_out, out_height, out_width, _]) =
        (sides(x)?, sides(out)?);
    let positions = frames_out * out_height * out_width;
    // Positions are signed 32-bit integers, including upsampled ones.
    let most = (1 << 30) - 1;
    let largest = [frames, height, width, positions].into_iter().max().unwrap_or(0);
    if largest > most || from.iter().any(|from| from.unsigned_abs() > most as u64) {
        candle_core::bail!("a map of {:?} read from {from:?} into {:?}", x.dims(), out.dims());
    }
    let dtype = kernel_dtype(x.dtype())?;
    let device = x.device().as_cuda_device()?;
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    let x_column = stride_of_columns(x)?;
    Rows::of(out, out_width * channels)?;
    let ((x_frame, x_row), (out_frame, out_row)) = (strides(x), strides(out));
    let (x_at, out_at) = (address_of(x)?, address_of(out)?);
    let mut wide = is_wide(x_at, &[x_frame, x_row, x_column], channels, x.dtype())
        && is_wide(out_at, &[out_frame, out_row], channels, x.dtype());
    let vector = |vector: &Tensor| {
        Rows::of(vector, channels)?;
        address_of(vector)
    };
    let (mut factors, mut summands, mut weight_at, mut epsilon) = (0, 0, 0, 0.0);
    match reading.norm {
        ChannelNorm::None => {}
        ChannelNorm::Affine(affine) => {
            (factors, summands) = (vector(&affine.factors)?, vector(&affine.summands)?);
        }
        ChannelNorm::Rms { weight, eps } => {
            (weight_at, epsilon) = (vector(weight)?, eps as f32);
            wide &= is_wide(weight_at, &[], channels, x.dtype());
        }
        ChannelNorm::Unit { eps } => epsilon = eps as f32,
    }
    let arguments = ApplyNormArguments {
        x: x_at,
        out: out_at,
        factors,
        summands,
        weight: weight_at,
        x_frame: x_frame as u64,
        x_row: x_row as u64,
        x_column: x_column as u64,
        out_frame: out_frame as u64,
        out_row: out_row as u64,
        frames: frames as i32,
        height: height as i32,
        width: width as i32,
        from: from.map(|place| place as i32),
        out_height: out_height as u32,
        out_width: out_width as u32,
        positions: positions as u32,
        channels: channels as u32,
        epsilon,
        silu: u32::from(reading.silu),
        enlarge: reading.enlarge.map(kernel_enlarge),
        replicate: u32::from(reading.pad == Pad::Replicate),
    };
    let wide = if wide { "wide_" } else { "" };
    let (name, grid) = match reading.norm {
        ChannelNorm::Rms { .. } | ChannelNorm::Unit { .. } => {
            let grid = (positions.div_ceil(THREADS / 32), 1, 1);
            (format!("apply_length_{wide}{dtype}"), grid)
        }
        ChannelNorm::None | ChannelNorm::Affine(_) => {
            let units = channels.div_ceil(UNIT);
            let lanes = THREADS / units.min(THREADS);
            let grid = (positions.div_ceil(lanes * POSITIONS), units.div_ceil(THREADS), 1);
            (format!("apply_norm_{wide}{dtype}"), grid)
        }
    };
    // SAFETY: the arguments have the kernels' layout. They point to tensors that live until this is enqueued, of
    // validated shapes; reads are bounded by the map's dimensions, writes by those of `out`.
    unsafe { card.launch(&stream, name, grid, THREADS, &arguments) }
}

/// Mirrors the struct in `convolve.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AddArguments {
    x: u64,
    bias: u64,
    out: u64,
    x_stride: u64,
    out_stride: u64,
    rows: u64,
    channels: u32,
    adds: u32,
    factor: f32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for AddArguments {}

/// `out = factor x + bias`, or `out += factor x + bias`. Both have the same rows, with the length of `out`'s last axis, of one
/// dtype and with one stride each.
pub(crate) fn add_rows(
    x: &Tensor,
    factor: f32,
    bias: Option<&Tensor>,
    adds: bool,
    out: &Tensor,
) -> Result<()> {
    let channels = out.dim(D::Minus1)?;
    if out.elem_count() == 0 {
        return Ok(());
    }
    let (from, to) = (Rows::of(x, channels)?, Rows::of(out, channels)?);
    let same = x.dtype() == out.dtype() && bias.is_none_or(|bias| bias.dtype() == x.dtype());
    if !same || from.rows != to.rows || from.batch != 1 || to.batch != 1 {
        candle_core::bail!("rows of {:?} added to {:?}", x.dims(), out.dims());
    }
    let dtype = kernel_dtype(x.dtype())?;
    let device = x.device().as_cuda_device()?;
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    let bias_at = match bias {
        None => 0,
        Some(bias) => {
            Rows::of(bias, channels)?;
            address_of(bias)?
        }
    };
    let arguments = AddArguments {
        x: address_of(x)?,
        bias: bias_at,
        out: address_of(out)?,
        x_stride: from.row_stride as u64,
        out_stride: to.row_stride as u64,
        rows: to.rows as u64,
        channels: channels as u32,
        adds: u32::from(adds),
        factor,
        unused: 0,
    };
    let wide = is_wide(arguments.x, &[from.row_stride], channels, x.dtype())
        && is_wide(arguments.out, &[to.row_stride], channels, x.dtype())
        && is_wide(bias_at, &[], channels, x.dtype());
    let name = format!("add_rows_{}{dtype}", if wide { "wide_" } else { "" });
    let grid = (to.rows * channels.div_ceil(UNIT)).div_ceil(THREADS);
    // SAFETY: the arguments have the kernel's layout, and point to tensors that live until this is enqueued, with the
    // same rows at their strides.
    unsafe { card.launch(&stream, name, (grid, 1, 1), THREADS, &arguments) }
}
