//! [`crate::attention_in_fp8`] on a CUDA device: cuDNN's attention over codes, and kernels that make the codes of its operands and numbers
//! of those of its result, each in the rows of a tensor.

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{Error, Result, Tensor};
use cudarc::driver::DeviceRepr;
use cudarc::driver::result::memset_d8_async;

use super::attention::by_parts;
use super::{ALIGNMENT, Card, UNIT, address_of, kernel_dtype};
use crate::cudnn::{self, AttentionAt, FP8_SCALE_BYTES, Fp8Scales};
use crate::planned::{AttentionShape, uses_cudnn_in};

/// The first compute capability with attention in e4m3.
const SINCE: (i32, i32) = (9, 0);

/// Blocks that search the greatest magnitude of a tensor, and their size.
const BLOCKS: usize = 528;
const THREADS: usize = 256;

/// Threads of a warp; most threads of a block, which has a row.
const WARP: usize = 32;
const MOST_THREADS: usize = 1024;

/// Bytes of the scalars of cuDNN's kernel, and of the three greatest magnitudes after them.
const SCALES_BYTES: usize = Fp8Scales::ALL.len() * FP8_SCALE_BYTES as usize;
const GREATEST_BYTES: usize = 3 * size_of::<u32>();

/// Mirrors the struct in `attention_in_fp8.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CodesArguments {
    x: [u64; 3],
    batch_stride: [u64; 3],
    token_stride: [u64; 3],
    greatest: u64,
    scales: u64,
    tokens: [u32; 3],
    columns: [u32; 3],
    batch: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for CodesArguments {}

/// Mirrors the struct in `attention_in_fp8.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct NumbersArguments {
    x: u64,
    batch_stride: u64,
    token_stride: u64,
    /// Address of the step of the result's codes: that of the values.
    step: u64,
    /// Codes over the last keys, and logarithms of the sums of rows over the first keys and the last; 0 without.
    rest: u64,
    sums: u64,
    rest_sums: u64,
    tokens: u32,
    columns: u32,
    width: u32,
    queries: u32,
    rest_queries: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for NumbersArguments {}

/// Returns whether it was computed. If not, nothing is overwritten. The shape is that of the operands, which are validated.
pub(crate) fn attention_in_fp8(
    shape: &AttentionShape,
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    out: &Tensor,
) -> Result<bool> {
    let device = q.device().as_cuda_device()?;
    let card = Card::of(device)?;
    let stream = device.cuda_stream();
    let size = shape.dtype.size_in_bytes();
    let columns = [shape.heads, shape.heads_kv, shape.heads_kv].map(|heads| heads * shape.width);
    let operands = [shape.q, shape.k, shape.v];
    let has_rows_that_fit = columns
        .iter()
        .zip(operands)
        .chain([(&columns[0], shape.out)])
        .all(|(&columns, [batch, token, _])| {
            columns.div_ceil(UNIT) <= MOST_THREADS
                && token >= columns
                && (token * size).is_multiple_of(ALIGNMENT as usize)
                && (batch * size).is_multiple_of(ALIGNMENT as usize)
        });
    let at = [address_of(q)?, address_of(k)?, address_of(v)?];
    let to = address_of(out)?;
    let is_aligned = at.iter().chain([&to]).all(|at| at.is_multiple_of(ALIGNMENT));
    if card.compute_capability < SINCE || !uses_cudnn_in(shape.dtype) || !has_rows_that_fit || !is_aligned {
        return Ok(false);
    }
    let wide = |number: [usize; 3]| number.map(|number| number as u64);
    let narrow = |number: usize| u32::try_from(number).map_err(Error::wrap);
    let dtype = kernel_dtype(shape.dtype)?;
    let tokens = [shape.queries, shape.keys, shape.keys];
    // A block of the second kernel has a row of codes.
    let threads = |columns: usize| columns.div_ceil(UNIT).next_multiple_of(WARP);
    let done = card.cudnn.with(device, |cudnn| {
        let found = cudnn::in_fp8(cudnn, shape, SCALES_BYTES + GREATEST_BYTES)?;
        let Some((scales, split)) = found else {
            return Ok(false);
        };
        let arguments = CodesArguments {
            x: at,
            batch_stride: wide(operands.map(|[batch, _, _]| batch)),
            token_stride: wide(operands.map(|[_, token, _]| token)),
            greatest: scales + SCALES_BYTES as u64,
            scales,
            tokens: [narrow(tokens[0])?, narrow(tokens[1])?, narrow(tokens[2])?],
            columns: [narrow(columns[0])?, narrow(columns[1])?, narrow(columns[2])?],
            batch: narrow(shape.batch)?,
            unused: 0,
        };
        let rows = shape.batch * shape.queries.max(shape.keys);
        // SAFETY: the greatest magnitudes lie in the workspace after the scales. The structures mirror `attention_in_fp8.cuh`; rows,
        // columns and strides are those of the tensors, which the caller keeps, aligned to 16 bytes.
        unsafe {
            memset_d8_async(arguments.greatest, 0, GREATEST_BYTES, stream.cu_stream()).w()?;
            let name = format!("greatest_of_rows_{dtype}");
            card.launch(&stream, name, (BLOCKS, 3, 1), THREADS, &arguments)?;
            let name = format!("codes_in_rows_{dtype}");
            let most = columns[0].max(columns[1]);
            card.launch(&stream, name, (rows, 3, 1), threads(most), &arguments)?;
        }
        // The result's codes lie at the end of each row's numbers.
        let codes_at = to + (columns[0] * (size - 1)) as u64;
        let at = AttentionAt {
            q: at[0],
            k: at[1],
            v: at[2],
            out: codes_at,
            bias: None,
            lengths: None,
            log_sums: None,
            fp8_scales: Some(scales),
            scale: scale as f32,
        };
        let arguments = NumbersArguments {
            x: to,
            batch_stride: shape.out[0] as u64,
            token_stride: shape.out[1] as u64,
            step: scales + Fp8Scales::ValueStep as u64 * FP8_SCALE_BYTES,
            rest: 0,
            sums: 0,
            rest_sums: 0,
            tokens: narrow(shape.queries)?,
            columns: narrow(columns[0])?,
            width: narrow(shape.width)?,
            queries: narrow(shape.queries)?,
            rest_queries: 0,
            unused: 0,
        };
        let numbers_in_rows = |rows: usize, arguments: &NumbersArguments| {
            let name = format!("numbers_in_rows_{dtype}");
            // SAFETY: as above; the step was written by the kernel of the codes. A strip and the sums are in the workspace, by the
            // dimensions of their plans.
            unsafe { card.launch(&stream, name, (rows, 1, 1), threads(columns[0]), arguments) }
        };
        let is_computed = match split {
            None => {
                let is_computed = cudnn::attention(cudnn, shape, &at)?;
                numbers_in_rows(shape.batch * shape.queries, &arguments)?;
                is_computed
            }
            Some(split) => by_parts(cudnn, &split, &at, |strip| {
                let of_strip = NumbersArguments {
                    x: to + (strip.added * shape.out[1] * size) as u64,
                    rest: strip.rest,
                    sums: strip.sums,
                    rest_sums: strip.rest_sums,
                    tokens: narrow(strip.count)?,
                    rest_queries: narrow(split.rest.queries)?,
                    ..arguments
                };
                numbers_in_rows(strip.count, &of_strip)
            })?,
        };
        if !is_computed {
            candle_core::bail!("attention in e4m3 lost its plan: {shape:?}");
        }
        Ok(true)
    })?;
    if done != Some(true) {
        return Ok(false);
    }
    crate::libraries::count_attention(true);
    crate::libraries::count_attention_in_fp8();
    Ok(true)
}
