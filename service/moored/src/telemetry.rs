//! Logs: to standard error, as text or JSON lines, written by a thread. Traces: to a collector.

mod traces;
mod writer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{IsTerminal as _, Write as _};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::time::Duration;

use config::{DEFAULT_FILTER, LogSettings, directives};
use gpu::Timeline;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

pub(crate) use traces::Traces;
use writer::Lines;

/// How long a process that ends waits until its log is written.
const LAST_LINES: Duration = Duration::from_secs(1);

/// The writer of this process.
static LINES: OnceLock<Lines> = OnceLock::new();

/// Starts logging in a process. [`flush`] is to be called before it ends.
pub(crate) fn start(log: &LogSettings) {
    let filter = log.filter.as_deref().unwrap_or(DEFAULT_FILTER);
    let filter = EnvFilter::try_new(directives(filter)).unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER)); // it was checked
    let lines = Lines::start(std::io::stderr(), |dropped| {
        // At this level, since there may be errors among the lines.
        tracing::error!(
            dropped,
            "lines of the log were dropped before this one: whoever reads it was too slow"
        );
    });
    let writer = match lines {
        Ok(lines) => BoxMakeWriter::new(LINES.get_or_init(|| lines).clone()),
        Err(_) => BoxMakeWriter::new(std::io::stderr), // the system cannot start a thread
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .log_internal_errors(false)
        .with_writer(writer);
    // Fails only if a logger is installed already, as in tests.
    let _ = if log.json {
        builder.json().try_init()
    } else {
        builder.with_target(false).try_init()
    };
}

/// Waits until the log is written, unless nobody reads it.
pub(crate) fn flush() {
    if let Some(lines) = LINES.get() {
        lines.flush(LAST_LINES);
    }
}

/// Reports a panic as the standard library does, by the writer of the log: a panicking thread must not block because
/// nobody reads the log.
pub(crate) fn report_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    let backtrace = Backtrace::capture();
    let backtrace = match backtrace.status() {
        BacktraceStatus::Captured => backtrace.to_string(),
        _ => "RUST_BACKTRACE=1 in the environment shows a backtrace".to_owned(),
    };
    let report = format!("\nthread '{name}' {panic}\n{backtrace}\n");
    match LINES.get() {
        Some(lines) => lines.push(report.as_bytes()),
        None => drop(std::io::stderr().write_all(report.as_bytes())),
    }
    flush(); // the panic may end the process
}

/// Logs the age of this process. That includes the time in which the system loaded its libraries, which the process itself
/// cannot measure.
pub(crate) fn log_start_time(of: &'static str) {
    if let Some(age) = age() {
        Timeline::log(of, "from the process's start to here", age);
    }
}

/// Time since the process was started, to a hundredth of a second.
fn age() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    age_by(&stat, &std::fs::read_to_string("/proc/uptime").ok()?)
}

/// The age by `/proc/PID/stat`, which has the start in hundredths of a second since boot, and `/proc/uptime`, in seconds
/// (`proc(5)`).
fn age_by(stat: &str, uptime: &str) -> Option<Duration> {
    // The program's name may have spaces and parentheses in it. The first field after it is number 3; the start is number 22.
    let ticks: f64 = stat
        .rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)?
        .parse()
        .ok()?;
    let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    Duration::try_from_secs_f64(uptime - ticks / 100.0).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_computed_from_proc() {
        let stat = "77 (moored (serve) x) S 1 77 77 0 -1 4194560 98 0 0 0 3 4 5 6 20 0 9 0 123450 7000 800 18446744073709551615";
        assert_eq!(
            age_by(stat, "1236.75 4000.00\n"),
            Some(Duration::from_millis(2250))
        );
        assert_eq!(age_by("77 (moored) S 1", "1236.75 4000.00\n"), None);
        assert!(age().is_some());
    }
}
