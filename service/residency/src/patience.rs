//! Patience: how long a stage waits for memory that no eviction of ours can free. A state machine without a clock.

use serde::{Deserialize, Serialize};

use crate::nouns::Millis;
use crate::plan::WaitCause;

/// Wait budgets, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Patience {
    /// For evicted bytes that the driver does not show as free yet.
    pub after_eviction_ms: u64,
    /// For memory that other processes hold or have reserved.
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

/// A wait under way. Each cause spends its own budget. Waiting for our own stages spends none: that is queueing,
/// bounded by the request's deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    cause: WaitCause,
    /// Time up to here has been charged to a budget.
    charged_until: Millis,
    /// Remaining budgets.
    budget: Patience,
}

impl Wait {
    /// Starts a wait.
    pub fn new(now: Millis, cause: WaitCause, patience: &Patience) -> Wait {
        Wait {
            cause,
            charged_until: now,
            budget: *patience,
        }
    }

    /// Sets the cause after another plan. The time until `now` is charged to the previous cause.
    pub fn update(&mut self, now: Millis, cause: WaitCause) {
        self.budget = self.charged(now);
        self.charged_until = self.charged_until.max(now);
        self.cause = cause;
    }

    /// Milliseconds left for the current cause. While the wait is for our own stages, the budget for foreign memory,
    /// which is not being spent.
    pub fn left(&self, now: Millis) -> u64 {
        let budget = self.charged(now);
        match self.cause {
            WaitCause::LateEviction => budget.after_eviction_ms,
            WaitCause::Leases | WaitCause::Foreign | WaitCause::Reservation => budget.foreign_ms,
        }
    }

    /// Whether the budget of the current cause is spent.
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
