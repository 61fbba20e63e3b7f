//! Detection and reading of Z-Image checkpoints, by headers alone.
//!
//! Two layouts are supported. A **folder in diffusers' layout** has `model_index.json`, and each component in a
//! folder of its own. A **single file**, as for ComfyUI (`z_image_turbo_bf16.safetensors`), has the transformer only.
//! Its companions are in a diffusers folder, as FLUX's; of that the tokenizer, the scheduler and `model_index.json`
//! suffice if `ae.safetensors` and `qwen_3_4b.safetensors` are beside the transformer, in that folder, or in `vae`
//! and `text_encoders` beside the transformer's folder, where ComfyUI keeps them.

use std::path::Path;

use super::config::TransformerConfig;
use super::layout::{NAMES, PATCH_IN, UNUSED, layout};
use crate::ModelError;
use crate::checkpoint::{self, Checkpoint, Marks, TensorSpec, heads, whole};
use crate::files::damaged;

/// The supported pipeline classes.
pub(super) const PIPELINES: [&str; 2] = ["ZImagePipeline", "ZImageImg2ImgPipeline"];

/// The folders of such a pipeline.
pub(super) const FOLDERS: [&str; 5] = ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"];

/// Naming scheme of the tensors in a single file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ZImageNaming {
    /// Z-Image's own code.
    Own,
    Diffusers,
}

impl checkpoint::Naming for ZImageNaming {
    fn marks(self) -> &'static [&'static str] {
        match self {
            ZImageNaming::Own => &["noise_refiner.0.attention.qkv.", "cap_embedder.0.", "x_embedder."],
            ZImageNaming::Diffusers => &["noise_refiner.0.attention.to_q.", "cap_embedder.0.", PATCH_IN],
        }
    }
}

/// Detection rules of Z-Image.
pub(super) const MARKS: Marks<ZImageNaming> = Marks {
    family: "Z-Image",
    class_prefix: "ZImage",
    pipelines: &PIPELINES,
    namings: &[ZImageNaming::Own, ZImageNaming::Diffusers],
    names: NAMES,
    unused: Some(UNUSED),
    sidecar_keys: &[],
};

impl ZImageNaming {
    /// The tensors of a transformer of this configuration in a single file.
    pub(super) fn specs(self, config: &TransformerConfig) -> Vec<TensorSpec> {
        match self {
            ZImageNaming::Own => layout(config),
            ZImageNaming::Diffusers => whole(config.tensor_shapes().collect()),
        }
    }
}

/// The inner width of the timestep embedding, which is not in the configuration.
pub(super) fn timestep_inner(checkpoint: &Checkpoint) -> Result<usize, ModelError> {
    let shape = checkpoint.tensor("t_embedder.mlp.0.weight")?.shape;
    Ok(shape.first().copied().unwrap_or_default())
}

/// The configuration of a single file's transformer, from the shapes of its tensors. The rotary axes and the
/// constants cannot be derived: they are those of the base folder, or of the published model.
pub(super) fn config_of_single_file(
    path: &Path,
    checkpoint: &Checkpoint,
    naming: ZImageNaming,
    base: &TransformerConfig,
) -> Result<TransformerConfig, ModelError> {
    let [patch_in, norm] = match naming {
        ZImageNaming::Own => ["x_embedder.weight", "layers.0.attention.q_norm.weight"],
        ZImageNaming::Diffusers => ["all_x_embedder.2-1.weight", "layers.0.attention.norm_q.weight"],
    };
    let sides = |name: &str| match *checkpoint.tensor(name)?.with_ones_of(&[2, 2]).shape {
        [rows, columns] => Ok((rows, columns)),
        _ => Err(damaged(path, format!("tensor {name} is no matrix"))),
    };
    let (dim, patch) = sides(patch_in)?;
    let (_, cap_feat_dim) = sides("cap_embedder.1.weight")?;
    let head = checkpoint.tensor(norm)?.shape.iter().product::<usize>();
    let heads = heads(path, dim, head)?;
    let blocks = |kind| checkpoint.blocks(kind);
    let axes = match base.axes_dims.iter().sum::<usize>() == head {
        true => base.axes_dims,
        false => TransformerConfig::default().axes_dims,
    };
    Ok(TransformerConfig {
        in_channels: patch / 4,
        dim,
        n_layers: blocks("layers"),
        n_refiner_layers: blocks("noise_refiner"),
        n_heads: heads,
        n_kv_heads: heads,
        cap_feat_dim,
        axes_dims: axes,
        timestep_inner: timestep_inner(checkpoint)?,
        ..base.clone()
    })
}
