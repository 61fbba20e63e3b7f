//! Names and shapes of the transformer's tensors in diffusers, and their places in a single file of Tencent's
//! (`hyvideo/modules/models.py`), which fuses queries, keys, values and feed-forwards, and has shift before scale in its last
//! layer. FramePack's own tensors have diffusers' names everywhere.

use super::config::TransformerConfig;
use super::patches::{FULL, HALF, Patch, QUARTER};
use crate::checkpoint::{LayerNames, Layout, TensorSpec};
use crate::mmdit::{BlockNames, SINUSOIDS, SingleNames, StreamNames};

/// Names of the blocks in a single file of Tencent's.
const TENCENT: BlockNames = BlockNames {
    streams: [
        StreamNames {
            modulation: Some("img_mod.linear"),
            projections: "img_attn_qkv",
            norms: ["img_attn_q_norm.weight", "img_attn_k_norm.weight"],
            output: "img_attn_proj",
            feed_forward: ["img_mlp.fc1", "img_mlp.fc2"],
        },
        StreamNames {
            modulation: Some("txt_mod.linear"),
            projections: "txt_attn_qkv",
            norms: ["txt_attn_q_norm.weight", "txt_attn_k_norm.weight"],
            output: "txt_attn_proj",
            feed_forward: ["txt_mlp.fc1", "txt_mlp.fc2"],
        },
    ],
    single: SingleNames {
        modulation: Some("modulation.linear"),
        norms: ["q_norm.weight", "k_norm.weight"],
    },
};

/// Names of the layers in files that ComfyUI wrote, whose blocks are FLUX's.
pub(super) const NAMES: LayerNames = LayerNames(&[
    ("img_attn_qkv", &["img_attn.qkv"]),
    ("img_attn_proj", &["img_attn.proj"]),
    ("img_attn_q_norm", &["img_attn.norm.query_norm"]),
    ("img_attn_k_norm", &["img_attn.norm.key_norm"]),
    ("img_mlp.fc1", &["img_mlp.0"]),
    ("img_mlp.fc2", &["img_mlp.2"]),
    ("img_mod.linear", &["img_mod.lin"]),
    ("txt_attn_qkv", &["txt_attn.qkv"]),
    ("txt_attn_proj", &["txt_attn.proj"]),
    ("txt_attn_q_norm", &["txt_attn.norm.query_norm"]),
    ("txt_attn_k_norm", &["txt_attn.norm.key_norm"]),
    ("txt_mlp.fc1", &["txt_mlp.0"]),
    ("txt_mlp.fc2", &["txt_mlp.2"]),
    ("txt_mod.linear", &["txt_mod.lin"]),
    ("single_blocks.*.q_norm", &["single_blocks.*.norm.query_norm"]),
    ("single_blocks.*.k_norm", &["single_blocks.*.norm.key_norm"]),
    ("modulation.linear", &["modulation.lin"]),
    ("self_attn_qkv", &["self_attn.qkv"]),
    ("self_attn_proj", &["self_attn.proj"]),
    (
        "individual_token_refiner.blocks.*.mlp.fc1",
        &["individual_token_refiner.blocks.*.mlp.0"],
    ),
    (
        "individual_token_refiner.blocks.*.mlp.fc2",
        &["individual_token_refiner.blocks.*.mlp.2"],
    ),
    ("t_embedder.mlp.0", &["t_embedder.in_layer"]),
    ("t_embedder.mlp.2", &["t_embedder.out_layer"]),
    ("c_embedder.linear_1", &["c_embedder.in_layer"]),
    ("c_embedder.linear_2", &["c_embedder.out_layer"]),
    ("time_in.mlp.0", &["time_in.in_layer"]),
    ("time_in.mlp.2", &["time_in.out_layer"]),
    ("guidance_in.mlp.0", &["guidance_in.in_layer"]),
    ("guidance_in.mlp.2", &["guidance_in.out_layer"]),
]);

/// All tensors of a transformer of this configuration.
pub(super) fn layout(config: &TransformerConfig) -> Vec<TensorSpec> {
    let width = config.width();
    let mut list = Layout::default();
    patches(&mut list, config, "x_embedder.proj", "img_in.proj", FULL);
    refiner(&mut list, config);
    let two = |list: &mut Layout, name: &str, inputs: usize, theirs: [&str; 2]| {
        let name = format!("time_text_embed.{name}_embedder");
        list.linear(&format!("{name}.linear_1"), [width, inputs], theirs[0], 0);
        list.linear(&format!("{name}.linear_2"), [width, width], theirs[1], 0);
    };
    two(
        &mut list,
        "timestep",
        SINUSOIDS,
        ["time_in.mlp.0", "time_in.mlp.2"],
    );
    if config.guidance_embeds {
        let theirs = ["guidance_in.mlp.0", "guidance_in.mlp.2"];
        two(&mut list, "guidance", SINUSOIDS, theirs);
    }
    let theirs = ["vector_in.in_layer", "vector_in.out_layer"];
    two(&mut list, "text", config.pooled_projection_dim, theirs);
    if config.is_framepack() {
        for (name, patch) in [("proj", FULL), ("proj_2x", HALF), ("proj_4x", QUARTER)] {
            let name = format!("clean_x_embedder.{name}");
            patches(&mut list, config, &name, &name, patch);
        }
        let vision = config.image_proj_dim;
        for (name, shape) in [("up", [3 * width, vision]), ("down", [width, 3 * width])] {
            let name = format!("image_projection.{name}");
            list.linear(&name, shape, &name, 0);
        }
    }
    list.blocks(&config.blocks(), &TENCENT);
    list.swapped(
        "norm_out.linear",
        &config.blocks(),
        "final_layer.adaLN_modulation.1",
    );
    list.linear("proj_out", [config.token_width(), width], "final_layer.linear", 0);
    list.0
}

/// A convolution over patches.
fn patches(list: &mut Layout, config: &TransformerConfig, name: &str, theirs: &str, [t, h, w]: Patch) {
    let width = config.width();
    let shape = vec![width, config.in_channels, t, h, w];
    list.rows(&format!("{name}.weight"), shape, &format!("{theirs}.weight"), 0);
    list.rows(&format!("{name}.bias"), vec![width], &format!("{theirs}.bias"), 0);
}

fn refiner(list: &mut Layout, config: &TransformerConfig) {
    let (width, text) = (config.width(), config.text_embed_dim);
    let name = "context_embedder";
    list.linear(
        &format!("{name}.proj_in"),
        [width, text],
        "txt_in.input_embedder",
        0,
    );
    let embedders = [
        ("timestep", SINUSOIDS, ["t_embedder.mlp.0", "t_embedder.mlp.2"]),
        ("text", text, ["c_embedder.linear_1", "c_embedder.linear_2"]),
    ];
    for (embedder, inputs, [first, second]) in embedders {
        let name = format!("{name}.time_text_embed.{embedder}_embedder");
        list.linear(
            &format!("{name}.linear_1"),
            [width, inputs],
            &format!("txt_in.{first}"),
            0,
        );
        list.linear(
            &format!("{name}.linear_2"),
            [width, width],
            &format!("txt_in.{second}"),
            0,
        );
    }
    for i in 0..config.num_refiner_layers {
        let block = format!("{name}.token_refiner.refiner_blocks.{i}");
        let theirs = format!("txt_in.individual_token_refiner.blocks.{i}");
        for norm in ["norm1", "norm2"] {
            for kind in ["weight", "bias"] {
                let part = format!("{norm}.{kind}");
                list.rows(
                    &format!("{block}.{part}"),
                    vec![width],
                    &format!("{theirs}.{part}"),
                    0,
                );
            }
        }
        for (part, projection) in ["to_q", "to_k", "to_v"].iter().enumerate() {
            list.linear(
                &format!("{block}.attn.{projection}"),
                [width, width],
                &format!("{theirs}.self_attn_qkv"),
                part * width,
            );
        }
        let layers = [
            ("attn.to_out.0", [width, width], "self_attn_proj"),
            ("ff.net.0.proj", [4 * width, width], "mlp.fc1"),
            ("ff.net.2", [width, 4 * width], "mlp.fc2"),
            ("norm_out.linear", [2 * width, width], "adaLN_modulation.1"),
        ];
        for (layer, shape, in_file) in layers {
            list.linear(
                &format!("{block}.{layer}"),
                shape,
                &format!("{theirs}.{in_file}"),
                0,
            );
        }
    }
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
        let count = |config: &TransformerConfig| -> usize {
            layout(config)
                .iter()
                .map(|spec| spec.shape.iter().product::<usize>())
                .sum()
        };
        // HunyuanVideo and FramePack, as published: 12.821 and 12.874 billion.
        let framepack = TransformerConfig {
            has_image_proj: true,
            has_clean_x_embedder: true,
            ..TransformerConfig::default()
        };
        assert_eq!(count(&TransformerConfig::default()) / 1_000_000, 12_821);
        assert_eq!(count(&framepack) / 1_000_000, 12_874);
    }

    #[test]
    fn names_are_unique() {
        let specs = layout(&TransformerConfig::default());
        let names: BTreeSet<_> = specs.iter().map(|spec| &spec.name).collect();
        assert_eq!(names.len(), specs.len());
    }
}
