//! Quantization roles of the autoencoder's tensors.

use crate::checkpoint::QuantizeRole;

/// Nothing is quantized: a convolution's weight is stored as a direction and a length, and is small compared to the models
/// that it belongs to.
pub(crate) fn role(_name: &str) -> QuantizeRole {
    QuantizeRole::Full
}
