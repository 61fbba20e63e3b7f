//! Quantization roles of the autoencoder's tensors.

use crate::checkpoint::QuantizeRole;

/// Convolutions and linear layers may be quantized, except for the first and the last.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    match layer.rsplit('.').next().unwrap_or(layer) {
        norm if norm.contains("norm") => QuantizeRole::Full,
        "conv_in" | "conv_out" => QuantizeRole::AsStored,
        _ => QuantizeRole::Quantized,
    }
}
