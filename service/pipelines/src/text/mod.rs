//! Text encoders and tokenizers that families share: prompts to tokens, tokens to encodings.

pub mod clip;
mod encoding;
pub mod t5;
pub mod tokenizers;
