//! The layers of the decoder with their tensors, over sequences `[time, channels]` of f32. Convolutions read them in the
//! dtype of the device.

use candle_core::{D, DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::{NormedWeight, SequenceFilter};

use super::COMPONENT;
use super::attention::Attention;
use super::shapes::GAIN;
use super::table::{Convolution, Layer, OfBlock};
use crate::autoencoders::oobleck::convolve;

pub(super) type Outcome<T> = std::result::Result<T, StageError>;

/// Added to lengths before a division, as the authors do.
const EPSILON: f64 = 1e-4;
/// Most of a number after a block.
const MOST: f64 = 256.0;
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

    /// A convolution times `gain`. Its weight is normalised if the file's is not: each row, of `n` numbers, is divided by
    /// `1e-4 sqrt(n)` and its length.
    pub(super) fn convolution(&self, of: &Convolution, gain: f64) -> Outcome<Wide> {
        let direction = self.tensor(&format!("{}.weight", of.name), &of.shape_of_weight())?;
        let (inputs, _) = of.channels;
        let row = (inputs * of.shape.taps) as f64;
        let wide = direction.to_dtype(DType::F32)?.flatten_from(1)?;
        let lengths = wide.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?;
        let length = match self.has_normalised_weights {
            true => lengths.affine(gain, 0.0)?,
            false => (&lengths / lengths.affine(1.0, EPSILON * row.sqrt())?)?.affine(gain, 0.0)?,
        };
        let weight = NormedWeight {
            direction: &direction,
            length: &length,
        };
        Ok(Wide {
            filter: SequenceFilter::new(weight, None, of.shape, self.dtype)?,
            dtype: self.dtype,
        })
    }

    /// The gain of the last convolution.
    fn gain(&self) -> Outcome<f64> {
        let gain = self.tensor(GAIN, &[1])?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
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
                let twice = x.unsqueeze(1)?.repeat((1, 2, 1))?;
                Ok(twice.reshape((2 * rows, channels))?)
            }
            Loaded::Activation => Ok(x.silu()?),
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
        let x = x.to_dtype(self.dtype)?;
        Ok(convolve(x, None, &self.filter, cancelled)?.to_dtype(DType::F32)?)
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
        let x = normalised(x)?;
        let branch = self.conv1.run(&x.silu()?, cancelled)?;
        let branch = self.conv2.run(&branch.silu()?, cancelled)?;
        let kept = match &self.shortcut {
            Some(shortcut) => shortcut.run(&x, cancelled)?,
            None => x.affine(parts_of_sum().0, 0.0)?,
        };
        let sum = (kept + branch)?;
        Ok(match self.is_clamped {
            true => sum.clamp(-MOST, MOST)?,
            false => sum,
        })
    }
}

/// Every row of `[.., n]` divided by its root mean square.
pub(super) fn normalised(x: &Tensor) -> candle_core::Result<Tensor> {
    let lengths = x.sqr()?.mean_keepdim(D::Minus1)?.sqrt()?;
    x.broadcast_div(&lengths.affine(1.0, EPSILON)?)
}
