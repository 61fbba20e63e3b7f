//! Which files of a component's folder have its weights, and what is told of a folder without any.

use std::path::{Path, PathBuf};

use crate::ModelError;
use crate::files::{UNFINISHED, incomplete, read_text, unsupported};

/// Beginnings of the names of weights, in the order of lookup: of diffusers, and of transformers.
const STEMS: [&str; 2] = ["diffusion_pytorch_model", TRANSFORMERS];

/// The beginning of the names that transformers gives to weights.
const TRANSFORMERS: &str = "model";

/// Variants of weights that are read where there are no others.
const VARIANTS: [&str; 2] = ["fp16", "bf16"];

/// Names that the weights of a component's folder may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightNames {
    stem: &'static str,
    variant: Option<&'static str>,
}

impl WeightNames {
    /// All that are read, in the order of lookup: variants where there are no others.
    pub fn all() -> impl Iterator<Item = WeightNames> {
        let named = |variant| STEMS.map(|stem| WeightNames { stem, variant });
        let variants = STEMS
            .into_iter()
            .flat_map(|stem| VARIANTS.map(|variant| (stem, Some(variant))));
        let variants = variants.map(|(stem, variant)| WeightNames { stem, variant });
        named(None).into_iter().chain(variants)
    }

    /// The file that has all weights: `model.safetensors`, `model.fp16.safetensors`.
    pub fn single(&self) -> String {
        match self.variant {
            None => format!("{}.safetensors", self.stem),
            Some(variant) => format!("{}.{variant}.safetensors", self.stem),
        }
    }

    /// The index of shards: `model.safetensors.index.json`, `model.safetensors.index.fp16.json`.
    pub fn index(&self) -> String {
        match self.variant {
            None => format!("{}.safetensors.index.json", self.stem),
            Some(variant) => format!("{}.safetensors.index.{variant}.json", self.stem),
        }
    }

    /// Number and count of a shard of these weights: `model-00001-of-00002.safetensors`, of a variant
    /// `model.fp16-00001-of-00002.safetensors`, or `model-00001-of-00002.fp16.safetensors` as older programs write it.
    pub fn shard(&self, name: &str) -> Option<(usize, usize)> {
        let behind = name.strip_prefix(self.stem)?.strip_suffix(".safetensors")?;
        match self.variant {
            None => numbers(behind),
            Some(variant) => {
                let dotted = format!(".{variant}");
                let new = behind.strip_prefix(&dotted).and_then(numbers);
                new.or_else(|| behind.strip_suffix(&dotted).and_then(numbers))
            }
        }
    }

    /// Whether of a single file and an index with its shards the file is taken, as transformers does.
    pub fn prefers_single(&self) -> bool {
        self.stem == TRANSFORMERS && self.variant.is_none()
    }
}

/// Number and count of `-00001-of-00002`.
fn numbers(text: &str) -> Option<(usize, usize)> {
    let (number, count) = text.strip_prefix('-')?.split_once("-of-")?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(number) && is_number(count)).then_some((number.parse().ok()?, count.parse().ok()?))
}

/// Whether a file's name is that of one of several shards, of any weights.
pub fn is_shard(name: &str) -> bool {
    let Some(stem) = name.strip_suffix(".safetensors") else {
        return false;
    };
    let plain = VARIANTS
        .iter()
        .find_map(|variant| stem.strip_suffix(variant)?.strip_suffix('.'))
        .unwrap_or(stem);
    let mut dashes = plain.match_indices('-').map(|(at, _)| at);
    dashes.any(|at| numbers(&plain[at..]).is_some())
}

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

/// What is told of a folder without weights that are read.
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
