// Auxiliary kernels of convolutions: channels-last filters, unrolled patches, bias.
#pragma once
#include "numbers.cuh"

namespace moored {

// `[outputs, inputs, all]`, of which `[frames, rows, columns]` are taken from `before` on, to
// `[outputs, rows, frames, columns, inputs]`.
struct TapsArguments {
    const void* weight;
    void* out;
    unsigned long long numbers;
    unsigned inputs, frames, rows, columns, before, all;
};

template <class T>
__device__ inline void taps_first(const TapsArguments& a) {
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= a.numbers) return;
    const unsigned taps = a.frames * a.rows * a.columns, of_output = a.inputs * taps;
    const unsigned long long output = i / of_output;
    const unsigned rest = static_cast<unsigned>(i % of_output), tap = rest / a.inputs, input = rest % a.inputs;
    const unsigned line = tap / a.columns, row = line / a.frames, frame = line % a.frames;
    const unsigned from = (frame * a.rows + row) * a.columns + tap % a.columns;
    static_cast<T*>(a.out)[i] = static_cast<const T*>(a.weight)[(output * a.inputs + input) * a.all + a.before + from];
}

// Mirrors the struct in `cuda/convolve.rs`.
struct UnrollArguments {
    const void* x;  // T, [batch, frames, rows, columns, channels]
    void* out;      // T, [positions, taps, channels]
    unsigned long long first;  // position of all that are written by the convolution
    unsigned positions;        // here
    unsigned channels;
    int sides[3], kernel[3], before[3], strides[3], out_sides[3];
};

template <class T, bool WIDE>
__device__ inline void unroll(const UnrollArguments& a) {
    const unsigned units = (a.channels + UNIT - 1) / UNIT;
    const unsigned taps = a.kernel[0] * a.kernel[1] * a.kernel[2];
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned long long patch = i / units;
    const unsigned at = static_cast<unsigned>(i % units) * UNIT;
    if (patch >= static_cast<unsigned long long>(a.positions) * taps) return;
    unsigned long long position = a.first + patch / taps;
    unsigned tap = static_cast<unsigned>(patch % taps);
    int place[3];
    for (int axis = 2; axis >= 0; axis--) {
        const int of_position = static_cast<int>(position % a.out_sides[axis]);
        position /= a.out_sides[axis];
        place[axis] = of_position * a.strides[axis] + static_cast<int>(tap % a.kernel[axis]) - a.before[axis];
        tap /= a.kernel[axis];
    }
    float numbers[UNIT];
    for (unsigned n = 0; n < UNIT; n++) numbers[n] = 0;
    bool inside = true;
    unsigned long long from = position;  // the map
    for (int axis = 0; axis < 3; axis++) {
        inside = inside && place[axis] >= 0 && place[axis] < a.sides[axis];
        from = from * a.sides[axis] + place[axis];
    }
    if (inside) read_unit<WIDE>(static_cast<const T*>(a.x) + from * a.channels, at, a.channels, numbers);
    write_unit<WIDE>(numbers, static_cast<T*>(a.out) + patch * a.channels, at, a.channels);
}

struct AddArguments {
    const void* x;     // T, rows at x_stride
    const void* bias;  // T, [channels]; null: 0
    void* out;         // T, rows at out_stride
    unsigned long long x_stride, out_stride;
    unsigned long long rows;
    unsigned channels;
    unsigned adds;  // to what is there, rather than over it
    float factor;
    unsigned unused;
};

// `out = factor x + bias`, or `out += factor x + bias`.
template <class T, bool WIDE>
__device__ inline void add_rows(const AddArguments& a) {
    const unsigned units = (a.channels + UNIT - 1) / UNIT;
    const unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const unsigned long long row = i / units;
    const unsigned at = static_cast<unsigned>(i % units) * UNIT;
    if (row >= a.rows) return;
    float numbers[UNIT], more[UNIT];
    read_unit<WIDE>(static_cast<const T*>(a.x) + row * a.x_stride, at, a.channels, numbers);
    for (unsigned n = 0; n < UNIT; n++) numbers[n] *= a.factor;
    if (a.bias) {
        read_unit<WIDE>(static_cast<const T*>(a.bias), at, a.channels, more);
        for (unsigned n = 0; n < UNIT; n++) numbers[n] += more[n];
    }
    T* out = static_cast<T*>(a.out) + row * a.out_stride;
    if (a.adds) {
        read_unit<WIDE>(out, at, a.channels, more);
        for (unsigned n = 0; n < UNIT; n++) numbers[n] += more[n];
    }
    write_unit<WIDE>(numbers, out, at, a.channels);
}

}  // namespace moored
