//! Names and shapes of the autoencoder's tensors, as [`super::VaeEncoder`] and [`super::VaeDecoder`] need them.

use super::config::VaeConfig;

impl VaeConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let mut list = List(Vec::new());
        let channels = &self.block_out_channels;
        let (Some(&finest), Some(&coarsest)) = (channels.first(), channels.last()) else {
            return list.0;
        };
        let (latent, moments) = (self.latent_channels, 2 * self.latent_channels);
        let attention = self.mid_block_add_attention;

        list.convolution("encoder.conv_in", self.in_channels, finest, 3);
        let mut before = finest;
        for (level, &width) in channels.iter().enumerate() {
            let name = format!("encoder.down_blocks.{level}");
            for layer in 0..self.layers_per_block {
                list.resnet(&format!("{name}.resnets.{layer}"), before, width);
                before = width;
            }
            if level + 1 < channels.len() {
                list.convolution(&format!("{name}.downsamplers.0.conv"), width, width, 3);
            }
        }
        list.middle("encoder.mid_block", coarsest, attention);
        list.layer("encoder.conv_norm_out", &[coarsest]);
        list.convolution("encoder.conv_out", coarsest, moments, 3);
        if self.use_quant_conv {
            list.convolution("quant_conv", moments, moments, 1);
        }

        if self.use_post_quant_conv {
            list.convolution("post_quant_conv", latent, latent, 1);
        }
        list.convolution("decoder.conv_in", latent, coarsest, 3);
        list.middle("decoder.mid_block", coarsest, attention);
        let mut before = coarsest;
        for (level, &width) in channels.iter().rev().enumerate() {
            let name = format!("decoder.up_blocks.{level}");
            for layer in 0..=self.layers_per_block {
                list.resnet(&format!("{name}.resnets.{layer}"), before, width);
                before = width;
            }
            if level + 1 < channels.len() {
                list.convolution(&format!("{name}.upsamplers.0.conv"), width, width, 3);
            }
        }
        list.layer("decoder.conv_norm_out", &[finest]);
        list.convolution("decoder.conv_out", finest, self.out_channels, 3);
        list.0
    }
}

struct List(Vec<(String, Vec<usize>)>);

impl List {
    /// A weight of this shape, and a bias with one element per row.
    fn layer(&mut self, name: &str, shape: &[usize]) {
        self.0.push((format!("{name}.weight"), shape.to_vec()));
        self.0.push((format!("{name}.bias"), shape[..1].to_vec()));
    }

    fn convolution(&mut self, name: &str, from: usize, to: usize, kernel: usize) {
        self.layer(name, &[to, from, kernel, kernel]);
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
