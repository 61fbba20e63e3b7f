//! Files that are read again when they change.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{io, thread};

use gpu::FileStamp;
use tokio::sync::watch;

/// How often the files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// What files say, now and whenever they change. Files that cannot be used leave the last value in force, and a line in the log.
///
/// A thread of its own looks at them: files that do not answer hold up nothing else. It ends when nobody receives any more.
///
/// # Errors
/// Of the first reading, and where there is no thread.
pub fn follow<T, E>(
    what: &'static str,
    files: Vec<PathBuf>,
    read: impl Fn() -> Result<T, E> + Send + 'static,
) -> Result<watch::Receiver<T>, E>
where
    T: Send + Sync + 'static,
    E: std::fmt::Display + From<io::Error>,
{
    let mut seen = stamps(&files);
    let (sender, receiver) = watch::channel(read()?);
    let look = move || {
        while !sender.is_closed() {
            thread::sleep(INTERVAL);
            seen = again(what, &files, seen.clone(), &read, &sender);
        }
    };
    thread::Builder::new().name("access".to_owned()).spawn(look)?;
    Ok(receiver)
}

/// Reads the files if they differ from those that were seen. The stamps are taken before the reading: what is written during it is read the
/// next time.
fn again<T, E: std::fmt::Display>(
    what: &str,
    files: &[PathBuf],
    seen: Vec<Option<FileStamp>>,
    read: impl Fn() -> Result<T, E>,
    sender: &watch::Sender<T>,
) -> Vec<Option<FileStamp>> {
    let now = stamps(files);
    if now == seen {
        return seen;
    }
    match read() {
        Ok(value) => {
            sender.send_replace(value);
            tracing::info!("{what} changed, and hold from now on");
        }
        Err(problem) => {
            tracing::error!(%problem, "{what} changed and cannot be used: those from before stay in force")
        }
    }
    now
}

/// The stamps of files; `None` for one that is not there.
fn stamps(files: &[PathBuf]) -> Vec<Option<FileStamp>> {
    let stamp = |file: &PathBuf| FileStamp::at(Path::new(file)).ok();
    files.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_read_and_an_unusable_one_leaves_the_last_value() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("number");
        let read = || -> Result<u32, io::Error> {
            std::fs::read_to_string(&file)?
                .parse()
                .map_err(|_| io::Error::other("no number"))
        };
        std::fs::write(&file, "1").unwrap();
        let files = [file.clone()];
        let seen = stamps(&files);
        let (sender, receiver) = watch::channel(read().unwrap());
        let seen = again("numbers", &files, seen, read, &sender);
        assert!(!receiver.has_changed().unwrap(), "the file is the same");
        std::fs::write(folder.path().join("other"), "22").unwrap();
        std::fs::rename(folder.path().join("other"), &file).unwrap();
        let seen = again("numbers", &files, seen, read, &sender);
        assert_eq!(*receiver.borrow(), 22);
        std::fs::write(&file, "none").unwrap();
        let seen = again("numbers", &files, seen, read, &sender);
        assert_eq!(*receiver.borrow(), 22);
        std::fs::write(&file, "4444").unwrap();
        again("numbers", &files, seen, read, &sender);
        assert_eq!(*receiver.borrow(), 4444);
    }
}
