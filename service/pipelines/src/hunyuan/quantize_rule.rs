//! Quantization rules: which tensors are quantized at load, and which may be stored quantized. In the transformer the linear
//! layers of the blocks and the last modulation are quantized, as FLUX's are; embedders, the refiner of the text and the last
//! layer stay in full precision: three percent of the bytes.

use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::{autoencoder_hunyuan, text, vision};

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        "transformer" => of_transformer,
        "text_encoder" => text::llama::role,
        "text_encoder_2" => text::clip::role,
        "image_encoder" => vision::siglip::role,
        "vae" => autoencoder_hunyuan::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// The role of a tensor of the transformer, by its name in diffusers.
fn of_transformer(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    let last = layer.rsplit('.').next().unwrap_or(layer);
    if last.starts_with("norm") || last.starts_with("proj_2x") || last.starts_with("proj_4x") {
        return QuantizeRole::Full;
    }
    let of_block = ["transformer_blocks.", "single_transformer_blocks."];
    if of_block.iter().any(|prefix| layer.starts_with(prefix)) || layer == "norm_out.linear" {
        return QuantizeRole::Quantized;
    }
    match layer {
        // Convolutions, which are computed in full precision.
        "x_embedder.proj" | "clean_x_embedder.proj" => QuantizeRole::Full,
        _ => QuantizeRole::AsStored,
    }
}
