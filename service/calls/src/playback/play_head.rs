//! Play head: how far the client has played, as it reports or by the clock.

use std::time::Duration;

use tokio::time::Instant;

/// A pause of the play head because sound was missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    pub at_sample: u64,
    pub length: Duration,
}

/// The play head of a session, in samples for each channel.
#[derive(Debug)]
pub(crate) struct PlayHead {
    samples_per_second: u32,
    by_client: bool,
    /// The sample that the client reported last, or at which the clock was set last.
    place: u64,
    /// The time at which it was at `place`, while it moves by the clock; `None`: it stands still.
    moving_since: Option<Instant>,
    starved_since: Option<Instant>,
}

impl PlayHead {
    /// A stopped play head at the first sample.
    pub(crate) fn new(samples_per_second: u32, by_client: bool) -> PlayHead {
        PlayHead {
            samples_per_second,
            by_client,
            place: 0,
            moving_since: None,
            starved_since: None,
        }
    }

    /// Sets the place that the client reports, clamped between the last place and the sent samples.
    pub(crate) fn set_by_client(&mut self, place: u64, sent: u64) {
        if self.by_client {
            self.place = place.clamp(self.place, sent.max(self.place));
        }
    }

    /// The sample that sounds now. It cannot be later than `sent`, the number of samples that were sent.
    pub(crate) fn place(&self, now: Instant, sent: u64) -> u64 {
        let elapsed = self
            .moving_since
            .map_or(Duration::ZERO, |since| now.duration_since(since));
        let samples = elapsed.as_nanos() * u128::from(self.samples_per_second) / 1_000_000_000;
        let moved = u64::try_from(samples).unwrap_or(u64::MAX);
        self.place.saturating_add(moved).min(sent.max(self.place))
    }

    /// Whether it moves by itself.
    pub(crate) fn is_moving(&self) -> bool {
        self.moving_since.is_some()
    }

    /// Stops the head at the end of the sent sound, if it has reached it. Returns how long ago it would have passed
    /// that end.
    pub(crate) fn stop_at(&mut self, now: Instant, sent: u64) -> Duration {
        let Some(since) = self.moving_since.filter(|_| self.place(now, sent) >= sent) else {
            return Duration::ZERO;
        };
        let left = sent.saturating_sub(self.place);
        let nanos = left.saturating_mul(1_000_000_000) / u64::from(self.samples_per_second.max(1));
        (self.place, self.moving_since) = (sent, Some(now));
        now.duration_since(since)
            .saturating_sub(Duration::from_nanos(nanos))
    }

    /// Sound was sent, so the play head moves. Returns the gap that has ended, if there was one.
    pub(crate) fn sent(&mut self, now: Instant) -> Option<Gap> {
        if !self.by_client && self.moving_since.is_none() {
            self.moving_since = Some(now);
        }
        let since = self.starved_since.take()?;
        Some(Gap {
            at_sample: self.place,
            length: now.duration_since(since),
        })
    }

    /// Stops the head if it has reached the end of the sent sound, and returns whether it has; if `is_gap`, a gap
    /// begins.
    pub(crate) fn stop_if_exhausted(&mut self, now: Instant, sent: u64, is_gap: bool) -> bool {
        let place = self.place(now, sent);
        if sent == 0 || place < sent {
            return false;
        }
        self.place = place;
        self.moving_since = None;
        if is_gap {
            self.starved_since.get_or_insert(now);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_clock_moves_the_play_head_and_stops_it_where_sound_is_missing() {
        let mut head = PlayHead::new(1000, false);
        let start = Instant::now();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(head.place(Instant::now(), 0), 0, "nothing has sounded");
        assert!(
            !head.stop_if_exhausted(Instant::now(), 0, true),
            "the first sound is not a gap"
        );
        assert_eq!(head.sent(Instant::now()), None);
        tokio::time::advance(Duration::from_millis(250)).await;
        assert_eq!(head.place(Instant::now(), 2000), 250);
        assert!(!head.stop_if_exhausted(Instant::now(), 2000, true));
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(
            head.place(Instant::now(), 2000),
            2000,
            "it cannot pass what was sent"
        );
        assert!(head.stop_if_exhausted(Instant::now(), 2000, true));
        tokio::time::advance(Duration::from_millis(40)).await;
        let gap = Gap {
            at_sample: 2000,
            length: Duration::from_millis(40),
        };
        assert_eq!(head.sent(Instant::now()), Some(gap));
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(head.place(Instant::now(), 4000), 2100);
        assert!(start < Instant::now());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stopped_play_head_resumes_where_it_stopped() {
        let mut head = PlayHead::new(1000, false);
        head.sent(Instant::now());
        tokio::time::advance(Duration::from_millis(400)).await;
        assert_eq!(head.stop_at(Instant::now(), 500), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(25)).await;
        assert_eq!(head.stop_at(Instant::now(), 500), Duration::from_millis(24_900));
        tokio::time::advance(Duration::from_millis(100)).await;
        assert_eq!(head.place(Instant::now(), 2000), 600);
    }

    #[tokio::test(start_paused = true)]
    async fn the_client_sets_the_play_head_within_the_sent_sound() {
        let mut head = PlayHead::new(1000, true);
        head.sent(Instant::now());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(head.place(Instant::now(), 500), 0);
        head.set_by_client(300, 500);
        head.set_by_client(200, 500);
        assert_eq!(head.place(Instant::now(), 500), 300, "it does not go back");
        head.set_by_client(u64::MAX, 500);
        assert_eq!(head.place(Instant::now(), 500), 500);
    }
}
