//! The one linear layer of this family: what a quantized weight will have to stand in for.

use candle_core::Tensor;
use gpu::{ComponentTensors, MissingTensor};

/// `x Wᵀ + b`, as `torch.nn.Linear`.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    weight: Weight,
    bias: Option<Tensor>,
}

/// How a weight is held.
#[derive(Debug, Clone)]
enum Weight {
    /// `[outputs, inputs]` in the dtype of the card.
    Full(Tensor),
}

impl Linear {
    /// Takes `{name}.weight` `[outputs, inputs]` and `{name}.bias` `[outputs]` out of a component.
    ///
    /// # Errors
    /// When one of them is missing or of another shape.
    pub(super) fn new(
        tensors: &ComponentTensors,
        name: &str,
        inputs: usize,
        outputs: usize,
    ) -> Result<Linear, MissingTensor> {
        let bias = tensors.shaped(&format!("{name}.bias"), &[outputs])?;
        Ok(Linear {
            bias: Some(bias),
            ..Linear::without_bias(tensors, name, inputs, outputs)?
        })
    }

    /// Takes `{name}.weight` `[outputs, inputs]` alone.
    ///
    /// # Errors
    /// When it is missing or of another shape.
    pub(super) fn without_bias(
        tensors: &ComponentTensors,
        name: &str,
        inputs: usize,
        outputs: usize,
    ) -> Result<Linear, MissingTensor> {
        let weight = Weight::Full(tensors.shaped(&format!("{name}.weight"), &[outputs, inputs])?);
        Ok(Linear { weight, bias: None })
    }

    /// `x` is `[b, n, inputs]` or `[n, inputs]`; the result has `outputs` instead.
    ///
    /// # Errors
    /// Those of candle.
    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let Weight::Full(weight) = &self.weight;
        let mut shape = x.dims().to_vec();
        let Some(width) = shape.pop() else {
            candle_core::bail!("a linear layer of a scalar")
        };
        // One large product rather than one a batch. It goes when the bias is added: at no time are there three.
        let mut flat = x.reshape((x.elem_count() / width, width))?.matmul(&weight.t()?)?;
        if let Some(bias) = &self.bias {
            flat = flat.broadcast_add(bias)?;
        }
        shape.push(weight.dim(0)?);
        flat.reshape(shape)
    }
}
