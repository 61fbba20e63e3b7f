//! Names and shapes of the transformer's tensors in diffusers, and in files of Wan's authors (`wan/modules/model.py`), whose
//! names ComfyUI and others keep.

use super::config::TransformerConfig;
use crate::checkpoint::{LayerNames, Layout, TensorSpec};

/// No further names of layers are known.
pub(super) const NAMES: LayerNames = LayerNames(&[]);

/// The layers of an attention: here, and in the authors' files.
const ATTENTION: [(&str, &str); 4] = [("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o")];

/// All tensors of a transformer of this configuration.
pub(crate) fn layout(config: &TransformerConfig) -> Vec<TensorSpec> {
    let width = config.width();
    let mut list = Layout::default();
    let [t, h, w] = config.patch_size;
    list.same("patch_embedding.weight", &[width, config.in_channels, t, h, w]);
    list.same("patch_embedding.bias", &[width]);
    for (name, theirs, shape) in [
        (
            "time_embedder.linear_1",
            "time_embedding.0",
            [width, config.freq_dim],
        ),
        ("time_embedder.linear_2", "time_embedding.2", [width, width]),
        ("time_proj", "time_projection.1", [6 * width, width]),
        (
            "text_embedder.linear_1",
            "text_embedding.0",
            [width, config.text_dim],
        ),
        ("text_embedder.linear_2", "text_embedding.2", [width, width]),
    ] {
        list.linear(&format!("condition_embedder.{name}"), shape, theirs, 0);
    }
    for i in 0..config.num_layers {
        block(&mut list, &format!("blocks.{i}"), &format!("blocks.{i}"), config);
    }
    list.rows("scale_shift_table", vec![1, 2, width], "head.modulation", 0);
    list.linear("proj_out", [config.token_width(), width], "head.head", 0);
    list.0
}

/// The tensors of one block.
fn block(list: &mut Layout, name: &str, theirs: &str, config: &TransformerConfig) {
    let (width, inner) = (config.width(), config.ffn_dim);
    for (attention, of_authors) in [("attn1", "self_attn"), ("attn2", "cross_attn")] {
        for (layer, short) in ATTENTION {
            let in_file = format!("{theirs}.{of_authors}.{short}");
            list.linear(
                &format!("{name}.{attention}.{layer}"),
                [width, width],
                &in_file,
                0,
            );
        }
        for norm in ["norm_q.weight", "norm_k.weight"] {
            let in_file = format!("{theirs}.{of_authors}.{norm}");
            list.rows(&format!("{name}.{attention}.{norm}"), vec![width], &in_file, 0);
        }
    }
    for kind in ["weight", "bias"] {
        // The authors count the norm before cross-attention as their third.
        list.rows(
            &format!("{name}.norm2.{kind}"),
            vec![width],
            &format!("{theirs}.norm3.{kind}"),
            0,
        );
    }
    list.linear(
        &format!("{name}.ffn.net.0.proj"),
        [inner, width],
        &format!("{theirs}.ffn.0"),
        0,
    );
    list.linear(
        &format!("{name}.ffn.net.2"),
        [width, inner],
        &format!("{theirs}.ffn.2"),
        0,
    );
    list.rows(
        &format!("{name}.scale_shift_table"),
        vec![1, 6, width],
        &format!("{theirs}.modulation"),
        0,
    );
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
    use crate::checkpoint::QuantizeRole;
    use crate::wan::shape::{block_of, role};

    fn small() -> TransformerConfig {
        TransformerConfig {
            num_attention_heads: 12,
            ffn_dim: 8960,
            num_layers: 30,
            ..TransformerConfig::default()
        }
    }

    #[test]
    fn the_published_models_have_their_published_sizes() {
        let count = |config: &TransformerConfig| -> usize {
            let sizes = config
                .tensor_shapes()
                .map(|(_, shape)| shape.iter().product::<usize>());
            sizes.sum()
        };
        let ti2v = TransformerConfig {
            in_channels: 48,
            out_channels: 48,
            num_attention_heads: 24,
            ffn_dim: 14_336,
            num_layers: 30,
            ..TransformerConfig::default()
        };
        // 1.419, 4.9998 and 14.2885 billion.
        assert_eq!(count(&small()) / 1_000_000, 1_418);
        assert_eq!(count(&ti2v) / 1_000_000, 4_999);
        assert_eq!(count(&TransformerConfig::default()) / 1_000_000, 14_288);
    }

    #[test]
    fn names_are_unique_here_and_in_the_authors_files() {
        let specs = layout(&small());
        for names in [
            specs.iter().map(|spec| &spec.name).collect::<BTreeSet<_>>(),
            specs.iter().map(|spec| &spec.tensor).collect(),
        ] {
            assert_eq!(names.len(), specs.len());
        }
    }

    #[test]
    fn blocks_are_quantized_and_nothing_else() {
        for (name, shape) in small().tensor_shapes() {
            let is_quantized = role(&name) == QuantizeRole::Quantized;
            let is_layer = name.starts_with("blocks.") && name.ends_with(".weight") && shape.len() == 2;
            assert_eq!(is_quantized, is_layer, "{name}");
            let is_in_block = name.starts_with("blocks.") && !name.ends_with("table");
            assert_eq!(block_of(&name).is_some(), is_in_block, "{name}");
        }
    }
}
