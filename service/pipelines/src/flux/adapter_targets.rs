//! The layers of FLUX that adapters may change.

use super::config::TransformerConfig;
use super::layout::{XLABS, layout};
use crate::adapters::TargetComponent;
use crate::checkpoint::{ComponentSet, whole};
use crate::text::clip::ClipConfig;
use crate::text::t5::T5Config;

/// Prefixes of CLIP's layers in files: diffusers, kohya, ComfyUI.
const CLIP: [&str; 5] = [
    "text_encoder.",
    "lora_te1_",
    "lora_te_",
    "text_encoders.clip_l.transformer.",
    "base_model.model.text_encoder.",
];

/// Prefixes of T5's.
const T5: [&str; 4] = [
    "text_encoder_2.",
    "lora_te3_",
    "lora_te2_",
    "text_encoders.t5xxl.transformer.",
];

/// The transformer and the text encoders, with the names of diffusers, Black Forest Labs, and XLabs.
pub(super) fn adapter_targets(
    transformer: &TransformerConfig,
    clip: &ClipConfig,
    t5: &T5Config,
    components: &ComponentSet,
) -> Vec<TargetComponent> {
    // Adapters have one last layer of a single block, whether the transformer's is split or not.
    let in_one = TransformerConfig {
        splits_last_layers: false,
        ..transformer.clone()
    };
    let mut denoiser = TargetComponent::denoiser("transformer", &layout(&in_one), XLABS, "");
    // XLabs' processors of single blocks have the first rows of a layer that is fused.
    let projections = 3 * transformer.width();
    for i in 0..transformer.num_single_layers {
        denoiser.alias_of_first_rows(
            &format!("single_blocks.{i}.processor.qkv_lora"),
            &format!("single_blocks.{i}.linear1"),
            projections,
        );
    }
    let clip = whole(clip.tensor_shapes(&|name| components.has_tensor("text_encoder", name)));
    let t5 = whole(t5.tensor_shapes(&|name| components.has_tensor("text_encoder_2", name)));
    vec![
        denoiser,
        TargetComponent::text_encoder("text_encoder", &CLIP, &clip, "text_model."),
        TargetComponent::text_encoder("text_encoder_2", &T5, &t5, ""),
    ]
}
