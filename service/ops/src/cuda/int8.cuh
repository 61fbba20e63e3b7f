// Prologue and epilogue of products in int8: rows with a scale each, rotated as the columns of the weight were; scales and bias
// of sums in i32.
#pragma once
#include "fp8.cuh"

namespace moored {

// Codes in int8 of rows whose groups of columns are rotated, to nearest even. Columns are a multiple of GROUP.
template <unsigned GROUP>
struct Int8Codes {
    static constexpr float MOST = 127.0f;
    __device__ static void prepare(float* numbers) { rotate_groups<GROUP>(numbers); }
    __device__ static void write(const float numbers[UNIT], float factor, uint8_t* codes) {
        int8_t out[UNIT];
        for (unsigned i = 0; i < UNIT; i++) out[i] = static_cast<int8_t>(__float2int_rn(numbers[i] * factor));
        store<uint2>(out, codes);
    }
};

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
