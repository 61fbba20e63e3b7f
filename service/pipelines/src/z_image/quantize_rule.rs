//! The written rule of what is quantized at load, and of what may be held quantized at all.
//!
//! - **transformer**: attention and feed-forward of every block. Not modulations (a fiftieth of the bytes, through which
//!   each step's every number goes), nor what stands before and behind the blocks.
//! - **text_encoder** (Qwen3): attention and feed-forward. Not the table of tokens.
//! - **vae**: what FLUX's rule says of it.
//!
//! Norms, biases and pad tokens stay in full precision everywhere.

use crate::checkpoint::{Role, RoleOf};
use crate::{autoencoder_kl, text};

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        "transformer" => of_transformer,
        "text_encoder" => text::qwen3::role,
        "vae" => autoencoder_kl::role,
        _ => |_| Role::Full,
    }
}

/// The role of a tensor of the transformer, by its name in diffusers.
fn of_transformer(name: &str) -> Role {
    let Some(layer) = name.strip_suffix(".weight") else {
        return Role::Full;
    };
    let last = layer.rsplit('.').next().unwrap_or(layer);
    let is_norm = last.starts_with("norm_") || last.ends_with("norm1") || last.ends_with("norm2");
    if is_norm || layer == "cap_embedder.0" {
        return Role::Full;
    }
    match layer.contains(".attention.") || layer.contains(".feed_forward.") {
        true => Role::Quantized,
        false => Role::AsStored,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::TransformerConfig;
    use super::*;
    use crate::text::qwen3::Qwen3Config;

    fn named(role: Role, of: impl IntoIterator<Item = (String, Vec<usize>)>, rule: RoleOf) -> Vec<String> {
        let names = of.into_iter().map(|(name, _)| name);
        names.filter(|name| rule(name) == role).collect()
    }

    #[test]
    fn what_is_left_in_full_precision_is_what_is_written() {
        let config = TransformerConfig::default();
        let wide = named(Role::AsStored, config.tensor_shapes(), of_transformer);
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
        // Blocks: four layers of attention, three of feed-forward each.
        let quantized = named(Role::Quantized, config.tensor_shapes(), of_transformer);
        assert_eq!(quantized.len(), 34 * 7);
        let full = named(Role::Full, config.tensor_shapes(), of_transformer);
        let kept = ["norm", ".bias", "_pad_token", "cap_embedder.0"];
        assert!(
            full.iter()
                .all(|name| kept.iter().any(|kept| name.contains(kept))),
            "{full:?}"
        );
        let encoder = Qwen3Config::qwen3_4b().tensor_shapes(35, &|_| false);
        let full = named(Role::Full, encoder, text::qwen3::role);
        assert_eq!(full.len(), 1 + 4 * 35);
        assert!(
            full.iter()
                .all(|name| name.contains("norm") || name.contains("embed_tokens")),
            "{full:?}"
        );
    }
}
