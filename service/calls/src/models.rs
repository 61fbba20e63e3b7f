//! The models that requests can name: folders are scanned, ids resolved, defaults merged.

mod adapters;
mod comfyui;
mod find;
mod listing;
mod names;
mod scan;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use config::ModelSettings;
use engine::Error;
use engine::library::Entry;
use gpu::FileStamp;
use hub::catalogue::{Makes, SHIPPED_FILM_ID, SHIPPED_ID, SHIPPED_SOUND_ID};
use model::{Families, Medium, Quantization, Request};

use crate::errors::invalid;
use crate::references::{AskedAdapter, AskedFormats, ModelRef};
use crate::threads::FILES;
pub use adapters::FoundAdapter;
pub use find::{Meant, is_among};
use find::{find, find_named, named_by_key, names_in_key, quantization_of};
use listing::Listing;
use names::Named;
use scan::{DEPTH_OF_COMFYUI, ending_of, models_below, scan, shipped_models};

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

    /// The folders that whoever runs a model reads: those that are configured, with what ComfyUI keeps beside its models, the hub cache,
    /// the folders around models that are configured by path, and what ships with the project. This reads the
    /// `extra_model_paths.yaml` files of ComfyUI. Some may not exist.
    pub fn places(&self) -> Vec<PathBuf> {
        let settings = &self.settings;
        let mut places: Vec<PathBuf> = [&settings.folders[..], &settings.adapters].concat();
        places.push(self.hub_cache.clone());
        places.extend(settings.comfyui.iter().map(|folder| folder.join("models")));
        for (_, folder) in self.places_of_comfyui() {
            // Text encoders and autoencoders are in folders beside those of models.
            places.extend(folder.parent().map(Path::to_owned));
            places.push(folder);
        }
        places.extend(
            settings
                .paths
                .values()
                .filter_map(|path| path.parent().map(Path::to_owned)),
        );
        places.extend(settings.paths.values().cloned());
        places.extend(scan::shipped_places());
        places
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

#[cfg(test)]
mod tests;
