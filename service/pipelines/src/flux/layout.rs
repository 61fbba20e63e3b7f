//! Names and shapes of the transformer's tensors in diffusers, and their places in a single file of Black Forest Labs
//! (their reference's `flux/model.py` and `flux/modules/layers.py`), which fuses queries, keys, values and
//! feed-forwards, and has shift before scale in its last layer.

use super::config::TransformerConfig;
use crate::checkpoint::{Rows, TensorSpec};

/// Names in both layouts for one stream of a double block.
struct StreamNames {
    bfl: &'static str,
    modulation: &'static str,
    projections: [&'static str; 3],
    output: &'static str,
    feed_forward: &'static str,
    norms: [&'static str; 2],
}

const STREAMS: [StreamNames; 2] = [
    StreamNames {
        bfl: "img",
        modulation: "norm1",
        projections: ["to_q", "to_k", "to_v"],
        output: "to_out.0",
        feed_forward: "ff",
        norms: ["norm_q", "norm_k"],
    },
    StreamNames {
        bfl: "txt",
        modulation: "norm1_context",
        projections: ["add_q_proj", "add_k_proj", "add_v_proj"],
        output: "to_add_out",
        feed_forward: "ff_context",
        norms: ["norm_added_q", "norm_added_k"],
    },
];

const BFL_NORMS: [&str; 2] = ["query_norm", "key_norm"];

/// All tensors of a transformer of this configuration.
pub(super) fn layout(config: &TransformerConfig) -> Vec<TensorSpec> {
    let (width, inner) = (config.width(), config.feed_forward_width());
    let mut list = List(Vec::new());
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
    for i in 0..config.num_layers {
        let (block, bfl_block) = (format!("transformer_blocks.{i}"), format!("double_blocks.{i}"));
        for stream in &STREAMS {
            let bfl = format!("{bfl_block}.{}", stream.bfl);
            let modulation = format!("{block}.{}.linear", stream.modulation);
            list.linear(&modulation, [6 * width, width], &format!("{bfl}_mod.lin"), 0);
            for (part, name) in stream.projections.iter().enumerate() {
                let fused = format!("{bfl}_attn.qkv");
                list.linear(
                    &format!("{block}.attn.{name}"),
                    [width, width],
                    &fused,
                    part * width,
                );
            }
            let output = format!("{block}.attn.{}", stream.output);
            list.linear(&output, [width, width], &format!("{bfl}_attn.proj"), 0);
            let feed_forward = format!("{block}.{}", stream.feed_forward);
            list.linear(
                &format!("{feed_forward}.net.0.proj"),
                [inner, width],
                &format!("{bfl}_mlp.0"),
                0,
            );
            list.linear(
                &format!("{feed_forward}.net.2"),
                [width, inner],
                &format!("{bfl}_mlp.2"),
                0,
            );
            for (norm, bfl_norm) in stream.norms.iter().zip(BFL_NORMS) {
                let bfl = format!("{bfl}_attn.norm.{bfl_norm}.scale");
                list.norm(&format!("{block}.attn.{norm}"), config.attention_head_dim, bfl);
            }
        }
    }
    for i in 0..config.num_single_layers {
        let (block, bfl) = (
            format!("single_transformer_blocks.{i}"),
            format!("single_blocks.{i}"),
        );
        list.linear(
            &format!("{block}.norm.linear"),
            [3 * width, width],
            &format!("{bfl}.modulation.lin"),
            0,
        );
        let fused = format!("{bfl}.linear1");
        for (part, name) in ["to_q", "to_k", "to_v"].iter().enumerate() {
            list.linear(
                &format!("{block}.attn.{name}"),
                [width, width],
                &fused,
                part * width,
            );
        }
        list.linear(&format!("{block}.proj_mlp"), [inner, width], &fused, 3 * width);
        list.linear(
            &format!("{block}.proj_out"),
            [width, width + inner],
            &format!("{bfl}.linear2"),
            0,
        );
        for (norm, bfl_norm) in ["norm_q", "norm_k"].iter().zip(BFL_NORMS) {
            let bfl = format!("{bfl}.norm.{bfl_norm}.scale");
            list.norm(&format!("{block}.attn.{norm}"), config.attention_head_dim, bfl);
        }
    }
    list.linear(
        "norm_out.linear",
        [2 * width, width],
        "final_layer.adaLN_modulation.1",
        0,
    );
    for spec in list.0.iter_mut().rev().take(2) {
        let swapped = [(width, width), (0, width)];
        spec.rows = swapped.map(|(first, count)| Rows { first, count }).to_vec();
    }
    list.linear("proj_out", [config.out_width(), width], "final_layer.linear", 0);
    list.0
}

impl TransformerConfig {
    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        layout(self).into_iter().map(|spec| (spec.name, spec.shape))
    }
}

struct List(Vec<TensorSpec>);

impl List {
    /// A weight `[outputs, inputs]` and a bias `[outputs]`, which in a single file are rows of `bfl` from `first` on.
    fn linear(&mut self, name: &str, [outputs, inputs]: [usize; 2], bfl: &str, first: usize) {
        for (kind, shape) in [("weight", vec![outputs, inputs]), ("bias", vec![outputs])] {
            self.0.push(TensorSpec {
                name: format!("{name}.{kind}"),
                shape,
                tensor: format!("{bfl}.{kind}"),
                rows: vec![Rows {
                    first,
                    count: outputs,
                }],
            });
        }
    }

    fn norm(&mut self, name: &str, width: usize, bfl: String) {
        self.0.push(TensorSpec {
            name: format!("{name}.weight"),
            shape: vec![width],
            tensor: bfl,
            rows: vec![Rows {
                first: 0,
                count: width,
            }],
        });
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
