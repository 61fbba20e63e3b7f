//! The autoencoder as a table: the layers of its two halves in order, under their names in diffusers.

use ops::{SequenceShape, Through};

use super::config::{Level, OobleckConfig};

/// Dilations of the three residual units of a level.
const DILATIONS: [usize; 3] = [1, 3, 9];

/// Taps of a residual unit's first convolution, and of those at the samples and at the decoder's latents.
pub(super) const TAPS: usize = 7;

/// Taps of the encoder's last convolution.
const LAST_TAPS: usize = 3;

/// Channels of sequences of samples are a multiple of this: cards' convolutions have them in words of 16 bytes.
const LANES: usize = 8;

/// A layer of half the autoencoder.
#[derive(Clone, Debug)]
pub(super) enum Layer {
    /// A convolution of a sequence into a new one.
    Convolution {
        name: String,
        /// The activation before it.
        snake: Option<String>,
        shape: SequenceShape,
        /// Channels of the weight, inputs and outputs: those of a sequence beyond them are zeros.
        channels: (usize, usize),
        has_bias: bool,
    },
    /// A residual unit, in the memory of its sequence.
    Unit {
        name: String,
        channels: usize,
        dilation: usize,
    },
}

impl Layer {
    /// Shape of the convolution that sees neighbouring positions.
    pub(super) fn shape(&self) -> SequenceShape {
        match *self {
            Layer::Convolution { shape, .. } => shape,
            Layer::Unit {
                channels, dilation, ..
            } => dilated(channels, channels, TAPS, dilation),
        }
    }

    /// A convolution after the activation of a block or a half.
    fn activated(block: &str, name: &str, shape: SequenceShape) -> Layer {
        Layer::Convolution {
            name: format!("{block}.{name}"),
            snake: Some(format!("{block}.snake1")),
            shape,
            channels: (shape.inputs, shape.outputs),
            has_bias: true,
        }
    }

    /// The residual units of a level.
    fn units(block: &str, channels: usize) -> impl Iterator<Item = Layer> {
        (1..).zip(DILATIONS).map(move |(index, dilation)| Layer::Unit {
            name: format!("{block}.res_unit{index}"),
            channels,
            dilation,
        })
    }
}

/// A convolution that keeps the length.
pub(in crate::autoencoders) fn dilated(
    inputs: usize,
    outputs: usize,
    taps: usize,
    dilation: usize,
) -> SequenceShape {
    SequenceShape {
        through: Through::Dilated { dilation },
        taps,
        inputs,
        outputs,
    }
}

/// The convolution from a level to the one coarser.
fn strided(level: Level) -> SequenceShape {
    SequenceShape {
        through: Through::Strided { stride: level.stride },
        taps: 2 * level.stride,
        inputs: level.finer,
        outputs: level.coarser,
    }
}

/// The convolution from the coarser side of a level to the finer one.
fn transposed(level: Level) -> SequenceShape {
    SequenceShape {
        through: Through::Transposed { stride: level.stride },
        taps: 2 * level.stride,
        inputs: level.coarser,
        outputs: level.finer,
    }
}

impl OobleckConfig {
    /// Channels of a sequence of samples; those beyond the track's are zeros.
    pub(super) fn sample_channels(&self) -> usize {
        self.audio_channels.next_multiple_of(LANES)
    }

    /// The layers from samples to moments.
    pub(super) fn encoder(&self) -> Vec<Layer> {
        let finest = self.encoder_hidden_size;
        let levels = self.levels(finest);
        let coarsest = levels.last().map_or(finest, |level| level.coarser);
        let mut layers = vec![Layer::Convolution {
            name: "encoder.conv1".to_owned(),
            snake: None,
            shape: dilated(self.sample_channels(), finest, TAPS, 1),
            channels: (self.audio_channels, finest),
            has_bias: true,
        }];
        for (index, level) in levels.into_iter().enumerate() {
            let block = format!("encoder.block.{index}");
            layers.extend(Layer::units(&block, level.finer));
            layers.push(Layer::activated(&block, "conv1", strided(level)));
        }
        let to_moments = dilated(coarsest, self.encoder_hidden_size, LAST_TAPS, 1);
        layers.push(Layer::activated("encoder", "conv2", to_moments));
        layers
    }

    /// The layers from latents to samples.
    pub(super) fn decoder(&self) -> Vec<Layer> {
        let finest = self.decoder_channels;
        let levels = self.levels(finest);
        let coarsest = levels.last().map_or(finest, |level| level.coarser);
        let latents = self.decoder_input_channels;
        let mut layers = vec![Layer::Convolution {
            name: "decoder.conv1".to_owned(),
            snake: None,
            shape: dilated(latents, coarsest, TAPS, 1),
            channels: (latents, coarsest),
            has_bias: true,
        }];
        for (index, level) in levels.into_iter().rev().enumerate() {
            let block = format!("decoder.block.{index}");
            layers.push(Layer::activated(&block, "conv_t1", transposed(level)));
            layers.extend(Layer::units(&block, level.finer));
        }
        layers.push(Layer::Convolution {
            name: "decoder.conv2".to_owned(),
            snake: Some("decoder.snake1".to_owned()),
            shape: dilated(finest, self.sample_channels(), TAPS, 1),
            channels: (finest, self.audio_channels),
            has_bias: false,
        });
        layers
    }
}
