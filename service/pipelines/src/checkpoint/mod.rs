//! The content of checkpoints, by their headers: how tensors are stored and quantized (`stored`), where required
//! tensors are (`spec`), which of them may be quantized (`role`), components as files (`components`), the names of layers in files of
//! other programs (`names`), and recognized models that do not run (`relatives`).

mod component_place;
mod components;
mod file_part;
mod names;
mod numbered;
mod numbers;
mod recognise;
mod relatives;
#[cfg(test)]
mod renamed;
mod role;
mod single_file;
mod spec;
mod stored;
mod transformer;

pub(crate) use component_place::ComponentPlace;
pub(crate) use components::{
    Requested, Shapes, Wanted, component_of_checkpoint, component_of_folder, component_of_specs,
    exact_component, open, open_single_file, whole,
};
pub(crate) use file_part::{FilePart, NamesInModel, VAE_IN_MODEL};
pub(crate) use model::{ComponentFiles, ComponentSet};
pub(crate) use names::{LayerNames, prefixes, unwrapped};
pub(crate) use numbered::numbered;
pub(crate) use numbers::number_of;
pub(crate) use recognise::{Marks, Recognised, authors_names, has_marks};
pub(crate) use relatives::{class_not_run, file_not_run, is_lora, known_by_names, part_in_file};
pub(crate) use role::{QuantizeRole, RoleOf};
pub(crate) use single_file::{
    base_beside, bases_beside, beside, checkpoint_stem, companion, companion_by, file_in, folders_in,
    named_base, of_hub_cache, sidecar_of, written_base,
};
pub(crate) use spec::{Layout, Rows, TensorSpec};
pub(crate) use stored::{Checkpoint, heads};
pub(crate) use transformer::{
    Naming, TransformerFiles, TransformerPlace, length_in_diffusers, of_base, rotary_axes,
};
