//! What a step of the transformer is computed in, and the pass between two layers: the residual, the norm behind it, its
//! modulation.

use candle_core::{DType, Device, Result, Tensor};
use ops::{Activation, AttentionShape, Codes, Gate, MaskShape, Modulation, Norm, Planned, Scratch};

use super::config::TransformerConfig;

/// Of every norm in the transformer.
pub(super) const EPS: f64 = 1e-6;

/// The norm of every block, without weights: modulation has them.
const NORM: Norm<'static> = Norm::Layer {
    affine: None,
    eps: EPS,
};

/// Widths of the hidden state that `wide` has: attended, and the inside of the feed-forward.
const WIDE: usize = 5;

/// What a step is computed in, `[batch, tokens, ..]` in the dtype of the card. Text comes first, then the picture.
#[derive(Debug)]
pub(super) struct Buffers {
    /// The residual stream, `[batch, tokens, width]`.
    hidden: Tensor,
    /// Normalised for the next layers; then what those give, before it is added to the residual.
    branch: Tensor,
    /// The same quantized, where layers multiply fp8: u8 `[batch * tokens, width]`.
    codes: Option<Codes>,
    /// Queries, keys and values behind one another in each row, `[batch, tokens, 3 width]`.
    joint: Tensor,
    /// What attention gives, then the inside of the feed-forward, `[batch, tokens, 5 width]`.
    wide: Tensor,
    /// What layers work in.
    scratch: Scratch,
    heads: usize,
    /// Tokens of text.
    pub(super) text: usize,
}

impl Buffers {
    /// For so many pictures at once, with this many tokens of text and of each picture.
    pub(super) fn new(
        config: &TransformerConfig,
        (batch, text, picture): (usize, usize, usize),
        layers: Layers,
        (dtype, device): (DType, &Device),
    ) -> Result<Buffers> {
        let (tokens, width) = (text + picture, config.width());
        let rows = |widths: usize| Tensor::zeros((batch, tokens, widths * width), dtype, device);
        let codes = || -> Result<Codes> {
            Ok(Codes {
                codes: Tensor::zeros((batch * tokens, width), DType::U8, device)?,
                scales: Tensor::zeros(batch * tokens, DType::F32, device)?,
            })
        };
        Ok(Buffers {
            hidden: rows(1)?,
            branch: rows(1)?,
            codes: if layers.take_codes { Some(codes()?) } else { None },
            joint: rows(3)?,
            wide: rows(WIDE)?,
            scratch: Scratch::new(layers.scratch_bytes, device)?,
            heads: config.num_attention_heads,
            text,
        })
    }

    /// Bytes of buffers for so many rows.
    pub(super) fn bytes(width: usize, rows: usize, number: usize) -> u64 {
        ((1 + 1 + 3 + WIDE) * width * rows * number) as u64
    }

    /// What attention asks for over so many tokens of one picture and its text.
    pub(super) fn planned(config: &TransformerConfig, tokens: usize, dtype: DType) -> Planned {
        let by_head = (config.num_attention_heads, config.attention_head_dim);
        let rows = (3 * config.width(), WIDE * config.width());
        Planned::Attention(AttentionShape::of_rows(
            tokens,
            by_head,
            rows,
            dtype,
            MaskShape::None,
        ))
    }

    /// What layers work in.
    pub(super) fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Rows of text, `[batch, text, width]`.
    pub(super) fn text(&self) -> Result<Part> {
        self.part(0, self.text)
    }

    /// Rows of the picture.
    pub(super) fn picture(&self) -> Result<Part> {
        self.part(self.text, self.hidden.dim(1)? - self.text)
    }

    /// All rows.
    pub(super) fn whole(&self) -> Result<Part> {
        self.part(0, self.hidden.dim(1)?)
    }

    fn part(&self, first: usize, count: usize) -> Result<Part> {
        let (batch, tokens, width) = self.hidden.dims3()?;
        let rows = |x: &Tensor| x.narrow(1, first, count);
        let by_head = |x: &Tensor, widths: usize| {
            x.reshape((batch, tokens, widths * self.heads, width / self.heads))?
                .narrow(1, first, count)
        };
        let joint = by_head(&self.joint, 3)?;
        let wide = rows(&self.wide)?;
        Ok(Part {
            hidden: rows(&self.hidden)?,
            branch: rows(&self.branch)?,
            codes: match &self.codes {
                // Codes have no gaps, so those of a part are not where those of the whole are.
                Some(all) => Some(Codes {
                    codes: all.codes.narrow(0, batch * first, batch * count)?,
                    scales: all.scales.narrow(0, batch * first, batch * count)?,
                }),
                None => None,
            },
            query: joint.narrow(2, 0, self.heads)?,
            key: joint.narrow(2, self.heads, self.heads)?,
            value: joint.narrow(2, 2 * self.heads, self.heads)?,
            attended: by_head(&self.wide, WIDE)?.narrow(2, 0, self.heads)?,
            inner: wide.narrow(2, width, (WIDE - 1) * width)?,
            wide,
        })
    }
}

/// What the layers of a transformer ask of its buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layers {
    /// Some multiply fp8 as it is.
    pub(super) take_codes: bool,
    /// The scratch of the largest.
    pub(super) scratch_bytes: u64,
}

/// Rows of the buffers: text, picture, or both.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) hidden: Tensor,
    pub(super) branch: Tensor,
    codes: Option<Codes>,
    /// `[batch, tokens, heads, head width]`.
    pub(super) query: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) attended: Tensor,
    /// `[batch, tokens, 4 width]`.
    pub(super) inner: Tensor,
    pub(super) wide: Tensor,
}

impl Part {
    /// Where rows are normalised to, as the layers behind want them.
    pub(super) fn normed(&self, as_codes: bool) -> Activation<'_> {
        match &self.codes {
            Some(codes) if as_codes => Activation::Codes(codes),
            _ => Activation::Numbers(&self.branch),
        }
    }

    /// Normalises what there is for the first layer of a step.
    pub(super) fn enter(&self, next: &Next) -> Result<()> {
        ops::norm_modulate(
            &self.hidden,
            NORM,
            Some(next.modulation()),
            self.normed(next.as_codes),
        )
    }

    /// Adds the branch to the residual, and normalises for what is next.
    pub(super) fn pass_on(&self, gate: &Tensor, next: &Next) -> Result<()> {
        ops::residual_norm_modulate(
            &self.hidden,
            &self.branch,
            Some(Gate::from(gate)),
            NORM,
            Some(next.modulation()),
            self.normed(next.as_codes),
        )
    }

    /// What was normalised last, as numbers.
    pub(super) fn last_normed(&self) -> &Tensor {
        &self.branch
    }
}

/// The norm in front of layers: its modulation in one step, `[1, width]` each, and what the layers take.
pub(super) struct Next {
    pub(super) scale: Tensor,
    pub(super) shift: Tensor,
    pub(super) as_codes: bool,
}

impl Next {
    fn modulation(&self) -> Modulation<'_> {
        Modulation {
            scale: &self.scale,
            shift: Some(&self.shift),
        }
    }
}
