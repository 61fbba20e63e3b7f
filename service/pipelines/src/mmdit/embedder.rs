//! The embedders of timesteps, guidance and pooled text.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::Nonlinearity;

use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::sinusoids::sinusoids;

/// Width of the sinusoidal embedding of timesteps and guidance.
pub(crate) const SINUSOIDS: usize = 256;

/// Linear, nonlinearity, linear: diffusers' `TimestepEmbedding` and `PixArtAlphaTextProjection`.
pub(crate) struct TwoLayers {
    first: Linear,
    between: Nonlinearity,
    second: Linear,
}

impl TwoLayers {
    /// The layers with the tensors of `{name}.linear_1` and `{name}.linear_2`.
    ///
    /// # Errors
    /// When one of them is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        (inputs, width): (usize, usize),
        between: Nonlinearity,
    ) -> std::result::Result<TwoLayers, MissingTensor> {
        Ok(TwoLayers {
            first: Linear::new(tensors, &format!("{name}.linear_1"), inputs, width)?,
            between,
            second: Linear::new(tensors, &format!("{name}.linear_2"), width, width)?,
        })
    }

    /// `x` is `[.., inputs]`; the result is `[.., width]`.
    ///
    /// # Errors
    /// Errors of the layers.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.first.forward(x)?;
        ops::activate(&hidden, self.between)?;
        self.second.forward(&hidden)
    }
}

/// Embedders of timestep, guidance and pooled text: diffusers' `CombinedTimestepGuidanceTextProjEmbeddings` and
/// `HunyuanVideoConditionEmbedding`.
pub(crate) struct StepEmbedder {
    timestep: TwoLayers,
    guidance: Option<TwoLayers>,
    pooled: TwoLayers,
}

impl StepEmbedder {
    /// The embedders with the tensors under `{name}.`. `pooled` is the width of the pooled text.
    ///
    /// # Errors
    /// When one of them is missing or of another shape.
    pub(crate) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        (pooled, width): (usize, usize),
        has_guidance: bool,
    ) -> std::result::Result<StepEmbedder, MissingTensor> {
        let embedder = |part: &str, inputs| {
            TwoLayers::new(
                tensors,
                &format!("{name}.{part}_embedder"),
                (inputs, width),
                Nonlinearity::Silu,
            )
        };
        Ok(StepEmbedder {
            timestep: embedder("timestep", SINUSOIDS)?,
            guidance: has_guidance
                .then(|| embedder("guidance", SINUSOIDS))
                .transpose()?,
            pooled: embedder("text", pooled)?,
        })
    }

    /// SiLU of the embedded timesteps, guidance and pooled text, `[steps, width]`. `times` are the timesteps, from 0 to 1
    /// (the sigmas), one per step; `pooled` is `[1, pooled]`; guidance is ignored by models without its embedding.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(crate) fn forward(&self, times: &[f32], guidance: f32, pooled: &Tensor) -> Result<Tensor> {
        let embedded = |values: &[f32]| {
            let thousandths: Vec<f32> = values.iter().map(|value| value * 1000.0).collect();
            sinusoids(&thousandths, SINUSOIDS, pooled.dtype(), pooled.device())
        };
        let vector = self.timestep.forward(&embedded(times)?)?;
        if let Some(layers) = &self.guidance {
            ops::add_residual(&vector, &layers.forward(&embedded(&[guidance])?)?, None)?;
        }
        ops::add_residual(&vector, &self.pooled.forward(pooled)?, None)?;
        ops::activate(&vector, Nonlinearity::Silu)?;
        Ok(vector)
    }
}
