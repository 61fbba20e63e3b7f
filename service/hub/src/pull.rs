//! Pulls: the selection of a model's files, and their download.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use config::HubSettings;
use futures::{StreamExt as _, TryStreamExt as _};
use model::{BASE_CONFIGURATION, Families};
use serde::Deserialize;
use tokio::sync::watch;

use crate::cache::{self, ModelCache, files_of};
use crate::disk::Disk;
use crate::error::shown;
use crate::listing::{HubSession, Login, RepoFile, RepositoryListing};
use crate::meter::Meter;
use crate::selection::{self, INDEX};
use crate::transfer::Transfer;
use crate::{Progress, PullError, Reference, catalogue};

/// Files that are downloaded at the same time: one connection does not use the whole bandwidth.
const AT_ONCE: usize = 4;
/// Most bytes of an index of a pipeline or its shards.
const INDEX_BYTES: u64 = 16 << 20;
/// Most files of a pipeline; a listing of more is refused.
const MOST_FILES: usize = 4096;

/// The longest file of a branch or tag in a hub cache, in bytes: it has a commit.
pub const LONGEST_REF: u64 = 1 << 10;

/// The files that a pull would download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullPlan {
    /// Commit hash of the snapshot.
    pub revision: String,
    pub bytes_total: u64,
    pub bytes_missing: u64,
    pub files_total: u32,
    pub base: Base,
}

/// Where the text encoders and the autoencoder of a model come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Base {
    /// The model has them, or is an adapter.
    Own,
    /// A pipeline that is pulled with it, without its transformer.
    Pipeline(String),
    /// A transformer in a single file, whose page names no pipeline that is run here.
    Unknown,
}

/// A model that is complete in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// `owner/name`, of one file `owner/name:file`.
    pub id: String,
    /// Commit hash of the snapshot.
    pub revision: String,
    pub bytes_total: u64,
    pub bytes_fetched: u64,
    pub files_total: u32,
    pub path: PathBuf,
}

/// A hub, and the cache that its models are pulled into.
#[derive(Clone)]
pub struct Hub {
    settings: HubSettings,
    families: Arc<dyn Families>,
    /// The disk of the cache.
    disk: Disk,
}

/// A repository of which files are pulled, and those files.
struct RepositoryPart {
    model: Reference,
    cache: ModelCache,
    contents: Contents,
}

impl RepositoryPart {
    /// Its contents that are not in the cache.
    fn missing(&self) -> impl Iterator<Item = (&RepositoryPart, &Content)> {
        self.contents.missing().map(move |content| (self, content))
    }

    /// Completes its snapshot, whose contents are all in the cache.
    fn link(&self) -> Result<PathBuf, PullError> {
        let linked = self.contents.contents.iter().flat_map(|content| {
            let paths = content.paths.iter();
            paths.map(|path| (path.as_str(), &content.file.oid))
        });
        self.cache.link(&self.contents.commit, linked)
    }
}

/// The files that are pulled for a model: its own, and those of other repositories.
struct Parts {
    own: RepositoryPart,
    others: Vec<RepositoryPart>,
    kind: Base,
}

impl Parts {
    fn all(&self) -> impl Iterator<Item = &RepositoryPart> {
        std::iter::once(&self.own).chain(&self.others)
    }

    fn bytes(&self) -> u64 {
        sum(self.all().map(|part| part.contents.bytes()))
    }

    fn bytes_missing(&self) -> u64 {
        sum(self.all().map(|part| part.contents.bytes_missing()))
    }

    fn files(&self) -> u32 {
        self.all().map(|part| part.contents.files()).sum()
    }
}

/// A content of the pipeline, and the paths of the files that have it.
struct Content {
    file: RepoFile,
    paths: Vec<String>,
    /// Bytes that are still to be downloaded; `None` if the cache had the content when it was checked.
    missing: Option<u64>,
}

/// The contents of a revision's pipeline.
struct Contents {
    commit: String,
    contents: Vec<Content>,
}

impl Contents {
    fn bytes(&self) -> u64 {
        sum(self.contents.iter().map(|content| content.file.size))
    }

    fn files(&self) -> u32 {
        count(&self.contents)
    }

    fn missing(&self) -> impl Iterator<Item = &Content> {
        self.contents.iter().filter(|content| content.missing.is_some())
    }

    /// Bytes that are still to be downloaded.
    fn bytes_missing(&self) -> u64 {
        sum(self.contents.iter().filter_map(|content| content.missing))
    }

    /// Checks for each content whether the cache has it.
    fn look_in(&mut self, cache: &ModelCache) {
        for content in &mut self.contents {
            let (oid, size) = (&content.file.oid, content.file.size);
            content.missing = match cache.has(oid, size) {
                true => None,
                false => Some(size - cache.bytes_of_partial(oid, size)),
            };
        }
    }
}

/// Number of files that have these contents.
fn count<'a>(contents: impl IntoIterator<Item = &'a Content>) -> u32 {
    let files: usize = contents.into_iter().map(|content| content.paths.len()).sum();
    u32::try_from(files).unwrap_or(u32::MAX)
}

/// Sum of announced sizes. It saturates: the check of the disk space then refuses it.
fn sum(sizes: impl Iterator<Item = u64>) -> u64 {
    sizes.fold(0, u64::saturating_add)
}

/// A pull of one commit, from its plan to its end: from the hub, or complete in the cache.
pub struct PreparedPull {
    model: Reference,
    disk: Disk,
    found: Found,
}

/// Where the files of a model were found.
enum Found {
    /// All files are in the cache, and the hub is not asked.
    Here(Pulled),
    OnHub(Box<(HubSession, Parts)>),
}

impl PreparedPull {
    /// The files that it would download, by the state of the cache at its preparation.
    pub fn plan(&self) -> PullPlan {
        match &self.found {
            Found::Here(here) => PullPlan {
                revision: here.revision.clone(),
                bytes_total: here.bytes_total,
                bytes_missing: 0,
                files_total: here.files_total,
                base: Base::Own,
            },
            Found::OnHub(found) => {
                let (_, parts) = &**found;
                PullPlan {
                    bytes_total: parts.bytes(),
                    bytes_missing: parts.bytes_missing(),
                    files_total: parts.files(),
                    revision: parts.own.contents.commit.clone(),
                    base: parts.kind.clone(),
                }
            }
        }
    }

    /// Downloads the missing files. Dropping the future stops the download; the received bytes stay for the next pull.
    pub async fn pull(self, progress: watch::Sender<Progress>) -> Result<Pulled, PullError> {
        let PreparedPull { model, disk, found } = self;
        let (session, parts) = match found {
            Found::Here(pulled) => return Ok(pulled),
            Found::OnHub(found) => *found,
        };
        let bytes_missing = parts.bytes_missing();
        let cache = parts.own.cache.clone();
        disk.short(move || cache.check_room(bytes_missing)).await?;
        let missing: Vec<(&RepositoryPart, &Content)> =
            parts.all().flat_map(RepositoryPart::missing).collect();
        let to_come = sum(missing.iter().map(|(_, content)| content.file.size));
        let (bytes_total, files_total) = (parts.bytes(), parts.files());
        let meter = Meter::new(progress);
        meter.start(Progress {
            bytes_done: bytes_total - to_come,
            bytes_total,
            files_done: files_total - count(missing.iter().map(|(_, content)| *content)),
            files_total,
            file: String::new(),
        });
        let mut transfers = Vec::with_capacity(missing.len());
        for (part, content) in missing {
            let transfer = Transfer {
                session: &session,
                cache: &part.cache,
                disk: &disk,
                model: &part.model,
                commit: &part.contents.commit,
                file: &content.file,
                meter: &meter,
            };
            let meter = &meter;
            transfers.push(async move {
                transfer.run().await?;
                content.paths.iter().for_each(|_| meter.file_done());
                Ok::<(), PullError>(())
            });
        }
        futures::stream::iter(transfers)
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>()
            .await?;
        // The other repositories first, as a model is listed as soon as its own file is linked.
        let Parts { own, others, .. } = parts;
        for other in others {
            disk.short(move || other.link()).await?;
        }
        let revision = own.contents.commit.clone();
        let snapshot = disk.short(move || own.link()).await?;
        Ok(Pulled {
            id: model.listed_id(),
            path: model
                .file
                .as_ref()
                .map_or(snapshot.clone(), |file| snapshot.join(file)),
            bytes_total,
            bytes_fetched: meter.bytes_fetched(),
            files_total,
            revision,
        })
    }
}

impl Hub {
    /// A hub whose models are those of these families.
    pub fn new(settings: HubSettings, families: Arc<dyn Families>) -> Hub {
        let disk = Disk::of(&settings.cache);
        Hub {
            settings,
            families,
            disk,
        }
    }

    /// Asks the hub whether it answers and, where there is a token, whether it accepts that. Takes a few seconds at most.
    ///
    /// # Errors
    /// When it does not answer, answers with a fault of its own, or refuses the token.
    pub async fn check(&self) -> Result<Login, PullError> {
        self.session().await?.check().await
    }

    /// Whether clients may ask for a pull.
    pub fn is_open(&self) -> bool {
        self.settings.pull
    }

    /// Determines the files that a pull would download, without downloading.
    pub async fn prepare(&self, model: &Reference) -> Result<PreparedPull, PullError> {
        let found = match self.settings.offline {
            true => Found::Here(self.whole_in_cache(model).await?),
            false => {
                let session = self.session().await?;
                let parts = self.parts(&session, model).await?;
                Found::OnHub(Box::new((session, parts)))
            }
        };
        Ok(PreparedPull {
            model: model.clone(),
            disk: self.disk.clone(),
            found,
        })
    }

    /// Downloads the missing files. Dropping the future stops the download; the received bytes stay for the next pull.
    pub async fn pull(
        &self,
        model: &Reference,
        progress: watch::Sender<Progress>,
    ) -> Result<Pulled, PullError> {
        self.prepare(model).await?.pull(progress).await
    }

    /// A session that sends requests to the hub. The token may be in a file, and so are the certificates of the system.
    async fn session(&self) -> Result<HubSession, PullError> {
        let settings = self.settings.clone();
        self.disk.short(move || HubSession::open(&settings)).await
    }

    /// The parts that are pulled for a model, by the hub's listing.
    async fn parts(&self, session: &HubSession, model: &Reference) -> Result<Parts, PullError> {
        let listing = session.list(model).await?;
        let names: Vec<&str> = listing.files.iter().map(|file| file.path.as_str()).collect();
        let wanted = self.wanted(session, model, &listing.commit, &names).await?;
        let is_alone = match &model.file {
            Some(file) => is_transformer(&*self.families, session, model, &listing.commit, file).await?,
            None => false,
        };
        let is_known = catalogue::find(&model.listed_id()).is_some_and(|known| !known.with.is_empty());
        let (kind, others) = match (is_alone && !is_known, &listing.base) {
            (false, _) => self.with_it(session, model).await?,
            (true, None) => (Base::Unknown, Vec::new()),
            // A base that does not run here counts as no base: the file may be used with another pipeline.
            (true, Some(base)) => match self.base(session, base).await {
                Err(PullError::NotAPipeline(_)) => (Base::Unknown, Vec::new()),
                found => found.map(|(kind, base)| (kind, base.into_iter().collect()))?,
            },
        };
        Ok(Parts {
            own: self.part(model, listing, wanted).await?,
            others,
            kind,
        })
    }

    /// The parts that the catalogue lists for a model: of a pipeline of the family all but its transformer, of another
    /// repository the files that are read.
    async fn with_it(
        &self,
        session: &HubSession,
        model: &Reference,
    ) -> Result<(Base, Vec<RepositoryPart>), PullError> {
        let known = catalogue::find(&model.listed_id());
        let mut others = Vec::new();
        let mut kind = Base::Own;
        for other in known.iter().flat_map(|known| &known.with) {
            let other: Reference = other.parse()?;
            match self.base(session, &other).await? {
                (base @ Base::Pipeline(_), part) => {
                    others.extend(part);
                    if kind == Base::Own {
                        kind = base;
                    }
                }
                (Base::Own | Base::Unknown, _) => {
                    let listing = session.list(&other).await?;
                    let names: Vec<&str> = listing.files.iter().map(|file| file.path.as_str()).collect();
                    let wanted = self.wanted(session, &other, &listing.commit, &names).await?;
                    others.push(self.part(&other, listing, wanted).await?);
                }
            }
        }
        Ok((kind, others))
    }

    /// The parts of a pipeline without its transformer. If they are in the cache, the hub is not asked.
    async fn base(
        &self,
        session: &HubSession,
        base: &Reference,
    ) -> Result<(Base, Option<RepositoryPart>), PullError> {
        let cache = ModelCache::new(&self.settings.cache, base);
        let families = self.families.clone();
        let has_it = move || {
            let commit = cache.commit();
            Ok(commit.is_some_and(|commit| has_base(&*families, &cache.snapshot(&commit))))
        };
        if self.disk.short(has_it).await? {
            return Ok((Base::Pipeline(base.id.clone()), None));
        }
        let listing = match session.list(base).await {
            Err(PullError::NoSuchModel { .. }) => return Ok((Base::Unknown, None)),
            listed => listed?,
        };
        let names: Vec<&str> = listing.files.iter().map(|file| file.path.as_str()).collect();
        if !names.contains(&INDEX) {
            return Ok((Base::Unknown, None));
        }
        let index = session.read(base, &listing.commit, INDEX).await?;
        let class = class_of(&base.id, &index)?;
        let Some(folders) = self.families.base_folders_of(&class) else {
            return Ok((Base::Unknown, None));
        };
        let folders = without_absent(&*self.families, &class, folders.into_iter(), &names);
        let mut wanted = selection::wanted(&base.id, &folders, &names)?;
        wanted.push(BASE_CONFIGURATION.to_owned());
        let part = self.part(base, listing, wanted).await?;
        Ok((Base::Pipeline(base.id.clone()), Some(part)))
    }

    /// The files of a revision that are pulled for a model.
    async fn wanted(
        &self,
        session: &HubSession,
        model: &Reference,
        commit: &str,
        names: &[&str],
    ) -> Result<Vec<String>, PullError> {
        match &model.file {
            Some(file) => selection::of_file(&model.id, file, names),
            None if names.contains(&INDEX) => {
                let index = session.read(model, commit, INDEX).await?;
                let folders = folders_of(&*self.families, &model.id, &index, names)?;
                selection::wanted(&model.id, &folders, names)
            }
            None => match self.families.own_layout(names) {
                Some(layout) => {
                    if let Some(configuration) = &layout.configuration {
                        let text = session.read(model, commit, configuration).await?;
                        self.check_is_run(&model.id, &text)?;
                    }
                    selection::of_own_layout(&model.id, &layout, names)
                }
                None => self.adapter_files(session, model, commit, names).await,
            },
        }
    }

    /// Refuses a configuration of a class that is known and does not run.
    fn check_is_run(&self, id: &str, configuration: &[u8]) -> Result<(), PullError> {
        let class = class_of(id, configuration)?;
        match self.families.class_not_run(&class) {
            None => Ok(()),
            Some(other) => Err(PullError::NotAPipeline(format!(
                "{id} is {other} ({}), which does not run here; nothing was fetched",
                shown(&class)
            ))),
        }
    }

    /// These files of a repository, each content once, and which of them are in the cache.
    async fn part(
        &self,
        model: &Reference,
        listing: RepositoryListing,
        wanted: Vec<String>,
    ) -> Result<RepositoryPart, PullError> {
        let wanted: HashSet<String> = wanted.into_iter().collect();
        if wanted.len() > MOST_FILES {
            return Err(PullError::NotAPipeline(format!(
                "{} has {} files where a pipeline has a few dozen; nothing was fetched",
                model.id,
                wanted.len()
            )));
        }
        let mut contents: BTreeMap<_, Content> = BTreeMap::new();
        for file in listing
            .files
            .into_iter()
            .filter(|file| wanted.contains(&file.path))
        {
            let path = file.path.clone();
            let content = contents.entry(file.oid.clone()).or_insert(Content {
                file,
                paths: Vec::new(),
                missing: None,
            });
            content.paths.push(path);
        }
        let mut contents: Vec<Content> = contents.into_values().collect();
        // The largest first, so that it is not the last one alone at the end.
        contents.sort_by_key(|content| std::cmp::Reverse(content.file.size));
        let mut part = RepositoryPart {
            model: model.clone(),
            cache: ModelCache::new(&self.settings.cache, model),
            contents: Contents {
                commit: listing.commit,
                contents,
            },
        };
        let looked = move || {
            part.contents.look_in(&part.cache);
            Ok(part)
        };
        self.disk.short(looked).await
    }

    /// The files of a repository that is no pipeline, but an adapter, a ControlNet or a transformer alone.
    async fn adapter_files(
        &self,
        session: &HubSession,
        model: &Reference,
        commit: &str,
        names: &[&str],
    ) -> Result<Vec<String>, PullError> {
        if let Some(files) = selection::of_adapter(names) {
            return Ok(files);
        }
        let no_pipeline = || selection::no_pipeline(&model.id, names);
        if !names.contains(&selection::CONFIGURATION) {
            return Err(no_pipeline());
        }
        let text = session.read(model, commit, selection::CONFIGURATION).await?;
        let class = class_of(&model.id, &text);
        let is_run = class.is_ok_and(|class| self.families.opens_without_pipeline(&class));
        let files = is_run.then(|| selection::of_root(names)).flatten();
        files.ok_or_else(no_pipeline)
    }

    /// The model in the cache.
    ///
    /// # Errors
    /// [`PullError::Offline`] with the missing files when it is incomplete.
    async fn whole_in_cache(&self, model: &Reference) -> Result<Pulled, PullError> {
        let (cache, model, families) = (self.settings.cache.clone(), model.clone(), self.families.clone());
        let look = move || whole_in_cache(&*families, &cache, &model);
        self.disk.short(look).await
    }
}

/// The model in a cache: see [`Hub::whole_in_cache`].
#[allow(clippy::disallowed_methods)] // it waits on threads that may block
fn whole_in_cache(families: &dyn Families, root: &Path, model: &Reference) -> Result<Pulled, PullError> {
    let cache = ModelCache::new(root, model);
    let incomplete = |missing: Vec<String>| PullError::Offline {
        id: model.to_string(),
        cache: root.display().to_string(),
        missing,
    };
    let commit = cache.commit().ok_or_else(|| match &cache.commits()[..] {
        [] => incomplete(vec!["all of it".to_owned()]),
        commits => PullError::OfflineWithoutBranch {
            id: model.id.clone(),
            cache: root.display().to_string(),
            revision: model.revision.clone(),
            commits: commits.to_vec(),
        },
    })?;
    let path = cache.snapshot(&commit);
    let missing = match &model.file {
        Some(file) => Some(file.clone())
            .filter(|file| !path.join(file).is_file())
            .into_iter()
            .collect(),
        None => missing_of(families, &model.id, &path)?,
    };
    if !missing.is_empty() {
        let told = |file: String| match path.join(&file).is_symlink() {
            true => format!("{file} (a link to a file that is not there)"),
            false => file,
        };
        return Err(incomplete(missing.into_iter().map(told).collect()));
    }
    let files = match &model.file {
        Some(file) => vec![file.clone()],
        None => files_of(&path),
    };
    let lengths = files.iter().filter_map(|file| path.join(file).metadata().ok());
    Ok(Pulled {
        id: model.listed_id(),
        revision: commit,
        bytes_total: lengths.map(|found| found.len()).sum(),
        bytes_fetched: 0,
        files_total: u32::try_from(files.len()).unwrap_or(u32::MAX),
        path: model.file.as_ref().map_or(path.clone(), |file| path.join(file)),
    })
}

/// Bytes that a model takes in a hub cache; `None` when it is not there.
pub fn size_in_cache(cache: &Path, model: &Reference) -> Option<u64> {
    cache::size(cache, model)
}

/// Removes a model from a hub cache, all of its revisions.
pub fn remove_from_cache(cache: &Path, model: &Reference) -> Result<(), PullError> {
    cache::remove(cache, model)
}

/// Whether a snapshot has the files that its pipeline is read from, as far as that is known without the hub: other
/// programs leave incomplete snapshots when they are interrupted. A pipeline of an unknown class counts as complete.
pub fn is_whole(families: &dyn Families, snapshot: &Path) -> bool {
    missing_of(families, "", snapshot).unwrap_or_default().is_empty()
}

/// The files of its pipeline that a snapshot lacks.
///
/// # Errors
/// When the pipeline is of an unknown class.
fn missing_of(families: &dyn Families, id: &str, snapshot: &Path) -> Result<Vec<String>, PullError> {
    let files = files_of(snapshot);
    let names: Vec<&str> = files.iter().map(String::as_str).collect();
    let Ok(index) = gpu::read_bounded(&snapshot.join(INDEX), INDEX_BYTES) else {
        if let Some(layout) = families.own_layout(&names) {
            let folders: Vec<&str> = layout.folders.iter().map(String::as_str).collect();
            let mut missing = selection::missing(&folders, &names);
            if layout.files.iter().any(|file| file == selection::CONFIGURATION) {
                missing.extend(selection::missing_at_root(&names));
            }
            return Ok(missing);
        }
        if families.has_transformer(snapshot) {
            return Ok(selection::missing_at_root(&names));
        }
        // A file is linked into a snapshot only when it is complete, so an adapter or a transformer in one file cannot be partial.
        return Ok(match names.iter().any(|name| selection::is_weights(name)) {
            true => Vec::new(),
            false => vec![INDEX.to_owned()],
        });
    };
    let folders = folders_of(families, id, &index, &names)?;
    Ok(selection::missing(&folders, &names))
}

/// The files of a snapshot that hold a transformer alone, as `holds` decides, as paths in it.
pub fn transformer_files(snapshot: &Path, holds: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut files = files_of(snapshot);
    files.retain(|file| {
        selection::is_weights(file) && !selection::is_shard(file) && holds(&snapshot.join(file))
    });
    files.sort();
    files
}

/// Whether a file has the name of the weights that a folder is read from.
pub fn is_of_folder(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str());
    name.is_some_and(selection::is_of_folder)
}

/// Whether a file is one of several shards of weights.
pub fn is_shard(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str());
    name.is_some_and(selection::is_shard)
}

/// Whether a file of a repository is a transformer alone, by its header on the hub.
async fn is_transformer(
    families: &dyn Families,
    session: &HubSession,
    model: &Reference,
    commit: &str,
    file: &str,
) -> Result<bool, PullError> {
    // Adapters are never in GGUF.
    if file.ends_with(".gguf") {
        return Ok(true);
    }
    let names = session.tensor_names(model, commit, file).await?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    Ok(families.is_transformer_file(&names))
}

/// Whether a snapshot has the parts of a pipeline that a transformer in a single file needs.
fn has_base(families: &dyn Families, snapshot: &Path) -> bool {
    let files = files_of(snapshot);
    let names: Vec<&str> = files.iter().map(String::as_str).collect();
    let index = gpu::read_bounded(&snapshot.join(INDEX), INDEX_BYTES).unwrap_or_default();
    let Ok(class) = class_of("", &index) else {
        return false;
    };
    let folders = families.base_folders_of(&class);
    folders.is_some_and(|folders| {
        let folders = without_absent(families, &class, folders.into_iter(), &names);
        selection::missing(&folders, &names).is_empty()
    })
}

/// The class of a pipeline, by its index.
fn class_of(id: &str, index: &[u8]) -> Result<String, PullError> {
    #[derive(Deserialize)]
    struct Index {
        #[serde(rename = "_class_name", default)]
        class: String,
    }
    let index: Index = serde_json::from_slice(index).map_err(|problem| {
        let problem = shown(&problem.to_string());
        PullError::NotAPipeline(format!("the {INDEX} of {id} cannot be read: {problem}"))
    })?;
    Ok(index.class)
}

/// The folders of a pipeline of a class, without optional ones that do not exist.
fn without_absent(
    families: &dyn Families,
    class: &str,
    folders: impl Iterator<Item = &'static str>,
    files: &[&str],
) -> Vec<&'static str> {
    let optional = families.optional_folders_of(class);
    let is_there = |folder: &str| {
        files.iter().any(|file| {
            file.strip_prefix(folder)
                .is_some_and(|rest| rest.starts_with('/'))
        })
    };
    folders
        .filter(|folder| !optional.contains(folder) || is_there(folder))
        .collect()
}

/// The folders that a pipeline is read from, by its index; optional ones only if they exist.
fn folders_of(
    families: &dyn Families,
    id: &str,
    index: &[u8],
    files: &[&str],
) -> Result<Vec<&'static str>, PullError> {
    let class = class_of(id, index)?;
    let folders = families.folders_of(&class).ok_or_else(|| {
        let known = families.pipelines();
        let class = match class.as_str() {
            "" => "nameless pipeline".to_owned(),
            class => shown(class),
        };
        PullError::NotAPipeline(format!(
            "{id} is a {class}, and what can be run is {}; nothing was fetched",
            known.join(", ")
        ))
    })?;
    Ok(without_absent(families, &class, folders.iter().copied(), files))
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::HubToken;

    #[tokio::test(start_paused = true)]
    async fn the_cache_is_looked_at_on_threads_that_may_block_alone() {
        let root = tempfile::tempdir().unwrap();
        let hub = Hub::new(
            HubSettings {
                endpoint: String::new(),
                cache: root.path().to_owned(),
                pull: true,
                token: HubToken::new(None, None),
                offline: true,
            },
            Arc::new(pipelines::families()),
        );
        let model: Reference = "me/mine".parse().unwrap();
        assert!(matches!(
            hub.prepare(&model).await,
            Err(PullError::Offline { .. })
        ));
        let _turns = hub.disk.all_turns();
        let (progress, _) = watch::channel(Progress::default());
        assert!(matches!(
            hub.prepare(&model).await,
            Err(PullError::DiskBusy { .. })
        ));
        assert!(matches!(
            hub.pull(&model, progress).await,
            Err(PullError::DiskBusy { .. })
        ));
    }

    #[test]
    fn optional_folders_are_read_if_present() {
        let index = br#"{"_class_name": "AceStepPipeline"}"#;
        let all = [
            "audio_tokenizer/config.json",
            "audio_token_detokenizer/config.json",
        ];
        let read = |files: &[&str]| folders_of(&pipelines::families(), "me/music", index, files).unwrap();
        assert!(read(&all).contains(&"audio_tokenizer"));
        let without = read(&["audio_tokenizer.json"]);
        assert!(
            !without.iter().any(|folder| folder.starts_with("audio_token")),
            "{without:?}"
        );
        assert!(
            without.contains(&"transformer"),
            "it is needed, and its lack is told"
        );
    }
}
