//! Cache of opened models, known by their headers, without weights.
//!
//! A component's identity is the hash of its files' content, so that two entries with the same weights share one
//! copy. Small files are hashed when they are first opened; large ones by a background thread, and until then their
//! components are identified by path and versions of files, in every model and format that shares them. A component switches to the new
//! identity only while the old one is not in use: see [`Library::adopt`].

mod hashes;
mod kept;
mod opening;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::DType;
use gpu::{CardDescription, FileStamp, KeptFolder, LoadPlan, TensorSource, Timeline};
use hashlink::LruCache;
use model::{
    AdapterFile, Model, ModelError, ModelFile, ModelOpener, Precision, Quantization, RequestError,
    digest_of_names,
};
use residency::{Bytes, Component, ComponentId};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::messages::ModelLocation;
use crate::stamps::{PathStamps, Stamps};
use hashes::{Hasher, KnownHash};
use kept::{Copies, WantedCopy};
use opening::Opening;

pub use crate::not_opened::NotOpened;

/// Total file size of a component up to which it is hashed synchronously, in bytes: a fifth of a second.
const MAX_SYNC_HASH_BYTES: u64 = 256 << 20;

/// Unused models that are kept open, of all formats and dtypes together. Opening one again costs
/// milliseconds.
const KEPT_OPEN: usize = 64;

/// Number of closed models whose identities, and whose bytes, are remembered: the most recently used.
const REMEMBERED: usize = 1024;

/// A resolved model reference: cache key and files. The resulting tensors depend on the card's dtype: see
/// [`Library::open`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Entry {
    /// Cache key: `id@revision+component=format&adapter`, everything resolved.
    pub key: String,
    /// As configured.
    pub id: String,
    /// Resolved revision; may be empty.
    pub revision: String,
    pub path: PathBuf,
    /// Formats of its components.
    pub quantization: Quantization,
    /// Adapters that are attached to it, in order.
    pub adapters: Vec<AdapterFile>,
}

impl Entry {
    /// An entry with the key derived from its fields. The revision may be empty.
    pub fn new(id: String, revision: String, path: PathBuf, quantization: Quantization) -> Entry {
        let at = if revision.is_empty() { "" } else { "@" };
        Entry {
            key: format!("{id}{at}{revision}+{quantization}"),
            id,
            revision,
            path,
            quantization,
            adapters: Vec::new(),
        }
    }

    /// The same model with another quantization.
    #[must_use]
    pub fn quantized(&self, quantization: Quantization) -> Entry {
        let (id, revision, path) = (self.id.clone(), self.revision.clone(), self.path.clone());
        Entry::new(id, revision, path, quantization).with_adapters(self.adapters.clone())
    }

    /// The same model with these adapters instead of its own.
    #[must_use]
    pub fn with_adapters(&self, adapters: Vec<AdapterFile>) -> Entry {
        let mut key = self.base_key().to_owned();
        for adapter in &adapters {
            key.push(BEFORE_ADAPTER);
            for c in adapter.name.chars() {
                match ESCAPED.iter().find(|(escaped, _)| *escaped == c) {
                    Some((_, code)) => key.push_str(code),
                    None => key.push(c),
                }
            }
            if adapter.ignores_unknown {
                key.push(IGNORES_UNKNOWN);
            }
        }
        Entry {
            key,
            adapters,
            ..self.clone()
        }
    }

    /// A key's part without adapters, and the adapters that it names, each with whether unknown tensors are ignored.
    pub fn adapters_in_key(key: &str) -> (&str, Vec<(String, bool)>) {
        let formats = key.rfind('+').unwrap_or_default();
        let Some(at) = key[formats..].find(BEFORE_ADAPTER) else {
            return (key, Vec::new());
        };
        let (base, adapters) = key.split_at(formats + at);
        let named = adapters[BEFORE_ADAPTER.len_utf8()..].split(BEFORE_ADAPTER);
        let named = named.map(|name| {
            let (name, ignores) = match name.strip_suffix(IGNORES_UNKNOWN) {
                Some(name) => (name, true),
                None => (name, false),
            };
            let plain = ESCAPED
                .iter()
                .rev()
                .fold(name.to_owned(), |name, (escaped, code)| {
                    name.replace(code, &escaped.to_string())
                });
            (plain, ignores)
        });
        (base, named.collect())
    }

    /// Key of the model without adapters.
    pub fn base_key(&self) -> &str {
        match self.adapters.is_empty() {
            true => &self.key,
            false => Entry::adapters_in_key(&self.key).0,
        }
    }

    /// Whether another entry is this one but for their adapters.
    pub fn is_of_one_base(&self, other: &Entry) -> bool {
        self.base_key() == other.base_key()
            && self.path == other.path
            && self.quantization == other.quantization
    }

    /// Whether a key is of this model, in any format.
    pub fn is_of_same_model(&self, key: &str) -> bool {
        fn model_of(key: &str) -> Option<&str> {
            key.rsplit_once('+').map(|(model, _)| model) // formats and adapters contain no plus
        }
        model_of(key) == model_of(&self.key)
    }

    /// Location for the worker, without kept copies: see [`Library::location`].
    pub fn location(&self) -> ModelLocation {
        ModelLocation {
            key: self.key.clone(),
            path: self.path.clone(),
            quantization: self.quantization.clone(),
            adapters: self.adapters.clone(),
            kept: Vec::new(),
            identities: Vec::new(),
        }
    }
}

/// A model as opened for one kind of card.
#[derive(Clone)]
pub struct OpenModel {
    pub model: Arc<dyn Model>,
    /// Its components with their best known identities: content hash, or path and versions of files until it is known.
    pub components: Vec<Component>,
}

/// All opened models, and the hashes of their files. Opening again is cheap: a model is reopened only if one of its
/// files has changed.
pub struct Library {
    families: Box<dyn ModelOpener>,
    hasher: Hasher,
    opened: Mutex<BTreeMap<ModelKey, Opened>>,
    /// Identities of closed models: see [`ModelLocation::identities`].
    closed: Mutex<LruCache<ModelKey, Vec<(ComponentId, ComponentId)>>>,
    /// Counts uses of models.
    uses: AtomicU64,
    /// Bytes of models that were opened only to measure them.
    measured: Mutex<LruCache<ModelKey, Measured>>,
    /// Kept copies of components that are quantized at load; `None`: copies are not kept.
    copies: Option<Arc<Copies>>,
    opening: Opening,
}

/// Cache key of an open model: path, computation dtype, quantization, and adapters.
type ModelKey = (PathBuf, String, Quantization, Vec<AdapterFile>);

/// Separates the adapters in an entry's key.
const BEFORE_ADAPTER: char = '&';
/// Follows an adapter whose unknown tensors are ignored.
const IGNORES_UNKNOWN: char = '~';
/// Characters that have a meaning in a key, and their escapes in an adapter's name. The escape character itself is the first to
/// be escaped and the last to be unescaped.
const ESCAPED: [(char, &str); 4] = [('%', "%25"), ('+', "%2B"), ('&', "%26"), ('~', "%7E")];

#[derive(Clone)]
struct Opened {
    model: Arc<dyn Model>,
    components: Vec<Component>,
    /// Digests of the names of the tensors that each component loads.
    loaded: Vec<String>,
    stamps: Stamps,
    /// Number of the model's last use, counted over all models.
    used: u64,
}

#[derive(Clone)]
struct Measured {
    bytes: Bytes,
    stamps: Stamps,
}

impl Library {
    /// An empty library. Hashes are persisted in `identity_cache`, if there is one.
    pub fn new(families: impl ModelOpener + 'static, identity_cache: Option<PathBuf>) -> Library {
        Library {
            families: Box::new(families),
            hasher: Hasher::new(identity_cache),
            opened: Mutex::new(BTreeMap::new()),
            closed: Mutex::new(LruCache::new(REMEMBERED)),
            uses: AtomicU64::new(0),
            measured: Mutex::new(LruCache::new(REMEMBERED)),
            copies: None,
            opening: Opening::new(),
        }
    }

    /// Enables kept copies of components quantized at load, written once their content hash is known.
    #[must_use]
    pub fn with_copies(mut self, folder: KeptFolder) -> Library {
        self.copies = Some(Arc::new(Copies::new(folder)));
        self
    }

    /// Runs work that reads the model at a path, on a blocking thread. A file system that does not answer blocks
    /// threads of that model alone; the caller gets an error after a minute.
    ///
    /// # Errors
    /// Errors of the work; [`Error::NotOpened`] when the file system does not answer, or too many models are being opened.
    pub async fn aside<T: Send + 'static>(
        &self,
        path: &Path,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.aside_for("", path, work).await
    }

    /// As [`Library::aside`], for an account: see [`JobOptions::account`](crate::job::JobOptions::account). Much work of one keeps no
    /// other from the model.
    ///
    /// # Errors
    /// Those of [`Library::aside`].
    pub async fn aside_for<T: Send + 'static>(
        &self,
        account: &str,
        path: &Path,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.opening.run(path, account, work).await
    }

    /// The canonical entry of all equal requests: formats by component become a preset if they are exactly that preset. Opens the
    /// model for a card if components are named and it is not open. An entry that cannot be opened stays as it is.
    ///
    /// # Errors
    /// Those of [`Library::aside`].
    pub async fn canonical(
        self: &Arc<Self>,
        entry: Arc<Entry>,
        card: CardDescription,
    ) -> Result<Arc<Entry>, Error> {
        if entry.quantization.as_preset().is_some() {
            return Ok(entry);
        }
        let (library, path) = (self.clone(), entry.path.clone());
        let read = move || {
            let opened = match library.open_in_any_format(&entry.path) {
                Some(model) => Ok(model),
                None => {
                    let base = entry.with_adapters(Vec::new());
                    library.open(&base, &card).map(|open| open.model)
                }
            };
            Ok(match opened {
                Ok(model) => {
                    Arc::new(entry.quantized(entry.quantization.canonical(model.large_components())))
                }
                Err(error) => {
                    tracing::debug!(entry = entry.key, %error, "named as it was asked for");
                    entry
                }
            })
        };
        self.aside(&path, read).await
    }

    /// Opens an entry for a card. Reads headers and hashes small files: blocking.
    ///
    /// # Errors
    /// [`Error::ModelUnsupported`], [`Error::ModelDamaged`]; [`Error::Invalid`] for a format that a component cannot
    /// have.
    pub fn open(&self, entry: &Entry, card: &CardDescription) -> Result<OpenModel, Error> {
        let model_key = model_key_of(entry, &card.compute_dtype);
        if let Some(open_model) = self.open_already(&model_key) {
            self.look_for_copies(&model_key);
            return Ok(open_model);
        }
        let mut timeline = Timeline::begin("open a model, in the supervisor");
        let around = PathStamps::of(&entry.path);
        let model = self.read(entry, card)?;
        timeline.part("read headers, tokenizers");
        let loaded = |component: &Component| {
            let plan = model.load_plan(&component.name);
            plan.map(digest_of_names).unwrap_or_default()
        };
        let mut opened = Opened {
            loaded: model.components().iter().map(loaded).collect(),
            components: model.components().to_vec(),
            stamps: Stamps::of(around, &*model),
            used: self.uses.fetch_add(1, Ordering::Relaxed),
            model,
        };
        for files in &opened.stamps.files {
            self.hash(files);
        }
        timeline.part("hash small files");
        let mut all = self.lock();
        for index in 0..opened.components.len() {
            // A component that another entry identifies by path, possibly on a card, must have the same identity
            // here, or it would be loaded twice.
            if all
                .values()
                .any(|other| other.is_identified_by_path(&opened, index))
            {
                continue;
            }
            if let Some(id) = self.content_identity(&opened, index, &card.compute_dtype) {
                opened.components[index].id = id;
            }
        }
        let open_model = opened.to_model();
        all.insert(model_key.clone(), opened);
        let closed = close_unused(&mut all);
        drop(all);
        self.remember_closed(&closed);
        self.look_for_copies(&model_key);
        Ok(open_model)
    }

    /// The model if it is open already and its files are the same. The files are checked without the lock, as the queue takes that
    /// lock and a file system may not answer.
    fn open_already(&self, model_key: &ModelKey) -> Option<OpenModel> {
        let opened = self.lock().get(model_key).cloned()?;
        if !opened.stamps.are_current() {
            return None;
        }
        let mut all = self.lock();
        let same = all
            .get_mut(model_key)
            .filter(|now| Arc::ptr_eq(&now.model, &opened.model));
        Some(match same {
            Some(same) => {
                same.used = self.uses.fetch_add(1, Ordering::Relaxed);
                same.to_model()
            }
            None => opened.to_model(),
        })
    }

    /// A model that is open in any format, if its files are the same.
    fn open_in_any_format(&self, path: &Path) -> Option<Arc<dyn Model>> {
        let all = self.lock();
        let of_path: Vec<Opened> = (all.iter())
            .filter(|((of, ..), _)| of == path)
            .map(|(_, opened)| opened.clone())
            .collect();
        drop(all); // not held while files are checked
        let mut current = of_path.into_iter().filter(|opened| opened.stamps.are_current());
        current.next().map(|opened| opened.model)
    }

    fn remember_closed(&self, closed: &[(ModelKey, Opened)]) {
        let mut remembered = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        for (model_key, opened) in closed {
            remembered.insert(model_key.clone(), opened.identities());
        }
    }

    /// The identities of an entry's components by their content, and their earlier identities: see
    /// [`ModelLocation::identities`].
    fn identities(&self, model_key: &ModelKey) -> Vec<(ComponentId, ComponentId)> {
        if let Some(opened) = self.lock().get(model_key) {
            return opened.identities();
        }
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        closed.get(model_key).cloned().unwrap_or_default()
    }

    /// Location of an entry for the worker, with known kept copies of its components. Does no IO.
    pub fn location(&self, entry: &Entry, compute_dtype: &str) -> ModelLocation {
        let model_key = model_key_of(entry, compute_dtype);
        let kept = self.copies.iter().flat_map(|copies| {
            let wanted = self.wanted(&model_key).into_iter();
            wanted.filter_map(|(name, wanted)| Some((name, copies.known(&wanted?.key)?)))
        });
        ModelLocation {
            kept: kept.collect(),
            identities: self.identities(&model_key),
            ..entry.location()
        }
    }

    /// Called after an entry was loaded: components that were quantized are copied, once their content hash is known.
    pub fn keep_soon(&self, entry: &Entry, compute_dtype: &str) {
        let Some(copies) = &self.copies else { return };
        let model_key = model_key_of(entry, compute_dtype);
        let mut unknown = Vec::new();
        for (name, wanted) in self.wanted(&model_key) {
            match wanted {
                Some(wanted) => copies.keep_soon(wanted),
                None => unknown.push(name),
            }
        }
        if unknown.is_empty() {
            return;
        }
        let (copies, opened) = (copies.clone(), self.lock().get(&model_key).cloned());
        self.hasher.then(move |known| {
            let opened = opened.iter();
            let wanted = opened.flat_map(|opened| opened.wanted(&model_key, known));
            for (_, wanted) in wanted.filter(|(name, _)| unknown.contains(name)) {
                if let Some(wanted) = wanted {
                    copies.keep_soon(wanted);
                }
            }
        });
    }

    /// Aborts the current copy and waits for that. No copies are written afterwards.
    pub fn stop_keeping(&self) {
        if let Some(copies) = &self.copies {
            copies.stop();
        }
    }

    fn look_for_copies(&self, model_key: &ModelKey) {
        if let Some(copies) = &self.copies {
            let wanted = self.wanted(model_key).into_iter();
            wanted
                .filter_map(|(_, wanted)| wanted)
                .for_each(|wanted| copies.look(&wanted));
        }
    }

    fn wanted(&self, model_key: &ModelKey) -> Vec<(String, Option<WantedCopy>)> {
        let opened = self.lock();
        let known = |stamp: &FileStamp| self.hasher.known(stamp);
        opened
            .get(model_key)
            .map_or(Vec::new(), |opened| opened.wanted(model_key, &known))
    }

    /// Bytes of an entry on a card. Reads its headers, and keeps only this figure: blocking.
    ///
    /// # Errors
    /// As [`Library::open`].
    pub fn bytes(&self, entry: &Entry, card: &CardDescription) -> Result<Bytes, Error> {
        let model_key = model_key_of(entry, &card.compute_dtype);
        let opened = self.lock().get(&model_key).cloned();
        if let Some(opened) = opened
            && opened.stamps.are_current()
        {
            return Ok(opened.components.iter().map(|c| c.bytes).sum());
        }
        let measured = self.lock_measured().get(&model_key).cloned();
        if let Some(measured) = measured
            && measured.stamps.are_current()
        {
            return Ok(measured.bytes);
        }
        let around = PathStamps::of(&entry.path);
        let model = self.read(entry, card)?;
        let measured = Measured {
            bytes: model.components().iter().map(|c| c.bytes).sum(),
            stamps: Stamps::of(around, &*model),
        };
        let bytes = measured.bytes;
        self.lock_measured().insert(model_key, measured);
        Ok(bytes)
    }

    fn read(&self, entry: &Entry, card: &CardDescription) -> Result<Arc<dyn Model>, Error> {
        if !entry.adapters.is_empty() {
            let base = self.open(&entry.with_adapters(Vec::new()), card)?;
            return base.model.with_adapters(&entry.adapters).map_err(error_of);
        }
        let precision = Precision {
            dtype: dtype_of(&card.compute_dtype)?,
            quantization: entry.quantization.clone(),
        };
        self.families.open(&entry.path, &precision).map_err(error_of)
    }

    /// The components of an open entry, with their current identities. Does no IO.
    pub fn components(&self, entry: &Entry, compute_dtype: &str) -> Option<Vec<Component>> {
        let model_key = model_key_of(entry, compute_dtype);
        self.lock()
            .get(&model_key)
            .map(|opened| opened.components.clone())
    }

    /// Switches components to content hashes found since they were opened, each in all models at once, and only if
    /// the old identity is not in use: on a card, pinned, held, or part of a job.
    pub fn adopt(&self, in_use: &dyn Fn(&ComponentId) -> bool) {
        for ((_, dtype, ..), opened) in self.lock().iter_mut() {
            for index in 0..opened.components.len() {
                if !opened.is_provisional(index) || in_use(&opened.components[index].id) {
                    continue;
                }
                if let Some(id) = self.content_identity(opened, index, dtype) {
                    opened.components[index].id = id;
                }
            }
        }
    }

    /// Whether there are provisional identities that [`Library::adopt`] may replace.
    pub fn is_hashing(&self) -> bool {
        self.lock().values().any(Opened::has_provisional)
    }

    fn hash(&self, files: &[ModelFile]) {
        let size: u64 = files.iter().map(|file| file.stamp.size).sum();
        for file in files {
            match size <= MAX_SYNC_HASH_BYTES {
                true => self.hasher.hash_now(&file.path, file.stamp),
                false => self.hasher.hash_soon(&file.path, file.stamp),
            }
        }
    }

    /// The name is included: one file may contain several components.
    fn content_identity(&self, opened: &Opened, index: usize, dtype: &str) -> Option<ComponentId> {
        let hash = opened.content_hash(index, &|stamp| self.hasher.known(stamp))?;
        let name = &opened.components[index].name;
        Some(ComponentId::new(match opened.model.formats().of(name) {
            None => format!("{}:{dtype}", &hash[..16]),
            Some(format) => format!("{}:{dtype}:{format}", &hash[..16]),
        }))
    }

    fn lock_measured(&self) -> MutexGuard<'_, LruCache<ModelKey, Measured>> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Each change is a single call, so the state is consistent after a panic.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ModelKey, Opened>> {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Whether this has a component of `other` identified by path, with the same files.
    fn is_identified_by_path(&self, other: &Opened, index: usize) -> bool {
        let (theirs, files) = (&other.components[index].id, &other.stamps.files[index]);
        let mut own = 0..self.components.len();
        own.any(|own| {
            self.components[own].id == *theirs && self.is_provisional(own) && self.stamps.files[own] == *files
        })
    }

    /// Hash of a component's content; `None` if it is not known yet, or there are no files.
    fn content_hash(&self, index: usize, known: KnownHash<'_>) -> Option<String> {
        let files = self.stamps.files.get(index).filter(|files| !files.is_empty())?;
        let mut whole = blake3::Hasher::new();
        whole.update(self.components[index].name.as_bytes());
        whole.update(self.loaded.get(index)?.as_bytes());
        for file in files {
            whole.update(known(&file.stamp)?.as_bytes());
        }
        Some(whole.finalize().to_hex().to_string())
    }

    /// The components that are quantized at load, by name; `None` while their content hash is not known.
    fn wanted(&self, (_, dtype, ..): &ModelKey, known: KnownHash<'_>) -> Vec<(String, Option<WantedCopy>)> {
        let made = self
            .components
            .iter()
            .enumerate()
            .filter_map(|(index, component)| {
                let name = &component.name;
                let format = self.model.formats().of(name)?;
                let LoadPlan::Files(sources) = self.model.load_plan(name)? else {
                    return None;
                };
                if !sources.iter().any(TensorSource::is_made_at_load) {
                    return None;
                }
                let wanted = self.content_hash(index, known).map(|hash| WantedCopy {
                    key: format!("{name}-{format}-{dtype}-{hash}"),
                    model: self.model.clone(),
                    component: name.clone(),
                    files: self.stamps.files[index].clone(),
                });
                Some((name.clone(), wanted))
            });
        made.collect()
    }

    /// For components that are identified by their content: that identity, and the earlier one by path and versions of files.
    fn identities(&self) -> Vec<(ComponentId, ComponentId)> {
        let by_files = self.model.components().iter();
        let both = self.components.iter().zip(by_files);
        both.filter(|(now, by_files)| now.id != by_files.id)
            .map(|(now, by_files)| (now.id.clone(), by_files.id.clone()))
            .collect()
    }

    fn to_model(&self) -> OpenModel {
        OpenModel {
            model: self.model.clone(),
            components: self.components.clone(),
        }
    }
}

/// Removes unused models, the least recently used first, until no more than [`KEPT_OPEN`] are kept. Those
/// that wait for hashes are removed last: reopened, they would have another identity than their resident components.
fn close_unused(all: &mut BTreeMap<ModelKey, Opened>) -> Vec<(ModelKey, Opened)> {
    let Some(surplus) = all.len().checked_sub(KEPT_OPEN).filter(|surplus| *surplus > 0) else {
        return Vec::new();
    };
    let unused = all
        .iter()
        .filter(|(_, opened)| Arc::strong_count(&opened.model) == 1);
    let mut unused: Vec<(bool, u64, ModelKey)> = unused
        .map(|(model_key, opened)| (opened.has_provisional(), opened.used, model_key.clone()))
        .collect();
    unused.sort_unstable();
    unused
        .into_iter()
        .take(surplus)
        .filter_map(|(_, _, model_key)| all.remove_entry(&model_key))
        .collect()
}

fn model_key_of(entry: &Entry, compute_dtype: &str) -> ModelKey {
    (
        entry.path.clone(),
        compute_dtype.to_owned(),
        entry.quantization.clone(),
        entry.adapters.clone(),
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
        ModelError::Damaged { .. } | ModelError::Incomplete { .. } => Error::ModelDamaged(message),
        ModelError::Quantization { .. } => Error::Invalid(vec![RequestError {
            field: "model.quantization.components".to_owned(),
            problem: message,
        }]),
        ModelError::Adapter { name, error } => Error::Adapter {
            name,
            problem: error.to_string(),
        },
    }
}
