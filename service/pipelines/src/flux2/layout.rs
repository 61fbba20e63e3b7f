//! Names and shapes of the transformer's tensors in diffusers, and their places in a single file of Black Forest Labs, which
//! fuses the queries, keys and values of double blocks, and has shift before scale in its last layer.

use super::config::TransformerConfig;
use crate::checkpoint::{LayerNames, Layout, TensorSpec};
use crate::mmdit::{BlockNames, SINUSOIDS, SingleNames, StreamNames};

/// Names of the blocks in a single file of Black Forest Labs. Blocks have no modulators.
const BFL: BlockNames = BlockNames {
    streams: [
        StreamNames {
            modulation: None,
            projections: "img_attn.qkv",
            norms: ["img_attn.norm.query_norm.weight", "img_attn.norm.key_norm.weight"],
            output: "img_attn.proj",
            feed_forward: ["img_mlp.0", "img_mlp.2"],
        },
        StreamNames {
            modulation: None,
            projections: "txt_attn.qkv",
            norms: ["txt_attn.norm.query_norm.weight", "txt_attn.norm.key_norm.weight"],
            output: "txt_attn.proj",
            feed_forward: ["txt_mlp.0", "txt_mlp.2"],
        },
    ],
    single: SingleNames {
        modulation: None,
        norms: ["norm.query_norm.weight", "norm.key_norm.weight"],
    },
};

/// Further names of the layers in single files: programs differ in the names of norms alone.
pub(super) const NAMES: LayerNames = LayerNames(&[]);

/// Name of the layers that embed a timestep.
pub(super) const TIMESTEP: &str = "time_guidance_embed.timestep_embedder";

/// All tensors of a transformer of this configuration.
pub(super) fn layout(config: &TransformerConfig) -> Vec<TensorSpec> {
    let width = config.width();
    let mut list = Layout::default();
    list.weight("x_embedder", [width, config.in_channels], "img_in", 0);
    list.weight(
        "context_embedder",
        [width, config.joint_attention_dim],
        "txt_in",
        0,
    );
    let [first, second] = ["linear_1", "linear_2"].map(|name| format!("{TIMESTEP}.{name}"));
    list.weight(&first, [width, SINUSOIDS], "time_in.in_layer", 0);
    list.weight(&second, [width, width], "time_in.out_layer", 0);
    for (name, parts) in [
        ("double_stream_modulation_img", 6),
        ("double_stream_modulation_txt", 6),
        ("single_stream_modulation", 3),
    ] {
        let sizes = [parts * width, width];
        list.weight(&format!("{name}.linear"), sizes, &format!("{name}.lin"), 0);
    }
    let blocks = config.blocks();
    list.blocks(&blocks, &BFL);
    list.swapped("norm_out.linear", &blocks, "final_layer.adaLN_modulation.1");
    list.weight("proj_out", [config.in_channels, width], "final_layer.linear", 0);
    list.0
}

impl TransformerConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        layout(self).into_iter().map(|spec| (spec.name, spec.shape))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_published_models_have_their_published_sizes() {
        for (config, numbers) in [
            (TransformerConfig::klein_4b(), 3_875_544_576_usize),
            (TransformerConfig::klein_9b(), 9_078_581_248),
        ] {
            let specs = layout(&config);
            let count: usize = specs
                .iter()
                .map(|spec| spec.shape.iter().product::<usize>())
                .sum();
            assert_eq!(count, numbers);
            let names: BTreeSet<_> = specs.iter().map(|spec| &spec.name).collect();
            assert_eq!(names.len(), specs.len());
        }
    }
}
