//! Quantization rules of SDXL: which tensors are quantized at load, and which may be stored quantized.
//!
//! - **unet**: attention and feed-forward of every layer of attention, which are most of its bytes. Not the convolutions, the
//!   projections around attention, and what embeds times, which lose more than they save.
//! - **text_encoder**, **text_encoder_2**: attention and feed-forward. Not embeddings, nor the projection.
//! - **vae**: the same as for FLUX.1.
//!
//! Norms and biases stay in full precision everywhere.

use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::{autoencoders, text};

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        "unet" => of_unet,
        "text_encoder" | "text_encoder_2" => text::clip::role,
        "vae" => autoencoders::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// The role of a tensor of the UNet, by its name in diffusers.
fn of_unet(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    let last = layer.rsplit('.').next().unwrap_or(layer);
    match layer.contains(".transformer_blocks.") {
        _ if last.contains("norm") => QuantizeRole::Full,
        true => QuantizeRole::Quantized,
        false => QuantizeRole::AsStored,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::UnetConfig;
    use super::*;

    #[test]
    fn the_rule_quantizes_the_layers_of_attention() {
        let config = UnetConfig::default();
        let mut numbers = [0, 0];
        for (name, shape) in config.tensor_shapes() {
            let role = of_unet(&name);
            if role == QuantizeRole::Quantized {
                assert!(
                    shape.len() == 2 && name.contains(".attn") || name.contains(".ff."),
                    "{name}"
                );
            }
            numbers[usize::from(role == QuantizeRole::Quantized)] += shape.iter().product::<usize>();
        }
        // Three quarters of all numbers.
        assert!(numbers[1] > 2 * numbers[0], "{numbers:?}");
    }
}
