//! Detection of HunyuanVideo and FramePack checkpoints, by headers alone, and the configuration of single files.
//!
//! A **folder in diffusers' layout** has `model_index.json`. A **single file** has the transformer only, in the naming of
//! Tencent or of diffusers. A **transformer's folder** and the companions of both are in `places`.

use std::path::Path;

use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use crate::ModelError;
use crate::checkpoint::{Checkpoint, Marks, Naming, TensorSpec, TransformerFiles, heads, rotary_axes};

/// The pipeline class of FramePack.
pub(super) const FRAMEPACK: &str = "HunyuanVideoFramepackPipeline";

/// The pipeline classes: text to film, and FramePack.
pub(super) const PIPELINES: [&str; 2] = ["HunyuanVideoPipeline", FRAMEPACK];

/// The folders of FramePack's pipeline. Text to film has all but the first two.
const FOLDERS: [&str; 9] = [
    "feature_extractor",
    "image_encoder",
    "scheduler",
    "text_encoder",
    "text_encoder_2",
    "tokenizer",
    "tokenizer_2",
    "transformer",
    "vae",
];

/// The folders of a pipeline of this class.
pub(super) fn folders_of(class: &str) -> &'static [&'static str] {
    match class {
        FRAMEPACK => &FOLDERS,
        _ => &FOLDERS[2..],
    }
}

/// The class of a pipeline of another model whose SigLIP FramePack takes, and its folders (`lllyasviel/flux_redux_bfl`).
pub(super) const PARTS: [(&str, &[&str]); 1] =
    [("FluxPriorReduxPipeline", &["feature_extractor", "image_encoder"])];

/// Detection rules of the family.
pub(super) const MARKS: Marks = Marks {
    family: "HunyuanVideo",
    component: "transformer",
    class_prefix: "HunyuanVideo",
    pipelines: &PIPELINES,
    namings: &[
        (
            Naming::Authors,
            &[
                "double_blocks.0.img_attn_qkv.",
                "txt_in.individual_token_refiner.",
            ],
        ),
        (
            Naming::Diffusers,
            &[
                "transformer_blocks.0.",
                "context_embedder.token_refiner.",
                "x_embedder.proj.weight",
            ],
        ),
    ],
    names: NAMES,
    unused: None,
    sidecar_keys: &["image_encoder", "sampling_order"],
};

impl TransformerFiles for TransformerConfig {
    const WHAT: &'static str = "a HunyuanVideo transformer";

    fn of_single_file(
        path: &Path,
        checkpoint: &Checkpoint,
        naming: Naming,
        base: &TransformerConfig,
    ) -> Result<TransformerConfig, ModelError> {
        let [
            latent_in,
            text_in,
            pooled_in,
            guidance_in,
            norm,
            double,
            single,
            refiner,
        ] = match naming {
            Naming::Authors => [
                "img_in.proj.weight",
                "txt_in.input_embedder.weight",
                "vector_in.in_layer.weight",
                "guidance_in.mlp.0.weight",
                "double_blocks.0.img_attn_q_norm.weight",
                "double_blocks",
                "single_blocks",
                "txt_in.individual_token_refiner.blocks",
            ],
            Naming::Diffusers => [
                "x_embedder.proj.weight",
                "context_embedder.proj_in.weight",
                "time_text_embed.text_embedder.linear_1.weight",
                "time_text_embed.guidance_embedder.linear_1.weight",
                "transformer_blocks.0.attn.norm_q.weight",
                "transformer_blocks",
                "single_transformer_blocks",
                "context_embedder.token_refiner.refiner_blocks",
            ],
        };
        let (first, second) = (
            |name| checkpoint.length(name, 0),
            |name| checkpoint.length(name, 1),
        );
        let head = first(norm)?;
        let vision = "image_projection.up.weight";
        let has_vision = checkpoint.has(vision);
        Ok(TransformerConfig {
            in_channels: second(latent_in)?,
            num_attention_heads: heads(path, first(latent_in)?, head)?,
            attention_head_dim: head,
            num_layers: checkpoint.blocks(double),
            num_single_layers: checkpoint.blocks(single),
            num_refiner_layers: checkpoint.blocks(refiner),
            guidance_embeds: checkpoint.has(guidance_in),
            text_embed_dim: second(text_in)?,
            pooled_projection_dim: second(pooled_in)?,
            rope_theta: base.rope_theta,
            rope_axes_dim: rotary_axes(
                head,
                base.rope_axes_dim,
                TransformerConfig::default().rope_axes_dim,
            ),
            has_image_proj: has_vision,
            image_proj_dim: match has_vision {
                true => second(vision)?,
                false => base.image_proj_dim,
            },
            has_clean_x_embedder: checkpoint.has("clean_x_embedder.proj.weight"),
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
