// Loads and stores of f32, f16 and bf16 as f32: eight at a time if aligned to 16 bytes, else one at a time.
#pragma once
#include <cmath>

#include "dequantize.cuh"

namespace moored {

__device__ inline float to_f32(float number) { return number; }
__device__ inline float to_f32(__half number) { return __half2float(number); }
__device__ inline float to_f32(__nv_bfloat16 number) { return __bfloat162float(number); }

template <class T>
__device__ inline T from_f32(float number);
template <>
__device__ inline float from_f32<float>(float number) {
    return number;
}
template <>
__device__ inline __half from_f32<__half>(float number) {
    return __float2half_rn(number);
}
template <>
__device__ inline __nv_bfloat16 from_f32<__nv_bfloat16>(float number) {
    return __float2bfloat16_rn(number);
}

// UNIT elements from `from`, aligned to 16 bytes, unconverted.
template <class T>
__device__ inline void load_numbers(const T* from, T* to) {
    load<uint4>(from, to);
    if constexpr (sizeof(T) == 4) load<uint4>(from + 4, to + 4);
}

// UNIT elements as f32.
template <class T>
__device__ inline void read_wide(const T* from, float* to) {
    T numbers[UNIT];
    load_numbers(from, numbers);
    for (unsigned i = 0; i < UNIT; i++) to[i] = to_f32(numbers[i]);
}

template <class T>
__device__ inline void write_wide(const float* from, T* to) {
    T numbers[UNIT];
    for (unsigned i = 0; i < UNIT; i++) numbers[i] = from_f32<T>(from[i]);
    if constexpr (sizeof(T) == 2) {
        store<uint4>(numbers, to);
    } else {
        store<uint4>(numbers, to);
        store<uint4>(numbers + 4, to + 4);
    }
}

// Up to UNIT elements of a row of `columns`; those beyond it are 0. WIDE: the row is aligned to 16 bytes and its
// columns are a multiple of UNIT.
template <bool WIDE, class T>
__device__ inline void read_unit(const T* row, unsigned at, unsigned columns, float* to) {
    if constexpr (WIDE) {
        if (at < columns) {
            read_wide(row + at, to);
        } else {
            for (unsigned i = 0; i < UNIT; i++) to[i] = 0;
        }
    } else {
        for (unsigned i = 0; i < UNIT; i++) to[i] = at + i < columns ? to_f32(row[at + i]) : 0.0f;
    }
}

template <bool WIDE, class T>
__device__ inline void write_unit(const float* from, T* row, unsigned at, unsigned columns) {
    if constexpr (WIDE) {
        if (at < columns) write_wide(from, row + at);
    } else {
        for (unsigned i = 0; i < UNIT && at + i < columns; i++) row[at + i] = from_f32<T>(from[i]);
    }
}

__device__ inline float sum_of_warp(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, apart);
    return value;
}

__device__ inline float most_of_warp(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, apart));
    return value;
}

// Block-wide reduction by `of_warp`, in a fixed order, with the result in every thread. `warps` has one element per
// warp; `nothing` is the neutral element.
template <float (*of_warp)(float)>
__device__ inline float of_block(float value, float* warps, float nothing) {
    value = of_warp(value);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    const unsigned lane = threadIdx.x % 32;
    value = of_warp(lane < blockDim.x / 32 ? warps[lane] : nothing);
    __syncthreads();
    return value;
}

__device__ inline float sum_of_block(float value, float* warps) { return of_block<sum_of_warp>(value, warps, 0.0f); }

__device__ inline float most_of_block(float value, float* warps) {
    return of_block<most_of_warp>(value, warps, -INFINITY);
}

}  // namespace moored
