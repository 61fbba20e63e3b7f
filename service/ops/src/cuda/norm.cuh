// Residual, norm and modulation of rows, in one pass over memory: `x += gate * y`, then
// `out = normalise(x) * weight + bias`, `* (1 + scale) + shift`. Statistics are in f32, the variance in a second pass over
// registers. A block processes a row at a time; its threads hold CHUNKS units of it each. Few threads with several
// units are faster than many with one: a reduction waits for fewer warps, more blocks are resident on a
// multiprocessor, and each thread has more loads in flight.
#pragma once
#include <cuda_fp8.h>

#include "numbers.cuh"

namespace moored {

// Mirrors the struct in `cuda/norm.rs`. Addresses may be null where noted.
struct NormArguments {
    void* x;             // X, [batch, rows, columns] with strides; written where y is there
    const void* y;       // T, the branch; null: none
    const void* gate;    // T, [batch, columns]; null: 1
    const void* y_weight;  // T, [columns]: the branch is normalised by its root mean square first; null: it is not
    const void* weight;  // T, [columns]; null: 1
    const void* bias;    // T, [columns]; null: 0
    const void* scale;   // T, [batch, columns]; null: 0
    const void* shift;   // T, [batch, columns]; null: 0
    void* out;           // T, with strides, or e4m3 codes without gaps; null: only the residual
    float* out_scales;   // one for each row of codes; null: `out` is numbers
    unsigned long long x_batch, x_row, y_batch, y_row, out_batch, out_row;  // strides
    unsigned long long gate_batch, scale_batch, shift_batch;
    unsigned rows;       // of a batch
    unsigned columns;
    float eps;
    unsigned is_rms;     // root mean square, without a mean
    unsigned is_tanh;    // the gate is tanh of what is given
};

// A vector applied to all rows of a batch item. A thread keeps its part in registers if it has few units (`KEEPS`),
// else it reads it for each row.
template <class T, bool WIDE, int CHUNKS, bool KEEPS>
struct Vector {
    const T* numbers;
    unsigned columns;
    T kept[KEEPS ? CHUNKS : 1][UNIT];

    __device__ Vector(const void* all, unsigned long long begin, unsigned columns)
        : numbers(all ? static_cast<const T*>(all) + begin : nullptr), columns(columns) {
        if constexpr (KEEPS) {
            for (int c = 0; c < CHUNKS; c++) {
                const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
                if (numbers && at < columns) load_numbers(numbers + at, kept[c]);
            }
        }
    }

    __device__ void read(int c, float* to) const {
        if constexpr (KEEPS) {
            for (unsigned i = 0; i < UNIT; i++) to[i] = to_f32(kept[c][i]);
        } else {
            read_unit<WIDE>(numbers, (c * blockDim.x + threadIdx.x) * UNIT, columns, to);
        }
    }
};

// A block has the rows `blockIdx.x`, `blockIdx.x + gridDim.x`, .. of the batch item `blockIdx.y`.
template <class X, class T, bool WIDE, int CHUNKS>
__device__ inline void norm(const NormArguments& a) {
    // With few units, vectors are kept in registers, and the next row is prefetched.
    constexpr bool KEEPS = WIDE && CHUNKS < 4 && sizeof(X) == 2;
    __shared__ float warps[32];
    const unsigned batch = blockIdx.y;
    X* const all_x = static_cast<X*>(a.x) + batch * a.x_batch;
    const T* const all_y = a.y ? static_cast<const T*>(a.y) + batch * a.y_batch : nullptr;
    using Kept = Vector<T, WIDE, CHUNKS, KEEPS>;
    const Kept gate(a.gate, batch * a.gate_batch, a.columns);
    const Kept scale(a.scale, batch * a.scale_batch, a.columns);
    const Kept shift(a.shift, batch * a.shift_batch, a.columns);
    X next_x[KEEPS ? CHUNKS : 1][UNIT];
    T next_y[KEEPS ? CHUNKS : 1][UNIT];
    const auto read_ahead = [&](unsigned row) {
        if constexpr (KEEPS) {
            for (int c = 0; c < CHUNKS; c++) {
                const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
                if (row < a.rows && at < a.columns) {
                    load_numbers(all_x + row * a.x_row + at, next_x[c]);
                    if (all_y) load_numbers(all_y + row * a.y_row + at, next_y[c]);
                }
            }
        }
    };
    read_ahead(blockIdx.x);
    for (unsigned row = blockIdx.x; row < a.rows; row += gridDim.x) {
        X* const x = all_x + row * a.x_row;
        const T* const y = all_y ? all_y + row * a.y_row : nullptr;
        float numbers[CHUNKS][UNIT], branch[CHUNKS][UNIT];
        for (int c = 0; c < CHUNKS; c++) {
            const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
            if constexpr (KEEPS) {
                const bool is_there = at < a.columns;
                for (unsigned i = 0; i < UNIT; i++) {
                    numbers[c][i] = is_there ? to_f32(next_x[c][i]) : 0.0f;
                    branch[c][i] = is_there && y ? to_f32(next_y[c][i]) : 0.0f;
                }
            } else {
                read_unit<WIDE>(x, at, a.columns, numbers[c]);
                if (y) read_unit<WIDE>(y, at, a.columns, branch[c]);
            }
        }
        read_ahead(row + gridDim.x);
        if (y) {
            float factor = 1;
            if (a.y_weight) {
                float square = 0;
                for (int c = 0; c < CHUNKS; c++) {
                    for (unsigned i = 0; i < UNIT; i++) square += branch[c][i] * branch[c][i];
                }
                factor = 1.0f / sqrtf(sum_of_block(square, warps) / a.columns + a.eps);
            }
            for (int c = 0; c < CHUNKS; c++) {
                const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
                float by[UNIT];
                if (a.y_weight) {
                    read_unit<WIDE>(static_cast<const T*>(a.y_weight), at, a.columns, by);
                    for (unsigned i = 0; i < UNIT; i++) branch[c][i] *= factor * by[i];
                }
                if (gate.numbers) {
                    gate.read(c, by);
                    for (unsigned i = 0; i < UNIT; i++) branch[c][i] *= a.is_tanh ? tanhf(by[i]) : by[i];
                }
                for (unsigned i = 0; i < UNIT; i++) {
                    // The stored (rounded) value is normalized. Units beyond the row stay 0.
                    const float sum = at + i < a.columns ? numbers[c][i] + branch[c][i] : 0.0f;
                    numbers[c][i] = to_f32(from_f32<X>(sum));
                }
                write_unit<WIDE>(numbers[c], x, at, a.columns);
            }
        }
        if (!a.out) continue;

        float mean = 0;
        if (!a.is_rms) {
            float sum = 0;
            for (int c = 0; c < CHUNKS; c++) {
                for (unsigned i = 0; i < UNIT; i++) sum += numbers[c][i];
            }
            mean = sum_of_block(sum, warps) / a.columns;
        }
        float square = 0;
        for (int c = 0; c < CHUNKS; c++) {
            const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
            for (unsigned i = 0; i < UNIT; i++) {
                // Units beyond the row are excluded.
                const float apart = at + i < a.columns ? numbers[c][i] - mean : 0.0f;
                square += apart * apart;
            }
        }
        const float factor = 1.0f / sqrtf(sum_of_block(square, warps) / a.columns + a.eps);
        float most = 0;
        for (int c = 0; c < CHUNKS; c++) {
            const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
            float other[UNIT];
            for (unsigned i = 0; i < UNIT; i++) numbers[c][i] = (numbers[c][i] - mean) * factor;
            if (a.weight) {
                read_unit<WIDE>(static_cast<const T*>(a.weight), at, a.columns, other);
                for (unsigned i = 0; i < UNIT; i++) numbers[c][i] *= other[i];
            }
            if (a.bias) {
                read_unit<WIDE>(static_cast<const T*>(a.bias), at, a.columns, other);
                for (unsigned i = 0; i < UNIT; i++) numbers[c][i] += other[i];
            }
            if (scale.numbers) {
                scale.read(c, other);
                for (unsigned i = 0; i < UNIT; i++) numbers[c][i] *= 1.0f + other[i];
            }
            if (shift.numbers) {
                shift.read(c, other);
                for (unsigned i = 0; i < UNIT; i++) numbers[c][i] += other[i];
            }
            if (a.out_scales) {
                for (unsigned i = 0; i < UNIT; i++) most = at + i < a.columns ? fmaxf(most, fabsf(numbers[c][i])) : most;
            } else {
                T* out = static_cast<T*>(a.out) + batch * a.out_batch + row * a.out_row;
                write_unit<WIDE>(numbers[c], out, at, a.columns);
            }
        }
        if (!a.out_scales) continue;
        // As in `quantize_rows`.
        const float step = most_of_block(most, warps) / 448.0f;
        const float by = step < 1.2e-38f ? 0.0f : 1.0f / step;
        const size_t of_all = static_cast<size_t>(batch) * a.rows + row;
        if (threadIdx.x == 0) a.out_scales[of_all] = step;
        uint8_t* codes = static_cast<uint8_t*>(a.out) + of_all * a.columns;
        for (int c = 0; c < CHUNKS; c++) {
            const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
            uint8_t unit[UNIT];
            for (unsigned i = 0; i < UNIT; i++) {
                unit[i] = __nv_cvt_float_to_fp8(numbers[c][i] * by, __NV_SATFINITE, __NV_E4M3);
            }
            if (WIDE) {
                if (at < a.columns) store<uint2>(unit, codes + at);
            } else {
                for (unsigned i = 0; i < UNIT && at + i < a.columns; i++) codes[at + i] = unit[i];
            }
        }
    }
}

}  // namespace moored

#define NORM_OF(name, X, T, wide, WIDE, CHUNKS, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) norm_##name##_##wide##_##CHUNKS(moored::NormArguments a) {   \
        moored::norm<X, T, WIDE, CHUNKS>(a);                                                                           \
    }
// Block size, and resident blocks per multiprocessor, as in `cuda/norm.rs`.
#define NORM(name, X, T)                        \
    NORM_OF(name, X, T, wide, true, 1, 128, 3)  \
    NORM_OF(name, X, T, wide, true, 2, 128, 3)  \
    NORM_OF(name, X, T, wide, true, 3, 128, 3)  \
    NORM_OF(name, X, T, wide, true, 4, 512)     \
    NORM_OF(name, X, T, wide, true, 8, 512)     \
    NORM_OF(name, X, T, single, false, 4, 512)  \
    NORM_OF(name, X, T, single, false, 8, 512)
NORM(f32_f32, float, float)
NORM(f16_f16, __half, __half)
NORM(bf16_bf16, __nv_bfloat16, __nv_bfloat16)
NORM(f32_f16, float, __half)
NORM(f32_bf16, float, __nv_bfloat16)
