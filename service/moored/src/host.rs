//! Memory of the machine that the service runs on: models are read through its page cache, and results are kept in it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use api::v1;
use gpu::{SystemMemory, SystemReader};
use residency::Bytes;

use crate::process::supervisor::WorkerPids;

/// Time between two readings of the available memory.
const INTERVAL: Duration = Duration::from_secs(5);
/// Memory is low when less than one part in this many is available.
const LOW_DIVISOR: u64 = 20;

/// Reads the machine's memory.
pub(crate) struct Host {
    /// `None` where the system does not report its memory.
    reader: Mutex<Option<SystemReader>>,
}

impl Host {
    pub(crate) fn new() -> Host {
        let reader = SystemReader::new().inspect_err(|error| {
            tracing::warn!(%error, "the machine's memory is not shown in the status");
        });
        Host {
            reader: Mutex::new(reader.ok()),
        }
    }

    /// The current figures; zeros where the system does not report its memory.
    pub(crate) fn read(&self, workers: &WorkerPids) -> v1::HostMemory {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(reader) = reader.as_mut() else {
            return v1::HostMemory::default();
        };
        let memory = reader.read().ok();
        let pids = workers.pids().filter(|pid| *pid != 0);
        let workers: Bytes = pids.map(|pid| reader.resident(pid)).sum();
        v1::HostMemory {
            total_bytes: memory.map_or(0, |memory| memory.total.0),
            available_bytes: memory.map_or(0, |memory| memory.available.0),
            service_bytes: reader.resident(std::process::id()).0,
            workers_bytes: workers.0,
        }
    }
}

/// Logs when the machine runs low on memory, and when it no longer does.
pub(crate) async fn watch(host: std::sync::Arc<Host>, workers: WorkerPids) {
    let mut looks = tokio::time::interval(INTERVAL);
    let mut was_low = false;
    loop {
        looks.tick().await;
        let now = host.read(&workers);
        let is_low = is_low(&SystemMemory {
            total: Bytes(now.total_bytes),
            available: Bytes(now.available_bytes),
        });
        if is_low != was_low {
            let (available, total) = (Bytes(now.available_bytes), Bytes(now.total_bytes));
            let (service, workers) = (Bytes(now.service_bytes), Bytes(now.workers_bytes));
            if is_low {
                tracing::warn!(%available, %total, %service, %workers,
                    "the machine is short of memory: loads become slow, and the system may end processes; see what else runs \
                     on it, or lower queue.latents, queue.text_cache and limits.results");
            } else {
                tracing::info!(%available, %total, %service, %workers, "the machine has memory again");
            }
            was_low = is_low;
        }
    }
}

fn is_low(memory: &SystemMemory) -> bool {
    memory.available < Bytes(memory.total.0 / LOW_DIVISOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_low_when_less_than_a_twentieth_is_available() {
        let with = |available| SystemMemory {
            total: Bytes::gib(20),
            available,
        };
        assert!(is_low(&with(Bytes::gib(1) - Bytes(1))));
        assert!(!is_low(&with(Bytes::gib(1))));
        assert!(!is_low(&SystemMemory {
            total: Bytes::ZERO,
            available: Bytes::ZERO
        }));
    }
}
