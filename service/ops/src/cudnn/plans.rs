//! On-disk cache of plans, one file each, shared between processes. Compiling one takes half a second, loading it
//! some milliseconds.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

/// Maximum of files in a folder. Each has some 70 KB.
const FILES: usize = 512;

/// Header of a file. Changed with the format of plans.
const HEAD: &str = "moored plan 1 ";

/// Suffixes of plans, and of plans being written.
const ENDING: &str = ".plan";
const UNFINISHED: &str = ".plan-part";

/// Age at which a partial file counts as abandoned.
const FORGOTTEN: Duration = Duration::from_secs(3600);

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Sets the folder of the on-disk cache. The first call counts, for cards that are not open yet.
pub(crate) fn keep_plans_in(folder: &Path) {
    // Only the first call counts: a process has one folder.
    let _ = FOLDER.set(folder.to_owned());
}

/// A folder of plans.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    most: usize,
}

impl Folder {
    /// The folder of this process, if one was set.
    pub(crate) fn of_process() -> Option<Folder> {
        FOLDER.get().map(|path| Folder::at(path, FILES))
    }

    pub(super) fn at(path: &Path, most: usize) -> Folder {
        Folder {
            path: path.to_owned(),
            most,
        }
    }

    fn file(&self, key: &str) -> PathBuf {
        self.path
            .join(format!("{}{ENDING}", blake3::hash(key.as_bytes()).to_hex()))
    }

    /// The text of a plan, if it is present and intact.
    pub(crate) fn read(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.file(key);
        let bytes = fs::read(&path).ok()?;
        let head = head(key, bytes.get(head_bytes()..)?);
        let text = bytes.strip_prefix(head.as_bytes())?;
        // Marks it as recently used. If that fails, it is evicted earlier.
        if let Ok(file) = fs::File::options().append(true).open(&path) {
            let _ = file.set_modified(SystemTime::now());
        }
        Some(text.to_vec())
    }

    /// Writes a plan. A folder that cannot be written is ignored.
    pub(crate) fn write(&self, key: &str, text: &[u8]) {
        if let Err(error) = self.try_write(key, text) {
            let folder = self.path.display();
            tracing::warn!(%error, %folder, "a plan of cuDNN cannot be kept: it will be made anew");
        }
    }

    fn try_write(&self, key: &str, text: &[u8]) -> std::io::Result<()> {
        fs::create_dir_all(&self.path)?;
        let mut part = tempfile::Builder::new()
            .suffix(UNFINISHED)
            .tempfile_in(&self.path)?;
        part.write_all(head(key, text).as_bytes())?;
        part.write_all(text)?;
        part.persist(self.file(key)).map_err(|error| error.error)?;
        self.remove_oldest()
    }

    /// Evicts plans beyond the capacity, least recently used first.
    fn remove_oldest(&self) -> std::io::Result<()> {
        let mut plans = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let (path, Ok(metadata)) = (entry.path(), entry.metadata()) else {
                continue; // another process removed it
            };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let is_forgotten = used.elapsed().is_ok_and(|age| age > FORGOTTEN);
            if name.ends_with(ENDING) {
                plans.push((used, path));
            } else if name.ends_with(UNFINISHED) && is_forgotten {
                remove(&path)?;
            }
        }
        plans.sort();
        let beyond = plans.len().saturating_sub(self.most);
        plans.iter().take(beyond).try_for_each(|(_, path)| remove(path))
    }
}

/// Removes a file, unless another process has.
fn remove(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Header of a file: a hash of its key and of its content.
fn head(key: &str, text: &[u8]) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(&(key.len() as u64).to_le_bytes());
    hash.update(key.as_bytes());
    hash.update(text);
    format!("{HEAD}{}\n", hash.finalize().to_hex())
}

const fn head_bytes() -> usize {
    HEAD.len() + 2 * blake3::OUT_LEN + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Folder) -> usize {
        fs::read_dir(&folder.path).unwrap().count()
    }

    #[test]
    fn a_plan_is_read_back_intact_and_for_its_key_only() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::at(&at.path().join("plans"), 4);
        assert_eq!(folder.read("a"), None);
        folder.write("a", b"{\"kernel\": 1}");
        folder.write("b", b"");
        assert_eq!(folder.read("a").as_deref(), Some(&b"{\"kernel\": 1}"[..]));
        assert_eq!(folder.read("b").as_deref(), Some(&b""[..]));
        folder.write("a", b"another");
        assert_eq!(folder.read("a").as_deref(), Some(&b"another"[..]));
        assert_eq!(names(&folder), 2, "nothing is left of writing");
        // A file under another key's name is not accepted.
        fs::rename(folder.file("a"), folder.file("b")).unwrap();
        assert_eq!(folder.read("b"), None);
    }

    #[test]
    fn a_damaged_plan_is_ignored() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::at(at.path(), 4);
        folder.write("a", b"a plan of some length");
        let path = folder.file("a");
        let whole = fs::read(&path).unwrap();
        for length in [0, 5, head_bytes() - 1, head_bytes(), whole.len() - 1] {
            fs::write(&path, &whole[..length]).unwrap();
            assert_eq!(folder.read("a"), None, "{length} bytes");
        }
        for at in [3, head_bytes() - 3, head_bytes() + 3] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
            assert_eq!(folder.read("a"), None, "byte {at}");
        }
        folder.write("a", b"anew");
        assert_eq!(folder.read("a").as_deref(), Some(&b"anew"[..]));
    }

    #[test]
    fn the_least_recently_used_plans_are_evicted() {
        let at = tempfile::tempdir().unwrap();
        let folder = Folder::at(at.path(), 3);
        let long_ago = |key: &str, seconds| {
            let file = fs::File::options().append(true).open(folder.file(key)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(seconds))
                .unwrap();
        };
        fs::write(at.path().join("notes.txt"), "not ours").unwrap();
        for (key, seconds) in [("a", 4000), ("b", 3000), ("c", 2000)] {
            folder.write(key, b"plan");
            long_ago(key, seconds);
        }
        let part = at.path().join(format!("x{UNFINISHED}"));
        fs::write(&part, "half").unwrap();
        let file = fs::File::options().append(true).open(&part).unwrap();
        file.set_modified(SystemTime::now() - 2 * FORGOTTEN).unwrap();
        assert!(folder.read("a").is_some(), "which makes it the one used last");
        folder.write("d", b"plan");
        let there = ["a", "b", "c", "d"].map(|key| folder.read(key).is_some());
        assert_eq!(there, [true, false, true, true]);
        assert!(at.path().join("notes.txt").exists());
        assert!(!part.exists());
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_ignored() {
        let at = tempfile::tempdir().unwrap();
        let file = at.path().join("file");
        fs::write(&file, "").unwrap();
        let folder = Folder::at(&file, 3);
        folder.write("a", b"plan");
        assert_eq!(folder.read("a"), None);
    }
}
