//! Detection and reading of Qwen-Image checkpoints, by headers alone.
//!
//! Two layouts are supported. A **folder in diffusers' layout** has `model_index.json`, and each component in a separate
//! folder. A **single file** (`qwen_image_bf16.safetensors`, `.gguf`) has the transformer only, under diffusers' names. Its
//! companions are in a diffusers folder, as FLUX.1's. Of that folder the tokenizer, the scheduler and `model_index.json` suffice if
//! `qwen_image_vae.safetensors` and `qwen_2.5_vl_7b.safetensors` are beside the transformer, in that folder, or in `vae` and
//! `text_encoders` beside the transformer's folder, where ComfyUI keeps them.

use std::path::Path;

use super::config::{PATCH, TransformerConfig};
use super::layout::{NAMES, layout};
use crate::ModelError;
use crate::checkpoint::{Checkpoint, Marks, Naming, TensorSpec, TransformerFiles, heads, rotary_axes};
use crate::defaults::SHIFT_KEY;

/// The supported pipeline classes.
pub(super) const PIPELINES: [&str; 6] = [
    "QwenImagePipeline",
    "QwenImageImg2ImgPipeline",
    "QwenImageInpaintPipeline",
    EDITS[0],
    EDITS[1],
    EDITS[2],
];

/// Those of models that edit pictures.
pub(super) const EDITS: [&str; 3] = [
    "QwenImageEditPipeline",
    "QwenImageEditInpaintPipeline",
    "QwenImageEditPlusPipeline",
];

/// The folders of such a pipeline.
pub(super) const FOLDERS: [&str; 5] = ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"];

/// The folders of a pipeline that edits pictures.
pub(super) const FOLDERS_OF_EDITS: [&str; 6] = [
    "processor",
    "scheduler",
    "text_encoder",
    "tokenizer",
    "transformer",
    "vae",
];

/// A tensor without a use, whose presence in a file says that references are modulated at time 0.
pub(super) const ZERO_MARK: &str = "__index_timestep_zero__";

/// Detection rules of Qwen-Image.
pub(super) const MARKS: Marks = Marks {
    family: "Qwen-Image",
    component: "transformer",
    class_prefix: "QwenImage",
    pipelines: &PIPELINES,
    namings: &[(
        Naming::Diffusers,
        &["txt_norm.", "transformer_blocks.0.img_mod.1."],
    )],
    names: NAMES,
    unused: Some(ZERO_MARK),
    sidecar_keys: &[SHIFT_KEY],
};

impl TransformerFiles for TransformerConfig {
    const WHAT: &'static str = "a Qwen-Image transformer";

    fn of_single_file(
        path: &Path,
        checkpoint: &Checkpoint,
        _naming: Naming,
        base: &TransformerConfig,
    ) -> Result<TransformerConfig, ModelError> {
        let head = checkpoint.length("transformer_blocks.0.attn.norm_q.weight", 0)?;
        let in_channels = checkpoint.length("img_in.weight", 1)?;
        let published = TransformerConfig::default().axes_dims_rope;
        Ok(TransformerConfig {
            in_channels,
            out_channels: Some(checkpoint.length("proj_out.weight", 0)? / (PATCH * PATCH)),
            num_layers: checkpoint.blocks("transformer_blocks"),
            attention_head_dim: head,
            num_attention_heads: heads(path, checkpoint.length("img_in.weight", 0)?, head)?,
            joint_attention_dim: checkpoint.length("txt_in.weight", 1)?,
            axes_dims_rope: rotary_axes(head, base.axes_dims_rope, published),
            zero_cond_t: base.zero_cond_t,
            use_additional_t_cond: checkpoint.has("time_text_embed.addition_t_embedding.weight"),
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
