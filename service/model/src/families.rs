//! Facts about the files of models, without opening them: which belong to a family that runs here, and which parts are read.

use std::path::Path;

use crate::adapter::AdapterKind;
use crate::model::ModelOpener;

/// The files that are read of a repository in the layout of a model's authors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnLayout {
    /// Folders, each with its configuration and weights.
    pub folders: Vec<String>,
    /// Further files.
    pub files: Vec<String>,
    /// The configuration that names the class of the model, where a model of another class may have the same files.
    pub configuration: Option<String>,
}

/// The configuration of a pipeline's transformer, such as the axes of its rotary embedding.
pub const BASE_CONFIGURATION: &str = "transformer/config.json";

/// The families of models that run here, for the code that finds and downloads models.
pub trait Families: ModelOpener {
    /// Names of the families.
    fn names(&self) -> Vec<&'static str>;

    /// The `model_index.json` classes of all families.
    fn pipelines(&self) -> Vec<&'static str>;

    /// The folders of a pipeline of this class that are read; `None` if no family reads the class.
    fn folders_of(&self, class: &str) -> Option<&'static [&'static str]>;

    /// The folders of a pipeline of this class that are read where they exist, and that a model may lack.
    fn optional_folders_of(&self, class: &str) -> &'static [&'static str];

    /// The folders that a transformer in a single file takes from a pipeline of this class, its base; `None` if the class is of
    /// no family. [`BASE_CONFIGURATION`] supplies the settings that the tensors of the file do not show.
    fn base_folders_of(&self, class: &str) -> Option<Vec<&'static str>>;

    /// Whether a folder holds only parts of another pipeline that a family reads, and no model that runs alone.
    fn holds_parts_alone(&self, folder: &Path) -> bool;

    /// Whether a single file with tensors of these names holds a transformer that a family opens.
    fn is_transformer_file(&self, names: &[&str]) -> bool;

    /// Whether a path is a single file with such a transformer, by its header. `false` for a damaged file.
    fn holds_transformer(&self, file: &Path) -> bool;

    /// What a single file holds if it is no model that runs here, in words. `None` for a model that runs, and for a file that
    /// cannot be read: opening such a file reports the error.
    fn kind_of_other_file(&self, file: &Path) -> Option<String>;

    /// The files that are read of a repository in the layout of a family's authors, from the names of all files there.
    fn own_layout(&self, files: &[&str]) -> Option<OwnLayout>;

    /// The name of the model with a configuration of this class, if it is known and does not run.
    fn class_not_run(&self, class: &str) -> Option<&'static str>;

    /// Whether a folder holds a model in the layout of a family's authors.
    fn has_own_layout(&self, folder: &Path) -> bool;

    /// Whether this is the class of a model that opens without a pipeline: a transformer of a family, or a ControlNet.
    fn opens_without_pipeline(&self, class: &str) -> bool;

    /// The name of a model in one file: the file's name without its ending. `None` for a file of another kind.
    fn single_file_stem<'a>(&self, name: &'a str) -> Option<&'a str>;

    /// Whether a folder has a transformer of a family at its root, and no pipeline.
    fn has_transformer(&self, folder: &Path) -> bool;

    /// The kind of a folder: a ControlNet, if its configuration says so, or an adapter of peft or of diffusers; `None` for
    /// another folder.
    fn kind_of_folder(&self, path: &Path) -> Option<AdapterKind>;
}
