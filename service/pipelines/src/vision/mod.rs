//! Encoders of pictures shared by families.

pub mod processor;
pub mod qwen2_vl;
pub mod siglip;
