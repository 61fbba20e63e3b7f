//! Qwen-Image, and Qwen-Image-Edit in its three versions: its checkpoints (`checkpoint`), stages (`stages`), and transformer.
//!
//! References are diffusers' `QwenImagePipeline`, `QwenImageImg2ImgPipeline`, `QwenImageInpaintPipeline`, `QwenImageEditPipeline`
//! and `QwenImageEditPlusPipeline` with their models; tensors have diffusers' names. The text encoder is Qwen2.5-VL, which sees the
//! pictures that are edited; the blocks are those of `mmdit`; the autoencoder is Wan 2.1's, of one frame.

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
mod variant;

pub use self::model::{QwenImage, QwenImageModel};
pub use crate::place::Place;
pub use config::TransformerConfig;
pub use positions::{positions, rotations};
pub use transformer::{
    Conditioning, Modulated, Prompted, StepBuffers, TokenCounts, Transformer, denoise_scratch,
};
