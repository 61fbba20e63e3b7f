//! Wan 2.1 and 2.2: films from text, and from a picture.
//!
//! References are diffusers' `WanPipeline` and `WanImageToVideoPipeline` with their models; tensors have diffusers' names.

pub(crate) mod blocks;
pub(crate) mod buffers;
mod config;
mod layout;
pub(crate) mod modulation;
pub(crate) mod shape;
mod transformer;

pub use config::TransformerConfig;
pub(crate) use layout::layout;
pub use transformer::{Seen, StepBuffers, Texts, Times, TokenCounts, Transformer, denoise_scratch};
