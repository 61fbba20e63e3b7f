//! Quantization roles of the tensors of an autoencoder of pictures or of films.

use crate::checkpoint::QuantizeRole;

/// Convolutions and linear layers may be quantized, except for the first and the last.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    // A causal convolution is a layer that contains one named `conv`.
    let layer = layer.strip_suffix(".conv").unwrap_or(layer);
    match layer.rsplit('.').next().unwrap_or(layer) {
        norm if norm.contains("norm") => QuantizeRole::Full,
        "conv_in" | "conv_out" => QuantizeRole::AsStored,
        _ => QuantizeRole::Quantized,
    }
}

#[cfg(test)]
mod tests {
    use super::super::hunyuan::HunyuanVaeConfig;
    use super::super::kl::VaeConfig;
    use super::super::wan::WanVaeConfig;
    use super::*;

    #[test]
    fn the_first_and_the_last_layers_are_left_as_stored() {
        let ends = [
            "encoder.conv_in",
            "encoder.conv_out",
            "decoder.conv_in",
            "decoder.conv_out",
        ];
        for (shapes, conv) in [
            (VaeConfig::flux().tensor_shapes(), ""),
            (HunyuanVaeConfig::default().tensor_shapes(), ".conv"),
        ] {
            let of = |wanted: QuantizeRole| -> Vec<&str> {
                let names = shapes.iter().map(|(name, _)| name.as_str());
                names.filter(|name| role(name) == wanted).collect()
            };
            let stored = ends.map(|layer| format!("{layer}{conv}.weight"));
            assert_eq!(of(QuantizeRole::AsStored), stored);
            let full = of(QuantizeRole::Full);
            assert!(
                full.iter()
                    .all(|name| name.contains("norm") || name.ends_with(".bias"))
            );
            let quantized = of(QuantizeRole::Quantized);
            assert!(quantized.contains(&"decoder.mid_block.attentions.0.to_out.0.weight"));
            let upsampler = format!("decoder.up_blocks.0.upsamplers.0.conv{conv}.weight");
            assert!(quantized.contains(&upsampler.as_str()));
        }
    }

    #[test]
    fn layers_of_wan_that_resize_may_be_quantized_and_norms_may_not() {
        for (name, expected) in [
            ("encoder.conv_in.weight", QuantizeRole::AsStored),
            ("decoder.conv_out.weight", QuantizeRole::AsStored),
            ("decoder.norm_out.gamma", QuantizeRole::Full),
            ("decoder.mid_block.attentions.0.norm.gamma", QuantizeRole::Full),
            (
                "decoder.up_blocks.0.upsampler.resample.1.bias",
                QuantizeRole::Full,
            ),
            (
                "decoder.up_blocks.0.upsampler.resample.1.weight",
                QuantizeRole::Quantized,
            ),
            (
                "decoder.up_blocks.0.upsampler.time_conv.weight",
                QuantizeRole::Quantized,
            ),
        ] {
            assert!(
                WanVaeConfig::wan_2_2()
                    .tensor_shapes()
                    .iter()
                    .any(|(known, _)| known == name)
            );
            assert_eq!(role(name), expected, "{name}");
        }
    }
}
