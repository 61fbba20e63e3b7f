//! The buffers of a pass over Wan's blocks, and the fused pass between two layers: residual, norm, modulation.

use candle_core::{DType, Device, Result, Tensor};
use ops::{Activation, Codes, CodesOfRows, Gate, Modulation, Norm, Scratch};

use super::shape::BlockShape;
use crate::attention::AttentionPrecision;
use crate::linear::{Linear, largest_scratch};

/// Buffers of a pass, `[batch, tokens, ..]` in the dtype of the card.
pub(crate) struct Buffers {
    /// The residual stream, `[batch, tokens, width]`.
    hidden: Tensor,
    /// Normalized input of the next layers; attention; output of layers, before it is added to the residual.
    branch: Tensor,
    /// The normalized input quantized to fp8, for native products.
    codes: Option<CodesOfRows>,
    /// Queries, keys and values in each row; then the inside of the feed-forward.
    wide: Tensor,
    /// Workspace of linear layers.
    scratch: Scratch,
    shape: BlockShape,
    attention: AttentionPrecision,
}

impl Buffers {
    /// For a batch of so many items, of so many tokens each. `layers` compute in them.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn new<'a>(
        shape: BlockShape,
        (batch, tokens): (usize, usize),
        layers: impl IntoIterator<Item = &'a Linear>,
        (dtype, device): (DType, &Device),
    ) -> Result<Buffers> {
        let layers: Vec<&Linear> = layers.into_iter().collect();
        let mut take_codes = false;
        for layer in &layers {
            take_codes |= layer.takes_codes(dtype)?;
        }
        let rows = |width: usize| Tensor::zeros((batch, tokens, width), dtype, device);
        Ok(Buffers {
            hidden: rows(shape.width())?,
            branch: rows(shape.width())?,
            codes: match take_codes {
                true => Some(CodesOfRows::new(batch * tokens, shape.width(), device)?),
                false => None,
            },
            wide: rows(shape.wide())?,
            scratch: Scratch::new(largest_scratch(layers, batch * tokens, dtype), device)?,
            shape,
            attention: AttentionPrecision::Full,
        })
    }

    /// The same buffers, for attention of the tokens to each other as asked.
    pub(crate) fn with_attention(self, attention: AttentionPrecision) -> Buffers {
        Buffers { attention, ..self }
    }

    /// Workspace of linear layers.
    pub(crate) fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// All rows.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn whole(&self) -> Result<Part> {
        self.part(0, self.hidden.dim(1)?)
    }

    /// The rows of some tokens of each item.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn part(&self, first: usize, count: usize) -> Result<Part> {
        let BlockShape { heads, head, .. } = self.shape;
        let (batch, tokens, width) = self.hidden.dims3()?;
        let rows = |x: &Tensor| x.narrow(1, first, count);
        let by_head = self
            .wide
            .reshape((batch, tokens, self.shape.wide() / head, head))?;
        let by_head = rows(&by_head)?;
        let wide = rows(&self.wide)?;
        Ok(Part {
            hidden: rows(&self.hidden)?,
            branch: rows(&self.branch)?,
            codes: match &self.codes {
                // Codes are contiguous, so those of a part are not a view of those of the whole.
                Some(all) => Some(all.part(batch * first, batch * count)?),
                None => None,
            },
            query: by_head.narrow(2, 0, heads)?,
            key: by_head.narrow(2, heads, heads)?,
            value: by_head.narrow(2, 2 * heads, heads)?,
            branch_heads: rows(&self.branch.reshape((batch, tokens, heads, head))?)?,
            query_rows: wide.narrow(2, 0, width)?,
            key_rows: wide.narrow(2, width, width)?,
            inner: wide.narrow(2, 0, self.shape.inner)?,
            attention: self.attention,
            eps: self.shape.eps,
        })
    }
}

/// Rows of the buffers.
#[derive(Debug)]
pub(crate) struct Part {
    /// `[batch, tokens, width]`.
    pub(crate) hidden: Tensor,
    pub(crate) branch: Tensor,
    codes: Option<Codes>,
    /// `[batch, tokens, heads, head width]`.
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    /// The branch by head.
    pub(crate) branch_heads: Tensor,
    /// The places of queries and of keys as `[batch, tokens, width]`.
    pub(crate) query_rows: Tensor,
    pub(crate) key_rows: Tensor,
    /// `[batch, tokens, inner]`, in the memory of queries, keys and values.
    pub(crate) inner: Tensor,
    pub(super) attention: AttentionPrecision,
    eps: f64,
}

/// The norm before layers, and the form in which they take its rows.
pub(crate) struct Next<'a> {
    /// Weight and bias of the norm.
    pub(crate) affine: Option<(&'a Tensor, &'a Tensor)>,
    /// Shift and scale of a step, `[1, width]` each.
    pub(crate) modulation: Option<(Tensor, Tensor)>,
    pub(crate) as_codes: bool,
}

impl Next<'_> {
    fn modulation(&self) -> Option<Modulation<'_>> {
        self.modulation.as_ref().map(|(shift, scale)| Modulation {
            scale,
            shift: Some(shift),
        })
    }

    fn norm(&self, eps: f64) -> Norm<'_> {
        Norm::Layer {
            affine: self.affine,
            eps,
        }
    }
}

impl Part {
    /// The place of normalized rows, in the form that the next layers take.
    pub(crate) fn normed(&self, as_codes: bool) -> Activation<'_> {
        match &self.codes {
            Some(codes) if as_codes => Activation::Codes(codes),
            _ => Activation::Numbers(&self.branch),
        }
    }

    /// Normalizes the residual for the first layers of a pass.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn enter(&self, next: &Next<'_>) -> Result<()> {
        let normed = self.normed(next.as_codes);
        ops::norm_modulate(&self.hidden, next.norm(self.eps), next.modulation(), normed)
    }

    /// Adds an output, the branch or the place of queries, to the residual, and normalizes for `next`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn pass_on(&self, output: &Tensor, gate: Option<&Tensor>, next: &Next<'_>) -> Result<()> {
        ops::residual_norm_modulate(
            &self.hidden,
            output,
            gate.map(Gate::from),
            next.norm(self.eps),
            next.modulation(),
            self.normed(next.as_codes),
        )
    }
}
