//! The layers of the autoencoder, and the names of Tencent's own checkpoint.

use super::config::HunyuanVaeConfig;
use crate::autoencoders::kernels::Kernels;
use crate::autoencoders::table::Residual;

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
    pub(super) fn table(&self) -> Residual<'_> {
        let levels = 0..self.block_out_channels.len();
        Residual {
            kernels: Kernels::Causal,
            norm_num_groups: self.norm_num_groups,
            block_out_channels: &self.block_out_channels,
            layers_per_block: self.layers_per_block,
            in_channels: self.in_channels,
            out_channels: self.out_channels,
            latent_channels: self.latent_channels,
            has_attention: self.mid_block_add_attention,
            has_quant: true,
            has_post_quant: true,
            resize: levels.map(|level| self.resize(level)).collect(),
            in_place: true,
        }
    }

    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        self.table().tensor_shapes()
    }
}
