//! How panics are reported. An expected panic, of a library on damaged input, is caught without a report. Of others,
//! one a second is reported with its backtrace, so that repeated panics cannot fill the disk.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Least time between two reports.
const INTERVAL: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether a panic of this thread is expected now.
    static IS_EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// A panic that was expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected;

/// Bounds the reports of this process, which are made by `report`. To be called once, at its start.
pub fn bound_reports(report: impl Fn(&PanicHookInfo<'_>) + Send + Sync + 'static) {
    let reports = Mutex::new(Reports::default());
    set_hook(Box::new(move |panic| {
        if IS_EXPECTED.get() {
            return;
        }
        // A panic while it is locked leaves the numbers valid.
        let left_out = reports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .begin(Instant::now());
        if let Some(left_out) = left_out {
            report(panic);
            if left_out > 0 {
                tracing::error!(
                    left_out,
                    "panics before this one were not reported, at most one a second is"
                );
            }
        }
    }));
}

/// Runs work that may panic on bad input. After a panic nothing that the work has changed may be used.
///
/// # Errors
/// When it panics.
pub fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Expected> {
    let before = IS_EXPECTED.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    IS_EXPECTED.set(before);
    done.map_err(|_| Expected)
}

/// Time of the last report, and the number of panics that were left out since.
#[derive(Default)]
struct Reports {
    last: Option<Instant>,
    left_out: u64,
}

impl Reports {
    /// Whether a panic is reported now; the number is that of panics left out since the last report.
    fn begin(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < INTERVAL) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_panic_a_second_is_reported_and_the_others_are_counted() {
        let mut reports = Reports::default();
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let told: Vec<_> = [0, 1, 999, 1000, 1001, 9000]
            .map(|ms| reports.begin(at(ms)))
            .into();
        assert_eq!(told, [Some(0), None, None, Some(2), None, Some(1)]);
    }

    #[test]
    fn an_expected_panic_is_caught_and_others_are_expected_no_longer() {
        assert_eq!(caught(|| 7), Ok(7));
        let inner = || caught(|| std::panic::panic_any(0)).is_err_and(|_: Expected| IS_EXPECTED.get());
        assert_eq!(caught(inner), Ok(true));
        assert!(!IS_EXPECTED.get());
    }
}
