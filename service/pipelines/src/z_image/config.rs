//! `transformer/config.json`.

use serde::Deserialize;

use crate::files::check_sizes;

/// Text and picture tokens are each padded to multiples of this.
pub(super) const MULTIPLE: usize = 32;
/// Maximum width of the timestep embedding that modulations use.
const MAX_TIMESTEP_WIDTH: usize = 256;
/// Side of a patch in latent cells.
pub(super) const PATCH: usize = 2;

/// Configuration of the transformer, diffusers' `ZImageTransformer2DModel`; missing fields have that class's
/// defaults, which are those of Z-Image and of Z-Image-Turbo.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Sides of patches; must be `[2]`.
    pub all_patch_size: Vec<usize>,
    /// Lengths of patches in time; must be `[1]`.
    pub all_f_patch_size: Vec<usize>,
    /// Channels of the latent.
    pub in_channels: usize,
    /// Width of the hidden states.
    pub dim: usize,
    /// Number of blocks over picture and text.
    pub n_layers: usize,
    /// Number of blocks over the picture alone, and over the text alone.
    pub n_refiner_layers: usize,
    pub n_heads: usize,
    /// Key and value heads; must equal `n_heads`.
    pub n_kv_heads: usize,
    /// Epsilon of the norms of tokens.
    pub norm_eps: f64,
    /// QK-norm; must be true.
    pub qk_norm: bool,
    /// Width of the text encoder's hidden states.
    pub cap_feat_dim: usize,
    /// Width of a picture's encoding in the editing variant; not supported.
    pub siglip_feat_dim: Option<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Factor of times from 0 to 1.
    pub t_scale: f64,
    /// Widths of the rotary axes in a head: text, rows, columns.
    pub axes_dims: [usize; 3],
    /// Inner width of the timestep embedding: in no configuration, 1024 in the class, taken from the checkpoint.
    #[serde(skip)]
    pub timestep_inner: usize,
}

impl Default for TransformerConfig {
    fn default() -> TransformerConfig {
        TransformerConfig {
            all_patch_size: vec![2],
            all_f_patch_size: vec![1],
            in_channels: 16,
            dim: 3840,
            n_layers: 30,
            n_refiner_layers: 2,
            n_heads: 30,
            n_kv_heads: 30,
            norm_eps: 1e-5,
            qk_norm: true,
            cap_feat_dim: 2560,
            siglip_feat_dim: None,
            rope_theta: 256.0,
            t_scale: 1000.0,
            axes_dims: [32, 48, 48],
            timestep_inner: 1024,
        }
    }
}

impl TransformerConfig {
    /// Width of a head.
    pub fn head(&self) -> usize {
        self.dim / self.n_heads
    }

    /// Width inside the feed-forward layers: `int(dim / 3 * 8)`.
    pub fn feed_forward_width(&self) -> usize {
        (self.dim as f64 / 3.0 * 8.0) as usize
    }

    /// Width of a patch: channels times cells.
    pub fn patch_width(&self) -> usize {
        PATCH * PATCH * self.in_channels
    }

    /// Width of the embedding of a timestep.
    pub fn timestep_width(&self) -> usize {
        self.dim.min(MAX_TIMESTEP_WIDTH)
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        let widths = [self.in_channels, self.dim, self.cap_feat_dim, self.timestep_inner];
        let counts = [self.n_layers, self.n_refiner_layers, self.n_heads];
        check_sizes(&[(&widths, 1 << 16), (&self.axes_dims, 1 << 16), (&counts, 1 << 10)])?;
        if self.all_patch_size != [PATCH] || self.all_f_patch_size != [1] {
            return Err(format!(
                "patches of {:?} by {:?}; [2] by [1] are supported",
                self.all_patch_size, self.all_f_patch_size
            ));
        }
        if self.siglip_feat_dim.is_some() {
            return Err(
                "it takes pictures encoded by SigLIP, as Z-Image-Omni does, which is not supported"
                    .to_owned(),
            );
        }
        if self.n_kv_heads != self.n_heads {
            return Err(format!(
                "{} heads of keys for {} of queries; as many are supported",
                self.n_kv_heads, self.n_heads
            ));
        }
        if !self.qk_norm {
            return Err("its queries and keys are not normalised, which is not supported".to_owned());
        }
        if [self.in_channels, self.dim, self.n_layers, self.cap_feat_dim].contains(&0) {
            return Err("layers of no width, or none of them".to_owned());
        }
        let rotated: usize = self.axes_dims.iter().sum();
        if self.n_heads == 0 || self.n_heads * rotated != self.dim {
            return Err(format!(
                "axes_dims {:?} do not add up to a head of {} by {}",
                self.axes_dims, self.dim, self.n_heads
            ));
        }
        if self.axes_dims.iter().any(|axis| !axis.is_multiple_of(2)) {
            return Err(format!("axes_dims {:?} are not even", self.axes_dims));
        }
        if !(self.rope_theta > 0.0 && self.norm_eps > 0.0 && self.t_scale.is_finite()) {
            return Err(format!(
                "rope_theta {}, norm_eps {}, t_scale {}",
                self.rope_theta, self.norm_eps, self.t_scale
            ));
        }
        Ok(())
    }
}
