//! A cached scan of folders.

use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Lifetime of a listing. A model that it lacks is searched for at once.
const LIFETIME: Duration = Duration::from_secs(10);

/// Timeout of waiting for another thread's scan.
const LOOK_LIMIT: Duration = Duration::from_secs(1);

/// The last scan of folders.
pub(super) struct Listing<T> {
    last: RwLock<Option<(Instant, Arc<Vec<T>>)>>,
    /// One thread scans at a time: a folder may never answer, and must not block more threads.
    looking: Looking,
}

impl<T> Default for Listing<T> {
    fn default() -> Listing<T> {
        Listing {
            last: RwLock::new(None),
            looking: Looking::default(),
        }
    }
}

impl<T> Listing<T> {
    /// The listing; scans when it is too old.
    pub(super) fn current(&self, scan: impl FnOnce() -> Vec<T>) -> Arc<Vec<T>> {
        match self.last() {
            Some((when, found)) if when.elapsed() < LIFETIME => found,
            _ => self.rescan(scan),
        }
    }

    /// The last listing, however old. Scans only when there was no scan.
    pub(super) fn known(&self, scan: impl FnOnce() -> Vec<T>) -> Arc<Vec<T>> {
        self.last().map_or_else(|| self.rescan(scan), |(_, found)| found)
    }

    /// Scans, however recent the last scan. While another scan is blocked by a folder, it returns the last listing.
    pub(super) fn rescan(&self, scan: impl FnOnce() -> Vec<T>) -> Arc<Vec<T>> {
        let Some(_turn) = self.looking.begin() else {
            return self.last().map(|(_, found)| found).unwrap_or_default();
        };
        let found = Arc::new(scan());
        if let Ok(mut last) = self.last.write() {
            *last = Some((Instant::now(), Arc::clone(&found)));
        }
        found
    }

    fn last(&self) -> Option<(Instant, Arc<Vec<T>>)> {
        self.last.read().ok().and_then(|last| last.clone())
    }

    /// A scan that is blocked, until the result is dropped.
    #[cfg(test)]
    pub(super) fn block(&self) -> Option<impl Drop + '_> {
        self.looking.begin()
    }
}

/// Whether a scan of the folders is running.
#[derive(Default)]
struct Looking {
    under_way: Mutex<bool>,
    ended: Condvar,
}

impl Looking {
    /// Begins a scan; `None` when another runs, after waiting for its end up to [`LOOK_LIMIT`].
    fn begin(&self) -> Option<Turn<'_>> {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        if *under_way {
            let waited = self
                .ended
                .wait_timeout_while(under_way, LOOK_LIMIT, |under_way| *under_way);
            drop(waited);
            return None;
        }
        *under_way = true;
        Some(Turn(self))
    }
}

/// The permit to scan the folders; dropping it releases it.
struct Turn<'a>(&'a Looking);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.ended.notify_all();
    }
}
