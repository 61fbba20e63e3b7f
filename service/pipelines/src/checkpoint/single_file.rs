//! Single-file checkpoints, which have the transformer only, and their companions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ModelError;
use crate::files::{damaged, read_json, unsupported};

/// Optional prefixes of all tensor names of the transformer.
pub(crate) const PREFIXES: [&str; 2] = ["", "model.diffusion_model."];

/// Extensions of single files.
const EXTENSIONS: [&str; 4] = ["safetensors", "gguf", "pth", "pt"];

/// Whether a path is a file that may be a checkpoint.
pub(crate) fn is_single_file(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let known = |extension: &str| {
        EXTENSIONS
            .iter()
            .any(|known| extension.eq_ignore_ascii_case(known))
    };
    extension.is_some_and(known) && path.is_file()
}

/// The folder of a single file's companions: the folder that `X.moored.json` beside it names, its own folder, or the
/// only folder of the family beside it. `family` is the display name; `further` are the keys that the family reads of
/// `X.moored.json` itself.
///
/// # Errors
/// When there is none, or more than one.
pub(crate) fn base_folder(
    file: &Path,
    family: &str,
    further: &[&str],
    is_of_family: &dyn Fn(&Path) -> Result<bool, ModelError>,
) -> Result<PathBuf, ModelError> {
    #[derive(Deserialize)]
    struct Sidecar {
        base: Option<PathBuf>,
        #[serde(flatten)]
        others: BTreeMap<String, serde::de::IgnoredAny>,
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    let sidecar = file.with_extension("moored.json");
    if sidecar.is_file() {
        let Sidecar { base, others } = read_json(&sidecar)?;
        if let Some(unknown) = others.keys().find(|key| !further.contains(&key.as_str())) {
            let known = [&["base"], further].concat().join(", ");
            return Err(damaged(
                &sidecar,
                format!("it has {unknown}, and what is read is {known}"),
            ));
        }
        if let Some(base) = base {
            return named_base(&sidecar, family, &folder.join(base), is_of_family);
        }
    }
    if is_of_family(folder)? {
        return Ok(folder.to_owned());
    }
    only_base(file, &sidecar, family, &folders_in(folder)?, is_of_family)
}

/// The base that a sidecar names.
///
/// # Errors
/// When it is of another family, or none.
pub(crate) fn named_base(
    sidecar: &Path,
    family: &str,
    base: &Path,
    is_of_family: &dyn Fn(&Path) -> Result<bool, ModelError>,
) -> Result<PathBuf, ModelError> {
    match is_of_family(base)? {
        true => Ok(base.to_owned()),
        false => Err(damaged(
            sidecar,
            format!("its base {} is no {family} folder", base.display()),
        )),
    }
}

/// The only base among the folders beside a transformer.
///
/// # Errors
/// When there is none, or more than one: what to write in the sidecar.
pub(crate) fn only_base(
    transformer: &Path,
    sidecar: &Path,
    family: &str,
    beside: &[PathBuf],
    is_of_family: &dyn Fn(&Path) -> Result<bool, ModelError>,
) -> Result<PathBuf, ModelError> {
    let bases: Vec<&PathBuf> = beside
        .iter()
        .filter(|folder| is_of_family(folder).unwrap_or(false))
        .collect();
    match bases.as_slice() {
        [one] => Ok((*one).clone()),
        _ => Err(unsupported(
            transformer,
            format!(
                "it holds a transformer only, and {} folders beside it hold the VAE, text encoders and \
                 tokenizers of a {family} pipeline: write {} with {{\"base\": \"path of a {family} folder in \
                 diffusers' layout\"}}",
                bases.len(),
                sidecar.display()
            ),
        )),
    }
}

/// The folders in a folder, in order.
///
/// # Errors
/// When it cannot be listed.
pub(crate) fn folders_in(folder: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let entries =
        std::fs::read_dir(folder).map_err(|e| damaged(folder, format!("it cannot be listed: {e}")))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut folders: Vec<PathBuf> = paths.filter(|path| path.is_dir()).collect();
    folders.sort();
    Ok(folders)
}

/// The single file of a component for which the base has no folder: its name is `stem`, or `stem` followed by `_`,
/// `-` or `.`; it is beside the transformer, in the base, or where ComfyUI keeps such files, in a folder beside the
/// transformer's.
pub(crate) fn companion(file: &Path, base: &Path, comfy_folder: &str, stem: &str) -> Option<PathBuf> {
    let folder = file.parent().unwrap_or(Path::new("."));
    let comfy = folder.parent().map(|models| models.join(comfy_folder));
    let folders = [Some(folder.to_owned()), Some(base.to_owned()), comfy];
    folders.into_iter().flatten().find_map(|folder| {
        let entries = std::fs::read_dir(folder).ok()?;
        let paths = entries.flatten().map(|entry| entry.path());
        let is_it = |path: &PathBuf| {
            let name = path.file_stem().and_then(|stem| stem.to_str());
            let behind = name.and_then(|name| name.strip_prefix(stem));
            behind.is_some_and(|behind| behind.is_empty() || behind.starts_with(['_', '-', '.']))
                && is_single_file(path)
        };
        paths.filter(is_it).min()
    })
}
