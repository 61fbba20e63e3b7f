//! The layers of the decoder with their tensors, over sequences `[time, channels]` of f32. Convolutions read them in the
//! dtype of the device.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::{ChannelNorm, Enlarge, MapReading, Nonlinearity, NormedWeight, RowLength, SequenceFilter};

use super::COMPONENT;
use super::attention::Attention;
use super::shapes::GAIN;
use super::table::{Convolution, Layer, OfBlock};
use crate::autoencoders::oobleck::convolve_written;

pub(super) type Outcome<T> = std::result::Result<T, StageError>;

/// Added to lengths before a division, as the authors do.
const EPSILON: f64 = 1e-4;
/// Most of a number after a block.
const MOST: f32 = 256.0;
/// The root mean square of SiLU of normal numbers, by which activations are divided.
const LENGTH_OF_SILU: f64 = 0.596;
/// The part of a branch in a sum.
const BRANCH: f64 = 0.3;

/// The factors of a sum's two parts, the one that is kept and the branch: their lengths add up to one.
pub(super) fn parts_of_sum() -> (f64, f64) {
    let length = ((1.0 - BRANCH).powi(2) + BRANCH.powi(2)).sqrt();
    ((1.0 - BRANCH) / length, BRANCH / length)
}

/// The tensors of a component.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) tensors: &'a ComponentTensors,
    pub(super) has_normalised_weights: bool,
    /// The dtype of convolutions.
    pub(super) dtype: DType,
}

impl Source<'_> {
    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Outcome<Tensor> {
        self.tensors.shaped(name, shape).map_err(missing)
    }

    /// The weight of a convolution, as the file has it.
    pub(super) fn weight(&self, of: &Convolution) -> Outcome<Tensor> {
        self.tensor(&format!("{}.weight", of.name), &of.shape_of_weight())
    }

    /// A convolution times `gain`.
    pub(super) fn convolution(&self, of: &Convolution, gain: f64) -> Outcome<Wide> {
        self.of_weight(of, &self.weight(of)?, gain)
    }

    /// A convolution with this weight times `gain`. The weight is normalised if the file's is not.
    pub(super) fn of_weight(&self, of: &Convolution, weight: &Tensor, gain: f64) -> Outcome<Wide> {
        let weight = NormedWeight {
            direction: weight,
            length: match self.has_normalised_weights {
                true => RowLength::Own { gain },
                false => RowLength::Gain {
                    gain,
                    epsilon: EPSILON,
                },
            },
        };
        Ok(Wide {
            filter: SequenceFilter::new(weight, None, of.shape, self.dtype)?,
            dtype: self.dtype,
        })
    }

    /// The gain of the last convolution.
    fn gain(&self) -> Outcome<f64> {
        let gain = self.tensor(GAIN, &[1])?.to_device(&Device::Cpu)?;
        let gain = gain.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        Ok(f64::from(gain.first().copied().unwrap_or_default()) + 1.0)
    }

    pub(super) fn layer(&self, layer: &Layer) -> Outcome<Loaded> {
        Ok(match layer {
            Layer::Convolution(of) if of.name == "decoder.conv_out" => {
                Loaded::Convolution(self.convolution(of, self.gain()? / LENGTH_OF_SILU)?)
            }
            Layer::Convolution(of) => Loaded::Convolution(self.convolution(of, 1.0)?),
            Layer::Block {
                name,
                channels,
                is_clamped,
            } => {
                let of = OfBlock::new(name, *channels);
                let (kept, branch) = parts_of_sum();
                let shortcut = of.shortcut.map(|shortcut| self.convolution(&shortcut, kept));
                Loaded::Block(Block {
                    conv1: self.convolution(&of.conv1, 1.0 / LENGTH_OF_SILU)?,
                    conv2: self.convolution(&of.conv2, branch / LENGTH_OF_SILU)?,
                    shortcut: shortcut.transpose()?,
                    is_clamped: *is_clamped,
                })
            }
            Layer::Attention { name, channels } => Loaded::Attention(Attention::new(*self, name, *channels)?),
            Layer::Twice => Loaded::Twice,
            Layer::Activation => Loaded::Activation,
        })
    }
}

/// The error for a tensor that is missing, or has another shape.
pub(super) fn missing(missing: gpu::MissingTensor) -> StageError {
    StageError::Missing {
        component: COMPONENT.to_owned(),
        missing,
    }
}

/// A [`Layer`] with its tensors.
#[derive(Clone, Debug)]
pub(super) enum Loaded {
    Convolution(Wide),
    Block(Block),
    Attention(Attention),
    Twice,
    Activation,
}

impl Loaded {
    /// A sequence through the layer.
    pub(super) fn run(&self, x: Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<Tensor> {
        match self {
            Loaded::Convolution(convolution) => convolution.run(&x, cancelled),
            Loaded::Block(block) => block.forward(&x, cancelled),
            Loaded::Attention(attention) => attention.forward(&x, cancelled),
            Loaded::Twice => {
                let (rows, channels) = x.dims2()?;
                let twice = MapReading {
                    enlarge: [Enlarge::Not, Enlarge::Twice, Enlarge::Not],
                    ..MapReading::PLAIN
                };
                let out = ops::blank(&[2 * rows, 1, channels], DType::F32, x.device())?;
                ops::apply_norm(&x.reshape((rows, 1, channels))?, &twice, [0; 3], &out)?;
                Ok(out.squeeze(1)?)
            }
            Loaded::Activation => {
                ops::activate(&x, Nonlinearity::Silu)?;
                Ok(x)
            }
        }
    }
}

/// A convolution of sequences of f32 that is computed in the dtype of the device.
#[derive(Clone, Debug)]
pub(super) struct Wide {
    pub(super) filter: SequenceFilter,
    pub(super) dtype: DType,
}

impl Wide {
    /// # Errors
    /// [`StageError::Cancelled`]; errors of the device.
    pub(super) fn run(&self, x: &Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<Tensor> {
        self.run_through(x, &ops::copy_rows, cancelled)
    }

    /// [`Wide::run`] of what `write` makes of the sequence, row by row: it writes it where it is read, in the dtype of the
    /// device.
    pub(super) fn run_through(
        &self,
        x: &Tensor,
        write: &dyn Fn(&Tensor, &Tensor) -> candle_core::Result<()>,
        cancelled: &dyn Fn() -> bool,
    ) -> Outcome<Tensor> {
        let (rows, channels) = x.dims2()?;
        let written = convolve_written(&self.filter, rows, cancelled, |reach| {
            let read = Tensor::zeros((reach.read, channels), self.dtype, x.device())?;
            write(x, &read.narrow(0, reach.before, rows)?)?;
            Ok(read)
        })?;
        Ok(ops::in_dtype(&written, DType::F32)?)
    }
}

/// A residual block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    conv1: Wide,
    conv2: Wide,
    shortcut: Option<Wide>,
    is_clamped: bool,
}

impl Block {
    fn forward(&self, x: &Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<Tensor> {
        let inner = self.conv1.run(&normalised(x, true)?, cancelled)?;
        ops::activate(&inner, Nonlinearity::Silu)?;
        let x = normalised(x, false)?;
        let sum = self.conv2.run(&inner, cancelled)?;
        drop(inner);
        match &self.shortcut {
            Some(shortcut) => ops::add_rows(&shortcut.run(&x, cancelled)?, &sum)?,
            None => ops::add_scaled(&x, parts_of_sum().0, &sum)?,
        }
        if self.is_clamped {
            ops::activate(&sum, Nonlinearity::HardTanh { most: MOST })?;
        }
        Ok(sum)
    }
}

/// Every row of `[rows, n]`, which may be a part of a longer one, divided by its root mean square, and activated.
pub(super) fn normalised(x: &Tensor, silu: bool) -> candle_core::Result<Tensor> {
    let reading = MapReading {
        norm: ChannelNorm::Unit { eps: EPSILON },
        silu,
        ..MapReading::PLAIN
    };
    read_rows(x, &reading)
}

/// Rows `[rows, n]` of f32, which may be parts of longer ones, read into new ones.
pub(super) fn read_rows(x: &Tensor, reading: &MapReading<'_>) -> candle_core::Result<Tensor> {
    let (rows, channels) = x.dims2()?;
    let out = ops::blank(&[1, rows, channels], DType::F32, x.device())?;
    ops::apply_norm(&x.unsqueeze(0)?, reading, [0; 3], &out)?;
    out.squeeze(0)
}
