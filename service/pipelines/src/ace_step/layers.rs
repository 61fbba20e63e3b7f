//! The layers of the encoders: diffusers' `AceStepEncoderLayer`, and the attention and feed-forward that the transformer's
//! blocks have too.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use gpu::MissingTensor;
use ops::{Mask, Nonlinearity, Norm, Pairs, QkNorm, add_residual, qk_norm_rope, residual_norm_modulate};

use super::buffers::TokenBuffers;
use super::config::LayerConfig;
use crate::StageError;
use crate::adapters::{AdaptedTensors, SetsOfItems};
use crate::linear::{Linear, largest_scratch, linears_of_items_into};
use crate::rotary::{Rotations, Rounded, rotations};

/// Rows that items of a batch attend to.
pub(super) enum Others<'a> {
    /// Items that attend to the same rows do so as one.
    OfAll {
        items: Range<usize>,
        /// `[1, n, heads, head_dim]`, as of [`Attention::keys_and_values`].
        keys: &'a Tensor,
        values: &'a Tensor,
    },
    /// The first items of the batch attend to rows of their own, which are padded to one length.
    OfEach {
        /// `[items, n, heads, head_dim]`.
        keys: Tensor,
        values: Tensor,
        /// Of queries and of keys, u32 `[items]`.
        lengths: [Tensor; 2],
    },
}

/// Attention with a norm of each head of queries and keys (`AceStepAttention`).
pub(super) struct Attention {
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    output: Linear,
    pub(super) query_norm: Tensor,
    pub(super) key_norm: Tensor,
    eps: f64,
    scale: f64,
}

impl Attention {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        layer: &LayerConfig,
    ) -> Result<Attention, MissingTensor> {
        let (width, queries, keys) = (layer.hidden_size, layer.queries(), layer.keys());
        let linear = |part: &str, from: usize, to: usize| {
            Linear::without_bias(tensors, &format!("{name}.{part}"), from, to)
        };
        let norm = |part: &str| tensors.shaped(&format!("{name}.{part}.weight"), &[layer.head_dim]);
        Ok(Attention {
            query: linear("to_q", width, queries)?,
            key: linear("to_k", width, keys)?,
            value: linear("to_v", width, keys)?,
            output: linear("to_out.0", queries, width)?,
            query_norm: norm("norm_q")?,
            key_norm: norm("norm_k")?,
            eps: layer.rms_norm_eps,
            scale: (layer.head_dim as f64).powf(-0.5),
        })
    }

    pub(super) fn linears(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    fn norm(&self) -> QkNorm<'_> {
        QkNorm::PerHead {
            q: &self.query_norm,
            k: &self.key_norm,
            eps: self.eps,
        }
    }

    /// Attention of the normalized rows to themselves; the result replaces the rows. `window` limits the distance of keys, in
    /// tokens.
    pub(super) fn to_itself(
        &self,
        buffers: &TokenBuffers,
        turned: &Rotations,
        window: Option<usize>,
    ) -> candle_core::Result<()> {
        let TokenBuffers {
            normed,
            query,
            key,
            value,
            attended,
            scratch,
            sets,
            ..
        } = buffers;
        let layers = [(&self.query, query), (&self.key, key), (&self.value, value)];
        linears_of_items_into(normed, &layers, sets, scratch)?;
        qk_norm_rope(query, key, self.norm(), Some(turned.angles()), Pairs::Halves)?;
        let mask = window.map_or(Mask::None, |tokens| Mask::Window {
            before: tokens,
            after: tokens,
        });
        ops::attention(query, key, value, self.scale, mask, attended)?;
        linears_of_items_into(attended, &[(&self.output, normed)], sets, scratch)
    }

    /// Keys and values for [`Attention::to_others`], of the rows attended to, `[1, n, hidden_size]`, with a set of adapters.
    pub(super) fn keys_and_values(
        &self,
        others: &Tensor,
        set: &SetsOfItems,
        layer: &LayerConfig,
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let (_, count, _) = others.dims3()?;
        let shape = (1, count, layer.num_key_value_heads, layer.head_dim);
        let key = self.key.forward_of_items(others, set)?.reshape(shape)?;
        let value = self.value.forward_of_items(others, set)?.reshape(shape)?;
        // The operation normalizes queries too: here there are none.
        qk_norm_rope(&key.narrow(2, 0, 0)?, &key, self.norm(), None, Pairs::Halves)?;
        Ok((key, value))
    }

    /// Attention of the normalized rows to other rows; the result replaces the normalized rows.
    pub(super) fn to_others(&self, buffers: &TokenBuffers, others: &[Others<'_>]) -> candle_core::Result<()> {
        let TokenBuffers {
            normed,
            query,
            key,
            attended,
            scratch,
            sets,
            ..
        } = buffers;
        linears_of_items_into(normed, &[(&self.query, query)], sets, scratch)?;
        // The operation normalizes keys too: these are normalized already.
        qk_norm_rope(query, &key.narrow(2, 0, 0)?, self.norm(), None, Pairs::Halves)?;
        for others in others {
            match others {
                Others::OfAll { items, keys, values } => {
                    let (query, attended) = buffers.as_one(items.clone())?;
                    ops::attention(&query, keys, values, self.scale, Mask::None, &attended)?;
                }
                Others::OfEach {
                    keys,
                    values,
                    lengths: [queries, of_keys],
                } => {
                    let mask = Mask::Lengths {
                        queries,
                        keys: of_keys,
                    };
                    ops::attention(query, keys, values, self.scale, mask, attended)?;
                }
            }
        }
        linears_of_items_into(attended, &[(&self.output, normed)], sets, scratch)
    }
}

/// `down(silu(gate x) * up x)` (`AceStepMLP`).
pub(super) struct FeedForward {
    gate: Linear,
    raise: Linear,
    lower: Linear,
}

impl FeedForward {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        layer: &LayerConfig,
    ) -> Result<FeedForward, MissingTensor> {
        let (width, inner) = (layer.hidden_size, layer.intermediate_size);
        let linear = |part: &str, from: usize, to: usize| {
            Linear::without_bias(tensors, &format!("{name}.{part}"), from, to)
        };
        Ok(FeedForward {
            gate: linear("gate_proj", width, inner)?,
            raise: linear("up_proj", width, inner)?,
            lower: linear("down_proj", inner, width)?,
        })
    }

    pub(super) fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.raise, &self.lower]
    }

    /// Runs over the normalized rows; the result replaces them.
    pub(super) fn forward(&self, buffers: &TokenBuffers) -> candle_core::Result<()> {
        let TokenBuffers {
            normed,
            gate,
            raised,
            scratch,
            sets,
            ..
        } = buffers;
        let halves = [(&self.gate, gate), (&self.raise, raised)];
        linears_of_items_into(normed, &halves, sets, scratch)?;
        ops::glu(gate, raised, Nonlinearity::Silu, gate)?;
        linears_of_items_into(gate, &[(&self.lower, normed)], sets, scratch)
    }
}

/// A layer of an encoder.
struct EncoderLayer {
    attention: Attention,
    feed_forward: FeedForward,
    norms: [Tensor; 2],
}

/// The layers of an encoder, with the norm after them.
pub(super) struct Encoder {
    layers: Vec<EncoderLayer>,
    norm: Tensor,
    config: LayerConfig,
}

impl Encoder {
    /// Takes the tensors whose names begin with `prefix`.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        prefix: &str,
        layers: usize,
        config: &LayerConfig,
    ) -> Result<Encoder, MissingTensor> {
        let norm = |name: String| tensors.shaped(&format!("{name}.weight"), &[config.hidden_size]);
        let layer = |i: usize| {
            let name = format!("{prefix}layers.{i}");
            Ok(EncoderLayer {
                attention: Attention::new(tensors, &format!("{name}.self_attn"), config)?,
                feed_forward: FeedForward::new(tensors, &format!("{name}.mlp"), config)?,
                norms: [
                    norm(format!("{name}.input_layernorm"))?,
                    norm(format!("{name}.post_attention_layernorm"))?,
                ],
            })
        };
        Ok(Encoder {
            layers: (0..layers).map(layer).collect::<Result<_, _>>()?,
            norm: norm(format!("{prefix}norm"))?,
            config: config.clone(),
        })
    }

    /// Buffers for `tokens` tokens in each item of a batch.
    pub(super) fn buffers(
        &self,
        (batch, tokens): (usize, usize),
        on: (DType, &Device),
    ) -> candle_core::Result<TokenBuffers> {
        let linears = self.layers.iter().flat_map(|layer| {
            let of_attention = layer.attention.linears().into_iter();
            of_attention.chain(layer.feed_forward.linears())
        });
        let scratch = largest_scratch(linears, batch * tokens, on.0);
        TokenBuffers::new(&self.config, (batch, tokens), DType::F32, scratch, on)
    }

    /// Runs all layers over the sum in the buffers; then their normalized rows are in `normed`. `go_on` is called before
    /// every layer.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`.
    pub(super) fn run(
        &self,
        buffers: &TokenBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let (_, tokens, _) = buffers.sum.dims3()?;
        let places: Vec<[u32; 1]> = (0..tokens as u32).map(|at| [at]).collect();
        let turned = rotations(
            &places,
            [self.config.head_dim],
            self.config.rope_theta,
            Rounded::Frequencies,
            buffers.sum.device(),
        )?;
        let rms = |weight| Norm::Rms {
            weight: Some(weight),
            eps: self.config.rms_norm_eps,
        };
        let TokenBuffers { sum, normed, .. } = buffers;
        for (i, layer) in self.layers.iter().enumerate() {
            go_on()?;
            if i == 0 {
                ops::norm_modulate(sum, rms(&layer.norms[0]), None, normed)?;
            }
            let window = self.config.window(i, tokens);
            layer.attention.to_itself(buffers, &turned, window)?;
            residual_norm_modulate(sum, normed, None, rms(&layer.norms[1]), None, normed)?;
            layer.feed_forward.forward(buffers)?;
            match self.layers.get(i + 1) {
                Some(next) => residual_norm_modulate(sum, normed, None, rms(&next.norms[0]), None, normed)?,
                None => {
                    add_residual(sum, normed, None)?;
                    ops::norm_modulate(sum, rms(&self.norm), None, normed)?;
                }
            }
        }
        Ok(())
    }

    /// Bytes of a pass over `tokens` tokens: the buffers, and the workspace of attention where cuDNN has no plan.
    pub(super) fn scratch(config: &LayerConfig, (batch, tokens): (usize, usize), dtype: DType) -> u64 {
        let attention = ops::attention_workspace(config.num_attention_heads, tokens, tokens);
        TokenBuffers::bytes(config, batch * tokens, DType::F32, dtype)
            + ops::allocated(attention)
            + 2 * ops::allocated(tokens * config.head_dim / 2 * size_of::<f32>())
    }
}
