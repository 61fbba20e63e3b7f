//! Tensor names of Black Forest Labs' own checkpoint, `ae.safetensors`.

/// Number of resolutions of FLUX's autoencoder. BFL numbers the decoder's blocks from the picture, diffusers from the
/// latent.
const RESOLUTIONS: usize = 4;

/// The diffusers name of a tensor of a single file: in Black Forest Labs' names or in diffusers', with or without the prefixes
/// that programs add.
pub(crate) fn name_in_single_file(name: &str) -> Option<String> {
    let mut prefixes = ["first_stage_model.", "vae."].into_iter();
    let name = prefixes
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name);
    // FLUX.2's authors keep these convolutions in the encoder and the decoder.
    for half in ["encoder.quant_conv.", "decoder.post_quant_conv."] {
        if let Some((_, own)) = name.split_once('.').filter(|_| name.starts_with(half)) {
            return Some(own.to_owned());
        }
    }
    diffusers_name_of_bfl(name).or_else(|| Some(name.to_owned()))
}

/// The diffusers name of a tensor of `ae.safetensors`; `None` for an unknown name.
///
/// The attention's `q`, `k`, `v` and `proj_out` are 1x1 convolutions `[C, C, 1, 1]` there and linear layers `[C, C]`
/// in diffusers: the layers here accept either shape.
pub fn diffusers_name_of_bfl(name: &str) -> Option<String> {
    let (half, rest) = name.split_once('.')?;
    if half != "encoder" && half != "decoder" {
        return None;
    }
    let (path, kind) = rest.rsplit_once('.')?;
    if kind != "weight" && kind != "bias" {
        return None;
    }
    let parts: Vec<&str> = path.split('.').collect();
    let translated = match parts.as_slice() {
        ["conv_in"] => "conv_in".to_owned(),
        ["conv_out"] => "conv_out".to_owned(),
        ["norm_out"] => "conv_norm_out".to_owned(),
        ["mid", "block_1", layer] => format!("mid_block.resnets.0.{}", resnet_layer(layer)?),
        ["mid", "block_2", layer] => format!("mid_block.resnets.1.{}", resnet_layer(layer)?),
        ["mid", "attn_1", layer] => format!("mid_block.attentions.0.{}", attention_layer(layer)?),
        ["down", level, "block", block, layer] if half == "encoder" => {
            format!(
                "down_blocks.{}.resnets.{}.{}",
                resolution(level)?,
                index(block)?,
                resnet_layer(layer)?
            )
        }
        ["down", level, "downsample", "conv"] if half == "encoder" => {
            format!("down_blocks.{}.downsamplers.0.conv", resolution(level)?)
        }
        ["up", level, "block", block, layer] if half == "decoder" => {
            let level = RESOLUTIONS - 1 - resolution(level)?;
            format!(
                "up_blocks.{level}.resnets.{}.{}",
                index(block)?,
                resnet_layer(layer)?
            )
        }
        ["up", level, "upsample", "conv"] if half == "decoder" => {
            format!(
                "up_blocks.{}.upsamplers.0.conv",
                RESOLUTIONS - 1 - resolution(level)?
            )
        }
        _ => return None,
    };
    Some(format!("{half}.{translated}.{kind}"))
}

fn resnet_layer(layer: &str) -> Option<&str> {
    match layer {
        "norm1" | "conv1" | "norm2" | "conv2" => Some(layer),
        "nin_shortcut" => Some("conv_shortcut"),
        _ => None,
    }
}

fn attention_layer(layer: &str) -> Option<&'static str> {
    match layer {
        "norm" => Some("group_norm"),
        "q" => Some("to_q"),
        "k" => Some("to_k"),
        "v" => Some("to_v"),
        "proj_out" => Some("to_out.0"),
        _ => None,
    }
}

fn index(text: &str) -> Option<usize> {
    text.parse().ok()
}

fn resolution(text: &str) -> Option<usize> {
    index(text).filter(|level| *level < RESOLUTIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_file_has_the_names_of_its_authors_or_of_diffusers_after_any_prefix() {
        let ours = "decoder.mid_block.resnets.0.conv1.weight";
        for theirs in [
            "decoder.mid.block_1.conv1.weight",
            "first_stage_model.decoder.mid.block_1.conv1.weight",
            "vae.decoder.mid.block_1.conv1.weight",
            ours,
            "vae.decoder.mid_block.resnets.0.conv1.weight",
        ] {
            assert_eq!(name_in_single_file(theirs).as_deref(), Some(ours), "{theirs}");
        }
    }
}
