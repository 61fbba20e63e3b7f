//! A component in a folder of its own, or in a single file in its place, as ComfyUI's users have them.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::components::{Requested, Shapes, component_of_specs, whole};
use super::file_part::FilePart;
use super::spec::TensorSpec;
use super::stored::Checkpoint;
use crate::files::checked;
use crate::{ComponentFiles, ModelError};

/// A component's folder, or the file that replaces it.
pub(crate) struct ComponentPlace {
    place: PathBuf,
    file: Option<FilePart>,
    /// The component's configuration, unless that is the published one.
    config: Option<PathBuf>,
}

impl ComponentPlace {
    /// Configuration and place of a component with this folder. `own` is the component in the file of the whole model. Without it,
    /// and where the folder has no weights, the single file is searched. `without_configuration` is the configuration of a file
    /// that has none beside it.
    ///
    /// # Errors
    /// When its configuration cannot be read, or is not supported.
    pub(crate) fn of<C: DeserializeOwned>(
        folder: &Path,
        own: Option<FilePart>,
        companion: impl FnOnce() -> Option<PathBuf>,
        without_configuration: impl FnOnce(&FilePart) -> Result<C, ModelError>,
        check: fn(&C) -> Result<(), String>,
    ) -> Result<(C, ComponentPlace), ModelError> {
        let config = folder.join("config.json");
        let file = match own {
            None if !Checkpoint::is_in(folder) => companion().map(FilePart::whole),
            own => own,
        };
        let place = match &file {
            Some(file) => file.path(),
            None => folder,
        };
        let place = place.to_owned();
        Ok(match file {
            Some(file) if !config.is_file() => (
                without_configuration(&file)?,
                ComponentPlace {
                    place,
                    file: Some(file),
                    config: None,
                },
            ),
            file => (
                checked(&config, check)?,
                ComponentPlace {
                    place,
                    file,
                    config: Some(config),
                },
            ),
        })
    }

    /// The single file, if it is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_ref().map(FilePart::path)
    }

    /// The component at the place, with the tensors of `shapes`, which may query which names exist. `rename` returns the names
    /// of tensors in a single file.
    ///
    /// # Errors
    /// The first tensor that is missing, of another shape, or stored in an unsupported way.
    pub(crate) fn files(
        &self,
        wanted: Requested,
        rename: impl Fn(&str) -> Option<String>,
        shapes: impl FnOnce(&dyn Fn(&str) -> bool) -> Shapes,
    ) -> Result<ComponentFiles, ModelError> {
        self.files_of_specs(wanted, rename, |has| whole(shapes(has)))
    }

    /// [`ComponentPlace::files`], whose tensors may be rows of those at the place.
    ///
    /// # Errors
    /// As [`ComponentPlace::files`].
    pub(crate) fn files_of_specs(
        &self,
        wanted: Requested,
        rename: impl Fn(&str) -> Option<String>,
        specs: impl FnOnce(&dyn Fn(&str) -> bool) -> Vec<TensorSpec>,
    ) -> Result<ComponentFiles, ModelError> {
        let checkpoint = match &self.file {
            Some(file) => file.checkpoint(rename)?,
            None => Checkpoint::of_folder(&self.place)?,
        };
        let specs = specs(&|name| checkpoint.has(name));
        component_of_specs(&self.place, &checkpoint, &specs, wanted, self.config.as_deref())
    }
}
