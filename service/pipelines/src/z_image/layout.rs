//! Names and shapes of the transformer's tensors in diffusers, and their places in the single file for ComfyUI (the
//! names of Z-Image's own code), which fuses queries, keys and values.

use super::config::TransformerConfig;
use super::transformer::SINUSOIDS;
use crate::checkpoint::{LayerNames, Layout, TensorSpec};

/// In diffusers the first and the last layers are named by patch size: two by two, one in time.
pub(super) const PATCH_IN: &str = "all_x_embedder.2-1";
/// See [`PATCH_IN`].
pub(super) const LAST: &str = "all_final_layer.2-1";
/// The single file has one patch size.
const SINGLE_PATCH_IN: &str = "x_embedder";
const SINGLE_LAST: &str = "final_layer";

/// Further names of its layers: programs use the authors' names, or diffusers'.
pub(super) const NAMES: LayerNames = LayerNames(&[]);

/// A tensor of the published single file that no version of the model uses.
pub(super) const UNUSED: &str = "norm_final.weight";

/// A group of blocks of one kind.
pub(super) struct Blocks {
    pub(super) name: &'static str,
    pub(super) count: usize,
    pub(super) is_modulated: bool,
}

impl TransformerConfig {
    /// Blocks by kind: over the picture, over the text, over both.
    pub(super) fn blocks(&self) -> [Blocks; 3] {
        let blocks = |name, count, is_modulated| Blocks {
            name,
            count,
            is_modulated,
        };
        [
            blocks("noise_refiner", self.n_refiner_layers, true),
            blocks("context_refiner", self.n_refiner_layers, false),
            blocks("layers", self.n_layers, true),
        ]
    }

    /// Names and shapes of all tensors of this configuration.
    pub fn tensor_shapes(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        layout(self).into_iter().map(|spec| (spec.name, spec.shape))
    }
}

/// All tensors of a transformer of this configuration.
pub(super) fn layout(config: &TransformerConfig) -> Vec<TensorSpec> {
    let &TransformerConfig {
        dim,
        cap_feat_dim,
        timestep_inner,
        ..
    } = config;
    let (inner, head, timestep) = (
        config.feed_forward_width(),
        config.head(),
        config.timestep_width(),
    );
    let mut list = Layout::default();
    list.linear(PATCH_IN, [dim, config.patch_width()], SINGLE_PATCH_IN, 0);
    // A linear layer of the same name in the single file.
    let linear = |list: &mut Layout, name: &str, shape| list.linear(name, shape, name, 0);
    linear(&mut list, "t_embedder.mlp.0", [timestep_inner, SINUSOIDS]);
    linear(&mut list, "t_embedder.mlp.2", [timestep, timestep_inner]);
    list.same("cap_embedder.0.weight", &[cap_feat_dim]);
    linear(&mut list, "cap_embedder.1", [dim, cap_feat_dim]);
    list.same("x_pad_token", &[1, dim]);
    list.same("cap_pad_token", &[1, dim]);
    for blocks in config.blocks() {
        for i in 0..blocks.count {
            let block = format!("{}.{i}", blocks.name);
            let attention = format!("{block}.attention");
            for (part, name) in ["to_q", "to_k", "to_v"].iter().enumerate() {
                list.rows(
                    &format!("{attention}.{name}.weight"),
                    vec![dim, dim],
                    &format!("{attention}.qkv.weight"),
                    part * dim,
                );
            }
            let of_attention = [
                ("to_out.0", "out", &[dim, dim][..]),
                ("norm_q", "q_norm", &[head]),
                ("norm_k", "k_norm", &[head]),
            ];
            for (name, single, shape) in of_attention {
                let single = format!("{attention}.{single}.weight");
                list.rows(&format!("{attention}.{name}.weight"), shape.to_vec(), &single, 0);
            }
            for (name, shape) in [("w1", [inner, dim]), ("w2", [dim, inner]), ("w3", [inner, dim])] {
                list.same(&format!("{block}.feed_forward.{name}.weight"), &shape);
            }
            for norm in ["attention_norm1", "ffn_norm1", "attention_norm2", "ffn_norm2"] {
                list.same(&format!("{block}.{norm}.weight"), &[dim]);
            }
            if blocks.is_modulated {
                let modulation = format!("{block}.adaLN_modulation.0");
                linear(&mut list, &modulation, [4 * dim, timestep]);
            }
        }
    }
    let [modulation, single] = [LAST, SINGLE_LAST].map(|last| format!("{last}.adaLN_modulation.1"));
    list.linear(&modulation, [dim, timestep], &single, 0);
    let [last, single] = [LAST, SINGLE_LAST].map(|last| format!("{last}.linear"));
    list.linear(&last, [config.patch_width(), dim], &single, 0);
    list.0
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_published_model_has_its_published_size() {
        let specs = layout(&TransformerConfig::default());
        let numbers = |spec: &TensorSpec| spec.shape.iter().product::<usize>();
        assert_eq!(specs.iter().map(numbers).sum::<usize>(), 6_154_908_736);
        let names: BTreeSet<_> = specs.iter().map(|spec| &spec.name).collect();
        assert_eq!((names.len(), specs.len()), (521, 521));
    }
}
