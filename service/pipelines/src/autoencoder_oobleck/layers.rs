//! The layers of encoder and decoder, over sequences `[time, channels]`.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use ops::{NormedWeight, SequenceFilter, SequenceShape, Snake, Through, pad_sequence, snake_in_place};

use super::config::{Level, OobleckConfig};
use super::shapes::{DILATIONS, LAST_TAPS, TAPS};
use model::StageError;

type Outcome<T> = std::result::Result<T, StageError>;

/// Channels of sequences of samples are a multiple of this: cards' convolutions have them in words of 16 bytes.
const LANES: usize = 8;

/// Channels of a sequence of samples; those beyond the track's are zeros.
pub(super) fn sample_channels(config: &OobleckConfig) -> usize {
    config.audio_channels.next_multiple_of(LANES)
}

/// A convolution that keeps the length.
pub(super) fn dilated(inputs: usize, outputs: usize, taps: usize, dilation: usize) -> SequenceShape {
    SequenceShape {
        through: Through::Dilated { dilation },
        taps,
        inputs,
        outputs,
    }
}

/// The convolution from a level to the one coarser.
pub(super) fn strided(level: Level) -> SequenceShape {
    SequenceShape {
        through: Through::Strided { stride: level.stride },
        taps: 2 * level.stride,
        inputs: level.finer,
        outputs: level.coarser,
    }
}

/// The convolution from the coarser side of a level to the finer one.
pub(super) fn transposed(level: Level) -> SequenceShape {
    SequenceShape {
        through: Through::Transposed { stride: level.stride },
        taps: 2 * level.stride,
        inputs: level.coarser,
        outputs: level.finer,
    }
}

/// The decoder's first convolution.
pub(super) fn from_latents(config: &OobleckConfig, coarsest: usize) -> SequenceShape {
    dilated(config.decoder_input_channels, coarsest, TAPS, 1)
}

/// The decoder's last convolution.
pub(super) fn to_samples(config: &OobleckConfig) -> SequenceShape {
    dilated(config.decoder_channels, sample_channels(config), TAPS, 1)
}

/// The encoder's first convolution.
pub(super) fn from_samples(config: &OobleckConfig) -> SequenceShape {
    dilated(sample_channels(config), config.encoder_hidden_size, TAPS, 1)
}

/// The encoder's last convolution.
pub(super) fn to_moments(config: &OobleckConfig, coarsest: usize) -> SequenceShape {
    dilated(coarsest, config.encoder_hidden_size, LAST_TAPS, 1)
}

/// Where layers get their tensors.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) tensors: &'a ComponentTensors,
    /// The dtype of sequences.
    pub(super) dtype: DType,
}

impl Source<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Outcome<Tensor> {
        let tensor = self.tensors.shaped(name, shape).map_err(missing)?;
        Ok(tensor.to_dtype(self.dtype)?)
    }

    /// A convolution from so many channels to so many: those of the weight, which may be fewer than the shape's.
    pub(super) fn convolution(
        &self,
        name: &str,
        shape: SequenceShape,
        (inputs, outputs): (usize, usize),
        has_bias: bool,
    ) -> Outcome<SequenceFilter> {
        let [rows, columns] = match shape.through {
            Through::Transposed { .. } => [inputs, outputs],
            Through::Dilated { .. } | Through::Strided { .. } => [outputs, inputs],
        };
        let direction = self.tensor(&format!("{name}.weight_v"), &[rows, columns, shape.taps])?;
        let length = self.tensor(&format!("{name}.weight_g"), &[rows, 1, 1])?;
        let bias = match has_bias {
            true => Some(self.tensor(&format!("{name}.bias"), &[outputs])?),
            false => None,
        };
        let weight = NormedWeight {
            direction: &direction,
            length: &length,
        };
        Ok(SequenceFilter::new(weight, bias.as_ref(), shape, self.dtype)?)
    }

    /// A convolution whose weight has the shape's channels, and a bias.
    pub(super) fn plain(&self, name: &str, shape: SequenceShape) -> Outcome<SequenceFilter> {
        self.convolution(name, shape, (shape.inputs, shape.outputs), true)
    }

    /// The vectors of an activation are `[1, c, 1]` in diffusers' files and `[c]` in others.
    pub(super) fn snake(&self, name: &str, channels: usize) -> Outcome<Snake> {
        let vector = |which: &str| -> Outcome<Tensor> {
            let name = format!("{name}.{which}");
            let found = self.tensors.get(&name).map_err(missing)?;
            let shape: &[usize] = match found.dims().len() {
                1 => &[channels],
                _ => &[1, channels, 1],
            };
            Ok(self.tensor(&name, shape)?.flatten_all()?)
        };
        Ok(Snake {
            alpha: vector("alpha")?,
            beta: vector("beta")?,
        })
    }

    /// The three residual units of a level.
    pub(super) fn units(&self, name: &str, channels: usize) -> Outcome<Vec<Unit>> {
        let unit = |(index, dilation): (usize, &usize)| {
            let name = format!("{name}.res_unit{}", index + 1);
            Ok(Unit {
                snake1: self.snake(&format!("{name}.snake1"), channels)?,
                conv1: self.plain(
                    &format!("{name}.conv1"),
                    dilated(channels, channels, TAPS, *dilation),
                )?,
                snake2: self.snake(&format!("{name}.snake2"), channels)?,
                conv2: self.plain(&format!("{name}.conv2"), dilated(channels, channels, 1, 1))?,
            })
        };
        DILATIONS.iter().enumerate().map(unit).collect()
    }
}

fn missing(missing: gpu::MissingTensor) -> StageError {
    StageError::Missing {
        component: "vae".to_owned(),
        missing,
    }
}

/// A convolution of a contiguous sequence, activated before if there is a Snake, into a new one. The sequence is
/// dropped as soon as it is read.
pub(super) fn convolve(
    x: Tensor,
    snake: Option<&Snake>,
    filter: &SequenceFilter,
    cancelled: &dyn Fn() -> bool,
) -> Outcome<Tensor> {
    if cancelled() {
        return Err(StageError::Cancelled);
    }
    let (rows, channels) = x.dims2()?;
    let shape = filter.shape();
    let Some(reach) = shape.reach(rows) else {
        return Err(StageError::BadInput(format!("{rows} rows by {shape:?}")));
    };
    let read = ops::blank(&[reach.read, channels], x.dtype(), x.device())?;
    pad_sequence(&x, snake, reach.before, &read)?;
    drop(x);
    let written = ops::blank(&[reach.written, shape.outputs], read.dtype(), read.device())?;
    filter.convolve(&read, rows, &written)?;
    Ok(written.narrow(0, reach.skipped, reach.length)?)
}

/// `OobleckResidualUnit`.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    snake1: Snake,
    conv1: SequenceFilter,
    snake2: Snake,
    conv2: SequenceFilter,
}

impl Unit {
    /// In the memory of the sequence.
    pub(super) fn forward(&self, x: &Tensor, cancelled: &dyn Fn() -> bool) -> Outcome<()> {
        let inner = convolve(x.clone(), Some(&self.snake1), &self.conv1, cancelled)?;
        snake_in_place(&inner, &self.snake2)?;
        Ok(self.conv2.add_rows_to(&inner, x)?)
    }
}
