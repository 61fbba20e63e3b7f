//! What stages really needed: learned peaks, so that nobody guesses twice.
//!
//! A family predicts a stage's activation bytes; the activation pool's high-water mark corrects it. Only success
//! teaches. Estimates follow the last few runs, so they fall again. And where a run succeeded in so little room, the
//! same room is enough from then on: a job that ran once is never refused on the same free memory.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::nouns::Bytes;

/// How many of the last successful runs an estimate covers.
pub const RUNS_REMEMBERED: usize = 8;

/// How many keys a book keeps; beyond them, the one that was taught longest ago is forgotten.
pub const KEYS_REMEMBERED: usize = 4096;

/// Everything that a stage's activation bytes depend on.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ScratchKey {
    /// Model family and variant.
    pub family: String,
    /// Stage: `encode_text`, `denoise`, `decode`.
    pub stage: String,
    /// Batch, pixels, frames, tokens, chunking: as the family writes them.
    pub shape: String,
    /// Computation type, and quantization where it changes what is allocated.
    pub dtype: String,
    /// Which kernels run: attention and linear implementations.
    pub kernels: String,
    /// Build of the service.
    pub build: String,
    /// Compute capability of the card, `9.0`; `cpu` for none.
    pub compute_capability: String,
}

/// How a stage ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// It ran to its end.
    Succeeded {
        /// What was usable for its scratch when it started: `Ledger::usable` just before its lease.
        room: Bytes,
    },
    /// It failed for a reason that says nothing about memory.
    Failed,
    /// It was cancelled; its peak may have been ahead.
    Cancelled,
    /// It ran out of memory.
    OutOfMemory {
        /// What was usable for its scratch when it started.
        room: Bytes,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Learned {
    key: ScratchKey,
    peaks: VecDeque<Bytes>,
    /// The least room in which a run succeeded and none failed since.
    proven: Option<Bytes>,
    taught: u64,
}

/// Learned peaks by key. Serialises as a plain list, so that it can be kept across restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<Learned>", into = "Vec<Learned>")]
pub struct ScratchBook {
    learned: BTreeMap<ScratchKey, Learned>,
    lessons: u64,
}

impl From<Vec<Learned>> for ScratchBook {
    fn from(list: Vec<Learned>) -> ScratchBook {
        let lessons = list.iter().map(|l| l.taught).max().unwrap_or(0);
        ScratchBook {
            learned: list.into_iter().map(|l| (l.key.clone(), l)).collect(),
            lessons,
        }
    }
}

impl From<ScratchBook> for Vec<Learned> {
    fn from(book: ScratchBook) -> Vec<Learned> {
        book.learned.into_values().collect()
    }
}

impl ScratchBook {
    /// An empty book.
    pub fn new() -> ScratchBook {
        ScratchBook::default()
    }

    /// Scratch bytes to plan with: what the last runs needed and a margin, or as little as was enough before;
    /// `family_prediction` as long as nothing was learned.
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

    /// Whether a stage would be refused with `room` usable bytes for its scratch.
    pub fn would_refuse(&self, key: &ScratchKey, family_prediction: Bytes, room: Bytes) -> bool {
        self.estimate(key, family_prediction) > room
    }

    /// Learns from a run's high-water mark. Failed and cancelled runs teach nothing. Running out of memory teaches no
    /// peak either (that is how estimates grow past the card), it only ends the proof that so little room is enough.
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

    /// The least room that was enough, if any run succeeded.
    pub fn proven(&self, key: &ScratchKey) -> Option<Bytes> {
        self.learned.get(key).and_then(|l| l.proven)
    }

    /// How many keys were learned.
    pub fn len(&self) -> usize {
        self.learned.len()
    }

    /// Whether nothing was learned yet.
    pub fn is_empty(&self) -> bool {
        self.learned.is_empty()
    }

    fn learn_success(&mut self, key: &ScratchKey, peak: Bytes, room: Bytes) {
        self.lessons += 1;
        let learned = self.learned.entry(key.clone()).or_default();
        learned.key = key.clone();
        learned.taught = self.lessons;
        learned.peaks.push_back(peak);
        if learned.peaks.len() > RUNS_REMEMBERED {
            learned.peaks.pop_front();
        }
        // No room at all is an overdrawn card (usable is cut at zero): by how much is not known, so it proves nothing.
        if room > Bytes::ZERO {
            learned.proven = Some(learned.proven.map_or(room, |proven| proven.min(room)));
        }
        if self.learned.len() > KEYS_REMEMBERED {
            let oldest = self
                .learned
                .values()
                .min_by_key(|l| l.taught)
                .map(|l| l.key.clone());
            oldest.map(|key| self.learned.remove(&key));
        }
    }
}

/// Allocators round up, and not always alike: a thirty-second part and 16 MiB.
fn margin(peak: Bytes) -> Bytes {
    Bytes(peak.0 / 32) + Bytes::mib(16)
}
