//! How Z-Image checkpoints are recognised and read: by headers alone.
//!
//! Two shapes are known. A **folder in diffusers' layout** has `model_index.json`, and each component in a folder of its own.
//! A **single file**, as ComfyUI's users have it (`z_image_turbo_bf16.safetensors`), has the transformer only. Its companions
//! come from a diffusers folder, as FLUX's do; of that the tokenizer, the scheduler and `model_index.json` suffice where
//! `ae.safetensors` and `qwen_3_4b.safetensors` lie beside the transformer, in that folder, or in `vae` and `text_encoders`
//! beside the transformer's folder, which is where ComfyUI keeps them.

use std::path::Path;

use super::config::TransformerConfig;
use super::layout::{PATCH_IN, UNUSED, layout};
use crate::ModelError;
use crate::checkpoint::{self, Checkpoint, Marks, TensorSpec, whole};
use crate::files::damaged;

/// Pipelines whose checkpoints are run here.
pub(super) const PIPELINES: [&str; 2] = ["ZImagePipeline", "ZImageImg2ImgPipeline"];

/// The folders of such a pipeline.
pub(super) const FOLDERS: [&str; 5] = ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"];

/// Whose names a single file's tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    /// Those of Z-Image's own code.
    Own,
    /// diffusers'.
    Diffusers,
}

impl checkpoint::Naming for Naming {
    fn marks(self) -> &'static [&'static str] {
        match self {
            Naming::Own => &["noise_refiner.0.attention.qkv.", "cap_embedder.0.", "x_embedder."],
            Naming::Diffusers => &["noise_refiner.0.attention.to_q.", "cap_embedder.0.", PATCH_IN],
        }
    }
}

/// What Z-Image is known by.
pub(super) const MARKS: Marks<Naming> = Marks {
    family: "Z-Image",
    class_prefix: "ZImage",
    pipelines: &PIPELINES,
    namings: &[Naming::Own, Naming::Diffusers],
    unused: Some(UNUSED),
};

impl Naming {
    /// The tensors that a transformer of this configuration is made of in such a file.
    pub(super) fn specs(self, config: &TransformerConfig) -> Vec<TensorSpec> {
        match self {
            Naming::Own => layout(config),
            Naming::Diffusers => whole(config.tensor_shapes().collect()),
        }
    }
}

/// The width inside the timestep's layers, which no configuration says.
pub(super) fn timestep_inner(checkpoint: &Checkpoint) -> Result<usize, ModelError> {
    let shape = checkpoint.tensor("t_embedder.mlp.0.weight")?.shape;
    Ok(shape.first().copied().unwrap_or_default())
}

/// The configuration of a single file's transformer, from the shapes of its tensors. The widths of the rotary axes and the
/// constants cannot be seen there: they are the base's, or those of the published model.
pub(super) fn config_of_single_file(
    path: &Path,
    checkpoint: &Checkpoint,
    naming: Naming,
    base: &TransformerConfig,
) -> Result<TransformerConfig, ModelError> {
    let [patch_in, norm] = match naming {
        Naming::Own => ["x_embedder.weight", "layers.0.attention.q_norm.weight"],
        Naming::Diffusers => ["all_x_embedder.2-1.weight", "layers.0.attention.norm_q.weight"],
    };
    let sides = |name: &str| match *checkpoint.tensor(name)?.shape {
        [rows, columns] => Ok((rows, columns)),
        _ => Err(damaged(path, format!("tensor {name} is no matrix"))),
    };
    let (dim, patch) = sides(patch_in)?;
    let (_, cap_feat_dim) = sides("cap_embedder.1.weight")?;
    let head = checkpoint.tensor(norm)?.shape.iter().product::<usize>();
    if head == 0 || !dim.is_multiple_of(head) {
        return Err(damaged(
            path,
            format!("{dim} channels do not divide into heads of {head}"),
        ));
    }
    let blocks = |kind: &str| {
        let has = |i: &usize| {
            let block = format!("{kind}.{i}.");
            checkpoint.names().any(|name| name.starts_with(&block))
        };
        (0..).take_while(has).count()
    };
    let axes = match base.axes_dims.iter().sum::<usize>() == head {
        true => base.axes_dims,
        false => TransformerConfig::default().axes_dims,
    };
    Ok(TransformerConfig {
        in_channels: patch / 4,
        dim,
        n_layers: blocks("layers"),
        n_refiner_layers: blocks("noise_refiner"),
        n_heads: dim / head,
        n_kv_heads: dim / head,
        cap_feat_dim,
        axes_dims: axes,
        timestep_inner: timestep_inner(checkpoint)?,
        ..base.clone()
    })
}
