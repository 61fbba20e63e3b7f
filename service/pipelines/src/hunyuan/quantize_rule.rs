//! Quantization rules: which tensors are quantized at load, and which may be stored quantized. In the transformer the linear
//! layers of the blocks and the last modulation are quantized, as FLUX's are; embedders, the refiner of the text and the last
//! layer stay in full precision: three percent of the bytes.

use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::{autoencoders, mmdit, text, vision};

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        "transformer" => of_transformer,
        "text_encoder" => text::llama::role,
        "text_encoder_2" => text::clip::role,
        "image_encoder" => vision::siglip::role,
        "vae" => autoencoders::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// The role of a tensor of the transformer, by its name in diffusers: convolutions over patches are computed in full precision.
fn of_transformer(name: &str) -> QuantizeRole {
    let of_patches = ["x_embedder.", "clean_x_embedder."];
    match of_patches.iter().any(|prefix| name.starts_with(prefix)) {
        true => QuantizeRole::Full,
        false => mmdit::role(name),
    }
}
