//! `transformer/config.json`.

use serde::Deserialize;

use crate::files::check_sizes;
use crate::mmdit::{BlocksShape, Design};

/// Side of a token in cells of the latent.
pub(super) const PATCH: usize = 2;

/// Configuration of the transformer, diffusers' `QwenImageTransformer2DModel`; missing fields have that class's defaults, which are
/// those of the published models.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Must be 2.
    pub patch_size: usize,
    /// Width of a token of a latent: its channels in squares of two by two cells.
    pub in_channels: usize,
    /// Channels of the prediction; must be those of the latent.
    pub out_channels: Option<usize>,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of a head.
    pub attention_head_dim: usize,
    pub num_attention_heads: usize,
    /// Width of the encoding of a token of text.
    pub joint_attention_dim: usize,
    /// Must be false.
    pub guidance_embeds: bool,
    /// Widths of the rotary axes in a head: picture, row, column.
    pub axes_dims_rope: [usize; 3],
    /// Whether the tokens of references are modulated at time 0 (Qwen-Image-Edit-2511).
    pub zero_cond_t: bool,
    /// Must be false: of Qwen-Image-Layered.
    pub use_additional_t_cond: bool,
    /// Must be false: of Qwen-Image-Layered.
    pub use_layer3d_rope: bool,
}

impl Default for TransformerConfig {
    fn default() -> TransformerConfig {
        TransformerConfig {
            patch_size: PATCH,
            in_channels: 64,
            out_channels: Some(16),
            num_layers: 60,
            attention_head_dim: 128,
            num_attention_heads: 24,
            joint_attention_dim: 3584,
            guidance_embeds: false,
            axes_dims_rope: [16, 56, 56],
            zero_cond_t: false,
            use_additional_t_cond: false,
            use_layer3d_rope: false,
        }
    }
}

impl TransformerConfig {
    /// Width of the hidden states.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Channels of a latent.
    pub fn latent_channels(&self) -> usize {
        self.in_channels / (PATCH * PATCH)
    }

    /// The shape of the blocks.
    pub(crate) fn blocks(&self) -> BlocksShape {
        BlocksShape {
            design: Design::QwenImage,
            heads: self.num_attention_heads,
            head: self.attention_head_dim,
            double: self.num_layers,
            single: 0,
            splits_last_layers: false,
        }
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
        ];
        let counts = [self.num_layers, self.num_attention_heads];
        let axes = self.axes_dims_rope;
        check_sizes(&[(&widths, 1 << 16), (&axes, 1 << 16), (&counts, 1 << 10)])?;
        if self.use_additional_t_cond || self.use_layer3d_rope {
            return Err(
                "it is Qwen-Image-Layered, which makes pictures in layers and is not supported".to_owned(),
            );
        }
        if self.guidance_embeds {
            return Err("its guidance is embedded, which no published Qwen-Image has".to_owned());
        }
        let channels = self.latent_channels();
        let is_whole = self.in_channels == channels * PATCH * PATCH;
        if self.patch_size != PATCH || !is_whole || self.out_channels.is_some_and(|out| out != channels) {
            return Err(format!(
                "patch_size is {}, in_channels {} and out_channels {:?}; {PATCH}, a multiple of 4 and a quarter of it are supported",
                self.patch_size, self.in_channels, self.out_channels
            ));
        }
        if widths.contains(&0) || counts.contains(&0) {
            return Err(format!(
                "widths {widths:?}, and numbers of blocks and heads {counts:?}"
            ));
        }
        if axes.iter().sum::<usize>() != self.attention_head_dim {
            return Err(format!(
                "axes_dims_rope {axes:?} do not add up to attention_head_dim {}",
                self.attention_head_dim
            ));
        }
        if axes.iter().any(|axis| !axis.is_multiple_of(2)) {
            return Err(format!("axes_dims_rope {axes:?} are not even"));
        }
        Ok(())
    }
}
