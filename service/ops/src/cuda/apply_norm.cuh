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
    const void* weight;     // T, [channels]: for `apply_length`; null: none
    unsigned long long x_frame, x_row, x_column, out_frame, out_row;
    int frames, height, width;  // of the map
    int from_frame, from_row, from_column;  // counted in the enlarged map
    unsigned out_height, out_width;
    unsigned positions;  // that are written
    unsigned channels;
    float epsilon;  // least length with a weight; added to the root mean square without
    unsigned silu;
    unsigned enlarge[3];  // by axis: 0 not, 1 twice, 2 twice but the first
    unsigned replicate;
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

// Positions along an axis after upsampling, and the source of one of them.
__device__ inline int enlarged(unsigned how, int size) { return how == 0 ? size : how == 1 ? 2 * size : 2 * size - 1; }
__device__ inline int shrunk(unsigned how, int place) { return how == 0 ? place : (place + static_cast<int>(how - 1)) / 2; }

// Source of an output position; false for zero padding.
__device__ inline bool source_of(const ApplyArguments& a, unsigned position, unsigned long long& from,
                                 unsigned long long& to) {
    const unsigned column = position % a.out_width, line = position / a.out_width;
    const unsigned row = line % a.out_height, frame = line / a.out_height;
    to = frame * a.out_frame + row * a.out_row + static_cast<unsigned long long>(column) * a.channels;
    int t = a.from_frame + static_cast<int>(frame), y = a.from_row + static_cast<int>(row);
    int x = a.from_column + static_cast<int>(column);
    const int frames = enlarged(a.enlarge[0], a.frames), height = enlarged(a.enlarge[1], a.height);
    const int width = enlarged(a.enlarge[2], a.width);
    const bool inside = t >= 0 && t < frames && y >= 0 && y < height && x >= 0 && x < width;
    if (!inside && !a.replicate) return false;
    t = shrunk(a.enlarge[0], min(max(t, 0), frames - 1));
    y = shrunk(a.enlarge[1], min(max(y, 0), height - 1));
    x = shrunk(a.enlarge[2], min(max(x, 0), width - 1));
    from = t * a.x_frame + y * a.x_row + x * a.x_column;
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

// Division by the length of a position, with a weight, or by its root mean square: one warp per position.
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
    const float root = sqrtf(static_cast<float>(a.channels)), length = sqrtf(sum_of_warp(square));
    const float factor = a.weight ? root / fmaxf(length, a.epsilon) : 1.0f / (length / root + a.epsilon);
    for (unsigned at = lane * UNIT; at < a.channels; at += 32 * UNIT) {
        for (unsigned n = 0; n < UNIT; n++) numbers[n] = 0;
        if (is_read) {
            read_unit<WIDE>(x, at, a.channels, numbers);
            if (a.weight) read_unit<WIDE>(static_cast<const T*>(a.weight), at, a.channels, weight);
            for (unsigned n = 0; n < UNIT; n++) {
                numbers[n] = a.weight ? numbers[n] * factor * weight[n] : numbers[n] * factor;
                if (a.silu) numbers[n] = silu<T>(numbers[n]);
            }
        }
        write_unit<WIDE>(numbers, static_cast<T*>(a.out) + to, at, a.channels);
    }
}

}  // namespace moored
