//! A component in a file: in one of its own, or in that of a whole model, as ComfyUI saves one (`CheckpointSave`): the
//! transformer under `model.diffusion_model.`, the autoencoder under `vae.`, and each text encoder under
//! `text_encoders.NAME.transformer.`.

use std::path::{Path, PathBuf};

use super::components::open;
use super::single_file::is_single_file;
use super::stored::Checkpoint;
use crate::ModelError;

/// How a component is named in the file of a whole model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamesInModel {
    /// Prefixes of the names of its tensors.
    pub(crate) prefixes: &'static [&'static str],
    /// Names behind them, of which one shows that the component is there: files have single tensors of others.
    pub(crate) marks: &'static [&'static str],
}

/// The autoencoder, in the names of its authors (of AutoencoderKL, and of Wan) or of diffusers.
pub(crate) const VAE_IN_MODEL: NamesInModel = NamesInModel {
    prefixes: &["vae.", "first_stage_model."],
    marks: &["decoder.conv_in.weight", "decoder.conv1.weight"],
};

/// A file with a component, and the prefix of the names of its tensors.
#[derive(Clone, Debug)]
pub(crate) struct FilePart {
    path: PathBuf,
    prefix: &'static str,
}

impl FilePart {
    /// A component in a file of its own.
    pub(crate) fn whole(path: PathBuf) -> FilePart {
        FilePart { path, prefix: "" }
    }

    /// The component of these names in the file of a model; `None` if it is not in it, or the model is no file.
    ///
    /// # Errors
    /// When the header cannot be read.
    pub(crate) fn of_model(
        model: Option<&Path>,
        NamesInModel { prefixes, marks }: NamesInModel,
    ) -> Result<Option<FilePart>, ModelError> {
        let Some(path) = model.filter(|path| is_single_file(path)) else {
            return Ok(None);
        };
        let file = open(path)?;
        let has = |prefix: &str| {
            marks
                .iter()
                .any(|mark| file.get(&format!("{prefix}{mark}")).is_some())
        };
        let found = prefixes.iter().copied().find(|prefix| has(prefix));
        Ok(found.map(|prefix| FilePart {
            path: path.to_owned(),
            prefix,
        }))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The component's tensors, without the prefix and renamed; those without a new name are ignored.
    ///
    /// # Errors
    /// When the file cannot be read, or is quantized in an unsupported way.
    pub(crate) fn checkpoint(
        &self,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Result<Checkpoint, ModelError> {
        Checkpoint::of_file(&open(&self.path)?, |name| rename(name.strip_prefix(self.prefix)?))
    }
}
