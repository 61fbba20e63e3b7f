// What a native product of fp8 needs before and after: rows of numbers as codes with a scale each, and scales and bias
// of the product.
#pragma once
#include <cuda_fp8.h>

#include "numbers.cuh"

namespace moored {


template <class T>
__device__ inline void read8(const T* from, float* to) {
    static_assert(sizeof(T) == 2, "eight numbers are sixteen bytes");
    T numbers[UNIT];
    load<uint4>(from, numbers);
    for (unsigned i = 0; i < UNIT; i++) to[i] = to_f32(numbers[i]);
}

// One block of 256 threads a row. Rows are aligned to 16 bytes. scale = absmax / 448; code = e4m3 of x / scale, to nearest
// even, 0 where the scale is 0. A NaN becomes a NaN; an infinite row becomes one of NaN and 0, as its product would be.
template <class T>
__device__ inline void quantize_rows(const T* x, uint8_t* codes, float* scales, unsigned columns) {
    const size_t begin = static_cast<size_t>(blockIdx.x) * columns;
    float numbers[UNIT];
    float absmax = 0;
    for (unsigned at = threadIdx.x * UNIT; at < columns; at += blockDim.x * UNIT) {
        read8(x + begin + at, numbers);
        for (unsigned i = 0; i < UNIT; i++) absmax = fmaxf(absmax, fabsf(numbers[i]));
    }
    __shared__ float warps[8];
    for (int apart = 16; apart > 0; apart /= 2) absmax = fmaxf(absmax, __shfl_xor_sync(0xFFFFFFFFu, absmax, apart));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = absmax;
    __syncthreads();
    for (int warp = 0; warp < 8; warp++) absmax = fmaxf(absmax, warps[warp]);
    const float scale = absmax / 448.0f;
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (unsigned at = threadIdx.x * UNIT; at < columns; at += blockDim.x * UNIT) {
        read8(x + begin + at, numbers);
        uint8_t out[UNIT];
        for (unsigned i = 0; i < UNIT; i++) {
            const float y = scale == 0 ? 0.0f : numbers[i] / scale;
            out[i] = __nv_cvt_float_to_fp8(y, __NV_SATFINITE, __NV_E4M3);
        }
        store<uint2>(out, codes + begin + at);
    }
}

// In place: product * factor * x_scale[row] * w_scale + bias. Block (row, part of the columns); `columns` is a multiple of
// eight. `w_stride` is 1 for a scale a column, 0 for one scale; w_scales and bias may be null.
template <class T>
__device__ inline void scale_product(T* product, const float* x_scales, const float* w_scales, unsigned w_stride,
                                     const T* bias, unsigned columns, float factor) {
    const unsigned column = (blockIdx.y * blockDim.x + threadIdx.x) * UNIT;
    if (column >= columns) return;
    T* at = product + static_cast<size_t>(blockIdx.x) * columns + column;
    float numbers[UNIT];
    read8(at, numbers);
    const float row_scale = x_scales[blockIdx.x] * factor;
    for (unsigned i = 0; i < UNIT; i++) {
        const float w_scale = w_scales ? w_scales[(column + i) * w_stride] : 1.0f;
        numbers[i] = numbers[i] * row_scale * w_scale + (bias ? to_f32(bias[column + i]) : 0.0f);
    }
    store8(numbers, at);
}

}  // namespace moored
