//! In which numbers a model is held and computed.

use candle_core::DType;

use crate::quantization::Quantization;

/// Dtype and quantization of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Precision {
    /// Computation dtype of the card: of activations and full-precision weights.
    pub dtype: DType,
    /// Formats to which components are quantized at load.
    pub quantization: Quantization,
}

impl Precision {
    /// Everything as stored, computed in this dtype.
    pub const fn full(dtype: DType) -> Precision {
        Precision {
            dtype,
            quantization: Quantization::NONE,
        }
    }
}
