//! The tensors of one component.

use std::collections::HashMap;

use candle_core::Tensor;

use crate::format::WeightFormat;

/// A quantized weight: bytes in the layout of its format.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// `u8`, one dimension of [`WeightFormat::bytes`].
    pub bytes: Tensor,
    pub format: WeightFormat,
    /// Shape of the weight before quantization.
    pub shape: Vec<usize>,
}

/// A weight in any representation. Clones share memory.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Full precision, in the dtype of the card.
    Full(Tensor),
    Quantized(QuantizedWeight),
}

impl Weight {
    /// Shape of the weight.
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

/// A tensor that a component lacks, or has in another shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor {name} is {problem}")]
pub struct MissingTensor {
    /// Name within the component.
    pub name: String,
    /// `missing`, or the found and expected shapes, for the message.
    pub problem: String,
}

impl ComponentTensors {
    /// From full-precision tensors by name.
    pub fn new(tensors: HashMap<String, Tensor>) -> ComponentTensors {
        let full = |(name, tensor)| (name, Weight::Full(tensor));
        ComponentTensors::of_weights(tensors.into_iter().map(full).collect())
    }

    /// From weights by name.
    pub fn of_weights(weights: HashMap<String, Weight>) -> ComponentTensors {
        ComponentTensors { weights }
    }

    fn missing(name: &str, problem: impl Into<String>) -> MissingTensor {
        MissingTensor {
            name: name.to_owned(),
            problem: problem.into(),
        }
    }

    /// A weight by name, of any shape. Clones share memory.
    ///
    /// # Errors
    /// [`MissingTensor`] names it.
    pub fn weight(&self, name: &str) -> Result<Weight, MissingTensor> {
        let weight = self.weights.get(name).cloned();
        weight.ok_or_else(|| ComponentTensors::missing(name, "missing"))
    }

    /// A weight by name with an expected shape.
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

    /// A full-precision tensor by name, of any shape.
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

    /// A full-precision tensor by name with an expected shape.
    ///
    /// # Errors
    /// [`MissingTensor`] names it and both shapes.
    pub fn shaped(&self, name: &str, shape: &[usize]) -> Result<Tensor, MissingTensor> {
        self.shaped_weight(name, shape)?;
        self.get(name)
    }

    /// Whether there is a tensor with this name.
    pub fn contains(&self, name: &str) -> bool {
        self.weights.contains_key(name)
    }

    /// All names, in no particular order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().map(String::as_str)
    }
}
