//! COMPUTES. Tensor operations that candle lacks or does badly, one file each: fused, blocked, with
//! statistics in f32. Every function takes and gives candle tensors of any float dtype on any device; on
//! the CPU it runs its own loops over all cores, elsewhere it is composed of candle's operations; quantized
//! weights have kernels of their own on a CUDA device (`cuda`). Each
//! file's test holds it against a naive composition.

mod activation;
mod attention;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod cudnn;
mod dequantize;
mod group_norm;
mod layer_norm;
mod libraries;
mod linear;
mod residual;
mod rms_norm;
mod rope;
mod rows;

pub use activation::{gelu, gelu_tanh, quick_gelu, silu};
pub use attention::{attention, attention_in_chunks, attention_scratch, softmax};
pub use dequantize::dequantize;
pub use group_norm::{GroupStatistics, group_norm, group_norm_with, group_statistics};
pub use layer_norm::{layer_norm, modulated_layer_norm};
pub use libraries::{AttentionPaths, Libraries, keep_plans_in, libraries, prepare};
pub use linear::{linear, linear_scratch};
pub use residual::gated_add;
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use rows::PART_BYTES;

#[cfg(test)]
mod testing;
