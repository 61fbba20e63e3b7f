//! Attentions and convolutions by their shapes alone: what cuDNN compiles a plan for, and what a caller can have compiled
//! before the numbers are there ([`crate::make_plans`]).
//!
//! What is asked of an operation is told, as [`Planned`] has it, in events of the target [`ASKED`] at the level trace, on
//! every device: so a list of shapes can be held against what is asked for.

use candle_core::{DType, Tensor};

use crate::Mask;
use crate::convolve::{Shape, Sides, Steps};

/// The target of events that tell which shapes are asked for, each in a field `planned`.
pub const ASKED: &str = "planned";

/// A shape that cuDNN compiles a plan for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Planned {
    /// Of [`crate::attention()`].
    Attention(AttentionShape),
    /// Of [`crate::convolve()`].
    Convolution(ConvolutionShape),
}

impl Planned {
    /// What [`crate::convolve()`] asks for with a map `[spatial.., in]` or `[n, spatial.., in]`, a filter
    /// `[out, in, spatial..]` and a bias, all of this dtype; `None` where shapes do not fit, or where it is a product.
    pub fn convolution(x: &[usize], filter: &[usize], steps: &Steps, dtype: DType) -> Option<Planned> {
        Shape::of(x, Sides::of(filter)?, steps)?
            .planned(dtype, true)
            .map(Planned::Convolution)
    }
}

/// Whether cuDNN is asked at all where numbers are of this dtype: f32 is computed without it.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn is_asked_in(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// Which keys a query sees.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MaskShape {
    /// All.
    None,
    /// Query `i` sees keys `0..=i`.
    Causal,
    /// Query `i` sees keys `i - before ..= i + after`.
    Window {
        /// Keys before the query's own place.
        before: usize,
        /// Keys after it.
        after: usize,
    },
    /// All, and `[batch, heads, queries, keys]` numbers of the operands' dtype are added to the scores. Along an axis
    /// where `dims` is 1 the same is added.
    Bias {
        /// Its sides.
        dims: [usize; 4],
        /// In numbers.
        strides: [usize; 4],
    },
    /// Of each item of the batch so many keys, for so many queries: i32 on the card, each at least 1. What is written
    /// for queries beyond them is not said.
    Lengths,
}

impl MaskShape {
    /// That of a contiguous bias of these sides.
    pub fn bias(dims: [usize; 4]) -> MaskShape {
        let [_, heads, queries, keys] = dims;
        MaskShape::Bias {
            dims,
            strides: [heads * queries * keys, queries * keys, keys, 1],
        }
    }

    /// That of a mask for operands of this dtype. `None` for a bias of another dtype or number of axes; and for lengths,
    /// since a plan wants those of queries as well, which nobody has.
    fn of(mask: Mask<'_>, dtype: DType) -> Option<MaskShape> {
        match mask {
            Mask::None => Some(MaskShape::None),
            Mask::Causal => Some(MaskShape::Causal),
            Mask::Window { before, after } => Some(MaskShape::Window { before, after }),
            Mask::Bias(bias) if bias.dtype() == dtype => Some(MaskShape::Bias {
                dims: bias.dims().try_into().ok()?,
                strides: bias.layout().stride().try_into().ok()?,
            }),
            Mask::Bias(_) | Mask::Lengths(_) => None,
        }
    }
}

/// What a plan for attention is made for. Strides are in numbers, `[item of the batch, token, head]`; the numbers of a
/// head lie side by side.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Items of the batch.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// A divisor of `heads`: so many heads have their keys in common.
    pub heads_kv: usize,
    /// Tokens that look.
    pub queries: usize,
    /// Tokens that are looked at.
    pub keys: usize,
    /// Numbers of a head.
    pub width: usize,
    /// cuDNN takes bf16 and f16.
    pub dtype: DType,
    /// Strides of the queries.
    pub q: [usize; 3],
    /// Strides of the keys.
    pub k: [usize; 3],
    /// Strides of the values.
    pub v: [usize; 3],
    /// Strides of the result.
    pub out: [usize; 3],
    /// Which keys a query sees.
    pub mask: MaskShape,
}

impl AttentionShape {
    /// Of one item's tokens that look at themselves, `heads` of `width` numbers each. Queries, keys and values of a token
    /// stand in rows of `row` numbers, the result in rows of `row_out`, each row behind the other.
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
        }
    }

    /// What is asked of operands whose shapes were checked; `None` for what there is no plan of.
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
        })
    }
}

/// What a plan for a convolution is made for. Maps are `[batch, spatial.., channels]`, filters
/// `[channels out, spatial.., channels in]`, a bias `[channels out]`, each contiguous and all of one dtype. Of lists each
/// has a number for each spatial axis, of which there are one to three.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ConvolutionShape {
    /// Items of the batch.
    pub batch: usize,
    /// Sides of the map that is read.
    pub spatial: Vec<usize>,
    /// Channels of the map that is read.
    pub channels_in: usize,
    /// Channels of the map that is written.
    pub channels_out: usize,
    /// Sides of the filter.
    pub filter: Vec<usize>,
    /// Rows of zeros that are thought before the map.
    pub before: Vec<usize>,
    /// And behind it.
    pub after: Vec<usize>,
    /// From what an output looks at to what the next one does.
    pub strides: Vec<usize>,
    /// Distances of what a filter reads: 1 where it reads neighbours.
    pub dilations: Vec<usize>,
    /// bf16, f16, or f32, which is computed in full f32.
    pub dtype: DType,
    /// Whether there is a bias.
    pub has_bias: bool,
}

impl ConvolutionShape {
    /// Sides of the map that is written; `None` where the lists do not fit each other, or nothing is written.
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

/// Tells which shape is asked for, to whoever listens.
pub(crate) fn tell_asked(planned: impl FnOnce() -> Option<Planned>) {
    if tracing::enabled!(target: ASKED, tracing::Level::TRACE)
        && let Some(planned) = planned()
    {
        tracing::trace!(target: ASKED, ?planned);
    }
}
