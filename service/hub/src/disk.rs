//! Work on the files of the cache, on threads that may block. A disk that does not answer blocks a bounded number of threads, and
//! none of those that serve other calls; callers that wait for it get an error.

use std::path::Path;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;
use turns::{Turn, Turns};

use crate::PullError;

/// Most threads that stat, link or lock files at a time.
const SHORT_AT_ONCE: usize = 16;
/// Most threads that read or write the contents of files at a time: as many as downloads.
const LONG_AT_ONCE: usize = 16;
/// Longest time that short work takes, and longest time that any work waits for a thread.
const LIMIT: Duration = Duration::from_secs(60);

/// The threads that wait for one disk. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    /// The folder on it, for messages.
    folder: String,
    short: Turns<()>,
    long: Turns<()>,
}

impl Disk {
    /// The disk that a folder lies on.
    pub(crate) fn of(folder: &Path) -> Disk {
        Disk {
            folder: folder.display().to_string(),
            short: Turns::new(SHORT_AT_ONCE, SHORT_AT_ONCE),
            long: Turns::new(LONG_AT_ONCE, LONG_AT_ONCE),
        }
    }

    /// Runs work whose duration does not depend on the sizes of files.
    ///
    /// # Errors
    /// Those of the work; [`PullError::DiskSilent`] and [`PullError::DiskBusy`] after [`LIMIT`].
    pub(crate) async fn short<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, PullError> + Send + 'static,
    ) -> Result<T, PullError> {
        let turn = self.turn(&self.short).await?;
        let done = timeout(LIMIT, self.run(turn, work)).await;
        done.unwrap_or_else(|_| {
            Err(PullError::DiskSilent {
                folder: self.folder.clone(),
                limit: LIMIT,
            })
        })
    }

    /// Runs work whose duration depends on the sizes of files.
    ///
    /// # Errors
    /// Those of the work; [`PullError::DiskBusy`] where it has not begun after [`LIMIT`].
    pub(crate) async fn long<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, PullError> + Send + 'static,
    ) -> Result<T, PullError> {
        let turn = self.turn(&self.long).await?;
        self.run(turn, work).await
    }

    async fn turn(&self, turns: &Turns<()>) -> Result<Turn, PullError> {
        let turn = timeout(LIMIT, turns.next()).await;
        turn.map_err(|_| PullError::DiskBusy {
            folder: self.folder.clone(),
            limit: LIMIT,
        })
    }

    async fn run<T: Send + 'static>(
        &self,
        turn: Turn,
        work: impl FnOnce() -> Result<T, PullError> + Send + 'static,
    ) -> Result<T, PullError> {
        turn.run(work).await.unwrap_or_else(|panic| {
            Err(PullError::Disk {
                path: self.folder.clone(),
                problem: panic.to_string(),
            })
        })
    }

    /// All threads, until the result is dropped: no work begins meanwhile.
    #[cfg(test)]
    pub(crate) fn all_turns(&self) -> [Vec<Turn>; 2] {
        [self.short.all_free(), self.long.all_free()]
    }
}

/// Closes files on a thread that may block: on close, a network share writes pending data and releases locks.
pub(crate) fn close<T: Send + 'static>(files: T) {
    match Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(move || drop(files))),
        Err(_) => drop(files), // closed on this thread, for which nobody waits
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_does_not_answer_holds_so_many_threads_and_is_reported() {
        let disk = Disk::of(Path::new("/cache"));
        let (answer, answered) = mpsc::channel::<()>();
        let answered = Arc::new(std::sync::Mutex::new(answered));
        let (asked, was_asked) = mpsc::channel();
        let calls: Vec<_> = (0..SHORT_AT_ONCE + 1)
            .map(|_| {
                let (disk, asked, answered) = (disk.clone(), asked.clone(), answered.clone());
                tokio::spawn(async move {
                    let work = move || {
                        let _ = asked.send(());
                        let _ = answered.lock().unwrap().recv();
                        Ok(())
                    };
                    disk.short(work).await
                })
            })
            .collect();
        let mut seen = 0;
        while seen < SHORT_AT_ONCE {
            seen += was_asked.try_iter().count();
            tokio::task::yield_now().await;
        }
        assert_eq!(
            disk.long(|| Ok(7)).await,
            Ok(7),
            "downloads have threads of their own"
        );
        tokio::time::advance(LIMIT).await;
        let (folder, limit) = ("/cache".to_owned(), LIMIT);
        let silent = Err(PullError::DiskSilent {
            folder: folder.clone(),
            limit,
        });
        let busy = Err(PullError::DiskBusy { folder, limit });
        let mut ends = Vec::new();
        for call in calls {
            ends.push(call.await.unwrap());
        }
        assert_eq!(ends.iter().filter(|end| **end == silent).count(), SHORT_AT_ONCE);
        assert_eq!(ends.iter().filter(|end| **end == busy).count(), 1);
        drop(answer);
        assert_eq!(disk.short(|| Ok(8)).await, Ok(8), "once it answers");
    }
}
