//! The embedding of frames of sound: a convolution, SiLU, and a gated unit of three convolutions, each of seven frames.

use candle_core::{DType, Tensor};
use gpu::{MissingTensor, Weight};
use ops::{Filter, Nonlinearity, Onto, Planned, Steps, allocated};

use super::config::FusionConfig;
use super::layout::{GATED, TAPS};
use crate::adapters::AdaptedTensors;

/// The length of a sequence stays.
const SAME: Steps = Steps {
    before: [0, 0, TAPS / 2],
    after: [0, 0, TAPS / 2],
    strides: [1; 3],
};

/// The layers with their tensors. Filters are made when a layer runs: a copy of their weights would take a gigabyte.
pub(super) struct SoundEmbedding {
    first: Tensor,
    bias: Tensor,
    gate: Tensor,
    out: Tensor,
    up: Tensor,
}

impl SoundEmbedding {
    /// The layers with the tensors under `{branch}.`.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        branch: &str,
        config: &FusionConfig,
    ) -> Result<SoundEmbedding, MissingTensor> {
        let (width, inner) = (config.audio.dim, config.gate_width());
        let tensor =
            |name: &str, shape: &[usize]| tensors.shaped(&format!("{branch}.patch_embedding.{name}"), shape);
        let [gate, out, up] = GATED.map(|layer| format!("2.{layer}.weight"));
        Ok(SoundEmbedding {
            first: tensor("0.weight", &[width, config.audio.in_dim, TAPS])?,
            bias: tensor("0.bias", &[width])?,
            gate: tensor(&gate, &[inner, width, TAPS])?,
            out: tensor(&out, &[width, inner, TAPS])?,
            up: tensor(&up, &[inner, width, TAPS])?,
        })
    }

    /// Embeds frames `[1, frames, channels]` into `hidden`, `[1, frames, width]`; both are contiguous.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn forward(&self, frames: &Tensor, hidden: &Tensor) -> candle_core::Result<()> {
        let (batch, count, _) = frames.dims3()?;
        let blank = |width: usize| ops::blank(&[batch, count, width], frames.dtype(), frames.device());
        let width = hidden.dim(2)?;
        let x = blank(width)?;
        convolve(&self.first, frames, Some(&self.bias), &x)?;
        ops::activate(&x, Nonlinearity::Silu)?;
        let inner = self.gate.dim(0)?;
        let (gate, up) = (blank(inner)?, blank(inner)?);
        convolve(&self.gate, &x, None, &gate)?;
        convolve(&self.up, &x, None, &up)?;
        drop(x);
        ops::glu(&gate, &up, Nonlinearity::Silu, &gate)?;
        drop(up);
        convolve(&self.out, &gate, None, hidden)
    }
}

fn convolve(weight: &Tensor, x: &Tensor, bias: Option<&Tensor>, out: &Tensor) -> candle_core::Result<()> {
    let filter = Filter::new(&Weight::Full(weight.clone()), x.dtype())?;
    ops::convolve(x, &filter, bias, &SAME, out, Onto::Nothing)
}

/// Predicted activation bytes of embedding `frames` frames: a filter, and the sequences that it reads and writes.
pub(super) fn scratch(config: &FusionConfig, frames: usize, dtype: DType) -> u64 {
    let (width, inner) = (config.audio.dim, config.gate_width());
    let number = dtype.size_in_bytes();
    let sequences = frames * (width + 2 * inner) * number;
    // On the CPU filters are f32, and so is every sequence.
    allocated(width * inner * TAPS * number)
        + allocated(sequences)
        + ops::convolve_scratch((frames, frames), (inner, width), TAPS, number, Onto::Nothing) as u64
}

/// Shapes for which cuDNN is used, each once, in order of use.
pub(super) fn planned(config: &FusionConfig, frames: usize, dtype: DType) -> Vec<Planned> {
    let (width, inner) = (config.audio.dim, config.gate_width());
    let of = |inputs: usize, outputs: usize, has_bias: bool| {
        let planned = Planned::convolution(&[1, frames, inputs], &[outputs, inputs, TAPS], &SAME, dtype)?;
        Some(match planned {
            Planned::Convolution(shape) => Planned::Convolution(ops::ConvolutionShape { has_bias, ..shape }),
            other => other,
        })
    };
    [
        of(config.audio.in_dim, width, true),
        of(width, inner, false),
        of(inner, width, false),
    ]
    .into_iter()
    .flatten()
    .collect()
}
