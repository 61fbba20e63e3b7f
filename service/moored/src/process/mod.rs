//! Supervisor and worker: two processes of one build. They exchange the types of [`engine::messages`] over the worker's
//! standard input and output. The first frame to a worker is a [`Configuration`], each that follows a
//! [`Command`](engine::messages::Command); a worker writes [`FromWorker`] alone.

use std::path::PathBuf;

use engine::messages::Event;
use gpu::{DeviceSpec, MemoryProfile};
use residency::Bytes;
use serde::{Deserialize, Serialize};

pub(crate) mod frames;
pub(crate) mod supervisor;
pub(crate) mod worker;

/// What a card's workers are told, each when it starts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerSettings {
    /// The card that it owns.
    pub(crate) device: DeviceSpec,
    /// Never planned into.
    pub(crate) headroom: Bytes,
    /// How the card's memory is managed.
    pub(crate) memory: MemoryProfile,
    /// tracing filter.
    pub(crate) log: String,
    /// What the worker keeps locked while it lives; none for a card that cannot be shared by mistake.
    pub(crate) lock_file: Option<PathBuf>,
    /// Where compiled plans of cuDNN are kept.
    pub(crate) plans_folder: PathBuf,
}

/// What one worker is told first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Configuration {
    /// Which worker of its card it is, from 1.
    pub(crate) generation: u64,
    /// As for the card's other workers.
    pub(crate) settings: WorkerSettings,
}

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// Of its card.
    Event(Event),
    /// It cannot have its card, or has lost it, and ends: why, for people.
    Refused(String),
}
