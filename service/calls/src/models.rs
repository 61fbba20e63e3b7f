//! The models that requests can name: folders are scanned, ids resolved, defaults merged.

mod adapters;
mod comfyui;
mod listing;
mod names;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use config::ModelSettings;
use engine::Error;
use engine::library::Entry;
use gpu::{FileStamp, WeightFormat};
use hub::catalogue::{self, Makes, SHIPPED_FILM_ID, SHIPPED_ID, SHIPPED_SOUND_ID};
use model::{FULL, Families, Medium, Preset, Quantization, Request};

use crate::errors::invalid;
use crate::references::{AskedAdapter, AskedFormats, ModelRef};
use crate::threads::FILES;
pub use adapters::FoundAdapter;
use listing::Listing;
use names::Named;

/// Models that ship with the project: their ids, and their folders in it.
const SHIPPED: [(&str, &str); 3] = [
    (SHIPPED_ID, "demo/model"),
    (SHIPPED_FILM_ID, "demo/film/model"),
    (SHIPPED_SOUND_ID, "demo/sound/model"),
];

/// A model that can be named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub id: String,
    /// Commit of a model in a hub cache; else empty.
    pub revision: String,
    /// Branches and tags of a hub cache that stand for this revision.
    refs: Vec<String>,
    pub path: PathBuf,
    /// The extension of its file, which its id lacks; empty for a folder.
    ending: String,
}

impl Found {
    /// A model without revisions.
    fn at(families: &dyn Families, id: String, path: PathBuf) -> Found {
        let file = path.file_name().and_then(|name| name.to_str());
        Found {
            ending: ending_of(families, file.unwrap_or(&id)).to_owned(),
            id,
            revision: String::new(),
            refs: Vec::new(),
            path,
        }
    }
}

impl Named for Found {
    fn id(&self) -> &str {
        &self.id
    }

    fn set_id(&mut self, id: String) {
        self.id = id;
    }

    fn revision(&self) -> &str {
        &self.revision
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn stem<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_suffix(self.ending.as_str())
            .filter(|_| !self.ending.is_empty())
    }
}

/// The ending of the name of a model's file; empty where it is none.
fn ending_of<'a>(families: &dyn Families, name: &'a str) -> &'a str {
    families
        .single_file_stem(name)
        .map_or("", |stem| &name[stem.len()..])
}

/// The version of a file that was read, and its kind where it is no model that runs here.
type ReadFile = (FileStamp, Option<String>);

/// Finds models by id.
pub struct Models {
    families: Arc<dyn Families>,
    settings: ModelSettings,
    /// Scanned after the folders.
    hub_cache: PathBuf,
    listing: Listing<Found>,
    adapter_listing: Listing<FoundAdapter>,
    /// Which files of the hub cache hold a transformer alone, by the paths of their contents, which never change.
    transformers: Mutex<HashMap<PathBuf, bool>>,
    /// Cached kinds of files in ComfyUI's folders, by path, valid for one version of a file.
    read: Mutex<HashMap<PathBuf, ReadFile>>,
    /// Files in ComfyUI's folders that the last scan found and that are no models that run here.
    others: Mutex<Vec<OtherFile>>,
}

/// A resolved reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    pub entry: Arc<Entry>,
    /// The adapters that it names, one by one or in its id, also those of strength 0, which the entry lacks.
    pub adapters: Vec<AskedAdapter>,
}

/// A file in a folder of models that is no model that runs here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherFile {
    /// Its path in its folder.
    pub name: String,
    /// Its kind, in words.
    pub what: String,
}

impl Models {
    pub fn new(settings: ModelSettings, hub_cache: PathBuf, families: Arc<dyn Families>) -> Models {
        Models {
            families,
            settings,
            hub_cache,
            listing: Listing::default(),
            adapter_listing: Listing::default(),
            transformers: Mutex::default(),
            read: Mutex::default(),
            others: Mutex::default(),
        }
    }

    /// The configured folders of models, without the hub cache.
    pub fn folders(&self) -> &[PathBuf] {
        &self.settings.folders
    }

    /// The configured folders of ComfyUI.
    pub fn comfyui(&self) -> &[PathBuf] {
        &self.settings.comfyui
    }

    /// Problems of ComfyUI's `extra_model_paths.yaml` files.
    pub fn problems_of_comfyui(&self) -> Vec<String> {
        let places = self.settings.comfyui.iter().map(|folder| comfyui::places(folder));
        places.filter_map(|(_, problem)| problem).collect()
    }

    /// Files of ComfyUI's folders that are no models that run here, as the last scan found them.
    pub fn others(&self) -> Vec<OtherFile> {
        self.others.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether a model lies in the hub cache.
    pub fn is_of_hub(&self, model: &Found) -> bool {
        model.path.starts_with(&self.hub_cache)
    }

    /// Whether a model exists that a request could name so: with a revision, formats and adapters. True also for an ambiguous name,
    /// although a request with it is refused.
    pub fn has(&self, name: &str) -> bool {
        let listing = self.list();
        names_in_key(name).any(|name| {
            find_named(&listing, name, "").is_some() || names::ambiguous(&listing, name).is_some()
        })
    }

    /// Every model, by id; scans when the listing is too old.
    pub fn list(&self) -> Arc<Vec<Found>> {
        self.listing.current(|| self.scan())
    }

    /// The last listing, however old. Scans only when there is none.
    pub fn known(&self) -> Arc<Vec<Found>> {
        self.listing.known(|| self.scan())
    }

    /// Scans the folders, however recent the listing. While another scan is blocked by a folder, it returns the last listing.
    pub fn rescan(&self) -> Arc<Vec<Found>> {
        self.listing.rescan(|| self.scan())
    }

    fn scan(&self) -> Vec<Found> {
        // Models that are configured by path come first, then the folders in their order; of several with one name and
        // revision the first counts. A hub cache lists the revision of `main` first, which the stable sort keeps.
        let families = &*self.families;
        let configured = self
            .settings
            .paths
            .iter()
            .map(|(id, path)| Found::at(families, id.clone(), path.clone()));
        let folders = self.settings.folders.iter().chain([&self.hub_cache]);
        let scanned = folders.flat_map(|folder| scan(families, folder, &|file| self.holds_transformer(file)));
        let shipped = shipped_models(families).map(|(id, path)| Found::at(families, id.to_owned(), path));
        let comfyui = self.scan_comfyui().into_iter();
        let mut found = names::distinct(configured.chain(scanned).chain(comfyui).chain(shipped));
        found.sort_by(|a, b| a.id.cmp(&b.id));
        found
    }

    /// The folders of ComfyUI, with their meanings. This reads its `extra_model_paths.yaml` files.
    fn places_of_comfyui(&self) -> Vec<comfyui::Place> {
        let installations = self.settings.comfyui.iter();
        installations
            .flat_map(|folder| comfyui::places(folder).0)
            .collect()
    }

    /// The models in ComfyUI's folders, by their paths in them, as ComfyUI names them. Other files are listed separately.
    fn scan_comfyui(&self) -> Vec<Found> {
        let (mut models, mut others) = (Vec::new(), Vec::new());
        let places = self.places_of_comfyui().into_iter();
        for (_, folder) in places.filter(|(meaning, _)| *meaning == comfyui::Meaning::Models) {
            let families = &*self.families;
            for found in models_below(families, &folder, "", DEPTH_OF_COMFYUI) {
                match self.kind_of_other_file(&found.path) {
                    None => models.push(found),
                    Some(what) => others.push(OtherFile {
                        name: found.id_with_ending().unwrap_or(found.id),
                        what,
                    }),
                }
            }
        }
        *self.others.lock().unwrap_or_else(PoisonError::into_inner) = others;
        models
    }

    /// The kind of a file that is no model that runs here. Each file is read once per version.
    fn kind_of_other_file(&self, path: &Path) -> Option<String> {
        let metadata = path.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let stamp = FileStamp::from(metadata);
        let known = || self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((read, what)) = known().get(path)
            && *read == stamp
        {
            return what.clone();
        }
        let what = self.families.kind_of_other_file(path);
        known().insert(path.to_owned(), (stamp, what.clone()));
        what
    }

    /// Whether a file of a hub cache holds a transformer alone. Each content is read once.
    fn holds_transformer(&self, file: &Path) -> bool {
        let Ok(content) = std::fs::canonicalize(file) else {
            return false;
        };
        let known = || self.transformers.lock().unwrap_or_else(PoisonError::into_inner);
        let read = known().get(&content).copied();
        read.unwrap_or_else(|| {
            let holds = self.families.holds_transformer(file);
            known().insert(content, holds);
            holds
        })
    }

    /// Id of the model for requests that name none: the configured one, else the shipped one if it is listed, else the only one listed.
    pub fn default_id(&self, listing: &[Found]) -> Option<String> {
        if let Some(id) = &self.settings.default {
            return Some(id.clone());
        }
        if listing.iter().any(|m| m.id == SHIPPED_ID) {
            return Some(SHIPPED_ID.to_owned());
        }
        match listing {
            [only] => Some(only.id.clone()),
            _ => None,
        }
    }

    /// Candidates for requests of a medium that name no model, in the order in which they are tried: the configured default, which
    /// may make another medium, and the shipped model if it is listed.
    pub fn defaults_of(&self, makes: Makes, listing: &[Found]) -> Vec<String> {
        let configured = self
            .settings
            .default
            .iter()
            .map(|id| match find(listing, id, "") {
                Some(found) => found.id,
                None => id.clone(),
            });
        let shipped = match makes {
            Makes::Image => SHIPPED_ID,
            Makes::Video => SHIPPED_FILM_ID,
            Makes::Audio => SHIPPED_SOUND_ID,
        };
        let shipped = listing.iter().find(|found| found.id == shipped);
        configured.chain(shipped.map(|found| found.id.clone())).collect()
    }

    /// As [`Models::resolve`], on a blocking thread, since folders may be scanned.
    pub async fn entry(self: &Arc<Self>, model: ModelRef) -> Result<Resolved, Error> {
        let models = self.clone();
        FILES.run(move || models.resolve(&model)).await?
    }

    /// Resolves a reference to an entry.
    ///
    /// # Errors
    /// When there is no such model, or one of its formats or adapters is wrong.
    pub fn resolve(&self, model: &ModelRef) -> Result<Resolved, Error> {
        let named = self.by_key_with_adapters(model)?;
        let from_key = named.is_some();
        let model = named.as_ref().unwrap_or(model);
        let adapters = &model.adapters;
        let (model, quantization) = self.formats_of(model)?;
        let id = if model.id.is_empty() {
            self.default_id(&self.list()).ok_or_else(|| {
                invalid(
                    "model.id",
                    "is empty, and there is no default model: set models.default",
                )
            })?
        } else {
            model.id.clone()
        };
        let found = find_named(&self.list(), &id, &model.revision)
            .or_else(|| find_named(&self.rescan(), &id, &model.revision))
            .ok_or_else(|| match names::ambiguous(&self.list(), &id) {
                Some(problem) => invalid("model.id", problem),
                None if model.revision.is_empty() => Error::ModelNotFound { id: id.clone() },
                None => Error::ModelNotFound {
                    id: format!("{id}@{}", model.revision),
                },
            })?;
        let entry = Entry::new(found.id, found.revision, found.path, quantization);
        Ok(Resolved {
            entry: Arc::new(self.with_adapters(entry, adapters, from_key)?),
            adapters: adapters.clone(),
        })
    }

    /// A reference whose id is a key with adapters (`ID+4-bit&styles/ink`), with the adapters where a request has them;
    /// `None` for any other. A model with exactly that id takes precedence.
    fn by_key_with_adapters(&self, model: &ModelRef) -> Result<Option<ModelRef>, Error> {
        let (base, adapters) = Entry::adapters_in_key(&model.id);
        let is_listed = |listing: &[Found]| find_named(listing, &model.id, &model.revision).is_some();
        if adapters.is_empty() || is_listed(&self.known()) || is_listed(&self.list()) {
            return Ok(None);
        }
        if !model.adapters.is_empty() {
            let problem = "names adapters already: name them there, or by model.adapters";
            return Err(invalid("model.id", problem));
        }
        let adapters = adapters.into_iter().map(|(id, ignore_unknown)| AskedAdapter {
            id,
            ignore_unknown,
            ..Default::default()
        });
        Ok(Some(ModelRef {
            id: base.to_owned(),
            adapters: adapters.collect(),
            ..model.clone()
        }))
    }

    /// The model and the formats of a reference. The id may include the formats, as in reports: `ID+4-bit`,
    /// `ID@REVISION+text_encoder_2=nf4,transformer=int8`. A model with exactly that id takes precedence.
    fn formats_of(&self, model: &ModelRef) -> Result<(ModelRef, Quantization), Error> {
        let asked = &model.formats;
        let find_by_key = || match named_by_key(&self.list(), model) {
            Some(named) => named,
            None => named_by_key(&self.rescan(), model).flatten(),
        };
        let by_key = if model.id.contains('+') {
            find_by_key()
        } else {
            None
        };
        let Some((name, revision, formats)) = by_key else {
            return Ok((model.clone(), quantization_of(asked)?));
        };
        if !asked.is_open() {
            let problem = format!("says {formats} already: ask for formats there, or by model.quantization");
            return Err(invalid("model.id", problem));
        }
        let (named, presets): (Vec<&str>, Vec<&str>) =
            formats.split(',').partition(|each| each.contains('='));
        let preset = match &presets[..] {
            [] => "",
            [""] | [_, _, ..] => {
                let problem =
                    format!("ends in {formats:?}: write one preset, or formats such as transformer=nf4");
                return Err(invalid("model.id", problem));
            }
            [preset] => *preset,
        };
        let components: Vec<(&str, &str)> = named.iter().filter_map(|each| each.split_once('=')).collect();
        for (index, (name, _)) in components.iter().enumerate() {
            if components[..index].iter().any(|(before, _)| before == name) {
                return Err(invalid(
                    "model.id",
                    format!("names {name} twice: write each component once"),
                ));
            }
        }
        let quantization = quantization_of(&AskedFormats {
            preset: preset.to_owned(),
            components: components
                .into_iter()
                .map(|(name, format)| (name.to_owned(), format.to_owned()))
                .collect(),
        })?;
        let model = ModelRef {
            id: name.to_owned(),
            revision: revision.to_owned(),
            ..Default::default()
        };
        Ok((model, quantization))
    }

    /// A model's defaults with the configured ones over them.
    pub fn defaults(&self, id: &str, mut defaults: Request) -> Request {
        let Some(own) = self.settings.settings.get(id) else {
            return defaults;
        };
        defaults.steps = own.steps.unwrap_or(defaults.steps);
        defaults.guidance = own.guidance.unwrap_or(defaults.guidance);
        defaults.max_sequence_length = own.max_sequence_length.unwrap_or(defaults.max_sequence_length);
        let (width, height) = match &mut defaults.medium {
            Medium::Image(image) => (&mut image.width, &mut image.height),
            Medium::Video(video) => (&mut video.width, &mut video.height),
            Medium::Audio(_) => return defaults,
        };
        *width = own.width.unwrap_or(*width);
        *height = own.height.unwrap_or(*height);
        defaults
    }
}

/// The entries that match a reference. Only the entries are compared, as their files may be gone.
pub enum Meant {
    /// Entries with this id or key, these formats and adapters, and the revision if one is named.
    AsNamed(ModelRef),
    /// As `AsNamed`, in any formats.
    AnyFormats(ModelRef),
}

impl Meant {
    /// Whether this entry is one of them.
    pub fn is(&self, entry: &Entry) -> bool {
        let (Meant::AsNamed(model) | Meant::AnyFormats(model)) = self;
        let formats = quantization_of(&model.formats);
        let has_formats = || match self {
            Meant::AsNamed(_) => formats.is_ok_and(|formats| formats == entry.quantization),
            Meant::AnyFormats(_) => true,
        };
        let is_named =
            || entry.id == model.id && has_formats() && adapters::are_named(&entry.adapters, &model.adapters);
        // A key includes formats and adapters: a reference that adds more of them contradicts itself.
        let is_key = || is_key(&entry.key, &model.id) && model.formats.is_open() && model.adapters.is_empty();
        entry.revision.starts_with(&model.revision) && (is_named() || is_key())
    }
}

/// Whether `asked` is this key. The first digits of the revision suffice, as tables show it: `owner/name@b28b7af6+full`.
fn is_key(key: &str, asked: &str) -> bool {
    let parts = |key: &'_ str| -> Option<(String, String, String)> {
        let (name, rest) = key.split_once('@')?;
        let (revision, formats) = rest.split_once('+')?;
        Some((name.to_owned(), revision.to_owned(), formats.to_owned()))
    };
    let is_short = || {
        let ((name, revision, formats), (of, short, with)) = (parts(key)?, parts(asked)?);
        Some(name == of && formats == with && !short.is_empty() && revision.starts_with(&short))
    };
    key == asked || is_short().unwrap_or(false)
}

fn quantization_of(asked: &AskedFormats) -> Result<Quantization, Error> {
    let preset = Preset::named(&asked.preset).ok_or_else(|| {
        let known = Preset::ALL.map(Preset::as_str).join(", ");
        let instead = match asked.preset.parse::<WeightFormat>() {
            Ok(format) => {
                format!("; {format} is a format, to be asked for by component: transformer={format}")
            }
            Err(_) => String::new(),
        };
        invalid(
            "model.quantization.preset",
            format!("{:?} is none of {known}{instead}", asked.preset),
        )
    })?;
    let formats = asked.components.iter();
    let formats = formats.map(|(component, format)| (component.as_str(), format.as_str()));
    Quantization::of(preset, formats).map_err(|(component, error)| {
        let problem = format!("for {component}: {error}, nor {FULL}");
        invalid("model.quantization.components", problem)
    })
}

/// Name, revision and formats of a reference that names an entry by its key; an inner `None` where its id is a model's
/// name as it is, an outer one where there is no such model.
fn named_by_key<'a>(listing: &[Found], model: &'a ModelRef) -> Option<Option<(&'a str, &'a str, &'a str)>> {
    if find(listing, &model.id, &model.revision).is_some() {
        return Some(None);
    }
    let (name, formats) = model.id.rsplit_once('+')?;
    if name.is_empty() || find(listing, name, &model.revision).is_some() {
        return Some(Some((name, &model.revision, formats)));
    }
    let (name, revision) = name.rsplit_once('@')?;
    find(listing, name, revision).map(|_| Some((name, revision, formats)))
}

/// Whether `name` may mean one of these ids, as in [`Models::has`]. Revisions are not checked, as they are not known here.
pub fn is_among(families: &dyn Families, ids: &[String], name: &str) -> bool {
    let listing: Vec<Found> = (ids.iter().cloned())
        .map(|id| Found::at(families, id, PathBuf::new()))
        .collect();
    names_in_key(name).any(|name| {
        let plain = without_revision(name);
        let stem = families.single_file_stem(&plain);
        [Some(name), Some(&plain), stem]
            .into_iter()
            .flatten()
            .any(|name| find(&listing, name, "").is_some() || names::ambiguous(&listing, name).is_some())
    })
}

/// Candidates for the name of a model in a key, the likeliest first: the whole key, without adapters, and without formats.
fn names_in_key(key: &str) -> impl Iterator<Item = &str> {
    let (base, _) = Entry::adapters_in_key(key);
    let without_formats = base.rsplit_once('+').map(|(name, _)| name);
    [Some(key), Some(base), without_formats].into_iter().flatten()
}

/// `owner/name@main` as `owner/name`, and `owner/name@main:file` as `owner/name:file`.
fn without_revision(name: &str) -> String {
    match name.split_once('@') {
        Some((id, rest)) => format!("{id}{}", rest.find(':').map_or("", |at| &rest[at..])),
        None => name.to_owned(),
    }
}

/// [`find`], where the id may include the revision: `owner/name@main`, of one file `owner/name@main:file` too.
fn find_named(listing: &[Found], id: &str, revision: &str) -> Option<Found> {
    let of_file = || {
        let file: hub::Reference = id.parse().ok()?;
        let is_with_revision = file.file.is_some() && revision.is_empty() && id.contains('@');
        is_with_revision.then(|| find(listing, &file.listed_id(), &file.revision))?
    };
    let by_name = || {
        let (name, named) = id.rsplit_once('@')?;
        find(listing, name, named).filter(|found| found.revision.starts_with(revision))
    };
    find(listing, id, revision).or_else(of_file).or_else(by_name)
}

/// The model with this id, the only one whose id ends in this name, or the one with this short name. Backslashes of a Windows
/// path are read as slashes.
fn find(listing: &[Found], id: &str, revision: &str) -> Option<Found> {
    names::spellings(id).find_map(|id| find_spelled(listing, &id, revision))
}

fn find_spelled(listing: &[Found], id: &str, revision: &str) -> Option<Found> {
    let fits = |m: &&Found| {
        revision.is_empty() || m.revision.starts_with(revision) || m.refs.iter().any(|name| name == revision)
    };
    if let Some(found) = listing.iter().filter(fits).find(|m| m.id == id) {
        return Some(found.clone());
    }
    if let Some(found) = listing.iter().filter(fits).find(|m| names::is_called(*m, id)) {
        return Some(found.clone());
    }
    let is_last = |whole: &str| whole.rsplit('/').next() == Some(id);
    let mut by_name = listing
        .iter()
        .filter(fits)
        .filter(|m| is_last(&m.id) || m.id_with_ending().is_some_and(|whole| is_last(&whole)));
    match (by_name.next(), by_name.next()) {
        (Some(only), None) => Some(only.clone()),
        (Some(_), Some(_)) => None,
        (None, _) => {
            let id = catalogue::id_of(id)?;
            listing.iter().filter(fits).find(|m| m.id == id).cloned()
        }
    }
}

/// The shipped models that are installed.
fn shipped_models(families: &dyn Families) -> impl Iterator<Item = (&'static str, PathBuf)> {
    let there = SHIPPED
        .into_iter()
        .filter_map(|(id, folder)| Some((id, shipped_folder(folder)?)));
    there.filter(|(_, folder)| is_pipeline(families, folder))
}

/// A folder that ships with the project: beside the program, where it is installed to (`share/moored` of the same prefix),
/// in the current folder, or in the checkout that it was built in.
fn shipped_folder(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let beside = program
        .iter()
        .flat_map(|program| program.ancestors().skip(1).take(3))
        .flat_map(|folder| [folder.to_owned(), folder.join("share/moored")]);
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    beside
        .chain(std::env::current_dir().ok())
        .chain([built])
        .map(|folder| folder.join(name))
        .find(|folder| folder.is_dir())
}

/// Models in a folder: itself, its children, and their children. `holds` decides which files of a hub cache are models.
fn scan(families: &dyn Families, folder: &Path, holds: &dyn Fn(&Path) -> bool) -> Vec<Found> {
    let mut found = Vec::new();
    let name = folder
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    if is_pipeline(families, folder) {
        found.push(Found::at(families, name, folder.to_owned()));
        return found;
    }
    for child in children(folder) {
        let name = child
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if let Some(id) = hub::id_of_folder(&name) {
            for snapshot in hub_model(families, &child, &id) {
                // A pipeline's own transformer is in a subfolder. A transformer file beside the index is another model.
                let is_pipeline = is_pipeline(families, &snapshot.path);
                let files = files_in(families, &snapshot, holds).into_iter();
                let is_model = |file: &Found| {
                    !is_pipeline
                        || (file.path.parent() == Some(&snapshot.path) && !hub::is_of_folder(&file.path))
                };
                found.extend(files.filter(is_model));
                found.extend(is_pipeline.then_some(snapshot));
            }
        } else if let Some(id) = single_file_id(families, &child) {
            found.push(Found::at(families, id, child));
        } else if is_pipeline(families, &child) {
            found.push(Found::at(families, name, child));
        } else if child.is_dir() {
            for grandchild in children(&child)
                .into_iter()
                .filter(|g| is_pipeline(families, g) || single_file_id(families, g).is_some())
            {
                let own = single_file_id(families, &grandchild)
                    .or_else(|| grandchild.file_name().map(|n| n.to_string_lossy().into_owned()))
                    .unwrap_or_default();
                found.push(Found::at(families, format!("{name}/{own}"), grandchild));
            }
        }
    }
    found
}

/// Depth to which ComfyUI's folders are scanned.
const DEPTH_OF_COMFYUI: usize = 4;

/// Models in a folder and the folders in it, by their paths in it.
fn models_below(families: &dyn Families, folder: &Path, prefix: &str, depth: usize) -> Vec<Found> {
    let mut found = Vec::new();
    for child in children(folder) {
        let name = child.file_name().and_then(|name| name.to_str());
        let Some(name) = name.filter(|name| !name.starts_with('.')) else {
            continue;
        };
        if let Some(id) = single_file_id(families, &child) {
            found.push(Found::at(families, format!("{prefix}{id}"), child));
        } else if is_pipeline(families, &child) {
            found.push(Found::at(families, format!("{prefix}{name}"), child));
        } else if child.is_dir() && depth > 1 {
            found.extend(models_below(
                families,
                &child,
                &format!("{prefix}{name}/"),
                depth - 1,
            ));
        }
    }
    found
}

/// The models in single files of a snapshot of a hub cache: `owner/name:file`.
fn files_in(families: &dyn Families, snapshot: &Found, holds: &dyn Fn(&Path) -> bool) -> Vec<Found> {
    let files = hub::transformer_files(&snapshot.path, holds).into_iter();
    let found = files.map(|file| Found {
        id: format!("{}:{file}", snapshot.id),
        ending: ending_of(families, &file).to_owned(),
        path: snapshot.path.join(&file),
        ..snapshot.clone()
    });
    found.collect()
}

/// Whether a folder can be opened: a pipeline, or a transformer alone whose other components are in a folder beside it.
fn is_pipeline(families: &dyn Families, folder: &Path) -> bool {
    (folder.join("model_index.json").is_file() && !families.holds_parts_alone(folder))
        || families.has_transformer(folder)
        || families.has_own_layout(folder)
}

fn single_file_id(families: &dyn Families, path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = families.single_file_stem(name)?;
    path.is_file().then(|| stem.to_owned())
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The snapshots of a repository in a hub cache; the one that `main` points to, or the newest, comes first.
fn hub_model(families: &dyn Families, repository: &Path, id: &str) -> Vec<Found> {
    let refs = refs_of(&repository.join("refs"), "");
    let main = refs.iter().find(|(name, _)| name == "main");
    let main = main.map(|(_, commit)| commit.clone()).unwrap_or_default();
    let mut snapshots: Vec<PathBuf> = children(&repository.join("snapshots"))
        .into_iter()
        .filter(|s| hub::is_whole(families, s))
        .collect();
    let age = |path: &PathBuf| {
        let changed = path
            .metadata()
            .and_then(|m| m.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH);
        SystemTime::now().duration_since(changed).unwrap_or_default()
    };
    snapshots.sort_by_key(|path| (!path.ends_with(&main), age(path)));
    let found = |path: PathBuf| {
        let revision = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        let named = refs.iter().filter(|(_, commit)| *commit == revision);
        Found {
            id: id.to_owned(),
            refs: named.map(|(name, _)| name.clone()).collect(),
            revision,
            path,
            ending: String::new(),
        }
    };
    snapshots.into_iter().map(found).collect()
}

/// Branches and tags of a repository in a hub cache, with their commits. A name may have slashes.
fn refs_of(folder: &Path, prefix: &str) -> Vec<(String, String)> {
    let mut refs = Vec::new();
    for path in children(folder) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let name = format!("{prefix}{name}");
        if path.is_dir() {
            refs.extend(refs_of(&path, &format!("{name}/")));
        } else if let Ok(commit) = gpu::text_bounded(&path, hub::LONGEST_REF) {
            refs.push((name, commit.trim().to_owned()));
        }
    }
    refs
}

#[cfg(test)]
mod tests;
