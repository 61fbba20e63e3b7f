//! `transformer/config.json`.

use serde::Deserialize;

use crate::files::check_sizes;
use crate::mmdit::{BlocksShape, Design, SINUSOIDS};

/// Configuration of the transformer, diffusers' `Flux2Transformer2DModel`; missing fields have that class's defaults, which are
/// those of FLUX.2 dev.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Must be 1: the autoencoder's latents are made of patches already.
    pub patch_size: usize,
    /// Channels of a latent.
    pub in_channels: usize,
    /// Channels of the prediction; must be those of the latent.
    pub out_channels: Option<usize>,
    /// Number of double blocks.
    pub num_layers: usize,
    /// Number of single blocks.
    pub num_single_layers: usize,
    /// Width of a head.
    pub attention_head_dim: usize,
    pub num_attention_heads: usize,
    /// Width of the encoding of a token of text: three hidden states of the text encoder.
    pub joint_attention_dim: usize,
    /// Width of the sinusoidal embedding of timesteps; must be 256.
    pub timestep_guidance_channels: usize,
    /// Width inside a feed-forward, in widths of the hidden states; must be 3.
    pub mlp_ratio: f64,
    /// Widths of the rotary axes in a head: reference, row, column, text.
    pub axes_dims_rope: [usize; 4],
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of all norms; must be 1e-6.
    pub eps: f64,
    /// Whether the guidance is embedded, as in FLUX.2 dev; must be false.
    pub guidance_embeds: bool,
}

impl Default for TransformerConfig {
    fn default() -> TransformerConfig {
        TransformerConfig {
            patch_size: 1,
            in_channels: 128,
            out_channels: None,
            num_layers: 8,
            num_single_layers: 48,
            attention_head_dim: 128,
            num_attention_heads: 48,
            joint_attention_dim: 15_360,
            timestep_guidance_channels: SINUSOIDS,
            mlp_ratio: 3.0,
            axes_dims_rope: [32; 4],
            rope_theta: 2000.0,
            eps: 1e-6,
            guidance_embeds: true,
        }
    }
}

impl TransformerConfig {
    /// FLUX.2 klein 4B.
    pub fn klein_4b() -> TransformerConfig {
        TransformerConfig {
            num_layers: 5,
            num_single_layers: 20,
            num_attention_heads: 24,
            joint_attention_dim: 7680,
            guidance_embeds: false,
            ..TransformerConfig::default()
        }
    }

    /// FLUX.2 klein 9B.
    pub fn klein_9b() -> TransformerConfig {
        TransformerConfig {
            num_layers: 8,
            num_single_layers: 24,
            num_attention_heads: 32,
            joint_attention_dim: 12_288,
            guidance_embeds: false,
            ..TransformerConfig::default()
        }
    }

    /// Width of the hidden states.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// The shape of the blocks.
    pub(crate) fn blocks(&self) -> BlocksShape {
        BlocksShape {
            design: Design::Flux2,
            heads: self.num_attention_heads,
            head: self.attention_head_dim,
            double: self.num_layers,
            single: self.num_single_layers,
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
        let counts = [self.num_layers, self.num_single_layers, self.num_attention_heads];
        let axes = self.axes_dims_rope;
        check_sizes(&[(&widths, 1 << 16), (&axes, 1 << 16), (&counts, 1 << 10)])?;
        if self.guidance_embeds {
            return Err(
                "its guidance is embedded, as in FLUX.2 dev; FLUX.2 klein is supported, which has no such layers".to_owned(),
            );
        }
        if self.patch_size != 1 || self.out_channels.is_some_and(|out| out != self.in_channels) {
            return Err(format!(
                "patch_size is {} and out_channels {:?}; 1 and the channels of the latent are supported",
                self.patch_size, self.out_channels
            ));
        }
        if self.timestep_guidance_channels != SINUSOIDS || self.mlp_ratio != 3.0 || self.eps != 1e-6 {
            return Err(format!(
                "timestep_guidance_channels {}, mlp_ratio {}, eps {}; {SINUSOIDS}, 3 and 1e-6 are supported",
                self.timestep_guidance_channels, self.mlp_ratio, self.eps
            ));
        }
        if widths.contains(&0) || !self.joint_attention_dim.is_multiple_of(3) {
            return Err(format!(
                "joint_attention_dim is {}, which is not three times the width of a text encoder",
                self.joint_attention_dim
            ));
        }
        if self.num_attention_heads == 0 || axes.iter().sum::<usize>() != self.attention_head_dim {
            return Err(format!(
                "axes_dims_rope {axes:?} do not add up to attention_head_dim {}",
                self.attention_head_dim
            ));
        }
        if axes.iter().any(|axis| !axis.is_multiple_of(2)) {
            return Err(format!("axes_dims_rope {axes:?} are not even"));
        }
        if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            return Err(format!("rope_theta is {}", self.rope_theta));
        }
        Ok(())
    }
}
