//! What `transformer/config.json` says.

use serde::Deserialize;

/// Tokens are padded to multiples of this, text and picture each.
pub(super) const MULTIPLE: usize = 32;
/// The widest embedding of a timestep that modulations are made of.
const WIDEST_TIMESTEP: usize = 256;
/// The side of a patch in cells of the latent.
pub(super) const PATCH: usize = 2;

/// Configuration of the transformer, in the words of diffusers' `ZImageTransformer2DModel`; what a file leaves out has
/// that class's defaults, which are those of Z-Image-Turbo.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct TransformerConfig {
    /// Sides of patches; one, of two.
    pub all_patch_size: Vec<usize>,
    /// Lengths of patches in time; one, of one.
    pub all_f_patch_size: Vec<usize>,
    /// Channels of the latent.
    pub in_channels: usize,
    /// Width of the hidden states.
    pub dim: usize,
    /// Blocks over picture and text.
    pub n_layers: usize,
    /// Blocks over the picture alone, and as many over the text alone.
    pub n_refiner_layers: usize,
    /// Heads.
    pub n_heads: usize,
    /// Heads of keys; as many.
    pub n_kv_heads: usize,
    /// Epsilon of the norms of tokens.
    pub norm_eps: f64,
    /// Whether queries and keys are normalised; they are.
    pub qk_norm: bool,
    /// Width of the text encoder's hidden states.
    pub cap_feat_dim: usize,
    /// Width of a picture's encoding in the variant that edits; not supported.
    pub siglip_feat_dim: Option<usize>,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// What times from 0 to 1 are multiplied by.
    pub t_scale: f64,
    /// Widths of the rotary axes within a head: text, rows, columns.
    pub axes_dims: [usize; 3],
    /// Width inside the timestep's layers. No file says it: it is 1024 in the class, and found in the checkpoint.
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

    /// Width of a patch, as it comes and goes.
    pub fn patch_width(&self) -> usize {
        PATCH * PATCH * self.in_channels
    }

    /// Width of the embedding of a timestep.
    pub fn timestep_width(&self) -> usize {
        self.dim.min(WIDEST_TIMESTEP)
    }

    /// Whether this build can compute it.
    ///
    /// # Errors
    /// What it cannot.
    pub fn check(&self) -> Result<(), String> {
        // Far above anything published; what a file says must not overflow, nor fill memory with names.
        let widths = [self.in_channels, self.dim, self.cap_feat_dim, self.timestep_inner];
        let counts = [self.n_layers, self.n_refiner_layers, self.n_heads];
        if widths.iter().chain(&self.axes_dims).any(|width| *width > 1 << 16)
            || counts.iter().any(|count| *count > 1 << 10)
        {
            return Err("its sizes are beyond all reason".to_owned());
        }
        if self.all_patch_size != [PATCH] || self.all_f_patch_size != [1] {
            return Err(format!(
                "patches of {:?} by {:?}; [2] by [1] are supported",
                self.all_patch_size, self.all_f_patch_size
            ));
        }
        if self.siglip_feat_dim.is_some() {
            return Err("it takes pictures encoded by SigLIP, which is not supported".to_owned());
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
