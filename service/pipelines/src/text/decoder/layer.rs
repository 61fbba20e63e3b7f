//! A layer of a decoder, and the buffers that all layers of a pass share.

use candle_core::{DType, Device, Tensor};
use gpu::MissingTensor;
use ops::{
    Epilogue, Mask, Nonlinearity, Norm, Pairs, QkNorm, Scratch, add_residual, attention, linears_into,
    qk_norm_rope, residual_norm_modulate,
};

use super::Decoder;
use super::positions::Positions;
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::rotary::Rotations;

/// `LlamaDecoderLayer`, `Qwen3DecoderLayer`, `Qwen2_5_VLDecoderLayer`.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    pub(super) norm1: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    /// Norms of each head of queries and of keys.
    head_norms: Option<(Tensor, Tensor)>,
    norm2: Tensor,
    gate: Linear,
    raise: Linear,
    lower: Linear,
}

impl Layer {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        decoder: &Decoder,
    ) -> Result<Layer, MissingTensor> {
        let (width, inner, head) = (decoder.hidden_size, decoder.intermediate_size, decoder.head_dim);
        let (queries, keys) = (decoder.heads * head, decoder.heads_kv * head);
        let linear = |part: &str, from: usize, to: usize| {
            Linear::without_bias(tensors, &format!("{name}.{part}_proj"), from, to)
        };
        let projection = |part: &str, to: usize| match decoder.has_biases {
            true => Linear::new(tensors, &format!("{name}.self_attn.{part}_proj"), width, to),
            false => linear(&format!("self_attn.{part}"), width, to),
        };
        let norm = |part: &str, width: usize| tensors.shaped(&format!("{name}.{part}.weight"), &[width]);
        Ok(Layer {
            norm1: norm("input_layernorm", width)?,
            query: projection("q", queries)?,
            key: projection("k", keys)?,
            value: projection("v", keys)?,
            out: linear("self_attn.o", queries, width)?,
            head_norms: match decoder.has_head_norms {
                true => Some((norm("self_attn.q_norm", head)?, norm("self_attn.k_norm", head)?)),
                false => None,
            },
            norm2: norm("post_attention_layernorm", width)?,
            gate: linear("mlp.gate", width, inner)?,
            raise: linear("mlp.up", width, inner)?,
            lower: linear("mlp.down", inner, width)?,
        })
    }

    pub(super) fn linears(&self) -> [&Linear; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.out,
            &self.gate,
            &self.raise,
            &self.lower,
        ]
    }

    /// Adds the layer to the residual stream, whose normalized rows are ready; `next` is the weight of the norm that
    /// follows, `None` after the last layer.
    pub(super) fn forward(&self, buffers: &Buffers, next: Option<&Tensor>) -> candle_core::Result<()> {
        let Buffers {
            sum,
            normed,
            query,
            key,
            value,
            attended,
            gate,
            raised,
            rotations,
            attended_tokens,
            eps,
            scratch,
        } = buffers;
        let rms = |weight| Norm::Rms {
            weight: Some(weight),
            eps: *eps,
        };
        let layers = [self.query.to(query)?, self.key.to(key)?, self.value.to(value)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        let norm = match &self.head_norms {
            Some((q, k)) => QkNorm::PerHead { q, k, eps: *eps },
            None => QkNorm::None,
        };
        qk_norm_rope(query, key, norm, Some(rotations.angles()), Pairs::Halves)?;
        let scale = (query.dim(3)? as f64).powf(-0.5);
        let tokens = query.dim(1)?;
        let key = key.narrow(1, 0, *attended_tokens)?;
        let value = value.narrow(1, 0, *attended_tokens)?;
        for (first, count, mask) in [
            (0, *attended_tokens, Mask::Causal),
            (*attended_tokens, tokens - attended_tokens, Mask::None),
        ] {
            if count > 0 {
                let (query, out) = (query.narrow(1, first, count)?, attended.narrow(1, first, count)?);
                attention(&query, &key, &value, scale, mask, &out)?;
            }
        }
        self.out.forward_into(attended, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, rms(&self.norm2), None, normed)?;
        let layers = [self.gate.to(gate)?, self.raise.to(raised)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        ops::glu(gate, raised, Nonlinearity::Silu, gate)?;
        self.lower.forward_into(gate, Epilogue::None, normed, scratch)?;
        match next {
            Some(next) => residual_norm_modulate(sum, normed, None, rms(next), None, normed),
            None => add_residual(sum, normed, None),
        }
    }
}

/// Buffers of a pass, reused by every layer. The first and the last intermediate results share memory.
pub(super) struct Buffers {
    /// f32 `[1, tokens, width]`: the residual stream.
    pub(super) sum: Tensor,
    /// `[1, tokens, width]`: the normalized input of the next layers, or their output before it is added.
    pub(super) normed: Tensor,
    /// `[1, tokens, heads, head]`, followed by keys and values in each row.
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    /// `[1, tokens, inner]`, in the memory of `query`.
    gate: Tensor,
    /// `[1, tokens, inner]`, in the memory of `attended`.
    raised: Tensor,
    rotations: Rotations,
    /// Tokens that are attended to; those after them are padding.
    attended_tokens: usize,
    eps: f64,
    scratch: Scratch,
}

impl Buffers {
    pub(super) fn new(
        decoder: &Decoder,
        (positions, attended_tokens): (&Positions<'_>, usize),
        dtype: DType,
        scratch: Scratch,
        device: &Device,
    ) -> candle_core::Result<Buffers> {
        let (heads, keys, head) = (decoder.heads, decoder.heads_kv, decoder.head_dim);
        let tokens = positions.count();
        let (first, second) = (decoder.first_width(), decoder.second_width());
        let buffer = |width: usize| Tensor::zeros(tokens * width, dtype, device);
        let (first, second_rows) = (buffer(first)?, buffer(second)?);
        let joint = first.narrow(0, 0, tokens * decoder.joint_width())?;
        let joint = joint.reshape((1, tokens, heads + 2 * keys, head))?;
        let attended = second_rows.reshape((1, tokens, second / head, head))?;
        let inner = decoder.intermediate_size;
        Ok(Buffers {
            sum: Tensor::zeros((1, tokens, decoder.hidden_size), DType::F32, device)?,
            normed: buffer(decoder.hidden_size)?.reshape((1, tokens, decoder.hidden_size))?,
            query: joint.narrow(2, 0, heads)?,
            key: joint.narrow(2, heads, keys)?,
            value: joint.narrow(2, heads + keys, keys)?,
            attended: attended.narrow(2, 0, heads)?,
            gate: first.narrow(0, 0, tokens * inner)?.reshape((1, tokens, inner))?,
            raised: second_rows
                .narrow(0, 0, tokens * inner)?
                .reshape((1, tokens, inner))?,
            rotations: positions.rotations(decoder, device)?,
            attended_tokens,
            eps: decoder.rms_norm_eps,
            scratch,
        })
    }
}
