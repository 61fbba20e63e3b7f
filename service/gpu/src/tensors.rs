//! The tensors of one component.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor, WithDType};
use half::{bf16, f16};

use crate::blocks::BlockPlace;
use crate::format::WeightFormat;
use crate::load::LoadError;

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

/// Brings the blocks of a component that are not on the card.
pub(crate) trait Streams: fmt::Debug + Send + Sync {
    /// As [`WeightStream::enter`].
    fn enter(&self, place: BlockPlace) -> Result<(), LoadError>;

    /// Whether all blocks are on the card to stay.
    fn is_whole(&self) -> bool {
        false
    }
}

/// The streamed blocks of a component: those that are on the card only while a stage uses them. Clones are one stream.
#[derive(Clone, Debug, Default)]
pub struct WeightStream(Option<Arc<dyn Streams>>);

impl WeightStream {
    pub(crate) fn new(stream: Arc<dyn Streams>) -> WeightStream {
        WeightStream(Some(stream))
    }

    /// Makes the tensors of a block usable for the work that is queued next, and those of the block before it unusable. A stage
    /// calls it before each block of a pass; it does nothing where all of the component is on the card.
    ///
    /// # Errors
    /// [`LoadError`] if its bytes cannot be read.
    pub fn enter(&self, place: BlockPlace) -> Result<(), LoadError> {
        self.0.as_ref().map_or(Ok(()), |stream| stream.enter(place))
    }

    /// Whether all of the component is on the card.
    pub fn is_whole(&self) -> bool {
        self.0.as_ref().is_none_or(|stream| stream.is_whole())
    }
}

/// Locks memory of the process for a card, until it is dropped.
pub(crate) trait Pinning: fmt::Debug + Send + Sync {}

/// What owns the memory of tensors that must not free it. Dropped before the tensors, it takes it from them.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) trait Owner: fmt::Debug + Send + Sync {}

/// The tensors of one component, by name.
#[derive(Debug, Default)]
pub struct ComponentTensors {
    /// Pins the tensors' memory, if it is host memory. Dropped before the tensors.
    pinning: Option<Box<dyn Pinning>>,
    /// Dropped before the tensors too.
    _owner: Option<Box<dyn Owner>>,
    weights: HashMap<String, Weight>,
    /// Brings the tensors that are not on the card.
    stream: WeightStream,
}

/// Views of one tensor with the numbers of all, in full precision and of dtype `T`; with address and bytes of its numbers.
fn joined<T: WithDType>(
    weights: HashMap<String, Weight>,
) -> candle_core::Result<(HashMap<String, Weight>, *const u8, usize)> {
    let count = |weight: &Weight| weight.dims().iter().product::<usize>();
    let mut all: Vec<T> = Vec::with_capacity(weights.values().map(count).sum());
    let mut places: Vec<(String, Shape, usize)> = Vec::with_capacity(weights.len());
    for (name, weight) in weights {
        if let Weight::Full(tensor) = weight {
            places.push((name, tensor.shape().clone(), all.len()));
            all.extend(tensor.flatten_all()?.to_vec1::<T>()?);
        }
    }
    // The numbers stay where they are when they become a tensor.
    let (begin, bytes) = (all.as_ptr().cast::<u8>(), size_of_val(all.as_slice()));
    let length = all.len();
    let all = Tensor::from_vec(all, length, &Device::Cpu)?;
    let view = |(name, shape, first): (String, Shape, usize)| {
        let view = all.narrow(0, first, shape.elem_count())?.reshape(shape)?;
        Ok((name, Weight::Full(view)))
    };
    let views = places.into_iter().map(view).collect::<candle_core::Result<_>>()?;
    Ok((views, begin, bytes))
}

/// A tensor on a device: its own elements alone, where it is a view of a larger one. From pinned memory the copy is queued, and
/// the memory must stay until it is made.
///
/// # Errors
/// Errors of the device.
pub fn to_device(tensor: &Tensor, device: &Device) -> candle_core::Result<Tensor> {
    if tensor.device().same_device(device) {
        return Ok(tensor.clone());
    }
    let copied = {
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cpu(numbers), Some((begin, end))) = (&*storage, layout.contiguous_offsets()) else {
            return tensor.to_device(device);
        };
        match numbers {
            CpuStorage::BF16(all) => Tensor::from_slice(&all[begin..end], tensor.shape(), device)?,
            CpuStorage::F16(all) => Tensor::from_slice(&all[begin..end], tensor.shape(), device)?,
            CpuStorage::F32(all) => Tensor::from_slice(&all[begin..end], tensor.shape(), device)?,
            _ => return tensor.to_device(device),
        }
    };
    Ok(copied)
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
        ComponentTensors {
            pinning: None,
            _owner: None,
            weights,
            stream: WeightStream::default(),
        }
    }

    /// The component with blocks that this stream brings.
    pub(crate) fn streaming(self, stream: WeightStream) -> ComponentTensors {
        ComponentTensors { stream, ..self }
    }

    /// The component with memory that is not its tensors' own.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn owned_by(self, owner: Box<dyn Owner>) -> ComponentTensors {
        ComponentTensors {
            _owner: Some(owner),
            ..self
        }
    }

    /// The stream of its blocks.
    #[must_use]
    pub fn stream(&self) -> WeightStream {
        self.stream.clone()
    }

    /// The component with its tensors in one piece of host memory, if all are in full precision and of one dtype. The piece is
    /// pinned if `pin`, which gets its address and bytes, can pin it.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn in_one_piece(
        mut self,
        pin: impl FnOnce(*const u8, usize) -> Option<Box<dyn Pinning>>,
    ) -> candle_core::Result<ComponentTensors> {
        let dtype = match self.weights.values().next() {
            Some(Weight::Full(first)) => first.dtype(),
            Some(Weight::Quantized(_)) | None => return Ok(self),
        };
        let is_alike = |weight: &Weight| matches!(weight, Weight::Full(tensor) if tensor.dtype() == dtype);
        if !self.weights.values().all(is_alike) {
            return Ok(self);
        }
        let (weights, begin, bytes) = match dtype {
            DType::BF16 => joined::<bf16>(self.weights)?,
            DType::F16 => joined::<f16>(self.weights)?,
            DType::F32 => joined::<f32>(self.weights)?,
            _ => return Ok(self),
        };
        self.weights = weights;
        self.pinning = pin(begin, bytes);
        Ok(self)
    }

    /// Whether their memory is pinned.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinning.is_some()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Pinned;

    impl Pinning for Pinned {}

    fn numbers(first: f32, shape: &[usize], dtype: DType) -> candle_core::Result<Tensor> {
        let count = shape.iter().product::<usize>() as f32;
        Tensor::arange(first, first + count, &Device::Cpu)?
            .reshape(shape)?
            .to_dtype(dtype)
    }

    #[test]
    fn tensors_in_one_piece_have_their_own_numbers() -> Result<(), Box<dyn std::error::Error>> {
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            let (one, two) = (numbers(0.0, &[2, 3], dtype)?, numbers(7.0, &[4], dtype)?);
            let tensors = HashMap::from([("one".to_owned(), one.clone()), ("two".to_owned(), two.clone())]);
            let mut pinned = 0;
            let tensors = ComponentTensors::new(tensors).in_one_piece(|_, bytes| {
                pinned = bytes;
                Some(Box::new(Pinned))
            })?;
            assert_eq!(pinned, 10 * dtype.size_in_bytes());
            assert!(tensors.is_pinned());
            for (name, expected) in [("one", one), ("two", two)] {
                let view = tensors.get(name)?;
                assert_eq!(view.dims(), expected.dims());
                let wide = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                assert_eq!(wide(&view)?, wide(&expected)?);
                assert_eq!(wide(&to_device(&view, &Device::Cpu)?)?, wide(&expected)?);
            }
        }
        Ok(())
    }

    #[test]
    fn tensors_of_several_dtypes_stay_apart() -> Result<(), Box<dyn std::error::Error>> {
        let (one, two) = (numbers(0.0, &[2], DType::F32)?, numbers(0.0, &[2], DType::BF16)?);
        let tensors = HashMap::from([("one".to_owned(), one), ("two".to_owned(), two)]);
        let tensors = ComponentTensors::new(tensors).in_one_piece(|_, _| Some(Box::new(Pinned)))?;
        assert!(!tensors.is_pinned());
        assert!(ComponentTensors::default().in_one_piece(|_, _| None).is_ok());
        Ok(())
    }
}
