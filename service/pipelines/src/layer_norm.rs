//! The layer norm of families, with weight and bias.

use candle_core::Tensor;
use gpu::{ComponentTensors, MissingTensor};
use ops::Norm;

/// A layer norm's weight and bias, `[width]` each.
#[derive(Clone, Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// The norm with `{name}.weight` and `{name}.bias`.
    ///
    /// # Errors
    /// When one of them is missing or of another shape.
    pub(crate) fn new(
        tensors: &ComponentTensors,
        name: &str,
        width: usize,
        eps: f64,
    ) -> Result<LayerNorm, MissingTensor> {
        Ok(LayerNorm {
            weight: tensors.shaped(&format!("{name}.weight"), &[width])?,
            bias: tensors.shaped(&format!("{name}.bias"), &[width])?,
            eps,
        })
    }

    /// The norm in the form that operations take.
    pub(crate) fn as_norm(&self) -> Norm<'_> {
        Norm::Layer {
            affine: Some((&self.weight, &self.bias)),
            eps: self.eps,
        }
    }
}
