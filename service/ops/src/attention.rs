//! Attention that never holds the whole matrix of scores: queries are taken a chunk at a time.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::rows::{exp, highest, map_rows, on_cpu, sum};

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
    map_rows(x, |_, row, out| {
        let highest = highest(row);
        for (o, &v) in out.iter_mut().zip(row) {
            *o = exp(v - highest);
        }
        let factor = 1.0 / sum(out);
        out.iter_mut().for_each(|o| *o *= factor);
    })
}

fn composed_softmax(x: &Tensor) -> Result<Tensor> {
    let numbers = x.to_dtype(DType::F32)?;
    let weights = numbers.broadcast_sub(&numbers.max_keepdim(D::Minus1)?)?.exp()?;
    weights
        .broadcast_div(&weights.sum_keepdim(D::Minus1)?)?
        .to_dtype(x.dtype())
}

/// `softmax(q kᵀ scale + bias) v` for `q` `[b, h, n, d]`, `k` and `v` `[b, h, m, d]`; the result is
/// `[b, h, n, d]`. `bias` broadcasts to `[b, h, n, m]`; `causal` lets query `i` see keys `0..=i`. Scores
/// have the dtype of `q`, softmax computes in f32, and at most 64 MiB of them (as f32) exist at a time,
/// or one row of queries.
///
/// # Errors
/// When shapes do not fit.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    bias: Option<&Tensor>,
    causal: bool,
) -> Result<Tensor> {
    let (batch, heads, queries, _) = q.dims4()?;
    let bytes_per_query = batch * heads * k.dim(2)? * size_of::<f32>();
    let chunk = (SCORE_BYTES / bytes_per_query.max(1)).clamp(1, queries.max(1));
    attention_in_chunks(q, k, v, scale, bias, causal, chunk)
}

/// [`attention`] with so many queries at a time. The chunk does not change what is computed.
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
    let (batch, heads, queries, _) = q.dims4()?;
    let keys = k.dim(2)?;
    let q = (q * scale)?.contiguous()?;
    let k_transposed = k.transpose(2, 3)?.contiguous()?;
    let v = v.contiguous()?;
    let bias = bias
        .map(|bias| bias.broadcast_as((batch, heads, queries, keys)))
        .transpose()?;
    let mut parts = Vec::with_capacity(queries.div_ceil(chunk));
    for start in (0..queries).step_by(chunk) {
        let length = chunk.min(queries - start);
        let mut scores = q.narrow(2, start, length)?.contiguous()?.matmul(&k_transposed)?;
        if let Some(bias) = &bias {
            scores = (scores + bias.narrow(2, start, length)?.to_dtype(q.dtype())?)?;
        }
        if causal {
            scores = scores.broadcast_add(&causal_mask(start, length, keys, q.dtype(), q.device())?)?;
        }
        parts.push(softmax(&scores)?.matmul(&v)?);
    }
    if parts.len() == 1 {
        Ok(parts.swap_remove(0))
    } else {
        Tensor::cat(&parts, 2)
    }
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
    use crate::testing::{assert_close, random};

    fn naive(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, bias: &Tensor) -> Result<Tensor> {
        composed_softmax(&(q.matmul(&k.t()?)? * scale)?.broadcast_add(bias)?)?.matmul(v)
    }

    #[test]
    fn attention_equals_its_definition_whatever_the_chunk() -> Result<()> {
        let q = random(&[2, 3, 13, 8], 1)?;
        let (k, v) = (random(&[2, 3, 17, 8], 2)?, random(&[2, 3, 17, 8], 3)?);
        let bias = random(&[1, 3, 13, 17], 4)?;
        let expected = naive(&q, &k, &v, 0.3, &bias)?;
        for chunk in [1, 4, 13, 64] {
            let result = attention_in_chunks(&q, &k, &v, 0.3, Some(&bias), false, chunk)?;
            assert_close(&result, &expected, 1e-6)?;
        }
        assert_close(&attention(&q, &k, &v, 0.3, Some(&bias), false)?, &expected, 1e-6)
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
        assert_close(
            &attention_in_chunks(&q, &k, &v, 0.5, None, true, 4)?,
            &expected,
            1e-6,
        )?;
        let first = attention(&q, &k, &v, 0.5, None, true)?.narrow(2, 0, 1)?;
        assert_close(&first, &v.narrow(2, 0, 1)?, 1e-6)
    }

    #[test]
    fn transposed_operands_are_taken_as_they_are() -> Result<()> {
        let token_major = random(&[1, 6, 2, 4], 5)?;
        let x = token_major.transpose(1, 2)?;
        let copy = x.contiguous()?;
        assert_close(
            &attention(&x, &x, &x, 0.5, None, false)?,
            &attention(&copy, &copy, &copy, 0.5, None, false)?,
            0.0,
        )
    }
}
