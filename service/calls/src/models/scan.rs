//! Scans folders for models: pipelines and single files, the snapshots of a hub cache, and the models that ship with the project.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hub::catalogue::{SHIPPED_FILM_ID, SHIPPED_ID, SHIPPED_SOUND_ID};
use model::Families;

use super::Found;

/// Models that ship with the project: their ids, and their folders in it.
const SHIPPED: [(&str, &str); 3] = [
    (SHIPPED_ID, "demo/model"),
    (SHIPPED_FILM_ID, "demo/film/model"),
    (SHIPPED_SOUND_ID, "demo/sound/model"),
];

/// The ending of the name of a model's file; empty where it is none.
pub(super) fn ending_of<'a>(families: &dyn Families, name: &'a str) -> &'a str {
    families
        .single_file_stem(name)
        .map_or("", |stem| &name[stem.len()..])
}

/// The shipped models that are installed.
pub(super) fn shipped_models(families: &dyn Families) -> impl Iterator<Item = (&'static str, PathBuf)> {
    let there = SHIPPED
        .into_iter()
        .filter_map(|(id, folder)| Some((id, shipped_folder(folder)?)));
    there.filter(|(_, folder)| is_pipeline(families, folder))
}

/// The folders that ship with the project and are installed.
pub(super) fn shipped_places() -> impl Iterator<Item = PathBuf> {
    let folders = SHIPPED.into_iter().map(|(_, folder)| folder);
    folders.chain([SHIPPED_ADAPTERS]).filter_map(shipped_folder)
}

/// The folder of adapters that ship with the project.
pub(super) const SHIPPED_ADAPTERS: &str = "demo/adapters";

/// The checkout that this is built in. A release does not know it: the same commit gives the same bytes in every folder.
const CHECKOUT: Option<&str> = match option_env!("MOORED_WITHOUT_CHECKOUT") {
    Some(_) => None,
    None => Some(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")),
};

/// A folder that ships with the project: beside the program, where it is installed to (`share/moored` of the same prefix),
/// in the current folder, or in the checkout that it was built in.
pub(super) fn shipped_folder(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let beside = program
        .iter()
        .flat_map(|program| program.ancestors().skip(1).take(3))
        .flat_map(|folder| [folder.to_owned(), folder.join("share/moored")]);
    beside
        .chain(std::env::current_dir().ok())
        .chain(CHECKOUT.map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|folder| folder.is_dir())
}

/// Models in a folder: itself, its children, and their children. `holds` decides which files of a hub cache are models.
pub(super) fn scan(families: &dyn Families, folder: &Path, holds: &dyn Fn(&Path) -> bool) -> Vec<Found> {
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
pub(super) const DEPTH_OF_COMFYUI: usize = 4;

/// Models in a folder and the folders in it, by their paths in it.
pub(super) fn models_below(families: &dyn Families, folder: &Path, prefix: &str, depth: usize) -> Vec<Found> {
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
pub(super) fn is_pipeline(families: &dyn Families, folder: &Path) -> bool {
    (folder.join("model_index.json").is_file() && !families.holds_parts_alone(folder))
        || families.has_transformer(folder)
        || families.has_own_layout(folder)
}

fn single_file_id(families: &dyn Families, path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = families.single_file_stem(name)?;
    path.is_file().then(|| stem.to_owned())
}

pub(super) fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The snapshots of a repository in a hub cache; the one that `main` points to, or the newest, comes first.
pub(super) fn hub_model(families: &dyn Families, repository: &Path, id: &str) -> Vec<Found> {
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
