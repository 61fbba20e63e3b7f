//! The writer of the log: a thread of its own, so that a log that nobody reads blocks nothing else. Lines wait in
//! a bounded queue; beyond its bound they are dropped, and a line reports their number.
//!
//! tracing-appender is similar, but if its output is stuck, it prints to standard output at the end. Here that is the same pipe,
//! and would block the process.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Most bytes of lines that wait, and as many more that are being written.
const MOST_BYTES: usize = 1 << 20;

/// The queue of lines to the writer.
#[derive(Clone)]
pub(super) struct Lines(Arc<Shared>);

struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Lines that were dropped and are not reported yet.
    dropped: u64,
    /// Whether lines that were taken from the queue are being written.
    is_writing: bool,
    writer: Option<ThreadId>,
}

impl Lines {
    /// Starts the thread. `tell` is called in it with the number of dropped lines, once there is room again.
    ///
    /// # Errors
    /// When the system cannot start a thread.
    pub(super) fn start(
        output: impl Write + Send + 'static,
        tell: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Lines> {
        let lines = Lines(Arc::new(Shared {
            waiting: Mutex::default(),
            changed: Condvar::new(),
        }));
        let of_thread = lines.clone();
        let thread = std::thread::Builder::new().name("log".to_owned());
        thread.spawn(move || of_thread.write(output, tell))?;
        Ok(lines)
    }

    /// Puts a line into the queue, or drops it where there is no room. Never waits.
    pub(super) fn push(&self, line: &[u8]) {
        let mut waiting = self.lock();
        let is_full = !waiting.lines.is_empty() && waiting.bytes + line.len() > MOST_BYTES;
        // The writer's own line, which reports dropped lines, is always accepted.
        if is_full && waiting.writer != Some(std::thread::current().id()) {
            waiting.dropped += 1;
            return;
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line.to_vec());
        drop(waiting);
        self.0.changed.notify_all();
    }

    /// Waits until all lines are written, for at most `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        let waiting = self.lock();
        let some_are_left =
            |waiting: &mut Waiting| waiting.is_writing || waiting.dropped > 0 || !waiting.lines.is_empty();
        let waited = self.0.changed.wait_timeout_while(waiting, limit, some_are_left);
        drop(waited); // a log that nobody reads stays unread
    }

    fn write(&self, mut output: impl Write, tell: impl Fn(u64)) {
        self.lock().writer = Some(std::thread::current().id());
        loop {
            let mut waiting = self.lock();
            waiting.is_writing = false;
            self.0.changed.notify_all();
            let is_empty = |waiting: &mut Waiting| waiting.lines.is_empty();
            let waited = self.0.changed.wait_while(waiting, is_empty);
            let mut waiting = waited.unwrap_or_else(PoisonError::into_inner);
            let lines = std::mem::take(&mut waiting.lines);
            let dropped = std::mem::take(&mut waiting.dropped);
            (waiting.bytes, waiting.is_writing) = (0, true);
            drop(waiting);
            for line in lines {
                // Where the log cannot be written, the service goes on: its reader is gone, or its disk is full.
                let _ = output.write_all(&line);
            }
            let _ = output.flush();
            // The dropped lines belong here: they arrived while the lines that are written now took all the room.
            if dropped > 0 {
                tell(dropped);
            }
        }
    }

    /// A panic while it is locked leaves the queue valid.
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = &'a Lines;

    fn make_writer(&'a self) -> &'a Lines {
        self
    }
}

impl Write for &Lines {
    /// Takes a whole line, since the log's formatter writes each line at once.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// An output that waits at each write until it may go on.
    struct Stuck {
        may_write: Receiver<()>,
        written: Sender<Vec<u8>>,
    }

    impl Write for Stuck {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            let _ = self.may_write.recv(); // fails at once when the sender is dropped
            let _ = self.written.send(line.to_vec());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stuck_output_blocks_no_writer_and_lost_lines_are_counted() {
        let (go_on, may_write) = channel();
        let (written, read) = channel();
        let (tell, told) = channel();
        let lines = Lines::start(Stuck { may_write, written }, move |dropped| {
            tell.send(dropped).unwrap();
        });
        let lines = lines.unwrap();
        let line = |number: usize| format!("{number:>1000}\n").into_bytes();
        let many = 4 * MOST_BYTES / 1000;
        for number in 0..many {
            lines.push(&line(number)); // in the thread that would be blocked
        }
        drop(go_on);
        lines.flush(LONG);
        let read: Vec<Vec<u8>> = read.try_iter().collect();
        let dropped: u64 = told.try_iter().sum();
        assert_eq!(read.len() as u64 + dropped, many as u64);
        assert!(
            read.len() * 1000 < 3 * MOST_BYTES && dropped > 0,
            "{}",
            read.len()
        );
        assert_eq!(read[0], line(0), "the first are kept");
        assert!(read.is_sorted());
    }

    #[test]
    fn flushing_waits_for_every_line_and_not_for_a_stuck_output() {
        let (go_on, may_write) = channel();
        let (written, read) = channel();
        let lines = Lines::start(Stuck { may_write, written }, |_| {}).unwrap();
        lines.push(b"a line\n");
        lines.flush(Duration::from_millis(1));
        assert!(read.try_recv().is_err(), "it is stuck");
        lines.push(b"another\n");
        drop(go_on);
        lines.flush(LONG);
        assert_eq!(read.try_iter().count(), 2);
    }

    #[test]
    fn the_line_about_dropped_lines_is_never_dropped() {
        let (go_on, may_write) = channel();
        let (written, read) = channel();
        let own: Arc<Mutex<Option<Lines>>> = Arc::default();
        let in_thread = own.clone();
        let lines = Lines::start(Stuck { may_write, written }, move |dropped| {
            if let Some(lines) = &*in_thread.lock().unwrap() {
                while lines.lock().bytes <= MOST_BYTES - 1001 {
                    lines.push(&[b'x'; 1000]); // other threads have filled it again
                }
                lines.push(format!("{dropped} were dropped\n{}", "-".repeat(2000)).as_bytes());
            }
        });
        let lines = lines.unwrap();
        *own.lock().unwrap() = Some(lines.clone());
        for _ in 0..3 * MOST_BYTES / 1000 {
            lines.push(&[b'x'; 1000]);
        }
        drop(go_on);
        lines.flush(LONG);
        assert_eq!(read.try_iter().filter(|line| line.ends_with(b"-")).count(), 1);
    }
}
