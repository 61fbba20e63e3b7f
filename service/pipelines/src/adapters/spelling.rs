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

/// Parts of tensors' names that mark a kind which changes the meaning of a pair: without these tensors the rest would be wrong.
const CHANGING: [(&str, &str); 5] = [
    ("dora_scale", "DoRA"),
    ("lora_magnitude_vector", "DoRA"),
    ("lora_mid", "LoCon with a middle convolution"),
    ("query_norm.scale", "a control adapter of Black Forest Labs"),
    ("key_norm.scale", "a control adapter of Black Forest Labs"),
];

/// Parts of tensors' names that mark a separate kind: the rest of the adapter means the same without these tensors.
const SEPARATE: [(&str, &str); 13] = [
    ("lokr_", "LoKr"),
    ("hada_", "LoHa"),
    ("lora_embedding_", "an adapter of an embedding"),
    ("boft_", "BOFT"),
    ("oft_", "OFT"),
    ("vera_", "VeRA"),
    ("glora", "GLoRA"),
    (".a1.weight", "GLoRA"),
    ("ia3_l", "IA3"),
    ("on_input", "IA3"),
    (".bias_", "a bias in a sparse form"),
    ("lora_B.bias", "a bias beside its pairs"),
    ("lora_up.bias", "a bias beside its pairs"),
];

/// As [`CHANGING`], by endings.
const CHANGING_ENDINGS: [(&str, &str); 2] = [
    (".reshape_weight", "a layer of another shape"),
    (".set_weight", "a whole weight"),
];

/// As [`SEPARATE`], by endings.
const SEPARATE_ENDINGS: [(&str, &str); 2] = [
    (".diff_b", "a difference of a bias"),
    (".diff", "a difference of a whole weight"),
];

/// A kind of tensors that is known and not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnsupportedKind {
    /// For display: `LoKr`, `DoRA`.
    pub(super) name: &'static str,
    /// Whether the rest of the adapter means the same without these tensors.
    pub(super) is_separate: bool,
}

impl UnsupportedKind {
    /// The refusal of this tensor.
    pub(super) fn refusal(self, tensor: &str) -> AdapterError {
        AdapterError::Unsupported {
            kind: self.name,
            tensor: tensor.to_owned(),
        }
    }
}

/// The unsupported kind of a tensor; `None` if its kind is supported or unknown.
pub(super) fn unsupported_kind(tensor: &str) -> Option<UnsupportedKind> {
    let part = |kinds: &[(&str, &'static str)]| {
        kinds
            .iter()
            .find(|(part, _)| tensor.contains(part))
            .map(|(_, name)| *name)
    };
    let ending = |kinds: &[(&str, &'static str)]| {
        kinds
            .iter()
            .find(|(end, _)| tensor.ends_with(end))
            .map(|(_, name)| *name)
    };
    let changing = part(&CHANGING).or_else(|| ending(&CHANGING_ENDINGS));
    let separate = || part(&SEPARATE).or_else(|| ending(&SEPARATE_ENDINGS));
    Some(UnsupportedKind {
        name: changing.or_else(separate)?,
        is_separate: changing.is_none(),
    })
}

/// The layers that a tensor may belong to, as the file names them, each with the tensor's part: one for each known ending.
pub(super) fn layers_and_parts(tensor: &str) -> impl Iterator<Item = (&str, PairPart)> {
    let known = ENDINGS.iter();
    known.filter_map(move |(ending, part)| Some((tensor.strip_suffix(ending)?, *part)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(tensor: &str) -> Option<&'static str> {
        unsupported_kind(tensor).map(|kind| kind.name)
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
