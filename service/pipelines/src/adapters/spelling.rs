//! How programs name the tensors of adapters.
//!
//! | program | names of a layer `L` |
//! |---|---|
//! | diffusers, peft, ai-toolkit | `L.lora_A.weight`, `L.lora_B.weight`, also with `.default` |
//! | kohya, OneTrainer, ComfyUI | `L.lora_down.weight`, `L.lora_up.weight`, `L.alpha`, with `_` for `.` in `L` |
//! | older diffusers | `L.lora.down.weight`, `L_lora.up.weight` |
//! | XLabs | `L.down.weight`, `L.up.weight` |

use super::AdapterError;

/// Part of an adapter's pair that a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PairPart {
    /// `[rank, inputs]`.
    Down,
    /// `[outputs, rank]`.
    Up,
    /// A number: the scale of the pair is this by the rank.
    Alpha,
}

/// Endings of the names of supported tensors.
const ENDINGS: [(&str, PairPart); 17] = [
    (".lora_A.default.weight", PairPart::Down),
    (".lora_B.default.weight", PairPart::Up),
    (".lora_A.weight", PairPart::Down),
    (".lora_B.weight", PairPart::Up),
    (".lora_A.default", PairPart::Down),
    (".lora_B.default", PairPart::Up),
    (".lora_A", PairPart::Down),
    (".lora_B", PairPart::Up),
    (".lora_down.weight", PairPart::Down),
    (".lora_up.weight", PairPart::Up),
    (".lora.down.weight", PairPart::Down),
    (".lora.up.weight", PairPart::Up),
    ("_lora.down.weight", PairPart::Down),
    ("_lora.up.weight", PairPart::Up),
    (".down.weight", PairPart::Down),
    (".up.weight", PairPart::Up),
    (".alpha", PairPart::Alpha),
];

/// Parts of names by which unsupported kinds are known.
const UNSUPPORTED: [(&str, &str); 18] = [
    ("lokr_", "LoKr"),
    ("hada_", "LoHa"),
    ("dora_scale", "DoRA"),
    ("lora_magnitude_vector", "DoRA"),
    ("lora_mid", "LoCon with a middle convolution"),
    ("lora_embedding_", "an adapter of an embedding"),
    ("boft_", "BOFT"),
    ("oft_", "OFT"),
    ("vera_", "VeRA"),
    ("glora", "GLoRA"),
    (".a1.weight", "GLoRA"),
    ("ia3_l", "IA3"),
    ("on_input", "IA3"),
    (".bias_", "a bias in a sparse form"),
    ("query_norm.scale", "a control adapter of Black Forest Labs"),
    ("key_norm.scale", "a control adapter of Black Forest Labs"),
    ("lora_B.bias", "a bias beside its pairs"),
    ("lora_up.bias", "a bias beside its pairs"),
];

/// Endings of names by which unsupported kinds are known.
const UNSUPPORTED_ENDINGS: [(&str, &str); 4] = [
    (".reshape_weight", "a layer of another shape"),
    (".set_weight", "a whole weight"),
    (".diff_b", "a difference of a bias"),
    (".diff", "a difference of a whole weight"),
];

/// The layers that a tensor may belong to, as the file names them, each with the tensor's part: one for each known ending.
///
/// # Errors
/// [`AdapterError::Unsupported`] for a kind that is known and not supported.
pub(super) fn layers_and_parts(tensor: &str) -> Result<impl Iterator<Item = (&str, PairPart)>, AdapterError> {
    let mut parts = UNSUPPORTED.iter();
    let mut endings = UNSUPPORTED_ENDINGS.iter();
    let known = parts
        .find(|(part, _)| tensor.contains(part))
        .or_else(|| endings.find(|(ending, _)| tensor.ends_with(ending)));
    if let Some((_, kind)) = known {
        return Err(AdapterError::Unsupported {
            kind,
            tensor: tensor.to_owned(),
        });
    }
    let known = ENDINGS.iter();
    Ok(known.filter_map(move |(ending, part)| Some((tensor.strip_suffix(ending)?, *part))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(tensor: &str) -> Option<&'static str> {
        match layers_and_parts(tensor) {
            Err(AdapterError::Unsupported { kind, .. }) => Some(kind),
            _ => None,
        }
    }

    #[test]
    fn a_name_prefix_is_not_detected_as_a_weight_difference() {
        let layer = "model.diffusion_model.double_blocks.0.img_mlp.0";
        assert_eq!(kind(&format!("{layer}.lora_A.weight")), None);
        assert_eq!(
            kind(&format!("{layer}.diff")),
            Some("a difference of a whole weight")
        );
        assert_eq!(kind(&format!("{layer}.diff_b")), Some("a difference of a bias"));
    }

    #[test]
    fn boft_is_not_detected_as_oft() {
        assert_eq!(kind("double_blocks.0.img_mlp.0.boft_R"), Some("BOFT"));
        assert_eq!(kind("double_blocks.0.img_mlp.0.oft_R"), Some("OFT"));
    }
}
