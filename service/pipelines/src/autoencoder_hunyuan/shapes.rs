//! Names and shapes of the autoencoder's tensors, as [`super::HunyuanVaeEncoder`] and [`super::HunyuanVaeDecoder`]
//! need them.

use super::config::HunyuanVaeConfig;

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
        let mut list = List(Vec::new());
        let channels = &self.block_out_channels;
        let (Some(&finest), Some(&coarsest)) = (channels.first(), channels.last()) else {
            return list.0;
        };
        let (latent, moments) = (self.latent_channels, 2 * self.latent_channels);
        let attention = self.mid_block_add_attention;

        list.causal("encoder.conv_in", self.in_channels, finest, 3);
        let mut before = finest;
        for (level, &width) in channels.iter().enumerate() {
            let name = format!("encoder.down_blocks.{level}");
            for layer in 0..self.layers_per_block {
                list.resnet(&format!("{name}.resnets.{layer}"), before, width);
                before = width;
            }
            if self.resize(level).is_some() {
                list.causal(&format!("{name}.downsamplers.0.conv"), width, width, 3);
            }
        }
        list.middle("encoder.mid_block", coarsest, attention);
        list.layer("encoder.conv_norm_out", &[coarsest]);
        list.causal("encoder.conv_out", coarsest, moments, 3);
        list.layer("quant_conv", &[moments, moments, 1, 1, 1]);

        list.layer("post_quant_conv", &[latent, latent, 1, 1, 1]);
        list.causal("decoder.conv_in", latent, coarsest, 3);
        list.middle("decoder.mid_block", coarsest, attention);
        let mut before = coarsest;
        for (level, &width) in channels.iter().rev().enumerate() {
            let name = format!("decoder.up_blocks.{level}");
            for layer in 0..=self.layers_per_block {
                list.resnet(&format!("{name}.resnets.{layer}"), before, width);
                before = width;
            }
            if self.resize(level).is_some() {
                list.causal(&format!("{name}.upsamplers.0.conv"), width, width, 3);
            }
        }
        list.layer("decoder.conv_norm_out", &[finest]);
        list.causal("decoder.conv_out", finest, self.out_channels, 3);
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

    /// `HunyuanVideoCausalConv3d`.
    fn causal(&mut self, name: &str, from: usize, to: usize, kernel: usize) {
        self.layer(&format!("{name}.conv"), &[to, from, kernel, kernel, kernel]);
    }

    fn resnet(&mut self, name: &str, from: usize, to: usize) {
        self.layer(&format!("{name}.norm1"), &[from]);
        self.causal(&format!("{name}.conv1"), from, to, 3);
        self.layer(&format!("{name}.norm2"), &[to]);
        self.causal(&format!("{name}.conv2"), to, to, 3);
        if from != to {
            self.causal(&format!("{name}.conv_shortcut"), from, to, 1);
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
