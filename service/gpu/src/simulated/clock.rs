//! Clock of a simulated card.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A source of time that a test can control.
pub trait SimulatedClock: Send + Sync {
    /// Milliseconds since an epoch of the clock's choice.
    fn now_ms(&self) -> u64;

    /// Sleeps for this many milliseconds of this clock.
    fn sleep_ms(&self, milliseconds: u64);
}

/// Wall-clock time: transfers take as long as configured.
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

/// A clock that advances only by calls. Sleeping advances it, so that nothing blocks. All clones share one time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Advances the clock.
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
