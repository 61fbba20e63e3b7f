//! The vocoder as a table: its stages, under the authors' names.

use ops::{SequenceShape, Through};

use super::super::LANES;
use super::config::VocoderConfig;
use crate::autoencoders::oobleck::dilated;

/// Taps of the first and the last convolution.
const TAPS: usize = 7;

/// A convolution with a bias.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    pub(super) name: String,
    /// Channels of the weight, inputs and outputs: those of a sequence beyond them are zeros.
    pub(super) channels: (usize, usize),
    pub(super) shape: SequenceShape,
}

impl Convolution {
    fn new(name: String, (inputs, outputs): (usize, usize), taps: usize, dilation: usize) -> Convolution {
        Convolution {
            name,
            channels: (inputs, outputs),
            shape: dilated(inputs, outputs, taps, dilation),
        }
    }

    pub(super) fn shape_of_weight(&self) -> [usize; 3] {
        let (inputs, outputs) = self.channels;
        match self.shape.through {
            Through::Transposed { .. } => [inputs, outputs, self.shape.taps],
            Through::Dilated { .. } | Through::Strided { .. } => [outputs, inputs, self.shape.taps],
        }
    }
}

/// A residual unit: two convolutions, each after an activation.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) activations: [String; 2],
    pub(super) convolutions: [Convolution; 2],
}

/// A stage: a transposed convolution, and blocks of units whose results are averaged.
#[derive(Clone, Debug)]
pub(super) struct Stage {
    pub(super) up: Convolution,
    pub(super) blocks: Vec<Vec<Unit>>,
}

/// All layers of a vocoder.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) first: Convolution,
    pub(super) stages: Vec<Stage>,
    pub(super) activation: String,
    pub(super) last: Convolution,
}

impl VocoderConfig {
    /// Channels of the last stage.
    fn last_channels(&self) -> usize {
        self.upsample_initial_channel >> self.upsample_rates.len()
    }

    pub(super) fn table(&self) -> Table {
        let mut first = Convolution::new(
            "conv_pre".to_owned(),
            (self.num_mels, self.upsample_initial_channel),
            TAPS,
            1,
        );
        first.shape.inputs = self.num_mels.next_multiple_of(LANES);
        let mut last = Convolution::new("conv_post".to_owned(), (self.last_channels(), 1), TAPS, 1);
        last.shape.outputs = LANES;
        let stages = self.upsample_rates.iter().enumerate();
        Table {
            first,
            stages: stages.map(|(index, &rate)| self.stage(index, rate)).collect(),
            activation: "activation_post".to_owned(),
            last,
        }
    }

    fn stage(&self, index: usize, stride: usize) -> Stage {
        let inputs = self.upsample_initial_channel >> index;
        let channels = inputs / 2;
        let kernels = self.resblock_kernel_sizes.iter();
        let blocks = kernels.zip(&self.resblock_dilation_sizes).enumerate();
        let block = |(block, (&taps, dilations)): (usize, (&usize, &Vec<usize>))| {
            let name = format!("resblocks.{}", index * self.resblock_kernel_sizes.len() + block);
            let unit = |(unit, &dilation): (usize, &usize)| Unit {
                activations: [2 * unit, 2 * unit + 1].map(|at| format!("{name}.activations.{at}")),
                convolutions: [("convs1", dilation), ("convs2", 1)].map(|(list, dilation)| {
                    let name = format!("{name}.{list}.{unit}");
                    Convolution::new(name, (channels, channels), taps, dilation)
                }),
            };
            dilations.iter().enumerate().map(unit).collect()
        };
        Stage {
            up: Convolution {
                name: format!("ups.{index}.0"),
                channels: (inputs, channels),
                shape: SequenceShape {
                    through: Through::Transposed { stride },
                    taps: 2 * stride,
                    inputs,
                    outputs: channels,
                },
            },
            blocks: blocks.map(block).collect(),
        }
    }
}
