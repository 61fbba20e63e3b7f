//! Quantization rules of Qwen-Image: which tensors are quantized at load, and which may be stored quantized.
//!
//! - **transformer**: attention and feed-forward of every block. Not the modulators, on which every value of each step depends:
//!   they are a third of the bytes, and are read once per request. Nor the layers before and after the blocks.
//! - **text_encoder** (Qwen2.5-VL): attention and feed-forward. Not the token embedding.
//! - **vision** (its vision tower): nothing.
//! - **vae**: the same as for FLUX.1.
//!
//! Norms and biases stay in full precision everywhere.

use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::mmdit::{self, is_modulator};
use crate::{autoencoders, text, vision};

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        "transformer" => of_transformer,
        "text_encoder" => text::qwen2_vl::role,
        "vision" => vision::qwen2_vl::role,
        "vae" => autoencoders::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// The role of a tensor of the transformer, by its name in diffusers.
fn of_transformer(name: &str) -> QuantizeRole {
    match mmdit::role(name) {
        QuantizeRole::Quantized if is_modulator(name) => QuantizeRole::AsStored,
        _ if name == "txt_norm.weight" => QuantizeRole::Full,
        role => role,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::TransformerConfig;
    use super::*;

    #[test]
    fn the_rule_quantizes_attention_and_feed_forward_of_blocks() {
        let config = TransformerConfig {
            num_layers: 1,
            ..TransformerConfig::default()
        };
        let named = |role: QuantizeRole| -> Vec<String> {
            let names = config.tensor_shapes().map(|(name, _)| name);
            let mut named: Vec<_> = names.filter(|name| of_transformer(name) == role).collect();
            named.sort();
            named
        };
        assert_eq!(
            named(QuantizeRole::AsStored),
            [
                "img_in.weight",
                "norm_out.linear.weight",
                "proj_out.weight",
                "time_text_embed.timestep_embedder.linear_1.weight",
                "time_text_embed.timestep_embedder.linear_2.weight",
                "transformer_blocks.0.img_mod.1.weight",
                "transformer_blocks.0.txt_mod.1.weight",
                "txt_in.weight",
            ]
        );
        // Three projections, an output and a feed-forward of two for each stream.
        assert_eq!(named(QuantizeRole::Quantized).len(), 12);
        let full = named(QuantizeRole::Full);
        assert!(
            full.iter()
                .all(|name| name.contains("norm_") || name.ends_with(".bias") || name == "txt_norm.weight"),
            "{full:?}"
        );
    }
}
