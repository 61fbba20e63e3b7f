//! What a branch reads of the other one: keys and values of its hidden states in every block.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::{Epilogue, Mask, Norm, Pairs, QkNorm, Scratch};

use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::rotary::Rotations;
use crate::wan::blocks::{Block, KeysValues};
use crate::wan::buffers::Part;
use crate::wan::shape::BlockShape;

type Missing<T> = std::result::Result<T, MissingTensor>;

/// The layers over the hidden states of the other branch.
pub(super) struct OtherBranch {
    norm: [Tensor; 2],
    key: Linear,
    value: Linear,
    key_norm: Tensor,
    shape: BlockShape,
}

/// A place for keys and values of the other branch's tokens, and for what they are made of.
pub(super) struct Place {
    /// `[1, tokens, width]`: normalized hidden states.
    pub(super) normed: Tensor,
    /// The same by head, `[1, tokens, heads, head width]`.
    pub(super) normed_heads: Tensor,
    /// `[1, tokens, heads, head width]`.
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

impl Place {
    /// The places of queries, keys and values of a part, which are free between its attention to itself and that to texts.
    pub(super) fn of_part(part: &Part) -> Place {
        Place {
            normed: part.query_rows.clone(),
            normed_heads: part.query.clone(),
            keys: part.key.clone(),
            values: part.value.clone(),
        }
    }

    /// A place of its own, for so many tokens.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn new(shape: &BlockShape, tokens: usize, like: &Tensor) -> Result<Place> {
        let all = Tensor::zeros((1, tokens, 3 * shape.width()), like.dtype(), like.device())?;
        let by_head = all.reshape((1, tokens, 3 * shape.heads, shape.head))?;
        let heads = |part: usize| by_head.narrow(2, part * shape.heads, shape.heads);
        Ok(Place {
            normed: all.narrow(2, 0, shape.width())?,
            normed_heads: heads(0)?,
            keys: heads(1)?,
            values: heads(2)?,
        })
    }

    /// Bytes of [`Place::new`].
    pub(super) fn bytes(shape: &BlockShape, tokens: usize, number: usize) -> u64 {
        (3 * shape.width() * tokens * number) as u64
    }

    fn keys_values(&self) -> KeysValues {
        KeysValues {
            keys: self.keys.clone(),
            values: self.values.clone(),
        }
    }
}

impl OtherBranch {
    /// The layers under `{name}.`.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(tensors: &AdaptedTensors<'_>, name: &str, shape: &BlockShape) -> Missing<OtherBranch> {
        let width = shape.width();
        let vector = |part: &str| tensors.shaped(&format!("{name}.{part}"), &[width]);
        let linear = |part: &str| Linear::new(tensors, &format!("{name}.{part}"), width, width);
        Ok(OtherBranch {
            norm: [
                vector("pre_attn_norm_fusion.weight")?,
                vector("pre_attn_norm_fusion.bias")?,
            ],
            key: linear("k_fusion")?,
            value: linear("v_fusion")?,
            key_norm: vector("norm_k_fusion.weight")?,
            shape: *shape,
        })
    }

    pub(super) fn layers(&self) -> [&Linear; 2] {
        [&self.key, &self.value]
    }

    /// The keys and values of the other branch's hidden states, `[1, tokens, width]`, whose tokens have these rotations.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn keys_values(
        &self,
        hidden: &Tensor,
        place: &Place,
        rotations: &Rotations,
        scratch: &Scratch,
    ) -> Result<KeysValues> {
        let [weight, bias] = &self.norm;
        let norm = Norm::Layer {
            affine: Some((weight, bias)),
            eps: self.shape.eps,
        };
        ops::norm_modulate(hidden, norm, None, &place.normed)?;
        let layers = [self.key.to(&place.keys)?, self.value.to(&place.values)?];
        ops::linears_into(&place.normed, &layers, Epilogue::None, scratch)?;
        // The operation normalizes and rotates two operands: the other one is not read any more.
        let norm = QkNorm::AcrossHeads {
            q: &self.key_norm,
            k: &self.key_norm,
            eps: self.shape.eps,
        };
        let angles = Some(rotations.angles());
        ops::qk_norm_rope(&place.normed_heads, &place.keys, norm, angles, Pairs::Neighbours)?;
        Ok(place.keys_values())
    }
}

/// Attention of the queries in the branch of `whole` to a text and to the other branch, in the place of keys: the sum of both.
/// The queries are those of the text's attention, rotated for the other branch's.
///
/// # Errors
/// Errors of the device.
pub(super) fn attend(
    block: &Block,
    whole: &Part,
    (text, other): (&KeysValues, &KeysValues),
    rotations: &Rotations,
) -> Result<()> {
    block.cross.attend(whole, text)?;
    let queries = &whole.branch_heads;
    // Rotated in halves, since the operation takes two operands.
    let heads = queries.dim(2)?;
    let half = heads / 2;
    let (first, second) = (
        queries.narrow(2, 0, half)?,
        queries.narrow(2, half, heads - half)?,
    );
    let angles = Some(rotations.angles());
    ops::qk_norm_rope(&first, &second, QkNorm::None, angles, Pairs::Neighbours)?;
    let scale = (queries.dim(3)? as f64).powf(-0.5);
    ops::attention(
        queries,
        &other.keys,
        &other.values,
        scale,
        Mask::None,
        &whole.query,
    )?;
    ops::add_residual(&whole.key_rows, &whole.query_rows, None)
}
