//! CPU time. Wall time depends on other load of the machine.
#![allow(dead_code, clippy::expect_used)] // Each test takes what it needs; what tests share is outside of them.

/// CPU seconds of this thread.
pub(crate) fn of_thread() -> f64 {
    seconds("/proc/thread-self/stat")
}

/// CPU seconds of all threads of this process.
pub(crate) fn of_process() -> f64 {
    seconds("/proc/self/stat")
}

fn seconds(path: &str) -> f64 {
    let text = std::fs::read_to_string(path).expect(path);
    // After the program's name in parentheses, which may have any characters: user and system time.
    let (_, behind_name) = text.rsplit_once(')').expect("a name");
    let times = behind_name.split_whitespace().skip(11).take(2);
    let hundredths: u64 = times
        .map(|time| time.parse::<u64>().expect("hundredths of a second"))
        .sum();
    hundredths as f64 / 100.0
}
