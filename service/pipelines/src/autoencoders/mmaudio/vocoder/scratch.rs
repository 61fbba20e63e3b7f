//! Activation memory of a vocoder's run, derived from the configuration.

use candle_core::DType;
use ops::{Planned, allocated};
use residency::Bytes;

use super::config::VocoderConfig;
use super::table::Convolution;
use crate::autoencoders::oobleck::Account;

/// Sequences of f32 that an activation takes at its peak: two halves of the doubled sequence, and three of a sum.
const OF_ACTIVATION: u64 = 5;

/// Sequences that a stage keeps while a block runs: its input, the sum of the blocks before, the block's, and its branch.
const OF_STAGE: u64 = 4;

/// Predicted peak of activation bytes of making a track of `frames` frames of a spectrogram: filters and sequences.
pub fn vocode_scratch(config: &VocoderConfig, frames: usize, dtype: DType) -> Bytes {
    account(config, frames, dtype).total()
}

impl VocoderConfig {
    /// Shapes for which cuDNN is used to make a track of `frames` frames, each once, in order of use.
    pub fn planned_to_vocode(&self, frames: usize, dtype: DType) -> Vec<Planned> {
        account(self, frames, dtype).planned
    }
}

fn account(config: &VocoderConfig, frames: usize, dtype: DType) -> Account {
    let mut account = Account::new(dtype);
    let table = config.table();
    let wide = |rows: usize, channels: usize| allocated(rows * channels * size_of::<f32>());
    let mut rows = frames;
    convolve(
        &mut account,
        &table.first,
        rows,
        wide(rows, table.first.shape.inputs),
    );
    for stage in &table.stages {
        let held = wide(rows, stage.up.channels.0);
        rows = convolve(&mut account, &stage.up, rows, held);
        let sequence = wide(rows, stage.up.channels.1);
        account.note((OF_STAGE + OF_ACTIVATION) * sequence);
        for unit in stage.blocks.iter().flatten() {
            for convolution in &unit.convolutions {
                convolve(&mut account, convolution, rows, (OF_STAGE + 1) * sequence);
            }
        }
    }
    let sequence = wide(rows, table.last.channels.0);
    account.note((1 + OF_ACTIVATION) * sequence);
    convolve(&mut account, &table.last, rows, 2 * sequence);
    account
}

/// A convolution beside `held` bytes, with copies of what it reads and writes in the dtype of its filter. Returns the rows of
/// its result.
fn convolve(account: &mut Account, of: &Convolution, rows: usize, held: u64) -> usize {
    let is_copied = account.dtype() != DType::F32;
    let copied = match is_copied {
        true => account.bytes(rows, of.shape.inputs),
        false => 0,
    };
    let (rows, written) = account.convolve(of.shape, (rows, held + copied, true), true);
    if is_copied {
        account.note(held + written + allocated(rows * of.shape.outputs * size_of::<f32>()));
    }
    rows
}
