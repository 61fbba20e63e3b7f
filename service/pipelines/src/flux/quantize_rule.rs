//! Quantization rules of FLUX: which tensors are quantized at load, and which may be stored quantized.
//!
//! If a component is requested in a format, these of its tensors are quantized, and no others:
//!
//! - **transformer**: the weight of every linear layer in a block, of attention, feed-forward and modulation
//!   (`norm1.linear`, `norm1_context.linear`, a single block's `norm.linear`: a quarter of all weights, read once per
//!   request), and the last modulation, `norm_out.linear`. Not the other layers before and after the blocks
//!   (`x_embedder`, `context_embedder`, `time_text_embed`, `proj_out`): a third of a percent of the bytes, on which
//!   every value of the picture depends.
//! - **text_encoder_2** (T5): attention and feed-forward. Not the token embedding (`shared`), nor the relative
//!   position biases.
//! - **text_encoder** (CLIP): attention and feed-forward. Not the token and position embeddings.
//! - **vae**: convolutions and linear layers. Not `conv_in` and `conv_out`.
//!
//! Norms and biases stay in full precision everywhere.
//!
//! A checkpoint that is stored quantized is not bound by this list: any weight of a matrix product may be stored
//! quantized. Embeddings, norms and biases may not, except as unscaled fp8, which is read as a plain number type.

use crate::checkpoint::{QuantizeRole, RoleOf};
use crate::{autoencoders, mmdit, text};

/// The rule of a component.
pub(super) fn role_of(component: &str) -> RoleOf {
    match component {
        "transformer" => mmdit::role,
        "text_encoder_2" => text::t5::role,
        "text_encoder" => text::clip::role,
        "vae" => autoencoders::role,
        _ => |_| QuantizeRole::Full,
    }
}

#[cfg(test)]
mod tests {
    use gpu::{Fp8Scales, Target, WeightFormat};

    use super::super::config::TransformerConfig;
    use super::*;
    use crate::autoencoders::kl::VaeConfig;
    use crate::text::clip::ClipConfig;
    use crate::text::t5::T5Config;

    fn dev() -> TransformerConfig {
        TransformerConfig {
            guidance_embeds: true,
            ..TransformerConfig::default()
        }
    }

    /// Names of a component's tensors that the rule leaves in full precision.
    fn left(component: &str, shapes: impl IntoIterator<Item = (String, Vec<usize>)>) -> Vec<String> {
        let names = shapes.into_iter().map(|(name, _)| name);
        names
            .filter(|name| role_of(component)(name) != QuantizeRole::Quantized && !name.ends_with(".bias"))
            .collect()
    }

    #[test]
    fn the_published_transformer_has_the_documented_bytes() {
        let bytes = |format: WeightFormat| -> u64 {
            let held = |(name, shape): (String, Vec<usize>)| match role_of("transformer")(&name) {
                QuantizeRole::Quantized => Target::Quantized(format).bytes(&shape).0,
                QuantizeRole::AsStored | QuantizeRole::Full => {
                    Target::Full(candle_core::DType::BF16).bytes(&shape).0
                }
            };
            dev().tensor_shapes().map(held).sum()
        };
        for (format, most) in [
            (WeightFormat::Nf4, 6_770_000_000),
            (WeightFormat::Nf4Double, 6_300_000_000),
            (WeightFormat::Int8, 12_100_000_000),
            (WeightFormat::Fp8(Fp8Scales::Rows), 12_100_000_000),
        ] {
            let found = bytes(format);
            println!("{format}: {found}");
            assert!(found <= most && found > most / 10 * 9, "{format}: {found}");
        }
    }

    #[test]
    fn the_rule_leaves_the_listed_tensors_in_full_precision() {
        let of_transformer = left("transformer", dev().tensor_shapes());
        let of_transformer: Vec<_> = of_transformer
            .iter()
            .filter(|name| !name.contains(".attn.norm_"))
            .collect();
        assert_eq!(
            of_transformer,
            [
                "x_embedder.weight",
                "context_embedder.weight",
                "time_text_embed.timestep_embedder.linear_1.weight",
                "time_text_embed.timestep_embedder.linear_2.weight",
                "time_text_embed.guidance_embedder.linear_1.weight",
                "time_text_embed.guidance_embedder.linear_2.weight",
                "time_text_embed.text_embedder.linear_1.weight",
                "time_text_embed.text_embedder.linear_2.weight",
                "proj_out.weight",
            ]
        );
        let t5 = left("text_encoder_2", T5Config::default().tensor_shapes(&|_| true));
        assert!(
            t5.iter().all(|name| name.contains("layer_norm")
                || name.contains("relative_attention_bias")
                || name == "shared.weight"),
            "{t5:?}"
        );
        let clip = left("text_encoder", ClipConfig::default().tensor_shapes(&|_| true));
        assert!(
            clip.iter()
                .all(|name| name.contains("layer_norm") || name.contains("embedding")),
            "{clip:?}"
        );
        let vae = left("vae", VaeConfig::flux().tensor_shapes());
        assert!(
            vae.iter().all(|name| name.contains("norm")
                || name.ends_with("coder.conv_in.weight")
                || name.ends_with("coder.conv_out.weight")),
            "{vae:?}"
        );
        // Twelve layers of six weights, 24 of seven: all of them are quantized.
        assert_eq!(clip.len(), 2 + 2 * 12 + 1);
        assert_eq!(t5.len(), 2 + 2 * T5Config::default().num_layers + 1);
    }
}
