//! Models that have been opened: by their headers, without weights.
//!
//! A component is known by the hash of its files' content, so that two entries that name the same weights share one
//! copy. Small files are hashed when they are first opened; large ones by a thread in the background, and until that
//! is done their component goes by its path, in every model and format that shares it. A component changes over to the
//! identity found since at a moment when nothing goes by the old one: see [`Library::adopt`].

mod hashes;
mod kept;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::DType;
use gpu::{CardDescription, KeptFolder, LoadPlan, TensorSource, Timeline};
use pipelines::{Catalogue, Model, ModelError, Precision, Quantization, RequestError};
use residency::{Bytes, Component, ComponentId};

use crate::error::Error;
use crate::messages::ModelLocation;
use hashes::{Hasher, KnownHash, Stamp, stamp_of};
use kept::{Copies, Wanted};

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
    /// What its components are quantized to.
    pub quantization: Quantization,
}

impl Entry {
    /// An entry under the key that follows from what it is. The revision may be empty.
    pub fn new(id: String, revision: String, path: PathBuf, quantization: Quantization) -> Entry {
        let at = if revision.is_empty() { "" } else { "@" };
        Entry {
            key: format!("{id}{at}{revision}+{quantization}"),
            id,
            revision,
            path,
            quantization,
        }
    }

    /// The same model with its components quantized in another way.
    #[must_use]
    pub fn quantized(&self, quantization: Quantization) -> Entry {
        let (id, revision, path) = (self.id.clone(), self.revision.clone(), self.path.clone());
        Entry::new(id, revision, path, quantization)
    }

    /// Whether a key names this model, in whatever formats.
    pub fn is_of_same_model(&self, key: &str) -> bool {
        fn model_of(key: &str) -> Option<&str> {
            key.rsplit_once('+').map(|(model, _)| model) // no format has a plus in it
        }
        model_of(key) == model_of(&self.key)
    }

    /// For the worker, without copies: see [`Library::location`].
    pub fn location(&self) -> ModelLocation {
        ModelLocation {
            key: self.key.clone(),
            path: self.path.clone(),
            quantization: self.quantization.clone(),
            kept: Vec::new(),
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
    /// Bytes of models that were opened for that alone.
    measured: Mutex<BTreeMap<Shelf, Measured>>,
    /// Where copies of what is quantized at load are kept, if they are.
    copies: Option<Arc<Copies>>,
}

/// Where an open model is kept: path, compute dtype, and what it is quantized to.
type Shelf = (PathBuf, String, Quantization);

#[derive(Clone)]
struct Opened {
    model: Arc<dyn Model>,
    components: Vec<Component>,
    stamps: Stamps,
}

struct Measured {
    bytes: Bytes,
    stamps: Stamps,
}

/// What a model was read from, as it was then.
#[derive(Clone)]
struct Stamps {
    /// Files of each component.
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
            measured: Mutex::new(BTreeMap::new()),
            copies: None,
        }
    }

    /// Keeps copies of components that are quantized at load, from the moment when their content is known.
    #[must_use]
    pub fn with_copies(mut self, folder: KeptFolder) -> Library {
        self.copies = Some(Arc::new(Copies::new(folder)));
        self
    }

    /// Opens an entry as a card would hold it. Reads headers and hashes small files: not for async threads.
    ///
    /// # Errors
    /// [`Error::ModelUnsupported`], [`Error::ModelDamaged`]; [`Error::Invalid`] for a format that a component cannot have.
    pub fn open(&self, entry: &Entry, card: &CardDescription) -> Result<OpenModel, Error> {
        let shelf = shelf_of(entry, &card.compute_dtype);
        let open_already = self
            .lock()
            .get(&shelf)
            .filter(|opened| opened.stamps.are_current(&entry.path))
            .map(Opened::to_model);
        if let Some(open_model) = open_already {
            self.look_for_copies(&shelf);
            return Ok(open_model);
        }
        let mut timeline = Timeline::begin("open a model, in the supervisor");
        let model = self.read(entry, card)?;
        timeline.part("read headers, tokenizers");
        let mut opened = Opened {
            components: model.components().to_vec(),
            stamps: Stamps::of(&entry.path, &*model),
            model,
        };
        for files in &opened.stamps.files {
            self.hash(files);
        }
        timeline.part("hash small files");
        let mut all = self.lock();
        for index in 0..opened.components.len() {
            // What another entry has by its path, on a card perhaps, is the same here: else it would be there twice.
            if all.values().any(|other| other.goes_by_path(&opened, index)) {
                continue;
            }
            if let Some(id) = self.content_identity(&opened, index, &card.compute_dtype, &entry.quantization)
            {
                opened.components[index].id = id;
            }
        }
        let open_model = opened.to_model();
        all.insert(shelf.clone(), opened);
        drop(all);
        self.look_for_copies(&shelf);
        Ok(open_model)
    }

    /// Where an entry is, for the worker, with the copies of its components that are known. Reads nothing.
    pub fn location(&self, entry: &Entry, compute_dtype: &str) -> ModelLocation {
        let shelf = shelf_of(entry, compute_dtype);
        let kept = self.copies.iter().flat_map(|copies| {
            let wanted = self.wanted(&shelf).into_iter();
            wanted.filter_map(|(name, wanted)| Some((name, copies.known(&wanted?.key)?)))
        });
        ModelLocation {
            kept: kept.collect(),
            ..entry.location()
        }
    }

    /// An entry was loaded: what was quantized on the way is kept, once its content is known.
    pub fn keep_soon(&self, entry: &Entry, compute_dtype: &str) {
        let Some(copies) = &self.copies else { return };
        let shelf = shelf_of(entry, compute_dtype);
        let mut unknown = Vec::new();
        for (name, wanted) in self.wanted(&shelf) {
            match wanted {
                Some(wanted) => copies.keep_soon(wanted),
                None => unknown.push(name),
            }
        }
        if unknown.is_empty() {
            return;
        }
        let (copies, opened) = (copies.clone(), self.lock().get(&shelf).cloned());
        self.hasher.then(move |known| {
            let opened = opened.iter();
            let wanted = opened.flat_map(|opened| opened.wanted(&shelf, known));
            for (_, wanted) in wanted.filter(|(name, _)| unknown.contains(name)) {
                if let Some(wanted) = wanted {
                    copies.keep_soon(wanted);
                }
            }
        });
    }

    /// Ends what is being kept, and waits for that. Nothing is kept from then on.
    pub fn stop_keeping(&self) {
        if let Some(copies) = &self.copies {
            copies.stop();
        }
    }

    fn look_for_copies(&self, shelf: &Shelf) {
        if let Some(copies) = &self.copies {
            let wanted = self.wanted(shelf).into_iter();
            wanted
                .filter_map(|(_, wanted)| wanted)
                .for_each(|wanted| copies.look(&wanted));
        }
    }

    fn wanted(&self, shelf: &Shelf) -> Vec<(String, Option<Wanted>)> {
        let opened = self.lock();
        let known = |stamp: &Stamp| self.hasher.known(stamp);
        opened
            .get(shelf)
            .map_or(Vec::new(), |opened| opened.wanted(shelf, &known))
    }

    /// Bytes of an entry as a card would hold it. Its headers are read, and nothing of it is kept but this: not for async
    /// threads.
    ///
    /// # Errors
    /// As [`Library::open`].
    pub fn bytes(&self, entry: &Entry, card: &CardDescription) -> Result<Bytes, Error> {
        let shelf = shelf_of(entry, &card.compute_dtype);
        if let Some(opened) = self.lock().get(&shelf)
            && opened.stamps.are_current(&entry.path)
        {
            return Ok(opened.components.iter().map(|c| c.bytes).sum());
        }
        if let Some(measured) = self.lock_measured().get(&shelf)
            && measured.stamps.are_current(&entry.path)
        {
            return Ok(measured.bytes);
        }
        let model = self.read(entry, card)?;
        let measured = Measured {
            bytes: model.components().iter().map(|c| c.bytes).sum(),
            stamps: Stamps::of(&entry.path, &*model),
        };
        let bytes = measured.bytes;
        self.lock_measured().insert(shelf, measured);
        Ok(bytes)
    }

    fn read(&self, entry: &Entry, card: &CardDescription) -> Result<Arc<dyn Model>, Error> {
        let precision = Precision {
            dtype: dtype_of(&card.compute_dtype)?,
            quantization: entry.quantization.clone(),
        };
        self.catalogue.open(&entry.path, &precision).map_err(error_of)
    }

    /// The components of an entry that is open, under the identities that they go by now. Reads nothing.
    pub fn components(&self, entry: &Entry, compute_dtype: &str) -> Option<Vec<Component>> {
        let shelf = shelf_of(entry, compute_dtype);
        self.lock().get(&shelf).map(|opened| opened.components.clone())
    }

    /// Lets components go by the hashes that have been found since they were opened, each in all models at once and only if
    /// its present identity is not in use: on a card, pinned, held, or named by a job.
    pub fn adopt(&self, in_use: &dyn Fn(&ComponentId) -> bool) {
        for ((_, dtype, quantization), opened) in self.lock().iter_mut() {
            for index in 0..opened.components.len() {
                if !opened.is_provisional(index) || in_use(&opened.components[index].id) {
                    continue;
                }
                if let Some(id) = self.content_identity(opened, index, dtype, quantization) {
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
    fn content_identity(
        &self,
        opened: &Opened,
        index: usize,
        dtype: &str,
        quantization: &Quantization,
    ) -> Option<ComponentId> {
        let hash = opened.content_hash(index, &|stamp| self.hasher.known(stamp))?;
        let name = &opened.components[index].name;
        Some(ComponentId::new(match quantization.format_of(name) {
            None => format!("{}:{dtype}", &hash[..16]),
            Some(format) => format!("{}:{dtype}:{format}", &hash[..16]),
        }))
    }

    fn lock_measured(&self) -> MutexGuard<'_, BTreeMap<Shelf, Measured>> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No half-done change is ever left behind: each is one call.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Shelf, Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stamps {
    fn of(path: &Path, model: &dyn Model) -> Stamps {
        let stamped = |file: Arc<Path>| {
            let stamp = stamp_of(&file);
            (file, stamp)
        };
        let components = model.components().iter();
        let files = components.map(|c| model.files_of(&c.name).into_iter().map(stamped).collect());
        Stamps {
            files: files.collect(),
            path: stamp_of(path),
        }
    }

    fn are_current(&self, path: &Path) -> bool {
        let mut files = self.files.iter().flatten();
        stamp_of(path) == self.path && files.all(|(file, stamp)| stamp_of(file) == *stamp)
    }
}

impl Opened {
    fn has_provisional(&self) -> bool {
        (0..self.components.len()).any(|index| self.is_provisional(index))
    }

    fn is_provisional(&self, index: usize) -> bool {
        let first = self.model.components().get(index);
        first.is_some_and(|first| first.id == self.components[index].id)
            && !self.stamps.files[index].is_empty()
    }

    /// Whether this has a component of `other` by its path, from the same files.
    fn goes_by_path(&self, other: &Opened, index: usize) -> bool {
        let (theirs, files) = (&other.components[index].id, &other.stamps.files[index]);
        let mut own = 0..self.components.len();
        own.any(|own| {
            self.components[own].id == *theirs && self.is_provisional(own) && self.stamps.files[own] == *files
        })
    }

    /// Hash of what a component is made of; `None` while that is not known, or where it has no files.
    fn content_hash(&self, index: usize, known: KnownHash<'_>) -> Option<String> {
        let files = self.stamps.files.get(index).filter(|files| !files.is_empty())?;
        let mut whole = blake3::Hasher::new();
        whole.update(self.components[index].name.as_bytes());
        for (_, stamp) in files {
            whole.update(known(&(*stamp)?)?.as_bytes());
        }
        Some(whole.finalize().to_hex().to_string())
    }

    /// The components that are quantized at load, by name; without more while their content is not known.
    fn wanted(
        &self,
        (_, dtype, quantization): &Shelf,
        known: KnownHash<'_>,
    ) -> Vec<(String, Option<Wanted>)> {
        let made = self
            .components
            .iter()
            .enumerate()
            .filter_map(|(index, component)| {
                let name = &component.name;
                let format = quantization.format_of(name)?;
                let LoadPlan::Files(sources) = self.model.load_plan(name)? else {
                    return None;
                };
                if !sources.iter().any(TensorSource::is_made_at_load) {
                    return None;
                }
                let wanted = self.content_hash(index, known).map(|hash| Wanted {
                    key: format!("{name}-{format}-{dtype}-{hash}"),
                    model: self.model.clone(),
                    component: name.clone(),
                    files: self.stamps.files[index].clone(),
                });
                Some((name.clone(), wanted))
            });
        made.collect()
    }

    fn to_model(&self) -> OpenModel {
        OpenModel {
            model: self.model.clone(),
            components: self.components.clone(),
        }
    }
}

fn shelf_of(entry: &Entry, compute_dtype: &str) -> Shelf {
    (
        entry.path.clone(),
        compute_dtype.to_owned(),
        entry.quantization.clone(),
    )
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
        ModelError::Quantization { .. } => Error::Invalid(vec![RequestError {
            field: "model.quantization.components".to_owned(),
            problem: message,
        }]),
    }
}
