//! Detection and reading of FLUX checkpoints, by headers alone.
//!
//! Two layouts are supported. A **folder in diffusers' layout** has `model_index.json`, and each component in a
//! folder of its own (in one file, or sharded with an index). A **single file** (`flux1-dev.safetensors`, `.gguf`,
//! `.pth`, `.pt`) has the transformer only, in the naming of Black Forest Labs or of diffusers. Its companions are in
//! a diffusers folder: the one that `X.moored.json` beside `X.safetensors` names (`{"base": "relative/path"}`), or
//! else the folder of the file, or else the only FLUX folder beside it. If that folder has no `vae/`, the autoencoder
//! is `ae.safetensors` beside the file or in that folder.
//!
//! Either may be stored quantized (`stored`); otherwise it can be quantized at load (`quantize_rule`).

use std::path::Path;

use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use crate::ModelError;
use crate::checkpoint::{self, Checkpoint, Marks, TensorSpec, heads, whole};
use crate::files::damaged;

/// The supported pipeline classes.
pub(super) const PIPELINES: [&str; 4] = [
    "FluxPipeline",
    "FluxImg2ImgPipeline",
    "FluxKontextPipeline",
    "FluxFillPipeline",
];

/// The folders of such a pipeline.
pub(super) const FOLDERS: [&str; 7] = [
    "scheduler",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "transformer",
    "vae",
];

/// Naming scheme of the tensors in a single file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FluxNaming {
    Bfl,
    Diffusers,
}

impl checkpoint::Naming for FluxNaming {
    fn marks(self) -> &'static [&'static str] {
        match self {
            // HunyuanVideo has blocks of the same names, and convolves its input.
            FluxNaming::Bfl => &["double_blocks.0.img_attn.", "single_blocks.0.", "img_in.weight"],
            FluxNaming::Diffusers => &[
                "transformer_blocks.0.",
                "single_transformer_blocks.0.",
                "x_embedder.weight",
            ],
        }
    }
}

/// Detection rules of FLUX.
pub(super) const MARKS: Marks<FluxNaming> = Marks {
    family: "FLUX",
    class_prefix: "Flux",
    pipelines: &PIPELINES,
    namings: &[FluxNaming::Bfl, FluxNaming::Diffusers],
    names: NAMES,
    unused: None,
    sidecar_keys: &[],
};

impl FluxNaming {
    /// The tensors of a transformer of this configuration in a single file.
    pub(super) fn specs(self, config: &TransformerConfig) -> Vec<TensorSpec> {
        match self {
            FluxNaming::Bfl => layout(config),
            FluxNaming::Diffusers => whole(config.tensor_shapes().collect()),
        }
    }
}

/// The configuration of a single file's transformer, from the shapes of its tensors. The rotary axes cannot be
/// derived: they are those of the base folder, or of every published FLUX.1.
pub(super) fn config_of_single_file(
    path: &Path,
    checkpoint: &Checkpoint,
    naming: FluxNaming,
    base: &TransformerConfig,
) -> Result<TransformerConfig, ModelError> {
    let [
        picture_in,
        text_in,
        pooled_in,
        guidance_in,
        norm,
        out,
        double,
        single,
    ] = match naming {
        FluxNaming::Bfl => [
            "img_in.weight",
            "txt_in.weight",
            "vector_in.in_layer.weight",
            "guidance_in.in_layer.weight",
            "double_blocks.0.img_attn.norm.query_norm.weight",
            "final_layer.linear.weight",
            "double_blocks",
            "single_blocks",
        ],
        FluxNaming::Diffusers => [
            "x_embedder.weight",
            "context_embedder.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "time_text_embed.guidance_embedder.linear_1.weight",
            "transformer_blocks.0.attn.norm_q.weight",
            "proj_out.weight",
            "transformer_blocks",
            "single_transformer_blocks",
        ],
    };
    let shape = |name: &str| Ok(checkpoint.tensor(name)?.shape);
    let columns = |name: &str| {
        let shape: Vec<usize> = shape(name)?;
        let columns = shape.get(1).copied();
        columns.ok_or_else(|| damaged(path, format!("tensor {name} is no matrix")))
    };
    let head = shape(norm)?.iter().product::<usize>();
    let width = shape(picture_in)?.first().copied().unwrap_or_default();
    let heads = heads(path, width, head)?;
    let blocks = |kind| checkpoint.blocks(kind);
    let axes = match base.axes_dims_rope.iter().sum::<usize>() == head {
        true => base.axes_dims_rope,
        false => TransformerConfig::default().axes_dims_rope,
    };
    Ok(TransformerConfig {
        in_channels: columns(picture_in)?,
        out_channels: shape(out)?.first().copied(),
        num_layers: blocks(double),
        num_single_layers: blocks(single),
        attention_head_dim: head,
        num_attention_heads: heads,
        joint_attention_dim: columns(text_in)?,
        pooled_projection_dim: columns(pooled_in)?,
        guidance_embeds: checkpoint.has(guidance_in),
        axes_dims_rope: axes,
        ..TransformerConfig::default()
    })
}
