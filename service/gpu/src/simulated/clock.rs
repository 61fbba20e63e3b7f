//! Time of a simulated card.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What a simulated card asks for the time, and lets time go by with.
pub trait SimulatedClock: Send + Sync {
    /// Milliseconds since an epoch of the clock's own.
    fn now_ms(&self) -> u64;

    /// Returns when so many milliseconds have gone by on this clock.
    fn sleep_ms(&self, milliseconds: u64);
}

/// The time of this machine: transfers take as long as they say.
#[derive(Clone, Copy, Debug)]
pub struct RealClock(Instant);

impl Default for RealClock {
    fn default() -> RealClock {
        RealClock(Instant::now())
    }
}

impl SimulatedClock for RealClock {
    fn now_ms(&self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }

    fn sleep_ms(&self, milliseconds: u64) {
        std::thread::sleep(Duration::from_millis(milliseconds));
    }
}

/// Time that goes by only when somebody says so. A sleeper moves it on by itself, so that nothing waits. All
/// clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Moves time on.
    pub fn advance_ms(&self, milliseconds: u64) {
        self.0.fetch_add(milliseconds, Relaxed);
    }
}

impl SimulatedClock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.0.load(Relaxed)
    }

    fn sleep_ms(&self, milliseconds: u64) {
        self.advance_ms(milliseconds);
    }
}
