//! Encoders of pictures shared by families.

pub mod processor;
pub mod siglip;
