//! Detection of Wan's checkpoints, by headers alone, and the configuration of single files.
//!
//! A **folder in diffusers' layout** has `model_index.json`. A **single file** has a transformer only, in the names of Wan's
//! authors, which ComfyUI and GGUF files keep, or in those of diffusers; its companions are in `places`.

use std::path::Path;

use serde::Deserialize;

use super::config::TransformerConfig;
use super::layout::{NAMES, layout};
use crate::ModelError;
use crate::checkpoint::{Checkpoint, Marks, Naming, TensorSpec, TransformerFiles, heads};
use crate::defaults::SHIFT_KEY;
use crate::files::{incomplete, read_json, unsupported};

/// The pipeline classes: text to film, and picture to film.
pub(super) const PIPELINES: [&str; 2] = ["WanPipeline", "WanImageToVideoPipeline"];

/// The folders of a pipeline.
pub(super) const FOLDERS: [&str; 5] = ["scheduler", "text_encoder", "tokenizer", "transformer", "vae"];

/// The folder that only pipelines with two transformers have.
pub(super) const SECOND_FOLDER: [&str; 1] = ["transformer_2"];

/// The key of a sidecar with the transformer of low noise.
pub(super) const SECOND_KEY: &str = "transformer_2";

/// Detection rules of the family.
pub(crate) const MARKS: Marks = Marks {
    family: "Wan",
    component: "transformer",
    class_prefix: "Wan",
    pipelines: &PIPELINES,
    namings: &[
        (
            Naming::Authors,
            &["patch_embedding.", "text_embedding.0.", "blocks.0.cross_attn.k."],
        ),
        (
            Naming::Diffusers,
            &[
                "patch_embedding.",
                "condition_embedder.time_proj.",
                "blocks.0.attn2.to_k.",
            ],
        ),
    ],
    names: NAMES,
    unused: None,
    sidecar_keys: &[SECOND_KEY, SHIFT_KEY],
};

/// What a pipeline's `model_index.json` says besides its parts.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct PipelineConfig {
    /// Whether tokens of a first picture have a time of their own (Wan 2.2 5B).
    pub(super) expand_timesteps: bool,
    /// The part of the training steps from which on noise is high, if there is a transformer for each.
    pub(super) boundary_ratio: Option<f64>,
}

impl PipelineConfig {
    /// The configuration of a pipeline's folder.
    ///
    /// # Errors
    /// When it cannot be read, or its boundary is no part.
    pub(super) fn of(folder: &Path) -> Result<PipelineConfig, ModelError> {
        let path = folder.join("model_index.json");
        let config: PipelineConfig = read_json(&path)?;
        match config.boundary_ratio {
            Some(ratio) if !(ratio > 0.0 && ratio < 1.0) => {
                let problem = format!("its boundary_ratio is {ratio}; a number between 0 and 1 is expected");
                Err(unsupported(&path, problem))
            }
            _ => Ok(config),
        }
    }
}

/// The error for a file without the embedding of patches, which has five dimensions, more than some converters to GGUF keep.
pub(crate) fn no_embedding(path: &Path) -> ModelError {
    incomplete(
        path,
        "tensor patch_embedding.weight is missing, which converters to GGUF leave out since it has five dimensions: add it by the \
         converter's fix_5d_tensors.py, or take a file that has it",
    )
}

impl TransformerFiles for TransformerConfig {
    const WHAT: &'static str = "a Wan transformer";

    fn of_single_file(
        path: &Path,
        checkpoint: &Checkpoint,
        naming: Naming,
        base: &TransformerConfig,
    ) -> Result<TransformerConfig, ModelError> {
        let [text_in, inside, last] = match naming {
            Naming::Authors => [
                "text_embedding.0.weight",
                "blocks.0.ffn.0.weight",
                "head.head.weight",
            ],
            Naming::Diffusers => [
                "condition_embedder.text_embedder.linear_1.weight",
                "blocks.0.ffn.net.0.proj.weight",
                "proj_out.weight",
            ],
        };
        let patches = "patch_embedding.weight";
        // Heads are not to be seen in any shape: norms are of all heads together.
        let head = base.attention_head_dim;
        Ok(TransformerConfig {
            in_channels: checkpoint.length(patches, 1)?,
            out_channels: checkpoint.length(last, 0)? / 4,
            num_attention_heads: heads(path, checkpoint.length(patches, 0)?, head)?,
            attention_head_dim: head,
            text_dim: checkpoint.length(text_in, 1)?,
            ffn_dim: checkpoint.length(inside, 0)?,
            num_layers: checkpoint.blocks("blocks"),
            eps: base.eps,
            rope_max_seq_len: base.rope_max_seq_len,
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
