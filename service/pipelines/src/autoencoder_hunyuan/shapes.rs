//! Names and shapes of the autoencoder's tensors, as [`super::HunyuanVaeEncoder`] and [`super::HunyuanVaeDecoder`]
//! need them.

use super::config::HunyuanVaeConfig;
use crate::autoencoder_kl::AutoencoderLayers;

/// The diffusers name of a tensor of Tencent's own checkpoint, which may have a prefix `vae.`; `None` for a name of
/// none of the parts of the autoencoder.
pub fn diffusers_name_of_original(name: &str) -> Option<String> {
    let name = name.strip_prefix("vae.").unwrap_or(name);
    let (part, _) = name.split_once('.')?;
    ["encoder", "decoder", "quant_conv", "post_quant_conv"]
        .contains(&part)
        .then(|| name.to_owned())
}

impl HunyuanVaeConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let layers = AutoencoderLayers {
            block_out_channels: &self.block_out_channels,
            layers_per_block: self.layers_per_block,
            in_channels: self.in_channels,
            out_channels: self.out_channels,
            latent_channels: self.latent_channels,
            has_attention: self.mid_block_add_attention,
            has_quant: true,
            has_post_quant: true,
            is_resized: &|level| self.resize(level).is_some(),
            is_causal: true,
        };
        layers.tensor_shapes()
    }
}
