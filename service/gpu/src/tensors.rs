//! The tensors of one component.

use std::collections::HashMap;

use candle_core::Tensor;

/// The tensors of one component, by name.
#[derive(Debug, Default)]
pub struct ComponentTensors {
    tensors: HashMap<String, Tensor>,
}

/// A tensor that the mathematics asks for and the component does not have, or not in that shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor {name} is {problem}")]
pub struct MissingTensor {
    /// Its name within the component.
    pub name: String,
    /// `missing`, or which shape was found and which was expected.
    pub problem: String,
}

impl ComponentTensors {
    /// From names and tensors.
    pub fn new(tensors: HashMap<String, Tensor>) -> ComponentTensors {
        ComponentTensors { tensors }
    }

    /// A tensor by name, of whatever shape it has. Tensors share storage: a clone costs no memory.
    ///
    /// # Errors
    /// [`MissingTensor`] names it.
    pub fn get(&self, name: &str) -> Result<Tensor, MissingTensor> {
        self.tensors.get(name).cloned().ok_or_else(|| MissingTensor {
            name: name.to_owned(),
            problem: "missing".to_owned(),
        })
    }

    /// A tensor by name that must have this shape.
    ///
    /// # Errors
    /// [`MissingTensor`] names it and both shapes.
    pub fn shaped(&self, name: &str, shape: &[usize]) -> Result<Tensor, MissingTensor> {
        let tensor = self.get(name)?;
        if tensor.dims() == shape {
            return Ok(tensor);
        }
        Err(MissingTensor {
            name: name.to_owned(),
            problem: format!("of shape {:?} where {shape:?} is expected", tensor.dims()),
        })
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// All names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }
}
