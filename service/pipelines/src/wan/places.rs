//! Where the parts of a pipeline are. A pipeline's folder has them all. A transformer that comes alone, as a single file, has a
//! base, a folder of a Wan pipeline; what that lacks may be single files, as ComfyUI's users have them:
//!
//! | component | file | ComfyUI's folder |
//! |---|---|---|
//! | `vae` | `wan_2.1_vae*`, `wan2.2_vae*`, `Wan2.1_VAE*`, `Wan2.2_VAE*` | `vae` |
//! | `text_encoder` | `umt5_xxl*`, `umt5-xxl*`, `models_t5_umt5-xxl*` | `text_encoders` |
//!
//! Where the base has a boundary, the file has one transformer of two: that of high noise or that of low noise. The other one is
//! named alike, with `low` for `high`, or in the sidecar: `{"transformer_2": "..."}` in `X.moored.json` beside `X.safetensors`.

use std::path::{Path, PathBuf};

use gpu::CheckpointFile;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::checkpoint::{MARKS, PipelineConfig, SECOND_KEY};
use super::model::{SECOND, VAE};
use crate::ModelError;
use crate::checkpoint::{ComponentPlace, Recognised, TransformerPlace, companion, open, sidecar_of};
use crate::files::{incomplete, read_json, unsupported};

/// Spellings of the two kinds of noise in names of files: the high one, then the low one.
const NOISES: [(&str, &str); 3] = [("high", "low"), ("High", "Low"), ("HIGH", "LOW")];

/// Stems and folder of the single files that replace a component's folder.
fn single_files_of(component: &str) -> (&'static [&'static str], &'static str) {
    match component {
        VAE => (
            &[
                "wan_2.1_vae",
                "wan2.2_vae",
                "Wan2.1_VAE",
                "Wan2.2_VAE",
                "Wan2_2_VAE",
            ],
            "vae",
        ),
        _ => (&["umt5_xxl", "umt5-xxl", "models_t5_umt5-xxl"], "text_encoders"),
    }
}

/// The places of the parts of a pipeline.
pub(super) struct Places {
    /// The single file that was opened; none for a pipeline's folder.
    file: Option<PathBuf>,
    /// The pipeline's folder.
    pub(super) base: PathBuf,
    pub(super) pipeline: PipelineConfig,
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
        let Some(Recognised { transformer, base }) = MARKS.recognise(path, file)? else {
            return Ok(None);
        };
        let pipeline = PipelineConfig::of(&base)?;
        let is_file = matches!(transformer, TransformerPlace::SingleFile { .. });
        let (transformer, second) = match (pipeline.boundary_ratio, is_file) {
            (None, _) => (transformer, None),
            (Some(_), false) => (transformer, Some(second_folder(&base)?)),
            (Some(_), true) => {
                let (other, is_low) = other_file(path, &base)?;
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
            file: is_file.then(|| path.to_owned()),
            base,
            pipeline,
            transformer,
            second,
        }))
    }

    /// Configuration and place of a component. A single file without a configuration has the published configuration.
    ///
    /// # Errors
    /// When its configuration cannot be read, or is not supported.
    pub(super) fn component<C: DeserializeOwned>(
        &self,
        component: &str,
        published: impl FnOnce() -> C,
        check: fn(&C) -> Result<(), String>,
    ) -> Result<(C, ComponentPlace), ModelError> {
        component_of_base((self.file.as_deref(), &self.base), component, published, check)
    }
}

/// Configuration and place of a component of a base, which a single file that was opened may have beside it. A single file without
/// a configuration has the published configuration.
///
/// # Errors
/// When its configuration cannot be read, or is not supported.
pub(crate) fn component_of_base<C: DeserializeOwned>(
    (opened, base): (Option<&Path>, &Path),
    component: &str,
    published: impl FnOnce() -> C,
    check: fn(&C) -> Result<(), String>,
) -> Result<(C, ComponentPlace), ModelError> {
    let beside = || {
        let (stems, folder) = single_files_of(component);
        let file = opened?;
        stems.iter().find_map(|stem| companion(file, base, folder, stem))
    };
    ComponentPlace::of(&base.join(component), beside, published, check)
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

/// The file of the other transformer of two, and whether it is that of low noise.
fn other_file(path: &Path, base: &Path) -> Result<(PathBuf, bool), ModelError> {
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
                true => Ok((other, true)),
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
    if let Some(found) = others.find(|(other, _)| other.is_file()) {
        return Ok(found);
    }
    Err(unsupported(
        path,
        format!(
            "it is one of two transformers, one for high noise and one for low noise, since {} has a boundary_ratio. The other one \
             is not beside it under the same name with low for high, or high for low: put it there, or write {} for the one of \
             high noise with {{\"{SECOND_KEY}\": \"path of the one of low noise\"}}",
            base.join("model_index.json").display(),
            sidecar.display()
        ),
    ))
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
