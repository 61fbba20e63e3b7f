//! The definition of a family, and the list of all families.

use std::path::Path;
use std::sync::Arc;

use gpu::CheckpointFile;

use crate::adapters::{is_control_net_class, kind_of_folder};
use crate::checkpoint::{
    checkpoint_stem, class_not_run, file_not_run, is_lora, open_single_file, part_in_file,
};
use crate::files::{
    UNFINISHED, incomplete, pipeline_class, recorded, root_class, transformer_class, unsupported,
};
use crate::text::tokenizers::TokenizeError;
use crate::{AdapterKind, Families, Model, ModelError, ModelOpener, OwnLayout, Precision, StageError};

/// A model family.
pub trait Family: Send + Sync {
    /// The family's identifier: `flux`.
    fn name(&self) -> &'static str;

    /// The common name of its models; `None` for a family that has none to be downloaded.
    fn title(&self) -> Option<&'static str> {
        None
    }

    /// The `model_index.json` classes that it opens.
    fn pipelines(&self) -> &'static [&'static str] {
        &[]
    }

    /// The folders of a pipeline of this class that are read, in diffusers' layout.
    fn folders(&self, _class: &str) -> &'static [&'static str] {
        &[]
    }

    /// Classes of other families' pipelines with parts that this family reads, and the folders of those parts.
    fn parts(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[]
    }

    /// The folders of a pipeline of this class that are read where they exist, and that a model may lack.
    fn optional_folders(&self, _class: &str) -> &'static [&'static str] {
        &[]
    }

    /// The files that it reads of a repository in its authors' own layout, from the names of all files there; `None` if it is
    /// no such repository.
    fn own_layout(&self, _files: &[&str]) -> Option<OwnLayout> {
        None
    }

    /// Whether a folder holds a model in its authors' own layout.
    fn has_own_layout(&self, _folder: &Path) -> bool {
        false
    }

    /// Classes of its transformers that are published alone, in a separate folder.
    fn transformers(&self) -> &'static [&'static str] {
        &[]
    }

    /// File name endings of its models in one file, in addition to the extensions of checkpoints, which every family has.
    fn file_endings(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether a single file with tensors of these names holds one of its transformers.
    fn is_transformer_file(&self, _names: &[&str]) -> bool {
        false
    }

    /// Opens a folder or file of this family; `None` if it is of another family. The header of a single file is passed in
    /// `file`.
    ///
    /// # Errors
    /// When it is of this family and not supported or damaged.
    fn open(
        &self,
        path: &Path,
        file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError>;
}

/// The folders of a pipeline's transformer or UNet.
const DENOISERS: [&str; 2] = ["transformer", "unet"];

/// All families of this build, as an explicit list.
pub struct FamilyList {
    families: Vec<Box<dyn Family>>,
}

impl FamilyList {
    /// A list of these families; the first that recognizes a checkpoint opens it.
    pub fn new(families: Vec<Box<dyn Family>>) -> FamilyList {
        FamilyList { families }
    }

    /// The `model_index.json` classes of all families.
    fn classes(&self) -> impl Iterator<Item = &'static str> {
        self.families
            .iter()
            .flat_map(|family| family.pipelines())
            .copied()
    }

    /// The common names of the models of all families that have some to be downloaded.
    fn titles(&self) -> impl Iterator<Item = &'static str> {
        self.families.iter().filter_map(|family| family.title())
    }

    fn is_transformer(&self, file: &CheckpointFile) -> bool {
        let names: Vec<&str> = file.tensors().map(|(name, _)| name).collect();
        self.is_transformer_file(&names)
    }

    fn is_transformer_class(&self, class: &str) -> bool {
        self.families.iter().any(|f| f.transformers().contains(&class))
    }

    /// Refuses files that are recognized and do not run: another model, by its class or its tensors, and an unfinished
    /// download.
    fn check_is_run(&self, path: &Path, file: Option<&CheckpointFile>) -> Result<(), ModelError> {
        let ending = path.extension().and_then(|ending| ending.to_str());
        if ending.is_some_and(|ending| UNFINISHED.contains(&ending)) {
            return Err(incomplete(path, "its download has not ended: download it again"));
        }
        let class = match pipeline_class(path)? {
            None => root_class(path),
            class => class,
        };
        let is_run = |class: &str| self.classes().any(|run| run == class) || self.is_transformer_class(class);
        let relative = match class.filter(|class| !is_run(class)) {
            Some(class) => class_not_run(&class).map(|name| format!("{name} ({class})")),
            None => file.and_then(file_not_run).map(str::to_owned),
        };
        match relative {
            None => Ok(()),
            Some(relative) => {
                let run: Vec<&str> = self.titles().collect();
                let problem = format!(
                    "it is {relative}; the models that run here are {}",
                    run.join(", ")
                );
                Err(unsupported(path, problem))
            }
        }
    }

    /// Opens a checkpoint by its headers.
    ///
    /// # Errors
    /// [`ModelError`]; [`ModelError::NotAPipeline`] if no family recognizes it.
    pub fn open(&self, path: &Path, precision: &Precision) -> Result<Arc<dyn Model>, ModelError> {
        let file = open_single_file(path)?;
        self.check_is_run(path, file.as_ref())?;
        for family in &self.families {
            let (opened, read) = recorded(|| family.open(path, file.as_ref(), precision));
            if let Some(model) = opened? {
                model.parts().set_read(read);
                return Ok(model);
            }
        }
        let problem = match pipeline_class(path)? {
            Some(class) => {
                let found = match class.as_str() {
                    "" => "no pipeline",
                    class => class,
                };
                let known = self.pipelines();
                format!(
                    "its model_index.json names {found}, and what is supported is {}",
                    known.join(", ")
                )
            }
            None => match file.as_ref().and_then(part_in_file) {
                Some(part) => format!("it is {part}"),
                None => format!(
                    "it has neither a model_index.json nor the tensors of {}",
                    self.titles().collect::<Vec<_>>().join(", ")
                ),
            },
        };
        Err(ModelError::NotAPipeline {
            path: path.to_owned(),
            problem,
        })
    }
}

impl Families for FamilyList {
    fn names(&self) -> Vec<&'static str> {
        self.families.iter().map(|family| family.name()).collect()
    }

    fn pipelines(&self) -> Vec<&'static str> {
        self.classes().collect()
    }

    fn folders_of(&self, class: &str) -> Option<&'static [&'static str]> {
        let family = self.families.iter().find(|f| f.pipelines().contains(&class));
        let mut parts = self.families.iter().flat_map(|family| family.parts());
        family
            .map(|family| family.folders(class))
            .or_else(|| parts.find(|(of, _)| *of == class).map(|(_, folders)| *folders))
    }

    fn optional_folders_of(&self, class: &str) -> &'static [&'static str] {
        let family = self.families.iter().find(|f| f.pipelines().contains(&class));
        family.map_or(&[], |family| family.optional_folders(class))
    }

    fn base_folders_of(&self, class: &str) -> Option<Vec<&'static str>> {
        let folders = self.folders_of(class)?.iter().copied();
        Some(folders.filter(|folder| !DENOISERS.contains(folder)).collect())
    }

    fn holds_parts_alone(&self, folder: &Path) -> bool {
        let class = pipeline_class(folder).ok().flatten().unwrap_or_default();
        let mut parts = self.families.iter().flat_map(|family| family.parts());
        !self.classes().any(|known| known == class) && parts.any(|(known, _)| *known == class)
    }

    fn is_transformer_file(&self, names: &[&str]) -> bool {
        // A LoRA of all layers has names that begin as those of the transformer do.
        !is_lora(names)
            && self
                .families
                .iter()
                .any(|family| family.is_transformer_file(names))
    }

    fn holds_transformer(&self, file: &Path) -> bool {
        let opened = open_single_file(file).ok().flatten();
        opened.is_some_and(|opened| self.is_transformer(&opened))
    }

    fn kind_of_other_file(&self, file: &Path) -> Option<String> {
        const UNKNOWN: &str = "not known here";
        let what = match open_single_file(file).ok()? {
            None => Some(UNKNOWN),
            Some(file) => file_not_run(&file)
                .or_else(|| (!self.is_transformer(&file)).then(|| part_in_file(&file).unwrap_or(UNKNOWN))),
        };
        what.map(str::to_owned)
    }

    fn own_layout(&self, files: &[&str]) -> Option<OwnLayout> {
        self.families.iter().find_map(|family| family.own_layout(files))
    }

    fn class_not_run(&self, class: &str) -> Option<&'static str> {
        class_not_run(class)
    }

    fn has_own_layout(&self, folder: &Path) -> bool {
        self.families.iter().any(|family| family.has_own_layout(folder))
    }

    fn opens_without_pipeline(&self, class: &str) -> bool {
        self.is_transformer_class(class) || is_control_net_class(class)
    }

    fn single_file_stem<'a>(&self, name: &'a str) -> Option<&'a str> {
        let mut endings = self.families.iter().flat_map(|family| family.file_endings());
        endings
            .find_map(|ending| name.strip_suffix(ending))
            .or_else(|| checkpoint_stem(name))
    }

    fn has_transformer(&self, folder: &Path) -> bool {
        transformer_class(folder).is_some_and(|class| self.is_transformer_class(&class))
    }

    fn kind_of_folder(&self, path: &Path) -> Option<AdapterKind> {
        kind_of_folder(path)
    }
}

impl ModelOpener for FamilyList {
    fn open(&self, path: &Path, precision: &Precision) -> Result<Arc<dyn Model>, ModelError> {
        FamilyList::open(self, path, precision)
    }
}

impl From<TokenizeError> for StageError {
    fn from(error: TokenizeError) -> StageError {
        StageError::BadInput(error.to_string())
    }
}
