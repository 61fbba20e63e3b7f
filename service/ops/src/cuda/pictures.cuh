// Conversion between channels-last maps and f32 planes or 8-bit images.
#pragma once
#include "numbers.cuh"

namespace moored {

// Mirrors the struct in `cuda/pictures.rs`.
struct PictureArguments {
    const void* x;
    void* out;
    unsigned* strange;  // set to 1 where a number is not finite; null: nobody asks
    unsigned long long positions;
    unsigned channels;
    float factor, summand;
};

// f32 planes `[channels, positions]` to a map `[positions, channels]`: `x * factor + summand`.
template <class T>
__device__ inline void planes_to_map(const PictureArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.positions * a.channels) return;
    const float number = static_cast<const float*>(a.x)[i % a.channels * a.positions + i / a.channels];
    static_cast<T*>(a.out)[i] = from_f32<T>(number * a.factor + a.summand);
}

// A map to f32 planes.
template <class T>
__device__ inline void map_to_planes(const PictureArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.positions * a.channels) return;
    const float number = to_f32(static_cast<const T*>(a.x)[i % a.positions * a.channels + i / a.positions]);
    static_cast<float*>(a.out)[i] = number;
    if (!isfinite(number)) *a.strange = 1;
}

// -1 to 1 to bytes in the same order.
template <class T>
__device__ inline void map_to_bytes(const PictureArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.positions * a.channels) return;
    const float number = to_f32(static_cast<const T*>(a.x)[i]);
    const float level = fminf(fmaxf(number / 2.0f + 0.5f, 0.0f), 1.0f);
    static_cast<uint8_t*>(a.out)[i] = static_cast<uint8_t>(rintf(level * 255.0f));
    if (!isfinite(number)) *a.strange = 1;
}

template <class T>
__device__ inline void bytes_to_map(const PictureArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.positions * a.channels) return;
    const float level = static_cast<float>(static_cast<const uint8_t*>(a.x)[i]) / 255.0f;
    static_cast<T*>(a.out)[i] = from_f32<T>(2.0f * level - 1.0f);
}

// `[positions, channels]` views: blends from `before` to `x` by position.
struct BlendArguments {
    const void* before;  // T
    void* x;             // T
    unsigned long long before_row, x_row;  // strides
    unsigned rows, columns, channels;
    unsigned by_row;  // shares grow down the rows, rather than along the columns
};

template <class T>
__device__ inline void blend(const BlendArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned width = a.columns * a.channels;
    if (i >= static_cast<unsigned long long>(a.rows) * width) return;
    const unsigned row = static_cast<unsigned>(i / width), place = static_cast<unsigned>(i % width);
    const float share = a.by_row ? static_cast<float>(row) / static_cast<float>(a.rows)
                                 : static_cast<float>(place / a.channels) / static_cast<float>(a.columns);
    const float before = to_f32(static_cast<const T*>(a.before)[row * a.before_row + place]);
    T* x = static_cast<T*>(a.x) + row * a.x_row + place;
    *x = from_f32<T>(before + (to_f32(*x) - before) * share);
}

}  // namespace moored
