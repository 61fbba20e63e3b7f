//! The buffers of layers, which compute in them and allocate nothing.

use candle_core::{DType, Device, Result, Tensor};
use ops::{Scratch, allocated};

use super::config::LayerConfig;

/// Buffers of a pass over `[batch, tokens]`, reused by every layer. Queries, keys and values share memory with one half of
/// the feed-forward, the output of attention with the other.
#[derive(Debug)]
pub(super) struct TokenBuffers {
    /// The residual stream, `[batch, tokens, hidden_size]`.
    pub(super) sum: Tensor,
    /// Normalized input of the next layers, or their output before it is added.
    pub(super) normed: Tensor,
    /// `[batch, tokens, heads, head_dim]`, with keys and values behind them in each row.
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) attended: Tensor,
    /// `[batch, tokens, intermediate_size]`.
    pub(super) gate: Tensor,
    pub(super) raised: Tensor,
    /// Workspace of linear layers.
    pub(super) scratch: Scratch,
}

/// Elements per token of the first shared buffer: queries, keys and values, or the gate.
fn first_width(layer: &LayerConfig) -> usize {
    (layer.queries() + 2 * layer.keys()).max(layer.intermediate_size)
}

/// Elements per token of the second: what was attended to, rounded up to whole heads, or the raised values.
fn second_width(layer: &LayerConfig) -> usize {
    let inner = layer.intermediate_size.next_multiple_of(layer.head_dim);
    layer.queries().max(inner)
}

/// Elements from one token to the next of queries, keys and values, and of what was attended to.
pub(super) fn row_widths(layer: &LayerConfig) -> (usize, usize) {
    (layer.queries() + 2 * layer.keys(), second_width(layer))
}

impl TokenBuffers {
    /// For so many tokens in each item of a batch; the residual stream in its own dtype.
    pub(super) fn new(
        layer: &LayerConfig,
        (batch, tokens): (usize, usize),
        of_sum: DType,
        scratch_bytes: u64,
        (dtype, device): (DType, &Device),
    ) -> Result<TokenBuffers> {
        let (all, head) = (batch * tokens, layer.head_dim);
        let (heads, keys, inner) = (
            layer.num_attention_heads,
            layer.num_key_value_heads,
            layer.intermediate_size,
        );
        let buffer = |width: usize| Tensor::zeros(all * width, dtype, device);
        let (first, second) = (buffer(first_width(layer))?, buffer(second_width(layer))?);
        let joint = first.narrow(0, 0, all * (heads + 2 * keys) * head)?;
        let joint = joint.reshape((batch, tokens, heads + 2 * keys, head))?;
        let attended = second.reshape((batch, tokens, second_width(layer) / head, head))?;
        let halves = |buffer: &Tensor| {
            let half = buffer.narrow(0, 0, all * inner)?;
            half.reshape((batch, tokens, inner))
        };
        let rows = (batch, tokens, layer.hidden_size);
        Ok(TokenBuffers {
            sum: Tensor::zeros(rows, of_sum, device)?,
            normed: Tensor::zeros(rows, dtype, device)?,
            query: joint.narrow(2, 0, heads)?,
            key: joint.narrow(2, heads, keys)?,
            value: joint.narrow(2, heads + keys, keys)?,
            attended: attended.narrow(2, 0, heads)?,
            gate: halves(&first)?,
            raised: halves(&second)?,
            scratch: Scratch::new(scratch_bytes, device)?,
        })
    }

    /// Their bytes for so many tokens, without the workspace of linear layers.
    pub(super) fn bytes(layer: &LayerConfig, tokens: usize, of_sum: DType, dtype: DType) -> u64 {
        let size = dtype.size_in_bytes();
        allocated(tokens * layer.hidden_size * of_sum.size_in_bytes())
            + allocated(tokens * layer.hidden_size * size)
            + allocated(tokens * first_width(layer) * size)
            + allocated(tokens * second_width(layer) * size)
    }
}
