//! Attention: `softmax(q kᵀ scale + mask) v`, over tensors as projections produce them.

mod cpu;
mod fp8;

use candle_core::{DType, Result, Tensor};

pub use fp8::attention_in_fp8;

use crate::planned::{AttentionShape, Planned, log_shape};

/// Which keys a query attends to.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    /// All keys.
    None,
    /// Keys up to the query's own position.
    Causal,
    /// Keys at most this far before and after the query's own position.
    Window {
        /// Keys before the query's own position.
        before: usize,
        /// Keys after the query's own position.
        after: usize,
    },
    /// All keys, with a bias `[b or 1, h or 1, n or 1, m]` added to the scaled scores, in the dtype of the queries.
    Bias(&'a Tensor),
    /// For the first `queries[i]` queries of batch item `i` its first `keys[i]` keys: u32 `[b]`, each at least 1. What is written for
    /// further queries is unspecified.
    Lengths { queries: &'a Tensor, keys: &'a Tensor },
}

/// Scaled dot-product attention (Vaswani et al. 2017; `torch.nn.functional.scaled_dot_product_attention`), written to
/// `out`. `q` is `[b, n, h, d]`, `k` and `v` are `[b, m, g, d]` where `g` divides `h` (grouped-query attention),
/// `out` is `[b, n, h, d]`. Only the last axis must be contiguous, so that the operands may be views of one buffer.
/// `out` must not overlap the others. Softmax and sums are f32.
///
/// # Errors
/// When shapes do not match; errors of the device.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mask: Mask<'_>, out: &Tensor) -> Result<()> {
    check_shapes(q, k, v, out)?;
    if let Mask::Lengths { queries, keys } = mask {
        check_lengths(queries, q)?;
        check_lengths(keys, k)?;
    }
    log_shape(|| AttentionShape::of(q, k, v, mask, out).map(Planned::Attention));
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return crate::cuda::attention(q, k, v, scale, mask, out);
    }
    cpu::attention(q, k, v, scale, mask, out)?;
    crate::libraries::count_attention_on_cpu();
    Ok(())
}

fn check_lengths(lengths: &Tensor, of: &Tensor) -> Result<()> {
    if lengths.dims() != [of.dim(0)?] || lengths.dtype() != DType::U32 || !lengths.is_contiguous() {
        candle_core::bail!(
            "lengths {:?} in {:?} of {:?}",
            lengths.dims(),
            lengths.dtype(),
            of.dims()
        );
    }
    Ok(())
}

fn check_shapes(q: &Tensor, k: &Tensor, v: &Tensor, out: &Tensor) -> Result<()> {
    let (batch, _, heads, width) = q.dims4()?;
    let (key_batch, _, key_heads, key_width) = k.dims4()?;
    let fits = out.dims() == q.dims()
        && v.dims() == k.dims()
        && (batch, width) == (key_batch, key_width)
        && key_heads > 0
        && heads.is_multiple_of(key_heads);
    if !fits {
        candle_core::bail!(
            "attention of {:?} over {:?} and {:?} to {:?}",
            q.dims(),
            k.dims(),
            v.dims(),
            out.dims()
        );
    }
    Ok(())
}
