//! Detection and reading of Z-Image checkpoints, by headers alone.
//!
//! Two layouts are supported. A **folder in diffusers' layout** has `model_index.json`, and each component in a separate
//! folder. A **single file**, as for ComfyUI (`z_image_bf16.safetensors`, `z_image_turbo_bf16.safetensors`), has the transformer only. Its companions are
//! in a diffusers folder, as FLUX's. Of that folder the tokenizer, the scheduler and `model_index.json` suffice if
//! `ae.safetensors` and `qwen_3_4b.safetensors` are beside the transformer, in that folder, or in `vae` and `text_encoders`
//! beside the transformer's folder, where ComfyUI keeps them.

use std::path::Path;

use super::config::TransformerConfig;
use super::layout::{NAMES, PATCH_IN, UNUSED, layout};
use crate::ModelError;
use crate::checkpoint::{Checkpoint, Marks, Naming, TensorSpec, TransformerFiles, heads, rotary_axes};
use crate::defaults::{NORMALIZATION_KEY, SHIFT_KEY, TRUNCATION_KEY};
use crate::files::damaged;

/// The supported pipeline classes.
pub(super) const PIPELINES: [&str; 3] = ["ZImagePipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline"];

/// The folders of such a pipeline.
pub(super) const FOLDERS: [&str; 5] = ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"];

/// Detection rules of Z-Image.
pub(super) const MARKS: Marks = Marks {
    family: "Z-Image",
    component: "transformer",
    class_prefix: "ZImage",
    pipelines: &PIPELINES,
    namings: &[
        (
            Naming::Authors,
            &["noise_refiner.0.attention.qkv.", "cap_embedder.0.", "x_embedder."],
        ),
        (
            Naming::Diffusers,
            // Or `to_qkv`, where it is fused.
            &["noise_refiner.0.attention.to_q", "cap_embedder.0.", PATCH_IN],
        ),
    ],
    names: NAMES,
    unused: Some(UNUSED),
    sidecar_keys: &[SHIFT_KEY, NORMALIZATION_KEY, TRUNCATION_KEY],
};

/// The inner width of the timestep embedding, which is not in the configuration.
fn timestep_inner(checkpoint: &Checkpoint) -> Result<usize, ModelError> {
    checkpoint.length("t_embedder.mlp.0.weight", 0)
}

impl TransformerFiles for TransformerConfig {
    const WHAT: &'static str = "a Z-Image transformer";

    fn of_single_file(
        path: &Path,
        checkpoint: &Checkpoint,
        naming: Naming,
        base: &TransformerConfig,
    ) -> Result<TransformerConfig, ModelError> {
        let [patch_in, norm] = match naming {
            Naming::Authors => ["x_embedder.weight", "layers.0.attention.q_norm.weight"],
            Naming::Diffusers => ["all_x_embedder.2-1.weight", "layers.0.attention.norm_q.weight"],
        };
        let sides = |name: &str| match *checkpoint.tensor(name)?.with_ones_of(&[2, 2]).shape {
            [rows, columns] => Ok((rows, columns)),
            _ => Err(damaged(path, format!("tensor {name} is no matrix"))),
        };
        let (dim, patch) = sides(patch_in)?;
        let (_, cap_feat_dim) = sides("cap_embedder.1.weight")?;
        let head = checkpoint.length(norm, 0)?;
        let heads = heads(path, dim, head)?;
        Ok(TransformerConfig {
            in_channels: patch / 4,
            dim,
            n_layers: checkpoint.blocks("layers"),
            n_refiner_layers: checkpoint.blocks("noise_refiner"),
            n_heads: heads,
            n_kv_heads: heads,
            cap_feat_dim,
            axes_dims: rotary_axes(head, base.axes_dims, TransformerConfig::default().axes_dims),
            timestep_inner: timestep_inner(checkpoint)?,
            ..base.clone()
        })
    }

    fn completed(self, checkpoint: &Checkpoint) -> Result<TransformerConfig, ModelError> {
        Ok(TransformerConfig {
            timestep_inner: timestep_inner(checkpoint)?,
            ..self
        })
    }

    fn check(&self) -> Result<(), String> {
        TransformerConfig::check(self)
    }

    fn layout(&self) -> Vec<TensorSpec> {
        layout(self)
    }
}
