//! Shapes of attentions and convolutions: the keys of cuDNN plans, which a caller can have compiled before the
//! operands exist ([`crate::make_plans`]).
//!
//! Each operation logs its shape, as [`Planned`], in an event of the target [`PLANNED_TARGET`] at level trace, on every
//! device: so a list of planned shapes can be checked against the shapes that are used.

use candle_core::{DType, Tensor};

use crate::Mask;
use crate::convolve::{MapShape, Sides, Steps};

/// Target of the events that log the shapes of operations, in a field `planned`.
pub const PLANNED_TARGET: &str = "planned";

/// A shape for which cuDNN compiles a plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Planned {
    Attention(AttentionShape),
    Convolution(ConvolutionShape),
}

impl Planned {
    /// The shape of [`crate::convolve()`] with a map `[spatial.., in]` or `[n, spatial.., in]`, a filter `[out, in,
    /// spatial..]` and a bias, all of this dtype; `None` if the shapes do not match, or for a 1x1 convolution, which
    /// is a matrix product.
    pub fn convolution(x: &[usize], filter: &[usize], steps: &Steps, dtype: DType) -> Option<Planned> {
        MapShape::of(x, Sides::of(filter)?, steps)?
            .planned(dtype, true)
            .map(Planned::Convolution)
    }

    /// As [`Planned::convolution`], without a bias.
    pub fn convolution_alone(x: &[usize], filter: &[usize], steps: &Steps, dtype: DType) -> Option<Planned> {
        MapShape::of(x, Sides::of(filter)?, steps)?
            .planned(dtype, false)
            .map(Planned::Convolution)
    }
}

/// Whether cuDNN is used for this dtype: f32 is computed without it.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn uses_cudnn_in(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Which keys a query attends to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MaskShape {
    None,
    /// Query `i` attends to keys `0..=i`.
    Causal,
    /// Query `i` attends to keys `i - before ..= i + after`.
    Window {
        /// Keys before the query's own position.
        before: usize,
        /// Keys after the query's own position.
        after: usize,
    },
    /// All keys, with a bias `[batch, heads, queries, keys]` in the operands' dtype. Axes where `dims` is 1 are
    /// broadcast.
    Bias {
        dims: [usize; 4],
        /// In elements.
        strides: [usize; 4],
    },
    /// Per batch item a number of queries and of keys: i32 on the card, each at least 1. Output rows of queries
    /// beyond them are unspecified.
    Lengths,
}

impl MaskShape {
    /// A contiguous bias of these dimensions.
    pub fn bias(dims: [usize; 4]) -> MaskShape {
        let [_, heads, queries, keys] = dims;
        MaskShape::Bias {
            dims,
            strides: [heads * queries * keys, queries * keys, keys, 1],
        }
    }

    /// The mask of operands of this dtype. `None` for a bias of another dtype or rank.
    fn of(mask: Mask<'_>, dtype: DType) -> Option<MaskShape> {
        match mask {
            Mask::None => Some(MaskShape::None),
            Mask::Causal => Some(MaskShape::Causal),
            Mask::Window { before, after } => Some(MaskShape::Window { before, after }),
            Mask::Bias(bias) if bias.dtype() == dtype => Some(MaskShape::Bias {
                dims: bias.dims().try_into().ok()?,
                strides: bias.layout().stride().try_into().ok()?,
            }),
            Mask::Bias(_) => None,
            Mask::Lengths { .. } => Some(MaskShape::Lengths),
        }
    }
}

/// Widths of heads for which there is attention in e4m3: multiples of 16 up to 128.
const FP8_WIDTH: usize = 128;
const FP8_WIDTHS_OF: usize = 16;

/// Key of a plan for attention. Strides are in elements, `[batch item, token, head]`; the elements of a head are
/// contiguous.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Batch size.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub heads_kv: usize,
    /// Query tokens.
    pub queries: usize,
    /// Key tokens.
    pub keys: usize,
    /// Elements per head.
    pub width: usize,
    /// bf16 or f16.
    pub dtype: DType,
    pub q: [usize; 3],
    pub k: [usize; 3],
    pub v: [usize; 3],
    pub out: [usize; 3],
    pub mask: MaskShape,
    /// Whether the logarithms of the sums of rows are written too, f32 `[batch, heads, queries]`.
    pub log_sums: bool,
    /// Whether the operands are e4m3 codes ([`crate::attention_in_fp8`]), which lie in the rows of the tensors of `dtype`.
    pub in_fp8: bool,
}

impl AttentionShape {
    /// Self-attention over the tokens of one item, with `heads` of `width` elements. Queries, keys and values of a
    /// token are in rows with stride `row`, the result in rows with stride `row_out`.
    pub fn of_rows(
        tokens: usize,
        (heads, width): (usize, usize),
        (row, row_out): (usize, usize),
        dtype: DType,
        mask: MaskShape,
    ) -> AttentionShape {
        let strides = |row: usize| [tokens * row, row, width];
        AttentionShape {
            batch: 1,
            heads,
            heads_kv: heads,
            queries: tokens,
            keys: tokens,
            width,
            dtype,
            q: strides(row),
            k: strides(row),
            v: strides(row),
            out: strides(row_out),
            mask,
            log_sums: false,
            in_fp8: false,
        }
    }

    /// The same attention in e4m3, where that is possible: over all keys, with heads side by side whose width is a multiple of 16 up
    /// to 128. Otherwise as it is.
    #[must_use]
    pub fn in_fp8_if_possible(self) -> AttentionShape {
        let has_heads_side_by_side = [self.q, self.k, self.v, self.out]
            .iter()
            .all(|[_, _, head]| *head == self.width);
        let in_fp8 = self.mask == MaskShape::None
            && !self.log_sums
            && self.width <= FP8_WIDTH
            && self.width.is_multiple_of(FP8_WIDTHS_OF)
            && has_heads_side_by_side;
        AttentionShape { in_fp8, ..self }
    }

    /// The shape of operands with validated shapes; `None` if there is no plan for it.
    pub(crate) fn of(
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: Mask<'_>,
        out: &Tensor,
    ) -> Option<AttentionShape> {
        let dtype = q.dtype();
        let is_alike = [k, v, out].iter().all(|x| x.dtype() == dtype);
        if !is_alike || q.elem_count() == 0 || k.elem_count() == 0 {
            return None;
        }
        let strides = |x: &Tensor| match *x.layout().stride() {
            [batch, token, head, 1] => Some([batch, token, head]),
            _ => None,
        };
        let (batch, queries, heads, width) = q.dims4().ok()?;
        let (_, keys, heads_kv, _) = k.dims4().ok()?;
        Some(AttentionShape {
            batch,
            heads,
            heads_kv,
            queries,
            keys,
            width,
            dtype,
            q: strides(q)?,
            k: strides(k)?,
            v: strides(v)?,
            out: strides(out)?,
            mask: MaskShape::of(mask, dtype)?,
            log_sums: false,
            in_fp8: false,
        })
    }
}

/// Key of a plan for a convolution. Maps are `[batch, spatial.., channels]`, filters `[channels out, spatial..,
/// channels in]`, a bias `[channels out]`, each contiguous and all of one dtype. Lists have one element per spatial
/// axis, of which there are one to three.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ConvolutionShape {
    /// Batch size.
    pub batch: usize,
    /// Spatial dimensions of the input.
    pub spatial: Vec<usize>,
    pub channels_in: usize,
    pub channels_out: usize,
    /// Spatial dimensions of the filter.
    pub filter: Vec<usize>,
    /// Zero padding before the map.
    pub before: Vec<usize>,
    /// Zero padding after the map.
    pub after: Vec<usize>,
    pub strides: Vec<usize>,
    pub dilations: Vec<usize>,
    /// bf16, f16, or f32, which is computed without TF32.
    pub dtype: DType,
    pub has_bias: bool,
}

impl ConvolutionShape {
    /// Spatial dimensions of the output; `None` if the lists have different lengths, or the output is empty.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn out(&self) -> Option<Vec<usize>> {
        let axes = self.spatial.len();
        let lists = [
            &self.filter,
            &self.before,
            &self.after,
            &self.strides,
            &self.dilations,
        ];
        if !(1..=3).contains(&axes) || lists.iter().any(|list| list.len() != axes) {
            return None;
        }
        (0..axes)
            .map(|axis| {
                let padded = self.spatial[axis] + self.before[axis] + self.after[axis];
                let reach = self.dilations[axis].checked_mul(self.filter[axis].checked_sub(1)?)? + 1;
                Some(padded.checked_sub(reach)?.checked_div(self.strides[axis])? + 1)
            })
            .collect()
    }
}

/// Logs the shape of an operation, if the target is enabled.
pub(crate) fn log_shape(planned: impl FnOnce() -> Option<Planned>) {
    if tracing::enabled!(target: PLANNED_TARGET, tracing::Level::TRACE)
        && let Some(planned) = planned()
    {
        tracing::trace!(target: PLANNED_TARGET, ?planned);
    }
}
