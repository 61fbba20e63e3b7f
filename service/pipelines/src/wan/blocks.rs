//! Wan's blocks: diffusers' `WanTransformerBlock`, in parts that models with further attention between them can arrange anew.
//! They compute in [`Buffers`](super::buffers::Buffers), allocated once per request: a step allocates nothing.
//!
//! The tokens of a pass are in one or more parts, each with a modulation of its own: where a film begins with a picture, the
//! picture's tokens have the modulation of time zero. Layers over normalized rows run part by part, since fp8 codes of a part are
//! not a view of those of the whole; attention, and layers after it, run over all.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::{Epilogue, Mask, Norm, Pairs, QkNorm, Scratch};

use super::buffers::{Next, Part};
use super::modulation::BlockModulation;
use super::shape::BlockShape;
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::rotary::Rotations;

type Missing<T> = std::result::Result<T, MissingTensor>;

/// Whether all of these layers have native fp8 products.
pub(crate) fn take_codes<'a>(layers: impl IntoIterator<Item = &'a Linear>, rows: &Tensor) -> Result<bool> {
    for layer in layers {
        if !layer.takes_codes(rows.dtype())? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Attention of tokens to each other.
pub(crate) struct SelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    query_norm: Tensor,
    key_norm: Tensor,
    shape: BlockShape,
}

impl SelfAttention {
    /// The layers under `{name}.`.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        shape: &BlockShape,
    ) -> Missing<SelfAttention> {
        let width = shape.width();
        let linear = |part: &str| Linear::new(tensors, &format!("{name}.{part}"), width, width);
        let norm = |part: &str| tensors.shaped(&format!("{name}.{part}.weight"), &[width]);
        Ok(SelfAttention {
            query: linear("to_q")?,
            key: linear("to_k")?,
            value: linear("to_v")?,
            output: linear("to_out.0")?,
            query_norm: norm("norm_q")?,
            key_norm: norm("norm_k")?,
            shape: *shape,
        })
    }

    pub(crate) fn layers(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    /// The layers over normalized rows.
    pub(crate) fn first(&self) -> [&Linear; 3] {
        [&self.query, &self.key, &self.value]
    }

    /// From normalized rows of the parts to the place of queries of `whole`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn forward(
        &self,
        parts: &[Part],
        whole: &Part,
        rotations: &Rotations,
        scratch: &Scratch,
    ) -> Result<()> {
        let as_codes = take_codes(self.first(), &whole.branch)?;
        for part in parts {
            let layers = [
                self.query.to(&part.query)?,
                self.key.to(&part.key)?,
                self.value.to(&part.value)?,
            ];
            ops::linears_into(part.normed(as_codes), &layers, Epilogue::None, scratch)?;
        }
        let norm = QkNorm::AcrossHeads {
            q: &self.query_norm,
            k: &self.key_norm,
            eps: self.shape.eps,
        };
        let angles = Some(rotations.angles());
        ops::qk_norm_rope(&whole.query, &whole.key, norm, angles, Pairs::Neighbours)?;
        let operands = [&whole.query, &whole.key, &whole.value];
        whole.attention.attend(operands, &whole.branch_heads)?;
        self.output
            .forward_into(&whole.branch, Epilogue::None, &whole.query_rows, scratch)
    }
}

/// Keys and values of a text in one block, `[batch, tokens, heads, head width]`.
#[derive(Clone, Debug)]
pub(crate) struct KeysValues {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
}

/// Attention of tokens to a text.
pub(crate) struct CrossAttention {
    /// Weight and bias of the norm before it.
    norm: [Tensor; 2],
    query: Linear,
    output: Linear,
    query_norm: Tensor,
    key: Linear,
    value: Linear,
    key_norm: Tensor,
    shape: BlockShape,
}

impl CrossAttention {
    /// The layers under `{name}.`, with the norm `{norm}` before them.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        (name, norm): (&str, &str),
        shape: &BlockShape,
    ) -> Missing<CrossAttention> {
        let width = shape.width();
        let linear = |part: &str| Linear::new(tensors, &format!("{name}.{part}"), width, width);
        let vector = |name: String| tensors.shaped(&name, &[width]);
        Ok(CrossAttention {
            norm: [vector(format!("{norm}.weight"))?, vector(format!("{norm}.bias"))?],
            query: linear("to_q")?,
            output: linear("to_out.0")?,
            query_norm: vector(format!("{name}.norm_q.weight"))?,
            key: linear("to_k")?,
            value: linear("to_v")?,
            key_norm: vector(format!("{name}.norm_k.weight"))?,
            shape: *shape,
        })
    }

    /// Layers that a step runs.
    pub(crate) fn layers(&self) -> [&Linear; 2] {
        [&self.query, &self.output]
    }

    /// The keys and values of embedded text, `[batch, tokens, width]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn keys_values(&self, text: &Tensor) -> Result<KeysValues> {
        let (batch, tokens, _) = text.dims3()?;
        let by_head = |x: &Tensor| x.reshape((batch, tokens, self.shape.heads, self.shape.head));
        let (keys, values) = (self.key.forward(text)?, self.value.forward(text)?);
        let norm = Norm::Rms {
            weight: Some(&self.key_norm),
            eps: self.shape.eps,
        };
        let normed = keys.zeros_like()?;
        ops::norm_modulate(&keys, norm, None, &normed)?;
        Ok(KeysValues {
            keys: by_head(&normed)?,
            values: by_head(&values)?,
        })
    }

    /// The norm before it.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn next(&self, rows: &Tensor) -> Result<Next<'_>> {
        let [weight, bias] = &self.norm;
        Ok(Next {
            affine: Some((weight, bias)),
            modulation: None,
            as_codes: take_codes([&self.query], rows)?,
        })
    }

    /// From normalized rows of the parts to normalized queries in the branch of `whole`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn queries(&self, parts: &[Part], whole: &Part, scratch: &Scratch) -> Result<()> {
        let as_codes = take_codes([&self.query], &whole.branch)?;
        for part in parts {
            let normed = part.normed(as_codes);
            self.query
                .forward_into(normed, Epilogue::None, &part.query_rows, scratch)?;
        }
        let norm = Norm::Rms {
            weight: Some(&self.query_norm),
            eps: self.shape.eps,
        };
        ops::norm_modulate(&whole.query_rows, norm, None, &whole.branch)
    }

    /// Attention of the queries in the branch of `whole` to a text, in the place of keys.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn attend(&self, whole: &Part, text: &KeysValues) -> Result<()> {
        let scale = (self.shape.head as f64).powf(-0.5);
        let (keys, values) = (&text.keys, &text.values);
        ops::attention(&whole.branch_heads, keys, values, scale, Mask::None, &whole.key)
    }

    /// From attention in the place of keys to the branch of `whole`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn close(&self, whole: &Part, scratch: &Scratch) -> Result<()> {
        self.output
            .forward_into(&whole.key_rows, Epilogue::None, &whole.branch, scratch)
    }
}

/// The feed-forward, with the tanh approximation of GELU.
pub(crate) struct FeedForward {
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// The layers under `{name}.`.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(crate) fn new(tensors: &AdaptedTensors<'_>, name: &str, shape: &BlockShape) -> Missing<FeedForward> {
        let (width, inner) = (shape.width(), shape.inner);
        Ok(FeedForward {
            up: Linear::new(tensors, &format!("{name}.net.0.proj"), width, inner)?,
            down: Linear::new(tensors, &format!("{name}.net.2"), inner, width)?,
        })
    }

    pub(crate) fn layers(&self) -> [&Linear; 2] {
        [&self.up, &self.down]
    }

    /// From normalized rows of the parts to the branch of `whole`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn forward(&self, parts: &[Part], whole: &Part, scratch: &Scratch) -> Result<()> {
        let as_codes = take_codes([&self.up], &whole.branch)?;
        for part in parts {
            let normed = part.normed(as_codes);
            self.up
                .forward_into(normed, Epilogue::GeluTanh, &part.inner, scratch)?;
        }
        self.down
            .forward_into(&whole.inner, Epilogue::None, &whole.branch, scratch)
    }
}

/// A block.
pub(crate) struct Block {
    pub(crate) own: SelfAttention,
    pub(crate) cross: CrossAttention,
    pub(crate) feed_forward: FeedForward,
}

impl Block {
    /// The block with the tensors under `{name}.`.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(crate) fn new(tensors: &AdaptedTensors<'_>, name: &str, shape: &BlockShape) -> Missing<Block> {
        let cross = (&*format!("{name}.attn2"), &*format!("{name}.norm2"));
        Ok(Block {
            own: SelfAttention::new(tensors, &format!("{name}.attn1"), shape)?,
            cross: CrossAttention::new(tensors, cross, shape)?,
            feed_forward: FeedForward::new(tensors, &format!("{name}.ffn"), shape)?,
        })
    }

    /// Linear layers that a step runs.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let own = self.own.layers().into_iter();
        own.chain(self.cross.layers()).chain(self.feed_forward.layers())
    }

    /// The norm at the beginning of the block, for a part with this modulation.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn first(&self, modulation: &BlockModulation, rows: &Tensor) -> Result<Next<'_>> {
        Ok(Next {
            affine: None,
            modulation: Some(modulation.before_attention()?),
            as_codes: take_codes(self.own.first(), rows)?,
        })
    }

    /// The norm before the feed-forward, for a part with this modulation.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn before_feed_forward(
        &self,
        modulation: &BlockModulation,
        rows: &Tensor,
    ) -> Result<Next<'_>> {
        Ok(Next {
            affine: None,
            modulation: Some(modulation.before_feed_forward()?),
            as_codes: take_codes([&self.feed_forward.up], rows)?,
        })
    }

    /// Runs the block over normalized rows of the parts, which together are `whole`, and normalizes each part for its `next`.
    /// `modulations` are those of the parts.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn forward(
        &self,
        (parts, whole): (&[Part], &Part),
        modulations: &[BlockModulation],
        text: &KeysValues,
        rotations: &Rotations,
        next: &[Next<'_>],
        scratch: &Scratch,
    ) -> Result<()> {
        self.own.forward(parts, whole, rotations, scratch)?;
        let before_cross = self.cross.next(&whole.branch)?;
        for (part, modulation) in parts.iter().zip(modulations) {
            part.pass_on(
                &part.query_rows,
                Some(&modulation.attention_gate()?),
                &before_cross,
            )?;
        }
        self.cross.queries(parts, whole, scratch)?;
        self.cross.attend(whole, text)?;
        self.cross.close(whole, scratch)?;
        for (part, modulation) in parts.iter().zip(modulations) {
            let before = self.before_feed_forward(modulation, &whole.branch)?;
            part.pass_on(&part.branch, None, &before)?;
        }
        self.feed_forward.forward(parts, whole, scratch)?;
        for ((part, modulation), next) in parts.iter().zip(modulations).zip(next) {
            part.pass_on(&part.branch, Some(&modulation.feed_forward_gate()?), next)?;
        }
        Ok(())
    }
}
