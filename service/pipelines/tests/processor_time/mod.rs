//! How long something was computed. Time on the wall tells how busy the machine is with other things as well.
#![allow(dead_code, clippy::expect_used)] // Each test takes what it needs; what tests share is outside of them.

/// Seconds that this thread has been running.
pub(crate) fn of_thread() -> f64 {
    seconds("/proc/thread-self/stat")
}

/// Seconds that all threads of this process have been running, together.
pub(crate) fn of_process() -> f64 {
    seconds("/proc/self/stat")
}

fn seconds(path: &str) -> f64 {
    let text = std::fs::read_to_string(path).expect(path);
    // Behind a name in parentheses, which may have any characters: the times of the program and of the system for it.
    let (_, behind_name) = text.rsplit_once(')').expect("a name");
    let times = behind_name.split_whitespace().skip(11).take(2);
    let hundredths: u64 = times
        .map(|time| time.parse::<u64>().expect("hundredths of a second"))
        .sum();
    hundredths as f64 / 100.0
}
