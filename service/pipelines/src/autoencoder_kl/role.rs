//! Which tensors of the autoencoder may be quantized.

use crate::checkpoint::Role;

/// What may become of a tensor: convolutions and linear layers may be quantized, but for the first and the last.
pub(crate) fn role(name: &str) -> Role {
    let Some(layer) = name.strip_suffix(".weight") else {
        return Role::Full;
    };
    match layer.rsplit('.').next().unwrap_or(layer) {
        norm if norm.contains("norm") => Role::Full,
        "conv_in" | "conv_out" => Role::AsStored,
        _ => Role::Quantized,
    }
}
