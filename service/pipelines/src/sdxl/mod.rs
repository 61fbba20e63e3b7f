//! Stable Diffusion XL: its checkpoints (`checkpoint`), stages (`stages`), and UNet.
//!
//! References are diffusers' `StableDiffusionXLPipeline`, `StableDiffusionXLImg2ImgPipeline` and
//! `StableDiffusionXLInpaintPipeline` with their models; tensors have diffusers' names. The text encoders are CLIP's, the
//! autoencoder is FLUX.1's with other numbers, and the steps are those of `samplers`.

mod attention;
mod checkpoint;
mod config;
mod convolution;
mod layout;
mod model;
mod open;
mod planned;
mod quantize_rule;
mod resnet;
mod stages;
mod table;
mod unet;
mod walk;

pub use self::model::{Sdxl, SdxlModel};
pub use config::{PerLevel, UnetConfig};
pub use stages::{POOLED, STATES};
pub use unet::{Conditioning, Prompted, Unet};
pub use walk::Sizes;

/// The further names of the UNet's layers, and its tensors.
#[cfg(test)]
pub(crate) fn names_and_layout(
    config: &UnetConfig,
) -> (crate::checkpoint::LayerNames, Vec<crate::checkpoint::TensorSpec>) {
    (layout::NAMES, layout::layout(config))
}
