//! How the checkpoints of a family are told from others: by `model_index.json`, or by the names of a file's tensors.

use std::path::{Path, PathBuf};

use super::components::open;
use super::single_file::{PREFIXES, base_folder, is_single_file};
use super::stored::Checkpoint;
use crate::ModelError;
use crate::files::{pipeline_class, unsupported};

/// Whose names the tensors of a single file have.
pub(crate) trait Naming: Copy {
    /// Names that only this family's transformer begins with, so. Whatever quantized it, they do.
    fn marks(self) -> &'static [&'static str];
}

/// What the checkpoints of a family are known by.
pub(crate) struct Marks<N: 'static> {
    /// The family's name to users.
    pub(crate) family: &'static str,
    /// What the class in its `model_index.json` begins with.
    pub(crate) class_prefix: &'static str,
    /// The classes that are run here.
    pub(crate) pipelines: &'static [&'static str],
    /// Those of single files.
    pub(crate) namings: &'static [N],
    /// A tensor of single files that the mathematics never reads.
    pub(crate) unused: Option<&'static str>,
}

/// What a path turned out to be.
pub(crate) enum Recognised<N> {
    /// A folder in diffusers' layout.
    Folder(PathBuf),
    /// A single file.
    SingleFile {
        /// Where it is.
        path: PathBuf,
        /// The tensors of its transformer.
        checkpoint: Checkpoint,
        /// Whose names they have.
        naming: N,
        /// The folder of its companions.
        base: PathBuf,
    },
}

impl<N: Naming> Marks<N> {
    /// Looks what a path is. `None`: nothing of this family.
    ///
    /// # Errors
    /// When it is of this family and cannot be run, or a file is too damaged to tell.
    pub(crate) fn recognise(&self, path: &Path) -> Result<Option<Recognised<N>>, ModelError> {
        if path.is_dir() {
            return Ok(self.is_folder(path)?.then(|| Recognised::Folder(path.to_owned())));
        }
        if !is_single_file(path) {
            return Ok(None);
        }
        let file = open(path)?;
        let marked = |(prefix, naming): &(&str, N)| {
            naming.marks().iter().all(|mark| {
                let mark = format!("{prefix}{mark}");
                file.tensors().any(|(name, _)| name.starts_with(&mark))
            })
        };
        let mut pairs = PREFIXES
            .iter()
            .flat_map(|prefix| self.namings.iter().map(move |naming| (*prefix, *naming)));
        let Some((prefix, naming)) = pairs.find(marked) else {
            return Ok(None);
        };
        let name_of = |name: &str| {
            let name = name.strip_prefix(prefix)?;
            (self.unused != Some(name)).then(|| name.to_owned())
        };
        Ok(Some(Recognised::SingleFile {
            checkpoint: Checkpoint::of_file(&file, name_of)?,
            path: path.to_owned(),
            naming,
            base: base_folder(path, self.family, &|folder| self.is_folder(folder))?,
        }))
    }

    /// Whether a folder's `model_index.json` names a pipeline of this family.
    fn is_folder(&self, path: &Path) -> Result<bool, ModelError> {
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
