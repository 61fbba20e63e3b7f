//! [`crate::average_blocks`], [`crate::add_repeated`], and patches of frames on a CUDA device.

use candle_core::{Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::moments::is_wide;
use super::{Card, THREADS, UNIT, address_of, kernel_dtype};
use crate::blocks::BlockShape;
use crate::place::Rows;

/// Mirrors the struct in `blocks.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BlocksArguments {
    x: u64,
    out: u64,
    x_frame: u64,
    x_row: u64,
    out_frame: u64,
    out_row: u64,
    units: u64,
    fine: [u32; 3],
    coarse: [u32; 3],
    frames: u32,
    sides: u32,
    group: u32,
    from_frame: u32,
    from_row: u32,
    missing: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for BlocksArguments {}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn average_blocks(x: &Tensor, shape: &BlockShape, out: &Tensor) -> Result<()> {
    let missing = shape.coarse[0] * shape.block[0] - shape.fine[0];
    launch("average_blocks", (x, out), shape, ([0, 0], missing), shape.coarse)
}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn add_repeated(x: &Tensor, shape: &BlockShape, from: [usize; 2], out: &Tensor) -> Result<()> {
    launch("add_repeated", (x, out), shape, (from, 0), shape.fine)
}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn patched(x: &Tensor, shape: &BlockShape, out: &Tensor) -> Result<()> {
    launch("patched", (x, out), shape, ([0, 0], 0), shape.coarse)
}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn unpatched(x: &Tensor, shape: &BlockShape, out: &Tensor) -> Result<()> {
    launch("unpatched", (x, out), shape, ([0, 0], 0), shape.fine)
}

fn launch(
    kernel: &str,
    (x, out): (&Tensor, &Tensor),
    shape: &BlockShape,
    (from, missing): ([usize; 2], usize),
    written: [usize; 4],
) -> Result<()> {
    let [frames, rows, columns, channels] = written;
    let units = frames * rows * columns * channels.div_ceil(UNIT);
    // Positions are unsigned 32-bit integers.
    let positions = |[frames, rows, columns, _]: [usize; 4]| frames * rows * columns;
    let most = u32::MAX as usize;
    if positions(shape.fine).max(positions(shape.coarse)) > most
        || units.div_ceil(THREADS) > i32::MAX as usize
    {
        candle_core::bail!("blocks of a map of {:?}", shape.fine);
    }
    // Both may be parts of larger maps, along frames and rows.
    for map in [x, out] {
        Rows::of(map, map.dim(2)? * map.dim(3)?)?;
    }
    let strides = |map: &Tensor| (map.stride()[0] as u64, map.stride()[1] as u64);
    let ((x_frame, x_row), (out_frame, out_row)) = (strides(x), strides(out));
    let sides = |[_, rows, columns, channels]: [usize; 4]| [rows, columns, channels].map(|side| side as u32);
    let arguments = BlocksArguments {
        x: address_of(x)?,
        out: address_of(out)?,
        x_frame,
        x_row,
        out_frame,
        out_row,
        units: units as u64,
        fine: sides(shape.fine),
        coarse: sides(shape.coarse),
        frames: shape.block[0] as u32,
        sides: shape.block[1] as u32,
        group: shape.group as u32,
        from_frame: from[0] as u32,
        from_row: from[1] as u32,
        missing: missing as u32,
    };
    let dtype = kernel_dtype(x.dtype())?;
    let device = out.device().as_cuda_device()?;
    let wide = is_wide(
        arguments.out,
        &[out_frame as usize, out_row as usize],
        channels,
        out.dtype(),
    );
    let name = format!("{kernel}_{}{dtype}", if wide { "wide_" } else { "" });
    let grid = (units.div_ceil(THREADS), 1, 1);
    // SAFETY: the arguments have the kernels' layout. They point to tensors that live until this is enqueued, of
    // validated shapes, whose strides are those of their rows.
    unsafe { Card::of(device)?.launch(&device.cuda_stream(), name, grid, THREADS, &arguments) }
}
