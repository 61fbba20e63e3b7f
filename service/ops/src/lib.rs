//! COMPUTES. Tensor operations that candle lacks or does badly, one file each: fused, blocked, with
//! statistics in f32. Every function takes and gives candle tensors of any float dtype on any device; on
//! the CPU it runs its own loops over all cores, elsewhere it is composed of candle's operations; quantized
//! weights have kernels of their own on a CUDA device (`cuda`). Each
//! file's test holds it against a naive composition.

mod activation;
mod apply_norm;
mod attention;
mod attention_workspace;
mod composed_attention;
mod copy_rows;
mod convolve;
mod convolve_cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod cudnn;
mod dequantize;
mod euler;
mod group_moments;
mod group_norm;
mod layer_norm;
mod libraries;
mod linear;
mod norm;
mod finite;
mod glu;
mod linear_cpu;
#[allow(dead_code)] // Some are there for operations in their place.
mod loops;
mod pictures;
mod place;
mod relative_bias;
mod residual;
mod rms_norm;
mod rope;
mod rows;

pub use activation::{Nonlinearity, activate, gelu, gelu_tanh, quick_gelu, silu};
pub use apply_norm::{ChannelNorm, MapReading, Pad, add_rows, apply_norm};
pub use attention::{Mask, attention};
pub use attention_workspace::attention_workspace;
pub use composed_attention::{attention_in_chunks, attention_scratch, composed_attention, softmax};
pub use copy_rows::{copy_rows, embed};
pub use dequantize::dequantize;
pub use euler::{Finite, euler};
pub use group_norm::{GroupStatistics, group_norm, group_norm_with, group_statistics};
pub use layer_norm::{layer_norm, modulated_layer_norm};
pub use linear::{
    Epilogue, LayerTo, Scratch, linear, linear_into, linear_scratch, linears_into, multiplies_fp8,
};
pub use norm::{
    Activation, Codes, Gate, Modulation, Norm, add_residual, norm_modulate, residual_norm_modulate,
};
pub use finite::all_finite;
pub use glu::glu;
pub use relative_bias::relative_bias;
pub use libraries::{AttentionPaths, Libraries, keep_plans_in, libraries, prepare};
pub use convolve::{Filter, Onto, Steps, convolve, convolve_scratch};
pub use group_moments::{Affine, GroupNorm, Residual, group_moments};
pub use pictures::{blank, blend, bytes_to_map, map_to_bytes, map_to_planes, planes_to_map};
pub use residual::gated_add;
pub use rms_norm::rms_norm;
pub use rope::{Angles, Pairs, QkNorm, qk_norm_rope};
pub use rows::PART_BYTES;

#[cfg(test)]
mod testing;
