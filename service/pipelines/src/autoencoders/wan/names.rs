//! Names of the authors' own checkpoints (`Wan2.1_VAE.pth`, `Wan2.2_VAE.pth`), which ComfyUI's single files have too.

/// Layers of a resolution of the decoder of Wan 2.1, which are numbered through: three residual blocks, and one that enlarges.
const LAYERS_OF_LEVEL: usize = 4;

/// The diffusers name of a tensor of the authors' checkpoints, with or without a prefix `vae.`, `first_stage_model.` or
/// `model.`. A name of diffusers stays as it is. `None` for a name of none of the parts of the autoencoder.
pub fn diffusers_name_of_original(name: &str) -> Option<String> {
    let prefixes = ["first_stage_model.", "vae.", "model."];
    let name = prefixes
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name);
    let (part, rest) = name.split_once('.')?;
    match part {
        "conv1" => return Some(format!("quant_conv.{rest}")),
        "conv2" => return Some(format!("post_quant_conv.{rest}")),
        "quant_conv" | "post_quant_conv" => return Some(name.to_owned()),
        "encoder" | "decoder" => {}
        _ => return None,
    }
    let (layer, rest) = rest.split_once('.')?;
    let rest = match layer {
        "conv1" => format!("conv_in.{rest}"),
        "head" => match rest.split_once('.')? {
            ("0", leaf) => format!("norm_out.{leaf}"),
            ("2", leaf) => format!("conv_out.{leaf}"),
            _ => return None,
        },
        "middle" => match rest.split_once('.')? {
            ("0", rest) => format!("mid_block.resnets.0.{}", of_resnet(rest)?),
            ("1", rest) => format!("mid_block.attentions.0.{rest}"),
            ("2", rest) => format!("mid_block.resnets.1.{}", of_resnet(rest)?),
            _ => return None,
        },
        "downsamples" => of_level(rest, "down", part)?,
        "upsamples" => of_level(rest, "up", part)?,
        _ => return Some(name.to_owned()),
    };
    Some(format!("{part}.{rest}"))
}

/// A layer of `downsamples` or `upsamples`: numbered through in Wan 2.1, by resolution in Wan 2.2.
fn of_level(rest: &str, way: &str, part: &str) -> Option<String> {
    let (number, rest) = rest.split_once('.')?;
    let number: usize = number.parse().ok()?;
    let by_level = rest.strip_prefix(&format!("{way}samples."));
    if let Some(within) = by_level {
        let (layer, rest) = within.split_once('.')?;
        let level = format!("{way}_blocks.{number}");
        return Some(match is_resizing(rest) {
            true => format!("{level}.{way}sampler.{rest}"),
            false => format!("{level}.resnets.{layer}.{}", of_resnet(rest)?),
        });
    }
    if part == "encoder" {
        return Some(match is_resizing(rest) {
            true => format!("down_blocks.{number}.{rest}"),
            false => format!("down_blocks.{number}.{}", of_resnet(rest)?),
        });
    }
    let (level, layer) = (number / LAYERS_OF_LEVEL, number % LAYERS_OF_LEVEL);
    Some(match is_resizing(rest) {
        true => format!("up_blocks.{level}.upsamplers.0.{rest}"),
        false => format!("up_blocks.{level}.resnets.{layer}.{}", of_resnet(rest)?),
    })
}

fn is_resizing(rest: &str) -> bool {
    rest.starts_with("resample.") || rest.starts_with("time_conv.")
}

fn of_resnet(rest: &str) -> Option<String> {
    if let Some(leaf) = rest.strip_prefix("shortcut.") {
        return Some(format!("conv_shortcut.{leaf}"));
    }
    let (number, leaf) = rest.strip_prefix("residual.")?.split_once('.')?;
    let layer = match number {
        "0" => "norm1",
        "2" => "conv1",
        "3" => "norm2",
        "6" => "conv2",
        _ => return None,
    };
    Some(format!("{layer}.{leaf}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::WanVaeConfig;
    use super::*;

    type Shapes = BTreeMap<String, Vec<usize>>;

    /// Names and shapes of the authors' classes, by their version.
    fn of_authors() -> BTreeMap<String, Shapes> {
        let text = include_str!("../../../fixtures/wan-vae-tiny/authors.json");
        serde_json::from_str(text).expect("a fixture")
    }

    #[test]
    fn the_authors_files_have_the_configuration_and_the_tensors_of_diffusers() {
        let of_authors = of_authors();
        let versions = [("2.1", WanVaeConfig::default()), ("2.2", WanVaeConfig::wan_2_2())];
        for (version, config) in versions {
            for prefix in ["", "vae.", "first_stage_model.", "model."] {
                let renamed: Shapes = of_authors[version]
                    .iter()
                    .map(|(name, shape)| {
                        let found = diffusers_name_of_original(&format!("{prefix}{name}"));
                        (found.expect("a name"), shape.clone())
                    })
                    .collect();
                let found = WanVaeConfig::of_shapes(|name| renamed.get(name).cloned());
                assert_eq!(found.as_ref(), Some(&config));
                assert_eq!(renamed, config.tensor_shapes().into_iter().collect());
            }
            for (name, _) in config.tensor_shapes() {
                assert_eq!(diffusers_name_of_original(&name), Some(name));
            }
        }
        // Narrower ones are known by their shapes.
        let narrow = WanVaeConfig {
            base_dim: 32,
            ..WanVaeConfig::default()
        };
        let shapes: Shapes = narrow.tensor_shapes().into_iter().collect();
        assert_eq!(
            WanVaeConfig::of_shapes(|name| shapes.get(name).cloned()),
            Some(narrow)
        );
        let other = WanVaeConfig {
            z_dim: 8,
            ..WanVaeConfig::default()
        };
        let shapes: Shapes = other.tensor_shapes().into_iter().collect();
        assert_eq!(WanVaeConfig::of_shapes(|name| shapes.get(name).cloned()), None);
    }

    #[test]
    fn other_names_have_none() {
        for strange in [
            "",
            "decoder",
            "transformer.x",
            "vae.",
            "blocks.0.self_attn.q.weight",
            "encoder.head.1.weight",
            "encoder.middle.3.residual.0.gamma",
            "decoder.upsamples.x.residual.0.gamma",
            "decoder.upsamples.0.residual.1.gamma",
        ] {
            assert_eq!(diffusers_name_of_original(strange), None, "{strange}");
        }
    }
}
