//! The place of a pipeline's text encoder.

use std::path::{Path, PathBuf};

use super::Qwen3Config;
use crate::ModelError;
use crate::checkpoint::{
    ComponentFiles, FilePart, NamesInModel, Requested, companion, component_of_checkpoint,
    component_of_folder,
};
use crate::files::checked;

/// Name of the component.
const COMPONENT: &str = "text_encoder";

/// A published encoder, which people also have as a single file without a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Published {
    /// `qwen_3_4b.safetensors`.
    Qwen3_4B,
    /// `qwen_3_8b.safetensors`.
    Qwen3_8B,
}

impl Published {
    /// The published encoder whose tokens have this width.
    pub(crate) fn of_width(width: usize) -> Option<Published> {
        let all = [Published::Qwen3_4B, Published::Qwen3_8B];
        all.into_iter().find(|each| each.config().hidden_size == width)
    }

    /// Its names in the file of a whole model.
    fn in_model(self) -> NamesInModel {
        NamesInModel {
            prefixes: match self {
                Published::Qwen3_4B => &["text_encoders.qwen3_4b.transformer."],
                Published::Qwen3_8B => &["text_encoders.qwen3_8b.transformer."],
            },
            marks: &["model.embed_tokens.weight"],
        }
    }

    /// The file's name without its ending.
    fn stem(self) -> &'static str {
        match self {
            Published::Qwen3_4B => "qwen_3_4b",
            Published::Qwen3_8B => "qwen_3_8b",
        }
    }

    fn config(self) -> Qwen3Config {
        match self {
            Published::Qwen3_4B => Qwen3Config::qwen3_4b(),
            Published::Qwen3_8B => Qwen3Config::qwen3_8b(),
        }
    }
}

/// The text encoder of a pipeline: in its folder, or a single file in place of the folder.
pub(crate) struct Place {
    pub(crate) config: Qwen3Config,
    folder: PathBuf,
    file: Option<FilePart>,
}

impl Place {
    /// The text encoder of a pipeline's folder. Where a `single` file has the transformer, the `published` text encoder may be in
    /// it too, or, if the folder has none, in a file of its own.
    ///
    /// # Errors
    /// When there is none, or it is not supported.
    pub(crate) fn of(
        base: &Path,
        single: Option<&Path>,
        published: Option<Published>,
    ) -> Result<Place, ModelError> {
        let folder = base.join(COMPONENT);
        let written = folder.join("config.json");
        let found = match (single, published) {
            (Some(single), Some(published)) => {
                let own = FilePart::of_model(Some(single), published.in_model())?;
                let beside = || companion(single, base, "text_encoders", published.stem());
                match own {
                    None if !folder.is_dir() => beside().map(FilePart::whole),
                    own => own,
                }
            }
            _ => None,
        };
        let config = match (&found, published) {
            (Some(_), Some(published)) if !written.is_file() => published.config(),
            _ => checked(&written, Qwen3Config::check)?,
        };
        Ok(Place {
            config,
            folder,
            file: found,
        })
    }

    /// The tensors of the first `depth` layers.
    ///
    /// # Errors
    /// The first that is missing, of another shape, or stored in an unsupported way.
    pub(crate) fn files(&self, depth: usize, wanted: Requested) -> Result<ComponentFiles, ModelError> {
        let shapes = |has: &dyn Fn(&str) -> bool| self.config.tensor_shapes(depth, has);
        match &self.file {
            Some(file) => {
                let checkpoint = file.checkpoint(|name| Some(name.to_owned()))?;
                component_of_checkpoint(file.path(), checkpoint, wanted, shapes)
            }
            None => component_of_folder(&self.folder, wanted, shapes),
        }
    }
}
