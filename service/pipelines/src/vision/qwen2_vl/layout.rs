//! Names and shapes of the tower's tensors, and their places in files.
//!
//! Files with the language model have queries, keys and values in one tensor, behind the prefix `visual.`. A GGUF file of
//! the tower alone (llama.cpp's mmproj) has them apart, and a patch's two times in two tensors.

use std::path::Path;

use super::{CELL, CHANNELS, QwenVisionConfig, TIMES};
use crate::ModelError;
use crate::checkpoint::{
    Checkpoint, ComponentFiles, Layout, Requested, TensorSpec, component_of_specs, numbered, open,
};

/// The weight of the patches of both times, `[hidden_size, 3, 2, patch, patch]`.
pub(super) const PATCHES: &str = "patch_embed.proj.weight";

/// The weights of the patches of each time, `[hidden_size, 3, patch, patch]`.
pub(super) const PATCHES_OF_TIMES: [&str; TIMES] = ["patch_embed.proj.0.weight", "patch_embed.proj.1.weight"];

/// Prefixes of the names: of transformers 5, and of older files and ComfyUI's.
const PREFIXES: [&str; 3] = ["model.visual.", "visual.", ""];

impl QwenVisionConfig {
    /// The configuration of a tower by the shapes of its tensors, which may be in a file with a language model of this width or
    /// alone in one. What shapes do not show is as published.
    pub(crate) fn of_shapes(shape_of: impl Fn(&str) -> Option<Vec<usize>>, width: usize) -> QwenVisionConfig {
        let published = QwenVisionConfig::default();
        let has = |name: &str| shape_of(name).is_some();
        let prefix = prefix_of(&has);
        let side = |name: &str, axis: usize| shape_of(&format!("{prefix}{name}"))?.get(axis).copied();
        let has_block = |i: &usize| has(&format!("{prefix}blocks.{i}.norm1.weight"));
        let depth = (0..).take_while(has_block).count();
        QwenVisionConfig {
            hidden_size: side("merger.ln_q.weight", 0).unwrap_or(published.hidden_size),
            intermediate_size: side("blocks.0.mlp.gate_proj.weight", 0)
                .unwrap_or(published.intermediate_size),
            depth: if depth == 0 { published.depth } else { depth },
            out_hidden_size: width,
            ..published
        }
    }

    /// Names and shapes of all tensors, queries, keys and values apart.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let specs = self.specs(&|_| false).into_iter();
        specs.map(|spec| (spec.name, spec.shape)).collect()
    }

    /// All tensors, which a file with the language model has by names that `has` knows.
    pub(crate) fn specs(&self, has: &dyn Fn(&str) -> bool) -> Vec<TensorSpec> {
        let prefix = prefix_of(has);
        let mut list = self.layout(|list, name, width| {
            let theirs = format!("{name}.qkv");
            for (number, part) in ["q", "k", "v"].into_iter().enumerate() {
                list.linear(&format!("{name}.{part}"), [width, width], &theirs, number * width);
            }
        });
        let side = self.patch_size;
        list.same(PATCHES, &[self.hidden_size, CHANNELS, TIMES, side, side]);
        let mut list = list.0;
        for spec in &mut list {
            spec.tensor = format!("{prefix}{}", spec.tensor);
        }
        list
    }

    /// All tensors, which a file of the tower alone has, by the names of [`own_name`].
    fn own_specs(&self) -> Vec<TensorSpec> {
        let mut list = self.layout(|list, name, width| {
            for part in ["q", "k", "v"].map(|part| format!("{name}.{part}")) {
                list.linear(&part, [width, width], &part, 0);
            }
        });
        let side = self.patch_size;
        for name in PATCHES_OF_TIMES {
            list.same(name, &[self.hidden_size, CHANNELS, side, side]);
        }
        list.0
    }

    /// All tensors but those of the patches; `projections` adds the queries, keys and values of an attention.
    fn layout(&self, projections: impl Fn(&mut Layout, &str, usize)) -> Layout {
        let (width, inner) = (self.hidden_size, self.intermediate_size);
        let mut list = Layout::default();
        let same = |list: &mut Layout, name: String, sizes: [usize; 2]| list.linear(&name, sizes, &name, 0);
        for i in 0..self.depth {
            let block = format!("blocks.{i}");
            for norm in ["norm1", "norm2"] {
                list.same(&format!("{block}.{norm}.weight"), &[width]);
            }
            projections(&mut list, &format!("{block}.attn"), width);
            same(&mut list, format!("{block}.attn.proj"), [width, width]);
            same(&mut list, format!("{block}.mlp.gate_proj"), [inner, width]);
            same(&mut list, format!("{block}.mlp.up_proj"), [inner, width]);
            same(&mut list, format!("{block}.mlp.down_proj"), [width, inner]);
        }
        list.same("merger.ln_q.weight", &[width]);
        let merged = CELL * width;
        same(&mut list, "merger.mlp.0".to_owned(), [merged, merged]);
        same(
            &mut list,
            "merger.mlp.2".to_owned(),
            [self.out_hidden_size, merged],
        );
        list
    }
}

/// Prefix of the names of a checkpoint's tensors.
fn prefix_of(has: &dyn Fn(&str) -> bool) -> &'static str {
    let known = |prefix: &&str| has(&format!("{prefix}merger.ln_q.weight"));
    PREFIXES.into_iter().find(known).unwrap_or(PREFIXES[0])
}

/// The tower in a file of its own, with this configuration, which may be in a file.
///
/// # Errors
/// The first tensor that is missing, of another shape, or stored in an unsupported way.
pub(crate) fn files_of_own_file(
    path: &Path,
    config: &QwenVisionConfig,
    wanted: Requested,
    config_file: Option<&Path>,
) -> Result<ComponentFiles, ModelError> {
    let checkpoint = Checkpoint::of_file(&open(path)?, own_name)?;
    component_of_specs(path, &checkpoint, &config.own_specs(), wanted, config_file)
}

/// Layers of a block: here and in llama.cpp.
const LAYERS: [(&str, &str); 9] = [
    ("norm1", "ln1"),
    ("norm2", "ln2"),
    ("attn.q", "attn_q"),
    ("attn.k", "attn_k"),
    ("attn.v", "attn_v"),
    ("attn.proj", "attn_out"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Tensors outside of blocks.
const OUTSIDE: [(&str, &str); 7] = [
    (PATCHES_OF_TIMES[0], "v.patch_embd.weight"),
    (PATCHES_OF_TIMES[1], "v.patch_embd.weight.1"),
    ("merger.ln_q.weight", "v.post_ln.weight"),
    ("merger.mlp.0.weight", "mm.0.weight"),
    ("merger.mlp.0.bias", "mm.0.bias"),
    ("merger.mlp.2.weight", "mm.2.weight"),
    ("merger.mlp.2.bias", "mm.2.bias"),
];

/// The name of a tensor of llama.cpp's file of the tower alone; `None` for one that is not read.
pub(crate) fn own_name(name: &str) -> Option<String> {
    if let Some((own, _)) = OUTSIDE.iter().find(|(_, theirs)| *theirs == name) {
        return Some((*own).to_owned());
    }
    let (number, rest) = numbered(name, "v.blk.")?;
    LAYERS.iter().find_map(|(layer, theirs)| {
        let kind = rest.strip_prefix(theirs)?.strip_prefix('.')?;
        Some(format!("blocks.{number}.{layer}.{kind}"))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_of_llama_cpp_lead_to_those_of_the_tower() {
        let config = QwenVisionConfig {
            depth: 2,
            ..QwenVisionConfig::default()
        };
        let specs = config.own_specs();
        let known: BTreeSet<String> = specs.iter().map(|spec| spec.tensor.clone()).collect();
        let of_block = |block: usize| {
            let kinds = |(_, theirs): &(&str, &str)| {
                let kinds: &[&str] = if theirs.starts_with("ln") {
                    &["weight"]
                } else {
                    &["weight", "bias"]
                };
                let theirs = (*theirs).to_owned();
                kinds
                    .iter()
                    .map(move |kind| format!("v.blk.{block}.{theirs}.{kind}"))
                    .collect::<Vec<String>>()
            };
            LAYERS.iter().flat_map(kinds).collect::<Vec<String>>()
        };
        let outside = OUTSIDE.iter().map(|(_, theirs)| (*theirs).to_owned());
        let theirs = outside.chain(of_block(0)).chain(of_block(1));
        let found: BTreeSet<String> = theirs.filter_map(|name| own_name(&name)).collect();
        assert_eq!(found, known);
        assert_eq!(own_name("v.blk.0.attn_qkv.weight"), None);
    }
}
