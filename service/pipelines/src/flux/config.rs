//! `transformer/config.json`.

use serde::Deserialize;

use crate::files::check_sizes;
use crate::mmdit::{BlocksShape, Design};

/// Configuration of the transformer, diffusers' `FluxTransformer2DModel`; missing fields have that class's defaults.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Patch size of the model itself; 1, since the pipeline packs.
    pub patch_size: usize,
    /// Width of a packed token, with its conditioning: four times the latent's channels, or for Fill twice that and 256
    /// of the mask.
    pub in_channels: usize,
    /// Output width; `in_channels` if missing.
    pub out_channels: Option<usize>,
    /// Number of double-stream blocks.
    pub num_layers: usize,
    /// Number of single-stream blocks.
    pub num_single_layers: usize,
    pub attention_head_dim: usize,
    pub num_attention_heads: usize,
    /// Width of the text tokens.
    pub joint_attention_dim: usize,
    /// Width of the pooled text.
    pub pooled_projection_dim: usize,
    /// Whether guidance is an input (dev) or distilled away (schnell).
    pub guidance_embeds: bool,
    /// Widths of the rotary axes in a head.
    pub axes_dims_rope: [usize; 3],
    /// Whether the last layer of a single block is two, over the attention and over the feed-forward, as in Nunchaku's files.
    #[serde(skip)]
    pub splits_last_layers: bool,
}

/// Width of a mask in a packed token: 8 by 8 pixels of each of four cells.
pub(super) const MASK_WIDTH: usize = 256;

impl Default for TransformerConfig {
    fn default() -> TransformerConfig {
        TransformerConfig {
            patch_size: 1,
            in_channels: 64,
            out_channels: None,
            num_layers: 19,
            num_single_layers: 38,
            attention_head_dim: 128,
            num_attention_heads: 24,
            joint_attention_dim: 4096,
            pooled_projection_dim: 768,
            guidance_embeds: false,
            axes_dims_rope: [16, 56, 56],
            splits_last_layers: false,
        }
    }
}

impl TransformerConfig {
    /// Width of the hidden states.
    pub fn width(&self) -> usize {
        self.attention_head_dim * self.num_attention_heads
    }

    /// Width of the feed-forward layers.
    pub fn feed_forward_width(&self) -> usize {
        self.blocks().feed_forward_width()
    }

    /// The shape of the blocks.
    pub(crate) fn blocks(&self) -> BlocksShape {
        BlocksShape {
            design: Design::Flux1,
            heads: self.num_attention_heads,
            head: self.attention_head_dim,
            double: self.num_layers,
            single: self.num_single_layers,
            splits_last_layers: self.splits_last_layers,
        }
    }

    /// Width of a packed token of the latent.
    pub fn out_width(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }

    /// Whether the transformer takes a masked picture and its mask in addition to the latent, as Fill does.
    pub fn takes_mask(&self) -> bool {
        self.in_channels == 2 * self.out_width() + MASK_WIDTH
    }

    /// Channels of the latent that is packed two by two.
    pub fn latent_channels(&self) -> usize {
        self.out_width() / 4
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        let widths = [
            self.in_channels,
            self.attention_head_dim,
            self.joint_attention_dim,
            self.pooled_projection_dim,
        ];
        let counts = [self.num_layers, self.num_single_layers, self.num_attention_heads];
        let axes = self.axes_dims_rope;
        check_sizes(&[(&widths, 1 << 16), (&axes, 1 << 16), (&counts, 1 << 10)])?;
        let rotated: usize = axes.iter().sum();
        if self.patch_size != 1 {
            return Err(format!("patch_size is {}; 1 is supported", self.patch_size));
        }
        if self.in_channels == 0 || !self.in_channels.is_multiple_of(4) {
            return Err(format!("in_channels is {}, no multiple of 4", self.in_channels));
        }
        let out = self.out_width();
        if out == 0 || !out.is_multiple_of(4) || !(out == self.in_channels || self.takes_mask()) {
            return Err(format!(
                "out_channels is {:?} and in_channels {}: of models with another input, Fill is supported, and Canny and \
                 Depth are not",
                self.out_channels, self.in_channels
            ));
        }
        if self.num_attention_heads == 0 || rotated != self.attention_head_dim {
            return Err(format!(
                "axes_dims_rope {:?} do not add up to attention_head_dim {}",
                self.axes_dims_rope, self.attention_head_dim
            ));
        }
        if self.axes_dims_rope.iter().any(|axis| !axis.is_multiple_of(2)) {
            return Err(format!("axes_dims_rope {:?} are not even", self.axes_dims_rope));
        }
        Ok(())
    }
}
