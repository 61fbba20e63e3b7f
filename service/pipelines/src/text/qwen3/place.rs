//! The place of a pipeline's text encoder.

use std::path::{Path, PathBuf};

use super::Qwen3Config;
use crate::ModelError;
use crate::checkpoint::{
    Checkpoint, ComponentFiles, Requested, companion, component_of_checkpoint, component_of_folder, open,
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
    file: Option<PathBuf>,
}

impl Place {
    /// The text encoder of a pipeline's folder. Where the transformer is `alone` in a file and the folder has no text encoder,
    /// the `published` one may be a file too.
    ///
    /// # Errors
    /// When there is none, or it is not supported.
    pub(crate) fn of(
        base: &Path,
        alone: Option<&Path>,
        published: Option<Published>,
    ) -> Result<Place, ModelError> {
        let folder = base.join(COMPONENT);
        let alone = alone.filter(|_| !folder.is_dir());
        let found = alone.zip(published).and_then(|(transformer, published)| {
            let file = companion(transformer, base, "text_encoders", published.stem())?;
            Some((file, published.config()))
        });
        let (file, config) = match found {
            Some((file, config)) => (Some(file), config),
            None => (None, checked(&folder.join("config.json"), Qwen3Config::check)?),
        };
        Ok(Place { config, folder, file })
    }

    /// The tensors of the first `depth` layers.
    ///
    /// # Errors
    /// The first that is missing, of another shape, or stored in an unsupported way.
    pub(crate) fn files(&self, depth: usize, wanted: Requested) -> Result<ComponentFiles, ModelError> {
        let shapes = |has: &dyn Fn(&str) -> bool| self.config.tensor_shapes(depth, has);
        match &self.file {
            Some(file) => {
                let checkpoint = Checkpoint::of_file(&open(file)?, |name| Some(name.to_owned()))?;
                component_of_checkpoint(file, checkpoint, wanted, shapes)
            }
            None => component_of_folder(&self.folder, wanted, shapes),
        }
    }
}
