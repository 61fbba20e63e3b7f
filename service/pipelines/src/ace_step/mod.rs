//! ACE-Step 1.5: music from text and lyrics.
//!
//! References are diffusers' `AceStepPipeline` with its models; tensors have diffusers' names. The autoencoder is Oobleck, the
//! text encoder Qwen3-Embedding.

mod authors;
mod blocks;
mod buffers;
mod checkpoint;
mod condition;
mod config;
mod guidance;
mod kept;
mod layers;
mod layout;
mod model;
mod open;
mod padded;
mod plan;
mod planned;
mod prompts;
mod quantize_rule;
mod sampling;
mod shared;
mod sound;
mod stages;
mod strengths;
mod tasks;
mod tokens;
mod transformer;

pub use self::model::{AceStep, AceStepModel};
pub use buffers::{StepBuffers, denoise_scratch, request_scratch};
pub use condition::ConditionEncoder;
pub use config::{ConditionConfig, LayerConfig, TokenConfig, TransformerConfig};
pub use guidance::Guidance;
pub use sampling::sigmas;
pub use tokens::{AudioDetokenizer, AudioTokenizer, Tokens};
pub use transformer::{Conditioning, Times, Transformer};

/// The further names of the transformer's layers, and its tensors.
#[cfg(test)]
pub(crate) fn names_and_layout(
    config: &TransformerConfig,
) -> (crate::checkpoint::LayerNames, Vec<crate::checkpoint::TensorSpec>) {
    let specs = layout::in_original(config.tensor_shapes(), layout::DECODER);
    (layout::NAMES, specs)
}
