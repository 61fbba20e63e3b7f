//! Quantization rules of ACE-Step: which tensors are quantized at load, and which may be stored quantized.
//!
//! - **transformer**, **condition_encoder**, **audio_tokenizer**, **audio_token_detokenizer**: attention and feed-forward of
//!   every layer. Not the embeddings of time, on which every value of each step depends, nor the layers before and after
//!   the blocks.
//! - **text_encoder** (Qwen3): attention and feed-forward. Not the token embedding.
//! - **vae**: nothing.

use super::model::{CONDITION_ENCODER, DETOKENIZER, TEXT_ENCODER, TOKENIZER, TRANSFORMER, VAE};
use crate::autoencoders::oobleck;
use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::text;

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        TRANSFORMER | CONDITION_ENCODER | TOKENIZER | DETOKENIZER => of_layers,
        TEXT_ENCODER => text::qwen3::role,
        VAE => oobleck::role,
        _ => |_| QuantizeRole::Full,
    }
}

/// Layers outside of blocks, whose weights are matrices.
const OUTSIDE: [&str; 7] = [
    "time_embed",
    "condition_embedder",
    "text_projector",
    "embed_tokens",
    "audio_acoustic_proj",
    "proj_out",
    "quantizer",
];

/// The role of a tensor, by its name in diffusers.
fn of_layers(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    let last = layer.rsplit('.').next().unwrap_or(layer);
    let is_norm = last.contains("norm") || last.ends_with("_conv");
    if is_norm || layer.starts_with("quantizer.") {
        return QuantizeRole::Full;
    }
    if layer.contains("_attn.") || layer.contains(".mlp.") {
        return QuantizeRole::Quantized;
    }
    match OUTSIDE.iter().any(|outside| layer.contains(outside)) {
        true => QuantizeRole::AsStored,
        false => QuantizeRole::Full,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::{ConditionConfig, TransformerConfig};
    use super::*;

    #[test]
    fn attention_and_feed_forward_of_every_layer_are_quantized() {
        let quantized = |shapes: Vec<(String, Vec<usize>)>| {
            let names = shapes.into_iter().map(|(name, _)| name);
            names
                .filter(|name| of_layers(name) == QuantizeRole::Quantized)
                .count()
        };
        // Four matrices of each attention, three of each feed-forward.
        assert_eq!(quantized(TransformerConfig::default().tensor_shapes()), 24 * 11);
        assert_eq!(quantized(ConditionConfig::default().tensor_shapes()), 12 * 7);
        for name in [
            "proj_in_conv.weight",
            "layers.0.self_attn.norm_q.weight",
            "layers.0.mlp_norm.weight",
        ] {
            assert_eq!(of_layers(name), QuantizeRole::Full, "{name}");
        }
        assert_eq!(of_layers("time_embed.time_proj.weight"), QuantizeRole::AsStored);
    }
}
