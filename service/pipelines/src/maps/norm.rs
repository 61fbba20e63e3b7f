//! Group norm: statistics of a whole map, then scale and shift per channel, applicable to any strip.

use candle_core::{Result, Tensor};
use ops::Affine;

/// Parameters of a group norm.
#[derive(Clone, Debug)]
pub(crate) struct GroupNorm {
    /// `[c]`, in the dtype of maps.
    weight: Tensor,
    /// `[c]`.
    bias: Tensor,
    groups: usize,
    /// Added to the variance.
    eps: f64,
}

impl GroupNorm {
    /// A norm of `groups` groups with a weight and a bias `[c]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(crate) fn new(weight: Tensor, bias: Tensor, groups: usize, eps: f64) -> Result<GroupNorm> {
        Ok(GroupNorm {
            weight: weight.contiguous()?,
            bias: bias.contiguous()?,
            groups,
            eps,
        })
    }

    /// Statistics of a whole map `[.., c]`.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(crate) fn measure(&self, map: &Tensor) -> Result<Affine> {
        let norm = ops::GroupNorm {
            groups: self.groups,
            weight: &self.weight,
            bias: &self.bias,
            eps: self.eps,
        };
        ops::group_moments(map, None, &norm)
    }
}
