//! What systemd is told by a service that it started as a unit of `Type=notify`: that it listens, and that it drains.
//! Elsewhere `NOTIFY_SOCKET` is not set, and nothing is sent.

use std::net::SocketAddr;
use std::time::Duration;

/// The service listens: `systemctl start` returns, and units that are ordered after it start.
pub(crate) fn tell_ready(address: SocketAddr) {
    tell(&format!("listening on {address}"), true);
}

/// The service drains: `systemctl status` says so, and for how long at most.
pub(crate) fn tell_stopping(drain: Duration) {
    let seconds = drain.as_secs();
    tell(&format!("running jobs may finish within {seconds} s"), false);
}

#[cfg(target_os = "linux")]
fn tell(status: &str, ready: bool) {
    use sd_notify::NotifyState;

    let state = if ready {
        NotifyState::Ready
    } else {
        NotifyState::Stopping
    };
    if let Err(problem) = sd_notify::notify(&[state, NotifyState::Status(status)]) {
        tracing::warn!(%problem, "systemd was not told: {status}");
    }
}

#[cfg(not(target_os = "linux"))]
fn tell(_status: &str, _ready: bool) {}
