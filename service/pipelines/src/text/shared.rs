//! Tokenizers that several models share: a tokenizer takes tens of megabytes, and the same model in another format has the same
//! tokenizer.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::files::{ReadFiles, count_all_as_read, recorded};
use crate::{ModelError, ModelFile};

/// The files that a tokenizer may be read from.
const FILES: [&str; 6] = [
    "tokenizer.json",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
];

/// Open tokenizers of one kind, by the versions of their files. The map keeps none of them open.
pub(crate) struct Shared<T>(Mutex<BTreeMap<Vec<ModelFile>, Known<T>>>);

/// A tokenizer that may still be open, and the text files that were read for it.
type Known<T> = (Weak<T>, ReadFiles);

impl<T> Shared<T> {
    pub(crate) const fn new() -> Shared<T> {
        Shared(Mutex::new(BTreeMap::new()))
    }

    /// The tokenizer of a folder. An open tokenizer of the same files is shared.
    ///
    /// # Errors
    /// Errors of `open`.
    pub(crate) fn of(
        &self,
        folder: &Path,
        open: impl FnOnce(&Path) -> Result<T, ModelError>,
    ) -> Result<Arc<T>, ModelError> {
        let files = FILES
            .iter()
            .filter_map(|name| ModelFile::at(&folder.join(name)).ok());
        self.of_files(files.collect(), || open(folder))
    }

    /// The tokenizer that these files have. An open tokenizer of the same files is shared.
    ///
    /// # Errors
    /// Errors of `open`.
    pub(crate) fn of_files(
        &self,
        files: Vec<ModelFile>,
        open: impl FnOnce() -> Result<T, ModelError>,
    ) -> Result<Arc<T>, ModelError> {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = lock()
            .get(&files)
            .and_then(|(tokenizer, read)| Some((tokenizer.upgrade()?, read.clone())));
        if let Some((shared, read)) = shared {
            count_all_as_read(&read);
            return Ok(shared);
        }
        let (opened, read) = recorded(open);
        count_all_as_read(&read);
        let tokenizer = Arc::new(opened?); // two threads may open it at once: the later one is shared
        let mut open = lock();
        open.retain(|_, (tokenizer, _)| tokenizer.strong_count() > 0);
        open.insert(files, (Arc::downgrade(&tokenizer), read));
        Ok(tokenizer)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn a_tokenizer_in_use_is_shared_as_long_as_its_files_are_unchanged() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        for each in [&a, &b] {
            fs::create_dir(each).expect("a folder");
            fs::write(each.join("tokenizer.json"), "one").expect("a file");
        }
        let shared = Shared::<String>::new();
        let read = |folder: &Path| Ok(fs::read_to_string(folder.join("tokenizer.json")).expect("a file"));
        let first = shared.of(&a, read).expect("a tokenizer");
        let again = shared.of(&a, |_| panic!("it is open")).expect("a tokenizer");
        assert!(Arc::ptr_eq(&first, &again));
        assert!(!Arc::ptr_eq(&first, &shared.of(&b, read).expect("another")));

        fs::write(a.join("tokenizer.json"), "two").expect("a file");
        let file = fs::File::options()
            .write(true)
            .open(a.join("tokenizer.json"))
            .expect("a file");
        file.set_modified(SystemTime::now() + Duration::from_secs(5))
            .expect("a time");
        assert_eq!(*shared.of(&a, read).expect("a tokenizer"), "two");

        drop((first, again));
        let kept = shared.of(&b, read).expect("another");
        let there = shared
            .0
            .lock()
            .expect("a lock")
            .values()
            .filter(|(one, _)| one.strong_count() > 0)
            .count();
        assert_eq!(there, 1, "nobody has the others");
        drop(kept);
    }
}
