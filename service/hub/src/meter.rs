//! The progress of a pull.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

/// The progress of a pull.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes in the cache, including those from before the pull.
    pub bytes_done: u64,
    pub bytes_total: u64,
    pub files_done: u32,
    pub files_total: u32,
    /// A file that is being downloaded; empty while none is.
    pub file: String,
}

/// Counts bytes and files, and publishes the latest progress.
pub(crate) struct Meter {
    progress: watch::Sender<Progress>,
    fetched: AtomicU64,
}

impl Meter {
    pub(crate) fn new(progress: watch::Sender<Progress>) -> Meter {
        Meter {
            progress,
            fetched: AtomicU64::new(0),
        }
    }

    /// Sets the totals, and the part that is done already.
    pub(crate) fn start(&self, progress: Progress) {
        self.progress.send_replace(progress);
    }

    /// Counts bytes that were in the cache before.
    pub(crate) fn found(&self, bytes: u64) {
        self.progress.send_modify(|progress| progress.bytes_done += bytes);
    }

    /// Counts downloaded bytes.
    pub(crate) fn fetched(&self, bytes: u64, file: &str) {
        self.fetched.fetch_add(bytes, Ordering::Relaxed);
        self.progress.send_modify(|progress| {
            progress.bytes_done += bytes;
            if progress.file != file {
                progress.file = file.to_owned();
            }
        });
    }

    /// Subtracts discarded bytes.
    pub(crate) fn lost(&self, bytes: u64) {
        let lose = |progress: &mut Progress| progress.bytes_done = progress.bytes_done.saturating_sub(bytes);
        self.progress.send_modify(lose);
    }

    pub(crate) fn file_done(&self) {
        self.progress.send_modify(|progress| {
            progress.files_done += 1;
            progress.file.clear();
        });
    }

    /// Bytes that were downloaded, discarded ones included.
    pub(crate) fn bytes_fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }
}
