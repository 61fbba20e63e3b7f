//! Detection and reading of FLUX.2 checkpoints, by headers alone.
//!
//! Two layouts are supported. A **folder in diffusers' layout** has `model_index.json`, and each component in a separate
//! folder. A **single file** (`flux-2-klein-4b.safetensors`, `.gguf`) has the transformer only, in the naming of Black Forest
//! Labs or of diffusers. Its companions are in a diffusers folder, as FLUX.1's. Of that folder the tokenizer, the scheduler and
//! `model_index.json` suffice if `flux2-vae.safetensors` and `qwen_3_4b.safetensors` (for klein 9B `qwen_3_8b`) are beside the
//! transformer, in that folder, or in `vae` and `text_encoders` beside the transformer's folder, where ComfyUI keeps them.

use std::path::Path;

use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use crate::ModelError;
use crate::checkpoint::{Checkpoint, Marks, Naming, TensorSpec, TransformerFiles, heads, rotary_axes};

/// The supported pipeline classes.
pub(super) const PIPELINES: [&str; 2] = ["Flux2KleinPipeline", "Flux2KleinInpaintPipeline"];

/// The folders of such a pipeline.
pub(super) const FOLDERS: [&str; 5] = ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"];

/// Detection rules of FLUX.2.
pub(super) const MARKS: Marks = Marks {
    family: "FLUX.2 klein",
    component: "transformer",
    class_prefix: "Flux2",
    pipelines: &PIPELINES,
    namings: &[
        (
            Naming::Authors,
            &["double_stream_modulation_img.lin.", "double_blocks.0.img_attn."],
        ),
        (
            Naming::Diffusers,
            &["double_stream_modulation_img.linear.", "transformer_blocks.0."],
        ),
    ],
    names: NAMES,
    unused: None,
    sidecar_keys: &[],
};

impl TransformerFiles for TransformerConfig {
    const WHAT: &'static str = "a FLUX.2 transformer";

    fn of_single_file(
        path: &Path,
        checkpoint: &Checkpoint,
        naming: Naming,
        base: &TransformerConfig,
    ) -> Result<TransformerConfig, ModelError> {
        let [picture_in, text_in, guidance_in, norm, double, single] = match naming {
            Naming::Authors => [
                "img_in.weight",
                "txt_in.weight",
                "guidance_in.in_layer.weight",
                "double_blocks.0.img_attn.norm.query_norm.weight",
                "double_blocks",
                "single_blocks",
            ],
            Naming::Diffusers => [
                "x_embedder.weight",
                "context_embedder.weight",
                "time_guidance_embed.guidance_embedder.linear_1.weight",
                "transformer_blocks.0.attn.norm_q.weight",
                "transformer_blocks",
                "single_transformer_blocks",
            ],
        };
        let head = checkpoint.length(norm, 0)?;
        let published = TransformerConfig::default().axes_dims_rope;
        Ok(TransformerConfig {
            in_channels: checkpoint.length(picture_in, 1)?,
            out_channels: None,
            num_layers: checkpoint.blocks(double),
            num_single_layers: checkpoint.blocks(single),
            attention_head_dim: head,
            num_attention_heads: heads(path, checkpoint.length(picture_in, 0)?, head)?,
            joint_attention_dim: checkpoint.length(text_in, 1)?,
            guidance_embeds: checkpoint.has(guidance_in),
            axes_dims_rope: rotary_axes(head, base.axes_dims_rope, published),
            rope_theta: base.rope_theta,
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
