//! Names and shapes of the fusion model's tensors. Each branch is under its own name, and has the names of Wan's transformer in
//! it: those of diffusers here, and in files those of Wan's authors, with which Ovi's differ in few.

use gpu::BlockPlace;

use super::config::{BranchConfig, FusionConfig};
use crate::checkpoint::{Layout, QuantizeRole, TensorSpec, numbered};
use crate::wan::{self, shape};

/// Names of the branches.
pub(crate) const VIDEO: &str = "video_model";
pub(crate) const AUDIO: &str = "audio_model";

/// Taps of the convolutions that embed sound.
pub(super) const TAPS: usize = 7;

/// The three layers of the gated convolution that embeds sound: gate, output, and what is gated.
pub(super) const GATED: [&str; 3] = ["w1", "w2", "w3"];

/// All tensors of a model of this configuration.
pub(crate) fn layout(config: &FusionConfig) -> Vec<TensorSpec> {
    let mut all = Vec::new();
    for (branch, of, token, embedding) in [
        (VIDEO, &config.video, config.token_width(), of_patches(config)),
        (AUDIO, &config.audio, config.audio.out_dim, of_sound(config)),
    ] {
        let specs = embedding.into_iter().chain(of_branch(of, token));
        all.extend(specs.map(|spec| TensorSpec {
            name: format!("{branch}.{}", spec.name),
            tensor: format!("{branch}.{}", spec.tensor),
            ..spec
        }));
    }
    all
}

/// The tensors of a branch, without those that embed its latent; a token of its velocity has this width.
fn of_branch(config: &BranchConfig, token_width: usize) -> Vec<TensorSpec> {
    let width = config.dim;
    let of_wan = wan::TransformerConfig {
        num_attention_heads: config.num_heads,
        attention_head_dim: width / config.num_heads,
        in_channels: config.in_dim,
        out_channels: config.out_dim,
        text_dim: config.text_dim,
        freq_dim: config.freq_dim,
        ffn_dim: config.ffn_dim,
        num_layers: config.num_layers,
        ..wan::TransformerConfig::default()
    };
    let specs = wan::layout(&of_wan).into_iter();
    let is_shared = |spec: &TensorSpec| {
        !["patch_embedding.", "proj_out."]
            .iter()
            .any(|other| spec.name.starts_with(other))
    };
    let specs = specs.filter(is_shared);
    let renamed = specs.map(|spec| match numbered(&spec.tensor, "blocks.") {
        // A table of a block is a module's own tensor here.
        Some((_, "modulation")) => TensorSpec {
            tensor: format!("{}.modulation", spec.tensor),
            ..spec
        },
        _ => spec,
    });
    let mut list = Layout(renamed.collect());
    list.linear("proj_out", [token_width, width], "head.head", 0);
    for block in 0..config.num_layers {
        let (name, theirs) = (
            format!("blocks.{block}.attn2"),
            format!("blocks.{block}.cross_attn"),
        );
        for layer in ["k_fusion", "v_fusion"] {
            list.linear(
                &format!("{name}.{layer}"),
                [width, width],
                &format!("{theirs}.{layer}"),
                0,
            );
        }
        for tensor in [
            "pre_attn_norm_fusion.weight",
            "pre_attn_norm_fusion.bias",
            "norm_k_fusion.weight",
        ] {
            let (name, theirs) = (format!("{name}.{tensor}"), format!("{theirs}.{tensor}"));
            list.rows(&name, vec![width], &theirs, 0);
        }
    }
    list.0
}

/// The embedding of patches of the film.
fn of_patches(config: &FusionConfig) -> Vec<TensorSpec> {
    let (width, channels) = (config.video.dim, config.video.in_dim);
    let mut list = Layout::default();
    list.same("patch_embedding.weight", &[width, channels, 1, 2, 2]);
    list.same("patch_embedding.bias", &[width]);
    list.0
}

/// The embedding of frames of the sound.
fn of_sound(config: &FusionConfig) -> Vec<TensorSpec> {
    let (width, inner) = (config.audio.dim, config.gate_width());
    let mut list = Layout::default();
    list.same("patch_embedding.0.weight", &[width, config.audio.in_dim, TAPS]);
    list.same("patch_embedding.0.bias", &[width]);
    for layer in GATED {
        let sides = match layer {
            "w2" => [width, inner, TAPS],
            _ => [inner, width, TAPS],
        };
        list.same(&format!("patch_embedding.2.{layer}.weight"), &sides);
    }
    list.0
}

impl FusionConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let shapes = layout(self).into_iter().map(|spec| (spec.name, spec.shape));
        shapes.collect()
    }

    /// The same under the authors' names.
    pub fn authors_tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let shapes = layout(self).into_iter().map(|spec| (spec.tensor, spec.shape));
        shapes.collect()
    }
}

/// A name without that of its branch.
fn within(name: &str) -> &str {
    let branch = [VIDEO, AUDIO].iter().find_map(|branch| name.strip_prefix(branch));
    branch.and_then(|rest| rest.strip_prefix('.')).unwrap_or(name)
}

/// The block of a tensor: the blocks of both branches with the same number run together.
pub(crate) fn block_of(name: &str) -> Option<BlockPlace> {
    shape::block_of(within(name))
}

/// Whether a tensor is of a layer over a text, which steps do not use.
pub(super) fn is_of_text(name: &str) -> bool {
    shape::is_of_text(name)
}

/// The quantization role of a tensor: as in Wan's transformer. The embedding of sound is in full precision too.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let name = within(name);
    match name.starts_with("patch_embedding.") || name.contains("norm_fusion") {
        true => QuantizeRole::Full,
        false => shape::role(name),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_published_model_has_its_published_tensors() {
        let shapes = FusionConfig::default().authors_tensor_shapes();
        let count = |branch: &str| -> usize {
            let of = shapes.iter().filter(|(name, _)| name.starts_with(branch));
            of.map(|(_, shape)| shape.iter().product::<usize>()).sum()
        };
        assert_eq!(shapes.len(), 2073);
        assert_eq!((count(VIDEO) / 1_000_000, count(AUDIO) / 1_000_000), (5566, 6094));
        let names: BTreeSet<&str> = shapes.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), shapes.len());
        for name in [
            "audio_model.blocks.29.modulation.modulation",
            "video_model.head.modulation",
            "video_model.blocks.0.norm3.weight",
            "audio_model.blocks.0.cross_attn.norm_k_fusion.weight",
            "audio_model.patch_embedding.2.w3.weight",
        ] {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn blocks_are_quantized_and_nothing_else() {
        for (name, shape) in FusionConfig::default().tensor_shapes() {
            let is_quantized = role(&name) == QuantizeRole::Quantized;
            let is_layer = name.contains(".blocks.") && name.ends_with(".weight") && shape.len() == 2;
            assert_eq!(is_quantized, is_layer, "{name}");
            let is_in_block = name.contains(".blocks.") && !name.ends_with("table");
            assert_eq!(block_of(&name).is_some(), is_in_block, "{name}");
        }
    }
}
