//! The buffers of blocks, and the fused pass between two layers: norm of the branch, gate, residual, norm,
//! modulation.

use candle_core::{DType, Device, Result, Tensor};
use ops::{
    Activation, AttentionShape, Codes, CodesOfRows, Gate, MaskShape, Modulation, Norm, Planned, Scratch,
};

use super::config::TransformerConfig;
use crate::attention::AttentionPrecision;

/// Epsilon of the norm before the last layer.
const LAST_EPS: f64 = 1e-6;

/// Row width of the buffer shared by attention and feed-forward.
fn wide(config: &TransformerConfig) -> usize {
    (2 * config.feed_forward_width()).next_multiple_of(config.head())
}

/// Buffers of blocks, `[1, tokens, ..]` in the dtype of the card. The picture comes first, then the text.
#[derive(Debug)]
pub(super) struct ZImageBuffers {
    /// The residual stream, `[1, tokens, dim]`.
    hidden: Tensor,
    /// Normalized input of the next layers; then their output, before it is added to the residual.
    branch: Tensor,
    /// The normalized input quantized to fp8, for native products: u8 `[tokens, dim]`.
    codes: Option<CodesOfRows>,
    /// Queries, keys and values, concatenated in each row, then the gated values, `[1, tokens, 3 dim]`.
    joint: Tensor,
    /// Attention output, then both halves of the feed-forward, `[1, tokens, 2 inner]`, rounded up to whole heads.
    wide: Tensor,
    /// Workspace of linear layers.
    scratch: Scratch,
    heads: usize,
    inner: usize,
    attention: AttentionPrecision,
    /// Epsilon of the norms of tokens.
    eps: f64,
}

impl ZImageBuffers {
    /// For `tokens` tokens.
    pub(super) fn new(
        config: &TransformerConfig,
        tokens: usize,
        layers: Layers,
        (dtype, device): (DType, &Device),
    ) -> Result<ZImageBuffers> {
        let width = config.dim;
        let rows = |width: usize| Tensor::zeros((1, tokens, width), dtype, device);
        Ok(ZImageBuffers {
            hidden: rows(width)?,
            branch: rows(width)?,
            codes: match layers.take_codes {
                true => Some(CodesOfRows::new(tokens, width, device)?),
                false => None,
            },
            joint: rows(3 * width)?,
            wide: rows(wide(config))?,
            scratch: Scratch::new(layers.scratch_bytes, device)?,
            heads: config.n_heads,
            inner: config.feed_forward_width(),
            attention: AttentionPrecision::Full,
            eps: config.norm_eps,
        })
    }

    /// The same buffers, for attention as asked.
    pub(super) fn with_attention(self, attention: AttentionPrecision) -> ZImageBuffers {
        ZImageBuffers { attention, ..self }
    }

    /// Bytes of the buffers for `tokens` tokens.
    pub(super) fn bytes(config: &TransformerConfig, tokens: usize, number: usize) -> u64 {
        (((1 + 1 + 3) * config.dim + wide(config)) * tokens * number) as u64
    }

    /// Shape of attention over `tokens` of the `all` tokens of the buffers.
    pub(super) fn planned(config: &TransformerConfig, tokens: usize, all: usize, dtype: DType) -> Planned {
        let (row, row_out) = (3 * config.dim, wide(config));
        let by_head = (config.n_heads, config.head());
        let mut shape = AttentionShape::of_rows(tokens, by_head, (row, row_out), dtype, MaskShape::None);
        for strides in [&mut shape.q, &mut shape.k, &mut shape.v] {
            strides[0] = all * row;
        }
        shape.out[0] = all * row_out;
        Planned::Attention(shape)
    }

    /// Workspace of linear layers.
    pub(super) fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// A range of rows.
    pub(super) fn part(&self, first: usize, count: usize) -> Result<Part> {
        let (_, tokens, width) = self.hidden.dims3()?;
        let (heads, head) = (self.heads, width / self.heads);
        let rows = |x: &Tensor| x.narrow(1, first, count);
        let by_head = |x: &Tensor| {
            let row = x.dim(2)?;
            rows(&x.reshape((1, tokens, row / head, head))?)
        };
        let (joint, wide) = (by_head(&self.joint)?, rows(&self.wide)?);
        Ok(Part {
            hidden: rows(&self.hidden)?,
            branch: rows(&self.branch)?,
            codes: match &self.codes {
                Some(all) => Some(all.part(first, count)?),
                None => None,
            },
            query: joint.narrow(2, 0, heads)?,
            key: joint.narrow(2, heads, heads)?,
            value: joint.narrow(2, 2 * heads, heads)?,
            attended: by_head(&self.wide)?.narrow(2, 0, heads)?,
            attention: self.attention,
            gate: wide.narrow(2, 0, self.inner)?,
            gated: rows(&self.joint)?.narrow(2, 0, self.inner)?,
            raised: wide.narrow(2, self.inner, self.inner)?,
            eps: self.eps,
        })
    }
}

/// Requirements of layers on the buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layers {
    /// Whether some layers have native fp8 products.
    pub(super) take_codes: bool,
    /// Scratch bytes of the largest layer.
    pub(super) scratch_bytes: u64,
}

/// Rows of the buffers: of the picture, of the text, or of both.
#[derive(Debug)]
pub(super) struct Part {
    /// `[1, tokens, dim]`.
    pub(super) hidden: Tensor,
    pub(super) branch: Tensor,
    codes: Option<Codes>,
    /// `[1, tokens, heads, head]`.
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) attended: Tensor,
    pub(super) attention: AttentionPrecision,
    /// `[1, tokens, inner]`, in the memory of `attended`.
    pub(super) gate: Tensor,
    /// `[1, tokens, inner]`, after `gate` in the same memory.
    pub(super) raised: Tensor,
    /// `[1, tokens, inner]`, in the memory of queries, keys and values: `inner` is less than 3 `dim`.
    pub(super) gated: Tensor,
    eps: f64,
}

impl Part {
    /// The destination of normalized rows, in the representation that the next layers take.
    pub(super) fn normed(&self, as_codes: bool) -> Activation<'_> {
        match &self.codes {
            Some(codes) if as_codes => Activation::Codes(codes),
            _ => Activation::Numbers(&self.branch),
        }
    }

    /// Normalizes the input of the first layers.
    pub(super) fn enter(&self, next: &Next) -> Result<()> {
        ops::norm_modulate(
            &self.hidden,
            next.norm(self.eps),
            next.modulation(),
            self.normed(next.as_codes()),
        )
    }

    /// Adds the gated norm of the branch to the residual, and normalizes for `next`.
    pub(super) fn pass_on(&self, close: &Close, next: &Next) -> Result<()> {
        let gate = Gate {
            vector: &close.gate,
            tanh: close.is_tanh,
            branch_norm: Some(&close.norm),
        };
        // The pass has one epsilon, that of the branch's norm; the last layer's norm has another.
        let within = match next {
            Next::Block { .. } => next,
            Next::Last { .. } | Next::Nothing => &Next::Nothing,
        };
        ops::residual_norm_modulate(
            &self.hidden,
            &self.branch,
            Some(gate),
            within.norm(self.eps),
            within.modulation(),
            self.normed(within.as_codes()),
        )?;
        match next {
            Next::Last { .. } => self.enter(next),
            Next::Block { .. } | Next::Nothing => Ok(()),
        }
    }

    /// The last normalized rows, not quantized.
    pub(super) fn last_normed(&self) -> &Tensor {
        &self.branch
    }
}

/// How a branch is added to the residual.
pub(super) struct Close {
    /// Weight of the branch's norm, `[dim]`.
    pub(super) norm: Tensor,
    /// `[1, dim]`.
    pub(super) gate: Tensor,
    /// Whether tanh is applied to the gate.
    pub(super) is_tanh: bool,
}

/// The norm before the next layers.
pub(super) enum Next {
    /// The norm of a block.
    Block {
        /// `[dim]`.
        weight: Tensor,
        /// Scale of one step, `[1, dim]`.
        scale: Option<Tensor>,
        /// Whether all layers after the norm have native fp8 products.
        as_codes: bool,
    },
    /// The norm of the last layer: `LayerNorm` without weights.
    Last {
        /// Scale of one step, `[1, dim]`.
        scale: Tensor,
    },
    /// No norm: the rows are needed as they are.
    Nothing,
}

impl Next {
    fn norm(&self, eps: f64) -> Norm<'_> {
        match self {
            Next::Block { weight, .. } => Norm::Rms {
                weight: Some(weight),
                eps,
            },
            Next::Last { .. } => Norm::Layer {
                affine: None,
                eps: LAST_EPS,
            },
            Next::Nothing => Norm::Rms { weight: None, eps },
        }
    }

    fn modulation(&self) -> Option<Modulation<'_>> {
        let scale = match self {
            Next::Block { scale, .. } => scale.as_ref(),
            Next::Last { scale } => Some(scale),
            Next::Nothing => None,
        };
        scale.map(|scale| Modulation { scale, shift: None })
    }

    fn as_codes(&self) -> bool {
        matches!(self, Next::Block { as_codes: true, .. })
    }
}
