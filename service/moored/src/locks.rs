//! Locks that keep two services off one card, and find workers that outlived a killed service.

use std::fs::{File, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gpu::{CardDescription, CardKind};

/// A worker exits by itself when its supervisor has ended. A worker that has not exited after this time hangs.
const STRAY_GRACE: Duration = Duration::from_secs(3);
const STRAY_POLL: Duration = Duration::from_millis(100);

/// Why a card's lock cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LockError {
    /// Another service runs on it.
    #[error("another service (pid {pid}) has the card {card}; stop it, or give this one another card")]
    Taken { card: String, pid: String },
    /// An orphaned worker.
    #[error(
        "worker process {pid} of a service that was killed still holds the card {card}: end it with `kill -9 {pid}` \
         and start again"
    )]
    Stray { card: String, pid: String },
    /// The lock file cannot be used.
    #[error("the lock {} cannot be used: {problem} (service.state names another folder)", file.display())]
    File { file: PathBuf, problem: std::io::Error },
}

/// The locks of a service; dropping them releases the cards.
#[derive(Debug)]
pub(crate) struct Locks {
    _files: Vec<File>,
}

impl Locks {
    /// Takes the lock of each card that could be shared by mistake, and waits for strays to end.
    pub(crate) async fn take(state: &Path, cards: &[CardDescription]) -> Result<Locks, LockError> {
        let mut files = Vec::new();
        for card in cards {
            let Some(path) = lock_file(state, card, "lock") else {
                continue;
            };
            let file = take(&path)?.map_err(|pid| LockError::Taken {
                card: card.id.clone(),
                pid,
            })?;
            files.push(file);
            wait_for_strays(state, card).await?;
        }
        Ok(Locks { _files: files })
    }
}

/// The file that a card's worker keeps locked.
pub(crate) fn worker_lock(state: &Path, card: &CardDescription) -> Option<PathBuf> {
    lock_file(state, card, "worker.lock")
}

/// A lock of a card: named after its id, which for an NVIDIA card is the UUID, however it was configured. A simulated
/// card has none: it exists in one service's arithmetic only.
fn lock_file(state: &Path, card: &CardDescription, kind: &str) -> Option<PathBuf> {
    let name = card.id.replace(['/', ':'], "-");
    (card.kind != CardKind::Simulated).then(|| state.join("locks").join(format!("{name}.{kind}")))
}

/// Locks a file and writes our process id into it; the inner error is the process id of its holder.
pub(crate) fn take(path: &Path) -> Result<Result<File, String>, LockError> {
    let fails = |problem| LockError::File {
        file: path.to_owned(),
        problem,
    };
    if let Some(folder) = path.parent() {
        gpu::create_private_folder(folder).map_err(fails)?;
    }
    let mut file = gpu::open_private(path).map_err(fails)?;
    match file.try_lock() {
        Ok(()) => {
            file.set_len(0).and_then(|()| file.rewind()).map_err(fails)?;
            write!(file, "{}", std::process::id()).map_err(fails)?;
            Ok(Ok(file))
        }
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            file.read_to_string(&mut holder).map_err(fails)?;
            Ok(Err(holder.trim().to_owned()))
        }
        Err(TryLockError::Error(problem)) => Err(fails(problem)),
    }
}

async fn wait_for_strays(state: &Path, card: &CardDescription) -> Result<(), LockError> {
    let Some(path) = worker_lock(state, card) else {
        return Ok(());
    };
    let mut waited = Duration::ZERO;
    loop {
        match take(&path)? {
            Ok(_released_at_once) => return Ok(()),
            Err(pid) if waited >= STRAY_GRACE => {
                return Err(LockError::Stray {
                    card: card.id.clone(),
                    pid,
                });
            }
            Err(_) => {
                tokio::time::sleep(STRAY_POLL).await;
                waited += STRAY_POLL;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(device: &str) -> CardDescription {
        device.parse::<gpu::DeviceSpec>().unwrap().describe().unwrap()
    }

    fn cpu() -> [CardDescription; 1] {
        [card("cpu")]
    }

    fn nvidia(uuid: &str) -> CardDescription {
        CardDescription {
            id: uuid.to_owned(),
            kind: CardKind::Cuda,
            ..card("cpu")
        }
    }

    #[tokio::test]
    async fn a_second_service_is_refused_with_the_pid_of_the_first() {
        let state = tempfile::tempdir().unwrap();
        let first = Locks::take(state.path(), &cpu()).await.unwrap();
        let refused = Locks::take(state.path(), &cpu()).await.unwrap_err();
        assert!(
            refused
                .to_string()
                .contains(&format!("pid {}", std::process::id())),
            "{refused}"
        );
        drop(first);
        Locks::take(state.path(), &cpu()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_stray_worker_is_named() {
        let state = tempfile::tempdir().unwrap();
        let path = worker_lock(state.path(), &cpu()[0]).unwrap();
        let stray = take(&path).unwrap().unwrap();
        let refused = Locks::take(state.path(), &cpu()).await.unwrap_err();
        assert!(matches!(refused, LockError::Stray { .. }), "{refused}");
        drop(stray);
        Locks::take(state.path(), &cpu()).await.unwrap();
    }

    #[tokio::test]
    async fn simulated_cards_are_not_locked() {
        let state = tempfile::tempdir().unwrap();
        let simulated = [card("sim:1GiB")];
        let _first = Locks::take(state.path(), &simulated).await.unwrap();
        Locks::take(state.path(), &simulated).await.unwrap();
    }

    #[tokio::test]
    async fn an_nvidia_card_is_locked_by_its_uuid() {
        let state = tempfile::tempdir().unwrap();
        let _first = Locks::take(state.path(), &[nvidia("GPU-1a")]).await.unwrap();
        let _other = Locks::take(state.path(), &[nvidia("GPU-2b")]).await.unwrap();
        let refused = Locks::take(state.path(), &[nvidia("GPU-1a")]).await.unwrap_err();
        assert!(refused.to_string().contains("GPU-1a"), "{refused}");
    }
}
