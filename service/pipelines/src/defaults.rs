//! Default requests of models, and `moored.json` in their folders.

use std::path::Path;

use serde::Deserialize;

use crate::checkpoint::sidecar_of;
use crate::files::{damaged, read_json};
use crate::{Medium, ModelError, Reads, Request, RequestError, Sampling};

/// The shift of the times of steps that `moored.json` in a model's folder has.
///
/// # Errors
/// When the file cannot be read, or its shift is not more than 0.
pub(crate) fn folder_shift(folder: &Path) -> Result<Option<f32>, ModelError> {
    let path = folder.join("moored.json");
    match path.is_file() {
        true => written_shift(&path),
        false => Ok(None),
    }
}

/// The shift of the times of steps that is written down for the model at a path: in the sidecar of its file, or in its folder.
///
/// # Errors
/// As [`folder_shift`].
pub(crate) fn shift_of(path: &Path, folder: &Path) -> Result<Option<f32>, ModelError> {
    let sidecar = sidecar_of(path);
    let of_file = match path.is_file() && sidecar.is_file() {
        true => written_shift(&sidecar)?,
        false => None,
    };
    match of_file {
        None => folder_shift(folder),
        of_file => Ok(of_file),
    }
}

/// The `shift` in a file of settings.
fn written_shift(path: &Path) -> Result<Option<f32>, ModelError> {
    #[derive(Deserialize)]
    struct Written {
        shift: Option<f32>,
    }
    let Written { shift } = read_json(path)?;
    match shift {
        Some(shift) if !(shift > 0.0 && shift.is_finite()) => {
            Err(damaged(path, format!("shift is {shift}; it must be more than 0")))
        }
        shift => Ok(shift),
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
    let folder_defaults: FolderDefaults = if path.is_file() {
        read_json(&path)?
    } else {
        FolderDefaults::default()
    };
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
