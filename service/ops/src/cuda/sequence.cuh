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

// Rows that a thread activates one after the other, and taps of a filter; as in `cuda/sequence.rs`.
constexpr unsigned ANTIALIASED_ROWS = 32;
constexpr int ANTIALIAS_TAPS = 12;

// Mirrors the struct in `cuda/sequence.rs`.
struct AntialiasArguments {
    const float* x;      // [rows, channels]
    const float* alpha;  // [channels]
    const float* beta;   // [channels]
    void* out;           // T, [rows, channels]
    unsigned long long rows;
    unsigned channels, unused;
    float taps[ANTIALIAS_TAPS];
};

// Number `at` of a channel of the sequence at twice the rate, activated; those at its ends stand for those beyond.
__device__ inline float doubled(const AntialiasArguments& a, const float* x, long long at, float frequency,
                                float height) {
    const long long rows = static_cast<long long>(a.rows);
    at = min(max(at, 0LL), 2 * rows - 1);
    const long long first = at / 2 - 3 + at % 2;
    const bool is_odd = at % 2 != 0;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < ANTIALIAS_TAPS / 2; n++) {
        const long long row = min(max(first + n, 0LL), rows - 1);
        const float tap = 2.0f * (is_odd ? a.taps[ANTIALIAS_TAPS - 2 - 2 * n] : a.taps[ANTIALIAS_TAPS - 1 - 2 * n]);
        sum += tap * x[row * a.channels];
    }
    const float s = sinf(sum * frequency);
    return sum + height * (s * s);
}

// A thread has one channel of some rows, and of the doubled rows those that its next row sees.
template <class T>
__device__ inline void antialiased_snake(const AntialiasArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned channel = static_cast<unsigned>(i % a.channels);
    const unsigned long long first = i / a.channels * ANTIALIASED_ROWS;
    if (first >= a.rows) return;
    const unsigned long long end = min(first + ANTIALIASED_ROWS, a.rows);
    const float frequency = expf(a.alpha[channel]), height = 1.0f / (expf(a.beta[channel]) + 1e-9f);
    const float* x = a.x + channel;
    float seen[ANTIALIAS_TAPS];
    const long long begin = 2 * static_cast<long long>(first) - (ANTIALIAS_TAPS / 2 - 1);
#pragma unroll
    for (int n = 0; n < ANTIALIAS_TAPS; n++) seen[n] = doubled(a, x, begin + n, frequency, height);
    for (unsigned long long row = first; row < end; row++) {
        float even = 0, odd = 0;
#pragma unroll
        for (int n = 0; n < ANTIALIAS_TAPS; n += 2) {
            even += a.taps[n] * seen[n];
            odd += a.taps[n + 1] * seen[n + 1];
        }
        static_cast<T*>(a.out)[row * a.channels + channel] = from_f32<T>(even + odd);
        if (row + 1 == end) break;
#pragma unroll
        for (int n = 0; n < ANTIALIAS_TAPS - 2; n++) seen[n] = seen[n + 2];
        const long long next = 2 * static_cast<long long>(row) + ANTIALIAS_TAPS / 2 + 1;
        seen[ANTIALIAS_TAPS - 2] = doubled(a, x, next, frequency, height);
        seen[ANTIALIAS_TAPS - 1] = doubled(a, x, next + 1, frequency, height);
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

// Mirrors the struct in `cuda/sequence.rs`.
struct ScalesArguments {
    const void* direction;  // T, [rows, columns]
    const float* length;    // [rows]; null: by the gain
    float* out;             // [rows]
    unsigned long long columns;
    float gain;
    float added;     // to the norm that the gain is divided by
    unsigned keeps;  // the gain alone: rows keep their length
    unsigned unused;
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
    if (threadIdx.x > 0) return;
    const float norm = sqrtf(sum);
    a.out[blockIdx.x] = a.length ? a.length[blockIdx.x] / norm : a.keeps ? a.gain : a.gain / (norm + a.added);
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
