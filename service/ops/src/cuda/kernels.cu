// Every kernel by its name.
#include "dequantize.cuh"
#include "digest.cuh"
#include "euler.cuh"
#include "exchange.cuh"
#include "fp8.cuh"
#include "int8.cuh"
#include "norm.cuh"
#include "packed.cuh"
#include "rope.cuh"
#include "shifted_bias.cuh"
#include "svdquant.cuh"

#define DEQUANTIZE_TO(format, read, dtype, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(moored::DEQUANTIZE_THREADS) dequantize_##format##_##dtype(                             \
        const uint8_t* bytes, unsigned long long scales_at, unsigned long long codes_at, unsigned numbers,       \
        unsigned columns, T* out) {                                                                              \
        moored::dequantize<moored::read>({bytes, bytes + scales_at, bytes + codes_at, numbers, columns}, out);   \
    }
#define DEQUANTIZE(format, ...)                                                                                  \
    DEQUANTIZE_TO(format, __VA_ARGS__, f32, float)                                                               \
    DEQUANTIZE_TO(format, __VA_ARGS__, f16, __half)                                                              \
    DEQUANTIZE_TO(format, __VA_ARGS__, bf16, __nv_bfloat16)

// Nibbles in groups of columns, by the types of their scales and zeros.
#define INT4_GROUPS(EACH, order, ...)                                         \
    EACH(int4_##order##_f16, ByUnit<moored::HalfGroups<moored::__VA_ARGS__>>) \
    EACH(int4_##order##_bf16, ByUnit<moored::Bf16Groups<moored::__VA_ARGS__>>)

// Formats other than fp8, by the suffix of their kernels and the type that reads them.
#define OTHER_FORMATS(EACH)                                             \
    EACH(int8, ByRow<moored::Int8Value>)                                \
    EACH(nf4, ByTable<moored::PlainAbsmax>)                             \
    EACH(nf4_double, ByTable<moored::NestedAbsmax>)                     \
    EACH(q4_0, ByBlock<moored::Q4_0>)                                   \
    EACH(q4_1, ByBlock<moored::Q4_1>)                                   \
    EACH(q5_0, ByBlock<moored::Q5_0>)                                   \
    EACH(q5_1, ByBlock<moored::Q5_1>)                                   \
    EACH(q8_0, ByBlock<moored::Q8_0>)                                   \
    EACH(q2_k, ByBlock<moored::Q2_K>)                                   \
    EACH(q3_k, ByBlock<moored::Q3_K>)                                   \
    EACH(q4_k, ByBlock<moored::Q4_K>)                                   \
    EACH(q5_k, ByBlock<moored::Q5_K>)                                   \
    EACH(q6_k, ByBlock<moored::Q6_K>)                                   \
    EACH(iq4_nl, ByBlock<moored::IQ4_NL>)                               \
    EACH(iq4_xs, ByBlock<moored::IQ4_XS>)                               \
    EACH(e5m2_none, ByRow<moored::E5m2None>)                            \
    EACH(e5m2_tensor, ByRow<moored::E5m2Tensor>)                        \
    EACH(e5m2_rows, ByRow<moored::E5m2Rows>)                            \
    EACH(fp8_blocks, BlockFp8)                                          \
    EACH(int8_tensor, ByRow<moored::Int8Tensor>)                        \
    EACH(int8_rows, ByRow<moored::Int8Rows>)                            \
    EACH(int4, ByUnit<moored::Int4>)                                    \
    EACH(w4a8, ByUnit<moored::W4A8Plain>)                               \
    EACH(w4a8_f32, ByUnit<moored::W4A8Wide>)                            \
    EACH(w6a8, ByUnit<moored::W6A8Plain>)                               \
    EACH(w6a8_f32, ByUnit<moored::W6A8Wide>)                            \
    EACH(nvfp4, ByUnit<moored::Nvfp4Tiles>)                             \
    EACH(nvfp4_columns, ByUnit<moored::Nvfp4TilesColumns>)              \
    EACH(nvfp4_rows, ByUnit<moored::Nvfp4Rows>)                         \
    EACH(nvfp4_rows_columns, ByUnit<moored::Nvfp4RowsColumns>)          \
    EACH(nvfp4_low, ByUnit<moored::Nvfp4Low>)                           \
    EACH(nvfp4_low_columns, ByUnit<moored::Nvfp4LowColumns>)            \
    EACH(mxfp8, ByUnit<moored::Mxfp8Tiles>)                             \
    EACH(mxfp8_rows, ByUnit<moored::Mxfp8Rows>)                         \
    EACH(mxfp4, ByBlock<moored::Mxfp4>)                                 \
    EACH(nvfp4_blocks, ByBlock<moored::Nvfp4Blocks>)                    \
    INT4_GROUPS(EACH, less_eight, LessEight)                            \
    INT4_GROUPS(EACH, signed, Signed)                                   \
    INT4_GROUPS(EACH, autoawq, AutoAwq)                                 \
    INT4_GROUPS(EACH, tinychat, TinyChat<1>)                            \
    INT4_GROUPS(EACH, tinychat_3, TinyChat<3>)                          \
    INT4_GROUPS(EACH, tinychat_6, TinyChat<6>)                          \
    EACH(int8_groups_f16, ByUnit<moored::Int8Groups<moored::F16>>)      \
    EACH(int8_groups_bf16, ByUnit<moored::Int8Groups<moored::Bf16>>)    \
    EACH(int8_groups_f32, ByUnit<moored::Int8Groups<moored::F32>>)

// Formats whose groups of columns are turned back, by the size of the groups. They are not multiplied in fp8.
#define ROTATED_BY(format, group, ...) DEQUANTIZE(format##_by_##group, RotatedBy##group<moored::__VA_ARGS__>)
#define ROTATED(format, ...)             \
    ROTATED_BY(format, 16, __VA_ARGS__)  \
    ROTATED_BY(format, 64, __VA_ARGS__)  \
    ROTATED_BY(format, 256, __VA_ARGS__)
ROTATED(int8_tensor, ByRow<moored::Int8Tensor>)
ROTATED(int8_rows, ByRow<moored::Int8Rows>)
ROTATED(int4, ByUnit<moored::Int4>)
ROTATED(w4a8, ByUnit<moored::W4A8Plain>)
ROTATED(w4a8_f32, ByUnit<moored::W4A8Wide>)
ROTATED(w6a8, ByUnit<moored::W6A8Plain>)
ROTATED(w6a8_f32, ByUnit<moored::W6A8Wide>)

DEQUANTIZE(fp8_none, ByRow<moored::Fp8None>)
DEQUANTIZE(fp8_tensor, ByRow<moored::Fp8Tensor>)
DEQUANTIZE(fp8_rows, ByRow<moored::Fp8Rows>)
OTHER_FORMATS(DEQUANTIZE)

#define QUANTIZE_ROWS_OF(dtype, T, CHUNKS)                                                                       \
    extern "C" __global__ void __launch_bounds__(1024)                                                           \
        quantize_rows_##dtype##_##CHUNKS(moored::QuantizeArguments a) {                                          \
        moored::quantize_rows<T, CHUNKS, moored::E4m3Codes>(a);                                                  \
    }
#define QUANTIZE_ROWS(dtype, T)     \
    QUANTIZE_ROWS_OF(dtype, T, 1)   \
    QUANTIZE_ROWS_OF(dtype, T, 2)   \
    QUANTIZE_ROWS_OF(dtype, T, 4)
QUANTIZE_ROWS(f16, __half)
QUANTIZE_ROWS(bf16, __nv_bfloat16)
#define QUANTIZE_ROWS_INT8_OF(dtype, T, CHUNKS, GROUP)                                                           \
    extern "C" __global__ void __launch_bounds__(1024)                                                           \
        quantize_rows_int8_by_##GROUP##_##dtype##_##CHUNKS(moored::QuantizeArguments a) {                        \
        moored::quantize_rows<T, CHUNKS, moored::Int8Codes<GROUP>>(a);                                           \
    }
#define QUANTIZE_ROWS_INT8(dtype, T, GROUP)        \
    QUANTIZE_ROWS_INT8_OF(dtype, T, 1, GROUP)      \
    QUANTIZE_ROWS_INT8_OF(dtype, T, 2, GROUP)      \
    QUANTIZE_ROWS_INT8_OF(dtype, T, 4, GROUP)
#define INT8_PRODUCTS(dtype, T)                                                                                  \
    QUANTIZE_ROWS_INT8(dtype, T, 16)                                                                             \
    QUANTIZE_ROWS_INT8(dtype, T, 64)                                                                             \
    QUANTIZE_ROWS_INT8(dtype, T, 256)                                                                            \
    extern "C" __global__ void __launch_bounds__(256) finish_sums_##dtype(moored::FinishSumsArguments a) {       \
        moored::finish_sums<T>(a);                                                                               \
    }
INT8_PRODUCTS(f16, __half)
INT8_PRODUCTS(bf16, __nv_bfloat16)
#define REQUANTIZE_ROWS(format, ...)                                                                             \
    extern "C" __global__ void __launch_bounds__(1024)                                                           \
        requantize_rows_##format(moored::RequantizeArguments a) {                                                \
        moored::requantize_rows<moored::__VA_ARGS__>(a);                                                         \
    }
OTHER_FORMATS(REQUANTIZE_ROWS)

// Weights of SVDQuant are computed by tiles.
#define DEQUANTIZE_SVDQUANT_TO(codes, Codes, dtype, T)                                                           \
    extern "C" __global__ void __launch_bounds__(moored::TILE_THREADS) dequantize_##codes##_##dtype(             \
        const uint8_t* bytes, unsigned long long scales_at, unsigned long long codes_at, unsigned numbers,       \
        unsigned columns, T* out) {                                                                              \
        moored::dequantize_svdquant<moored::Codes>({bytes, bytes + scales_at, bytes + codes_at, numbers, columns}, out); \
    }
#define SVDQUANT(codes, Codes)                                                                                   \
    DEQUANTIZE_SVDQUANT_TO(codes, Codes, f32, float)                                                             \
    DEQUANTIZE_SVDQUANT_TO(codes, Codes, f16, __half)                                                            \
    DEQUANTIZE_SVDQUANT_TO(codes, Codes, bf16, __nv_bfloat16)                                                    \
    extern "C" __global__ void __launch_bounds__(moored::TILE_THREADS)                                           \
        scale_rows_##codes(moored::RequantizeArguments a) { moored::scale_svdquant<moored::Codes>(a); }          \
    extern "C" __global__ void __launch_bounds__(moored::TILE_THREADS)                                           \
        requantize_rows_##codes(moored::RequantizeArguments a) { moored::requantize_svdquant<moored::Codes>(a); }
SVDQUANT(svdquant_int4, SvdquantInt4)
SVDQUANT(svdquant_fp4, SvdquantFp4)

#define FINISH_PRODUCT(dtype, T)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) finish_product_##dtype(moored::FinishArguments a) {        \
        moored::finish_product<T>(a);                                                                            \
    }
FINISH_PRODUCT(f32, float)
FINISH_PRODUCT(f16, __half)
FINISH_PRODUCT(bf16, __nv_bfloat16)

// Names are made beside what they do.
#include "attention_in_fp8.cuh"
#include "softmax.cuh"
#include "elementwise.cuh"

// Maps whose channels lie side by side.
#include "apply_norm.cuh"
#include "blocks.cuh"
#include "convolve.cuh"
#include "moments.cuh"
#include "pictures.cuh"
#include "sequence.cuh"

#define MAP_KERNEL(name, arguments, ...)                                                                         \
    extern "C" __global__ void __launch_bounds__(256) name(const moored::arguments a) { moored::__VA_ARGS__(a); }
#define MAPS_OF(dtype, T)                                                                                        \
    MAP_KERNEL(gather_moments_##dtype, MomentsArguments, gather_moments<T, false>)                               \
    MAP_KERNEL(gather_moments_wide_##dtype, MomentsArguments, gather_moments<T, true>)                           \
    MAP_KERNEL(merge_groups_##dtype, MomentsArguments, merge_groups<T>)                                          \
    MAP_KERNEL(apply_norm_##dtype, ApplyArguments, apply_norm<T, false>)                                         \
    MAP_KERNEL(apply_norm_wide_##dtype, ApplyArguments, apply_norm<T, true>)                                     \
    MAP_KERNEL(apply_length_##dtype, ApplyArguments, apply_length<T, false>)                                     \
    MAP_KERNEL(apply_length_wide_##dtype, ApplyArguments, apply_length<T, true>)                                 \
    MAP_KERNEL(average_blocks_##dtype, BlocksArguments, average_blocks<T, false>)                                \
    MAP_KERNEL(average_blocks_wide_##dtype, BlocksArguments, average_blocks<T, true>)                            \
    MAP_KERNEL(add_repeated_##dtype, BlocksArguments, add_repeated<T, false>)                                    \
    MAP_KERNEL(add_repeated_wide_##dtype, BlocksArguments, add_repeated<T, true>)                                \
    MAP_KERNEL(patched_##dtype, BlocksArguments, patched<T, false>)                                              \
    MAP_KERNEL(patched_wide_##dtype, BlocksArguments, patched<T, true>)                                          \
    MAP_KERNEL(unpatched_##dtype, BlocksArguments, unpatched<T, false>)                                          \
    MAP_KERNEL(unpatched_wide_##dtype, BlocksArguments, unpatched<T, true>)                                      \
    MAP_KERNEL(taps_first_##dtype, TapsArguments, taps_first<T>)                                                 \
    MAP_KERNEL(unroll_##dtype, UnrollArguments, unroll<T, false>)                                                \
    MAP_KERNEL(unroll_wide_##dtype, UnrollArguments, unroll<T, true>)                                            \
    MAP_KERNEL(add_rows_##dtype, AddArguments, add_rows<T, false>)                                               \
    MAP_KERNEL(add_rows_wide_##dtype, AddArguments, add_rows<T, true>)                                           \
    MAP_KERNEL(planes_to_map_##dtype, PictureArguments, planes_to_map<T>)                                        \
    MAP_KERNEL(map_to_planes_##dtype, PictureArguments, map_to_planes<T>)                                        \
    MAP_KERNEL(map_to_bytes_##dtype, PictureArguments, map_to_bytes<T>)                                          \
    MAP_KERNEL(bytes_to_map_##dtype, PictureArguments, bytes_to_map<T>)                                          \
    MAP_KERNEL(blend_##dtype, BlendArguments, blend<T>)                                                          \
    MAP_KERNEL(snake_##dtype, SnakeArguments, snake<T, false>)                                                   \
    MAP_KERNEL(snake_wide_##dtype, SnakeArguments, snake<T, true>)                                               \
    MAP_KERNEL(antialiased_snake_##dtype, AntialiasArguments, antialiased_snake<T>)                              \
    MAP_KERNEL(weight_scales_##dtype, ScalesArguments, weight_scales<T>)                                         \
    MAP_KERNEL(fold_weight_##dtype, FoldArguments, fold_weight<T>)
#define SHIFTED_BIAS(dtype, T) MAP_KERNEL(shifted_bias_##dtype, ShiftedBiasArguments, shifted_bias<T>)
SHIFTED_BIAS(f32, float)
SHIFTED_BIAS(f16, __half)
SHIFTED_BIAS(bf16, __nv_bfloat16)
MAP_KERNEL(pcm16, Pcm16Arguments, pcm16)
MAPS_OF(f32, float)
MAPS_OF(f16, __half)
MAPS_OF(bf16, __nv_bfloat16)
