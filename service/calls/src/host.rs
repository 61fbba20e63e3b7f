//! Memory of the machine that the service runs on: models are read through its page cache, and results are kept in it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gpu::{SystemMemory, SystemReader};
use residency::Bytes;

/// Time between two readings of the available memory.
const INTERVAL: Duration = Duration::from_secs(5);
/// Memory is low when less than one part in this many is available.
const LOW_DIVISOR: u64 = 20;

/// Process ids of the workers, in the order of the cards; 0 where none runs.
#[derive(Clone, Debug)]
pub struct WorkerPids(Arc<[AtomicU32]>);

impl WorkerPids {
    /// No worker runs yet.
    pub fn new(cards: usize) -> WorkerPids {
        WorkerPids((0..cards).map(|_| AtomicU32::new(0)).collect())
    }

    /// The process of each card; 0 where none runs.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(|pid| pid.load(Ordering::Relaxed))
    }

    /// Sets the process of a card's worker; `None`: the worker has ended.
    pub fn set(&self, card: usize, pid: Option<u32>) {
        if let Some(own) = self.0.get(card) {
            own.store(pid.unwrap_or(0), Ordering::Relaxed);
        }
    }
}

/// Memory of the machine, and of our processes in it. Zeros where the system does not report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    pub total: Bytes,
    pub available: Bytes,
    /// Resident in this process.
    pub service: Bytes,
    /// Resident in all workers.
    pub workers: Bytes,
}

/// Reads the machine's memory.
pub struct Host {
    /// `None` where the system does not report its memory.
    reader: Mutex<Option<SystemReader>>,
}

impl Default for Host {
    fn default() -> Host {
        Host::new()
    }
}

impl Host {
    /// A reader. It logs a warning where the system does not report its memory.
    pub fn new() -> Host {
        let reader = SystemReader::new().inspect_err(|error| {
            tracing::warn!(%error, "the machine's memory is not shown in the status");
        });
        Host {
            reader: Mutex::new(reader.ok()),
        }
    }

    /// The current figures; zeros where the system does not report its memory.
    pub fn read(&self, workers: &WorkerPids) -> HostMemory {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(reader) = reader.as_mut() else {
            return HostMemory::default();
        };
        let memory = reader.read().ok();
        let pids = workers.pids().filter(|pid| *pid != 0);
        let workers: Bytes = pids.map(|pid| reader.resident(pid)).sum();
        HostMemory {
            total: memory.map_or(Bytes::ZERO, |memory| memory.total),
            available: memory.map_or(Bytes::ZERO, |memory| memory.available),
            service: reader.resident(std::process::id()),
            workers,
        }
    }
}

/// Logs when the machine runs low on memory, and when it no longer does.
pub async fn watch(host: Arc<Host>, workers: WorkerPids) {
    let mut looks = tokio::time::interval(INTERVAL);
    let mut was_low = false;
    loop {
        looks.tick().await;
        let now = host.read(&workers);
        let is_low = is_low(&SystemMemory {
            total: now.total,
            available: now.available,
        });
        if is_low != was_low {
            let HostMemory {
                total,
                available,
                service,
                workers,
            } = now;
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
