//! Activation memory of a decode, derived from the configuration.

use candle_core::DType;
use ops::{AttentionShape, MaskShape, Planned, allocated, attention_workspace};
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
                account.note(7 * held);
                // The parts and what they become, beside the scores.
                let scores = match account.dtype() {
                    DType::F32 => 0,
                    _ => attention_workspace(1, rows, rows),
                };
                account.note(5 * held + allocated(scores));
                let strides = (channels, channels);
                let shape =
                    AttentionShape::of_rows(rows, (1, channels), strides, DType::F32, MaskShape::None);
                account.planned.push(Planned::Attention(shape));
                convolve(&mut account, &out, rows, 2 * held);
            }
            Layer::Twice => {
                account.note(3 * wide(rows, channels));
                rows *= 2;
            }
            Layer::Activation => account.note(wide(rows, channels)),
        }
    }
    account
}

/// A convolution beside `held` bytes, with a copy of its result where its filter has another dtype.
fn convolve(account: &mut Account, of: &Convolution, rows: usize, held: u64) {
    let (rows, written) = account.convolve(of.shape, (rows, held, true), false);
    if account.dtype() != DType::F32 {
        account.note(held + written + wide(rows, of.shape.outputs));
    }
}
