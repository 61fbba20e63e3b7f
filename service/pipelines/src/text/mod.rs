//! Text encoders and tokenizers that families share: prompts to tokens, tokens to encodings.

mod candle;
pub mod clip;
mod encoding;
pub mod qwen3;
pub mod t5;
pub mod tokenizers;
