//! The decoder as a table: its layers in order, under the authors' names.

use ops::SequenceShape;

use super::LANES;
use super::config::MmAudioConfig;
use crate::autoencoders::oobleck::dilated;

/// Taps of the convolutions that see neighbouring positions.
const TAPS: usize = 3;

/// A layer of the decoder.
#[derive(Clone, Debug)]
pub(super) enum Layer {
    /// A convolution. Its sequences may have more channels than the weight: those beyond are zeros.
    Convolution(Convolution),
    /// A residual block; its result may be clamped.
    Block {
        name: String,
        channels: (usize, usize),
        is_clamped: bool,
    },
    /// Attention of all positions with one head.
    Attention { name: String, channels: usize },
    /// Every position twice.
    Twice,
    /// The activation before the last convolution.
    Activation,
}

/// A convolution without a bias.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    pub(super) name: String,
    /// Channels of the weight, inputs and outputs.
    pub(super) channels: (usize, usize),
    pub(super) shape: SequenceShape,
}

impl Convolution {
    pub(super) fn new(name: String, (inputs, outputs): (usize, usize), taps: usize) -> Convolution {
        Convolution {
            name,
            channels: (inputs, outputs),
            shape: dilated(inputs, outputs, taps, 1),
        }
    }

    pub(super) fn shape_of_weight(&self) -> [usize; 3] {
        let (inputs, outputs) = self.channels;
        [outputs, inputs, self.shape.taps]
    }
}

/// The convolutions of a residual block: the two of its branch, and the one beside it where the channels change.
pub(super) struct OfBlock {
    pub(super) conv1: Convolution,
    pub(super) conv2: Convolution,
    pub(super) shortcut: Option<Convolution>,
}

impl OfBlock {
    pub(super) fn new(name: &str, (inputs, outputs): (usize, usize)) -> OfBlock {
        OfBlock {
            conv1: Convolution::new(format!("{name}.conv1"), (inputs, outputs), TAPS),
            conv2: Convolution::new(format!("{name}.conv2"), (outputs, outputs), TAPS),
            shortcut: (inputs != outputs)
                .then(|| Convolution::new(format!("{name}.nin_shortcut"), (inputs, outputs), 1)),
        }
    }
}

/// The projections of an attention: queries, keys and values from one, and that of its result.
pub(super) fn of_attention(name: &str, channels: usize) -> [Convolution; 2] {
    [
        Convolution::new(format!("{name}.qkv"), (channels, 3 * channels), 1),
        Convolution::new(format!("{name}.proj_out"), (channels, channels), 1),
    ]
}

impl MmAudioConfig {
    /// Channels of the sequence of latents; those beyond the model's are zeros.
    pub(super) fn input_channels(&self) -> usize {
        self.latent_channels.next_multiple_of(LANES)
    }

    /// The layers from latents to a standardised spectrogram.
    pub(super) fn decoder(&self) -> Vec<Layer> {
        let width = |level: usize| self.hidden_channels * self.channel_multipliers[level];
        let levels = self.channel_multipliers.len();
        let mut channels = width(levels - 1);
        let mut input = Convolution::new(
            "decoder.conv_in".to_owned(),
            (self.latent_channels, channels),
            TAPS,
        );
        input.shape.inputs = self.input_channels();
        let block = |name: String, channels: (usize, usize), is_clamped: bool| Layer::Block {
            name,
            channels,
            is_clamped,
        };
        let mut layers = vec![
            Layer::Convolution(input),
            block("decoder.mid.block_1".to_owned(), (channels, channels), false),
            Layer::Attention {
                name: "decoder.mid.attn_1".to_owned(),
                channels,
            },
            block("decoder.mid.block_2".to_owned(), (channels, channels), true),
        ];
        for level in (0..levels).rev() {
            for index in 0..=self.layers_per_block {
                let name = format!("decoder.up.{level}.block.{index}");
                layers.push(block(name, (channels, width(level)), true));
                channels = width(level);
            }
            if level == 1 {
                layers.push(Layer::Twice);
                let name = "decoder.up.1.upsample.conv".to_owned();
                layers.push(Layer::Convolution(Convolution::new(
                    name,
                    (channels, channels),
                    TAPS,
                )));
            }
        }
        let mut output = Convolution::new("decoder.conv_out".to_owned(), (channels, self.mel_bins), TAPS);
        output.shape.outputs = self.mel_bins.next_multiple_of(LANES);
        layers.extend([Layer::Activation, Layer::Convolution(output)]);
        layers
    }
}
