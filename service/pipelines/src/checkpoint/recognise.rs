//! Detection of a family's checkpoints: by `model_index.json`, or by the tensor names of a file.

use std::path::{Path, PathBuf};

use gpu::CheckpointFile;

use super::names::{LayerNames, prefixes};
use super::single_file::base_folder;
use super::stored::Checkpoint;
use super::transformer::{Naming, TransformerPlace};
use crate::ModelError;
use crate::files::{damaged, pipeline_class, unsupported};

/// Detection rules of a family.
pub(crate) struct Marks {
    /// Display name of the family.
    pub(crate) family: &'static str,
    /// Name of the component that its single files have, and of its folder.
    pub(crate) component: &'static str,
    /// Prefix of the class in its `model_index.json`.
    pub(crate) class_prefix: &'static str,
    /// The supported pipeline classes.
    pub(crate) pipelines: &'static [&'static str],
    /// Beginnings of names that only this family's transformer has in a single file, quantized or not.
    pub(crate) namings: &'static [(Naming, &'static [&'static str])],
    /// Further names of its layers in single files.
    pub(crate) names: LayerNames,
    /// A tensor of single files that is never used.
    pub(crate) unused: Option<&'static str>,
    /// Keys that `X.moored.json` beside a single file may have in addition to `base`.
    pub(crate) sidecar_keys: &'static [&'static str],
}

/// A detected checkpoint.
pub(crate) struct Recognised {
    pub(crate) transformer: TransformerPlace,
    /// The folder of its pipeline, or of a single file's companions; no link.
    pub(crate) base: PathBuf,
}

impl Marks {
    /// Detects the checkpoint at a path. `file` is open if the path is a single file. `None` if it is not of this family.
    ///
    /// # Errors
    /// When the model is of this family and not supported, or a file is too damaged to be recognized.
    pub(crate) fn recognise(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
    ) -> Result<Option<Recognised>, ModelError> {
        let canonical = |base: &Path| std::fs::canonicalize(base).map_err(|e| damaged(base, e.to_string()));
        if path.is_dir() {
            let is_folder = self.is_folder(path)?;
            let base = is_folder.then(|| canonical(path)).transpose()?;
            return Ok(base.map(|base| Recognised {
                transformer: TransformerPlace::Folder(base.join(self.component)),
                base,
            }));
        }
        let Some(file) = file else { return Ok(None) };
        let Some(transformer) = self.transformer_in(path, file)? else {
            return Ok(None);
        };
        let is_folder = |folder: &Path| self.is_folder(folder);
        let base = base_folder(path, self.family, self.sidecar_keys, &is_folder)?;
        Ok(Some(Recognised {
            transformer,
            base: canonical(&base)?,
        }))
    }

    /// The transformer in a single file; `None` if it does not hold the family's.
    ///
    /// # Errors
    /// When it is quantized in an unsupported way.
    pub(crate) fn transformer_in(
        &self,
        path: &Path,
        file: &CheckpointFile,
    ) -> Result<Option<TransformerPlace>, ModelError> {
        let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
        let Some((prefix, naming)) = self.naming_of(&names) else {
            return Ok(None);
        };
        let name_of = |name: &str| {
            let name = self.names.authors(name.strip_prefix(prefix)?);
            (self.unused != Some(name.as_str())).then_some(name)
        };
        let checkpoint = Checkpoint::of_file(file, name_of)?.with_scales_beside(name_of)?;
        Ok(Some(TransformerPlace::SingleFile {
            path: path.to_owned(),
            checkpoint,
            naming,
        }))
    }

    /// The prefix of all names of a file's tensors, and their naming scheme; `None` if it does not hold the family's
    /// transformer.
    pub(crate) fn naming_of<'a>(&self, names: &[&'a str]) -> Option<(&'a str, Naming)> {
        prefixes(names.iter().copied()).into_iter().find_map(|prefix| {
            let own = authors_names(names, prefix, self.names);
            let mut namings = self.namings.iter();
            let (naming, _) = namings.find(|(_, marks)| has_marks(&own, marks.iter().copied()))?;
            Some((prefix, *naming))
        })
    }

    /// Whether a folder's `model_index.json` names a pipeline of this family.
    ///
    /// # Errors
    /// When the index cannot be read, or names another pipeline of the family.
    pub(crate) fn is_folder(&self, path: &Path) -> Result<bool, ModelError> {
        let Some(class_name) = pipeline_class(path)? else {
            return Ok(false);
        };
        let is_run = self.pipelines.contains(&class_name.as_str());
        if class_name.starts_with(self.class_prefix) && !is_run {
            return Err(unsupported(
                &path.join("model_index.json"),
                format!(
                    "it is a {class_name}; {} are supported",
                    self.pipelines.join(" and ")
                ),
            ));
        }
        Ok(is_run)
    }
}

/// Names without their prefix, as their authors write them.
pub(crate) fn authors_names(names: &[&str], prefix: &str, spellings: LayerNames) -> Vec<String> {
    let own = names.iter().filter_map(|name| name.strip_prefix(prefix));
    own.map(|name| spellings.authors(name)).collect()
}

/// Whether some of its authors' names begin with each of these marks.
pub(crate) fn has_marks<'m>(own: &[String], mut marks: impl Iterator<Item = &'m str>) -> bool {
    marks.all(|mark| own.iter().any(|name| name.starts_with(mark)))
}
