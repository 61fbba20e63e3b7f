//! Kept copies of components quantized at load, so that the next load reads only the small bytes.
//!
//! One background thread writes them, one at a time. Existing copies are cached in memory: sending an order does no
//! IO.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gpu::{KeepError, KeptFolder, LoadPlan, kept_plan};
use model::{Model, ModelFile};

/// Backoff after a failed copy.
const RETRY: Duration = Duration::from_secs(600);

/// A quantized component, by content.
#[derive(Clone)]
pub(super) struct WantedCopy {
    /// Key of the copy: `{component}-{format}-{dtype}-{content hash}`.
    pub(super) key: String,
    /// A model that contains it.
    pub(super) model: Arc<dyn Model>,
    pub(super) component: String,
    /// The files as they were when they had this content.
    pub(super) files: Vec<ModelFile>,
}

impl WantedCopy {
    /// Load plan of the component.
    fn plan(&self) -> Option<&LoadPlan> {
        self.model.load_plan(&self.component)
    }
}

/// The folder, and its writing thread.
pub(super) struct Copies {
    shared: Arc<CopyCache>,
    writer: Mutex<Option<Writer>>,
}

struct Writer {
    wanted: mpsc::Sender<WantedCopy>,
    thread: JoinHandle<()>,
}

struct CopyCache {
    folder: KeptFolder,
    known: Mutex<CopyState>,
    stop: AtomicBool,
}

#[derive(Default)]
struct CopyState {
    there: BTreeMap<String, PathBuf>,
    /// Requested, and not done.
    asked: BTreeSet<String>,
    /// Time of the last failure, by key.
    failed: BTreeMap<String, Instant>,
}

impl Copies {
    /// If the thread cannot start, nothing is written, and existing copies are read.
    pub(super) fn new(folder: KeptFolder) -> Copies {
        let shared = Arc::new(CopyCache {
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

    /// The copy of this key, if known. Does no IO.
    pub(super) fn known(&self, key: &str) -> Option<PathBuf> {
        self.shared.lock().there.get(key).cloned()
    }

    /// Looks for a copy, and marks it as used. An invalid copy is removed.
    pub(super) fn look(&self, wanted: &WantedCopy) {
        self.shared.look(wanted);
    }

    /// Requests a copy, and revalidates an existing one: it was just loaded from, or could not be.
    pub(super) fn keep_soon(&self, wanted: WantedCopy) {
        let mut known = self.shared.lock();
        let failed = known.failed.get(&wanted.key);
        if failed.is_some_and(|when| when.elapsed() < RETRY) || !known.asked.insert(wanted.key.clone()) {
            return;
        }
        drop(known);
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(writer) = &*writer {
            let _ = writer.wanted.send(wanted); // an ended thread writes no more
        }
    }

    /// Aborts the current copy, and waits for the thread: moments.
    pub(super) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Writer { wanted, thread }) = writer.take() {
            drop(wanted);
            let _ = thread.join(); // a panic has been logged
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.stop();
    }
}

impl CopyCache {
    fn write_all(&self, wanted: &mpsc::Receiver<WantedCopy>) {
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

    fn look(&self, wanted: &WantedCopy) -> bool {
        let Some(path) = self.folder.find(&wanted.key) else {
            self.lock().there.remove(&wanted.key);
            return false;
        };
        self.lock().there.contains_key(&wanted.key) || self.is_right(wanted, path)
    }

    /// Like `look`, but rereads the header of a known copy.
    fn look_closely(&self, wanted: &WantedCopy) -> bool {
        let found = self.folder.find(&wanted.key);
        found.is_some_and(|path| self.is_right(wanted, path))
    }

    fn is_right(&self, wanted: &WantedCopy, path: PathBuf) -> bool {
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

    fn write(&self, wanted: &WantedCopy) {
        let (WantedCopy { key, files, .. }, Some(plan)) = (wanted, wanted.plan()) else {
            return;
        };
        // A file that has changed no longer has the content of the key.
        let is_unchanged = || files.iter().all(ModelFile::is_current);
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

    fn lock(&self) -> MutexGuard<'_, CopyState> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
