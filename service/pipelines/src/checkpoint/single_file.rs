//! Single-file checkpoints, which have the transformer only, and their companions.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ModelError;
use crate::files::{damaged, read_json, read_text, unsupported};

/// Extensions of single files.
const EXTENSIONS: [&str; 5] = ["safetensors", "sft", "gguf", "pth", "pt"];

/// Whether a path is a file that may be a checkpoint.
pub(crate) fn is_single_file(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| checkpoint_stem(name).is_some()) && path.is_file()
}

/// The name of a checkpoint's file without its extension; `None` for a file of another kind.
pub(crate) fn checkpoint_stem(name: &str) -> Option<&str> {
    let (stem, extension) = name.rsplit_once('.')?;
    let known = |known: &&str| extension.eq_ignore_ascii_case(known);
    (!stem.is_empty() && EXTENSIONS.iter().any(known)).then_some(stem)
}

/// The folder of a single file's companions: the folder that `X.moored.json` beside it names, its own folder, or the
/// folder of the family beside it ([`base_beside`]). `family` is the display name; `further` are the keys that the family reads of
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
    let folder = file.parent().unwrap_or(Path::new("."));
    let sidecar = sidecar_of(file);
    if let Some(base) = written_base(file, further)? {
        return named_base(&sidecar, family, &base, is_of_family);
    }
    if is_of_family(folder)? {
        return Ok(folder.to_owned());
    }
    base_beside(file, &sidecar, family, is_of_family)
}

/// The path of the sidecar of a single file: for `X.gguf`, `X.moored.json`.
pub(crate) fn sidecar_of(file: &Path) -> PathBuf {
    file.with_extension("moored.json")
}

/// The base that `X.moored.json` beside a single file names, if it does; `further` are the keys that the family reads of it
/// itself.
///
/// # Errors
/// When it cannot be read, or has other keys.
pub(crate) fn written_base(file: &Path, further: &[&str]) -> Result<Option<PathBuf>, ModelError> {
    #[derive(Deserialize)]
    struct Sidecar {
        base: Option<PathBuf>,
        #[serde(flatten)]
        others: BTreeMap<String, serde::de::IgnoredAny>,
    }
    let sidecar = sidecar_of(file);
    if !sidecar.is_file() {
        return Ok(None);
    }
    let Sidecar { base, others } = read_json(&sidecar)?;
    if let Some(unknown) = others.keys().find(|key| !further.contains(&key.as_str())) {
        let known = [&["base"], further].concat().join(", ");
        return Err(damaged(
            &sidecar,
            format!("it has {unknown}, and what is read is {known}"),
        ));
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    Ok(base.map(|base| folder.join(base)))
}

/// The base that a sidecar names.
///
/// # Errors
/// When the folder is of another family, or of none.
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

/// The base among the folders beside a transformer: the only one, or of several the one after which the transformer is
/// named, as `FLUX.1-dev` is of `flux1-dev-Q4_K_S.gguf`.
///
/// # Errors
/// When there is none, or more than one. The message says what to write in the sidecar.
pub(crate) fn base_beside(
    transformer: &Path,
    sidecar: &Path,
    family: &str,
    is_of_family: &dyn Fn(&Path) -> Result<bool, ModelError>,
) -> Result<PathBuf, ModelError> {
    let bases = bases_beside(transformer, is_of_family)?;
    let own = letters_of(transformer);
    let longest = bases
        .iter()
        .map(|base| (letters_of(base), base))
        .filter(|(name, _)| !name.is_empty() && own.contains(name))
        .max_by_key(|(name, _)| name.len());
    match (bases.as_slice(), longest) {
        ([one], _) => Ok(one.clone()),
        (_, Some((_, named))) => Ok(named.clone()),
        _ => Err(unsupported(
            transformer,
            format!(
                "it is a part of a pipeline, and {} folders beside it hold the rest of a {family} pipeline, such as \
                 its tokenizers: write {} with {{\"base\": \"path of a {family} folder in \
                 diffusers' layout\"}}",
                bases.len(),
                sidecar.display()
            ),
        )),
    }
}

/// The folders beside a transformer that may be its base.
///
/// # Errors
/// When they cannot be listed.
pub(crate) fn bases_beside(
    transformer: &Path,
    is_of_family: &dyn Fn(&Path) -> Result<bool, ModelError>,
) -> Result<Vec<PathBuf>, ModelError> {
    let mut bases = beside(transformer)?;
    bases.retain(|folder| is_of_family(folder).unwrap_or(false));
    Ok(bases)
}

/// The letters and digits of a name, in lower case. For a repository in a hub cache this is the repository's name, and for a
/// file in it the names of both.
fn letters_of(path: &Path) -> String {
    let own = path.file_name().unwrap_or_default().to_string_lossy();
    let named = match of_hub_cache(path) {
        Some(place) if place.is_snapshot => place.name.to_owned(),
        Some(place) => format!("{}{own}", place.name),
        None => own.into_owned(),
    };
    let letters = named.chars().filter(|letter| letter.is_alphanumeric());
    letters.flat_map(char::to_lowercase).collect()
}

/// A repository of a hub cache (`CACHE/models--owner--name/snapshots/COMMIT/...`).
pub(crate) struct HubPlace<'a> {
    cache: &'a Path,
    repository: &'a Path,
    /// `name`.
    pub(crate) name: &'a str,
    /// Whether it is the snapshot itself, rather than a path in it.
    pub(crate) is_snapshot: bool,
}

/// The place in a hub cache of a snapshot, or of a path in a snapshot; `None` elsewhere.
pub(crate) fn of_hub_cache(path: &Path) -> Option<HubPlace<'_>> {
    let snapshots = path
        .ancestors()
        .skip(1)
        .find(|folder| folder.ends_with("snapshots"))?;
    let repository = snapshots.parent()?;
    let id = repository.file_name()?.to_str()?.strip_prefix("models--")?;
    Some(HubPlace {
        cache: repository.parent()?,
        repository,
        name: id.rsplit_once("--").map_or(id, |(_, name)| name),
        is_snapshot: path.parent() == Some(snapshots),
    })
}

/// The folders beside a file or folder: in a hub cache, the snapshots of the other repositories.
///
/// # Errors
/// When they cannot be listed.
pub(crate) fn beside(opened: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let Some(HubPlace {
        cache, repository, ..
    }) = of_hub_cache(opened)
    else {
        return folders_in(match opened.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        });
    };
    let mut snapshots = Vec::new();
    for other in folders_in(cache)?.iter().filter(|other| *other != repository) {
        let main = read_text(&other.join("refs/main")).unwrap_or_default();
        let of_repository = folders_in(&other.join("snapshots")).unwrap_or_default();
        match of_repository.iter().find(|folder| folder.ends_with(main.trim())) {
            Some(named) if !main.trim().is_empty() => snapshots.push(named.clone()),
            _ => snapshots.extend(of_repository),
        }
    }
    Ok(snapshots)
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
    companion_by(file, base, comfy_folder, |folder| file_in(folder, stem))
}

/// [`companion`], which `in_folder` finds in a folder.
pub(crate) fn companion_by(
    file: &Path,
    base: &Path,
    comfy_folder: &str,
    in_folder: impl Fn(&Path) -> Option<PathBuf>,
) -> Option<PathBuf> {
    let folder = file.parent().unwrap_or(Path::new("."));
    let comfy = folder.parent().map(|models| models.join(comfy_folder));
    let folders = [Some(folder.to_owned()), Some(base.to_owned()), comfy];
    folders
        .into_iter()
        .flatten()
        .find_map(|folder| in_folder(&folder))
}

/// The single file in a folder whose name is `stem`, or `stem` followed by `_`, `-` or `.`.
pub(crate) fn file_in(folder: &Path, stem: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let paths = entries.flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| {
        let name = path.file_stem().and_then(|stem| stem.to_str());
        let behind = name.and_then(|name| name.strip_prefix(stem));
        behind.is_some_and(|behind| behind.is_empty() || behind.starts_with(['_', '-', '.']))
            && is_single_file(path)
    };
    paths.filter(is_it).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The base that `base_beside` chooses for a file among these folders of a family.
    fn chosen(file: &str, folders: &[&str]) -> Result<String, String> {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(file);
        for folder in folders.iter().map(|folder| root.path().join(folder)) {
            std::fs::create_dir_all(folder.join("model")).unwrap();
        }
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "").unwrap();
        let is_of_family = |folder: &Path| Ok(folder.join("model").is_dir());
        base_beside(&file, &file.with_extension("moored.json"), "FLUX", &is_of_family)
            .map(|base| base.strip_prefix(root.path()).unwrap().display().to_string())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_single_file_is_recognised_by_its_ending() {
        let families = crate::families();
        for (name, stem) in [
            ("flux1-dev-Q4_K_S.gguf", Some("flux1-dev-Q4_K_S")),
            ("MINE.SAFETENSORS", Some("MINE")),
            ("flux1-dev.sft", Some("flux1-dev")),
            ("old.pt", Some("old")),
            ("quick.instant.json", Some("quick")),
            ("mine.moored.json", None),
            ("notes.txt", None),
            (".gguf", None),
            ("gguf", None),
        ] {
            assert_eq!(crate::Families::single_file_stem(&families, name), stem, "{name}");
        }
    }

    #[test]
    fn a_transformer_takes_the_base_that_its_file_name_names() {
        let three = ["FLUX.1-dev", "FLUX.1-schnell", "FLUX.1-Kontext-dev"];
        for (file, base) in [
            ("flux1-dev-Q4_K_S.gguf", "FLUX.1-dev"),
            ("flux1-schnell-fp8.safetensors", "FLUX.1-schnell"),
            ("flux1-kontext-dev.gguf", "FLUX.1-Kontext-dev"),
        ] {
            assert_eq!(chosen(file, &three).as_deref(), Ok(base), "{file}");
        }
        assert_eq!(chosen("mine.gguf", &three[..1]).as_deref(), Ok("FLUX.1-dev"));
        for (folders, told) in [(&three[..], "3 folders"), (&[], "0 folders")] {
            let refused = chosen("mine.gguf", folders).unwrap_err();
            assert!(
                refused.contains(told) && refused.contains("mine.moored.json"),
                "{refused}"
            );
        }
    }

    #[test]
    fn in_a_hub_cache_the_bases_are_the_snapshots_of_other_repositories() {
        let hub = |name: &str| format!("hub/models--black-forest-labs--{name}/snapshots/0123");
        let (dev, schnell) = (hub("FLUX.1-dev"), hub("FLUX.1-schnell"));
        let quants = "hub/models--city96--FLUX.1-dev-gguf/snapshots/4567";
        for file in ["flux1-Q4_0.gguf", "small/flux1-Q4_0.gguf"] {
            let file = format!("{quants}/{file}");
            assert_eq!(chosen(&file, &[&dev, &schnell]).as_deref(), Ok(&*dev));
            assert_eq!(chosen(&file, &[&schnell]).as_deref(), Ok(&*schnell));
        }
    }
}
