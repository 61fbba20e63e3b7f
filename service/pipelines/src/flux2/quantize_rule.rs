//! Quantization rules of FLUX.2: which tensors are quantized at load, and which may be stored quantized.
//!
//! - **transformer**: attention and feed-forward of every block. Not the modulators, on which every value of each step depends,
//!   nor the layers before and after the blocks.
//! - **text_encoder** (Qwen3): attention and feed-forward. Not the token embedding.
//! - **vae**: the same as for FLUX.1.
//!
//! Norms stay in full precision everywhere.

use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::{autoencoders, mmdit, text};

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        "transformer" => of_transformer,
        "text_encoder" => text::qwen3::role,
        "vae" => autoencoders::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// The role of a tensor of the transformer, by its name in diffusers.
fn of_transformer(name: &str) -> QuantizeRole {
    match mmdit::role(name) {
        QuantizeRole::Quantized if name.starts_with("norm_out.") => QuantizeRole::AsStored,
        role => role,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::TransformerConfig;
    use super::*;

    #[test]
    fn the_rule_quantizes_the_layers_of_blocks() {
        let config = TransformerConfig::klein_4b();
        let named = |role: QuantizeRole| -> Vec<String> {
            let names = config.tensor_shapes().map(|(name, _)| name);
            let mut named: Vec<_> = names.filter(|name| of_transformer(name) == role).collect();
            named.sort();
            named
        };
        assert_eq!(
            named(QuantizeRole::AsStored),
            [
                "context_embedder.weight",
                "double_stream_modulation_img.linear.weight",
                "double_stream_modulation_txt.linear.weight",
                "norm_out.linear.weight",
                "proj_out.weight",
                "single_stream_modulation.linear.weight",
                "time_guidance_embed.timestep_embedder.linear_1.weight",
                "time_guidance_embed.timestep_embedder.linear_2.weight",
                "x_embedder.weight",
            ]
        );
        // Double blocks: three projections, an output and a feed-forward of two for each stream. Single ones: two.
        assert_eq!(named(QuantizeRole::Quantized).len(), 5 * 12 + 20 * 2);
        let full = named(QuantizeRole::Full);
        assert!(full.iter().all(|name| name.contains(".norm_")), "{full:?}");
        assert_eq!(full.len(), 5 * 4 + 20 * 2);
    }
}
