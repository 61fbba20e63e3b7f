//! COMPUTES. Tensor operations that candle lacks or does badly, one file each: fused, blocked, with
//! statistics in f32. Every function takes and gives candle tensors of any float dtype on any device; on
//! the CPU it runs its own loops over all cores, elsewhere it is composed of candle's operations; quantized
//! weights have kernels of their own on a CUDA device (`cuda`). Each
//! file's test holds it against a naive composition.

mod activation;
mod apply_norm;
mod attention;
mod composed_attention;
mod convolve;
mod convolve_cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod dequantize;
mod group_moments;
mod group_norm;
mod layer_norm;
mod linear;
mod pictures;
mod place;
mod residual;
mod rms_norm;
mod rope;
mod rows;

pub use activation::{gelu, gelu_tanh, quick_gelu, silu};
pub use apply_norm::{ChannelNorm, MapReading, Pad, add_rows, apply_norm};
pub use attention::{Mask, attention};
pub use composed_attention::{attention_in_chunks, attention_scratch, composed_attention, softmax};
pub use convolve::{Filter, Onto, Steps, convolve, convolve_scratch};
pub use dequantize::dequantize;
pub use group_moments::{Affine, GroupNorm, Residual, group_moments};
pub use group_norm::{GroupStatistics, group_norm, group_norm_with, group_statistics};
pub use layer_norm::{layer_norm, modulated_layer_norm};
pub use linear::{linear, linear_scratch};
pub use pictures::{blank, blend, bytes_to_map, map_to_bytes, map_to_planes, planes_to_map};
pub use residual::gated_add;
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use rows::PART_BYTES;

#[cfg(test)]
mod testing;
