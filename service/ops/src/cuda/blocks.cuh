// Blocks of positions of a channels-last map as channels of one position, averaged or repeated.
#pragma once
#include "numbers.cuh"

namespace moored {

// Mirrors the struct in `cuda/blocks.rs`. Strides are of frames and rows, in elements.
struct BlocksArguments {
    const void* x;  // T
    void* out;      // T
    unsigned long long x_frame, x_row, out_frame, out_row;
    unsigned long long units;  // of UNIT channels, that are written
    // Rows, columns and channels of the map of blocks, which is the finer one, and of the other.
    unsigned fine[3], coarse[3];
    unsigned frames, sides;  // of a block
    unsigned group;          // numbers of a block for one number of the coarser map
    unsigned from_frame, from_row;  // of the part that is written
    unsigned missing;        // frames before the first
};

// The position and the first channel of a unit of the map that is written.
__device__ inline void unit_at(unsigned long long unit, const unsigned* sides, unsigned& frame, unsigned& row,
                               unsigned& column, unsigned& channel) {
    const unsigned units = (sides[2] + UNIT - 1) / UNIT;
    channel = static_cast<unsigned>(unit % units) * UNIT;
    const unsigned position = static_cast<unsigned>(unit / units), line = position / sides[1];
    column = position % sides[1];
    row = line % sides[0];
    frame = line / sides[0];
}

template <class T, bool WIDE>
__device__ inline void average_blocks(const BlocksArguments& a) {
    const unsigned long long unit = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (unit >= a.units) return;
    unsigned frame, row, column, channel;
    unit_at(unit, a.coarse, frame, row, column, channel);
    const unsigned size = a.frames * a.sides * a.sides;
    float numbers[UNIT];
    for (unsigned i = 0; i < UNIT; i++) {
        numbers[i] = 0;
        if (channel + i >= a.coarse[2]) continue;
        for (unsigned n = 0; n < a.group; n++) {
            const unsigned number = (channel + i) * a.group + n, place = number % size;
            const unsigned t = frame * a.frames + place / (a.sides * a.sides);
            if (t < a.missing) continue;
            const unsigned y = row * a.sides + place / a.sides % a.sides, z = column * a.sides + place % a.sides;
            const unsigned long long at =
                (t - a.missing) * a.x_frame + y * a.x_row + static_cast<unsigned long long>(z) * a.fine[2];
            numbers[i] += to_f32(static_cast<const T*>(a.x)[at + number / size]);
        }
        numbers[i] *= 1.0f / static_cast<float>(a.group);
    }
    T* out = static_cast<T*>(a.out) + frame * a.out_frame + row * a.out_row;
    write_unit<WIDE>(numbers, out + static_cast<unsigned long long>(column) * a.coarse[2], channel, a.coarse[2]);
}

template <class T, bool WIDE>
__device__ inline void add_repeated(const BlocksArguments& a) {
    const unsigned long long unit = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (unit >= a.units) return;
    unsigned frame, row, column, channel;
    unit_at(unit, a.fine, frame, row, column, channel);
    const unsigned size = a.frames * a.sides * a.sides, t = a.from_frame + frame, y = a.from_row + row;
    const unsigned place = (t % a.frames * a.sides + y % a.sides) * a.sides + column % a.sides;
    const T* x = static_cast<const T*>(a.x) + t / a.frames * a.x_frame + y / a.sides * a.x_row +
                 static_cast<unsigned long long>(column / a.sides) * a.coarse[2];
    T* out = static_cast<T*>(a.out) + frame * a.out_frame + row * a.out_row +
             static_cast<unsigned long long>(column) * a.fine[2];
    float numbers[UNIT];
    read_unit<WIDE>(out, channel, a.fine[2], numbers);
    for (unsigned i = 0; i < UNIT && channel + i < a.fine[2]; i++) {
        numbers[i] += to_f32(x[((channel + i) * size + place) / a.group]);
    }
    write_unit<WIDE>(numbers, out, channel, a.fine[2]);
}

// The squares of frames as channels: channel by channel, column by column, row by row within a column.
template <class T, bool WIDE>
__device__ inline void patched(const BlocksArguments& a) {
    const unsigned long long unit = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (unit >= a.units) return;
    unsigned frame, row, column, channel;
    unit_at(unit, a.coarse, frame, row, column, channel);
    const unsigned size = a.sides * a.sides;
    float numbers[UNIT];
    for (unsigned i = 0; i < UNIT; i++) {
        numbers[i] = 0;
        if (channel + i >= a.coarse[2]) continue;
        const unsigned place = (channel + i) % size;
        const unsigned y = row * a.sides + place % a.sides, z = column * a.sides + place / a.sides;
        const unsigned long long at =
            frame * a.x_frame + y * a.x_row + static_cast<unsigned long long>(z) * a.fine[2];
        numbers[i] = to_f32(static_cast<const T*>(a.x)[at + (channel + i) / size]);
    }
    T* out = static_cast<T*>(a.out) + frame * a.out_frame + row * a.out_row;
    write_unit<WIDE>(numbers, out + static_cast<unsigned long long>(column) * a.coarse[2], channel, a.coarse[2]);
}

// The inverse.
template <class T, bool WIDE>
__device__ inline void unpatched(const BlocksArguments& a) {
    const unsigned long long unit = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (unit >= a.units) return;
    unsigned frame, row, column, channel;
    unit_at(unit, a.fine, frame, row, column, channel);
    const unsigned size = a.sides * a.sides, place = column % a.sides * a.sides + row % a.sides;
    const T* x = static_cast<const T*>(a.x) + frame * a.x_frame + row / a.sides * a.x_row +
                 static_cast<unsigned long long>(column / a.sides) * a.coarse[2];
    float numbers[UNIT];
    for (unsigned i = 0; i < UNIT; i++) {
        numbers[i] = channel + i < a.fine[2] ? to_f32(x[(channel + i) * size + place]) : 0.0f;
    }
    T* out = static_cast<T*>(a.out) + frame * a.out_frame + row * a.out_row;
    write_unit<WIDE>(numbers, out + static_cast<unsigned long long>(column) * a.fine[2], channel, a.fine[2]);
}

}  // namespace moored
