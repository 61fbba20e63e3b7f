//! Logs: to standard error, as text or JSON lines.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::Log;

/// Starts logging in a supervisor or a command.
pub(crate) fn start(log: &Log) {
    let filter = EnvFilter::try_new(&log.filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // Fails only when a logger is there already, as in tests.
    let _ = if log.json {
        builder.json().try_init()
    } else {
        builder.with_target(false).try_init()
    };
}

/// Starts logging in a worker, whose lines mix with the supervisor's.
pub(crate) fn start_worker(filter: &str) {
    let json = filter.starts_with("json:");
    let filter = filter.trim_start_matches("json:").to_owned();
    start(&Log { filter, json });
}
