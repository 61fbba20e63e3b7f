//! `vae/config.json`.

use serde::Deserialize;

/// Configuration of diffusers' `AutoencoderKL`. Missing fields have diffusers' defaults.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct VaeConfig {
    /// Channels of the input picture.
    pub in_channels: usize,
    /// Channels of the decoded picture.
    pub out_channels: usize,
    /// Channels of a latent; the encoder's output has twice as many (mean and log variance).
    pub latent_channels: usize,
    /// Channels at each resolution, the picture's own first. Each but the last is followed by a downsampling.
    pub block_out_channels: Vec<usize>,
    /// Residual blocks at each resolution of the encoder; the decoder has one more.
    pub layers_per_block: usize,
    pub norm_num_groups: usize,
    /// Resolution of the training pictures, from which diffusers derives its tile size.
    #[serde(deserialize_with = "one_size")]
    pub sample_size: usize,
    /// Factor of the transformer's latents.
    pub scaling_factor: f64,
    /// Subtracted before scaling.
    pub shift_factor: Option<f64>,
    /// Whether the middle block has attention over the whole map.
    pub mid_block_add_attention: bool,
    /// Whether a 1x1 convolution follows the encoder.
    pub use_quant_conv: bool,
    /// Whether a 1x1 convolution precedes the decoder.
    pub use_post_quant_conv: bool,
    /// The activation: only `silu` is supported.
    pub act_fn: String,
    /// Types of the encoder's blocks: only `DownEncoderBlock2D` is supported.
    pub down_block_types: Vec<String>,
    /// Types of the decoder's blocks: only `UpDecoderBlock2D` is supported.
    pub up_block_types: Vec<String>,
    /// `AutoencoderKLFlux2`: latents are cut into patches of these sides, whose numbers are the transformer's channels, and
    /// normalised by the statistics that the checkpoint holds, in place of factor and shift. Two by two is supported.
    pub patch_size: Option<[usize; 2]>,
    /// Epsilon of the variances of those statistics.
    pub batch_norm_eps: f64,
    /// Channels of the decoder where they differ from the encoder's; not supported.
    pub decoder_block_out_channels: Option<Vec<usize>>,
}

/// Side of the patches of [`VaeConfig::patch_size`].
pub(super) const PATCH: usize = 2;

impl Default for VaeConfig {
    fn default() -> VaeConfig {
        VaeConfig {
            in_channels: 3,
            out_channels: 3,
            latent_channels: 4,
            block_out_channels: vec![64],
            layers_per_block: 1,
            norm_num_groups: 32,
            sample_size: 32,
            scaling_factor: 0.18215,
            shift_factor: None,
            mid_block_add_attention: true,
            use_quant_conv: true,
            use_post_quant_conv: true,
            act_fn: "silu".to_owned(),
            down_block_types: Vec::new(),
            up_block_types: Vec::new(),
            patch_size: None,
            batch_norm_eps: 1e-4,
            decoder_block_out_channels: None,
        }
    }
}

impl VaeConfig {
    /// The autoencoder of FLUX.1, whose single files (`ae.safetensors`) have no configuration.
    pub fn flux() -> VaeConfig {
        VaeConfig {
            latent_channels: 16,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            sample_size: 1024,
            scaling_factor: 0.3611,
            shift_factor: Some(0.1159),
            use_quant_conv: false,
            use_post_quant_conv: false,
            ..VaeConfig::default()
        }
    }

    /// The autoencoder of FLUX.2, whose single files (`flux2-vae.safetensors`) have no configuration.
    pub fn flux2() -> VaeConfig {
        VaeConfig {
            latent_channels: 32,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            sample_size: 1024,
            patch_size: Some([PATCH, PATCH]),
            ..VaeConfig::default()
        }
    }

    /// The autoencoder of SDXL, whose single files have no configuration.
    pub fn sdxl() -> VaeConfig {
        VaeConfig {
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            sample_size: 1024,
            scaling_factor: 0.13025,
            ..VaeConfig::default()
        }
    }

    /// Side of the patches that the transformer's latents are made of, 1 without patches.
    pub(super) fn patch(&self) -> usize {
        self.patch_size.map_or(1, |[side, _]| side)
    }

    /// Channels of the transformer's latents.
    pub fn transformer_channels(&self) -> usize {
        self.latent_channels * self.patch() * self.patch()
    }

    /// Pixels per cell of the transformer's latents along each axis.
    pub fn transformer_factor(&self) -> usize {
        self.factor() * self.patch()
    }

    /// Pixels per latent cell along each axis.
    pub fn factor(&self) -> usize {
        1 << self.block_out_channels.len().saturating_sub(1)
    }

    /// Height and width of the latent of a picture.
    pub fn latent_sides(&self, width: u32, height: u32) -> (usize, usize) {
        (height as usize / self.factor(), width as usize / self.factor())
    }

    /// Side of diffusers' tiles in latent cells: `tile_latent_min_size`.
    pub fn default_tile(&self) -> usize {
        self.sample_size / self.factor()
    }

    /// Checks that this autoencoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        self.table().check()?;
        if self.act_fn != "silu" {
            return Err(format!("the activation {:?}; only silu is known", self.act_fn));
        }
        let kinds = self.down_block_types.iter().chain(&self.up_block_types);
        if let Some(kind) = kinds
            .into_iter()
            .find(|k| *k != "DownEncoderBlock2D" && *k != "UpDecoderBlock2D")
        {
            return Err(format!(
                "a block of kind {kind}; only DownEncoderBlock2D and UpDecoderBlock2D are known"
            ));
        }
        if self.block_out_channels.is_empty() || self.block_out_channels.len() > 8 {
            return Err(format!(
                "{} resolutions; 1 to 8 are known",
                self.block_out_channels.len()
            ));
        }
        if let Some(channels) = &self.decoder_block_out_channels {
            return Err(format!(
                "decoder_block_out_channels {channels:?}: a decoder of other widths than the encoder is not known"
            ));
        }
        if self.patch_size.is_some_and(|patch| patch != [PATCH, PATCH]) {
            return Err(format!(
                "latents in patches of {:?}; [2, 2] are known",
                self.patch_size.unwrap_or_default()
            ));
        }
        if self.patch_size.is_some() && !(self.batch_norm_eps >= 0.0 && self.batch_norm_eps.is_finite()) {
            return Err(format!("an epsilon of {}", self.batch_norm_eps));
        }
        if !self.scaling_factor.is_finite() || self.scaling_factor == 0.0 {
            return Err(format!("a scaling factor of {}", self.scaling_factor));
        }
        Ok(())
    }
}

/// diffusers writes one size, or a list of height and width, of which it reads the first.
fn one_size<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Size {
        One(usize),
        Two(usize, #[allow(dead_code)] usize),
    }
    Ok(match Size::deserialize(deserializer)? {
        Size::One(size) | Size::Two(size, _) => size,
    })
}
