//! Copies of components as they are quantized at load, so that the next load reads only the small bytes.
//!
//! One thread in the background writes them, one at a time. What is there is known in memory: whoever sends an order
//! asks no disk.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gpu::{KeepError, KeptFolder, LoadPlan, kept_plan};
use pipelines::Model;

use super::hashes::{Stamp, stamp_of};

/// What could not be kept is not tried again for so long.
const RETRY: Duration = Duration::from_secs(600);

/// A component as it is quantized, by content.
#[derive(Clone)]
pub(super) struct Wanted {
    /// `{component}-{format}-{dtype}-{content hash}`.
    pub(super) key: String,
    /// The model that has it.
    pub(super) model: Arc<dyn Model>,
    /// Its name there.
    pub(super) component: String,
    /// The files as they were when they had this content.
    pub(super) files: Vec<(Arc<Path>, Option<Stamp>)>,
}

impl Wanted {
    /// What is copied.
    fn plan(&self) -> Option<&LoadPlan> {
        self.model.load_plan(&self.component)
    }
}

/// The folder, and who writes to it.
pub(super) struct Copies {
    shared: Arc<Shared>,
    writer: Mutex<Option<Writer>>,
}

struct Writer {
    wanted: mpsc::Sender<Wanted>,
    thread: JoinHandle<()>,
}

struct Shared {
    folder: KeptFolder,
    known: Mutex<Known>,
    stop: AtomicBool,
}

#[derive(Default)]
struct Known {
    there: BTreeMap<String, PathBuf>,
    /// Asked for and not done.
    asked: BTreeSet<String>,
    /// What could not be kept, and when.
    failed: BTreeMap<String, Instant>,
}

impl Copies {
    /// Without the thread nothing is written, and what is there is read.
    pub(super) fn new(folder: KeptFolder) -> Copies {
        let shared = Arc::new(Shared {
            folder,
            known: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let (wanted, received) = mpsc::channel();
        let of_thread = shared.clone();
        let work = move || of_thread.write_all(&received);
        let thread = match thread::Builder::new().name("keep copies".into()).spawn(work) {
            Ok(thread) => Some(thread),
            Err(error) => {
                tracing::warn!(%error, "no thread to keep copies of quantized components");
                None
            }
        };
        Copies {
            shared,
            writer: Mutex::new(thread.map(|thread| Writer { wanted, thread })),
        }
    }

    /// The copy of this key, as far as it is known. Reads nothing.
    pub(super) fn known(&self, key: &str) -> Option<PathBuf> {
        self.shared.lock().there.get(key).cloned()
    }

    /// Looks whether there is a copy, and notes that it is wanted again. One that is not right leaves.
    pub(super) fn look(&self, wanted: &Wanted) {
        self.shared.look(wanted);
    }

    /// Asks for a copy, and that the one that is there is looked at again: it was loaded from just now, or could not be.
    pub(super) fn keep_soon(&self, wanted: Wanted) {
        let mut known = self.shared.lock();
        let failed = known.failed.get(&wanted.key);
        if failed.is_some_and(|when| when.elapsed() < RETRY) || !known.asked.insert(wanted.key.clone()) {
            return;
        }
        drop(known);
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(writer) = &*writer {
            let _ = writer.wanted.send(wanted); // a thread that has ended writes no more
        }
    }

    /// Ends what is being written, and waits for that: moments.
    pub(super) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Writer { wanted, thread }) = writer.take() {
            drop(wanted);
            let _ = thread.join(); // its panic has been told of
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn write_all(&self, wanted: &mpsc::Receiver<Wanted>) {
        for wanted in wanted {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            if !self.look_closely(&wanted) {
                self.write(&wanted);
            }
            self.lock().asked.remove(&wanted.key);
        }
    }

    fn look(&self, wanted: &Wanted) -> bool {
        let Some(path) = self.folder.find(&wanted.key) else {
            self.lock().there.remove(&wanted.key);
            return false;
        };
        self.lock().there.contains_key(&wanted.key) || self.is_right(wanted, path)
    }

    /// As `look`, and reads the header of a copy that was right before.
    fn look_closely(&self, wanted: &Wanted) -> bool {
        let found = self.folder.find(&wanted.key);
        found.is_some_and(|path| self.is_right(wanted, path))
    }

    fn is_right(&self, wanted: &Wanted, path: PathBuf) -> bool {
        let (key, Some(plan)) = (&wanted.key, wanted.plan()) else {
            return false;
        };
        if let Err(error) = kept_plan(&path, plan) {
            self.lock().there.remove(key);
            tracing::warn!(%error, "a kept copy is not used, and removed");
            if let Err(error) = self.folder.remove(key) {
                tracing::warn!(%error, "it stays");
            }
            return false;
        }
        self.lock().there.insert(key.clone(), path);
        true
    }

    fn write(&self, wanted: &Wanted) {
        let (Wanted { key, files, .. }, Some(plan)) = (wanted, wanted.plan()) else {
            return;
        };
        // A file that has changed since has another content than the key says.
        let is_unchanged = || files.iter().all(|(file, stamp)| stamp_of(file) == *stamp);
        let go_on = || !self.stop.load(Ordering::Relaxed) && is_unchanged();
        match self.folder.keep(key, plan, &go_on) {
            Ok(path) => {
                tracing::info!(file = %path.display(), bytes = %plan.bytes(), "kept a copy of a quantized component");
                let mut known = self.lock();
                known.there.insert(key.clone(), path);
                known.failed.remove(key);
            }
            Err(KeepError::Cancelled) => {}
            Err(error) => {
                tracing::warn!(key, %error, "no copy of a quantized component is kept for now");
                self.lock().failed.insert(key.clone(), Instant::now());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
