// Sequences with channels side by side: Snake between zeros, and filters of folded weights.
#pragma once
#include "numbers.cuh"

namespace moored {

// Mirrors the struct in `cuda/sequence.rs`.
struct SnakeArguments {
    const void* x;      // T, [rows, channels]
    const void* alpha;  // T, [channels]; null: `x` as it is
    const void* beta;   // T, [channels]
    void* out;          // T, [written, channels]; may be `x`, with no rows before
    unsigned long long rows, written, before;
    unsigned long long apart;  // rows between those of a thread
    unsigned channels, unused;
};

// The sine up to its sign. In half precision the argument is reduced by multiples of pi, where the hardware's sine is
// accurate to 2^-21; f32 takes the accurate function.
template <class T>
__device__ inline float sine(float angle) {
    if constexpr (sizeof(T) == 4) {
        return sinf(angle);
    } else {
        const float turns = rintf(angle * 0.318309886f);
        const float rest = __fmaf_rn(turns, 8.74227766e-8f, __fmaf_rn(turns, -3.14159274f, angle));
        return __sinf(rest);
    }
}

template <class T, bool WIDE>
__device__ inline void snake(const SnakeArguments& a) {
    const unsigned units = (a.channels + UNIT - 1) / UNIT;
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned at = static_cast<unsigned>(i % units) * UNIT;
    unsigned long long row = i / units;
    if (row >= a.apart) return;
    float frequencies[UNIT], heights[UNIT], numbers[UNIT];
    if (a.alpha) {
        read_unit<WIDE>(static_cast<const T*>(a.alpha), at, a.channels, frequencies);
        read_unit<WIDE>(static_cast<const T*>(a.beta), at, a.channels, heights);
        for (unsigned n = 0; n < UNIT; n++) {
            frequencies[n] = expf(frequencies[n]);
            heights[n] = 1.0f / (expf(heights[n]) + 1e-9f);
        }
    }
    for (; row < a.written; row += a.apart) {
        for (unsigned n = 0; n < UNIT; n++) numbers[n] = 0;
        if (row >= a.before && row - a.before < a.rows) {
            const T* from = static_cast<const T*>(a.x) + (row - a.before) * a.channels;
            read_unit<WIDE>(from, at, a.channels, numbers);
            if (a.alpha) {
                for (unsigned n = 0; n < UNIT; n++) {
                    const float s = sine<T>(numbers[n] * frequencies[n]);
                    numbers[n] += heights[n] * (s * s);
                }
            }
        }
        write_unit<WIDE>(numbers, static_cast<T*>(a.out) + row * a.channels, at, a.channels);
    }
}

struct Pcm16Arguments {
    const float* x;
    int16_t* out;
    unsigned* strange;  // set to 1 where a number is not finite
    unsigned long long numbers;
};

__device__ inline void pcm16(const Pcm16Arguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.numbers) return;
    const float level = fminf(fmaxf(a.x[i], -1.0f), 1.0f);
    a.out[i] = static_cast<int16_t>(rintf(level * 32767.0f));
    if (!isfinite(a.x[i])) *a.strange = 1;
}

struct ScalesArguments {
    const void* direction;  // T, [rows, columns]
    const float* length;    // [rows]
    float* out;             // [rows]
    unsigned long long columns;
};

// Length over norm: a block for each row.
template <class T>
__device__ inline void weight_scales(const ScalesArguments& a) {
    __shared__ float warps[32];
    const T* row = static_cast<const T*>(a.direction) + blockIdx.x * a.columns;
    float sum = 0;
    for (unsigned long long i = threadIdx.x; i < a.columns; i += blockDim.x) {
        const float number = to_f32(row[i]);
        sum += number * number;
    }
    sum = sum_of_block(sum, warps);
    if (threadIdx.x == 0) a.out[blockIdx.x] = a.length[blockIdx.x] / sqrtf(sum);
}

struct FoldArguments {
    const void* direction;  // T, [rows, columns, weight_taps]
    const float* scales;    // [rows]
    void* out;              // T, [outputs, taps, inputs]
    unsigned long long numbers;
    unsigned outputs, taps, inputs;
    unsigned rows, columns, weight_taps;
    unsigned transposed;  // stride, or 0
    unsigned unused;
};

// Mirrors `Fold::source` in `sequence.rs`.
template <class T>
__device__ inline void fold_weight(const FoldArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.numbers) return;
    const unsigned input = static_cast<unsigned>(i % a.inputs);
    const unsigned long long line = i / a.inputs;
    const unsigned output = static_cast<unsigned>(line / a.taps);
    unsigned tap = static_cast<unsigned>(line % a.taps), row = output, column = input;
    if (a.transposed) {
        const unsigned of_row = a.outputs / a.transposed;
        row = input;
        column = output % of_row;
        tap = output / of_row + a.transposed * (1 - tap);
    }
    float number = 0;
    if (row < a.rows && column < a.columns) {
        const unsigned long long at = (static_cast<unsigned long long>(row) * a.columns + column) * a.weight_taps + tap;
        number = to_f32(static_cast<const T*>(a.direction)[at]) * a.scales[row];
    }
    static_cast<T*>(a.out)[i] = from_f32<T>(number);
}

}  // namespace moored
