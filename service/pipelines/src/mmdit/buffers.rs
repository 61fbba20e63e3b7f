//! The buffers of a transformer step, and the fused pass between two layers: residual, norm, modulation.

use candle_core::{DType, Device, Result, Tensor};
use ops::{
    Activation, AttentionShape, Codes, CodesOfRows, Gate, MaskShape, Modulation, Norm, Planned, Scratch,
};

use super::shape::BlocksShape;
use crate::attention::AttentionPrecision;
use crate::shared_stage::OtherCard;

/// Epsilon of every norm in the transformer.
pub(crate) const EPS: f64 = 1e-6;

/// The norm of every block, without weights: those are in the modulation.
const NORM: Norm<'static> = Norm::Layer {
    affine: None,
    eps: EPS,
};

/// Whether to skip queries that no one reads in the last attention. It pays from 12,288 tokens, when an eighth or more of them
/// are not needed.
pub(crate) fn attends_for_some(tokens: usize, needed: usize) -> bool {
    tokens >= 12 << 10 && 8 * needed <= 7 * tokens
}

/// Buffers of a step, `[batch, tokens, ..]` in the dtype of the card. Text comes first, then the picture.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    /// Rows before the first one in use.
    first: usize,
    /// The residual stream, `[batch, tokens, width]`.
    hidden: Tensor,
    /// Normalized input of the next layers; then their output, before it is added to the residual.
    branch: Tensor,
    /// The normalized input quantized to fp8, for native products: u8 `[batch * tokens, width]`.
    codes: Option<CodesOfRows>,
    /// Queries, keys and values, concatenated in each row, `[batch, tokens, 3 width]`; where the feed-forward is gated,
    /// followed by the gate and what is gated. After the tokens are those of the other card, of which keys and values alone are used.
    joint: Tensor,
    /// Attention output, then the inside of the feed-forward, `[batch, tokens, width + inner]`.
    wide: Tensor,
    /// Workspace of linear layers.
    scratch: Scratch,
    heads: usize,
    attention: AttentionPrecision,
    /// The card that has the other half of the tokens.
    other: Option<OtherCard>,
    /// Number of text tokens.
    pub(crate) text: usize,
}

impl Buffers {
    /// For a batch of pictures, with these token counts of text and of each picture, beside so many tokens of another card.
    pub(crate) fn new(
        shape: &BlocksShape,
        (batch, text, picture): (usize, usize, usize),
        others: usize,
        layers: Layers,
        (dtype, device): (DType, &Device),
    ) -> Result<Buffers> {
        let (tokens, width) = (text + picture, shape.width());
        let zeros = |rows: usize, widths: usize| Tensor::zeros((batch, rows, widths * width), dtype, device);
        let rows = |widths: usize| zeros(tokens, widths);
        Ok(Buffers {
            first: 0,
            hidden: rows(1)?,
            branch: rows(1)?,
            codes: match layers.take_codes {
                true => Some(CodesOfRows::new(batch * tokens, width, device)?),
                false => None,
            },
            joint: zeros(tokens + others, 3 + shape.design.gated())?,
            wide: rows(shape.design.wide())?,
            scratch: Scratch::new(layers.scratch_bytes, device)?,
            heads: shape.heads,
            attention: AttentionPrecision::Full,
            other: None,
            text,
        })
    }

    /// The same buffers, for attention as asked.
    pub(crate) fn with_attention(self, attention: AttentionPrecision) -> Buffers {
        Buffers { attention, ..self }
    }

    /// The same buffers, for tokens that this card shares with another.
    pub(crate) fn beside(self, other: Option<OtherCard>) -> Buffers {
        Buffers { other, ..self }
    }

    /// The same buffers for a text that is this much shorter: without their first rows.
    pub(crate) fn for_shorter_text(&self, rows: usize) -> Buffers {
        Buffers {
            first: self.first + rows,
            text: self.text.saturating_sub(rows),
            ..self.clone()
        }
    }

    /// Rows in use.
    fn tokens(&self) -> Result<usize> {
        Ok(self.hidden.dim(1)? - self.first)
    }

    /// Bytes of the buffers for `rows` rows.
    pub(crate) fn bytes(shape: &BlocksShape, rows: usize, number: usize) -> u64 {
        let widths = 1 + 1 + shape.design.wide();
        (widths * shape.width() * rows * number) as u64 + Buffers::bytes_of_others(shape, rows, number)
    }

    /// Bytes of the rows of queries, keys and values, which tokens of another card have too.
    pub(crate) fn bytes_of_others(shape: &BlocksShape, rows: usize, number: usize) -> u64 {
        ((3 + shape.design.gated()) * shape.width() * rows * number) as u64
    }

    /// Bytes of the keys and values of these tokens, which are exchanged at a time.
    pub(crate) fn exchanged_bytes(shape: &BlocksShape, rows: usize, number: usize) -> u64 {
        (2 * shape.width() * rows * number) as u64
    }

    /// Shapes of the attention, as a request asks for it, over the tokens of one picture and its text, of which `needed` are needed after the blocks, in
    /// buffers of `rows` rows: those of the longest text. They have space for `others` tokens of another card, of which so many are
    /// attended to.
    pub(crate) fn planned(
        shape: &BlocksShape,
        (tokens, needed, attended): (usize, usize, usize),
        (rows, others): (usize, usize),
        (dtype, attention): (DType, AttentionPrecision),
    ) -> Vec<Planned> {
        let by_head = (shape.heads, shape.head);
        let (joint, wide) = (3 + shape.design.gated(), shape.design.wide());
        let (row, row_out) = (joint * shape.width(), wide * shape.width());
        let mut all = AttentionShape::of_rows(tokens, by_head, (row, row_out), dtype, MaskShape::None);
        for strides in [&mut all.q, &mut all.k, &mut all.v] {
            strides[0] = (rows + others) * row;
        }
        all.keys += attended;
        all.out[0] = rows * row_out;
        let last = (shape.single > 0 && attends_for_some(tokens, needed)).then(|| AttentionShape {
            queries: needed,
            ..all.clone()
        });
        let shapes = std::iter::once(all).chain(last).map(Planned::Attention);
        shapes.map(|shape| attention.planned(shape)).collect()
    }

    /// Workspace of linear layers.
    pub(crate) fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Rows of text, `[batch, text, width]`.
    pub(crate) fn text(&self) -> Result<Part> {
        self.part(0, self.text)
    }

    /// The first rows of the pictures: those of the generated picture.
    pub(crate) fn generated(&self, count: usize) -> Result<Part> {
        self.part(self.text, count)
    }

    /// The last rows of the pictures: those of a reference.
    pub(crate) fn reference(&self, count: usize) -> Result<Part> {
        self.part(self.tokens()? - count, count)
    }

    /// Rows of the pictures, `[batch, pictures, width]`.
    pub(crate) fn picture(&self) -> Result<Part> {
        self.part(self.text, self.tokens()? - self.text)
    }

    /// The rows of the picture by the row of the modulations that they take: `step`, but for those `apart`.
    pub(super) fn shares(&self, step: usize, apart: Option<Apart>) -> Result<Vec<Share>> {
        let Some(Apart { count, row }) = apart else {
            let rows = self.picture()?;
            return Ok(vec![Share { rows, row: step }]);
        };
        let generated = self.tokens()? - self.text - count;
        Ok(vec![
            Share {
                rows: self.generated(generated)?,
                row: step,
            },
            Share {
                rows: self.reference(count)?,
                row,
            },
        ])
    }

    /// All rows, `[batch, text + picture, width]`.
    pub(crate) fn whole(&self) -> Result<Part> {
        self.part(0, self.tokens()?)
    }

    /// Any rows: of the text, then of the generated tokens.
    pub(crate) fn rows(&self, first: usize, count: usize) -> Result<Part> {
        self.part(first, count)
    }

    /// Attention of the needed rows to all tokens, those of the other card among them.
    pub(super) fn attend(&self, needed: &Part) -> Result<()> {
        let all = self.whole()?;
        let of = match attends_for_some(all.query.dim(1)?, needed.query.dim(1)?) {
            true => needed,
            false => &all,
        };
        let (key, value) = match &self.other {
            None => (all.key.clone(), all.value.clone()),
            Some(other) => {
                let (own, rows) = (self.hidden.dim(1)?, self.joint.dim(1)?);
                let width = self.hidden.dim(2)?;
                let keys_and_values = |first: usize, end: usize| {
                    self.joint
                        .narrow(1, first, end - first)?
                        .narrow(2, width, 2 * width)
                };
                // Both cards compute the text.
                other.swap(
                    &keys_and_values(self.first + self.text, own)?,
                    &keys_and_values(own, rows)?,
                )?;
                let joint = self.by_head(&self.joint, self.first, rows - self.first)?;
                let heads = |part: usize| joint.narrow(2, part * self.heads, self.heads);
                (heads(1)?, heads(2)?)
            }
        };
        self.attention.attend([&of.query, &key, &value], &of.attended)
    }

    /// Rows of a buffer, `[batch, count, heads, head width]`.
    fn by_head(&self, x: &Tensor, first: usize, count: usize) -> Result<Tensor> {
        let (batch, rows, columns) = x.dims3()?;
        let head = self.hidden.dim(2)? / self.heads;
        x.reshape((batch, rows, columns / head, head))?
            .narrow(1, first, count)
    }

    fn part(&self, first: usize, count: usize) -> Result<Part> {
        let (batch, _, width) = self.hidden.dims3()?;
        let first = self.first + first;
        let rows = |x: &Tensor| x.narrow(1, first, count);
        let by_head = |x: &Tensor| self.by_head(x, first, count);
        let joint = by_head(&self.joint)?;
        let (joint_rows, wide) = (rows(&self.joint)?, rows(&self.wide)?);
        let inner = wide.dim(2)? - width;
        let gated = match joint_rows.dim(2)? - 3 * width {
            0 => None,
            both => Some(Gated {
                gate: joint_rows.narrow(2, 3 * width, inner)?,
                raised: joint_rows.narrow(2, 3 * width + inner, inner)?,
                both: joint_rows.narrow(2, 3 * width, both)?,
            }),
        };
        Ok(Part {
            hidden: rows(&self.hidden)?,
            branch: rows(&self.branch)?,
            codes: match &self.codes {
                // Codes are contiguous, so those of a part are not a view of those of the whole.
                Some(all) => Some(all.part(batch * first, batch * count)?),
                None => None,
            },
            query: joint.narrow(2, 0, self.heads)?,
            key: joint.narrow(2, self.heads, self.heads)?,
            value: joint.narrow(2, 2 * self.heads, self.heads)?,
            attended: by_head(&self.wide)?.narrow(2, 0, self.heads)?,
            inner: wide.narrow(2, width, inner)?,
            wide,
            gated,
            joint: joint_rows,
        })
    }
}

/// Requirements of a transformer's layers on its buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layers {
    /// Whether some layers have native fp8 products.
    pub(crate) take_codes: bool,
    /// Scratch bytes of the largest layer.
    pub(crate) scratch_bytes: u64,
}

/// A term that is added to the residual after a block, `[1, rows, width]`, and its factor, `[1, width]`.
pub(crate) type Added<'a> = (&'a Tensor, &'a Tensor);

/// The last rows of the pictures of a batch of one, where they take another row of the modulations than the step's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Apart {
    /// Number of these rows.
    pub(crate) count: usize,
    /// The row of the modulations.
    pub(crate) row: usize,
}

/// Rows of one stream of a double block that take the same row of the modulations.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) rows: Part,
    /// The row of the modulations.
    pub(super) row: usize,
}

/// Rows of the buffers: text, picture, or both.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) hidden: Tensor,
    pub(crate) branch: Tensor,
    codes: Option<Codes>,
    /// `[batch, tokens, heads, head width]`.
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    pub(crate) attended: Tensor,
    /// `[batch, tokens, inner]`.
    pub(crate) inner: Tensor,
    pub(crate) wide: Tensor,
    /// The rows of a gated feed-forward, after queries, keys and values.
    pub(super) gated: Option<Gated>,
    /// Whole rows of queries, keys, values and what is gated.
    pub(super) joint: Tensor,
}

/// The output of the first layer of a gated feed-forward.
#[derive(Debug)]
pub(super) struct Gated {
    /// `[batch, tokens, inner]`.
    pub(super) gate: Tensor,
    /// `[batch, tokens, inner]`, after the gate.
    pub(super) raised: Tensor,
    /// Both, `[batch, tokens, 2 inner]`.
    pub(super) both: Tensor,
}

impl Part {
    /// The destination of normalized rows, in the representation that the next layers take.
    pub(crate) fn normed(&self, as_codes: bool) -> Activation<'_> {
        match &self.codes {
            Some(codes) if as_codes => Activation::Codes(codes),
            _ => Activation::Numbers(&self.branch),
        }
    }

    /// Normalizes the input for the first layer of a step.
    pub(crate) fn enter(&self, next: &Next) -> Result<()> {
        ops::norm_modulate(
            &self.hidden,
            NORM,
            Some(next.modulation()),
            self.normed(next.as_codes),
        )
    }

    /// Adds to the residual of the first rows.
    pub(crate) fn add(&self, added: &[Added<'_>]) -> Result<()> {
        for (sample, factor) in added {
            let first = self.hidden.narrow(1, 0, sample.dim(1)?)?;
            ops::add_residual(&first, sample, Some(Gate::from(*factor)))?;
        }
        Ok(())
    }

    /// Adds the branch to the residual, and normalizes for `next`.
    pub(crate) fn pass_on(&self, gate: &Tensor, next: &Next) -> Result<()> {
        ops::residual_norm_modulate(
            &self.hidden,
            &self.branch,
            Some(Gate::from(gate)),
            NORM,
            Some(next.modulation()),
            self.normed(next.as_codes),
        )
    }

    /// The last normalized rows, not quantized.
    pub(crate) fn last_normed(&self) -> &Tensor {
        &self.branch
    }
}

/// The norm before layers: its modulation in one step, `[1, width]` each, and the representation that they take.
pub(crate) struct Next {
    pub(crate) scale: Tensor,
    pub(crate) shift: Tensor,
    pub(crate) as_codes: bool,
}

impl Next {
    fn modulation(&self) -> Modulation<'_> {
        Modulation {
            scale: &self.scale,
            shift: Some(&self.shift),
        }
    }
}
