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
use crate::checkpoint::{
    Checkpoint, Marks, Naming, TensorSpec, TransformerFiles, heads, length_in_diffusers, rotary_axes,
};

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

/// Detection rules of FLUX.
pub(super) const MARKS: Marks = Marks {
    family: "FLUX",
    component: "transformer",
    class_prefix: "Flux",
    pipelines: &PIPELINES,
    namings: &[
        // HunyuanVideo has blocks of the same names, and convolves its input; in FLUX.2 blocks have no modulators.
        (
            Naming::Authors,
            &["double_blocks.0.img_mod.", "single_blocks.0.", "img_in.weight"],
        ),
        (
            Naming::Diffusers,
            &[
                "transformer_blocks.0.norm1.",
                "single_transformer_blocks.0.",
                "x_embedder.weight",
            ],
        ),
    ],
    names: NAMES,
    unused: None,
    sidecar_keys: &[],
};

impl TransformerFiles for TransformerConfig {
    const WHAT: &'static str = "a FLUX transformer";

    fn of_single_file(
        path: &Path,
        checkpoint: &Checkpoint,
        naming: Naming,
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
            Naming::Authors => [
                "img_in.weight",
                "txt_in.weight",
                "vector_in.in_layer.weight",
                "guidance_in.in_layer.weight",
                "double_blocks.0.img_attn.norm.query_norm.weight",
                "final_layer.linear.weight",
                "double_blocks",
                "single_blocks",
            ],
            Naming::Diffusers => [
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
        let (rows, columns) = (
            |name| checkpoint.length(name, 0),
            |name| checkpoint.length(name, 1),
        );
        let head = length_in_diffusers(checkpoint, norm, 0)?;
        Ok(TransformerConfig {
            in_channels: columns(picture_in)?,
            out_channels: Some(rows(out)?),
            num_layers: checkpoint.blocks(double),
            num_single_layers: checkpoint.blocks(single),
            attention_head_dim: head,
            num_attention_heads: heads(path, rows(picture_in)?, head)?,
            joint_attention_dim: columns(text_in)?,
            pooled_projection_dim: columns(pooled_in)?,
            guidance_embeds: checkpoint.has(guidance_in),
            axes_dims_rope: rotary_axes(
                head,
                base.axes_dims_rope,
                TransformerConfig::default().axes_dims_rope,
            ),
            splits_last_layers: checkpoint.has("single_transformer_blocks.0.mlp_fc2.weight"),
            ..TransformerConfig::default()
        })
    }

    fn check(&self) -> Result<(), String> {
        TransformerConfig::check(self)
    }

    fn layout(&self) -> Vec<TensorSpec> {
        layout(self)
    }
}
