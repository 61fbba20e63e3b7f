//! The place of a pipeline's text encoder and its vision tower.

use std::path::{Path, PathBuf};

use gpu::{LoadPlan, Target, WeightFormat};

use super::super::decoder::is_embedding;
use super::Qwen2VlConfig;
use super::names::transformers_name;
use crate::ModelError;
use crate::checkpoint::{
    Checkpoint, ComponentFiles, ComponentPlace, FilePart, NamesInModel, Requested, checkpoint_stem,
    companion_by, open,
};
use crate::files::{incomplete, unsupported};
use crate::vision::qwen2_vl::{self, QwenVisionConfig};

/// Name of the folder.
const FOLDER: &str = "text_encoder";

/// Letters and digits with which the name of a single file begins: `qwen_2.5_vl_7b`, `Qwen2.5-VL-7B-Instruct`.
const STEM: &str = "qwen25vl7b";

/// Its names in the file of a whole model.
const IN_MODEL: NamesInModel = NamesInModel {
    prefixes: &["text_encoders.qwen25_7b.transformer."],
    marks: &["model.embed_tokens.weight"],
};

/// What the name of a GGUF file with a vision tower has.
const TOWER: &str = "mmproj";

/// The text encoder of a pipeline: in its folder, or a single file in place of the folder, which ComfyUI's users have
/// as safetensors with the vision tower, or as GGUF with the tower in a file of its own.
pub(crate) struct Place {
    /// The sizes of both.
    pub(crate) config: Qwen2VlConfig,
    text: ComponentPlace,
    /// The vision tower's own file.
    tower: Option<PathBuf>,
    /// The folder's configuration of both, where it has one.
    config_file: Option<PathBuf>,
}

impl Place {
    /// The text encoder of a pipeline's folder. Where the transformer is `alone` in a file and the folder has no text encoder,
    /// it may be a file too, or in the transformer's.
    ///
    /// # Errors
    /// When there is none, or it is not supported.
    pub(crate) fn of(base: &Path, alone: Option<&Path>) -> Result<Place, ModelError> {
        let companion = || {
            let is_text = |letters: &str| letters.starts_with(STEM) && !letters.contains(TOWER);
            let is_in = |folder: &Path| files_by(folder, is_text).into_iter().next();
            companion_by(alone?, base, "text_encoders", is_in)
        };
        let folder = base.join(FOLDER);
        let own = FilePart::of_model(alone, IN_MODEL)?;
        let (mut config, text) = ComponentPlace::of(&folder, own, companion, of_file, Qwen2VlConfig::check)?;
        let tower = text.file().filter(|file| is_gguf(file)).and_then(tower_beside);
        let config_file = Some(folder.join("config.json")).filter(|file| file.is_file());
        if let (Some(tower), None) = (&tower, &config_file) {
            config.vision = tower_of_file(tower)?;
        }
        Ok(Place {
            config,
            text,
            tower,
            config_file,
        })
    }

    /// The language model.
    ///
    /// # Errors
    /// The first tensor that is missing, of another shape, or stored in an unsupported way.
    pub(crate) fn files(&self, wanted: Requested) -> Result<ComponentFiles, ModelError> {
        let files = self
            .text
            .files(wanted, transformers_name, |has| self.config.tensor_shapes(has))?;
        let LoadPlan::Files(sources) = &files.plan else {
            return Ok(files);
        };
        let embedding = sources.iter().find(|source| is_embedding(&source.name));
        match embedding.map(|source| source.target) {
            Some(Target::Quantized(format)) if !matches!(format, WeightFormat::Gguf(_)) => Err(unsupported(
                &files.place,
                format!(
                    "its token embedding is stored in {format}, and is read in full precision or of GGUF files alone"
                ),
            )),
            _ => Ok(files),
        }
    }

    /// The vision tower, which only editing needs.
    ///
    /// # Errors
    /// As [`Place::files`]; [`ModelError::Incomplete`] for a text encoder in a GGUF file without the tower's own.
    pub(crate) fn vision_files(&self, wanted: Requested) -> Result<ComponentFiles, ModelError> {
        let vision = &self.config.vision;
        let gguf = self.text.file().filter(|file| is_gguf(file));
        match (gguf, &self.tower) {
            (Some(_), Some(tower)) => {
                qwen2_vl::files_of_own_file(tower, vision, wanted, self.config_file.as_deref())
            }
            (Some(text), None) => Err(incomplete(
                text,
                "it is the text encoder without the part that sees pictures, which editing needs: put the mmproj file of the same \
                 model (Qwen2.5-VL-7B-Instruct-mmproj-F16.gguf) beside it",
            )),
            (None, _) => {
                let as_named = |name: &str| Some(name.to_owned());
                self.text
                    .files_of_specs(wanted, as_named, |has| vision.specs(has))
            }
        }
    }
}

/// Whether a file's ending is that of GGUF.
fn is_gguf(file: &Path) -> bool {
    file.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}

/// The configuration of a single file that has none beside it.
fn of_file(file: &FilePart) -> Result<Qwen2VlConfig, ModelError> {
    let path = file.path();
    let checkpoint = file.checkpoint(transformers_name)?;
    let shape_of = |name: &str| checkpoint.shape(name);
    let config = Qwen2VlConfig::of_shapes(shape_of)
        .ok_or_else(|| unsupported(path, "it is no language model of Qwen2.5-VL".to_owned()))?;
    let vision = QwenVisionConfig::of_shapes(shape_of, config.hidden_size);
    let config = Qwen2VlConfig { vision, ..config };
    config
        .check()
        .map_err(|problem| unsupported(path, format!("it has {problem}")))?;
    Ok(config)
}

/// The configuration of a vision tower in a file of its own.
fn tower_of_file(path: &Path) -> Result<QwenVisionConfig, ModelError> {
    let checkpoint = Checkpoint::of_file(&open(path)?, qwen2_vl::own_name)?;
    let own = |name: &str| checkpoint.shape(name);
    let width = own("merger.mlp.2.weight").and_then(|shape| shape.first().copied());
    let width = width.ok_or_else(|| unsupported(path, "it is no vision tower of Qwen2.5-VL".to_owned()))?;
    Ok(QwenVisionConfig::of_shapes(own, width))
}

/// The vision tower's file beside a text encoder: the only one, or of several the one that is named after the model.
fn tower_beside(text: &Path) -> Option<PathBuf> {
    let folder = text.parent().unwrap_or(Path::new("."));
    let named = files_by(folder, |letters| {
        letters.contains(TOWER) && letters.contains(STEM)
    });
    if let Some(named) = named.into_iter().next() {
        return Some(named);
    }
    match files_by(folder, |letters| letters.contains(TOWER)).as_slice() {
        [only] => Some(only.clone()),
        _ => None,
    }
}

/// The checkpoints in a folder whose names are right by their letters and digits, in lower case, in order.
fn files_by(folder: &Path, is_right: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let letters = |stem: &str| -> String {
        let letters = stem.chars().filter(|letter| letter.is_alphanumeric());
        letters.flat_map(char::to_lowercase).collect()
    };
    let is_it = |path: &PathBuf| {
        let stem = path.file_name().and_then(|name| checkpoint_stem(name.to_str()?));
        stem.is_some_and(|stem| is_right(&letters(stem))) && path.is_file()
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_it).collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests;
