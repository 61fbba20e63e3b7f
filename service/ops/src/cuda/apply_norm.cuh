// Reads a region of a channels-last map into a buffer: normalization, SiLU, upsampling and padding in one pass.
#pragma once
#include "numbers.cuh"

namespace moored {

constexpr unsigned READ_THREADS = 256;
// Positions per thread.
constexpr unsigned READ_POSITIONS = 4;

// Mirrors the struct in `cuda/apply_norm.rs`. Strides are of frames and rows, in elements.
struct ApplyArguments {
    const void* x;          // T
    void* out;              // T
    const float* factors;   // [channels]; null: no affine norm
    const float* summands;  // [channels]
    const void* weight;     // T, [channels]: divided by the length of a position; null: not
    unsigned long long x_frame, x_row, out_frame, out_row;
    int frames, height, width;  // of the map
    int from_frame, from_row, from_column;  // counted in the enlarged map
    unsigned out_height, out_width;
    unsigned positions;  // that are written
    unsigned channels;
    float least_length;
    unsigned silu, twice, replicate;
};

// Uses the card's fast exponential for narrow dtypes: its error is some units in the last place of f32.
template <class T>
__device__ inline float silu(float value) {
    if constexpr (sizeof(T) == 4) {
        return value / (1.0f + expf(-value));
    } else {
        return __fdividef(value, 1.0f + __expf(fminf(-value, 80.0f)));
    }
}

// Source of an output position; false for zero padding.
__device__ inline bool source_of(const ApplyArguments& a, unsigned position, unsigned long long& from,
                                 unsigned long long& to) {
    const unsigned column = position % a.out_width, line = position / a.out_width;
    const unsigned row = line % a.out_height, frame = line / a.out_height;
    to = frame * a.out_frame + row * a.out_row + static_cast<unsigned long long>(column) * a.channels;
    const int scale = a.twice ? 2 : 1;
    int t = a.from_frame + static_cast<int>(frame), y = a.from_row + static_cast<int>(row);
    int x = a.from_column + static_cast<int>(column);
    const bool inside = t >= 0 && t < a.frames && y >= 0 && y < a.height * scale && x >= 0 && x < a.width * scale;
    if (!inside && !a.replicate) return false;
    t = min(max(t, 0), a.frames - 1);
    y = min(max(y, 0), a.height * scale - 1) / scale;
    x = min(max(x, 0), a.width * scale - 1) / scale;
    from = t * a.x_frame + y * a.x_row + static_cast<unsigned long long>(x) * a.channels;
    return true;
}

// A thread has UNIT channels of some positions, with their factors in registers.
template <class T, bool WIDE>
__device__ inline void apply_norm(const ApplyArguments& a) {
    const unsigned all_units = (a.channels + UNIT - 1) / UNIT;
    const unsigned first_unit = blockIdx.y * READ_THREADS;
    const unsigned units = min(all_units - first_unit, READ_THREADS), lanes = READ_THREADS / units;
    const unsigned lane = threadIdx.x / units, at = (first_unit + threadIdx.x % units) * UNIT;
    if (lane >= lanes) return;
    float factors[UNIT], summands[UNIT];
    for (unsigned i = 0; i < UNIT; i++) {
        const bool there = a.factors && at + i < a.channels;
        factors[i] = there ? a.factors[at + i] : 1.0f;
        summands[i] = there ? a.summands[at + i] : 0.0f;
    }
    // A block of fewer lanes has fewer positions: the grid is made for one lane.
    for (unsigned i = 0; i < READ_POSITIONS; i++) {
        for (unsigned position = (blockIdx.x * READ_POSITIONS + i) * lanes + lane; position < a.positions;
             position += gridDim.x * READ_POSITIONS * lanes) {
            unsigned long long from, to;
            float numbers[UNIT];
            if (source_of(a, position, from, to)) {
                read_unit<WIDE>(static_cast<const T*>(a.x) + from, at, a.channels, numbers);
                if (a.factors) {
                    for (unsigned n = 0; n < UNIT; n++) numbers[n] = numbers[n] * factors[n] + summands[n];
                }
                if (a.silu) {
                    for (unsigned n = 0; n < UNIT; n++) numbers[n] = silu<T>(numbers[n]);
                }
            } else {
                for (unsigned n = 0; n < UNIT; n++) numbers[n] = 0;
            }
            write_unit<WIDE>(numbers, static_cast<T*>(a.out) + to, at, a.channels);
        }
    }
}

// RMS norm: one warp per position.
template <class T, bool WIDE>
__device__ inline void apply_length(const ApplyArguments& a) {
    const unsigned position = blockIdx.x * (READ_THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (position >= a.positions) return;
    unsigned long long from = 0, to;
    const bool is_read = source_of(a, position, from, to);
    const T* x = static_cast<const T*>(a.x) + from;
    float square = 0, numbers[UNIT], weight[UNIT];
    if (is_read) {
        for (unsigned at = lane * UNIT; at < a.channels; at += 32 * UNIT) {
            read_unit<WIDE>(x, at, a.channels, numbers);
            for (unsigned n = 0; n < UNIT; n++) square += numbers[n] * numbers[n];
        }
    }
    const float factor = sqrtf(static_cast<float>(a.channels)) / fmaxf(sqrtf(sum_of_warp(square)), a.least_length);
    for (unsigned at = lane * UNIT; at < a.channels; at += 32 * UNIT) {
        for (unsigned n = 0; n < UNIT; n++) numbers[n] = 0;
        if (is_read) {
            read_unit<WIDE>(x, at, a.channels, numbers);
            read_unit<WIDE>(static_cast<const T*>(a.weight), at, a.channels, weight);
            for (unsigned n = 0; n < UNIT; n++) {
                numbers[n] = numbers[n] * factor * weight[n];
                if (a.silu) numbers[n] = silu<T>(numbers[n]);
            }
        }
        write_unit<WIDE>(numbers, static_cast<T*>(a.out) + to, at, a.channels);
    }
}

}  // namespace moored
