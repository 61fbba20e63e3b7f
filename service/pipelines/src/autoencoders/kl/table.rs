//! The layers of the autoencoder.

use super::config::VaeConfig;
use crate::autoencoders::kernels::{Kernels, Resize};
use crate::autoencoders::table::Residual;

/// Tensors with the mean and the variance of the channels of the transformer's latents ([`VaeConfig::patch_size`]).
pub(super) const STATISTICS: [&str; 2] = ["bn.running_mean", "bn.running_var"];

impl VaeConfig {
    /// Each resolution but the last is followed by a resizing layer.
    pub(super) fn table(&self) -> Residual<'_> {
        let levels = self.block_out_channels.len();
        Residual {
            kernels: Kernels::Flat,
            norm_num_groups: self.norm_num_groups,
            block_out_channels: &self.block_out_channels,
            layers_per_block: self.layers_per_block,
            in_channels: self.in_channels,
            out_channels: self.out_channels,
            latent_channels: self.latent_channels,
            has_attention: self.mid_block_add_attention,
            has_quant: self.use_quant_conv,
            has_post_quant: self.use_post_quant_conv,
            resize: (1..=levels)
                .map(|level| (level < levels).then_some(Resize::SPACE))
                .collect(),
            in_place: false,
        }
    }

    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let mut shapes = self.table().tensor_shapes();
        if self.patch_size.is_some() {
            let channels = vec![self.transformer_channels()];
            shapes.extend(STATISTICS.map(|name| (name.to_owned(), channels.clone())));
        }
        shapes
    }
}
