//! Single-file checkpoints, which have the transformer only, and their companions.

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
/// only folder of the family beside it. `family` is the display name.
///
/// # Errors
/// When there is none, or more than one.
pub(crate) fn base_folder(
    file: &Path,
    family: &str,
    is_of_family: &dyn Fn(&Path) -> Result<bool, ModelError>,
) -> Result<PathBuf, ModelError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sidecar {
        base: PathBuf,
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    let sidecar = file.with_extension("moored.json");
    if sidecar.is_file() {
        let Sidecar { base } = read_json(&sidecar)?;
        let base = folder.join(base);
        return match is_of_family(&base)? {
            true => Ok(base),
            false => Err(damaged(
                &sidecar,
                format!("its base {} is no {family} folder", base.display()),
            )),
        };
    }
    if is_of_family(folder)? {
        return Ok(folder.to_owned());
    }
    let entries =
        std::fs::read_dir(folder).map_err(|e| damaged(folder, format!("it cannot be listed: {e}")))?;
    let mut beside: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && is_of_family(path).unwrap_or(false))
        .collect();
    beside.sort();
    match beside.as_slice() {
        [one] => Ok(one.clone()),
        _ => Err(unsupported(
            file,
            format!(
                "it holds a transformer only, and {} folders beside it hold the VAE, text encoders and \
                 tokenizers of a {family} pipeline: write {} with {{\"base\": \"path of a {family} folder in \
                 diffusers' layout\"}}",
                beside.len(),
                sidecar.display()
            ),
        )),
    }
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
