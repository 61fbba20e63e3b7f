//! Ctrl-C, SIGTERM and SIGQUIT end a command that waits: its job is cancelled, and its exit code names the signal.

use std::sync::LazyLock;
use std::task::Poll;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::CliError;
use crate::Program;
use crate::exit::Exit;

/// How long after the end of the service inside of this program the signal that ended it is waited for.
const SIGNAL_LIMIT: Duration = Duration::from_millis(200);

/// The exit code for the first signal that has arrived.
static ARRIVED: LazyLock<watch::Sender<Option<Exit>>> = LazyLock::new(|| watch::channel(None).0);

/// The effect of a second signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Second {
    /// It ends the program at once.
    Exits,
    /// None here: the service inside of this program handles it and ends its jobs.
    IsForTheService,
}

/// Listens to signals from here on: none of them ends the program by itself any more. Called once, in the runtime.
pub(super) fn listen(program: &'static dyn Program, second: Second) -> Result<(), CliError> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // A service in this program drains at it, as at SIGTERM: see there.
    let mut quit = signal(SignalKind::quit())?;
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = interrupt.recv() => Exit::Cancelled,
                _ = terminate.recv() => Exit::Terminated,
                _ = quit.recv() => Exit::Terminated,
            }
        };
        ARRIVED.send_replace(Some(next().await));
        if second == Second::Exits {
            let code = next().await;
            program.flush_log();
            std::process::exit(code as i32);
        }
    });
    Ok(())
}

/// The exit code for the signal that has arrived.
pub(super) fn exit() -> Exit {
    ARRIVED.borrow().unwrap_or(Exit::Cancelled)
}

/// The error to report after the service inside of this program has ended: the signal where one has arrived, else this problem.
pub(super) async fn instead_of(problem: CliError) -> CliError {
    let mut arrived = ARRIVED.subscribe();
    // The task that receives signals may run after the service's own.
    match tokio::time::timeout(SIGNAL_LIMIT, arrived.wait_for(Option::is_some)).await {
        Ok(Ok(_)) => interrupted(),
        Ok(Err(_)) | Err(_) => problem,
    }
}

/// The outcome of some work, or an error once a signal arrives: the work is dropped then, which cancels its calls.
pub(super) async fn or<T>(work: impl Future<Output = Result<T, CliError>>) -> Result<T, CliError> {
    if has_arrived() {
        return Err(interrupted());
    }
    tokio::select! {
        biased; // work that ends by itself on a signal has a more exact outcome
        ended = work => ended,
        () = arrival() => Err(interrupted()),
    }
}

fn has_arrived() -> bool {
    ARRIVED.borrow().is_some()
}

/// Resolves once a signal has arrived. Of several that are polled in one task, the first that is polled resolves first: each looks for
/// itself, as their wakers are called one after the other.
async fn arrival() {
    let mut arrived = ARRIVED.subscribe();
    let mut woken = std::pin::pin!(arrived.wait_for(Option::is_some));
    std::future::poll_fn(|context| match woken.as_mut().poll(context) {
        Poll::Pending if !has_arrived() => Poll::Pending,
        Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
    })
    .await;
}

fn interrupted() -> CliError {
    CliError::Interrupted("cancelled".to_owned())
}
