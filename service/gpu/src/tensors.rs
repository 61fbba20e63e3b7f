//! The tensors of one component.

use std::collections::HashMap;

use candle_core::Tensor;

use crate::format::WeightFormat;

/// A weight that is held quantized: bytes in the layout of its format.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// `u8`, one dimension, as many as [`WeightFormat::bytes`] says.
    pub bytes: Tensor,
    /// What they mean.
    pub format: WeightFormat,
    /// Shape of the weight.
    pub shape: Vec<usize>,
}

/// A weight, however it is held. Clones share memory.
#[derive(Clone, Debug)]
pub enum Weight {
    /// In the dtype of the card.
    Full(Tensor),
    /// In fewer bits.
    Quantized(QuantizedWeight),
}

impl Weight {
    /// Its shape.
    pub fn dims(&self) -> &[usize] {
        match self {
            Weight::Full(tensor) => tensor.dims(),
            Weight::Quantized(quantized) => &quantized.shape,
        }
    }
}

/// The tensors of one component, by name.
#[derive(Debug, Default)]
pub struct ComponentTensors {
    weights: HashMap<String, Weight>,
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
    /// From names and tensors, all in full precision.
    pub fn new(tensors: HashMap<String, Tensor>) -> ComponentTensors {
        let full = |(name, tensor)| (name, Weight::Full(tensor));
        ComponentTensors::of_weights(tensors.into_iter().map(full).collect())
    }

    /// From names and weights.
    pub fn of_weights(weights: HashMap<String, Weight>) -> ComponentTensors {
        ComponentTensors { weights }
    }

    fn missing(name: &str, problem: impl Into<String>) -> MissingTensor {
        MissingTensor {
            name: name.to_owned(),
            problem: problem.into(),
        }
    }

    /// A weight by name, of whatever shape it has. Weights share memory: a clone costs none.
    ///
    /// # Errors
    /// [`MissingTensor`] names it.
    pub fn weight(&self, name: &str) -> Result<Weight, MissingTensor> {
        let weight = self.weights.get(name).cloned();
        weight.ok_or_else(|| ComponentTensors::missing(name, "missing"))
    }

    /// A weight by name that must have this shape.
    ///
    /// # Errors
    /// [`MissingTensor`] names it and both shapes.
    pub fn shaped_weight(&self, name: &str, shape: &[usize]) -> Result<Weight, MissingTensor> {
        let weight = self.weight(name)?;
        if weight.dims() == shape {
            return Ok(weight);
        }
        let problem = format!("of shape {:?} where {shape:?} is expected", weight.dims());
        Err(ComponentTensors::missing(name, problem))
    }

    /// A tensor in full precision by name, of whatever shape it has.
    ///
    /// # Errors
    /// [`MissingTensor`] names it.
    pub fn get(&self, name: &str) -> Result<Tensor, MissingTensor> {
        match self.weight(name)? {
            Weight::Full(tensor) => Ok(tensor),
            Weight::Quantized(quantized) => {
                let problem = format!("held in {} where full precision is expected", quantized.format);
                Err(ComponentTensors::missing(name, problem))
            }
        }
    }

    /// A tensor in full precision by name that must have this shape.
    ///
    /// # Errors
    /// [`MissingTensor`] names it and both shapes.
    pub fn shaped(&self, name: &str, shape: &[usize]) -> Result<Tensor, MissingTensor> {
        self.shaped_weight(name, shape)?;
        self.get(name)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.weights.contains_key(name)
    }

    /// All names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }
}
