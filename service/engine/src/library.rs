//! Models that have been opened: by their headers, without weights.
//!
//! A component is known by the hash of its files' content, so that two entries that name the same weights share one
//! copy. Small files are hashed when they are first opened; large ones by a thread in the background, and until that
//! is done their component goes by its path. A model changes over to the identities found since at a moment when
//! nothing goes by the old ones: see [`Library::adopt`].

mod hashes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::DType;
use gpu::CardDescription;
use pipelines::{Catalogue, Model, ModelError, Precision};
use residency::{Component, ComponentId};

use crate::error::Error;
use crate::messages::ModelLocation;
use hashes::{Hasher, Stamp, stamp_of};

/// Files of a component that are hashed at once, in bytes: a fifth of a second.
const HASHED_AT_ONCE: u64 = 256 << 20;

/// A resolved model reference: the key of the cache, and where the files are. Which tensors it becomes
/// depends on the card's dtype: see [`Library::open`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// `id@revision+component=format`, everything resolved.
    pub key: String,
    /// As configured.
    pub id: String,
    /// As found.
    pub revision: String,
    /// Folder or file.
    pub path: PathBuf,
}

impl Entry {
    /// For the worker.
    pub fn location(&self) -> ModelLocation {
        ModelLocation {
            key: self.key.clone(),
            path: self.path.clone(),
        }
    }
}

/// A model as one kind of card holds it.
#[derive(Clone)]
pub struct OpenModel {
    /// What it needs and computes.
    pub model: Arc<dyn Model>,
    /// Its components under their best known identities: content hash, or path while that is not known.
    pub components: Vec<Component>,
}

/// All models that have been opened, and what their files contain. Cheap to ask again: a model is opened anew only
/// when one of its files has changed.
pub struct Library {
    catalogue: Catalogue,
    hasher: Hasher,
    opened: Mutex<BTreeMap<Shelf, Opened>>,
}

/// Where an open model is kept: path and compute dtype.
type Shelf = (PathBuf, String);

struct Opened {
    model: Arc<dyn Model>,
    components: Vec<Component>,
    /// Files of each component, as they were when it was opened.
    files: Vec<Vec<(Arc<Path>, Option<Stamp>)>>,
    /// The folder or file itself.
    path: Option<Stamp>,
}

impl Library {
    /// A library without open models. Hashes are remembered in `identity_cache`, if one is given.
    pub fn new(catalogue: Catalogue, identity_cache: Option<PathBuf>) -> Library {
        Library {
            catalogue,
            hasher: Hasher::new(identity_cache),
            opened: Mutex::new(BTreeMap::new()),
        }
    }

    /// Opens an entry as a card would hold it. Reads headers and hashes small files: not for async threads.
    ///
    /// # Errors
    /// [`Error::ModelUnsupported`], [`Error::ModelDamaged`].
    pub fn open(&self, entry: &Entry, card: &CardDescription) -> Result<OpenModel, Error> {
        let shelf = (entry.path.clone(), card.compute_dtype.clone());
        if let Some(opened) = self.lock().get(&shelf)
            && opened.is_unchanged(&entry.path)
        {
            return Ok(opened.to_model());
        }
        let precision = Precision {
            dtype: dtype_of(&card.compute_dtype)?,
        };
        let model = self.catalogue.open(&entry.path, precision).map_err(error_of)?;
        let files: Vec<Vec<_>> = model
            .components()
            .iter()
            .map(|c| {
                model
                    .files_of(&c.name)
                    .into_iter()
                    .map(|f| (f.clone(), stamp_of(&f)))
                    .collect()
            })
            .collect();
        let path = stamp_of(&entry.path);
        let mut opened = Opened {
            components: model.components().to_vec(),
            model,
            files,
            path,
        };
        for index in 0..opened.components.len() {
            self.hash(&opened.files[index]);
            if let Some(id) = self.content_identity(&opened, index, &card.compute_dtype) {
                opened.components[index].id = id;
            }
        }
        let open_model = opened.to_model();
        self.lock().insert(shelf, opened);
        Ok(open_model)
    }

    /// The components of an entry that is open, under the identities that they go by now. Reads nothing.
    pub fn components(&self, entry: &Entry, compute_dtype: &str) -> Option<Vec<Component>> {
        let shelf = (entry.path.clone(), compute_dtype.to_owned());
        self.lock().get(&shelf).map(|opened| opened.components.clone())
    }

    /// Lets models go by the hashes that have been found since they were opened, each as a whole and only if none of
    /// its present identities is in use: on a card, pinned, held, or named by a job.
    pub fn adopt(&self, in_use: &dyn Fn(&ComponentId) -> bool) {
        for ((_, dtype), opened) in self.lock().iter_mut() {
            if !opened.has_provisional() || opened.components.iter().any(|c| in_use(&c.id)) {
                continue;
            }
            for index in 0..opened.components.len() {
                if let Some(id) = self.content_identity(opened, index, dtype) {
                    opened.components[index].id = id;
                }
            }
        }
    }

    /// Whether models go by provisional identities that [`Library::adopt`] may replace one day.
    pub fn is_hashing(&self) -> bool {
        self.lock().values().any(Opened::has_provisional)
    }

    fn hash(&self, files: &[(Arc<Path>, Option<Stamp>)]) {
        let size: u64 = files
            .iter()
            .filter_map(|(_, stamp)| *stamp)
            .map(|stamp| stamp.size)
            .sum();
        for (file, stamp) in files {
            match stamp {
                Some(stamp) if size <= HASHED_AT_ONCE => self.hasher.hash_now(file, *stamp),
                Some(stamp) => self.hasher.hash_soon(file, *stamp),
                None => {}
            }
        }
    }

    /// The name is part of it: one file may hold several components.
    fn content_identity(&self, opened: &Opened, index: usize, dtype: &str) -> Option<ComponentId> {
        let files = &opened.files[index];
        if files.is_empty() {
            return None;
        }
        let mut whole = blake3::Hasher::new();
        whole.update(opened.components[index].name.as_bytes());
        for (_, stamp) in files {
            whole.update(self.hasher.known(&(*stamp)?)?.as_bytes());
        }
        let hash = whole.finalize().to_hex();
        Some(ComponentId::new(format!("{}:{dtype}", &hash[..16])))
    }

    /// No half-done change is ever left behind: each is one call.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Shelf, Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Opened {
    fn is_unchanged(&self, path: &Path) -> bool {
        let mut files = self.files.iter().flatten();
        stamp_of(path) == self.path && files.all(|(file, stamp)| stamp_of(file) == *stamp)
    }

    fn has_provisional(&self) -> bool {
        let provisional = self
            .model
            .components()
            .iter()
            .zip(&self.components)
            .zip(&self.files);
        provisional
            .into_iter()
            .any(|((first, now), files)| first.id == now.id && !files.is_empty())
    }

    fn to_model(&self) -> OpenModel {
        OpenModel {
            model: self.model.clone(),
            components: self.components.clone(),
        }
    }
}

fn dtype_of(compute_dtype: &str) -> Result<DType, Error> {
    match compute_dtype {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::BF16),
        other => Err(Error::Internal(format!(
            "a card computes in {other}, which no pipeline does"
        ))),
    }
}

fn error_of(error: ModelError) -> Error {
    let message = error.to_string();
    match error {
        ModelError::NotAPipeline { .. } | ModelError::Unsupported { .. } => Error::ModelUnsupported(message),
        ModelError::Damaged { .. } => Error::ModelDamaged(message),
    }
}
