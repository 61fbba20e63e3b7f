//! Files that are read again when they change.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{io, thread};

use gpu::FileStamp;
use tokio::sync::watch;

/// How often the files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// What files say, now and whenever they change. While they cannot be used, they are read again each time, a line is in the log, and what
/// `meanwhile` makes of the last value is in force; or the last value, where that is `None`.
///
/// A thread of its own looks at them: files that do not answer hold up nothing else. It ends when nobody receives any more.
///
/// # Errors
/// Of the first reading, and where there is no thread.
pub fn follow<T, E>(
    what: &'static str,
    files: Vec<PathBuf>,
    read: impl Fn() -> Result<T, E> + Send + 'static,
    meanwhile: impl Fn(&T) -> Option<T> + Send + 'static,
) -> Result<watch::Receiver<T>, E>
where
    T: Send + Sync + 'static,
    E: std::fmt::Display + From<io::Error>,
{
    let mut seen = Seen::of(&files);
    let (sender, receiver) = watch::channel(read()?);
    let look = move || {
        while !sender.is_closed() {
            thread::sleep(INTERVAL);
            again(what, &files, &mut seen, (&read, &meanwhile), &sender);
        }
    };
    thread::Builder::new().name("access".to_owned()).spawn(look)?;
    Ok(receiver)
}

type Stamps = Vec<Option<FileStamp>>;

/// What was seen of files.
struct Seen {
    /// When they were read.
    read: Stamps,
    /// When they could not be used, for the log.
    unusable: Option<Stamps>,
}

impl Seen {
    fn of(files: &[PathBuf]) -> Seen {
        Seen {
            read: stamps(files),
            unusable: None,
        }
    }
}

/// Reads the files if they differ from those that were read. The stamps are taken before the reading: what is written during it is read the
/// next time.
fn again<T, E: std::fmt::Display>(
    what: &str,
    files: &[PathBuf],
    seen: &mut Seen,
    (read, meanwhile): (impl Fn() -> Result<T, E>, impl Fn(&T) -> Option<T>),
    sender: &watch::Sender<T>,
) {
    let now = stamps(files);
    if now == seen.read {
        return;
    }
    match read() {
        Ok(value) => {
            sender.send_replace(value);
            tracing::info!("{what} changed, and hold from now on");
            *seen = Seen {
                read: now,
                unusable: None,
            };
        }
        Err(problem) => {
            let value = meanwhile(&sender.borrow());
            match value {
                Some(value) => drop(sender.send_replace(value)),
                None if seen.unusable.as_ref() == Some(&now) => return,
                None => {}
            }
            tracing::error!(%problem, "{what} changed and cannot be used");
            seen.unusable = Some(now);
        }
    }
}

/// The stamps of files; `None` for one that is not there.
fn stamps(files: &[PathBuf]) -> Stamps {
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
        // A value below ten is none to go on with.
        let meanwhile = |last: &u32| (*last < 10).then_some(99);
        std::fs::write(&file, "1").unwrap();
        let files = [file.clone()];
        let mut seen = Seen::of(&files);
        let (sender, receiver) = watch::channel(read().unwrap());
        let mut look = || again("numbers", &files, &mut seen, (read, meanwhile), &sender);
        look();
        assert!(!receiver.has_changed().unwrap(), "the file is the same");
        std::fs::write(folder.path().join("other"), "22").unwrap();
        std::fs::rename(folder.path().join("other"), &file).unwrap();
        look();
        assert_eq!(*receiver.borrow(), 22);
        std::fs::write(&file, "none").unwrap();
        look();
        assert_eq!(*receiver.borrow(), 22);
        std::fs::write(&file, "4444").unwrap();
        look();
        assert_eq!(*receiver.borrow(), 4444);
        std::fs::write(&file, "5").unwrap();
        look();
        std::fs::write(&file, "no").unwrap();
        look();
        assert_eq!(*receiver.borrow(), 99);
    }

    #[test]
    fn files_that_could_not_be_used_are_read_again_though_they_did_not_change() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("number");
        std::fs::write(&file, "1").unwrap();
        let files = [file.clone()];
        let mut seen = Seen::of(&files);
        let (sender, receiver) = watch::channel(1);
        std::fs::write(&file, "22").unwrap();
        for (answer, expected) in [(Err("too many open files"), 1), (Ok(22), 22)] {
            again("numbers", &files, &mut seen, (|| answer, |_: &u32| None), &sender);
            assert_eq!(*receiver.borrow(), expected);
        }
    }
}
