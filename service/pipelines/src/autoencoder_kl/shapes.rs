//! Names and shapes of the autoencoder's tensors, as [`super::VaeEncoder`] and [`super::VaeDecoder`] need them.

use super::config::VaeConfig;
use crate::checkpoint::Shapes;

impl VaeConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let layers = AutoencoderLayers {
            block_out_channels: &self.block_out_channels,
            layers_per_block: self.layers_per_block,
            in_channels: self.in_channels,
            out_channels: self.out_channels,
            latent_channels: self.latent_channels,
            has_attention: self.mid_block_add_attention,
            has_quant: self.use_quant_conv,
            has_post_quant: self.use_post_quant_conv,
            is_resized: &|level| level + 1 < self.block_out_channels.len(),
            is_causal: false,
        };
        layers.tensor_shapes()
    }
}

/// The layers of an autoencoder of residual blocks, of pictures or of films, under their names in diffusers.
pub(crate) struct AutoencoderLayers<'a> {
    /// Channels of each resolution, the finest first.
    pub(crate) block_out_channels: &'a [usize],
    /// Residual blocks of each resolution of the encoder; the decoder has one more.
    pub(crate) layers_per_block: usize,
    pub(crate) in_channels: usize,
    pub(crate) out_channels: usize,
    pub(crate) latent_channels: usize,
    /// Whether the middle has attention.
    pub(crate) has_attention: bool,
    /// Whether there is a layer behind the encoder.
    pub(crate) has_quant: bool,
    /// Whether there is a layer in front of the decoder.
    pub(crate) has_post_quant: bool,
    /// Whether a resizing layer is behind the blocks of a resolution, counted from where each half begins.
    pub(crate) is_resized: &'a dyn Fn(usize) -> bool,
    /// Whether kernels span frames, each a layer named `conv` within another (`HunyuanVideoCausalConv3d`).
    pub(crate) is_causal: bool,
}

impl AutoencoderLayers<'_> {
    /// Names and shapes of their tensors.
    pub(crate) fn tensor_shapes(&self) -> Shapes {
        let mut list = List {
            shapes: Vec::new(),
            is_causal: self.is_causal,
        };
        let channels = self.block_out_channels;
        let (Some(&finest), Some(&coarsest)) = (channels.first(), channels.last()) else {
            return list.shapes;
        };
        let (latent, moments) = (self.latent_channels, 2 * self.latent_channels);

        list.convolution("encoder.conv_in", self.in_channels, finest, 3);
        let mut before = finest;
        for (level, &width) in channels.iter().enumerate() {
            let name = format!("encoder.down_blocks.{level}");
            for layer in 0..self.layers_per_block {
                list.resnet(&format!("{name}.resnets.{layer}"), before, width);
                before = width;
            }
            if (self.is_resized)(level) {
                list.convolution(&format!("{name}.downsamplers.0.conv"), width, width, 3);
            }
        }
        list.middle("encoder.mid_block", coarsest, self.has_attention);
        list.layer("encoder.conv_norm_out", &[coarsest]);
        list.convolution("encoder.conv_out", coarsest, moments, 3);
        if self.has_quant {
            list.of_positions("quant_conv", moments);
        }

        if self.has_post_quant {
            list.of_positions("post_quant_conv", latent);
        }
        list.convolution("decoder.conv_in", latent, coarsest, 3);
        list.middle("decoder.mid_block", coarsest, self.has_attention);
        let mut before = coarsest;
        for (level, &width) in channels.iter().rev().enumerate() {
            let name = format!("decoder.up_blocks.{level}");
            for layer in 0..=self.layers_per_block {
                list.resnet(&format!("{name}.resnets.{layer}"), before, width);
                before = width;
            }
            if (self.is_resized)(level) {
                list.convolution(&format!("{name}.upsamplers.0.conv"), width, width, 3);
            }
        }
        list.layer("decoder.conv_norm_out", &[finest]);
        list.convolution("decoder.conv_out", finest, self.out_channels, 3);
        list.shapes
    }
}

struct List {
    shapes: Shapes,
    is_causal: bool,
}

impl List {
    /// A weight of this shape, and a bias with one element per row.
    fn layer(&mut self, name: &str, shape: &[usize]) {
        self.shapes.push((format!("{name}.weight"), shape.to_vec()));
        self.shapes.push((format!("{name}.bias"), shape[..1].to_vec()));
    }

    fn convolution(&mut self, name: &str, from: usize, to: usize, kernel: usize) {
        match self.is_causal {
            true => self.layer(&format!("{name}.conv"), &[to, from, kernel, kernel, kernel]),
            false => self.layer(name, &[to, from, kernel, kernel]),
        }
    }

    /// A convolution of single positions, which is never causal.
    fn of_positions(&mut self, name: &str, channels: usize) {
        match self.is_causal {
            true => self.layer(name, &[channels, channels, 1, 1, 1]),
            false => self.layer(name, &[channels, channels, 1, 1]),
        }
    }

    fn resnet(&mut self, name: &str, from: usize, to: usize) {
        self.layer(&format!("{name}.norm1"), &[from]);
        self.convolution(&format!("{name}.conv1"), from, to, 3);
        self.layer(&format!("{name}.norm2"), &[to]);
        self.convolution(&format!("{name}.conv2"), to, to, 3);
        if from != to {
            self.convolution(&format!("{name}.conv_shortcut"), from, to, 1);
        }
    }

    fn middle(&mut self, name: &str, channels: usize, attention: bool) {
        self.resnet(&format!("{name}.resnets.0"), channels, channels);
        if attention {
            self.layer(&format!("{name}.attentions.0.group_norm"), &[channels]);
            for part in ["to_q", "to_k", "to_v", "to_out.0"] {
                self.layer(&format!("{name}.attentions.0.{part}"), &[channels, channels]);
            }
        }
        self.resnet(&format!("{name}.resnets.1"), channels, channels);
    }
}
