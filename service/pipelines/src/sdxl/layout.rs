//! Names and shapes of the UNet's tensors in diffusers, and in a single file of the original repository (Stability AI's
//! `sgm/modules/diffusionmodules/openaimodel.py`).

use super::config::UnetConfig;
use super::table::{Layer, Named};
use crate::checkpoint::{LayerNames, Layout, TensorSpec};

/// Further names of the layers in single files: there are none.
pub(super) const NAMES: LayerNames = LayerNames(&[]);

/// Names of the layers of a residual block, in diffusers and in the original repository.
const NORM1: (&str, &str) = ("norm1", "in_layers.0");
const CONV1: (&str, &str) = ("conv1", "in_layers.2");
const TIME: (&str, &str) = ("time_emb_proj", "emb_layers.1");
const NORM2: (&str, &str) = ("norm2", "out_layers.0");
const CONV2: (&str, &str) = ("conv2", "out_layers.3");
const SHORTCUT: (&str, &str) = ("conv_shortcut", "skip_connection");

/// The tensors of a layer, which in the original repository has the name `original`.
struct OfLayer<'a> {
    list: &'a mut Layout,
    name: &'a str,
    original: &'a str,
}

impl OfLayer<'_> {
    /// A weight of this shape, and a bias of its rows.
    fn layer(&mut self, (name, original): (&str, &str), shape: &[usize]) {
        self.tensor((name, original), "weight", shape);
        self.tensor((name, original), "bias", &shape[..1]);
    }

    fn tensor(&mut self, (name, original): (&str, &str), kind: &str, shape: &[usize]) {
        let full = |of: &str, layer: &str| match layer {
            "" => format!("{of}.{kind}"),
            layer => format!("{of}.{layer}.{kind}"),
        };
        let (name, original) = (full(self.name, name), full(self.original, original));
        self.list.rows(&name, shape.to_vec(), &original, 0);
    }
}

/// All tensors of a UNet of this configuration.
pub(super) fn layout(config: &UnetConfig) -> Vec<TensorSpec> {
    let mut list = Layout::default();
    let (finest, time) = (config.finest(), config.time_width());
    let added = config.projection_class_embeddings_input_dim;
    let convolution = |to: usize, from: usize| [to, from, 3, 3];
    for (name, original, shape) in [
        (
            "conv_in",
            "input_blocks.0.0",
            convolution(finest, config.in_channels).to_vec(),
        ),
        ("time_embedding.linear_1", "time_embed.0", vec![time, finest]),
        ("time_embedding.linear_2", "time_embed.2", vec![time, time]),
        ("add_embedding.linear_1", "label_emb.0.0", vec![time, added]),
        ("add_embedding.linear_2", "label_emb.0.2", vec![time, time]),
    ] {
        let mut of = OfLayer {
            list: &mut list,
            name,
            original,
        };
        of.layer(("", ""), &shape);
    }
    for Named {
        name,
        original,
        layer,
        ..
    } in &config.layers()
    {
        let mut of = OfLayer {
            list: &mut list,
            name,
            original,
        };
        match *layer {
            Layer::Keep => {}
            Layer::Halve { channels } | Layer::Double { channels } => {
                of.layer(("", ""), &convolution(channels, channels));
            }
            Layer::Resnet {
                channels: (from, to), ..
            } => {
                of.layer(NORM1, &[from]);
                of.layer(CONV1, &convolution(to, from));
                of.layer(TIME, &[to, time]);
                of.layer(NORM2, &[to]);
                of.layer(CONV2, &convolution(to, to));
                if from != to {
                    of.layer(SHORTCUT, &[to, from, 1, 1]);
                }
            }
            Layer::Attention { channels, depth, .. } => {
                of.layer(("norm", "norm"), &[channels]);
                of.layer(("proj_in", "proj_in"), &[channels, channels]);
                for number in 0..depth {
                    attention_layer(&mut of, number, channels, config.cross_attention_dim);
                }
                of.layer(("proj_out", "proj_out"), &[channels, channels]);
            }
        }
    }
    for (name, original, shape) in [
        ("conv_norm_out", "out.0", vec![finest]),
        (
            "conv_out",
            "out.2",
            convolution(config.out_channels, finest).to_vec(),
        ),
    ] {
        let mut of = OfLayer {
            list: &mut list,
            name,
            original,
        };
        of.layer(("", ""), &shape);
    }
    list.0
}

/// The tensors of one of the layers of an attention, which has the same names in both.
fn attention_layer(of: &mut OfLayer<'_>, number: usize, width: usize, text: usize) {
    let block = format!("transformer_blocks.{number}");
    for (attention, inputs) in [("attn1", width), ("attn2", text)] {
        for (part, inputs) in [("to_q", width), ("to_k", inputs), ("to_v", inputs)] {
            let name = format!("{block}.{attention}.{part}");
            of.tensor((&name, &name), "weight", &[width, inputs]);
        }
        let name = format!("{block}.{attention}.to_out.0");
        of.layer((&name, &name), &[width, width]);
    }
    for (name, shape) in [
        ("norm1", vec![width]),
        ("norm2", vec![width]),
        ("norm3", vec![width]),
        ("ff.net.0.proj", vec![8 * width, width]),
        ("ff.net.2", vec![width, 4 * width]),
    ] {
        let name = format!("{block}.{name}");
        of.layer((&name, &name), &shape);
    }
}

impl UnetConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> impl Iterator<Item = (String, Vec<usize>)> + use<> {
        layout(self).into_iter().map(|spec| (spec.name, spec.shape))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_published_model_has_its_published_size() {
        let specs = layout(&UnetConfig::default());
        let count: usize = specs
            .iter()
            .map(|spec| spec.shape.iter().product::<usize>())
            .sum();
        // stabilityai/stable-diffusion-xl-base-1.0.
        assert_eq!(count, 2_567_463_684);
        assert_eq!(specs.len(), 1680);
        for names in [
            specs.iter().map(|spec| &spec.name).collect::<BTreeSet<_>>(),
            specs.iter().map(|spec| &spec.tensor).collect(),
        ] {
            assert_eq!(names.len(), specs.len());
        }
    }

    #[test]
    fn every_large_tensor_is_in_a_streamed_block() {
        let config = UnetConfig::default();
        let block_of = config.block_of();
        let mut bytes = [0, 0];
        for spec in layout(&config) {
            let numbers: usize = spec.shape.iter().product();
            bytes[usize::from(block_of(&spec.name).is_some())] += numbers;
        }
        // What stays: the projections around attention, and embeddings.
        assert!(bytes[0] * 50 < bytes[1], "{bytes:?}");
    }
}
