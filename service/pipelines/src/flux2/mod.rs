//! FLUX.2 klein: its checkpoints (`checkpoint`), stages (`stages`), and transformer.
//!
//! References are diffusers' `Flux2KleinPipeline` and `Flux2KleinInpaintPipeline` with their models; tensors have diffusers'
//! names. The text encoder is Qwen3, the blocks are those of `mmdit`, the autoencoder is FLUX.1's with another scale of latents.

mod checkpoint;
mod config;
mod layout;
mod model;
mod open;
mod planned;
mod positions;
mod quantize_rule;
mod references;
mod stages;
mod transformer;

pub use self::model::{Flux2, Flux2Model};
pub use crate::place::Place;
pub use config::TransformerConfig;
pub use positions::{positions, rotations};
pub use stages::mu;
pub use transformer::{Conditioning, Prompted, StepBuffers, Transformer, denoise_scratch};

/// The further names of the transformer's layers, and its tensors.
#[cfg(test)]
pub(crate) fn names_and_layout(
    config: &TransformerConfig,
) -> (crate::checkpoint::LayerNames, Vec<crate::checkpoint::TensorSpec>) {
    (layout::NAMES, layout::layout(config))
}
