//! Attention that never holds the whole matrix of scores: queries are taken a chunk at a time.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::attention::{Mask, attention};
use crate::loops::softmax_row;
use crate::rows::{map_rows, on_cpu};

/// Bytes of scores that a chunk may take.
const SCORE_BYTES: usize = 64 << 20;

/// Softmax over the last axis, in f32.
///
/// # Errors
/// Those of candle.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    if !on_cpu(x) {
        return composed_softmax(x);
    }
    map_rows(x, |_, row, out| softmax_row(row, out))
}

fn composed_softmax(x: &Tensor) -> Result<Tensor> {
    let weights = exponentials(x.clone())?;
    let totals = weights.sum_keepdim(D::Minus1)?;
    weights.broadcast_div(&totals)?.to_dtype(x.dtype())
}

/// `e` to the scores, less the highest of each row, in f32. Takes the scores: at most two copies in f32 exist at a time.
fn exponentials(scores: Tensor) -> Result<Tensor> {
    let highest = scores.max_keepdim(D::Minus1)?.to_dtype(DType::F32)?;
    let numbers = scores.to_dtype(DType::F32)?;
    drop(scores);
    let distances = numbers.broadcast_sub(&highest)?;
    drop(numbers);
    distances.exp()
}

/// `softmax(q kᵀ scale + bias) v` for `q` `[b, h, n, d]`, `k` and `v` `[b, h, m, d]`; the result is
/// `[b, h, n, d]`. `bias` broadcasts to `[b, h, n, m]`; `causal` lets query `i` see keys `0..=i`. Scores
/// have the dtype of `q`, softmax computes in f32, and at most 64 MiB of them (as f32) exist at a time,
/// or one row of queries. [`attention_scratch`] says what that takes where our own loops do not run.
///
/// # Errors
/// When shapes do not fit.
pub fn composed_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    bias: Option<&Tensor>,
    causal: bool,
) -> Result<Tensor> {
    let (batch, heads, queries, width) = q.dims4()?;
    let mask = match (bias, causal) {
        (None, false) => Some(Mask::None),
        (None, true) => Some(Mask::Causal),
        (Some(bias), false) => Some(Mask::Bias(bias)),
        (Some(_), true) => None,
    };
    if let Some(mask) = mask.filter(|_| on_cpu(q)) {
        let by_token = |x: &Tensor| x.transpose(1, 2);
        let out = Tensor::zeros((batch, queries, heads, width), q.dtype(), q.device())?;
        attention(&by_token(q)?, &by_token(k)?, &by_token(v)?, scale, mask, &out)?;
        return out.transpose(1, 2);
    }
    let chunk = queries_at_a_time(batch * heads, queries, k.dim(2)?);
    attention_in_chunks(q, k, v, scale, bias, causal, chunk)
}

/// Queries whose scores exist at a time. A matrix product works on tiles of 64 rows, so no tile is left half empty.
fn queries_at_a_time(heads: usize, queries: usize, keys: usize) -> usize {
    let chunk = SCORE_BYTES / (heads * keys * size_of::<f32>()).max(1);
    let chunk = if chunk > 64 { chunk / 64 * 64 } else { chunk };
    chunk.clamp(1, queries.max(1))
}

/// Bytes that [`composed_attention`] takes at most on a card beside its operands, if `v` is contiguous, and what it gives:
/// `[1, heads, queries, width]` of numbers of this size, over so many keys.
///
/// A chunk goes through three states, and the scaled queries through all of them: scores twice in f32 (read as f32, the
/// highest taken away, exponentials taken, each from the one before); then weights in the narrow dtype, beside those in
/// f32 or what the queries see; then that with two copies in f32, and in the order of tokens. Beside it is the result,
/// which chunks are written into. On the CPU it is the same: scores, and their softmax.
pub fn attention_scratch(heads: usize, queries: usize, keys: usize, width: usize, number: usize) -> usize {
    const F32: usize = size_of::<f32>();
    let chunk = queries_at_a_time(heads, queries, keys);
    let (scores, seen) = (heads * chunk * keys, heads * chunk * width);
    let of_chunk = [
        scores * 2 * F32,
        scores * (number + F32) + seen * number,
        seen * (2 * number + 2 * F32),
    ];
    let result = heads * queries * width * number;
    seen * number + of_chunk.into_iter().max().unwrap_or(0) + result
}

/// [`composed_attention`] with so many queries at a time. The chunk does not change what is computed.
///
/// # Errors
/// When shapes do not fit.
pub fn attention_in_chunks(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    bias: Option<&Tensor>,
    causal: bool,
    chunk: usize,
) -> Result<Tensor> {
    let (batch, heads, queries, width) = q.dims4()?;
    let keys = k.dim(2)?;
    // Products take a transposed matrix as it lies; the CPU's are faster with a copy.
    let k_transposed = match on_cpu(q) {
        true => k.transpose(2, 3)?.contiguous()?,
        false => k.contiguous()?.transpose(2, 3)?,
    };
    let v = v.contiguous()?;
    let bias = bias
        .map(|bias| bias.broadcast_as((batch, heads, queries, keys)))
        .transpose()?;
    // Chunks are written behind one another in the order of tokens, which is the one that projections want.
    let mut out: Option<Tensor> = None;
    for start in (0..queries).step_by(chunk) {
        let length = chunk.min(queries - start);
        let scaled = (q.narrow(2, start, length)? * scale)?.contiguous()?;
        let mut scores = scaled.matmul(&k_transposed)?;
        if let Some(bias) = &bias {
            scores = (scores + bias.narrow(2, start, length)?.to_dtype(q.dtype())?)?;
        }
        if causal {
            scores = scores.broadcast_add(&causal_mask(start, length, keys, q.dtype(), q.device())?)?;
        }
        let seen = if on_cpu(q) {
            softmax(&scores)?.matmul(&v)?
        } else {
            composed_weighted_sum(scores, &v)?
        };
        if length == queries {
            return Ok(seen);
        }
        let out = match &out {
            Some(out) => out,
            None => out.insert(Tensor::zeros(
                (batch, queries, heads, width),
                q.dtype(),
                q.device(),
            )?),
        };
        out.slice_set(&seen.transpose(1, 2)?.contiguous()?, 1, start)?;
    }
    match out {
        Some(out) => out.transpose(1, 2),
        None => Tensor::zeros((batch, heads, queries, width), q.dtype(), q.device()),
    }
}

/// `softmax(scores) v`, divided by the sums at the end, where there are fewer numbers. Takes the scores, so that they
/// go as soon as they are not needed.
fn composed_weighted_sum(scores: Tensor, v: &Tensor) -> Result<Tensor> {
    let weights = exponentials(scores)?;
    let totals = weights.sum_keepdim(D::Minus1)?;
    let narrow = weights.to_dtype(v.dtype())?;
    drop(weights);
    let seen = narrow.matmul(v)?;
    drop(narrow);
    seen.to_dtype(DType::F32)?
        .broadcast_div(&totals)?
        .to_dtype(v.dtype())
}

/// Zero where query `start + row` may see a key, minus infinity elsewhere: `[length, keys]`.
fn causal_mask(start: usize, length: usize, keys: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let mask: Vec<f32> = (start..start + length)
        .flat_map(|query| (0..keys).map(move |key| if key <= query { 0.0 } else { f32::NEG_INFINITY }))
        .collect();
    Tensor::from_vec(mask, (length, keys), device)?.to_dtype(dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, here, random};

    fn naive(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, bias: &Tensor) -> Result<Tensor> {
        composed_softmax(&(q.matmul(&k.t()?)? * scale)?.broadcast_add(bias)?)?.matmul(v)
    }

    #[test]
    fn attention_equals_its_definition_whatever_the_chunk() -> Result<()> {
        let q = random(&[2, 3, 13, 8], 1)?;
        let (k, v) = (random(&[2, 3, 17, 8], 2)?, random(&[2, 3, 17, 8], 3)?);
        let bias = random(&[1, 3, 13, 17], 4)?;
        let expected = naive(&q, &k, &v, 0.3, &bias)?;
        let [q, k, v, bias] = [q, k, v, bias].map(|tensor| here(&tensor));
        for chunk in [1, 4, 13, 64] {
            let result = attention_in_chunks(&q, &k, &v, 0.3, Some(&bias), false, chunk)?;
            assert_close(&result, &expected, 1e-6)?;
        }
        assert_close(
            &composed_attention(&q, &k, &v, 0.3, Some(&bias), false)?,
            &expected,
            1e-6,
        )
    }

    #[test]
    fn the_composed_sum_is_that_of_the_softmax() -> Result<()> {
        let scores = here(&(random(&[1, 2, 9, 12], 1)? * 9.0)?);
        let v = here(&random(&[1, 2, 12, 5], 2)?);
        let expected = composed_softmax(&scores)?.matmul(&v)?;
        assert_close(&composed_weighted_sum(scores.clone(), &v)?, &expected, 1e-6)?;
        let narrow = |t: &Tensor| t.to_dtype(DType::BF16);
        let seen = composed_weighted_sum(narrow(&scores)?, &narrow(&v)?)?;
        assert_close(&seen, &expected, 2e-2)
    }

    #[test]
    fn the_scratch_of_the_largest_attention_is_bounded() {
        // FLUX.1 at 1024x1024 and at 4096x4096, and T5.
        let mib = |bytes: usize| bytes >> 20;
        assert!(mib(attention_scratch(24, 4608, 4608, 128, 2)) < 145);
        let result = 24 * 66_048 * 128 * 2;
        assert!(mib(attention_scratch(24, 66_048, 66_048, 128, 2) - result) < 145);
        assert!(mib(attention_scratch(64, 512, 512, 64, 2)) < 150);
    }

    #[test]
    fn causal_attention_looks_back_only_across_chunks_too() -> Result<()> {
        let [q, k, v] = [
            random(&[1, 2, 9, 4], 1)?,
            random(&[1, 2, 9, 4], 2)?,
            random(&[1, 2, 9, 4], 3)?,
        ];
        let mask = causal_mask(0, 9, 9, DType::F32, &Device::Cpu)?;
        let expected = naive(&q, &k, &v, 0.5, &mask)?;
        let [q, k, v] = [q, k, v].map(|tensor| here(&tensor));
        assert_close(
            &attention_in_chunks(&q, &k, &v, 0.5, None, true, 4)?,
            &expected,
            1e-6,
        )?;
        let first = composed_attention(&q, &k, &v, 0.5, None, true)?.narrow(2, 0, 1)?;
        assert_close(&first, &v.narrow(2, 0, 1)?, 1e-6)
    }

    #[test]
    fn transposed_operands_are_taken_as_they_are() -> Result<()> {
        let token_major = here(&random(&[1, 6, 2, 4], 5)?);
        let x = token_major.transpose(1, 2)?;
        let copy = x.contiguous()?;
        assert_close(
            &composed_attention(&x, &x, &x, 0.5, None, false)?,
            &composed_attention(&copy, &copy, &copy, 0.5, None, false)?,
            0.0,
        )
    }
}
