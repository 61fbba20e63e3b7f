//! Where the transformers of a model are: in the folder of a pipeline, in a repository of the authors, or alone in a single file;
//! [`Base`] finds the rest.
//!
//! A file has one transformer of two where its base has a boundary, where its transformer is of a kind that comes in two, or where
//! its name says so: that of high noise or that of low noise. The other one is named alike, with `low` for `high`, or in the
//! sidecar: `{"transformer_2": "..."}` in `X.moored.json` beside `X.safetensors`.

use std::path::{Path, PathBuf};

use gpu::CheckpointFile;
use serde::Deserialize;

use super::authors;
use super::base::{Base, WantedBase};
use super::checkpoint::{MARKS, SECOND_KEY, no_embedding};
use super::model::{SECOND, TRANSFORMER};
use crate::ModelError;
use crate::checkpoint::{Checkpoint, Naming, TransformerPlace, open, sidecar_of};
use crate::files::{incomplete, read_json, unsupported};

/// Spellings of the two kinds of noise in names of files: the high one, then the low one.
const NOISES: [(&str, &str); 3] = [("high", "low"), ("High", "Low"), ("HIGH", "LOW")];

/// Words in the names of files of two transformers, in lower case.
const OF_TWO: [&str; 2] = ["a14b", "noise"];

/// The places of the parts of a model.
pub(super) struct Places {
    pub(super) base: Base,
    pub(super) transformer: TransformerPlace,
    /// The transformer of low noise, if there are two.
    pub(super) second: Option<TransformerPlace>,
}

impl Places {
    /// The places of the model at a path; `None` if it is of another family.
    ///
    /// # Errors
    /// When it is of this family and damaged, or its base or its second transformer is not found.
    pub(super) fn of(path: &Path, file: Option<&CheckpointFile>) -> Result<Option<Places>, ModelError> {
        match file {
            Some(file) => of_file(path, file),
            None if MARKS.is_folder(path)? => of_pipeline(path).map(Some),
            None => of_authors(path),
        }
    }
}

/// The places in the folder of a pipeline.
fn of_pipeline(path: &Path) -> Result<Places, ModelError> {
    let base = Base::of_folder(path, true)?;
    let has_two = base
        .settings()?
        .is_some_and(|settings| settings.boundary_ratio.is_some());
    Ok(Places {
        transformer: TransformerPlace::Folder(base.folder.join(TRANSFORMER)),
        second: has_two.then(|| second_folder(&base.folder)).transpose()?,
        base,
    })
}

/// The places in a repository of the authors; `None` for another folder.
fn of_authors(path: &Path) -> Result<Option<Places>, ModelError> {
    if !path.is_dir() {
        return Ok(None);
    }
    let Some((transformer, second)) = authors::transformers_in(path)? else {
        return Ok(None);
    };
    Ok(Some(Places {
        base: Base::of_folder(path, false)?,
        transformer,
        second,
    }))
}

/// The places around a single file; `None` if that is of another family.
fn of_file(path: &Path, file: &CheckpointFile) -> Result<Option<Places>, ModelError> {
    let Some(transformer) = MARKS.transformer_in(path, file)? else {
        return Ok(None);
    };
    let (channels, is_conditioned) = channels_of(&transformer)?;
    let base = Base::of_file(
        path,
        WantedBase {
            name: MARKS.family,
            keys: MARKS.sidecar_keys,
            channels,
            any: false,
        },
    )?;
    let of_base = base
        .settings()?
        .is_some_and(|settings| settings.boundary_ratio.is_some());
    let other = other_file(path)?;
    let has_two = of_base || is_conditioned || other.is_some() || says_of_two(path);
    let (transformer, second) = match (has_two, other) {
        (false, _) => (transformer, None),
        (true, None) => return Err(one_of_two(path)),
        (true, Some((other, is_low))) => {
            let Some(found) = MARKS.transformer_in(&other, &open(&other)?)? else {
                return Err(unsupported(
                    &other,
                    "it is no Wan transformer, and one of two is expected",
                ));
            };
            match is_low {
                true => (transformer, Some(found)),
                false => (found, Some(transformer)),
            }
        }
    };
    Ok(Some(Places {
        base,
        transformer,
        second,
    }))
}

/// Channels of the latents of a single file's transformer, and whether a picture conditions them.
fn channels_of(place: &TransformerPlace) -> Result<(usize, bool), ModelError> {
    let sides = |path: &Path, checkpoint: &Checkpoint, naming: Naming| {
        let embedding = "patch_embedding.weight";
        if !checkpoint.has(embedding) {
            return Err(no_embedding(path));
        }
        let last = match naming {
            Naming::Authors => "head.head.weight",
            Naming::Diffusers => "proj_out.weight",
        };
        let channels = checkpoint.length(last, 0)? / 4;
        Ok((channels, checkpoint.length(embedding, 1)? > channels))
    };
    match place {
        TransformerPlace::SingleFile {
            path,
            checkpoint,
            naming,
        } => sides(path, checkpoint, *naming),
        TransformerPlace::Folder(folder) => sides(folder, &Checkpoint::of_folder(folder)?, Naming::Diffusers),
    }
}

/// Whether the name of a file says that it has one transformer of two.
fn says_of_two(path: &Path) -> bool {
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    let says_which = NOISES[..1]
        .iter()
        .any(|(high, low)| name.contains(high) || name.contains(low));
    says_which && OF_TWO.iter().any(|word| name.contains(word))
}

/// The folder of the second transformer of a pipeline that has a boundary.
fn second_folder(base: &Path) -> Result<TransformerPlace, ModelError> {
    let folder = base.join(SECOND);
    match folder.is_dir() {
        true => Ok(TransformerPlace::Folder(folder)),
        false => Err(incomplete(
            &folder,
            "it is missing: the pipeline has a transformer for high noise and one for low noise. Download the model again",
        )),
    }
}

/// The file of the other transformer of two, and whether it is that of low noise; `None` if it is neither named nor beside this one.
///
/// # Errors
/// When the sidecar cannot be read, or names a file that is missing.
fn other_file(path: &Path) -> Result<Option<(PathBuf, bool)>, ModelError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Sidecar {
        transformer_2: Option<PathBuf>,
    }
    let sidecar = sidecar_of(path);
    if sidecar.is_file() {
        let Sidecar { transformer_2 } = read_json(&sidecar)?;
        if let Some(named) = transformer_2 {
            let other = path.parent().unwrap_or(Path::new(".")).join(named);
            return match other.is_file() {
                true => Ok(Some((other, true))),
                false => Err(incomplete(
                    &other,
                    format!(
                        "it is missing, and {} names it as {SECOND_KEY}",
                        sidecar.display()
                    ),
                )),
            };
        }
    }
    let ways = NOISES
        .iter()
        .flat_map(|&(high, low)| [(high, low, true), (low, high, false)]);
    let mut others = ways.filter_map(|(from, to, is_low)| Some((renamed(path, from, to)?, is_low)));
    Ok(others.find(|(other, _)| other.is_file()))
}

/// The error for a file of one of two transformers, of which the other one is not found.
fn one_of_two(path: &Path) -> ModelError {
    incomplete(
        path,
        format!(
            "it is one of two transformers, one for high noise and one for low noise. The other one is not beside it under the same \
             name with low for high, or high for low: put it there, or write {} for the one of high noise with \
             {{\"{SECOND_KEY}\": \"path of the one of low noise\"}}",
            sidecar_of(path).display()
        ),
    )
}

/// The path with a word of its file's name replaced, and of its folder's name if it is there too.
fn renamed(path: &Path, from: &str, to: &str) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let renamed = name.contains(from).then(|| name.replacen(from, to, 1))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let beside = folder.join(&renamed);
    let of_folder = folder.file_name().and_then(|folder| folder.to_str());
    match of_folder.filter(|folder| folder.contains(from)) {
        // Some publish each in a folder of its own.
        Some(own) if !beside.is_file() => {
            Some(folder.with_file_name(own.replacen(from, to, 1)).join(renamed))
        }
        _ => Some(beside),
    }
}
