//! `transformer/config.json`.

use serde::Deserialize;

use crate::files::check_sizes;
use crate::mmdit::{BlocksShape, Design};

/// Configuration of the transformer: diffusers' `HunyuanVideoTransformer3DModel` and
/// `HunyuanVideoFramepackTransformer3DModel`; missing fields have those classes' defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Channels of the latent.
    pub in_channels: usize,
    /// Channels of the velocity; `in_channels` if missing.
    pub out_channels: Option<usize>,
    pub num_attention_heads: usize,
    pub attention_head_dim: usize,
    /// Number of double-stream blocks.
    pub num_layers: usize,
    /// Number of single-stream blocks.
    pub num_single_layers: usize,
    /// Number of blocks that refine the text.
    pub num_refiner_layers: usize,
    /// Width of the feed-forward layers in hidden widths; 4 is supported.
    pub mlp_ratio: f64,
    /// Latent cells per token along height and width; 2 is supported.
    pub patch_size: usize,
    /// Latent frames per token; 1 is supported.
    pub patch_size_t: usize,
    /// Norm of queries and keys; `rms_norm` is supported.
    pub qk_norm: String,
    /// Whether guidance is an input.
    pub guidance_embeds: bool,
    /// Width of the text encoder's states.
    pub text_embed_dim: usize,
    /// Width of the pooled text.
    pub pooled_projection_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Widths of the rotary axes in a head: frames, rows, columns.
    pub rope_axes_dim: [usize; 3],
    /// How a picture conditions the first frame in HunyuanVideo's picture to film, which is not supported.
    pub image_condition_type: Option<String>,
    /// FramePack: whether states of a picture encoder precede the text.
    #[serde(deserialize_with = "flag")]
    pub has_image_proj: bool,
    /// Width of the picture encoder's states.
    pub image_proj_dim: usize,
    /// FramePack: whether frames sampled before are an input.
    #[serde(deserialize_with = "flag")]
    pub has_clean_x_embedder: bool,
}

/// A flag that published configurations write as a number, too.
fn flag<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Flag {
        Bool(bool),
        Number(u8),
    }
    Ok(match Flag::deserialize(deserializer)? {
        Flag::Bool(flag) => flag,
        Flag::Number(number) => number != 0,
    })
}

impl Default for TransformerConfig {
    fn default() -> TransformerConfig {
        TransformerConfig {
            in_channels: 16,
            out_channels: None,
            num_attention_heads: 24,
            attention_head_dim: 128,
            num_layers: 20,
            num_single_layers: 40,
            num_refiner_layers: 2,
            mlp_ratio: 4.0,
            patch_size: 2,
            patch_size_t: 1,
            qk_norm: "rms_norm".to_owned(),
            guidance_embeds: true,
            text_embed_dim: 4096,
            pooled_projection_dim: 768,
            rope_theta: 256.0,
            rope_axes_dim: [16, 56, 56],
            image_condition_type: None,
            has_image_proj: false,
            image_proj_dim: 1152,
            has_clean_x_embedder: false,
        }
    }
}

impl TransformerConfig {
    /// The shape of the blocks.
    pub(crate) fn blocks(&self) -> BlocksShape {
        BlocksShape {
            design: Design::Flux1,
            heads: self.num_attention_heads,
            head: self.attention_head_dim,
            double: self.num_layers,
            single: self.num_single_layers,
            splits_last_layers: false,
        }
    }

    /// Width of the hidden states.
    pub fn width(&self) -> usize {
        self.blocks().width()
    }

    /// Width of a token of the latent: a patch of 1 by 2 by 2 cells.
    pub fn token_width(&self) -> usize {
        4 * self.in_channels
    }

    /// Whether the model is FramePack: whether frames sampled before are an input.
    pub fn is_framepack(&self) -> bool {
        self.has_clean_x_embedder && self.has_image_proj
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        let widths = [
            self.in_channels,
            self.attention_head_dim,
            self.text_embed_dim,
            self.pooled_projection_dim,
            self.image_proj_dim,
        ];
        let counts = [
            self.num_layers,
            self.num_single_layers,
            self.num_refiner_layers,
            self.num_attention_heads,
        ];
        let axes = self.rope_axes_dim;
        check_sizes(&[(&widths, 1 << 16), (&axes, 1 << 16), (&counts, 1 << 10)])?;
        let numbers = [
            ("mlp_ratio", self.mlp_ratio, 4.0),
            ("patch_size", self.patch_size as f64, 2.0),
            ("patch_size_t", self.patch_size_t as f64, 1.0),
        ];
        if let Some((name, found, supported)) = numbers.into_iter().find(|(_, found, is)| found != is) {
            return Err(format!("{name} is {found}; {supported} is supported"));
        }
        if self.qk_norm != "rms_norm" {
            return Err(format!("qk_norm is {}; rms_norm is supported", self.qk_norm));
        }
        if let Some(kind) = &self.image_condition_type {
            return Err(format!(
                "image_condition_type is {kind}: HunyuanVideo's picture to film; text to film and FramePack are supported"
            ));
        }
        if self.has_clean_x_embedder != self.has_image_proj {
            return Err("has_clean_x_embedder and has_image_proj differ; FramePack has both".to_owned());
        }
        if self.in_channels == 0 || self.out_channels.is_some_and(|out| out != self.in_channels) {
            return Err(format!(
                "in_channels is {} and out_channels {:?}; equal numbers are supported",
                self.in_channels, self.out_channels
            ));
        }
        if self.num_attention_heads == 0 || axes.iter().sum::<usize>() != self.attention_head_dim {
            return Err(format!(
                "rope_axes_dim {axes:?} do not add up to attention_head_dim {}",
                self.attention_head_dim
            ));
        }
        if axes.iter().any(|axis| !axis.is_multiple_of(2)) {
            return Err(format!("rope_axes_dim {axes:?} are not even"));
        }
        if !(self.rope_theta > 1.0 && self.rope_theta.is_finite()) {
            return Err(format!(
                "rope_theta is {}; more than 1 is expected",
                self.rope_theta
            ));
        }
        Ok(())
    }
}
