//! The layers of the UNet in the order in which a map goes through them, with their names in diffusers and in the original
//! repository. Tensors, the walk, its memory and its streamed blocks all follow from this list.

use gpu::BlockPlace;

use super::config::UnetConfig;

/// A layer, or what happens to the map between two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layer {
    /// A residual block of `channels` (of its input and its output). `skip` of the input's are of a map that was kept.
    Resnet { channels: (usize, usize), skip: usize },
    /// Layers of attention over all positions and over the text.
    Attention {
        channels: usize,
        heads: usize,
        depth: usize,
    },
    /// A convolution to half the sides, rounded up.
    Halve { channels: usize },
    /// A convolution of a map of twice the sides, cut to those of the map that was kept last.
    Double { channels: usize },
    /// Keeps the map for the way up.
    Keep,
}

impl Layer {
    /// How many streamed blocks the layer is.
    fn blocks(self) -> usize {
        match self {
            Layer::Resnet { .. } | Layer::Halve { .. } | Layer::Double { .. } => 1,
            Layer::Attention { depth, .. } => depth,
            Layer::Keep => 0,
        }
    }
}

/// A layer with its names.
#[derive(Clone, Debug)]
pub(super) struct Named {
    /// In diffusers.
    pub(super) name: String,
    /// In the original repository.
    pub(super) original: String,
    pub(super) layer: Layer,
    /// Number of its first streamed block.
    pub(super) block: usize,
}

/// The list while it grows.
struct List {
    layers: Vec<Named>,
    blocks: usize,
    /// Channels of the maps that are kept.
    kept: Vec<usize>,
}

impl List {
    fn push(&mut self, name: String, original: String, layer: Layer) {
        self.layers.push(Named {
            name,
            original,
            layer,
            block: self.blocks,
        });
        self.blocks += layer.blocks();
    }

    fn keep(&mut self, channels: usize) {
        self.kept.push(channels);
        self.push(String::new(), String::new(), Layer::Keep);
    }
}

impl UnetConfig {
    /// The layers between the first convolution and the last.
    pub(super) fn layers(&self) -> Vec<Named> {
        let (levels, each) = (self.levels(), self.layers_per_block);
        let mut list = List {
            layers: Vec::new(),
            blocks: 0,
            kept: Vec::new(),
        };
        let attention = |level: usize| Layer::Attention {
            channels: self.block_out_channels[level],
            heads: self.heads(level),
            depth: self.depth(level),
        };
        let mut before = self.finest();
        list.keep(before);
        for (level, &width) in self.block_out_channels.iter().enumerate() {
            let name = format!("down_blocks.{level}");
            for layer in 0..each {
                let original = format!("input_blocks.{}", 1 + level * (each + 1) + layer);
                let resnet = Layer::Resnet {
                    channels: (before, width),
                    skip: 0,
                };
                list.push(format!("{name}.resnets.{layer}"), format!("{original}.0"), resnet);
                if self.has_attention(level) {
                    let named = format!("{name}.attentions.{layer}");
                    list.push(named, format!("{original}.1"), attention(level));
                }
                list.keep(width);
                before = width;
            }
            if level + 1 < levels {
                let original = format!("input_blocks.{}.0.op", (level + 1) * (each + 1));
                let halve = Layer::Halve { channels: width };
                list.push(format!("{name}.downsamplers.0.conv"), original, halve);
                list.keep(width);
            }
        }
        let middle = Layer::Resnet {
            channels: (before, before),
            skip: 0,
        };
        let middles = [
            ("resnets.0", middle),
            ("attentions.0", attention(levels - 1)),
            ("resnets.1", middle),
        ];
        for (place, (name, layer)) in middles.into_iter().enumerate() {
            list.push(
                format!("mid_block.{name}"),
                format!("middle_block.{place}"),
                layer,
            );
        }
        for (step, level) in (0..levels).rev().enumerate() {
            let (name, width) = (format!("up_blocks.{step}"), self.block_out_channels[level]);
            for layer in 0..=each {
                let original = format!("output_blocks.{}", step * (each + 1) + layer);
                let skip = list.kept.pop().unwrap_or_default();
                let resnet = Layer::Resnet {
                    channels: (before + skip, width),
                    skip,
                };
                list.push(format!("{name}.resnets.{layer}"), format!("{original}.0"), resnet);
                if self.has_attention(level) {
                    let named = format!("{name}.attentions.{layer}");
                    list.push(named, format!("{original}.1"), attention(level));
                }
                before = width;
            }
            if level > 0 {
                let behind = 1 + usize::from(self.has_attention(level));
                let original = format!("output_blocks.{}.{behind}.conv", step * (each + 1) + each);
                let double = Layer::Double { channels: width };
                list.push(format!("{name}.upsamplers.0.conv"), original, double);
            }
        }
        list.layers
    }

    /// How many streamed blocks there are.
    pub(super) fn blocks(&self) -> usize {
        let layers = self.layers();
        layers.last().map_or(0, |last| last.block + last.layer.blocks())
    }

    /// The streamed block of each tensor of the layers, by its name in diffusers. The first and the last convolution, the layers
    /// that embed times, and the norms and projections around attention are in none.
    pub(super) fn block_of(&self) -> impl Fn(&str) -> Option<BlockPlace> + use<> {
        let layers = self.layers();
        move |tensor: &str| {
            let within = |named: &Named| {
                let rest = tensor.strip_prefix(named.name.as_str())?.strip_prefix('.')?;
                match named.layer {
                    Layer::Keep => None,
                    Layer::Attention { .. } => {
                        let (number, _) = crate::checkpoint::numbered(rest, "transformer_blocks.")?;
                        Some(named.block + number)
                    }
                    Layer::Resnet { .. } | Layer::Halve { .. } | Layer::Double { .. } => Some(named.block),
                }
            };
            layers.iter().find_map(within).map(BlockPlace::each_pass)
        }
    }
}
