//! Z-Image and Z-Image-Turbo: their checkpoints (`checkpoint`), which of both a checkpoint is (`variant`), stages (`stages`),
//! and transformer.
//!
//! References are diffusers' `ZImagePipeline`, `ZImageImg2ImgPipeline` and `ZImageInpaintPipeline` with their models; tensors
//! have diffusers' names. The autoencoder is FLUX.1's, the text encoder is Qwen3.

mod blocks;
mod buffers;
mod checkpoint;
mod config;
mod layout;
mod model;
mod open;
mod planned;
mod positions;
mod quantize_rule;
mod stages;
mod transformer;
mod variant;

pub use self::model::{ZImage, ZImageModel};
pub use config::TransformerConfig;
pub use positions::{Lengths, positions, rotations};
pub use transformer::{
    Conditioning, Modulated, StepBuffers, Transformer, denoise_scratch, latent_of, negative_scratch,
    patches_of, refining_scratch, times,
};

/// The further names of the transformer's layers, and its tensors.
#[cfg(test)]
pub(crate) fn names_and_layout(
    config: &TransformerConfig,
) -> (crate::checkpoint::LayerNames, Vec<crate::checkpoint::TensorSpec>) {
    (layout::NAMES, layout::layout(config))
}
