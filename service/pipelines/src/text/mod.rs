//! Text encoders and tokenizers shared by families.

mod candle;
pub mod clip;
mod decoder;
pub(crate) mod encoding;
pub mod llama;
pub mod qwen2_vl;
pub mod qwen3;
mod shared;
pub mod t5;
pub mod tokenizers;
pub mod umt5;
