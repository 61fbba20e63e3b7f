//! Timing of the phases of a start, a load or an unload, in the log.

use std::borrow::Cow;
use std::time::{Duration, Instant};

/// Logs the duration of consecutive parts of an operation, as events of the target `timeline` at level debug: `of`
/// names the operation, `part` the part that ended, `ms` its milliseconds. The filter `info,timeline=debug` shows
/// them; `tests/gpu/timeline.py` makes a table of such a log.
#[derive(Clone, Debug)]
pub struct Timeline {
    of: Cow<'static, str>,
    began: Instant,
    last: Instant,
}

impl Timeline {
    /// Starts the timer.
    pub fn begin(of: impl Into<Cow<'static, str>>) -> Timeline {
        let now = Instant::now();
        Timeline {
            of: of.into(),
            began: now,
            last: now,
        }
    }

    /// Ends a part and starts the next. Returns the part's duration.
    pub fn part(&mut self, part: &'static str) -> Duration {
        let took = self.last.elapsed();
        self.last += took;
        Timeline::log(&self.of, part, took);
        took
    }

    /// Ends the operation, logged as part `whole`. Returns its duration.
    pub fn end(self) -> Duration {
        let took = self.began.elapsed();
        Timeline::log(&self.of, "whole", took);
        took
    }

    /// Logs a duration that was measured elsewhere: on another thread, or accumulated.
    pub fn log(of: &str, part: &str, took: Duration) {
        let ms = took.as_secs_f64() * 1e3;
        tracing::debug!(target: "timeline", of, part, ms);
    }
}
