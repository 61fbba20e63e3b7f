//! COMPUTES. The operations of model families, one file each: the contract, the CPU loops, and a test against the
//! reference definition on any device. CUDA kernels and calls of cuBLASLt are in `cuda`; `cudnn` has the fused
//! attention and the convolutions of NVIDIA's library, if it is installed.
//!
//! Operations take candle tensors of f32, f16 or bf16 and write into a tensor of the caller, which may be a strided view of a
//! larger one (`place`): a request allocates its buffers once. Statistics, softmax and sums are f32. No family is
//! named here.

mod activation;
mod adapter_copies;
mod allocated;
mod antialias;
mod apply_norm;
mod attention;
mod attention_workspace;
mod blocks;
mod change;
mod convolve;
mod convolve_cpu;
mod copy_rows;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod cudnn;
mod dequantize;
mod disjoint;
mod euler;
mod exchange;
mod finite;
mod glu;
mod group_moments;
mod libraries;
mod linear;
mod linear_cpu;
mod loops;
mod narrow_products;
mod norm;
mod pcm16;
mod pictures;
mod place;
mod planned;
mod product;
mod recorded;
mod relative_bias;
mod rope;
mod rows;
mod sequence;
mod snake;

pub use activation::{Nonlinearity, activate};
pub use adapter_copies::{AdapterCopies, adapter_copies, set_adapter_copies};
pub use allocated::allocated;
pub use antialias::{ANTIALIAS_TAPS, antialiased_snake};
pub use apply_norm::{ChannelNorm, Enlarge, MapReading, Pad, add_rows, add_scaled, apply_norm};
pub use attention::{Mask, attention, attention_in_fp8};
pub use attention_workspace::attention_workspace;
pub use blocks::{add_repeated, average_blocks, patched, unpatched};
pub use change::relative_change;
pub use convolve::{Filter, Onto, Steps, convolve, convolve_scratch};
pub use copy_rows::{copy_rows, embed, in_dtype};
pub use dequantize::dequantize;
pub use euler::{Finite, euler};
pub use exchange::{Exchange, Meet};
pub use finite::all_finite;
pub use glu::glu;
pub use group_moments::{Affine, GroupNorm, Residual, group_moments};
pub use libraries::{
    AttentionPaths, Libraries, PlansMade, attention_by, keep_plans_in, libraries, make_plans, prepare,
};
pub use linear::{
    Epilogue, LayerTo, LayersOfItems, LinearLayer, LowRank, Scratch, TermsOfItems, adapted_weight,
    adapts_weight, add_low_rank, fp8_of_rows, linear, linear_into, linear_scratch, linears_into,
    linears_of_items_into, low_rank_scratch, multiplies_fp8, projected_rows,
};
pub use narrow_products::{
    Fp8Products, Int8Products, int8_rotation, is_multiplied_in_fp8, set_fp8_products, set_int8_products,
};
pub use norm::{
    Activation, Codes, CodesOfRows, Gate, Modulation, Norm, add_residual, norm_modulate,
    residual_norm_modulate,
};
pub use pcm16::pcm16;
pub use pictures::{blank, blend, bytes_to_map, map_to_bytes, map_to_planes, planes_to_map};
pub use planned::{AttentionShape, ConvolutionShape, MaskShape, PLANNED_TARGET, Planned};
pub use recorded::{RecordedWork, record};
pub use relative_bias::relative_bias;
pub use rope::{Angles, Pairs, QkNorm, qk_norm_rope};
pub use sequence::{Reach, SequenceFilter, SequenceShape, Through};
pub use snake::{NormedWeight, RowLength, Snake, pad_sequence, snake_in_place};

#[cfg(test)]
mod testing;
