//! The one linear layer of this family, however its weight is held.

use candle_core::Tensor;
use gpu::{ComponentTensors, MissingTensor, Weight};
use ops::{Epilogue, Scratch};

/// `x Wᵀ + b`, as `torch.nn.Linear`.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    /// `[outputs, inputs]`.
    weight: Weight,
    bias: Option<Tensor>,
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
        let weight = tensors.shaped_weight(&format!("{name}.weight"), &[outputs, inputs])?;
        Ok(Linear { weight, bias: None })
    }

    /// `x` is `[b, n, inputs]` or `[n, inputs]`; the result has `outputs` instead.
    ///
    /// # Errors
    /// Those of candle.
    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut shape = x.dims().to_vec();
        let Some(width) = shape.pop() else {
            candle_core::bail!("a linear layer of a scalar")
        };
        let outputs = self.weight.dims()[0];
        // One large product rather than one a batch.
        let flat = x.contiguous()?.reshape((x.elem_count() / width, width))?;
        let flat = ops::linear(&flat, &self.weight, self.bias.as_ref())?;
        shape.push(outputs);
        flat.reshape(shape)
    }

    /// `x` is `[n, inputs]`; `out` is `[n, outputs]`, and may be columns of a wider tensor.
    ///
    /// # Errors
    /// Those of candle.
    pub(super) fn forward_into(
        &self,
        x: &Tensor,
        then: Epilogue,
        out: &Tensor,
        scratch: &Scratch,
    ) -> candle_core::Result<()> {
        ops::linear_into(x, &self.weight, self.bias.as_ref(), then, out, scratch)
    }
}
