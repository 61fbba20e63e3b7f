// Prologue and epilogue of products in int8: rows with a scale each, turned as the columns of the weight were; scales and bias
// of sums in i32.
#pragma once
#include "fp8.cuh"

namespace moored {

// As `quantize_rows`, to int8, of rows whose groups of columns are turned. Columns are a multiple of GROUP.
// scale = absmax / 127; code = x / scale, to nearest even.
template <class T, int CHUNKS, unsigned GROUP>
__device__ inline void quantize_rows_int8(const QuantizeArguments& a) {
    __shared__ float warps[32];
    const unsigned batch = blockIdx.x / a.rows, row = blockIdx.x % a.rows, columns = a.columns;
    const T* x = static_cast<const T*>(a.x) + batch * a.batch_stride + row * a.row_stride;
    uint8_t* codes = a.codes + static_cast<size_t>(blockIdx.x) * columns;
    float numbers[CHUNKS][UNIT];
    float absmax = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        read_unit<true>(x, (c * blockDim.x + threadIdx.x) * UNIT, columns, numbers[c]);
        turn_groups<GROUP>(numbers[c]);
        for (unsigned i = 0; i < UNIT; i++) absmax = fmaxf(absmax, fabsf(numbers[c][i]));
    }
    const float scale = most_of_block(absmax, warps) / 127.0f;
    const float factor = factor_of(scale);
    if (threadIdx.x == 0) a.scales[blockIdx.x] = scale;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const unsigned at = (c * blockDim.x + threadIdx.x) * UNIT;
        int8_t out[UNIT];
        for (unsigned i = 0; i < UNIT; i++) out[i] = static_cast<int8_t>(__float2int_rn(numbers[c][i] * factor));
        if (at < columns) store<uint2>(out, codes + at);
    }
}

// act(sum * x_scale[row] * w_scale[column] + bias[column] + result), rounded once, where the result is added if `adds`. Block
// (row from `first` on, part of the columns). `w_stride` is 1 for a scale per column, 0 for a single scale; the bias may be null.
struct FinishSumsArguments {
    const int* sums;  // [rows of the grid, columns]
    void* result;     // [batch, rows, columns] with distances
    const float* x_scales;
    const float* w_scales;
    const void* bias;
    unsigned long long batch_stride, row_stride;
    unsigned first, rows, columns, w_stride;
    unsigned is_gelu;  // tanh's approximation
    unsigned adds;
};

template <class T>
__device__ inline void finish_sums(const FinishSumsArguments& a) {
    const unsigned number = a.first + blockIdx.x, batch = number / a.rows, row = number % a.rows;
    const unsigned first = (blockIdx.y * blockDim.x + threadIdx.x) * UNIT;
    if (first >= a.columns) return;
    const int* sums = a.sums + static_cast<size_t>(blockIdx.x) * a.columns + first;
    T* at = static_cast<T*>(a.result) + batch * a.batch_stride + row * a.row_stride;
    const T* bias = static_cast<const T*>(a.bias);
    const bool is_wide = reinterpret_cast<uintptr_t>(at) % 16 == 0;
    int whole[UNIT];
    load<uint4>(sums, whole);
    load<uint4>(sums + 4, whole + 4);
    float numbers[UNIT];
    if (a.adds && is_wide) {
        read_unit<true>(at, first, a.columns, numbers);
    } else if (a.adds) {
        read_unit<false>(at, first, a.columns, numbers);
    } else {
        for (unsigned i = 0; i < UNIT; i++) numbers[i] = 0;
    }
    const float row_scale = a.x_scales[number];
    for (unsigned i = 0; i < UNIT; i++) {
        const float w_scale = a.w_scales[(first + i) * a.w_stride];
        const float product = static_cast<float>(whole[i]) * row_scale * w_scale;
        const float sum = product + (bias ? to_f32(bias[first + i]) : 0.0f) + numbers[i];
        numbers[i] = a.is_gelu ? gelu_tanh(sum) : sum;
    }
    if (is_wide) {
        write_unit<true>(numbers, at, first, a.columns);
    } else {
        write_unit<false>(numbers, at, first, a.columns);
    }
}

}  // namespace moored
