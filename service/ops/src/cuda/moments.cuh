// Mean and squares of the groups of a channels-last map, in two launches and without atomics: blocks gather some
// positions each, and a block per group merges their results, in a fixed order.
#pragma once
#include "numbers.cuh"

namespace moored {

constexpr unsigned MOMENTS_THREADS = 256;

// Mirrors the struct in `cuda/moments.rs`.
struct MomentsArguments {
    void* x;            // T, positions at x_stride; written where y is there
    const void* y;      // T, positions at y_stride: added first; null: nothing is
    const void* y_bias; // T, [channels]: added besides; null: nothing is
    float* partials;    // [blocks, groups, 3]: count, mean, sum of squared distances from it
    const void* weight; // T, [channels]
    const void* bias;   // T, [channels]
    float* factors;     // [channels]
    float* summands;    // [channels]
    unsigned long long x_stride, y_stride;
    unsigned long long positions, positions_per_block;
    unsigned channels;  // 2048 at most
    unsigned groups;
    unsigned blocks;
    float eps;
};

// Merges two partial moments (Chan, Golub, LeVeque 1983).
__device__ inline void merge_moments(float& count, float& mean, float& squares, float other_count, float other_mean,
                                     float other_squares) {
    if (other_count == 0) return;
    const float total = count + other_count, distance = other_mean - mean, share = other_count / total;
    mean += distance * share;
    squares += other_squares + distance * distance * (count * share);
    count = total;
}

// A thread has UNIT channels of every lanes-th position. Sums are of differences to its first element, which keeps
// them small for any mean.
template <class T, bool WIDE>
__device__ inline void gather_moments(const MomentsArguments& a) {
    __shared__ float means[MOMENTS_THREADS * UNIT], squares[MOMENTS_THREADS * UNIT], counts[MOMENTS_THREADS];
    const unsigned units = (a.channels + UNIT - 1) / UNIT, lanes = MOMENTS_THREADS / units;
    const unsigned unit = threadIdx.x % units, lane = threadIdx.x / units, at = unit * UNIT;
    const unsigned long long first = blockIdx.x * a.positions_per_block;
    const unsigned long long end = min(first + a.positions_per_block, a.positions);
    if (lane < lanes) {
        float from[UNIT], sum[UNIT], square[UNIT], bias[UNIT];
        for (unsigned i = 0; i < UNIT; i++) from[i] = sum[i] = square[i] = bias[i] = 0;
        if (a.y_bias) read_unit<WIDE>(static_cast<const T*>(a.y_bias), at, a.channels, bias);
        float count = 0;
        if (a.y) {
            for (unsigned long long p = first + lane; p < end; p += lanes) {
                T* x = static_cast<T*>(a.x) + p * a.x_stride;
                float number[UNIT], branch[UNIT];
                read_unit<WIDE>(x, at, a.channels, number);
                read_unit<WIDE>(static_cast<const T*>(a.y) + p * a.y_stride, at, a.channels, branch);
                for (unsigned i = 0; i < UNIT; i++) {
                    // Statistics are taken of the stored (rounded) value.
                    number[i] = to_f32(from_f32<T>(number[i] + (branch[i] + bias[i])));
                }
                write_unit<WIDE>(number, x, at, a.channels);
                for (unsigned i = 0; i < UNIT; i++) {
                    if (count == 0) from[i] = number[i];
                    const float distance = number[i] - from[i];
                    sum[i] += distance;
                    square[i] += distance * distance;
                }
                count++;
            }
        } else {
#pragma unroll 4
            for (unsigned long long p = first + lane; p < end; p += lanes) {
                float number[UNIT];
                read_unit<WIDE>(static_cast<const T*>(a.x) + p * a.x_stride, at, a.channels, number);
                for (unsigned i = 0; i < UNIT; i++) {
                    if (count == 0) from[i] = number[i];
                    const float distance = number[i] - from[i];
                    sum[i] += distance;
                    square[i] += distance * distance;
                }
                count++;
            }
        }
        for (unsigned i = 0; i < UNIT; i++) {
            const float mean = count > 0 ? sum[i] / count : 0;
            means[lane * units * UNIT + at + i] = from[i] + mean;
            squares[lane * units * UNIT + at + i] = fmaxf(square[i] - sum[i] * mean, 0.0f);
        }
        if (unit == 0) counts[lane] = count;
    }
    __syncthreads();
    // Reduces over the lanes of a channel, then over the channels of a group.
    for (unsigned channel = threadIdx.x; channel < a.channels; channel += MOMENTS_THREADS) {
        float count = counts[0], mean = means[channel], square = squares[channel];
        for (unsigned l = 1; l < lanes; l++) {
            const unsigned there = l * units * UNIT + channel;
            merge_moments(count, mean, square, counts[l], means[there], squares[there]);
        }
        means[channel] = mean;
        squares[channel] = square;
    }
    __syncthreads();
    const unsigned of_group = a.channels / a.groups;
    const float positions = static_cast<float>(end - first);
    for (unsigned group = threadIdx.x; group < a.groups; group += MOMENTS_THREADS) {
        float count = 0, mean = 0, square = 0;
        for (unsigned c = group * of_group; c < (group + 1) * of_group; c++) {
            merge_moments(count, mean, square, positions, means[c], squares[c]);
        }
        float* partial = a.partials + (static_cast<unsigned long long>(blockIdx.x) * a.groups + group) * 3;
        partial[0] = count;
        partial[1] = mean;
        partial[2] = square;
    }
}

// A block merges one group, and computes factors and summands of its channels.
template <class T>
__device__ inline void merge_groups(const MomentsArguments& a) {
    __shared__ float counts[MOMENTS_THREADS], means[MOMENTS_THREADS], squares[MOMENTS_THREADS];
    const unsigned group = blockIdx.x, thread = threadIdx.x;
    float count = 0, mean = 0, square = 0;
    for (unsigned block = thread; block < a.blocks; block += MOMENTS_THREADS) {
        const float* partial = a.partials + (static_cast<unsigned long long>(block) * a.groups + group) * 3;
        merge_moments(count, mean, square, partial[0], partial[1], partial[2]);
    }
    counts[thread] = count;
    means[thread] = mean;
    squares[thread] = square;
    for (unsigned half = MOMENTS_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) {
            merge_moments(counts[thread], means[thread], squares[thread], counts[thread + half], means[thread + half],
                          squares[thread + half]);
        }
    }
    __syncthreads();
    const float deviation = sqrtf(squares[0] / counts[0] + a.eps);
    const unsigned of_group = a.channels / a.groups;
    for (unsigned i = thread; i < of_group; i += MOMENTS_THREADS) {
        const unsigned channel = group * of_group + i;
        const float factor = to_f32(static_cast<const T*>(a.weight)[channel]) / deviation;
        a.factors[channel] = factor;
        a.summands[channel] = to_f32(static_cast<const T*>(a.bias)[channel]) - means[0] * factor;
    }
}

}  // namespace moored
