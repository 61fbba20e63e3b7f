//! Cache of file hashes, by device, inode, size and time of change.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use gpu::{FileStamp, open_private, open_regular};
use hashlink::LruCache;
use serde::{Deserialize, Serialize};

/// Capacity of the cache, in files. Beyond it, the least recently used file is dropped.
const CAPACITY: usize = 4096;

/// Most bytes of the cache file that are read: more than it can have.
const LONGEST_CACHE_BYTES: u64 = 64 << 20;

/// Bytes per read; a dropped hasher stops between two reads.
const PIECE: usize = 1 << 20;

/// Hashes files, synchronously or in the background.
pub(super) struct Hasher {
    shared: Arc<HashCache>,
    background: mpsc::Sender<Task>,
}

/// Looks up the hash of a file by its stamp.
pub(super) type KnownHash<'a> = &'a dyn Fn(&FileStamp) -> Option<String>;

/// Work of the background thread, in order.
enum Task {
    Hash(Arc<Path>, FileStamp),
    Then(Box<dyn FnOnce(KnownHash<'_>) + Send>),
}

struct HashCache {
    known: Mutex<HashState>,
    cache: Option<PathBuf>,
    writing: Mutex<()>,
    stop: AtomicBool,
    /// Whether the last writing of the cache file failed.
    has_failed: AtomicBool,
}

struct HashState {
    hashes: LruCache<FileStamp, String>,
    /// Requested, and not done.
    pending: BTreeSet<FileStamp>,
}

#[derive(Serialize, Deserialize)]
struct Remembered {
    stamp: FileStamp,
    hash: String,
}

impl Hasher {
    /// Loads the cache file, as far as it can be read.
    pub(super) fn new(cache: Option<PathBuf>) -> Hasher {
        let mut hashes = LruCache::new(CAPACITY);
        for known in cache.as_deref().map(read_cache).unwrap_or_default() {
            hashes.insert(known.stamp, known.hash);
        }
        let known = Mutex::new(HashState {
            hashes,
            pending: BTreeSet::new(),
        });
        let shared = Arc::new(HashCache {
            known,
            cache,
            writing: Mutex::new(()),
            stop: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        });
        let (background, tasks) = mpsc::channel::<Task>();
        let of_thread = shared.clone();
        let work = move || {
            for task in tasks {
                match task {
                    Task::Hash(file, stamp) => of_thread.hash(&file, stamp),
                    Task::Then(next) => next(&|stamp| of_thread.known(stamp)),
                }
            }
        };
        if let Err(error) = thread::Builder::new().name("hash files".into()).spawn(work) {
            tracing::warn!(%error, "no thread to hash files: large components go by their paths");
        }
        Hasher { shared, background }
    }

    /// The hash of a file with this stamp.
    pub(super) fn known(&self, stamp: &FileStamp) -> Option<String> {
        self.shared.known(stamp)
    }

    /// Hashes a file on this thread, unless its hash is known.
    pub(super) fn hash_now(&self, file: &Path, stamp: FileStamp) {
        if !self.shared.lock().hashes.contains_key(&stamp) {
            self.shared.hash(file, stamp);
        }
    }

    /// Hashes a file in the background.
    pub(super) fn hash_soon(&self, file: &Arc<Path>, stamp: FileStamp) {
        let mut known = self.shared.lock();
        if !known.hashes.contains_key(&stamp) && known.pending.insert(stamp) {
            let _ = self.background.send(Task::Hash(file.clone(), stamp)); // without the thread, identities stay paths
        }
    }
}

impl Hasher {
    /// Calls `next` once all previous requests are done, successfully or not.
    pub(super) fn then(&self, next: impl FnOnce(KnownHash<'_>) + Send + 'static) {
        let _ = self.background.send(Task::Then(Box::new(next))); // without the thread, never called
    }
}

impl Drop for Hasher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl HashCache {
    fn known(&self, stamp: &FileStamp) -> Option<String> {
        self.lock().hashes.get(stamp).cloned()
    }

    fn hash(&self, file: &Path, stamp: FileStamp) {
        let hashed = hash_file(file, &self.stop);
        let unchanged = FileStamp::at(file).is_ok_and(|now| now == stamp);
        let mut known = self.lock();
        known.pending.remove(&stamp);
        match hashed {
            Ok(Some(hash)) if unchanged => {
                known.hashes.insert(stamp, hash);
                drop(known);
                self.remember();
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(file = %file.display(), %error, "cannot hash"),
        }
    }

    /// Writes a new file, then renames it: a reader sees the old file or the new one. The disk may not answer, so
    /// lookups of hashes do not wait for this; writers wait for each other, and the last writes the most.
    fn remember(&self) {
        let Some(cache) = &self.cache else { return };
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // The most recently used comes last, so that the file preserves the order of use.
        let remembered = |(stamp, hash): (&FileStamp, &String)| Remembered {
            stamp: *stamp,
            hash: hash.clone(),
        };
        let list: Vec<Remembered> = self.lock().hashes.iter().map(remembered).collect();
        let beside = cache.with_extension(format!("{}.new", std::process::id()));
        let written = serde_json::to_vec(&list)
            .map_err(io::Error::other)
            .and_then(|json| {
                let mut file = open_private(&beside)?;
                file.set_len(0)?;
                file.write_all(&json)
            })
            .and_then(|()| fs::rename(&beside, cache));
        // Logged once: a full disk would cause a warning for each file.
        let had_failed = self.has_failed.swap(written.is_err(), Ordering::Relaxed);
        if let Err(error) = written {
            let _ = fs::remove_file(&beside); // the unfinished file takes space
            if !had_failed {
                tracing::warn!(file = %cache.display(), %error, "cannot remember hashes of files until this is mended");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The hashes in a cache file; the most recently used come last.
fn read_cache(cache: &Path) -> Vec<Remembered> {
    let json = match gpu::read_bounded(cache, LONGEST_CACHE_BYTES) {
        Ok(json) => json,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            tracing::warn!(file = %cache.display(), %error, "hashes of files are computed anew");
            return Vec::new();
        }
    };
    serde_json::from_slice(&json).unwrap_or_else(|error| {
        tracing::warn!(file = %cache.display(), %error, "hashes of files are computed anew");
        Vec::new()
    })
}

/// `None` if stopped.
fn hash_file(file: &Path, stop: &AtomicBool) -> io::Result<Option<String>> {
    let mut source = open_regular(file)?;
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE];
    loop {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let read = source.read(&mut piece)?;
        if read == 0 {
            return Ok(Some(hasher.finalize().to_hex().to_string()));
        }
        hasher.update(&piece[..read]);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_full_cache_forgets_the_hash_that_was_asked_for_longest_ago() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("identities.json");
        let file = folder.path().join("new");
        fs::write(&file, "new").unwrap();
        let new = FileStamp::at(&file).unwrap();
        // All others are of a device with a higher number, so that no order of stamps is that of their ages.
        let others: Vec<FileStamp> = (0..CAPACITY)
            .map(|inode| {
                let times = r#""size":1,"modified_s":1,"modified_ns":0,"changed_s":1,"changed_ns":0"#;
                serde_json::from_str(&format!(r#"{{"device":{},"inode":{inode},{times}}}"#, u64::MAX))
                    .unwrap()
            })
            .collect();
        let full: Vec<Remembered> = others
            .iter()
            .map(|stamp| Remembered {
                stamp: *stamp,
                hash: "hash".to_owned(),
            })
            .collect();
        fs::write(&cache, serde_json::to_vec(&full).unwrap()).unwrap();

        let hasher = Hasher::new(Some(cache.clone()));
        assert!(hasher.known(&others[0]).is_some(), "asked for: now the youngest");
        hasher.hash_now(&file, new);
        let read_again = Hasher::new(Some(cache));
        for hasher in [hasher, read_again] {
            assert!(hasher.known(&new).is_some());
            assert!(hasher.known(&others[0]).is_some());
            assert!(hasher.known(&others[1]).is_none(), "the oldest");
            assert!(hasher.known(&others[2]).is_some());
        }
    }

    /// Hashes are looked up and added while another thread writes the cache, even if the disk does not answer.
    #[test]
    fn lookups_do_not_wait_for_the_identity_cache_to_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("identities.json");
        let hasher = Hasher::new(Some(cache.clone()));
        let written = |name: &str| {
            let path = folder.path().join(name);
            fs::write(&path, name).unwrap();
            let stamp = FileStamp::at(&path).unwrap();
            (path, stamp)
        };
        let (first, stamp) = written("first");
        let writes = hasher.shared.writing.lock().unwrap();
        let waits = {
            let shared = hasher.shared.clone();
            thread::spawn(move || shared.hash(&first, stamp))
        };
        while hasher.known(&stamp).is_none() {
            thread::yield_now();
        }
        assert!(
            !waits.is_finished() && !cache.exists(),
            "the hash is known before it is written"
        );
        drop(writes);
        waits.join().unwrap();
        assert!(
            fs::read_to_string(&cache)
                .unwrap()
                .contains(&hasher.known(&stamp).unwrap())
        );
    }
}
