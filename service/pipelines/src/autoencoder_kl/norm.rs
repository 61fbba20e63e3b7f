//! Group norm: statistics of the whole map, then a factor and a summand per channel that any strip can be normalised
//! with.

use candle_core::{Device, Result, Tensor};
use ops::Affine;

/// The epsilon of every group norm of the autoencoder (`resnet_eps`).
const EPSILON: f64 = 1e-6;

/// Weights of a group norm.
#[derive(Clone, Debug)]
pub(super) struct GroupNorm {
    /// `[c]`, in the dtype of maps.
    weight: Tensor,
    /// `[c]`.
    bias: Tensor,
    groups: usize,
}

impl GroupNorm {
    pub(super) fn new(weight: Tensor, bias: Tensor, groups: usize) -> Result<GroupNorm> {
        Ok(GroupNorm {
            weight: weight.contiguous()?,
            bias: bias.contiguous()?,
            groups,
        })
    }

    /// Where its weights are.
    pub(super) fn device(&self) -> &Device {
        self.weight.device()
    }

    /// Measures a whole map `[h, w, c]`.
    pub(super) fn measure(&self, map: &Tensor) -> Result<Affine> {
        let norm = ops::GroupNorm {
            groups: self.groups,
            weight: &self.weight,
            bias: &self.bias,
            eps: EPSILON,
        };
        ops::group_moments(map, None, &norm)
    }
}
