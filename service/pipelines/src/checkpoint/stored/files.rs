//! Which files of a component's folder have its weights, and the error for a folder without any.

use std::path::{Path, PathBuf};

use model::WeightNames;

use crate::ModelError;
use crate::files::{UNFINISHED, incomplete, read_text, unsupported};

/// Endings of weights that are not read.
const UNREAD: [&str; 6] = ["bin", "ckpt", "msgpack", "h5", "onnx", "pth"];

/// The files of a component's weights.
pub(super) enum WeightFiles {
    Single(PathBuf),
    /// The index of several.
    Index(PathBuf),
}

impl WeightFiles {
    /// The weights in a folder; `None` if there are none.
    ///
    /// As in diffusers the shards of an index are taken where there is an index. Transformers takes a single file first, so
    /// of its weights only one kind may be there.
    ///
    /// # Errors
    /// When there are two sets of weights.
    pub(super) fn in_folder(folder: &Path) -> Result<Option<WeightFiles>, ModelError> {
        let there = |name: String| Some(folder.join(name)).filter(|path| path.is_file());
        for weights in WeightNames::all() {
            match (there(weights.single()), there(weights.index())) {
                (Some(single), Some(index)) if weights.prefers_single() && !names(&index, &single) => {
                    let problem = format!(
                        "it has two sets of weights, {} and the shards of {}: move those away that are not meant",
                        weights.single(),
                        weights.index()
                    );
                    return Err(unsupported(folder, problem));
                }
                (_, Some(index)) => return Ok(Some(WeightFiles::Index(index))),
                (Some(single), None) => return Ok(Some(WeightFiles::Single(single))),
                (None, None) => {}
            }
        }
        Ok(None)
    }
}

/// Whether an index names this file.
fn names(index: &Path, file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    read_text(index).is_ok_and(|text| text.contains(&format!("\"{name}\"")))
}

/// The error for a folder without weights in a format that is read.
pub(super) fn no_weights(folder: &Path) -> ModelError {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let ends = |name: &&String, endings: &[&str]| {
        let ending = Path::new(name.as_str())
            .extension()
            .and_then(|ending| ending.to_str());
        ending.is_some_and(|ending| endings.contains(&ending))
    };
    if let Some(unfinished) = names.iter().find(|name| ends(name, &UNFINISHED)) {
        return incomplete(
            folder,
            format!("the download of its weights has not ended ({unfinished}): download them again"),
        );
    }
    if let Some(unread) = names.iter().find(|name| ends(name, &UNREAD)) {
        return unsupported(
            folder,
            format!(
                "its weights are in {unread}, and what is read is safetensors: download the model's safetensors, or save it \
                 again with `save_pretrained(folder, safe_serialization=True)`"
            ),
        );
    }
    if let Some(other) = names
        .iter()
        .find(|name| ends(name, &["safetensors", "sft", "gguf"]))
    {
        return unsupported(
            folder,
            format!(
                "it has {other}, and what is read of such a folder is diffusion_pytorch_model.safetensors, \
                 model.safetensors, an index of shards, or their fp16 or bf16 variant"
            ),
        );
    }
    incomplete(
        folder,
        "its weights are missing (diffusion_pytorch_model.safetensors, model.safetensors, or an index with its shards): \
         download the model again",
    )
}
