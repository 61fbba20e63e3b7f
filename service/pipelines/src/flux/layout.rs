//! Names and shapes of the transformer's tensors in diffusers, and their places in a single file of Black Forest Labs
//! (their reference's `flux/model.py` and `flux/modules/layers.py`), which fuses queries, keys, values and
//! feed-forwards, and has shift before scale in its last layer.

use super::config::TransformerConfig;
use crate::checkpoint::{LayerNames, Layout, TensorSpec};
use crate::mmdit::{BlockNames, SingleNames, StreamNames};

/// Names of the blocks in a single file of Black Forest Labs.
const BFL: BlockNames = BlockNames {
    streams: [
        StreamNames {
            modulation: Some("img_mod.lin"),
            projections: "img_attn.qkv",
            norms: ["img_attn.norm.query_norm.weight", "img_attn.norm.key_norm.weight"],
            output: "img_attn.proj",
            feed_forward: ["img_mlp.0", "img_mlp.2"],
        },
        StreamNames {
            modulation: Some("txt_mod.lin"),
            projections: "txt_attn.qkv",
            norms: ["txt_attn.norm.query_norm.weight", "txt_attn.norm.key_norm.weight"],
            output: "txt_attn.proj",
            feed_forward: ["txt_mlp.0", "txt_mlp.2"],
        },
    ],
    single: SingleNames {
        modulation: Some("modulation.lin"),
        norms: ["norm.query_norm.weight", "norm.key_norm.weight"],
    },
};

/// Further names of the layers in single files: programs differ in the names of norms alone.
pub(super) const NAMES: LayerNames = LayerNames(&[]);

/// Names of the layers in XLabs' adapters: processors of attention, 1 the picture's and 2 the text's.
pub(super) const XLABS: LayerNames = LayerNames(&[
    ("img_attn.qkv", &["processor.qkv_lora1"]),
    ("img_attn.proj", &["processor.proj_lora1"]),
    ("txt_attn.qkv", &["processor.qkv_lora2"]),
    ("txt_attn.proj", &["processor.proj_lora2"]),
    (
        "single_blocks.*.linear2",
        &["single_blocks.*.processor.proj_lora"],
    ),
]);

/// All tensors of a transformer of this configuration.
pub(super) fn layout(config: &TransformerConfig) -> Vec<TensorSpec> {
    let width = config.width();
    let mut list = Layout::default();
    list.linear("x_embedder", [width, config.in_channels], "img_in", 0);
    list.linear(
        "context_embedder",
        [width, config.joint_attention_dim],
        "txt_in",
        0,
    );
    let guidance = config.guidance_embeds.then_some(("guidance", "guidance_in", 256));
    let embedders = [
        Some(("timestep", "time_in", 256)),
        guidance,
        Some(("text", "vector_in", config.pooled_projection_dim)),
    ];
    for (name, bfl, inputs) in embedders.into_iter().flatten() {
        let name = format!("time_text_embed.{name}_embedder");
        list.linear(
            &format!("{name}.linear_1"),
            [width, inputs],
            &format!("{bfl}.in_layer"),
            0,
        );
        list.linear(
            &format!("{name}.linear_2"),
            [width, width],
            &format!("{bfl}.out_layer"),
            0,
        );
    }
    list.blocks(&config.blocks(), &BFL);
    list.swapped(
        "norm_out.linear",
        &config.blocks(),
        "final_layer.adaLN_modulation.1",
    );
    list.linear("proj_out", [config.out_width(), width], "final_layer.linear", 0);
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
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn the_published_model_has_its_published_size() {
        let dev = TransformerConfig {
            guidance_embeds: true,
            ..TransformerConfig::default()
        };
        let count = |config: &TransformerConfig| -> usize {
            layout(config)
                .iter()
                .map(|spec| spec.shape.iter().product::<usize>())
                .sum()
        };
        // FLUX.1-dev and -schnell, as published.
        assert_eq!(count(&dev), 11_901_408_320);
        assert_eq!(count(&TransformerConfig::default()), 11_891_178_560);
        assert_eq!(layout(&dev).len(), 1160);
    }

    #[test]
    fn names_are_unique_and_fused_rows_are_covered_once() {
        let specs = layout(&TransformerConfig::default());
        let names: BTreeSet<_> = specs.iter().map(|spec| &spec.name).collect();
        assert_eq!(names.len(), specs.len());
        let mut spans: BTreeMap<&str, Vec<(usize, usize)>> = BTreeMap::new();
        for spec in &specs {
            let of_tensor = spans.entry(&spec.tensor).or_default();
            of_tensor.extend(spec.rows.iter().map(|rows| (rows.first, rows.count)));
        }
        for (tensor, spans) in &mut spans {
            spans.sort_unstable();
            let end = spans.iter().fold(0, |end, &(first, count)| {
                assert_eq!(end, first, "{tensor}");
                first + count
            });
            assert!(end > 0);
        }
    }
}
