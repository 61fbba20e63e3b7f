//! Activation memory of a decode, derived from the configuration.

use candle_core::DType;
use ops::{Planned, allocated};
use residency::Bytes;

use super::config::MmAudioConfig;
use super::table::{Convolution, Layer, OfBlock, of_attention};
use crate::autoencoders::oobleck::Account;

/// Sequences of f32 that are there while a block is computed, besides those of its convolutions: its input, the normalised one,
/// and one that is made of it.
const OF_BLOCK: u64 = 3;

/// Predicted peak of activation bytes of decoding `frames` latent frames: filters and sequences.
pub fn decode_scratch(config: &MmAudioConfig, frames: usize, dtype: DType) -> Bytes {
    account(config, frames, dtype).total()
}

impl MmAudioConfig {
    /// Shapes for which cuDNN is used to decode `frames` latent frames, each once, in order of use.
    pub fn planned_to_decode(&self, frames: usize, dtype: DType) -> Vec<Planned> {
        account(self, frames, dtype).planned
    }
}

/// Bytes of a sequence of f32.
fn wide(rows: usize, channels: usize) -> u64 {
    allocated(rows * channels * size_of::<f32>())
}

fn account(config: &MmAudioConfig, frames: usize, dtype: DType) -> Account {
    let mut account = Account::new(dtype);
    let mut rows = frames;
    let mut channels = config.input_channels();
    for layer in config.decoder() {
        match layer {
            Layer::Convolution(of) => {
                convolve(&mut account, &of, rows, wide(rows, of.shape.inputs));
                channels = of.shape.outputs;
            }
            Layer::Block {
                name, channels: of, ..
            } => {
                let held = OF_BLOCK * wide(rows, of.0.max(of.1));
                let block = OfBlock::new(&name, of);
                for convolution in [block.conv1, block.conv2].into_iter().chain(block.shortcut) {
                    convolve(&mut account, &convolution, rows, held);
                }
                channels = of.1;
            }
            Layer::Attention { name, channels } => {
                let [qkv, out] = of_attention(&name, channels);
                let held = wide(rows, channels);
                convolve(&mut account, &qkv, rows, held);
                // The projections while the last of the three parts is normalised.
                account.note(8 * held);
                // The parts beside the scores and the weights.
                account.note(5 * held + 2 * allocated(rows * rows * size_of::<f32>()));
                convolve(&mut account, &out, rows, 2 * held);
            }
            Layer::Twice => {
                account.note(3 * wide(rows, channels));
                rows *= 2;
            }
            Layer::Activation => account.note(2 * wide(rows, channels)),
        }
    }
    account
}

/// A convolution beside `held` bytes, with a copy of what it reads in the dtype of its filter.
fn convolve(account: &mut Account, of: &Convolution, rows: usize, held: u64) {
    let is_copied = account.dtype() != DType::F32;
    let copied = match is_copied {
        true => account.bytes(rows, of.shape.inputs),
        false => 0,
    };
    let (rows, written) = account.convolve(of.shape, (rows, held + copied, true), false);
    if is_copied {
        account.note(held + written + wide(rows, of.shape.outputs));
    }
}
