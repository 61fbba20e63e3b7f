//! `transformer/config.json`.

use serde::Deserialize;

use super::shape::BlockShape;
use crate::files::check_sizes;

/// Channels of the mask beside the latent of a picture that conditions a film: one for each frame of a latent.
const MASK: usize = 4;

/// Configuration of a transformer: diffusers' `WanTransformer3DModel`; missing fields have that class's defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Cells of a token along frames, rows and columns; 1, 2 and 2 are supported.
    pub patch_size: [usize; 3],
    pub num_attention_heads: usize,
    pub attention_head_dim: usize,
    /// Channels of the latent, and of what it is conditioned on.
    pub in_channels: usize,
    /// Channels of the velocity.
    pub out_channels: usize,
    /// Width of the text encoder's states.
    pub text_dim: usize,
    /// Width of the sinusoidal embedding of times; 256 is supported.
    pub freq_dim: usize,
    /// Width inside the feed-forward layers.
    pub ffn_dim: usize,
    pub num_layers: usize,
    /// Whether cross-attention has a norm before it; it must have one.
    pub cross_attn_norm: bool,
    /// Norm of queries and keys; `rms_norm_across_heads` is supported.
    pub qk_norm: Option<String>,
    /// Epsilon of all norms.
    pub eps: f64,
    /// Width of the states of a picture encoder, which is not supported.
    pub image_dim: Option<usize>,
    pub added_kv_proj_dim: Option<usize>,
    /// Most positions on an axis.
    pub rope_max_seq_len: usize,
}

impl Default for TransformerConfig {
    fn default() -> TransformerConfig {
        TransformerConfig {
            patch_size: [1, 2, 2],
            num_attention_heads: 40,
            attention_head_dim: 128,
            in_channels: 16,
            out_channels: 16,
            text_dim: 4096,
            freq_dim: 256,
            ffn_dim: 13_824,
            num_layers: 40,
            cross_attn_norm: true,
            qk_norm: Some("rms_norm_across_heads".to_owned()),
            eps: 1e-6,
            image_dim: None,
            added_kv_proj_dim: None,
            rope_max_seq_len: 1024,
        }
    }
}

impl TransformerConfig {
    /// The shape of the blocks.
    pub(crate) fn blocks(&self) -> BlockShape {
        BlockShape {
            heads: self.num_attention_heads,
            head: self.attention_head_dim,
            inner: self.ffn_dim,
            eps: self.eps,
        }
    }

    /// Width of the hidden states.
    pub fn width(&self) -> usize {
        self.blocks().width()
    }

    /// Width of a token of the velocity: a patch of 1 by 2 by 2 cells.
    pub fn token_width(&self) -> usize {
        4 * self.out_channels
    }

    /// Channels that condition the latent in every cell: a mask, and the latent of a film that begins with a picture.
    pub fn conditions(&self) -> usize {
        self.in_channels - self.out_channels
    }

    /// Whether a picture conditions the latent in every cell.
    pub fn is_conditioned(&self) -> bool {
        self.conditions() > 0
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        let widths = [
            self.in_channels,
            self.out_channels,
            self.attention_head_dim,
            self.text_dim,
            self.ffn_dim,
        ];
        let counts = [self.num_layers, self.num_attention_heads];
        check_sizes(&[(&widths, 1 << 16), (&counts, 1 << 10)])?;
        if self.patch_size != [1, 2, 2] {
            return Err(format!(
                "patch_size is {:?}; [1, 2, 2] is supported",
                self.patch_size
            ));
        }
        if self.freq_dim != 256 {
            return Err(format!("freq_dim is {}; 256 is supported", self.freq_dim));
        }
        if !self.cross_attn_norm {
            return Err("cross_attn_norm is false; true is supported".to_owned());
        }
        if self.qk_norm.as_deref() != Some("rms_norm_across_heads") {
            return Err(format!(
                "qk_norm is {:?}; rms_norm_across_heads is supported",
                self.qk_norm
            ));
        }
        if self.image_dim.is_some() || self.added_kv_proj_dim.is_some() {
            return Err(
                "it is Wan 2.1's picture to film, which sees the picture through CLIP; for films from a picture \
                 Wan 2.2 is supported"
                    .to_owned(),
            );
        }
        if self.num_attention_heads == 0
            || self.attention_head_dim < 6
            || !self.attention_head_dim.is_multiple_of(2)
        {
            return Err(format!(
                "{} heads of {} are not supported",
                self.num_attention_heads, self.attention_head_dim
            ));
        }
        let (latent, conditioned) = (self.out_channels, 2 * self.out_channels + MASK);
        if latent == 0 || ![latent, conditioned].contains(&self.in_channels) {
            return Err(format!(
                "in_channels is {} for {latent} out_channels; {latent} (text to film) and {conditioned} (picture to film) are \
                 supported, other kinds, such as control, inpainting and speech, are not",
                self.in_channels
            ));
        }
        match self.eps > 0.0 && self.eps < 1.0 {
            true => Ok(()),
            false => Err(format!("eps is {}; a small number is expected", self.eps)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_run_is_named() {
        let a14b = TransformerConfig::default();
        assert_eq!(a14b.check(), Ok(()));
        let from_picture = TransformerConfig {
            in_channels: 36,
            ..a14b.clone()
        };
        assert_eq!(from_picture.check(), Ok(()));
        for (config, named) in [
            (
                TransformerConfig {
                    image_dim: Some(1280),
                    ..from_picture.clone()
                },
                "CLIP",
            ),
            (
                TransformerConfig {
                    in_channels: 48,
                    ..a14b.clone()
                },
                "in_channels is 48",
            ),
            (
                TransformerConfig {
                    qk_norm: None,
                    ..a14b.clone()
                },
                "qk_norm",
            ),
            (
                TransformerConfig {
                    attention_head_dim: 15,
                    ..a14b
                },
                "heads of 15",
            ),
        ] {
            let refused = config.check().unwrap_err();
            assert!(refused.contains(named), "{refused}");
        }
    }
}
