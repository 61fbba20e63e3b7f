//! [`crate::attention()`] on a CUDA device.

use std::ffi::c_void;

use candle_core::cuda_backend::WrapErr as _;
use candle_core::{CudaDevice, DType, Error, Result, Tensor};
use cudarc::cublas::{result, sys};
use cudarc::driver::{DevicePtr as _, DeviceRepr};

use super::{ALIGNMENT, Card, UNIT, address_of, kernel_dtype};
use crate::Mask;
use crate::attention_workspace::{queries_at_a_time, row_of_scores};
use crate::cudnn::{self, AttentionAt, Cudnn, InTiles};
use crate::planned::{AttentionShape, uses_cudnn_in};

/// Block size, as in `softmax.cuh`.
const THREADS: usize = 256;

/// Uses cuDNN if it has a plan for the shape, otherwise two cuBLAS products with a softmax kernel between them.
pub(crate) fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    mask: Mask<'_>,
    out: &Tensor,
) -> Result<()> {
    let is_fused = by_cudnn(q, k, v, scale, mask, out)?;
    crate::libraries::count_attention(is_fused);
    if is_fused {
        return Ok(());
    }
    by_products(q, k, v, scale, mask, out)
}

/// Returns whether cuDNN computed it.
fn by_cudnn(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mask: Mask<'_>, out: &Tensor) -> Result<bool> {
    let shape = AttentionShape::of(q, k, v, mask, out);
    let Some(shape) = shape.filter(|shape| uses_cudnn_in(shape.dtype)) else {
        return Ok(false);
    };
    let (bias, lengths) = match mask {
        Mask::Bias(bias) => (Some(address_of(bias)?), None),
        // cuDNN reads them as i32.
        Mask::Lengths { queries, keys } => (None, Some((address_of(queries)?, address_of(keys)?))),
        Mask::None | Mask::Causal | Mask::Window { .. } => (None, None),
    };
    let at = AttentionAt {
        q: address_of(q)?,
        k: address_of(k)?,
        v: address_of(v)?,
        out: address_of(out)?,
        bias,
        lengths,
        log_sums: None,
        fp8_scales: None,
        scale: scale as f32,
    };
    let device = q.device().as_cuda_device()?;
    let card = Card::of(device)?;
    let done = card
        .cudnn
        .with(device, |cudnn| match cudnn::in_tiles(cudnn, &shape)? {
            Some(split) => by_parts(cudnn, &split, &at, |strip| {
                add_parts(&card, device, &split, at.out, strip)
            }),
            None => cudnn::attention(cudnn, &shape, &at),
        })?;
    Ok(done == Some(true))
}

/// Mirrors the struct in `softmax.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PartsArguments {
    out: u64,
    rest: u64,
    sums: u64,
    rest_sums: u64,
    row: u64,
    added: u32,
    heads: u32,
    width: u32,
    queries: u32,
    rest_queries: u32,
    unused: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for PartsArguments {}

/// A strip of queries whose attention to the keys after the whole tiles is computed.
pub(super) struct Strip {
    /// The first query that is added, of so many.
    pub(super) added: usize,
    pub(super) count: usize,
    /// Address of its result `[heads, width]`, of the next after it, and so on.
    pub(super) rest: u64,
    /// Addresses of the logarithms of the sums of its row over the first keys, and over the others.
    pub(super) sums: u64,
    pub(super) rest_sums: u64,
}

/// Attends to the keys of whole tiles, then in strips of queries to the rest, and has both added. Returns `false` if an address
/// is misaligned: nothing was enqueued then.
pub(super) fn by_parts(
    cudnn: &mut Cudnn,
    split: &InTiles,
    at: &AttentionAt,
    mut add: impl FnMut(&Strip) -> Result<()>,
) -> Result<bool> {
    let InTiles { whole, rest, .. } = split;
    let workspace = cudnn::workspace(cudnn);
    let size = whole.dtype.size_in_bytes();
    let from = |start: u64, numbers: usize| start + (numbers * size) as u64;
    let (sums, rest_sums) = (
        workspace + split.sums_at as u64,
        workspace + split.rest_sums_at as u64,
    );
    let of_whole = AttentionAt {
        log_sums: Some(sums),
        ..*at
    };
    let begins_aligned = [
        from(at.k, whole.keys * whole.k[1]),
        from(at.v, whole.keys * whole.v[1]),
        (whole.q[1] * size) as u64,
        (whole.out[1] * size) as u64,
    ];
    if !begins_aligned.iter().all(|start| start.is_multiple_of(ALIGNMENT))
        || !cudnn::attention(cudnn, whole, &of_whole)?
    {
        return Ok(false);
    }
    for (first, added) in split.strips() {
        let of_rest = AttentionAt {
            q: from(at.q, first * whole.q[1]),
            k: begins_aligned[0],
            v: begins_aligned[1],
            out: workspace + split.rest_at as u64,
            log_sums: Some(rest_sums),
            ..*at
        };
        if !cudnn::attention(cudnn, rest, &of_rest)? {
            candle_core::bail!("a strip of an attention has no plan: {rest:?}");
        }
        let skipped = added - first;
        let of_sums = |start: u64, query: usize| start + (query * size_of::<f32>()) as u64;
        add(&Strip {
            added,
            count: first + rest.queries - added,
            rest: from(of_rest.out, skipped * rest.out[1]),
            sums: of_sums(sums, added),
            rest_sums: of_sums(rest_sums, skipped),
        })?;
    }
    Ok(true)
}

/// Adds a strip to what its rows have of the first keys.
fn add_parts(
    card: &Card,
    device: &CudaDevice,
    InTiles { whole, rest, .. }: &InTiles,
    out: u64,
    strip: &Strip,
) -> Result<()> {
    let narrow = |number: usize| u32::try_from(number).map_err(Error::wrap);
    let size = whole.dtype.size_in_bytes();
    let arguments = PartsArguments {
        out: out + (strip.added * whole.out[1] * size) as u64,
        rest: strip.rest,
        sums: strip.sums,
        rest_sums: strip.rest_sums,
        row: whole.out[1] as u64,
        added: narrow(strip.count)?,
        heads: narrow(whole.heads)?,
        width: narrow(whole.width)?,
        queries: narrow(whole.queries)?,
        rest_queries: narrow(rest.queries)?,
        unused: 0,
    };
    let grid = (
        (strip.count * whole.heads * whole.width / UNIT).div_ceil(THREADS),
        1,
        1,
    );
    let name = format!("add_parts_{}", kernel_dtype(whole.dtype)?);
    // SAFETY: the structure mirrors `softmax.cuh`. The result has `count` rows of all heads, whose elements lie side by
    // side, aligned to 16 bytes; the strip and both sums are in the workspace, by the dimensions of their plans.
    unsafe { card.launch(&device.cuda_stream(), name, grid, THREADS, &arguments) }
}

/// A tensor `[b, n, h, d]` for matrix products: an address, and strides in elements.
#[derive(Clone, Copy)]
struct Heads {
    start: u64,
    number: u64,
    batch: usize,
    token: usize,
    head: usize,
}

impl Heads {
    fn of(x: &Tensor, dtype: DType) -> Result<Heads> {
        let (_, tokens, heads, width) = x.dims4()?;
        let &[batch, mut token, head, last] = x.layout().stride() else {
            candle_core::bail!("attention over {:?}", x.dims());
        };
        if tokens == 1 {
            token = token.max(width);
        }
        if x.dtype() != dtype || (last != 1 && width != 1) || token < width {
            candle_core::bail!(
                "attention in {dtype:?} over {:?} of strides {:?} in {:?} ({heads} heads)",
                x.dims(),
                x.layout().stride(),
                x.dtype()
            );
        }
        Ok(Heads {
            start: address_of(x)?,
            number: dtype.size_in_bytes() as u64,
            batch,
            token,
            head,
        })
    }

    fn at(&self, batch: usize, token: usize, head: usize) -> u64 {
        let numbers = batch * self.batch + token * self.token + head * self.head;
        self.start + numbers as u64 * self.number
    }
}

/// Mirrors the struct in `softmax.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SoftmaxArguments {
    scores: u64,
    bias: u64,
    most: u64,
    bias_head: u64,
    bias_query: u64,
    row: u32,
    queries: u32,
    first_query: u32,
    keys: u32,
    before: u32,
    after: u32,
}

// SAFETY: plain data with C layout.
unsafe impl DeviceRepr for SoftmaxArguments {}

/// A mask as arguments of the kernel.
#[derive(Clone, Copy)]
struct MaskArguments {
    before: u32,
    after: u32,
    /// Address, and the strides of batch items, heads and queries.
    bias: Option<(u64, [usize; 3])>,
    /// Address of the lengths.
    lengths: Option<u64>,
}

impl MaskArguments {
    fn of(mask: Mask<'_>, shape: [usize; 4], dtype: DType) -> Result<MaskArguments> {
        let all = MaskArguments {
            before: u32::MAX,
            after: u32::MAX,
            bias: None,
            lengths: None,
        };
        let most = |places: usize| u32::try_from(places).unwrap_or(u32::MAX);
        Ok(match mask {
            Mask::None => all,
            Mask::Causal => MaskArguments { after: 0, ..all },
            Mask::Window { before, after } => MaskArguments {
                before: most(before),
                after: most(after),
                ..all
            },
            Mask::Bias(bias) => {
                let (dims, strides) = (bias.dims(), bias.layout().stride());
                let fits = dims.len() == 4
                    && dims
                        .iter()
                        .zip(&shape)
                        .all(|(dim, wanted)| [1, *wanted].contains(dim))
                    && dims[3] == shape[3]
                    && (strides[3] == 1 || dims[3] == 1)
                    && bias.dtype() == dtype;
                if !fits {
                    candle_core::bail!(
                        "a bias {dims:?} of strides {strides:?} in {:?} for scores {shape:?} in {dtype:?}",
                        bias.dtype()
                    );
                }
                let stride = |axis: usize| if dims[axis] == 1 { 0 } else { strides[axis] };
                MaskArguments {
                    bias: Some((address_of(bias)?, [stride(0), stride(1), stride(2)])),
                    ..all
                }
            }
            Mask::Lengths { keys, .. } => MaskArguments {
                lengths: Some(address_of(keys)?),
                ..all
            },
        })
    }
}

/// Computes the f32 scores of some queries by one product, their softmax in place, and the weighted sum by another
/// product, written directly to the result. Shapes are validated by the caller, except for strides.
fn by_products(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mask: Mask<'_>, out: &Tensor) -> Result<()> {
    let ((batches, queries, heads, width), keys) = (q.dims4()?, k.dim(1)?);
    if out.elem_count() == 0 {
        return Ok(());
    }
    if keys == 0 {
        candle_core::bail!("attention over no keys");
    }
    let dtype = q.dtype();
    let seen = MaskArguments::of(mask, [batches, heads, queries, keys], dtype)?;
    let device = q.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let chunk = queries_at_a_time(heads, queries, keys);
    // SAFETY: a product writes every score before the kernel reads it; padding between rows is not read.
    let scores = unsafe { device.alloc::<f32>(heads * chunk * row_of_scores(keys))? };
    let work = AttentionByProducts {
        device,
        dtype,
        q: Heads::of(q, dtype)?,
        k: Heads::of(k, dtype)?,
        v: Heads::of(v, dtype)?,
        out: Heads::of(out, dtype)?,
        heads,
        heads_per_key: heads / k.dim(2)?,
        width,
        keys,
        chunk,
        scale: scale as f32,
        scores: scores.device_ptr(&stream).0,
    };
    for batch in 0..batches {
        for first in (0..queries).step_by(chunk) {
            let count = chunk.min(queries - first);
            work.score(batch, first, count)?;
            work.softmax(&seen, batch, first, count)?;
            work.sum(batch, first, count)?;
        }
    }
    Ok(())
}

/// State shared by all chunks.
struct AttentionByProducts<'a> {
    device: &'a CudaDevice,
    dtype: DType,
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    heads: usize,
    /// Query heads per key head.
    heads_per_key: usize,
    width: usize,
    keys: usize,
    chunk: usize,
    scale: f32,
    /// f32 `[heads, chunk, row_of_scores(keys)]`.
    scores: u64,
}

/// A matrix of a product in cuBLAS's column-major order: `[rows, columns]` with the leading dimension `leading`,
/// batched with a stride.
struct Matrix {
    start: u64,
    leading: usize,
    stride: usize,
    dtype: DType,
}

impl AttentionByProducts<'_> {
    /// Stride of heads in the scores, in elements.
    fn scores_of_head(&self) -> usize {
        self.chunk * row_of_scores(self.keys)
    }

    /// `q kᵀ scale`.
    fn score(&self, batch: usize, first: usize, count: usize) -> Result<()> {
        let (q, k, shared) = (&self.q, &self.k, self.heads_per_key);
        for head in 0..shared {
            self.product(
                [true, false],
                [self.keys, count, self.width],
                self.scale,
                Matrix {
                    start: k.at(batch, 0, 0),
                    leading: k.token,
                    stride: k.head,
                    dtype: self.dtype,
                },
                Matrix {
                    start: q.at(batch, first, head),
                    leading: q.token,
                    stride: q.head * shared,
                    dtype: self.dtype,
                },
                Matrix {
                    start: self.scores + (head * self.scores_of_head() * size_of::<f32>()) as u64,
                    leading: row_of_scores(self.keys),
                    stride: self.scores_of_head() * shared,
                    dtype: DType::F32,
                },
            )?;
        }
        Ok(())
    }

    fn softmax(&self, seen: &MaskArguments, batch: usize, first: usize, count: usize) -> Result<()> {
        let narrow = |number: usize| u32::try_from(number).map_err(Error::wrap);
        let (bias, [bias_batch, bias_head, bias_query]) = seen.bias.unwrap_or_default();
        let begin = (batch * bias_batch * self.dtype.size_in_bytes()) as u64;
        let arguments = SoftmaxArguments {
            scores: self.scores,
            bias: if bias == 0 { 0 } else { bias + begin },
            most: seen
                .lengths
                .map_or(0, |lengths| lengths + (batch * size_of::<u32>()) as u64),
            bias_head: bias_head as u64,
            bias_query: bias_query as u64,
            row: narrow(row_of_scores(self.keys))?,
            queries: narrow(self.chunk)?,
            first_query: narrow(first)?,
            keys: narrow(self.keys)?,
            before: seen.before,
            after: seen.after,
        };
        let name = format!("softmax_{}", kernel_dtype(self.dtype)?);
        let grid = (count, self.heads, 1);
        let (card, stream) = (Card::of(self.device)?, self.device.cuda_stream());
        // SAFETY: the structure mirrors `softmax.cuh`. There are scores for all heads and queries; the bias covers
        // all heads, queries and keys by its strides, and the lengths all batch items (`MaskArguments::of`).
        unsafe { card.launch(&stream, name, grid, THREADS, &arguments) }
    }

    /// `weights v`. A row of weights begins at the address of its row of scores.
    fn sum(&self, batch: usize, first: usize, count: usize) -> Result<()> {
        let (v, out, shared) = (&self.v, &self.out, self.heads_per_key);
        let weights_per_score = size_of::<f32>() / self.dtype.size_in_bytes();
        for head in 0..shared {
            self.product(
                [false, false],
                [self.width, count, self.keys],
                1.0,
                Matrix {
                    start: v.at(batch, 0, 0),
                    leading: v.token,
                    stride: v.head,
                    dtype: self.dtype,
                },
                Matrix {
                    start: self.scores + (head * self.scores_of_head() * size_of::<f32>()) as u64,
                    leading: row_of_scores(self.keys) * weights_per_score,
                    stride: self.scores_of_head() * shared * weights_per_score,
                    dtype: self.dtype,
                },
                Matrix {
                    start: out.at(batch, first, head),
                    leading: out.token,
                    stride: out.head * shared,
                    dtype: self.dtype,
                },
            )?;
        }
        Ok(())
    }

    /// `c = a b scale` for all key heads, `[m, n]` of sums over `k`, accumulated in f32; without TF32 for f32
    /// operands.
    fn product(
        &self,
        transposed: [bool; 2],
        [m, n, k]: [usize; 3],
        scale: f32,
        a: Matrix,
        b: Matrix,
        c: Matrix,
    ) -> Result<()> {
        let int = |number: usize| i32::try_from(number).map_err(Error::wrap);
        let long = |number: usize| i64::try_from(number).map_err(Error::wrap);
        let [of_a, of_b] = transposed.map(|transposed| match transposed {
            true => sys::cublasOperation_t::CUBLAS_OP_T,
            false => sys::cublasOperation_t::CUBLAS_OP_N,
        });
        let nothing = 0f32;
        let handle = self.device.cublas_handle();
        self.device.cuda_stream().context().bind_to_thread().w()?;
        // SAFETY: the operands are on the card of the handle and live until the work on the stream is done;
        // dimensions and strides are those of their layouts. The factors are read before the call returns.
        unsafe {
            result::gemm_strided_batched_ex(
                *handle.handle(),
                of_a,
                of_b,
                int(m)?,
                int(n)?,
                int(k)?,
                (&raw const scale).cast::<c_void>(),
                a.start as *const c_void,
                of_dtype(a.dtype)?,
                int(a.leading)?,
                long(a.stride)?,
                b.start as *const c_void,
                of_dtype(b.dtype)?,
                int(b.leading)?,
                long(b.stride)?,
                (&raw const nothing).cast::<c_void>(),
                c.start as *mut c_void,
                of_dtype(c.dtype)?,
                int(c.leading)?,
                long(c.stride)?,
                int(self.heads / self.heads_per_key)?,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
        }
        .w()
    }
}

/// cuBLAS's name of a dtype.
fn of_dtype(dtype: DType) -> Result<sys::cudaDataType> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        other => candle_core::bail!("a card multiplies f32, f16 or bf16, not {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{BF16_OPERATION, here, random, test_device, tolerances};

    /// Reference implementation in f64; `seen` says whether a query attends to a key, `bias` is added.
    fn defined(
        [q, k, v]: [&Tensor; 3],
        scale: f64,
        seen: impl Fn(usize, usize, usize) -> bool,
        bias: impl Fn([usize; 4]) -> f64,
    ) -> Result<Vec<f64>> {
        let (batches, queries, heads, width) = q.dims4()?;
        let (keys, shared) = (k.dim(1)?, heads / k.dim(2)?);
        let numbers = |x: &Tensor| {
            x.to_dtype(DType::F64)?
                .contiguous()?
                .flatten_all()?
                .to_vec1::<f64>()
        };
        let key_heads = heads / shared;
        let (q, k, v) = (numbers(q)?, numbers(k)?, numbers(v)?);
        let mut out = Vec::new();
        for batch in 0..batches {
            for query in 0..queries {
                for head in 0..heads {
                    let of_key = |key: usize| ((batch * keys + key) * key_heads + head / shared) * width;
                    let q = &q[((batch * queries + query) * heads + head) * width..][..width];
                    let seen: Vec<usize> = (0..keys).filter(|&key| seen(batch, query, key)).collect();
                    let scores: Vec<f64> = seen
                        .iter()
                        .map(|&key| {
                            let product: f64 = q.iter().zip(&k[of_key(key)..]).map(|(q, k)| q * k).sum();
                            product * scale + bias([batch, head, query, key])
                        })
                        .collect();
                    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for i in 0..width {
                        let sum = seen.iter().zip(&weights).map(|(&key, w)| w * v[of_key(key) + i]);
                        out.push(sum.sum::<f64>() / total.max(f64::MIN_POSITIVE));
                    }
                }
            }
        }
        Ok(out)
    }

    fn assert_near(found: &Tensor, expected: &[f64], tolerance: f64, what: &str) -> Result<()> {
        let found = found.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        let found = found.contiguous()?.flatten_all()?.to_vec1::<f64>()?;
        let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let distance = square(&mut found.iter().zip(expected).map(|(f, e)| f - e));
        let relative = (distance / square(&mut expected.iter().copied())).sqrt();
        assert!(relative <= tolerance, "{what}: {relative:e}");
        Ok(())
    }

    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    fn tolerance(dtype: DType) -> f64 {
        if dtype == DType::F32 {
            tolerances().operation
        } else {
            BF16_OPERATION
        }
    }

    /// `q`, `k`, `v` as views of one buffer, with NaN between them.
    fn joint(numbers: [&Tensor; 3], dtype: DType) -> Result<[Tensor; 3]> {
        let (batches, queries, heads, width) = numbers[0].dims4()?;
        let key_heads = numbers[1].dim(2)?;
        let tokens = queries.max(numbers[1].dim(1)?);
        let all = heads + 2 * key_heads + 1;
        let poison = Tensor::full(f32::NAN, (batches, tokens, all, width), &Device::Cpu)?.to_dtype(dtype)?;
        let mut first = 0;
        let mut windows = Vec::new();
        for x in numbers {
            let window = poison.narrow(2, first, x.dim(2)?)?.narrow(1, 0, x.dim(1)?)?;
            crate::copy_rows(&x.to_dtype(dtype)?.contiguous()?, &window)?;
            windows.push((first, x.dim(2)?, x.dim(1)?));
            first += x.dim(2)?;
        }
        let poison = here(&poison);
        let window = |i: usize| {
            let (first, heads, tokens): (usize, usize, usize) = windows[i];
            poison.narrow(2, first, heads)?.narrow(1, 0, tokens)
        };
        Ok([window(0)?, window(1)?, window(2)?])
    }

    /// Runs the products and the kernel into a view of a larger tensor, and checks against the reference.
    fn check(
        [batches, queries, keys, heads, key_heads, width]: [usize; 6],
        mask: Mask<'_>,
        seen: impl Fn(usize, usize, usize) -> bool + Copy,
        bias: impl Fn([usize; 4]) -> f64 + Copy,
        dtypes: &[DType],
    ) -> Result<()> {
        for &dtype in dtypes {
            let rounded = |shape: &[usize], seed| random(shape, seed)?.to_dtype(dtype)?.to_dtype(DType::F32);
            let q = (rounded(&[batches, queries, heads, width], 1)? * 2.0)?;
            let k = rounded(&[batches, keys, key_heads, width], 2)?;
            let v = rounded(&[batches, keys, key_heads, width], 3)?;
            let expected = defined([&q, &k, &v], 0.4, seen, bias)?;
            let [q, k, v] = joint([&q, &k, &v], dtype)?;
            let wide = Tensor::full(7f32, (batches, queries, heads + 2, width), &Device::Cpu)?;
            let wide = here(&wide.to_dtype(dtype)?);
            let out = wide.narrow(2, 1, heads)?;
            let narrow = match mask {
                Mask::Bias(bias) => Some(here(&bias.to_dtype(dtype)?)),
                _ => None,
            };
            let mask = narrow.as_ref().map_or(mask, Mask::Bias);
            by_products(&q, &k, &v, 0.4, mask, &out)?;
            let what = format!("{mask:?} {dtype:?} {queries} {keys} {heads}/{key_heads} {width}");
            assert_near(&out, &expected, tolerance(dtype), &what)?;
            let edges = [wide.narrow(2, 0, 1)?, wide.narrow(2, heads + 1, 1)?];
            for edge in edges {
                let edge = edge.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?;
                assert!(
                    edge.flatten_all()?
                        .to_vec1::<f32>()?
                        .iter()
                        .all(|number| *number == 7.0),
                    "{what}"
                );
            }
        }
        Ok(())
    }

    /// False without a card: the tests compute nothing then.
    fn is_card() -> bool {
        !test_device().is_cpu()
    }

    fn zero(_: [usize; 4]) -> f64 {
        0.0
    }

    #[test]
    fn products_with_softmax_equal_attention() -> Result<()> {
        if !is_card() {
            return Ok(());
        }
        for shape in [
            [1, 1, 1, 1, 1, 8],
            [2, 13, 17, 3, 3, 8],
            [1, 9, 77, 4, 2, 40],
            [2, 5, 300, 6, 1, 64],
            // More queries than fit at a time.
            [1, 300, 40, 24, 24, 16],
        ] {
            check(shape, Mask::None, |_, _, _| true, zero, &DTYPES)?;
        }
        // A row that does not fit into the registers of a block.
        check([1, 3, 8200, 2, 2, 16], Mask::None, |_, _, _| true, zero, &DTYPES)?;
        check(
            [1, 3, 8200, 2, 2, 16],
            Mask::Window {
                before: 1,
                after: 8195,
            },
            |_, q, k| k + 1 >= q && k <= q + 8195,
            zero,
            &DTYPES,
        )
    }

    #[test]
    fn masks_exclude_the_keys_that_they_define() -> Result<()> {
        if !is_card() {
            return Ok(());
        }
        check(
            [1, 77, 77, 12, 12, 16],
            Mask::Causal,
            |_, query, key| key <= query,
            zero,
            &DTYPES,
        )?;
        check(
            [1, 260, 260, 24, 8, 16],
            Mask::Causal,
            |_, query, key| key <= query,
            zero,
            &DTYPES,
        )?;
        let window = |_: usize, query: usize, key: usize| key + 5 >= query && key <= query + 2;
        check(
            [2, 150, 150, 24, 24, 8],
            Mask::Window { before: 5, after: 2 },
            window,
            zero,
            &DTYPES,
        )?;
        let lengths = here(&Tensor::new(&[1u32, 19, 30], &Device::Cpu)?);
        let all = here(&Tensor::new(&[11u32, 11, 11], &Device::Cpu)?);
        let most = [1, 19, 30];
        check(
            [3, 11, 30, 4, 2, 8],
            Mask::Lengths {
                queries: &all,
                keys: &lengths,
            },
            |batch, _, key| key < most[batch],
            zero,
            &DTYPES,
        )
    }

    #[test]
    fn a_bias_is_added_along_every_axis_that_it_has() -> Result<()> {
        if !is_card() {
            return Ok(());
        }
        let [b, n, m, h] = [2, 21, 34, 3];
        for shape in [[b, h, n, m], [1, h, n, m], [1, 1, n, m], [b, 1, 1, m]] {
            let bias = random(&shape, 9)?.to_dtype(DType::BF16)?.to_dtype(DType::F32)?;
            let numbers = bias.flatten_all()?.to_vec1::<f32>()?;
            let at = |place: [usize; 4]| {
                let inside = (0..4).fold(0, |at, axis| at * shape[axis] + place[axis].min(shape[axis] - 1));
                f64::from(numbers[inside])
            };
            check(
                [b, n, m, h, h, 16],
                Mask::Bias(&bias),
                |_, _, _| true,
                at,
                &DTYPES,
            )?;
        }
        Ok(())
    }

    #[test]
    fn a_rest_of_keys_has_its_share() -> Result<()> {
        if !is_card() {
            return Ok(());
        }
        // In two strips of queries, the second of which begins inside the first.
        let [queries, keys, heads, width] = [6001, 12_361, 24, 128];
        let of = |tokens: usize, seed: u64| random(&[1, tokens, heads, width], seed)?.to_dtype(DType::BF16);
        let q = (of(queries, 1)? * 2.0)?;
        let [q, k, v] = joint([&q, &of(keys, 2)?, &of(keys, 3)?], DType::BF16)?;
        let [parts, whole] = [7f32, 9.0].map(|number| {
            let wide = Tensor::full(number, (1, queries, heads + 2, width), &Device::Cpu)?;
            Ok::<_, Error>(here(&wide.to_dtype(DType::BF16)?))
        });
        let (parts, whole) = (parts?, whole?);
        let inside = |wide: &Tensor| wide.narrow(2, 0, heads);
        assert!(by_cudnn(&q, &k, &v, 0.09, Mask::None, &inside(&parts)?)?);
        by_products(&q, &k, &v, 0.09, Mask::None, &inside(&whole)?)?;
        let expected = inside(&whole)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        let expected = expected.contiguous()?.flatten_all()?.to_vec1::<f64>()?;
        assert_near(&inside(&parts)?, &expected, BF16_OPERATION, "a rest of 73 keys")?;
        let edge = parts
            .narrow(2, heads, 2)?
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F32)?;
        let edge = edge.contiguous()?.flatten_all()?.to_vec1::<f32>()?;
        assert!(edge.iter().all(|number| *number == 7.0));
        Ok(())
    }

    #[test]
    fn scores_that_are_all_very_negative_have_finite_weights() -> Result<()> {
        if !is_card() {
            return Ok(());
        }
        // Keys of one warp and of many blocks. `exp(-110)` underflows in f32; for much lower scores f32 has too few
        // digits.
        for keys in [5, 34, 700] {
            let bias = (Tensor::zeros((1, 1, 1, keys), DType::F32, &Device::Cpu)? - 110.0)?;
            check(
                [1, 9, keys, 2, 2, 16],
                Mask::Bias(&bias),
                |_, _, _| true,
                |_| -110.0,
                &[DType::F32],
            )?;
        }
        Ok(())
    }
}
