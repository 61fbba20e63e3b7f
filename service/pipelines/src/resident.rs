//! The tensors of a component as a tensor source of candle-transformers: its models look tensors up by name and get
//! handles, so nothing is copied and residency is unaffected. Full-precision weights only.

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use gpu::ComponentTensors;

struct Resident<'a, F> {
    tensors: &'a ComponentTensors,
    /// The name of a tensor in the component, by the name that the model looks up.
    name_of: F,
}

/// The tensors of a component for a model of candle-transformers; `name_of` translates the model's names. All must be
/// of this dtype and on this device.
pub(crate) fn vars<'a>(
    tensors: &'a ComponentTensors,
    dtype: DType,
    device: &Device,
    name_of: impl Fn(&str) -> String + Send + Sync + 'a,
) -> VarBuilder<'a> {
    VarBuilder::from_backend(Box::new(Resident { tensors, name_of }), dtype, device.clone())
}

impl<F: Fn(&str) -> String + Send + Sync> SimpleBackend for Resident<'_, F> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            candle_core::bail!(
                "tensor {name} is {:?} where {shape:?} is expected",
                tensor.shape()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let tensor = self
            .tensors
            .get(&(self.name_of)(name))
            .map_err(candle_core::Error::wrap)?;
        // Another dtype or device would mean a copy.
        if tensor.dtype() != dtype || !tensor.device().same_device(device) {
            candle_core::bail!(
                "tensor {name} is {:?} where {dtype:?} is expected",
                tensor.dtype()
            );
        }
        Ok(tensor)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains(&(self.name_of)(name))
    }
}

/// Bytes of packing buffers that a thread has for matrix products on a CPU: 2.1 MB were measured on 16 cores.
const PACKING_BYTES: u64 = 5 << 19;

/// Packing bytes of all threads. Zero for half precision, whose products are computed on a card.
pub(crate) fn packing_bytes(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => PACKING_BYTES * candle_core::utils::get_num_threads() as u64,
        _ => 0,
    }
}
