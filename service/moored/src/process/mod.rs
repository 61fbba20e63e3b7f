//! Supervisor and worker: two processes of one build. They exchange the types of [`engine::messages`] over the worker's
//! standard input and output. The first frame to a worker is a [`Configuration`], each that follows a
//! [`Command`](engine::messages::Command) without the inputs that the worker has ([`inputs`]); a worker writes [`FromWorker`] alone.

use std::path::PathBuf;

use config::LogSettings;
use engine::messages::Event;
use gpu::{DeviceSpec, MemoryProfile};
use pipelines::{Fp8Products, Int8Products};
use residency::Bytes;
use serde::{Deserialize, Serialize};

use confinement::tries::Tried;
use confinement::{Confinement, Held};

pub(crate) mod confinement;
pub(crate) mod frames;
mod inputs;
pub(crate) mod supervisor;
pub(crate) mod trial;
pub(crate) mod worker;

/// Configuration of a card's workers, sent to each at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkerSettings {
    /// The card that it owns.
    pub(crate) device: DeviceSpec,
    /// Bytes that are never planned into.
    pub(crate) headroom: Bytes,
    /// The most of the machine's memory for streamed blocks; `None`: what is available, less a share for others.
    pub(crate) host_memory: Option<Bytes>,
    /// How the card's memory is managed.
    pub(crate) memory: MemoryProfile,
    /// Settings of the worker's log, whose lines mix with the supervisor's.
    pub(crate) log: LogSettings,
    /// Lock file of the worker; `None` for a card that cannot be shared by mistake.
    pub(crate) lock_file: Option<PathBuf>,
    /// Folder of compiled cuDNN plans.
    pub(crate) plans_folder: PathBuf,
    /// Which quantized weights are multiplied in fp8, and in int8; the supervisor predicts scratch by the same.
    pub(crate) fp8_products: Fp8Products,
    pub(crate) int8_products: Int8Products,
    /// What it may do.
    pub(crate) confinement: Confinement,
}

/// The first frame to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Configuration {
    /// Generation of the worker on its card, from 1.
    pub(crate) generation: u64,
    /// The configuration common to the card's workers.
    pub(crate) settings: WorkerSettings,
    /// Whether it opens no card, and tells what it was refused, as `moored doctor` asks.
    pub(crate) is_trial: bool,
}

/// Messages of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum FromWorker {
    /// How it is confined: the first message, before it opens its card.
    Confined(Held),
    /// What a trial was refused.
    Tried(Vec<Tried>),
    /// An event of its card.
    Event(Event),
    /// It cannot open its card, or has lost it, and exits: the reason, for display.
    Refused(String),
}

/// Whether this process was started with SIGHUP ignored, as `nohup` does: its lowest bit in `SigIgn` (`proc(5)`).
pub(crate) fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignores_hangup(&status)
}

fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_hangup_is_read_from_the_mask_of_ignored_signals() {
        assert!(ignores_hangup(
            "SigBlk:\t0000000000000001\nSigIgn:\t0000000000001001\n"
        ));
        assert!(!ignores_hangup(
            "SigBlk:\t0000000000000001\nSigIgn:\t0000000000001000\n"
        ));
        assert!(!ignores_hangup(""));
    }
}
