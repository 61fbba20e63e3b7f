//! Reading of models' configuration files, and errors about files.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use model::ModelError;

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

pub(crate) fn incomplete(path: &Path, problem: impl Into<String>) -> ModelError {
    ModelError::Incomplete {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

/// Endings of files that a download has not finished.
pub(crate) const UNFINISHED: [&str; 5] = ["incomplete", "part", "crdownload", "aria2", "download"];

thread_local! {
    /// The files that are read on this thread while models are opened, the innermost opening last.
    static READING: RefCell<Vec<ReadFiles>> = const { RefCell::new(Vec::new()) };
}

pub(crate) use model::ReadFiles;

/// The result of `work`, and the text files that it read on this thread.
pub(crate) fn recorded<T>(work: impl FnOnce() -> T) -> (T, ReadFiles) {
    /// Ends the recording, also where the work panics.
    struct Recording;
    impl Drop for Recording {
        fn drop(&mut self) {
            READING.with_borrow_mut(Vec::pop);
        }
    }
    READING.with_borrow_mut(|reading| reading.push(ReadFiles::new()));
    let recording = Recording;
    let done = work();
    let read = READING.with_borrow_mut(|reading| reading.last_mut().map(std::mem::take));
    drop(recording);
    (done, read.unwrap_or_default())
}

/// Counts a file of this content as read on this thread.
pub(crate) fn count_as_read(path: &Path, content: impl AsRef<[u8]>) {
    let hash = *blake3::hash(content.as_ref()).as_bytes();
    count_all_as_read(&ReadFiles::from([(path.to_owned(), hash)]));
}

/// Counts files as read on this thread that another thread read for it, or that are shared with a model opened before.
pub(crate) fn count_all_as_read(files: &ReadFiles) {
    READING.with_borrow_mut(|reading| {
        if let Some(reading) = reading.last_mut() {
            reading.extend(files.iter().map(|(path, hash)| (path.clone(), *hash)));
        }
    });
}

/// The longest configuration, index or vocabulary that is read, in bytes: the largest tokenizers are half as long.
const LONGEST_TEXT: u64 = 64 << 20;

/// Reads a text file.
///
/// # Errors
/// [`ModelError::Incomplete`] for a missing file, [`ModelError::Damaged`] for a file that cannot be read, is no regular file,
/// or is too long.
pub(crate) fn read_text(path: &Path) -> Result<String, ModelError> {
    let unreadable = |e: std::io::Error| damaged(path, format!("it cannot be read: {e}"));
    let text = gpu::text_bounded(path, LONGEST_TEXT).map_err(|error| match error.kind() {
        ErrorKind::NotFound => incomplete(path, "it is missing: download the model again"),
        _ => unreadable(error),
    })?;
    count_as_read(path, &text);
    Ok(text)
}

/// Reads a file of other content than text.
///
/// # Errors
/// As [`read_text`].
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>, ModelError> {
    let bytes = gpu::read_bounded(path, LONGEST_TEXT).map_err(|error| match error.kind() {
        ErrorKind::NotFound => incomplete(path, "it is missing: download the model again"),
        _ => damaged(path, format!("it cannot be read: {error}")),
    })?;
    count_as_read(path, &bytes);
    Ok(bytes)
}

/// Reads a JSON file that contains an object. (serde would accept a list for a struct as well, and would read an empty list as
/// defaults.)
///
/// # Errors
/// [`ModelError::Incomplete`] for a file that is missing, empty, cut off, or a pointer of git-lfs; [`ModelError::Damaged`] for
/// a file that is no such JSON.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = read_text(path)?;
    if text.trim().is_empty() {
        return Err(incomplete(path, "it is empty: download it again"));
    }
    if let Some(problem) = gpu::git_lfs_pointer(text.as_bytes()) {
        return Err(incomplete(path, problem));
    }
    if !text.trim_start().starts_with('{') {
        return Err(damaged(path, "it is no JSON object"));
    }
    serde_json::from_str(&text).map_err(|error| match error.is_eof() {
        true => incomplete(path, format!("it ends too early ({error}): download it again")),
        false => damaged(path, format!("it cannot be parsed: {error}")),
    })
}

/// Reads a configuration and validates it.
///
/// # Errors
/// As [`read_json`], and errors of `check`.
pub(crate) fn checked<T: DeserializeOwned>(
    path: &Path,
    check: impl Fn(&T) -> Result<(), String>,
) -> Result<T, ModelError> {
    let config = read_json(path)?;
    check(&config).map_err(|problem| unsupported(path, problem))?;
    Ok(config)
}

/// Refuses a pipeline whose components do not match. Each pair has the number of one component and the number that another
/// component takes.
///
/// # Errors
/// [`ModelError::Unsupported`] for the first such pair, by its name.
pub(crate) fn check_pairs(path: &Path, pairs: &[(&str, usize, usize)]) -> Result<(), ModelError> {
    match pairs.iter().find(|(_, found, expected)| found != expected) {
        Some((what, found, expected)) => Err(unsupported(
            path,
            format!("{what}: {found}, and the pipeline takes {expected}"),
        )),
        None => Ok(()),
    }
}

/// Refuses sizes of a configuration that are beyond their bounds, which are far above those of any published model: untrusted
/// values must not overflow, nor exhaust memory.
///
/// # Errors
/// The refused size, in words.
pub(crate) fn check_sizes(bounded: &[(&[usize], usize)]) -> Result<(), String> {
    let is_beyond = |(sizes, most): &(&[usize], usize)| sizes.iter().any(|size| size > most);
    match bounded.iter().any(is_beyond) {
        true => Err("sizes beyond the supported maximum".to_owned()),
        false => Ok(()),
    }
}

/// A configuration of diffusers, by the class that it names; empty if it names none.
#[derive(Deserialize)]
struct Configuration {
    #[serde(rename = "_class_name", default)]
    class_name: String,
}

/// The class in a folder's `model_index.json`: empty if it names none, `None` if there is no such file.
pub(crate) fn pipeline_class(folder: &Path) -> Result<Option<String>, ModelError> {
    let index = folder.join("model_index.json");
    if !index.is_file() {
        return Ok(None);
    }
    let Configuration { class_name } = read_json(&index)?;
    Ok(Some(class_name))
}

/// The class in the `config.json` at the root of a folder; `None` if it cannot be read.
pub(crate) fn root_class(folder: &Path) -> Option<String> {
    let read = || read_json::<Configuration>(&folder.join("config.json")).ok();
    let configuration = folder.is_dir().then(read).flatten()?;
    Some(configuration.class_name)
}

/// The class of a transformer at the root of a folder that is no pipeline; `None` if there is no such configuration.
pub(crate) fn transformer_class(folder: &Path) -> Option<String> {
    let is_pipeline = folder.join("model_index.json").is_file();
    (!is_pipeline).then(|| root_class(folder)).flatten()
}
