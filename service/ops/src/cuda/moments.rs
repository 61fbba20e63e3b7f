//! [`crate::group_moments()`] on a CUDA device.

use candle_core::{DType, Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::convolve::unwritten;
use super::{ALIGNMENT, Card, UNIT, address_of, kernel_dtype};
use crate::group_moments::{Affine, GroupNorm, Residual};
use crate::place::Rows;

/// Maximum of channels that a block can process: of more, some groups at a time.
const MAX_CHANNELS: usize = 2048;

/// Maximum of blocks that gather, and positions per block.
const MAX_BLOCKS: usize = 1024;
const POSITIONS_OF_BLOCK: usize = 64;

/// Mirrors the struct in `moments.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MomentsArguments {
    x: u64,
    y: u64,
    y_bias: u64,
    partials: u64,
    weight: u64,
    bias: u64,
    factors: u64,
    summands: u64,
    x_stride: u64,
    y_stride: u64,
    positions: u64,
    positions_per_block: u64,
    channels: u32,
    groups: u32,
    blocks: u32,
    eps: f32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for MomentsArguments {}

/// Whether wide loads are possible for rows at this address with these strides.
pub(super) fn is_wide(address: u64, strides: &[usize], channels: usize, dtype: DType) -> bool {
    let of = |stride: &usize| (stride * dtype.size_in_bytes()) as u64;
    channels.is_multiple_of(UNIT)
        && address.is_multiple_of(ALIGNMENT)
        && strides
            .iter()
            .map(of)
            .all(|stride| stride.is_multiple_of(ALIGNMENT))
}

/// Shapes and dtypes are validated by the caller.
pub(crate) fn group_moments(x: &Tensor, add: Option<Residual<'_>>, norm: &GroupNorm<'_>) -> Result<Affine> {
    let channels = x.dim(candle_core::D::Minus1)?;
    let pieces = (1..=norm.groups)
        .find(|pieces| norm.groups.is_multiple_of(*pieces) && channels / pieces <= MAX_CHANNELS);
    let Some(pieces) = pieces else {
        candle_core::bail!(
            "moments of {channels} channels in {} groups; a group has {MAX_CHANNELS} at the most",
            norm.groups
        );
    };
    let dtype = kernel_dtype(x.dtype())?;
    let device = x.device().as_cuda_device()?;
    let (card, stream) = (Card::of(device)?, device.cuda_stream());
    let rows = Rows::of(x, channels)?;
    let positions = rows.rows;
    let blocks = positions.div_ceil(POSITIONS_OF_BLOCK).min(MAX_BLOCKS);
    let of_block = positions.div_ceil(blocks);
    let blocks = positions.div_ceil(of_block);
    let partials = unwritten(&[blocks, norm.groups, 3], DType::F32, device)?;
    let (weight, bias) = (norm.weight.contiguous()?, norm.bias.contiguous()?);
    let affine = Affine {
        factors: unwritten(&[channels], DType::F32, device)?,
        summands: unwritten(&[channels], DType::F32, device)?,
    };
    let mut arguments = MomentsArguments {
        x: address_of(x)?,
        partials: address_of(&partials)?,
        weight: address_of(&weight)?,
        bias: address_of(&bias)?,
        factors: address_of(&affine.factors)?,
        summands: address_of(&affine.summands)?,
        x_stride: rows.row_stride as u64,
        positions: positions as u64,
        positions_per_block: of_block as u64,
        channels: (channels / pieces) as u32,
        groups: (norm.groups / pieces) as u32,
        blocks: blocks as u32,
        eps: norm.eps as f32,
        ..MomentsArguments::default()
    };
    let mut wide = is_wide(arguments.x, &[rows.row_stride], channels, x.dtype());
    if let Some(add) = add {
        let branch = Rows::of(add.branch, channels)?;
        if branch.batch != 1 {
            candle_core::bail!(
                "a branch of {:?} whose positions are at two distances",
                add.branch.dims()
            );
        }
        arguments.y = address_of(add.branch)?;
        arguments.y_stride = branch.row_stride as u64;
        wide &= is_wide(arguments.y, &[branch.row_stride], channels, x.dtype());
        if let Some(bias) = add.bias {
            let bias_rows = Rows::of(bias, channels)?;
            arguments.y_bias = address_of(bias)?;
            wide &= is_wide(arguments.y_bias, &[bias_rows.row_stride], channels, x.dtype());
        }
    }
    let size = x.dtype().size_in_bytes();
    let of_piece = channels / pieces;
    wide &= pieces == 1 || is_wide(0, &[of_piece], of_piece, x.dtype());
    let wide = if wide { "wide_" } else { "" };
    for piece in 0..pieces {
        let first = |at: u64, size: usize| match at {
            0 => 0,
            at => at + (piece * of_piece * size) as u64,
        };
        let arguments = MomentsArguments {
            x: first(arguments.x, size),
            y: first(arguments.y, size),
            y_bias: first(arguments.y_bias, size),
            weight: first(arguments.weight, size),
            bias: first(arguments.bias, size),
            factors: first(arguments.factors, size_of::<f32>()),
            summands: first(arguments.summands, size_of::<f32>()),
            ..arguments
        };
        // SAFETY: the arguments have the kernels' layout, and point to tensors of validated shapes that live until both are
        // enqueued, with positions at their strides, and partial results for every block and group; a piece is whole groups
        // of them.
        unsafe {
            let name = format!("gather_moments_{wide}{dtype}");
            card.launch(&stream, name, (blocks, 1, 1), 256, &arguments)?;
            let name = format!("merge_groups_{dtype}");
            card.launch(&stream, name, (norm.groups / pieces, 1, 1), 256, &arguments)?;
        }
    }
    Ok(affine)
}
