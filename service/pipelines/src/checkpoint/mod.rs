//! What a checkpoint holds, by its headers alone: how tensors are stored and quantized (`stored`), where those that the
//! mathematics asks for lie (`spec`), which of them may be quantized (`role`), and components as files (`components`).

mod component_set;
mod components;
mod recognise;
mod role;
mod single_file;
mod spec;
mod stored;

pub(crate) use component_set::ComponentSet;
pub(crate) use components::{
    ComponentFiles, Shapes, Wanted, component_of_checkpoint, component_of_file, component_of_folder,
    exact_component, open, whole,
};
pub(crate) use recognise::{Marks, Naming, Recognised};
pub(crate) use role::{Role, RoleOf};
pub(crate) use single_file::companion;
pub(crate) use spec::{Rows, TensorSpec};
pub(crate) use stored::Checkpoint;
