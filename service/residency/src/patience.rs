//! Patience: how long a stage waits for memory that is not ours to give. A state, not a sleep.

use serde::{Deserialize, Serialize};

use crate::nouns::Millis;
use crate::plan::WaitCause;

/// Two budgets, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patience {
    /// For evicted bytes that the driver does not show as free yet.
    pub after_eviction_ms: u64,
    /// For memory that others hold, or have reserved.
    pub foreign_ms: u64,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            after_eviction_ms: 5_000,
            foreign_ms: 7_000,
        }
    }
}

/// A wait under way. Each cause spends its own budget; waiting for our own stages spends none, as that is a queue, and
/// a queue is bounded by the request's deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    started: Millis,
    cause: WaitCause,
    /// Time up to here has been charged.
    charged_until: Millis,
    /// What is left of both budgets.
    budget: Patience,
}

impl Wait {
    /// A wait starts.
    pub fn new(now: Millis, cause: WaitCause, patience: &Patience) -> Wait {
        Wait {
            started: now,
            cause,
            charged_until: now,
            budget: *patience,
        }
    }

    /// When it started.
    pub fn started(&self) -> Millis {
        self.started
    }

    /// What it is waiting for at the moment.
    pub fn cause(&self) -> WaitCause {
        self.cause
    }

    /// The planner answered again. Time until now is charged to the cause until now.
    pub fn update(&mut self, now: Millis, cause: WaitCause) {
        self.budget = self.charged(now);
        self.charged_until = self.charged_until.max(now);
        self.cause = cause;
    }

    /// Milliseconds left for the present cause. While the wait is for our own stages, this is what is left for others,
    /// and it stands still.
    pub fn left(&self, now: Millis) -> u64 {
        let budget = self.charged(now);
        match self.cause {
            WaitCause::LateEviction => budget.after_eviction_ms,
            WaitCause::Leases | WaitCause::Foreign | WaitCause::Reservation => budget.foreign_ms,
        }
    }

    /// Whether the present cause has used up its budget.
    pub fn is_over(&self, now: Millis) -> bool {
        self.cause != WaitCause::Leases && self.left(now) == 0
    }

    fn charged(&self, now: Millis) -> Patience {
        let gone = now.since(self.charged_until);
        let mut budget = self.budget;
        match self.cause {
            WaitCause::LateEviction => {
                budget.after_eviction_ms = budget.after_eviction_ms.saturating_sub(gone)
            }
            WaitCause::Foreign | WaitCause::Reservation => {
                budget.foreign_ms = budget.foreign_ms.saturating_sub(gone)
            }
            WaitCause::Leases => {}
        }
        budget
    }
}
