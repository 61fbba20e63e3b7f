//! FLUX's transformer as files.

use std::path::Path;

use super::config::TransformerConfig;
use crate::ModelError;
use crate::checkpoint::{Checkpoint, ComponentFiles, Requested, TensorSpec, exact_component, whole};

/// Name of the component in messages about unexpected tensors.
const TRANSFORMER: &str = "a FLUX transformer";

/// The transformer of a diffusers folder: exactly the tensors of its configuration.
pub(super) fn transformer_of_folder(
    folder: &Path,
    config: &TransformerConfig,
    wanted: Requested,
) -> Result<ComponentFiles, ModelError> {
    let specs = whole(config.tensor_shapes().collect());
    exact_component(
        folder,
        Checkpoint::of_folder(folder)?,
        &specs,
        wanted,
        TRANSFORMER,
    )
}

/// The transformer of a single file, with these tensors.
pub(super) fn transformer_of_single_file(
    file: &Path,
    checkpoint: Checkpoint,
    specs: &[TensorSpec],
    wanted: Requested,
) -> Result<ComponentFiles, ModelError> {
    exact_component(file, checkpoint, specs, wanted, TRANSFORMER)
}
