//! What a client asks for, in types that no protocol is part of.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// An image to start from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitImage {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// RGB, 8 bits each, row-major.
    pub rgb: Bytes,
}

/// One picture to generate. Everything is resolved: defaults are filled in before this exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ImageRequest {
    /// The prompt.
    pub prompt: String,
    /// Pixels across; a multiple of 16.
    pub width: u32,
    /// Pixels down; a multiple of 16.
    pub height: u32,
    /// Denoising steps.
    pub steps: u32,
    /// Embedded guidance scale; ignored by models without it.
    pub guidance: f32,
    /// Seed of the starting noise.
    pub seed: u64,
    /// Tokens of the T5 prompt, padded to this length.
    pub max_sequence_length: u32,
    /// Image to image: where to start from; already of `width` x `height`.
    pub init_image: Option<InitImage>,
    /// Image to image: how much of the schedule to run, over 0 to 1.
    pub strength: f32,
    /// Whether previews are wanted while denoising (the decoder is then resident beside the transformer).
    pub preview: bool,
}

/// What a model does when the request leaves it open.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Defaults {
    /// Denoising steps.
    pub steps: u32,
    /// Guidance scale.
    pub guidance: f32,
    /// T5 tokens.
    pub max_sequence_length: u32,
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
}

impl Defaults {
    /// A request that leaves everything open: no prompt, seed 0, no image, no previews.
    pub fn request(&self) -> ImageRequest {
        ImageRequest {
            prompt: String::new(),
            width: self.width,
            height: self.height,
            steps: self.steps,
            guidance: self.guidance,
            seed: 0,
            max_sequence_length: self.max_sequence_length,
            init_image: None,
            strength: 1.0,
            preview: false,
        }
    }
}

/// A field of a request that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct RequestError {
    /// The field, as the public API names it.
    pub field: String,
    /// What is wrong with it and what would be right.
    pub problem: String,
}
