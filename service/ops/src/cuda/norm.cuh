// Residual, norm and modulation of rows, in one pass over memory: `x += gate * y`, then
// `out = normalise(x) * weight + bias`, `* (1 + scale) + shift`. Statistics are in f32, the variance in a second pass over
// registers. One block a row; its threads hold CHUNKS units of it each.
#pragma once
#include <cuda_fp8.h>

#include "numbers.cuh"

namespace moored {

// As `cuda/norm.rs` has it. Addresses may be null where it is said.
struct NormArguments {
    void* x;             // X, [batch, rows, columns] with strides; written where y is there
    const void* y;       // T, the branch; null: none
    const void* gate;    // T, [batch, columns]; null: 1
    const void* y_weight;  // T, [columns]: the branch is normalised by its root mean square first; null: it is not
    const void* weight;  // T, [columns]; null: 1
    const void* bias;    // T, [columns]; null: 0
    const void* scale;   // T, [batch, columns]; null: 0
    const void* shift;   // T, [batch, columns]; null: 0
    void* out;           // T, with strides, or e4m3 codes without gaps; null: only the residual
    float* out_scales;   // one for each row of codes; null: `out` is numbers
    unsigned long long x_batch, x_row, y_batch, y_row, out_batch, out_row;  // strides
    unsigned long long gate_batch, scale_batch, shift_batch;
    unsigned rows;       // of a batch
    unsigned columns;
    float eps;
    unsigned is_rms;     // root mean square, without a mean
    unsigned is_tanh;    // the gate is tanh of what is given
};

template <class X, class T, bool WIDE, int CHUNKS>
__device__ inline void norm(const NormArguments& a) {
    __shared__ float warps[32];
    const unsigned batch = blockIdx.x / a.rows, row = blockIdx.x % a.rows;
    X* x = static_cast<X*>(a.x) + batch * a.x_batch + row * a.x_row;
    float numbers[CHUNKS][UNIT];
    for (int c = 0; c < CHUNKS; c++) {
        read_unit<WIDE>(x, (c * blockDim.x + threadIdx.x) * UNIT, a.columns, numbers[c]);
    }
    if (a.y) {
        const T* y = static_cast<const T*>(a.y) + batch * a.y_batch + row * a.y_row;
        const T* gate = a.gate ? static_cast<const T*>(a.gate) + batch * a.gate_batch : nullptr;
        float branch[CHUNKS][UNIT];
        float square = 0;
        for (int c = 0; c < CHUNKS; c++) {
            read_unit<WIDE>(y, (c * blockDim.x + threadIdx.x) * UNIT, a.columns, branch[c]);
            for (unsigned i = 0; i < UNIT; i++) square += branch[c][i] * branch[c][i];
        }
        float factor = 1;
        if (a.y_weight) factor = 1.0f / sqrtf(sum_of_block(square, warps) / a.columns + a.eps);
        for (int c = 0; c < CHUNKS; c++) {
            const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
            if (a.y_weight) {
                float weight[UNIT];
                read_unit<WIDE>(static_cast<const T*>(a.y_weight), at, a.columns, weight);
                for (unsigned i = 0; i < UNIT; i++) branch[c][i] *= factor * weight[i];
            }
            if (gate) {
                float by[UNIT];
                read_unit<WIDE>(gate, at, a.columns, by);
                for (unsigned i = 0; i < UNIT; i++) branch[c][i] *= a.is_tanh ? tanhf(by[i]) : by[i];
            }
            for (unsigned i = 0; i < UNIT; i++) {
                // What is normalised is what is kept: rounded as it is kept.
                numbers[c][i] = to_f32(from_f32<X>(numbers[c][i] + branch[c][i]));
            }
            write_unit<WIDE>(numbers[c], x, at, a.columns);
        }
    }
    if (!a.out) return;

    float mean = 0;
    if (!a.is_rms) {
        float sum = 0;
        for (int c = 0; c < CHUNKS; c++) {
            for (unsigned i = 0; i < UNIT; i++) sum += numbers[c][i];
        }
        mean = sum_of_block(sum, warps) / a.columns;
    }
    float square = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
        for (unsigned i = 0; i < UNIT; i++) {
            // Units beyond the row are no part of it.
            const float apart = at + i < a.columns ? numbers[c][i] - mean : 0.0f;
            square += apart * apart;
        }
    }
    const float factor = 1.0f / sqrtf(sum_of_block(square, warps) / a.columns + a.eps);
    const T* scale = a.scale ? static_cast<const T*>(a.scale) + batch * a.scale_batch : nullptr;
    const T* shift = a.shift ? static_cast<const T*>(a.shift) + batch * a.shift_batch : nullptr;
    float most = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
        float other[UNIT];
        for (unsigned i = 0; i < UNIT; i++) numbers[c][i] = (numbers[c][i] - mean) * factor;
        if (a.weight) {
            read_unit<WIDE>(static_cast<const T*>(a.weight), at, a.columns, other);
            for (unsigned i = 0; i < UNIT; i++) numbers[c][i] *= other[i];
        }
        if (a.bias) {
            read_unit<WIDE>(static_cast<const T*>(a.bias), at, a.columns, other);
            for (unsigned i = 0; i < UNIT; i++) numbers[c][i] += other[i];
        }
        if (scale) {
            read_unit<WIDE>(scale, at, a.columns, other);
            for (unsigned i = 0; i < UNIT; i++) numbers[c][i] *= 1.0f + other[i];
        }
        if (shift) {
            read_unit<WIDE>(shift, at, a.columns, other);
            for (unsigned i = 0; i < UNIT; i++) numbers[c][i] += other[i];
        }
        if (a.out_scales) {
            for (unsigned i = 0; i < UNIT; i++) most = at + i < a.columns ? fmaxf(most, fabsf(numbers[c][i])) : most;
        } else {
            T* out = static_cast<T*>(a.out) + batch * a.out_batch + row * a.out_row;
            write_unit<WIDE>(numbers[c], out, at, a.columns);
        }
    }
    if (!a.out_scales) return;
    // As `quantize_rows` does it.
    const float step = most_of_block(most, warps) / 448.0f;
    const float by = step < 1.2e-38f ? 0.0f : 1.0f / step;
    if (threadIdx.x == 0) a.out_scales[blockIdx.x] = step;
    uint8_t* codes = static_cast<uint8_t*>(a.out) + static_cast<size_t>(blockIdx.x) * a.columns;
    for (int c = 0; c < CHUNKS; c++) {
        const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
        uint8_t unit[UNIT];
        for (unsigned i = 0; i < UNIT; i++) unit[i] = __nv_cvt_float_to_fp8(numbers[c][i] * by, __NV_SATFINITE, __NV_E4M3);
        if (WIDE) {
            if (at < a.columns) store<uint2>(unit, codes + at);
        } else {
            for (unsigned i = 0; i < UNIT && at + i < a.columns; i++) codes[at + i] = unit[i];
        }
    }
}

}  // namespace moored

#define NORM_OF(name, X, T, wide, WIDE, CHUNKS)                                                                      \
    extern "C" __global__ void __launch_bounds__(1024) norm_##name##_##wide##_##CHUNKS(moored::NormArguments a) {    \
        moored::norm<X, T, WIDE, CHUNKS>(a);                                                                         \
    }
#define NORM(name, X, T)                  \
    NORM_OF(name, X, T, wide, true, 1)    \
    NORM_OF(name, X, T, wide, true, 4)    \
    NORM_OF(name, X, T, single, false, 1) \
    NORM_OF(name, X, T, single, false, 4)
NORM(f32_f32, float, float)
NORM(f16_f16, __half, __half)
NORM(bf16_bf16, __nv_bfloat16, __nv_bfloat16)
NORM(f32_f16, float, __half)
NORM(f32_bf16, float, __nv_bfloat16)
