//! Default requests of models, and `moored.json` in their folders.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::sidecar_of;
use crate::files::{damaged, read_json};
use crate::sampling::Length;
use crate::{Medium, ModelError, Reads, Request, RequestError, Sampling};

/// Keys of settings that a family reads of `moored.json`, and of `X.moored.json` beside a single file.
pub(crate) const SHIFT_KEY: &str = "shift";
/// See [`GuidanceRule`].
pub(crate) const NORMALIZATION_KEY: &str = "cfg_normalization";
/// See [`GuidanceRule`].
pub(crate) const TRUNCATION_KEY: &str = "cfg_truncation";

/// The settings of the kind `T` in a file, where it is there.
fn written<T: Default + DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    match path.is_file() {
        true => read_json(path),
        false => Ok(T::default()),
    }
}

/// The files that have settings for the model at a path: the sidecar of its file, then `moored.json` in its folder.
fn files_of(path: &Path, folder: &Path) -> [PathBuf; 2] {
    let sidecar = match path.is_file() {
        true => sidecar_of(path),
        false => PathBuf::new(),
    };
    [sidecar, folder.join("moored.json")]
}

/// The shift of the times of steps that `moored.json` in a model's folder has.
///
/// # Errors
/// When the file cannot be read, or its shift is not more than 0.
pub(crate) fn folder_shift(folder: &Path) -> Result<Option<f32>, ModelError> {
    written_shift(&folder.join("moored.json"))
}

/// The shift of the times of steps that is written down for the model at a path: in the sidecar of its file, or in its folder.
///
/// # Errors
/// As [`folder_shift`].
pub(crate) fn shift_of(path: &Path, folder: &Path) -> Result<Option<f32>, ModelError> {
    for file in files_of(path, folder) {
        if let Some(shift) = written_shift(&file)? {
            return Ok(Some(shift));
        }
    }
    Ok(None)
}

/// The `shift` in a file of settings.
fn written_shift(path: &Path) -> Result<Option<f32>, ModelError> {
    #[derive(Default, Deserialize)]
    struct Written {
        shift: Option<f32>,
    }
    let Written { shift } = written(path)?;
    match shift {
        Some(shift) if !(shift > 0.0 && shift.is_finite()) => {
            Err(damaged(path, format!("shift is {shift}; it must be more than 0")))
        }
        shift => Ok(shift),
    }
}

/// How the steps of a model are guided, as is written down for it: `cfg_normalization` and `cfg_truncation` of diffusers'
/// `ZImagePipeline`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GuidanceRule {
    /// Most length of a combined prediction, in lengths of that under the prompt; 0 for any.
    normalization: f64,
    /// The last time, from 0 (noise) to 1, whose step is guided.
    truncation: f32,
}

impl GuidanceRule {
    /// The rule for the model at a path, from the sidecar of its file, or from its folder. Without a word every step is guided,
    /// and its prediction as long as it is.
    ///
    /// # Errors
    /// When a file cannot be read, or has a value out of bounds.
    pub(crate) fn of(path: &Path, folder: &Path) -> Result<GuidanceRule, ModelError> {
        #[derive(Default, Deserialize)]
        struct Written {
            cfg_normalization: Option<f64>,
            cfg_truncation: Option<f32>,
        }
        let (mut normalization, mut truncation) = (None, None);
        for file in files_of(path, folder) {
            let found: Written = written(&file)?;
            let bounded = |key: &str, value: Option<f64>, most: f64| match value {
                Some(value) if !(0.0..=most).contains(&value) => Err(damaged(
                    &file,
                    format!("{key} is {value}; it must be from 0 to {most}"),
                )),
                _ => Ok(()),
            };
            bounded(NORMALIZATION_KEY, found.cfg_normalization, 100.0)?;
            bounded(TRUNCATION_KEY, found.cfg_truncation.map(f64::from), 1.0)?;
            normalization = normalization.or(found.cfg_normalization);
            truncation = truncation.or(found.cfg_truncation);
        }
        Ok(GuidanceRule {
            normalization: normalization.unwrap_or(0.0),
            truncation: truncation.unwrap_or(1.0),
        })
    }

    /// The length of a combined prediction.
    pub(crate) fn length(self) -> Length {
        match self.normalization > 0.0 {
            true => Length::AtMost(self.normalization),
            false => Length::Free,
        }
    }

    /// Whether the step at a time from 0 (noise) to 1 is guided.
    pub(crate) fn guides_at(self, time: f32) -> bool {
        time <= self.truncation
    }
}

/// Applies `moored.json` in a model's folder to the family's default request, of any medium; the model reads these optional
/// fields.
///
/// # Errors
/// When the file cannot be read, or has values out of bounds.
pub(crate) fn folder_defaults(
    folder: &Path,
    otherwise: Request,
    reads: Reads,
    problems: impl Fn(&Request) -> Vec<RequestError>,
) -> Result<Request, ModelError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct FolderDefaults {
        #[serde(flatten)]
        sampling: Sampling,
        width: Option<u32>,
        height: Option<u32>,
        frames: Option<u32>,
        frames_per_second: Option<f32>,
        seconds: Option<f32>,
    }
    let path = folder.join("moored.json");
    let folder_defaults: FolderDefaults = written(&path)?;
    let mut medium = otherwise.medium.clone();
    let sides = match &mut medium {
        Medium::Image(image) => Some((&mut image.width, &mut image.height)),
        Medium::Video(video) => {
            video.frames = folder_defaults.frames.unwrap_or(video.frames);
            let rate = folder_defaults.frames_per_second;
            video.frames_per_second = rate.unwrap_or(video.frames_per_second);
            Some((&mut video.width, &mut video.height))
        }
        Medium::Audio(audio) => {
            audio.seconds = folder_defaults.seconds.unwrap_or(audio.seconds);
            None
        }
    };
    if let Some((width, height)) = sides {
        *width = folder_defaults.width.unwrap_or(*width);
        *height = folder_defaults.height.unwrap_or(*height);
    }
    let otherwise = Request { medium, ..otherwise };
    let defaults = folder_defaults.sampling.over(otherwise);
    let unread = reads.refusals(&defaults);
    let problems: Vec<String> = unread
        .into_iter()
        .chain(problems(&defaults))
        .map(|RequestError { field, problem }| format!("{field} {problem}"))
        .collect();
    match problems.is_empty() {
        true => Ok(defaults),
        false => Err(damaged(&path, problems.join("; "))),
    }
}
