//! Where time goes: how long the parts of a start, a load or an unload took, told in the log.

use std::borrow::Cow;
use std::time::{Duration, Instant};

/// Tells how long each part of something took, one after the other, in events of the target `timeline` at the level debug:
/// `of` names the whole, `part` what has just ended, `ms` the milliseconds that it took. The filter `info,timeline=debug`
/// shows them; `tests/gpu/timeline.py` makes a table of such a log.
#[derive(Clone, Debug)]
pub struct Timeline {
    of: Cow<'static, str>,
    began: Instant,
    last: Instant,
}

impl Timeline {
    /// Begins now.
    pub fn begin(of: impl Into<Cow<'static, str>>) -> Timeline {
        let now = Instant::now();
        Timeline {
            of: of.into(),
            began: now,
            last: now,
        }
    }

    /// A part has ended; the next begins. Returns how long it took.
    pub fn part(&mut self, part: &'static str) -> Duration {
        let took = self.last.elapsed();
        self.last += took;
        Timeline::tell(&self.of, part, took);
        took
    }

    /// All of it has ended, under the name `whole`. Returns how long it took.
    pub fn end(self) -> Duration {
        let took = self.began.elapsed();
        Timeline::tell(&self.of, "whole", took);
        took
    }

    /// What was measured apart: on another thread, or over many short times.
    pub fn tell(of: &str, part: &str, took: Duration) {
        let ms = took.as_secs_f64() * 1e3;
        tracing::debug!(target: "timeline", of, part, ms);
    }
}
