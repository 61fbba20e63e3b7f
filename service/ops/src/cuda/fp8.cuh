// Prologue and epilogue of native fp8 products: quantization of rows with a scale each; scales and bias of the
// product.
#pragma once
#include <cuda_fp8.h>

#include "numbers.cuh"

namespace moored {

// One block per row, whose threads hold CHUNKS units each. Rows are aligned to 16 bytes, columns a multiple of UNIT.
// scale = absmax / 448; code = e4m3 of x / scale, to nearest even, 0 if the scale is about 0. NaN stays NaN; an
// infinite row becomes NaN and 0, as its product would.
struct QuantizeArguments {
    const void* x;  // [batch, rows, columns] with distances
    uint8_t* codes;
    float* scales;
    unsigned long long batch_stride, row_stride;
    unsigned rows, columns;
};

// What numbers are multiplied by for codes of this scale. Denormals have no reciprocal in f32, and are negligible.
__device__ inline float factor_of(float scale) { return scale < 1.2e-38f ? 0.0f : 1.0f / scale; }

// Codes have a largest number, which the scale is of, and define how a unit is prepared and written.
struct E4m3Codes {
    static constexpr float MOST = 448.0f;
    __device__ static void prepare(float*) {}
    __device__ static void write(const float numbers[UNIT], float factor, uint8_t* codes) {
        __nv_fp8x2_storage_t out[UNIT / 2];
        for (unsigned i = 0; i < UNIT; i += 2) {
            const float2 pair = make_float2(numbers[i] * factor, numbers[i + 1] * factor);
            out[i / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
        }
        store<uint2>(out, codes);
    }
};

// Codes of the row that a block holds in registers, CHUNKS units a thread, and its scale.
template <class Codes, int CHUNKS>
__device__ inline void write_codes(const float numbers[CHUNKS][UNIT], float absmax, unsigned columns, uint8_t* codes,
                                   float* scale_of_row) {
    __shared__ float warps[32];
    const float scale = most_of_block(absmax, warps) / Codes::MOST;
    const float factor = factor_of(scale);
    if (threadIdx.x == 0) *scale_of_row = scale;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
        if (at < columns) Codes::write(numbers[c], factor, codes + at);
    }
}

template <class T, int CHUNKS, class Codes>
__device__ inline void quantize_rows(const QuantizeArguments& a) {
    const unsigned batch = blockIdx.x / a.rows, row = blockIdx.x % a.rows, columns = a.columns;
    const T* x = static_cast<const T*>(a.x) + batch * a.batch_stride + row * a.row_stride;
    uint8_t* codes = a.codes + static_cast<size_t>(blockIdx.x) * columns;
    float numbers[CHUNKS][UNIT];
    float absmax = 0;
    for (int c = 0; c < CHUNKS; c++) {
        read_unit<true>(x, (c * blockDim.x + threadIdx.x) * UNIT, columns, numbers[c]);
        Codes::prepare(numbers[c]);
        for (unsigned i = 0; i < UNIT; i++) absmax = fmaxf(absmax, fabsf(numbers[c][i]));
    }
    write_codes<Codes, CHUNKS>(numbers, absmax, columns, codes, a.scales + blockIdx.x);
}

// As `quantize_rows`, of the rows of a quantized weight, with REQUANTIZED units a thread. Columns are a multiple of
// sixteen, so that no unit is of two rows or of two blocks of a format.
constexpr int REQUANTIZED = 2;

struct RequantizeArguments {
    const uint8_t* bytes;
    unsigned long long scales_at, codes_at;
    uint8_t* codes;
    float* scales;
    unsigned* made;  // whether the scales are made already, where they are kept; or null
    unsigned rows, columns;
};

template <class Format>
__device__ inline void requantize_rows(const RequantizeArguments& a) {
    __shared__ float tables[Format::TABLE * LANES + 1];
    if constexpr (Format::TABLE > 0) {
        for (unsigned i = threadIdx.x; i < Format::TABLE * LANES; i += blockDim.x) tables[i] = f32_at(a.bytes, i / LANES);
        __syncthreads();
    }
    const float* table = tables + threadIdx.x % LANES;
    const Weight w = {a.bytes, a.bytes + a.scales_at, a.bytes + a.codes_at, a.rows * a.columns, a.columns};
    const unsigned begin = blockIdx.x * a.columns;
    const bool is_regular = Format::is_regular(w);
    float numbers[REQUANTIZED][UNIT];
    float absmax = 0;
#pragma unroll
    for (int c = 0; c < REQUANTIZED; c++) {
        const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
        if (at < a.columns && is_regular) {
            Format::read_regular(w, table, begin + at, numbers[c]);
        } else if (at < a.columns) {
            Format::read(w, table, begin + at, UNIT, numbers[c]);
        } else {
            for (unsigned i = 0; i < UNIT; i++) numbers[c][i] = 0;
        }
        for (unsigned i = 0; i < UNIT; i++) absmax = fmaxf(absmax, fabsf(numbers[c][i]));
    }
    write_codes<E4m3Codes, REQUANTIZED>(numbers, absmax, a.columns, a.codes + begin, a.scales + blockIdx.x);
}

// In place: act(product * factor * x_scale[row] * w_scale[column] + bias[column]). Block (row, part of the columns).
// `w_stride` is 1 for a scale per column, 0 for a single scale; scales and bias may be null.
struct FinishArguments {
    void* product;  // [batch, rows, columns] with distances
    const float* x_scales;
    const float* w_scales;
    const void* bias;
    unsigned long long batch_stride, row_stride;
    unsigned rows, columns, w_stride;
    float factor;
    unsigned is_gelu;  // tanh's approximation
};

__device__ inline float gelu_tanh(float x) {
    // (1 + tanh u) / 2 = 1 / (1 + exp -2u): no cancellation far below zero.
    return x / (1.0f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

template <class T>
__device__ inline void finish_product(const FinishArguments& a) {
    const unsigned batch = blockIdx.x / a.rows, row = blockIdx.x % a.rows;
    const unsigned first = (blockIdx.y * blockDim.x + threadIdx.x) * UNIT;
    T* at = static_cast<T*>(a.product) + batch * a.batch_stride + row * a.row_stride;
    const T* bias = static_cast<const T*>(a.bias);
    const float row_scale = a.x_scales ? a.x_scales[blockIdx.x] * a.factor : a.factor;
    const bool is_wide = a.columns % UNIT == 0 && reinterpret_cast<uintptr_t>(at) % 16 == 0;
    float numbers[UNIT];
    if (is_wide) {
        read_unit<true>(at, first, a.columns, numbers);
    } else {
        read_unit<false>(at, first, a.columns, numbers);
    }
    for (unsigned i = 0; i < UNIT && first + i < a.columns; i++) {
        const float w_scale = a.w_scales ? a.w_scales[(first + i) * a.w_stride] : 1.0f;
        const float sum = numbers[i] * row_scale * w_scale + (bias ? to_f32(bias[first + i]) : 0.0f);
        numbers[i] = a.is_gelu ? gelu_tanh(sum) : sum;
    }
    if (is_wide) {
        write_unit<true>(numbers, at, first, a.columns);
    } else {
        write_unit<false>(numbers, at, first, a.columns);
    }
}

}  // namespace moored
