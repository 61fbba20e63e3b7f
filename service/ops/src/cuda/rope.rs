//! [`crate::qk_norm_rope`] on a CUDA device.

use candle_core::{DType, Result, Tensor};
use cudarc::driver::DeviceRepr;

use super::{Card, address_of, kernel_dtype};
use crate::rope::{Angles, Pairs, QkNorm};

/// Block size.
const THREADS: usize = 256;

/// Bytes that the kernels for heads of 128 numbers read at a time; its threads per head, and maximum block
/// size.
const WIDE: u64 = 16;
const OF_HEAD: usize = 16;
const MAX_THREADS: usize = 512;

/// Mirrors the struct in `rope.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArguments {
    x: [u64; 2],
    weight: [u64; 2],
    cos: u64,
    sin: u64,
    batch_stride: [u64; 2],
    token_stride: [u64; 2],
    head_stride: [u64; 2],
    heads: [u32; 2],
    tokens: u32,
    width: u32,
    eps: f32,
    is_across: u32,
    is_halves: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for RopeArguments {}

/// In place. Shapes are validated by the caller.
pub(crate) fn qk_norm_rope(
    q: &Tensor,
    k: &Tensor,
    norm: QkNorm<'_>,
    angles: Option<Angles<'_>>,
    pairs: Pairs,
) -> Result<()> {
    let (batch, tokens, _, width) = q.dims4()?;
    let (weights, eps, is_across) = match norm {
        QkNorm::None => (None, 0.0, false),
        QkNorm::PerHead { q, k, eps } => (Some((q, k)), eps, false),
        QkNorm::AcrossHeads { q, k, eps } => (Some((q, k)), eps, true),
    };
    let both = [q, k];
    let mut arguments = RopeArguments {
        x: [address_of(q)?, address_of(k)?],
        weight: [0; 2],
        cos: 0,
        sin: 0,
        batch_stride: both.map(|x| x.stride()[0] as u64),
        token_stride: both.map(|x| x.stride()[1] as u64),
        head_stride: both.map(|x| x.stride()[2] as u64),
        heads: both.map(|x| x.dims()[2] as u32),
        tokens: tokens as u32,
        width: width as u32,
        eps: eps as f32,
        is_across: u32::from(is_across),
        is_halves: u32::from(pairs == Pairs::Halves),
    };
    if both.iter().any(|x| x.stride()[3] != 1) || k.dtype() != q.dtype() {
        candle_core::bail!("heads to be rotated have gaps");
    }
    if let Some((q_weight, k_weight)) = weights {
        for weight in [q_weight, k_weight] {
            if !weight.is_contiguous() || weight.dtype() != q.dtype() {
                candle_core::bail!("weights of a norm in {:?}, not {:?}", weight.dtype(), q.dtype());
            }
        }
        arguments.weight = [address_of(q_weight)?, address_of(k_weight)?];
    }
    if let Some(Angles { cos, sin }) = angles {
        if [cos, sin]
            .iter()
            .any(|x| !x.is_contiguous() || x.dtype() != DType::F32)
        {
            candle_core::bail!("angles are f32 without gaps");
        }
        (arguments.cos, arguments.sin) = (address_of(cos)?, address_of(sin)?);
    }
    let size = q.dtype().size_in_bytes() as u64;
    let addresses = arguments.x.iter().chain(&arguments.weight).copied();
    let strides = [
        arguments.batch_stride,
        arguments.token_stride,
        arguments.head_stride,
    ];
    let is_wide = addresses
        .chain([arguments.cos, arguments.sin])
        .chain(strides.iter().flatten().map(|stride| stride * size))
        .all(|at| at.is_multiple_of(WIDE));
    let heads = q.dims()[2].max(k.dims()[2]);
    let of_heads = (heads * OF_HEAD).next_multiple_of(32).min(MAX_THREADS);
    let is_common = width == 128 && !is_across && is_wide && q.dtype() != DType::F32;
    let (kernel, threads) = match (pairs, angles) {
        (Pairs::Neighbours, Some(_)) if is_common => ("rope_128_neighbours", of_heads),
        (Pairs::Halves, _) | (_, None) if is_common => ("rope_128_halves", of_heads),
        (Pairs::Neighbours | Pairs::Halves, _) => ("rope", THREADS),
    };
    let name = format!("{kernel}_{}", kernel_dtype(q.dtype())?);
    let device = q.device().as_cuda_device()?;
    let card = Card::of(device)?;
    // SAFETY: the structure mirrors `rope.cuh`; heads, tokens, widths and strides are those of the tensors, which the
    // caller keeps for the duration of the call; weights and angles have the checked sizes.
    unsafe {
        card.launch(
            &device.cuda_stream(),
            name,
            (batch * tokens, 2, 1),
            threads,
            &arguments,
        )
    }
}
