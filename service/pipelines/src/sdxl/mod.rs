//! Stable Diffusion XL: its checkpoints (`checkpoint`), stages (`stages`), and UNet.
//!
//! References are diffusers' `StableDiffusionXLPipeline`, `StableDiffusionXLImg2ImgPipeline` and
//! `StableDiffusionXLInpaintPipeline` with their models; tensors have diffusers' names. The text encoders are CLIP's, the
//! autoencoder is FLUX.1's with other numbers, and the steps are those of `samplers`.

mod attention;
mod config;
mod layout;
mod resnet;
mod table;
mod unet;

pub use config::{PerLevel, UnetConfig};
pub use unet::{Conditioning, Prompted, Unet};
