//! Interfaces that the card depends on: event sink, clock, fault injection.

use std::fmt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use residency::{Bytes, Millis};

use crate::messages::{Event, Ticket};

/// Receives a card's events. Calls must not block, but for [`Link::flush`], [`Link::wait_until_taken`] and [`Link::next_offer`].
pub trait Link {
    /// Sends an event.
    fn emit(&mut self, event: Event);
    /// Waits until the supervisor will hear of what was sent, whatever happens to this process.
    fn flush(&mut self) {}
    /// Whether this attempt is cancelled. Polled frequently.
    fn cancelled(&self, ticket: Ticket) -> bool;
    /// Waits while an attempt that has delivered pieces of so many bytes has to ([`must_wait`](crate::messages::must_wait)) and is not
    /// cancelled.
    fn wait_until_taken(&mut self, _ticket: Ticket, _delivered: Bytes) {}
    /// Waits for the next offer of the other card that runs the stage of this attempt, each once and in their order; `None`: the
    /// attempt is cancelled.
    fn next_offer(&mut self, _ticket: Ticket) -> Option<bytes::Bytes> {
        None
    }
}

/// A monotonic clock. The supervisor plans on the card's ledgers, so both use the same epoch.
pub trait Clock {
    /// Milliseconds since the epoch; never decreases.
    fn now(&self) -> Millis;

    /// The same time in microseconds.
    fn micros(&self) -> u64 {
        self.now().0.saturating_mul(1000)
    }

    /// Blocks the thread for this time.
    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

impl fmt::Debug for dyn Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now()).finish()
    }
}

/// Milliseconds since 1970, based on a monotonic clock: setting the system's clock back has no effect.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    started: Instant,
    started_at_micros: u64,
}

impl SystemClock {
    /// A clock starting at the system's time.
    pub fn new() -> SystemClock {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        SystemClock {
            started: Instant::now(),
            started_at_micros: u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX),
        }
    }
}

impl Default for SystemClock {
    fn default() -> SystemClock {
        SystemClock::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Millis {
        Millis(self.micros() / 1000)
    }

    fn micros(&self) -> u64 {
        let gone = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.started_at_micros.saturating_add(gone)
    }
}

/// Carries out injected faults of the process.
pub trait Faults {
    /// Ends the process at once, like a crash. If it returns, the card counts as lost.
    fn die(&self, place: &str);
    /// Blocks forever, ignoring cancellation. If it returns, the card continues.
    fn hang(&self, place: &str);
    /// Tries what a process that strangers have taken over would; nothing, where there is no process to escape from.
    fn escape(&self, place: &str) {
        let _ = place;
    }
}

impl fmt::Debug for dyn Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faults")
    }
}

/// Fault injection in a worker process.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessFaults;

impl Faults for ProcessFaults {
    fn die(&self, place: &str) {
        tracing::error!(place, "an injected fault ends the worker");
        std::process::abort();
    }

    fn hang(&self, place: &str) {
        tracing::error!(place, "an injected fault blocks the worker");
        loop {
            std::thread::park();
        }
    }
}
