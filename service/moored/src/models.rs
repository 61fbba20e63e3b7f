//! Which models can be named: folders are scanned, ids resolved, defaults merged.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant, SystemTime};

use engine::Error;
use engine::library::Entry;
use pipelines::{Defaults, RequestError};

use crate::config::{ModelSettings, Models as Settings};
use crate::proto::v1;

/// Id of the model that ships with the project.
pub(crate) const SHIPPED_ID: &str = "moored/demo";

/// A folder listing is believed for so long; a model that is not found is looked for at once.
const LISTING_LIFETIME: Duration = Duration::from_secs(10);

/// Formats that a quantization may name, beside `full`, once quantization is built.
const FORMATS: [&str; 3] = ["fp8", "int8", "nf4"];

/// A model that can be named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) id: String,
    /// Empty but in a hub cache.
    pub(crate) revision: String,
    pub(crate) path: PathBuf,
}

/// Finds models by id.
pub(crate) struct Models {
    settings: Settings,
    listing: RwLock<Option<(Instant, Arc<Vec<Found>>)>>,
}

impl Models {
    pub(crate) fn new(settings: Settings) -> Models {
        Models {
            settings,
            listing: RwLock::new(None),
        }
    }

    /// Where models are looked for.
    pub(crate) fn folders(&self) -> &[PathBuf] {
        &self.settings.folders
    }

    /// Every model there is, by id.
    pub(crate) fn list(&self) -> Arc<Vec<Found>> {
        let cached = self.listing.read().ok().and_then(|l| l.clone());
        match cached {
            Some((when, listing)) if when.elapsed() < LISTING_LIFETIME => listing,
            _ => self.rescan(),
        }
    }

    fn rescan(&self) -> Arc<Vec<Found>> {
        // What is configured by path comes first, then the folders in their order; the first of an id and
        // revision wins. A hub cache lists the revision of `main` first, which the stable sort keeps.
        let configured = self.settings.paths.iter().map(|(id, path)| Found {
            id: id.clone(),
            revision: String::new(),
            path: path.clone(),
        });
        let scanned = self.settings.folders.iter().flat_map(|folder| scan(folder));
        let shipped = shipped_model().map(|path| Found {
            id: SHIPPED_ID.to_owned(),
            revision: String::new(),
            path,
        });
        let mut found: Vec<Found> = Vec::new();
        for model in configured.chain(scanned).chain(shipped) {
            if !found
                .iter()
                .any(|other| other.id == model.id && other.revision == model.revision)
            {
                found.push(model);
            }
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        let listing = Arc::new(found);
        if let Ok(mut cached) = self.listing.write() {
            *cached = Some((Instant::now(), Arc::clone(&listing)));
        }
        listing
    }

    /// Id of the model of requests that name none.
    pub(crate) fn default_id(&self) -> Option<String> {
        if let Some(id) = &self.settings.default {
            return Some(id.clone());
        }
        let listing = self.list();
        if listing.iter().any(|m| m.id == SHIPPED_ID) {
            return Some(SHIPPED_ID.to_owned());
        }
        match &listing[..] {
            [only] => Some(only.id.clone()),
            _ => None,
        }
    }

    /// Resolves a reference to the entry that it means.
    pub(crate) fn resolve(&self, model: Option<&v1::ModelRef>) -> Result<Arc<Entry>, Error> {
        let none = v1::ModelRef::default();
        let model = model.unwrap_or(&none);
        if !model.adapters.is_empty() {
            return Err(Error::NotBuilt {
                what: "adapters".to_owned(),
            });
        }
        check_quantization(model.quantization.as_ref())?;
        let id = if model.id.is_empty() {
            self.default_id().ok_or_else(|| {
                invalid(
                    "model.id",
                    "is empty, and there is no default model: set models.default",
                )
            })?
        } else {
            model.id.clone()
        };
        let found = find(&self.list(), &id, &model.revision)
            .or_else(|| find(&self.rescan(), &id, &model.revision))
            .ok_or_else(|| Error::ModelNotFound { id: id.clone() })?;
        let revision = if found.revision.is_empty() {
            String::new()
        } else {
            format!("@{}", found.revision)
        };
        Ok(Arc::new(Entry {
            key: format!("{}{revision}+full", found.id),
            id: found.id,
            revision: found.revision,
            path: found.path,
        }))
    }

    /// A model's defaults with the configured ones over them.
    pub(crate) fn defaults(&self, id: &str, of_model: Defaults) -> Defaults {
        let none = ModelSettings::default();
        let own = self.settings.settings.get(id).unwrap_or(&none);
        Defaults {
            steps: own.steps.unwrap_or(of_model.steps),
            guidance: own.guidance.unwrap_or(of_model.guidance),
            max_sequence_length: own.max_sequence_length.unwrap_or(of_model.max_sequence_length),
            width: own.width.unwrap_or(of_model.width),
            height: own.height.unwrap_or(of_model.height),
        }
    }
}

fn invalid(field: &str, problem: &str) -> Error {
    Error::Invalid(vec![RequestError {
        field: field.to_owned(),
        problem: problem.to_owned(),
    }])
}

fn check_quantization(quantization: Option<&v1::Quantization>) -> Result<(), Error> {
    let Some(quantization) = quantization else {
        return Ok(());
    };
    match quantization.preset.as_str() {
        "" | "full" => {}
        "8-bit" | "4-bit" => {
            return Err(Error::NotBuilt {
                what: format!("quantization {}", quantization.preset),
            });
        }
        other => {
            return Err(invalid(
                "model.quantization.preset",
                &format!("{other:?} is none of full, 8-bit, 4-bit"),
            ));
        }
    }
    for (component, format) in &quantization.components {
        if FORMATS.contains(&format.as_str()) {
            return Err(Error::NotBuilt {
                what: format!("quantization {format}"),
            });
        }
        if format != "full" {
            let problem = format!(
                "{format:?} for {component} is none of full, {}",
                FORMATS.join(", ")
            );
            return Err(invalid("model.quantization.components", &problem));
        }
    }
    Ok(())
}

/// An id matches whole, or by its last part when only one model ends so.
fn find(listing: &[Found], id: &str, revision: &str) -> Option<Found> {
    let fits = |m: &&Found| revision.is_empty() || m.revision.starts_with(revision);
    if let Some(found) = listing.iter().filter(fits).find(|m| m.id == id) {
        return Some(found.clone());
    }
    let mut by_name = listing
        .iter()
        .filter(fits)
        .filter(|m| m.id.rsplit('/').next() == Some(id));
    match (by_name.next(), by_name.next()) {
        (Some(only), None) => Some(only.clone()),
        _ => None,
    }
}

/// The model that ships in `demo/model`: beside the program, in the checkout that it was built in, or in the
/// current folder.
fn shipped_model() -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let beside = program
        .iter()
        .flat_map(|program| program.ancestors().skip(1).take(3).map(Path::to_owned));
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    beside
        .chain(std::env::current_dir().ok())
        .chain([built])
        .map(|folder| folder.join("demo/model"))
        .find(|folder| folder.join("model_index.json").is_file())
}

/// Models in a folder: itself, its children, and their children one level down.
fn scan(folder: &Path) -> Vec<Found> {
    let mut found = Vec::new();
    let name = folder
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    if is_pipeline(folder) {
        found.push(Found {
            id: name,
            revision: String::new(),
            path: folder.to_owned(),
        });
        return found;
    }
    for child in children(folder) {
        let name = child
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if let Some(id) = name.strip_prefix("models--") {
            found.extend(hub_model(&child, &id.replacen("--", "/", 1)));
        } else if let Some(id) = single_file_id(&child) {
            found.push(Found {
                id,
                revision: String::new(),
                path: child,
            });
        } else if is_pipeline(&child) {
            found.push(Found {
                id: name,
                revision: String::new(),
                path: child,
            });
        } else if child.is_dir() {
            for grandchild in children(&child)
                .into_iter()
                .filter(|g| is_pipeline(g) || single_file_id(g).is_some())
            {
                let own = single_file_id(&grandchild)
                    .or_else(|| grandchild.file_name().map(|n| n.to_string_lossy().into_owned()))
                    .unwrap_or_default();
                found.push(Found {
                    id: format!("{name}/{own}"),
                    revision: String::new(),
                    path: grandchild,
                });
            }
        }
    }
    found
}

fn is_pipeline(folder: &Path) -> bool {
    folder.join("model_index.json").is_file()
}

fn single_file_id(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = name
        .strip_suffix(".instant.json")
        .or_else(|| name.strip_suffix(".safetensors"))?;
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
fn hub_model(repository: &Path, id: &str) -> Vec<Found> {
    let main = std::fs::read_to_string(repository.join("refs/main")).unwrap_or_default();
    let mut snapshots: Vec<PathBuf> = children(&repository.join("snapshots"))
        .into_iter()
        .filter(|s| is_pipeline(s))
        .collect();
    let age = |path: &PathBuf| {
        let changed = path
            .metadata()
            .and_then(|m| m.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH);
        SystemTime::now().duration_since(changed).unwrap_or_default()
    };
    snapshots.sort_by_key(|path| (!path.ends_with(main.trim()), age(path)));
    snapshots
        .into_iter()
        .map(|path| Found {
            id: id.to_owned(),
            revision: path
                .file_name()
                .map(|n| n.to_string_lossy().into_owned())
                .unwrap_or_default(),
            path,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn folder_with(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{}").unwrap();
        }
        folder
    }

    fn models(folder: &Path) -> Models {
        Models::new(Settings {
            folders: vec![folder.to_owned()],
            default: None,
            paths: BTreeMap::new(),
            settings: BTreeMap::new(),
        })
    }

    fn reference(id: &str) -> v1::ModelRef {
        v1::ModelRef {
            id: id.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn folders_files_and_hub_caches_are_found() {
        let folder = folder_with(&[
            "plain/model_index.json",
            "owner/name/model_index.json",
            "single.safetensors",
            "quick.instant.json",
            "models--me--mine/snapshots/abc/model_index.json",
            "models--me--mine/snapshots/def/model_index.json",
            "notes.txt",
        ]);
        std::fs::create_dir_all(folder.path().join("models--me--mine/refs")).unwrap();
        std::fs::write(folder.path().join("models--me--mine/refs/main"), "def\n").unwrap();
        let models = models(folder.path());
        for id in ["plain", "owner/name", "name", "single", "quick", "me/mine"] {
            assert!(models.resolve(Some(&reference(id))).is_ok(), "{id}");
        }
        assert!(matches!(
            models.resolve(Some(&reference("other"))),
            Err(Error::ModelNotFound { .. })
        ));
    }

    #[test]
    fn a_revision_is_part_of_the_key() {
        let folder = folder_with(&["models--me--mine/snapshots/abc/model_index.json"]);
        let entry = models(folder.path())
            .resolve(Some(&reference("me/mine")))
            .unwrap();
        assert_eq!(entry.key, "me/mine@abc+full");
    }

    #[test]
    fn what_is_not_built_says_so() {
        let folder = folder_with(&["plain/model_index.json"]);
        let models = models(folder.path());
        let mut asked = reference("plain");
        asked.quantization = Some(v1::Quantization {
            preset: "4-bit".to_owned(),
            ..Default::default()
        });
        assert!(matches!(
            models.resolve(Some(&asked)),
            Err(Error::NotBuilt { .. })
        ));
        asked.quantization = Some(v1::Quantization {
            preset: "5-bit".to_owned(),
            ..Default::default()
        });
        assert!(matches!(models.resolve(Some(&asked)), Err(Error::Invalid(_))));
        asked.quantization = None;
        asked.adapters.push(v1::Adapter::default());
        assert!(matches!(
            models.resolve(Some(&asked)),
            Err(Error::NotBuilt { .. })
        ));
    }

    #[test]
    fn two_models_of_one_name_need_the_whole_id() {
        let folder = folder_with(&["a/x/model_index.json", "b/x/model_index.json"]);
        let models = models(folder.path());
        assert!(models.resolve(Some(&reference("x"))).is_err());
        assert!(models.resolve(Some(&reference("a/x"))).is_ok());
    }
}
