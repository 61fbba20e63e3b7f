//! How many threads open models at once. A file system that does not answer keeps its thread for as long as it likes: it
//! may take so many, and those who open other models go on.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::error::Error;

/// Threads that open one model at once.
const OF_ONE_MODEL: usize = 2;
/// Threads that open models at once: far fewer than the runtime has for work that blocks.
const IN_ALL: usize = 64;
/// What one model may take to be opened. Whoever waits is told then; the thread goes on, and may still come to an end.
const LIMIT: Duration = Duration::from_secs(60);
/// Models that are remembered before those that nobody opens are forgotten.
const REMEMBERED: usize = 256;

pub(super) struct Opening {
    all: Arc<Semaphore>,
    models: Mutex<HashMap<PathBuf, Arc<Semaphore>>>,
}

impl Opening {
    pub(super) fn new() -> Opening {
        Opening {
            all: Arc::new(Semaphore::new(IN_ALL)),
            models: Mutex::default(),
        }
    }

    /// Runs work that reads the model at a path, on a thread where it may block.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let opened = tokio::time::timeout(LIMIT, self.run_unlimited(path, work)).await;
        opened.unwrap_or_else(|_| {
            Err(Error::ModelDamaged(format!(
                "{} cannot be read: the file system has not answered for {} s; is the disk or the network share there?",
                path.display(),
                LIMIT.as_secs()
            )))
        })
    }

    async fn run_unlimited<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let ended = |problem: String| Error::Internal(format!("opening a model ended: {problem}"));
        // The model's own first: those who wait for it take nothing from the others.
        let own = self.of(path).acquire_owned().await;
        let own = own.map_err(|closed| ended(closed.to_string()))?;
        let one = self.all.clone().acquire_owned().await;
        let one = one.map_err(|closed| ended(closed.to_string()))?;
        let done = tokio::task::spawn_blocking(move || {
            let _until_done = (own, one); // even if whoever asked has left
            work()
        });
        done.await.unwrap_or_else(|panic| Err(ended(panic.to_string())))
    }

    fn of(&self, path: &Path) -> Arc<Semaphore> {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if models.len() >= REMEMBERED {
            models.retain(|_, model| Arc::strong_count(model) > 1);
        }
        let own = models
            .entry(path.to_owned())
            .or_insert_with(|| Arc::new(Semaphore::new(OF_ONE_MODEL)));
        own.clone()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc;

    use super::*;

    /// A file system that does not answer until this is dropped; it tells when it was asked.
    fn hang(opening: &Arc<Opening>, path: &'static str) -> (mpsc::Sender<()>, mpsc::Receiver<()>) {
        let (answer, answered) = mpsc::channel::<()>();
        let (asked, was_asked) = mpsc::channel();
        let opening = opening.clone();
        tokio::spawn(async move {
            let work = move || {
                let _ = asked.send(());
                let _ = answered.recv();
                Ok(())
            };
            opening.run(Path::new(path), work).await
        });
        (answer, was_asked)
    }

    #[tokio::test]
    async fn a_model_that_cannot_be_read_takes_its_own_threads_and_no_more() {
        let opening = Arc::new(Opening::new());
        let hung: Vec<_> = (0..600).map(|_| hang(&opening, "/dead")).collect();
        // Other models are opened as ever, and of this one so many threads hang and no more.
        for _ in 0..100 {
            let other = opening.run(Path::new("/other"), || Ok(7)).await;
            assert_eq!(other, Ok(7));
        }
        let hanging = || hung.iter().filter(|(_, asked)| asked.try_recv().is_ok()).count();
        let mut seen = 0;
        while seen < OF_ONE_MODEL {
            seen += hanging();
            tokio::task::yield_now().await;
        }
        assert_eq!(opening.all.available_permits(), IN_ALL - OF_ONE_MODEL);
        drop(hung);
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_waits_for_a_model_is_told_that_it_does_not_answer() {
        let opening = Arc::new(Opening::new());
        let hung = [hang(&opening, "/dead"), hang(&opening, "/dead")];
        for (_, asked) in &hung {
            while asked.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
        }
        let third = {
            let opening = opening.clone();
            tokio::spawn(async move { opening.run(Path::new("/dead"), || Ok(())).await })
        };
        tokio::task::yield_now().await;
        tokio::time::advance(LIMIT).await;
        let told = third.await.unwrap();
        assert!(
            matches!(&told, Err(Error::ModelDamaged(problem)) if problem.contains("/dead")),
            "{told:?}"
        );
        // It has given up its place in the line: what comes after it goes on once the disk answers.
        drop(hung);
        assert_eq!(opening.run(Path::new("/dead"), || Ok(1)).await, Ok(1));
    }
}
