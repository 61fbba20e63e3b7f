//! Hashes of files, remembered by what tells that a file has not changed: device, inode, size, time of change.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use serde::{Deserialize, Serialize};

/// Files that the cache remembers.
const REMEMBERED: usize = 4096;

/// How much is read at a time; between two reads a hasher that is dropped stops.
const PIECE: usize = 1 << 20;

/// A file at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    /// Bytes.
    pub(super) size: u64,
    modified_s: i64,
    modified_ns: i64,
}

/// The file as it is; `None` when it is not there.
pub(super) fn stamp_of(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size: metadata.size(),
        modified_s: metadata.mtime(),
        modified_ns: metadata.mtime_nsec(),
    })
}

/// Hashes files, now or in the background.
pub(super) struct Hasher {
    shared: Arc<Shared>,
    background: mpsc::Sender<Task>,
}

/// What is known of a file that looks like this.
pub(super) type KnownHash<'a> = &'a dyn Fn(&Stamp) -> Option<String>;

/// What the thread does, in the order in which it was asked for.
enum Task {
    Hash(Arc<Path>, Stamp),
    Then(Box<dyn FnOnce(KnownHash<'_>) + Send>),
}

struct Shared {
    known: Mutex<Known>,
    cache: Option<PathBuf>,
    stop: AtomicBool,
}

#[derive(Default)]
struct Known {
    hashes: BTreeMap<Stamp, String>,
    /// Asked for, and not done.
    pending: BTreeSet<Stamp>,
}

#[derive(Serialize, Deserialize)]
struct Remembered {
    stamp: Stamp,
    hash: String,
}

impl Hasher {
    /// With what was remembered in the cache file, as far as it can be read.
    pub(super) fn new(cache: Option<PathBuf>) -> Hasher {
        let hashes = cache.as_deref().map(read_cache).unwrap_or_default();
        let known = Mutex::new(Known {
            hashes,
            pending: BTreeSet::new(),
        });
        let shared = Arc::new(Shared {
            known,
            cache,
            stop: AtomicBool::new(false),
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

    /// The hash of a file that was hashed while it looked like this.
    pub(super) fn known(&self, stamp: &Stamp) -> Option<String> {
        self.shared.known(stamp)
    }

    /// Hashes a file on this thread, unless its hash is known.
    pub(super) fn hash_now(&self, file: &Path, stamp: Stamp) {
        if !self.shared.lock().hashes.contains_key(&stamp) {
            self.shared.hash(file, stamp);
        }
    }

    /// Hashes a file one day.
    pub(super) fn hash_soon(&self, file: &Arc<Path>, stamp: Stamp) {
        let mut known = self.shared.lock();
        if !known.hashes.contains_key(&stamp) && known.pending.insert(stamp) {
            let _ = self.background.send(Task::Hash(file.clone(), stamp)); // without the thread, paths remain
        }
    }
}

impl Hasher {
    /// Calls this once all that was asked for before is hashed, as far as it can be.
    pub(super) fn then(&self, next: impl FnOnce(KnownHash<'_>) + Send + 'static) {
        let _ = self.background.send(Task::Then(Box::new(next))); // without the thread, never
    }
}

impl Drop for Hasher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn known(&self, stamp: &Stamp) -> Option<String> {
        self.lock().hashes.get(stamp).cloned()
    }

    fn hash(&self, file: &Path, stamp: Stamp) {
        let hashed = hash_file(file, &self.stop);
        let unchanged = stamp_of(file) == Some(stamp);
        let mut known = self.lock();
        known.pending.remove(&stamp);
        match hashed {
            Ok(Some(hash)) if unchanged => {
                known.hashes.insert(stamp, hash);
                while known.hashes.len() > REMEMBERED {
                    known.hashes.pop_first();
                }
                self.remember(&known.hashes);
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(file = %file.display(), %error, "cannot hash"),
        }
    }

    /// Written beside, then renamed: a reader sees the old file or the new one.
    fn remember(&self, hashes: &BTreeMap<Stamp, String>) {
        let Some(cache) = &self.cache else { return };
        let list: Vec<Remembered> = hashes
            .iter()
            .map(|(stamp, hash)| Remembered {
                stamp: *stamp,
                hash: hash.clone(),
            })
            .collect();
        let beside = cache.with_extension(format!("{}.new", std::process::id()));
        let written = serde_json::to_vec(&list)
            .map_err(io::Error::other)
            .and_then(|json| fs::write(&beside, json))
            .and_then(|()| fs::rename(&beside, cache));
        if let Err(error) = written {
            tracing::warn!(file = %cache.display(), %error, "cannot remember hashes of files");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read_cache(cache: &Path) -> BTreeMap<Stamp, String> {
    let Ok(json) = fs::read(cache) else {
        return BTreeMap::new();
    };
    let list: Vec<Remembered> = serde_json::from_slice(&json).unwrap_or_else(|error| {
        tracing::warn!(file = %cache.display(), %error, "hashes of files are computed anew");
        Vec::new()
    });
    list.into_iter().map(|r| (r.stamp, r.hash)).collect()
}

/// `None` when it was told to stop.
fn hash_file(file: &Path, stop: &AtomicBool) -> io::Result<Option<String>> {
    let mut source = File::open(file)?;
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
