//! Bounds on the threads that open models at once. A file system that does not answer blocks its threads without end:
//! the number for each model is bounded, so that other models can still be opened.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::timeout;
use turns::{Turn, Turns};

use super::NotOpened;
use crate::error::Error;

/// Threads that open one model at once.
const MAX_THREADS_PER_MODEL: usize = 2;
/// Threads that open models at once: far fewer than the runtime has for work that blocks.
const MAX_THREADS: usize = 64;
/// Longest time that opening one model takes, and longest time that it waits for a thread. The caller gets an error then; the
/// thread goes on, and may still end.
const LIMIT: Duration = Duration::from_secs(60);

/// More than ever wait.
const ALL_THAT_WAIT: usize = 1 << 20;
/// Threads of one account for one model, so that the other serves accounts that ask for less.
const MAX_THREADS_PER_ACCOUNT: usize = 1;

pub(super) struct Opening {
    turns: Turns<PathBuf>,
    /// Each account waits with one piece of work for each model: its others wait here, and keep nobody from that model.
    of_accounts: Turns<(String, PathBuf)>,
}

impl Opening {
    pub(super) fn new() -> Opening {
        Opening {
            turns: Turns::new(MAX_THREADS, MAX_THREADS_PER_MODEL),
            of_accounts: Turns::new(ALL_THAT_WAIT, MAX_THREADS_PER_ACCOUNT),
        }
    }

    /// Runs work that reads the model at a path for an account (empty: for the service itself), on a thread where it may block.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        path: &Path,
        account: &str,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let path_shown = || path.display().to_string();
        let turns = timeout(LIMIT, self.turns_of(path, account)).await;
        let (own, turn) = turns.map_err(|_| NotOpened::Busy {
            path: path_shown(),
            limit: LIMIT,
        })?;
        let done = timeout(
            LIMIT,
            turn.run(move || {
                let _until_done = own;
                work()
            }),
        )
        .await;
        let done = done.map_err(|_| NotOpened::Silent {
            path: path_shown(),
            limit: LIMIT,
        })?;
        done.unwrap_or_else(|panic| Err(ended(panic)))
    }

    async fn turns_of(&self, path: &Path, account: &str) -> (Option<Turn>, Turn) {
        let own = match account.is_empty() {
            true => None,
            false => {
                let owner = (account.to_owned(), path.to_owned());
                Some(self.of_accounts.next_of(owner).await)
            }
        };
        (own, self.turns.next_of(path.to_owned()).await)
    }
}

fn ended(problem: impl ToString) -> Error {
    Error::Internal(format!("opening a model ended: {}", problem.to_string()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Arc, mpsc};

    use super::*;

    /// A call to a file system.
    type Call = tokio::task::JoinHandle<Result<(), Error>>;

    /// A file system that does not answer until the sender is dropped; the receiver gets a message when it is called.
    fn hang(opening: &Arc<Opening>, path: &'static str) -> (mpsc::Sender<()>, mpsc::Receiver<()>, Call) {
        let (answer, answered) = mpsc::channel::<()>();
        let (asked, was_asked) = mpsc::channel();
        let opening = opening.clone();
        let call = tokio::spawn(async move {
            let work = move || {
                let _ = asked.send(());
                let _ = answered.recv();
                Ok(())
            };
            opening.run(Path::new(path), "", work).await
        });
        (answer, was_asked, call)
    }

    #[tokio::test]
    async fn an_unresponsive_model_blocks_at_most_its_own_threads() {
        let opening = Arc::new(Opening::new());
        let hung: Vec<_> = (0..600).map(|_| hang(&opening, "/dead")).collect();
        // Other models are opened as ever, and of this one so many threads hang and no more.
        for _ in 0..100 {
            let other = opening.run(Path::new("/other"), "", || Ok(7)).await;
            assert_eq!(other, Ok(7));
        }
        let hanging = || {
            hung.iter()
                .filter(|(_, asked, _)| asked.try_recv().is_ok())
                .count()
        };
        let mut seen = 0;
        while seen < MAX_THREADS_PER_MODEL {
            seen += hanging();
            tokio::task::yield_now().await;
        }
        assert_eq!(opening.turns.free(), MAX_THREADS - MAX_THREADS_PER_MODEL);
        drop(hung);
    }

    #[tokio::test]
    async fn much_work_of_one_account_leaves_a_thread_of_the_model_to_others() {
        let opening = Arc::new(Opening::new());
        let (answer, answered) = mpsc::channel::<()>();
        let answered = Arc::new(std::sync::Mutex::new(answered));
        let (asked, was_asked) = mpsc::channel();
        for _ in 0..100 {
            let (opening, answered, asked) = (opening.clone(), answered.clone(), asked.clone());
            tokio::spawn(async move {
                let work = move || {
                    let _ = asked.send(());
                    let _ = answered.lock().unwrap().recv();
                    Ok(())
                };
                opening.run(Path::new("/model"), "10.0.0.1", work).await
            });
        }
        while was_asked.try_recv().is_err() {
            tokio::task::yield_now().await;
        }
        for _ in 0..10 {
            let other = opening.run(Path::new("/model"), "10.0.0.2", || Ok(7)).await;
            assert_eq!(other, Ok(7));
        }
        drop(answer);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_gets_an_error_if_the_file_system_does_not_answer_or_no_thread_is_free() {
        let opening = Arc::new(Opening::new());
        let hung = [hang(&opening, "/dead"), hang(&opening, "/dead")];
        for (_, asked, _) in &hung {
            while asked.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
        }
        let third = {
            let opening = opening.clone();
            tokio::spawn(async move { opening.run(Path::new("/dead"), "", || Ok(())).await })
        };
        tokio::task::yield_now().await;
        tokio::time::advance(LIMIT).await;
        let (path, limit) = ("/dead".to_owned(), LIMIT);
        let busy = NotOpened::Busy { path, limit };
        assert_eq!(third.await.unwrap(), Err(Error::NotOpened(busy)));
        for (answer, _, call) in hung {
            let path = "/dead".to_owned();
            let silent = NotOpened::Silent { path, limit };
            assert_eq!(call.await.unwrap(), Err(Error::NotOpened(silent)));
            drop(answer);
        }
        // The third caller no longer waits for a permit: the next one runs once the disk answers.
        assert_eq!(opening.run(Path::new("/dead"), "", || Ok(1)).await, Ok(1));
    }
}
