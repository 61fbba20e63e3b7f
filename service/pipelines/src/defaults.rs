//! What a model does when a request leaves it open, and what its folder says of it.

use std::path::Path;

use serde::Deserialize;

use crate::files::{damaged, read_json};
use crate::{Image, Medium, ModelError, Request, RequestError};

/// What `moored.json` in a model's folder says, over the family's own request of defaults, which is for a picture.
///
/// # Errors
/// When the file cannot be read, or asks for what no request may.
pub(crate) fn told(
    folder: &Path,
    otherwise: Request,
    problems: impl Fn(&Request) -> Vec<RequestError>,
) -> Result<Request, ModelError> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Told {
        steps: Option<u32>,
        guidance: Option<f32>,
        max_sequence_length: Option<u32>,
        width: Option<u32>,
        height: Option<u32>,
    }
    let path = folder.join("moored.json");
    let told: Told = if path.is_file() {
        read_json(&path)?
    } else {
        Told::default()
    };
    let (width, height) = otherwise.medium.size().unwrap_or_default();
    let image = Image::of(told.width.unwrap_or(width), told.height.unwrap_or(height));
    let defaults = Request {
        steps: told.steps.unwrap_or(otherwise.steps),
        guidance: told.guidance.unwrap_or(otherwise.guidance),
        max_sequence_length: told.max_sequence_length.unwrap_or(otherwise.max_sequence_length),
        medium: Medium::Image(image),
        ..otherwise
    };
    let problems: Vec<String> = problems(&defaults)
        .into_iter()
        .map(|RequestError { field, problem }| format!("{field} {problem}"))
        .collect();
    match problems.is_empty() {
        true => Ok(defaults),
        false => Err(damaged(&path, problems.join("; "))),
    }
}
