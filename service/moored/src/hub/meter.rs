//! How far a pull is.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

/// How far it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Bytes that are here, those that were here before among them.
    pub(crate) bytes_done: u64,
    pub(crate) bytes_total: u64,
    pub(crate) files_done: u32,
    pub(crate) files_total: u32,
    /// One that comes; empty while none does.
    pub(crate) file: String,
}

/// Counts, and tells whoever watches: the latest wins.
pub(super) struct Meter {
    progress: watch::Sender<Progress>,
    fetched: AtomicU64,
}

impl Meter {
    pub(super) fn new(progress: watch::Sender<Progress>) -> Meter {
        Meter {
            progress,
            fetched: AtomicU64::new(0),
        }
    }

    /// What there is to do, and what is done already.
    pub(super) fn start(&self, progress: Progress) {
        self.progress.send_replace(progress);
    }

    /// Bytes that were here before.
    pub(super) fn found(&self, bytes: u64) {
        self.progress.send_modify(|progress| progress.bytes_done += bytes);
    }

    /// Bytes that have come.
    pub(super) fn fetched(&self, bytes: u64, file: &str) {
        self.fetched.fetch_add(bytes, Ordering::Relaxed);
        self.progress.send_modify(|progress| {
            progress.bytes_done += bytes;
            if progress.file != file {
                progress.file = file.to_owned();
            }
        });
    }

    /// Bytes that were no good.
    pub(super) fn lost(&self, bytes: u64) {
        let lose = |progress: &mut Progress| progress.bytes_done = progress.bytes_done.saturating_sub(bytes);
        self.progress.send_modify(lose);
    }

    pub(super) fn file_done(&self) {
        self.progress.send_modify(|progress| {
            progress.files_done += 1;
            progress.file.clear();
        });
    }

    /// Bytes that came, whatever became of them.
    pub(super) fn bytes_fetched(&self) -> u64 {
        self.fetched.load(Ordering::Relaxed)
    }
}
