//! Foreign memory on a simulated card.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use residency::{Bytes, Holder};

use crate::size::parse_bytes;

/// Memory demand of other processes on a simulated card. Tests and scripts keep a clone and change it while the card
/// runs. A demand is met as far as memory is free; the rest is allocated as soon as memory is freed.
#[derive(Clone, Debug, Default)]
pub struct SimulatedWorld(Arc<Mutex<World>>);

#[derive(Debug, Default)]
struct World {
    wanted: Vec<Holder>,
    later: Vec<Later>,
    script: Option<PathBuf>,
    scripted: Vec<Holder>,
}

#[derive(Debug)]
struct Later {
    at_ms: u64,
    holder: Holder,
}

impl SimulatedWorld {
    /// A world without foreign holders.
    pub fn new() -> SimulatedWorld {
        SimulatedWorld::default()
    }

    /// Sets the demand of `name` to `bytes` from now on; zero removes it.
    pub fn hold(&self, name: &str, pid: Option<u32>, bytes: Bytes) {
        set(
            &mut self.lock().wanted,
            Holder {
                name: name.to_owned(),
                pid,
                bytes,
            },
        );
    }

    /// Sets the demand of `name` from `at_ms` of the card's clock on. Takes effect at the card's next memory reading.
    pub fn hold_from(&self, at_ms: u64, name: &str, pid: Option<u32>, bytes: Bytes) {
        let holder = Holder {
            name: name.to_owned(),
            pid,
            bytes,
        };
        let mut world = self.lock();
        world.later.push(Later { at_ms, holder });
        world.later.sort_by_key(|later| later.at_ms);
    }

    /// Reads further holders from a file at each memory reading: lines of `name size`, or `name pid size`. Another
    /// process changes the world by writing it. A missing file has no holders, and malformed lines are skipped.
    pub fn follow(&self, script: PathBuf) {
        self.lock().script = Some(script);
    }

    /// The demands at this time.
    pub(crate) fn wanted(&self, now_ms: u64) -> Vec<Holder> {
        let mut world = self.lock();
        let due = world.later.partition_point(|later| later.at_ms <= now_ms);
        let changes: Vec<Later> = world.later.drain(..due).collect();
        for change in changes {
            set(&mut world.wanted, change.holder);
        }
        // Read each time rather than by its time stamp: two writes may share one, and the file has few lines. A read
        // during a rewrite shows no holders once.
        if let Some(script) = &world.script {
            world.scripted = std::fs::read_to_string(script)
                .map(|text| holders(&text))
                .unwrap_or_default();
        }
        world.wanted.iter().chain(&world.scripted).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        // The values are plain: a panic of a test that holds the lock leaves none of them invalid.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn set(holders: &mut Vec<Holder>, holder: Holder) {
    holders.retain(|known| known.name != holder.name);
    if holder.bytes > Bytes::ZERO {
        holders.push(holder);
    }
}

fn holders(text: &str) -> Vec<Holder> {
    text.lines()
        .filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                [name, size] => Some((*name, None, *size)),
                [name, pid, size] => Some((*name, Some(pid.parse().ok()?), *size)),
                _ => None,
            }
        })
        .filter_map(|(name, pid, size)| {
            Some(Holder {
                name: name.to_owned(),
                pid,
                bytes: parse_bytes(size).ok()?,
            })
        })
        .collect()
}
