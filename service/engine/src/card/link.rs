//! What the card is given from outside: somebody who listens, and the time.

use std::fmt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use residency::Millis;

use crate::messages::{Event, Ticket};

/// Whoever listens to a card. Neither call may block: the card waits for nobody.
pub trait Link {
    /// Something happened.
    fn emit(&mut self, event: Event);
    /// Whether nobody wants this attempt any more. Asked often.
    fn cancelled(&self, ticket: Ticket) -> bool;
}

/// The time. The supervisor plans on ledgers of the card, so both count from the same epoch.
pub trait Clock {
    /// Milliseconds since the epoch; never less than before.
    fn now(&self) -> Millis;

    /// The same point in microseconds, for what takes less than a millisecond.
    fn micros(&self) -> u64 {
        self.now().0.saturating_mul(1000)
    }

    /// Lets so much time pass.
    fn sleep(&self, duration: Duration) {
        std::thread::sleep(duration);
    }
}

impl fmt::Debug for dyn Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Clock").field(&self.now()).finish()
    }
}

/// Milliseconds since 1970, read once and counted on from there: a clock that is set back does not turn it back.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    started: Instant,
    started_at_micros: u64,
}

impl SystemClock {
    /// Reads the system's clock.
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

/// Carries out what a simulated card's settings say must go wrong. Real cards need no help with that.
pub trait Faults {
    /// Ends the process at once, as a crash does. Where it returns, the card counts as lost.
    fn die(&self, place: &str);
    /// Does not come back, whoever cancels. Where it returns, the card goes on.
    fn hang(&self, place: &str);
}

impl fmt::Debug for dyn Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Faults")
    }
}

/// Faults as a worker process suffers them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessFaults;

impl Faults for ProcessFaults {
    fn die(&self, place: &str) {
        tracing::error!(place, "the simulated card says: die here");
        std::process::abort();
    }

    fn hang(&self, place: &str) {
        tracing::error!(place, "the simulated card says: hang here");
        loop {
            std::thread::park();
        }
    }
}
