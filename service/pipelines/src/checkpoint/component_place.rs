//! A component in a folder of its own, or in a single file in its place, as ComfyUI's users have them.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::components::{Requested, Shapes, component_of_specs, open, whole};
use super::spec::TensorSpec;
use super::stored::Checkpoint;
use crate::files::checked;
use crate::{ComponentFiles, ModelError};

/// A component's folder, or the file that replaces it.
pub(crate) struct ComponentPlace {
    place: PathBuf,
    is_file: bool,
    /// The component's configuration, unless that is the published one.
    config: Option<PathBuf>,
}

impl ComponentPlace {
    /// Configuration and place of a component with this folder. Where the folder has no weights, the single file is searched.
    /// `without_configuration` is the configuration of a single file that has none beside it.
    ///
    /// # Errors
    /// When its configuration cannot be read, or is not supported.
    pub(crate) fn of<C: DeserializeOwned>(
        folder: &Path,
        companion: impl FnOnce() -> Option<PathBuf>,
        without_configuration: impl FnOnce(&Path) -> Result<C, ModelError>,
        check: fn(&C) -> Result<(), String>,
    ) -> Result<(C, ComponentPlace), ModelError> {
        let config = folder.join("config.json");
        let file = match Checkpoint::is_in(folder) {
            true => None,
            false => companion(),
        };
        Ok(match file {
            Some(file) if !config.is_file() => (
                without_configuration(&file)?,
                ComponentPlace {
                    place: file,
                    is_file: true,
                    config: None,
                },
            ),
            file => (
                checked(&config, check)?,
                ComponentPlace {
                    is_file: file.is_some(),
                    place: file.unwrap_or_else(|| folder.to_owned()),
                    config: Some(config),
                },
            ),
        })
    }

    /// The single file, if it is one.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.is_file.then_some(self.place.as_path())
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
        let checkpoint = match self.is_file {
            true => Checkpoint::of_file(&open(&self.place)?, rename)?,
            false => Checkpoint::of_folder(&self.place)?,
        };
        let specs = specs(&|name| checkpoint.has(name));
        component_of_specs(&self.place, &checkpoint, &specs, wanted, self.config.as_deref())
    }
}
