//! Group norm: statistics of the whole map, then scale and shift per channel, applicable to any strip.

use candle_core::{Result, Tensor};
use ops::Affine;

/// The epsilon of every group norm of the autoencoder (`resnet_eps`).
const EPSILON: f64 = 1e-6;

/// Parameters of a group norm.
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

    /// Statistics of a whole map `[.., c]`.
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
