//! FLUX's transformer as files.

use std::path::Path;

use super::config::TransformerConfig;
use crate::ModelError;
use crate::checkpoint::{Checkpoint, ComponentFiles, TensorSpec, Wanted, exact_component, whole};

/// What a tensor that is not known is no part of.
const TRANSFORMER: &str = "a FLUX transformer";

/// The transformer of a diffusers folder: exactly the tensors that its configuration asks for.
pub(super) fn transformer_of_folder(
    folder: &Path,
    config: &TransformerConfig,
    wanted: Wanted,
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

/// The transformer of a single file, of these tensors.
pub(super) fn transformer_of_single_file(
    file: &Path,
    checkpoint: Checkpoint,
    specs: &[TensorSpec],
    wanted: Wanted,
) -> Result<ComponentFiles, ModelError> {
    exact_component(file, checkpoint, specs, wanted, TRANSFORMER)
}
