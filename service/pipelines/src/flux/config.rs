//! `transformer/config.json`.

use serde::Deserialize;

/// Configuration of the transformer, diffusers' `FluxTransformer2DModel`; missing fields have that class's defaults.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Patch size of the model itself; 1, since the pipeline packs.
    pub patch_size: usize,
    /// Width of a packed token: four times the latent's channels.
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
}

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
        4 * self.width()
    }

    /// Channels of the latent that is packed two by two.
    pub fn latent_channels(&self) -> usize {
        self.in_channels / 4
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        // Far above any published model; untrusted values must not overflow, nor exhaust memory.
        let widths = [
            self.in_channels,
            self.attention_head_dim,
            self.joint_attention_dim,
        ];
        let counts = [self.num_layers, self.num_single_layers, self.num_attention_heads];
        let axes = self.axes_dims_rope;
        if widths
            .into_iter()
            .chain(axes)
            .chain([self.pooled_projection_dim])
            .any(|width| width > 1 << 16)
            || counts.into_iter().any(|count| count > 1 << 10)
        {
            return Err("its sizes are beyond all reason".to_owned());
        }
        let rotated: usize = axes.iter().sum();
        if self.patch_size != 1 {
            return Err(format!("patch_size is {}; 1 is supported", self.patch_size));
        }
        if self.in_channels == 0 || !self.in_channels.is_multiple_of(4) {
            return Err(format!("in_channels is {}, no multiple of 4", self.in_channels));
        }
        if self.out_channels.is_some_and(|out| out != self.in_channels) {
            return Err(format!(
                "out_channels is {:?} and in_channels {}: models with another input (Fill, Canny, Depth) are \
                 not supported yet",
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
