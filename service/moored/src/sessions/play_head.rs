//! How far the client has played, by its own word or by the clock.

use std::time::Duration;

use tokio::time::Instant;

/// The play head stood still because sound was not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) at_sample: u64,
    pub(crate) length: Duration,
}

/// The play head of a session, in samples for each channel.
#[derive(Debug)]
pub(crate) struct PlayHead {
    samples_per_second: u32,
    by_client: bool,
    /// What the client said last, or where the clock was set last.
    place: u64,
    /// Since when it moves; `None`: it stands still.
    moving_since: Option<Instant>,
    starved_since: Option<Instant>,
}

impl PlayHead {
    /// At the first sample, standing still.
    pub(crate) fn new(samples_per_second: u32, by_client: bool) -> PlayHead {
        PlayHead {
            samples_per_second,
            by_client,
            place: 0,
            moving_since: None,
            starved_since: None,
        }
    }

    /// The client says where it is; never behind where it was, nor ahead of what it was sent.
    pub(crate) fn told(&mut self, place: u64, sent: u64) {
        if self.by_client {
            self.place = place.clamp(self.place, sent.max(self.place));
        }
    }

    /// Where it is, given how much was sent: it cannot pass that.
    pub(crate) fn place(&self, now: Instant, sent: u64) -> u64 {
        let moved = self
            .moving_since
            .map_or(Duration::ZERO, |since| now.duration_since(since));
        let moved = moved.as_nanos() * u128::from(self.samples_per_second) / 1_000_000_000;
        let moved = u64::try_from(moved).unwrap_or(u64::MAX);
        self.place.saturating_add(moved).min(sent.max(self.place))
    }

    /// Whether it moves by itself.
    pub(crate) fn is_moving(&self) -> bool {
        self.moving_since.is_some()
    }

    /// Stands still where it has come to the end of what was sent, for whatever reason. How long ago it would have passed that.
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

    /// Sound was sent: it moves, or moves again; the gap that has ended, if there was one.
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

    /// Nothing is there to be sent. Whether the head has come to the end of what was sent; then it stands still, and if that
    /// `is_gap`, a gap has begun.
    pub(crate) fn nothing_there(&mut self, now: Instant, sent: u64, is_gap: bool) -> bool {
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
    async fn by_the_clock_it_moves_from_the_first_sound_and_stands_where_none_is_there() {
        let mut head = PlayHead::new(1000, false);
        let start = Instant::now();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(head.place(Instant::now(), 0), 0, "nothing has sounded");
        assert!(
            !head.nothing_there(Instant::now(), 0, true),
            "the first sound is not a gap"
        );
        assert_eq!(head.sent(Instant::now()), None);
        tokio::time::advance(Duration::from_millis(250)).await;
        assert_eq!(head.place(Instant::now(), 2000), 250);
        assert!(!head.nothing_there(Instant::now(), 2000, true));
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(
            head.place(Instant::now(), 2000),
            2000,
            "it cannot pass what was sent"
        );
        assert!(head.nothing_there(Instant::now(), 2000, true));
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
    async fn what_was_not_read_in_time_is_not_made_up_for() {
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
    async fn by_the_client_it_is_where_the_client_says_within_what_was_sent() {
        let mut head = PlayHead::new(1000, true);
        head.sent(Instant::now());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(head.place(Instant::now(), 500), 0);
        head.told(300, 500);
        head.told(200, 500);
        assert_eq!(head.place(Instant::now(), 500), 300, "it does not go back");
        head.told(u64::MAX, 500);
        assert_eq!(head.place(Instant::now(), 500), 500);
    }
}
