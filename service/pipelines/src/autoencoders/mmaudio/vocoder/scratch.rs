//! Activation memory of a vocoder's run, derived from the configuration.

use candle_core::DType;
use ops::{Planned, allocated};
use residency::Bytes;

use super::config::VocoderConfig;
use super::table::Convolution;
use crate::autoencoders::oobleck::Account;

/// Sequences of f32 that an activation takes on the CPU: the one of twice the rate.
const OF_ACTIVATION: u64 = 2;

/// Sequences that a stage keeps while a unit runs: its input, the average of the blocks, and the unit's own.
const OF_STAGE: u64 = 3;

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
        for unit in stage.blocks.iter().flatten() {
            // The second convolution also keeps what it reads.
            for (convolution, held) in unit.convolutions.iter().zip([OF_STAGE, OF_STAGE + 1]) {
                activate(&mut account, convolution, rows, held * sequence);
                convolve(&mut account, convolution, rows, held * sequence);
            }
        }
    }
    let sequence = wide(rows, table.last.channels.0);
    activate(&mut account, &table.last, rows, sequence);
    convolve(&mut account, &table.last, rows, sequence);
    account
}

/// The activation before a convolution, beside `held` bytes. A card needs nothing for it.
fn activate(account: &mut Account, before: &Convolution, rows: usize, held: u64) {
    let is_on_cpu = account.dtype() == DType::F32;
    if let (true, Some(reach)) = (is_on_cpu, before.shape.reach(rows)) {
        let doubled = OF_ACTIVATION * allocated(rows * before.shape.inputs * size_of::<f32>());
        account.note(held + account.bytes(reach.read, before.shape.inputs) + doubled);
    }
}

/// A convolution beside `held` bytes, with a copy of its result where its filter has another dtype. Returns the rows of its
/// result.
fn convolve(account: &mut Account, of: &Convolution, rows: usize, held: u64) -> usize {
    let (rows, written) = account.convolve(of.shape, (rows, held, true), true);
    if account.dtype() != DType::F32 {
        account.note(held + written + allocated(rows * of.shape.outputs * size_of::<f32>()));
    }
    rows
}
