//! Configuration files of models, and what is said of files that are not what they should be.

use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::family::ModelError;

pub(crate) fn damaged(path: &Path, problem: impl Into<String>) -> ModelError {
    ModelError::Damaged {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

pub(crate) fn unsupported(path: &Path, problem: impl Into<String>) -> ModelError {
    ModelError::Unsupported {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

/// Reads a text file.
pub(crate) fn read_text(path: &Path) -> Result<String, ModelError> {
    std::fs::read_to_string(path).map_err(|e| damaged(path, format!("it cannot be read: {e}")))
}

/// Reads a JSON file that holds an object. serde would take a list for a structure as well, and an empty one
/// for nothing but defaults.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = read_text(path)?;
    if !text.trim_start().starts_with('{') {
        return Err(damaged(path, "it is no JSON object"));
    }
    serde_json::from_str(&text).map_err(|e| damaged(path, format!("it cannot be parsed: {e}")))
}

/// Reads a configuration that this build knows.
///
/// # Errors
/// As [`read_json`], and what `check` says of it.
pub(crate) fn checked<T: DeserializeOwned>(
    path: &Path,
    check: impl Fn(&T) -> Result<(), String>,
) -> Result<T, ModelError> {
    let config = read_json(path)?;
    check(&config).map_err(|problem| unsupported(path, problem))?;
    Ok(config)
}

/// The class that a folder's `model_index.json` names: empty if it names none, `None` if there is no such file.
pub(crate) fn pipeline_class(folder: &Path) -> Result<Option<String>, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        #[serde(rename = "_class_name", default)]
        class_name: String,
    }
    let index = folder.join("model_index.json");
    if !index.is_file() {
        return Ok(None);
    }
    let Index { class_name } = read_json(&index)?;
    Ok(Some(class_name))
}
