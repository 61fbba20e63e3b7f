//! How often something is logged that clients can cause at will: it must not fill the disk.

use std::time::Duration;

use tokio::time::Instant;

/// The time of the last line.
#[derive(Debug, Default)]
pub struct LogInterval(Option<Instant>);

impl LogInterval {
    /// Nothing was logged yet.
    pub const fn new() -> LogInterval {
        LogInterval(None)
    }

    /// Whether a line may be logged now, so long after the last one. Then the next interval begins.
    pub fn allow(&mut self, interval: Duration) -> bool {
        let is_due = self.0.is_none_or(|last| last.elapsed() >= interval);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_is_logged_once_in_an_interval() {
        let (mut log, second) = (LogInterval::new(), Duration::from_secs(1));
        assert!(log.allow(second) && !log.allow(second));
        tokio::time::advance(second).await;
        assert!(log.allow(second));
    }
}
