//! Learned scratch peaks.
//!
//! A family predicts a stage's activation bytes; the activation pool's high-water mark corrects the prediction. Only
//! successful runs are learned from. Estimates cover the last few runs, so they can fall again. A room (usable bytes)
//! in which a run succeeded is enough from then on: a job that ran once is never refused on the same free memory.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::nouns::Bytes;

/// How many of the last successful runs an estimate covers.
pub const RUNS_REMEMBERED: usize = 8;

/// Capacity of a book, in keys; beyond it, the key that was updated longest ago is evicted.
pub const KEYS_REMEMBERED: usize = 4096;

/// Everything that a stage's activation bytes depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ScratchKey {
    /// Model family and variant.
    pub family: String,
    /// Stage name: `encode_text`, `denoise`, `decode`.
    pub stage: String,
    /// Batch, pixels, frames, tokens, chunking, in the family's notation.
    pub shape: String,
    /// Computation dtype, and quantization where it changes the allocations.
    pub dtype: String,
    /// Version of the service's build.
    pub build: String,
    /// Compute capability of the card, such as `9.0`; `cpu` for system memory.
    pub compute_capability: String,
}

/// How a stage ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// The stage completed.
    Succeeded {
        /// Usable bytes for scratch at its start: `Ledger::usable` just before its lease.
        room: Bytes,
    },
    /// The stage failed for a reason unrelated to memory.
    Failed,
    /// The stage was cancelled, possibly before its peak.
    Cancelled,
    OutOfMemory {
        /// Usable bytes for scratch at its start.
        room: Bytes,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Learned {
    peaks: VecDeque<Bytes>,
    /// The least usable bytes in which a run succeeded and none failed since.
    proven: Option<Bytes>,
    taught: u64,
}

/// Learned peaks by key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScratchBook {
    learned: BTreeMap<ScratchKey, Learned>,
    lessons: u64,
}

impl ScratchBook {
    /// A book without learned peaks.
    pub fn new() -> ScratchBook {
        ScratchBook::default()
    }

    /// Scratch bytes to plan with: the peak of the last runs and a margin, or the least room that was enough before
    /// if that is less; `family_prediction` if nothing is known.
    pub fn estimate(&self, key: &ScratchKey, family_prediction: Bytes) -> Bytes {
        let Some(learned) = self.learned.get(key) else {
            return family_prediction;
        };
        let estimate = learned
            .peaks
            .iter()
            .max()
            .map_or(family_prediction, |&peak| peak + margin(peak));
        learned.proven.map_or(estimate, |room| estimate.min(room))
    }

    /// Learns from a run's high-water mark. Failed and cancelled runs are ignored. Running out of memory teaches no
    /// peak either (estimates would grow past the card); it only withdraws the proof that so little room is enough.
    pub fn learn(&mut self, key: &ScratchKey, peak: Bytes, outcome: RunOutcome) {
        match outcome {
            RunOutcome::Succeeded { room } => self.learn_success(key, peak, room),
            RunOutcome::OutOfMemory { room } => {
                if let Some(learned) = self.learned.get_mut(key) {
                    learned.proven = learned.proven.filter(|&proven| proven > room);
                }
            }
            RunOutcome::Failed | RunOutcome::Cancelled => {}
        }
    }

    /// The last successful peaks of a key, oldest first.
    pub fn peaks(&self, key: &ScratchKey) -> impl Iterator<Item = Bytes> {
        self.learned
            .get(key)
            .into_iter()
            .flat_map(|l| l.peaks.iter().copied())
    }

    fn learn_success(&mut self, key: &ScratchKey, peak: Bytes, room: Bytes) {
        self.lessons += 1;
        let learned = self.learned.entry(key.clone()).or_default();
        learned.taught = self.lessons;
        learned.peaks.push_back(peak);
        if learned.peaks.len() > RUNS_REMEMBERED {
            learned.peaks.pop_front();
        }
        // A room of zero is an overdrawn card (usable saturates at zero) by an unknown amount, so it proves nothing.
        if room > Bytes::ZERO {
            learned.proven = Some(learned.proven.map_or(room, |proven| proven.min(room)));
        }
        if self.learned.len() > KEYS_REMEMBERED {
            let oldest = self.learned.iter().min_by_key(|(_, l)| l.taught);
            let oldest = oldest.map(|(key, _)| key.clone());
            oldest.map(|key| self.learned.remove(&key));
        }
    }
}

/// Margin for rounding in allocators, which varies: 1/32 and 16 MiB.
fn margin(peak: Bytes) -> Bytes {
    Bytes(peak.0 / 32) + Bytes::mib(16)
}
