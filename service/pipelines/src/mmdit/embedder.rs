//! The embedders of timesteps, guidance and pooled text.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::Nonlinearity;

use crate::adapters::AdaptedTensors;
use crate::linear::Linear;

/// Width of the sinusoidal embedding of timesteps and guidance.
pub(crate) const SINUSOIDS: usize = 256;

/// Linear, SiLU, linear: diffusers' `TimestepEmbedding` and `PixArtAlphaTextProjection`.
pub(crate) struct TwoLayers {
    first: Linear,
    second: Linear,
}

impl TwoLayers {
    /// From `{name}.linear_1` and `{name}.linear_2`.
    ///
    /// # Errors
    /// When one of them is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        inputs: usize,
        width: usize,
    ) -> std::result::Result<TwoLayers, MissingTensor> {
        Ok(TwoLayers {
            first: Linear::new(tensors, &format!("{name}.linear_1"), inputs, width)?,
            second: Linear::new(tensors, &format!("{name}.linear_2"), width, width)?,
        })
    }

    /// `x` is `[rows, inputs]`; the result is `[rows, width]`.
    ///
    /// # Errors
    /// Those of the layers.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.first.forward(x)?;
        ops::activate(&hidden, Nonlinearity::Silu)?;
        self.second.forward(&hidden)
    }
}
