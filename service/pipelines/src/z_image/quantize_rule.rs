//! Quantization rules of Z-Image: which tensors are quantized at load, and which may be stored quantized.
//!
//! - **transformer**: attention and feed-forward of every block. Not modulations (a fiftieth of the bytes, on which
//!   every value of each step depends), nor the layers before and after the blocks.
//! - **text_encoder** (Qwen3): attention and feed-forward. Not the token embedding.
//! - **vae**: the same as for FLUX.
//!
//! Norms, biases and pad tokens stay in full precision everywhere.

use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::{autoencoders, text};

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
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    let last = layer.rsplit('.').next().unwrap_or(layer);
    let is_norm = last.starts_with("norm_") || last.ends_with("norm1") || last.ends_with("norm2");
    if is_norm || layer == "cap_embedder.0" {
        return QuantizeRole::Full;
    }
    match layer.contains(".attention.") || layer.contains(".feed_forward.") {
        true => QuantizeRole::Quantized,
        false => QuantizeRole::AsStored,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::TransformerConfig;
    use super::*;
    use crate::text::qwen3::Qwen3Config;

    fn named(
        role: QuantizeRole,
        of: impl IntoIterator<Item = (String, Vec<usize>)>,
        rule: RoleOf,
    ) -> Vec<String> {
        let names = of.into_iter().map(|(name, _)| name);
        names.filter(|name| rule(name) == role).collect()
    }

    #[test]
    fn the_rule_leaves_the_listed_tensors_in_full_precision() {
        let config = TransformerConfig::default();
        let wide = named(QuantizeRole::AsStored, config.tensor_shapes(), of_transformer);
        let mut outside: Vec<&String> = wide
            .iter()
            .filter(|name| !name.contains(".adaLN_modulation.0."))
            .collect();
        outside.sort();
        assert_eq!(
            outside,
            [
                "all_final_layer.2-1.adaLN_modulation.1.weight",
                "all_final_layer.2-1.linear.weight",
                "all_x_embedder.2-1.weight",
                "cap_embedder.1.weight",
                "t_embedder.mlp.0.weight",
                "t_embedder.mlp.2.weight",
            ]
        );
        // Blocks: four attention layers, three of the feed-forward each.
        let quantized = named(QuantizeRole::Quantized, config.tensor_shapes(), of_transformer);
        assert_eq!(quantized.len(), 34 * 7);
        let full = named(QuantizeRole::Full, config.tensor_shapes(), of_transformer);
        let kept = ["norm", ".bias", "_pad_token", "cap_embedder.0"];
        assert!(
            full.iter()
                .all(|name| kept.iter().any(|kept| name.contains(kept))),
            "{full:?}"
        );
        let encoder = Qwen3Config::qwen3_4b().tensor_shapes(35, &|_| false);
        let full = named(QuantizeRole::Full, encoder, text::qwen3::role);
        assert_eq!(full.len(), 1 + 4 * 35);
        assert!(
            full.iter()
                .all(|name| name.contains("norm") || name.contains("embed_tokens")),
            "{full:?}"
        );
    }
}
