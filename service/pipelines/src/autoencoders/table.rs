//! An autoencoder of residual blocks as a table of layers, under their names in diffusers.

use super::kernels::{Kernels, Resize};
use crate::checkpoint::Shapes;
use crate::files::check_sizes;

/// A layer of half an autoencoder. Channels are those of its input and of its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    /// A convolution of single positions, of the first or of the last map.
    OfPositions { channels: usize },
    /// A convolution, which may resize its map.
    Convolution {
        channels: (usize, usize),
        enlarged: Resize,
        halved: Resize,
    },
    /// A residual block. One that is `in_place` is computed in the memory of its level's first map.
    Resnet {
        channels: (usize, usize),
        in_place: bool,
    },
    /// Attention with one head.
    Attention { channels: usize },
    /// Group norm, SiLU and a convolution: the last layers of a half, which has their name.
    Last { channels: (usize, usize) },
}

impl Layer {
    fn convolution(channels: (usize, usize)) -> Layer {
        Layer::Convolution {
            channels,
            enlarged: Resize::NONE,
            halved: Resize::NONE,
        }
    }

    fn resnet(from: usize, to: usize) -> Layer {
        let (channels, in_place) = ((from, to), false);
        Layer::Resnet { channels, in_place }
    }
}

/// Half an autoencoder.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    pub(super) kernels: Kernels,
    /// Groups of group norms.
    pub(super) groups: usize,
    /// The layers in order, with their names.
    pub(super) list: Vec<(String, Layer)>,
}

/// An autoencoder of residual blocks, of pictures or of films.
pub(super) struct Residual<'a> {
    pub(super) kernels: Kernels,
    pub(super) norm_num_groups: usize,
    /// Channels of each resolution, the finest first.
    pub(super) block_out_channels: &'a [usize],
    /// Residual blocks of each resolution of the encoder; the decoder has one more.
    pub(super) layers_per_block: usize,
    pub(super) in_channels: usize,
    pub(super) out_channels: usize,
    pub(super) latent_channels: usize,
    /// Whether the middle has attention.
    pub(super) has_attention: bool,
    /// Whether there is a layer after the encoder.
    pub(super) has_quant: bool,
    /// Whether there is a layer before the decoder.
    pub(super) has_post_quant: bool,
    /// The resizing layer after the blocks of each resolution, counted from the beginning of each half; `None` for no layer.
    pub(super) resize: Vec<Option<Resize>>,
    /// Whether the decoder's resolutions without a resizing layer are computed in place.
    pub(super) in_place: bool,
}

impl Residual<'_> {
    /// Checks that this many layers of these sizes are supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub(super) fn check(&self) -> Result<(), String> {
        let widths = [self.in_channels, self.out_channels, self.latent_channels];
        check_sizes(&[
            (&widths, 1 << 16),
            (self.block_out_channels, 1 << 16),
            (&[self.layers_per_block], 1 << 6),
        ])?;
        if widths.contains(&0) {
            return Err("a picture, a frame or a latent of no channels".to_owned());
        }
        let groups = self.norm_num_groups;
        if groups == 0 {
            return Err("group norms of no groups".to_owned());
        }
        let mut channels = self.block_out_channels.iter();
        match channels.find(|channels| **channels == 0 || **channels % groups != 0) {
            Some(channels) => Err(format!("{channels} channels in {groups} groups")),
            None => Ok(()),
        }
    }

    /// The layers from the picture to the moments of its latent.
    pub(super) fn encoder(&self) -> Layers {
        let channels = self.block_out_channels;
        let (Some(&finest), Some(&coarsest)) = (channels.first(), channels.last()) else {
            return self.half(Vec::new());
        };
        let conv_in = Layer::convolution((self.in_channels, finest));
        let mut layers = vec![("encoder.conv_in".to_owned(), conv_in)];
        let mut before = finest;
        for (level, (&width, resize)) in channels.iter().zip(&self.resize).enumerate() {
            let name = format!("encoder.down_blocks.{level}");
            for layer in 0..self.layers_per_block {
                layers.push((format!("{name}.resnets.{layer}"), Layer::resnet(before, width)));
                before = width;
            }
            if let Some(halved) = *resize {
                let downsampler = Layer::Convolution {
                    channels: (width, width),
                    enlarged: Resize::NONE,
                    halved,
                };
                layers.push((format!("{name}.downsamplers.0.conv"), downsampler));
            }
        }
        self.middle("encoder.mid_block", coarsest, &mut layers);
        let moments = 2 * self.latent_channels;
        let channels = (coarsest, moments);
        layers.push(("encoder".to_owned(), Layer::Last { channels }));
        if self.has_quant {
            layers.push(("quant_conv".to_owned(), Layer::OfPositions { channels: moments }));
        }
        self.half(layers)
    }

    /// The layers from the latent to the picture.
    pub(super) fn decoder(&self) -> Layers {
        let channels = self.block_out_channels;
        let (Some(&finest), Some(&coarsest)) = (channels.first(), channels.last()) else {
            return self.half(Vec::new());
        };
        let latent = self.latent_channels;
        let mut layers = Vec::new();
        if self.has_post_quant {
            let post_quant = Layer::OfPositions { channels: latent };
            layers.push(("post_quant_conv".to_owned(), post_quant));
        }
        layers.push((
            "decoder.conv_in".to_owned(),
            Layer::convolution((latent, coarsest)),
        ));
        self.middle("decoder.mid_block", coarsest, &mut layers);
        let mut before = coarsest;
        for (level, (&width, resize)) in channels.iter().rev().zip(&self.resize).enumerate() {
            let name = format!("decoder.up_blocks.{level}");
            for layer in 0..=self.layers_per_block {
                let resnet = Layer::Resnet {
                    channels: (before, width),
                    in_place: self.in_place && resize.is_none(),
                };
                layers.push((format!("{name}.resnets.{layer}"), resnet));
                before = width;
            }
            if let Some(enlarged) = *resize {
                let upsampler = Layer::Convolution {
                    channels: (width, width),
                    enlarged,
                    halved: Resize::NONE,
                };
                layers.push((format!("{name}.upsamplers.0.conv"), upsampler));
            }
        }
        let channels = (finest, self.out_channels);
        layers.push(("decoder".to_owned(), Layer::Last { channels }));
        self.half(layers)
    }

    fn half(&self, list: Vec<(String, Layer)>) -> Layers {
        Layers {
            kernels: self.kernels,
            groups: self.norm_num_groups,
            list,
        }
    }

    fn middle(&self, name: &str, channels: usize, layers: &mut Vec<(String, Layer)>) {
        let resnet = Layer::resnet(channels, channels);
        layers.push((format!("{name}.resnets.0"), resnet));
        if self.has_attention {
            layers.push((format!("{name}.attentions.0"), Layer::Attention { channels }));
        }
        layers.push((format!("{name}.resnets.1"), resnet));
    }

    /// Names and shapes of the tensors of both halves.
    pub(super) fn tensor_shapes(&self) -> Shapes {
        let mut list = List {
            shapes: Vec::new(),
            kernels: self.kernels,
        };
        for (name, layer) in self.encoder().list.iter().chain(&self.decoder().list) {
            list.add(name, *layer);
        }
        list.shapes
    }
}

/// Tensors under the names by which the layers are read ([`super::half`]).
struct List {
    shapes: Shapes,
    kernels: Kernels,
}

impl List {
    fn add(&mut self, name: &str, layer: Layer) {
        match layer {
            Layer::OfPositions { channels } => {
                self.layer(name, &self.kernels.weight((channels, channels), 1));
            }
            Layer::Convolution { channels, .. } => self.convolution(name, channels),
            Layer::Resnet {
                channels: (from, to), ..
            } => {
                self.layer(&format!("{name}.norm1"), &[from]);
                self.convolution(&format!("{name}.conv1"), (from, to));
                self.layer(&format!("{name}.norm2"), &[to]);
                self.convolution(&format!("{name}.conv2"), (to, to));
                if from != to {
                    let shortcut = self.kernels.layer(&format!("{name}.conv_shortcut"));
                    self.layer(&shortcut, &self.kernels.weight((from, to), 1));
                }
            }
            Layer::Attention { channels } => {
                self.layer(&format!("{name}.group_norm"), &[channels]);
                for part in ["to_q", "to_k", "to_v", "to_out.0"] {
                    self.layer(&format!("{name}.{part}"), &[channels, channels]);
                }
            }
            Layer::Last { channels } => {
                self.layer(&format!("{name}.conv_norm_out"), &[channels.0]);
                self.convolution(&format!("{name}.conv_out"), channels);
            }
        }
    }

    /// A weight of this shape, and a bias with one element per row.
    fn layer(&mut self, name: &str, shape: &[usize]) {
        self.shapes.push((format!("{name}.weight"), shape.to_vec()));
        self.shapes.push((format!("{name}.bias"), shape[..1].to_vec()));
    }

    fn convolution(&mut self, name: &str, channels: (usize, usize)) {
        self.layer(&self.kernels.layer(name), &self.kernels.filter(channels));
    }
}
