//! The end of a service: its signals, and the time that running jobs have.

use std::time::Duration;

use engine::queue::Queue;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::service_unit;

/// How a service ends: its times, and who hears of each.
pub(crate) struct End {
    /// How long it is not ready before it drains.
    pub(crate) notice: Duration,
    /// How long running jobs have.
    pub(crate) drain: Duration,
    /// It is not ready.
    pub(crate) leaving: watch::Sender<bool>,
    /// It drains.
    pub(crate) stopping: watch::Sender<bool>,
    /// It has drained.
    pub(crate) stopped: watch::Sender<bool>,
}

/// The first signal drains: health says that the service is not ready, for the notice, then there are no new jobs, and running ones
/// finish until the deadline. The second signal ends them now.
///
/// # Errors
/// When signals cannot be handled.
pub(crate) fn shut_down(
    queue: Queue,
    end: End,
    stop: Option<oneshot::Receiver<()>>,
) -> std::io::Result<impl Future<Output = ()>> {
    let mut signals = Signals::new()?;
    Ok(async move {
        let asked = async {
            match stop {
                Some(stop) => drop(stop.await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = signals.end_or_hangup() => {}
            () = asked => {}
        }
        end.leaving.send_replace(true);
        let mut drain = end.drain;
        if !end.notice.is_zero() {
            tracing::info!(
                "leaving: not ready, and jobs are taken for {} more s; press Ctrl-C again to stop now",
                end.notice.as_secs_f32()
            );
            tokio::select! {
                () = tokio::time::sleep(end.notice) => {}
                () = signals.end() => drain = Duration::ZERO,
            }
        }
        let deadline = Instant::now() + drain;
        let drained = queue.drain(deadline);
        end.stopping.send_replace(true);
        tracing::info!(
            "stopping: waiting up to {} s for running jobs; press Ctrl-C again to stop now",
            drain.as_secs()
        );
        service_unit::tell_stopping(drain);
        tokio::select! {
            () = drained => {}
            never = log_time_left(deadline) => match never {},
            () = signals.end() => queue.drain(Instant::now()).await,
        }
        end.stopped.send_replace(true);
    })
}

/// The signals that end the service.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// Some supervisors, and `docker stop` where an image asks for it, send this signal, and a terminal does at Ctrl-\\. By
    /// its default the process would end at once, with all its jobs, and leave a dump of its memory.
    quit: Signal,
    /// The terminal was closed. `None` if the signal was ignored at the start, as by `nohup`: the service goes on then.
    hangup: Option<Signal>,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        let hangup = (!crate::process::is_hangup_ignored()).then(|| signal(SignalKind::hangup()));
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            hangup: hangup.transpose()?,
        })
    }

    /// Resolves at a signal that was sent on purpose.
    async fn end(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            _ = self.quit.recv() => {}
        }
    }

    async fn end_or_hangup(&mut self) {
        let hangup = self.hangup.take();
        let terminal_closed = async {
            match hangup {
                Some(mut hangup) => drop(hangup.recv().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = self.end() => {}
            () = terminal_closed => {}
        }
    }
}

/// Logs how much time the running jobs still have.
async fn log_time_left(deadline: Instant) -> std::convert::Infallible {
    const INTERVAL: Duration = Duration::from_secs(30);
    loop {
        tokio::time::sleep(INTERVAL).await;
        let left = deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            tracing::info!("stopping: running jobs have {} s left", left.as_secs());
        }
    }
}
