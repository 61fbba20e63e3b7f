//! Attention: `softmax(q kᵀ scale + mask) v`, over tensors as projections leave them.

mod cpu;

use candle_core::{Result, Tensor};

use crate::planned::{AttentionShape, Planned, tell_asked};

/// Which keys a query sees.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    /// All.
    None,
    /// Those up to its own place.
    Causal,
    /// Those at most so many places before and after its own.
    Window {
        /// Keys before the query's own place.
        before: usize,
        /// Keys after it.
        after: usize,
    },
    /// All, with `[b or 1, h or 1, n or 1, m]` added to the scaled scores, in the dtype of the queries.
    Bias(&'a Tensor),
    /// The first so many of each batch: u32 `[b]`, 1 at least.
    Lengths(&'a Tensor),
}

/// Scaled dot-product attention (Vaswani et al. 2017; `torch.nn.functional.scaled_dot_product_attention`), written to
/// `out`. `q` is `[b, n, h, d]`, `k` and `v` are `[b, m, g, d]` where `g` divides `h` (each `h / g` heads of queries share
/// one of keys), `out` is `[b, n, h, d]`; of all, only the last axis must be contiguous, so that they may be windows of
/// one buffer. `out` must not overlap the others. Softmax and sums are f32.
///
/// # Errors
/// When shapes do not fit; those of the device.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mask: Mask<'_>, out: &Tensor) -> Result<()> {
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
    tell_asked(|| AttentionShape::of(q, k, v, mask, out).map(Planned::Attention));
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        return crate::cuda::attention(q, k, v, scale, mask, out);
    }
    cpu::attention(q, k, v, scale, mask, out)?;
    crate::libraries::count_attention_on_cpu();
    Ok(())
}
