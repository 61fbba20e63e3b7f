// The bias of a layer of SVDQuant in int4 whose inputs are shifted before they are multiplied by its codes: the sum of each
// row of the weight without its low-rank product, by the shift, and the bias. One block for each row.
#pragma once
#include "numbers.cuh"
#include "packed.cuh"

namespace moored {

struct ShiftedBiasArguments {
    const uint8_t* bytes;
    unsigned long long scales_at, codes_at;
    const void* bias;  // or null
    void* out;
    unsigned rows, columns;
    float shift;
};

template <class T>
__device__ inline void shifted_bias(const ShiftedBiasArguments& a) {
    __shared__ float warps[32];
    const Weight w = {a.bytes, a.bytes + a.scales_at, a.bytes + a.codes_at, a.rows * a.columns, a.columns};
    const unsigned row = blockIdx.x;
    float sum = 0;
    for (unsigned column = threadIdx.x * UNIT; column < a.columns; column += blockDim.x * UNIT) {
        float numbers[UNIT];
        SvdquantInt4::read(w, row, column, numbers);
        for (unsigned i = 0; i < UNIT; i++) sum += numbers[i];
    }
    sum = sum_of_block(sum, warps);
    if (threadIdx.x == 0) {
        const float bias = a.bias ? to_f32(static_cast<const T*>(a.bias)[row]) : 0.0f;
        static_cast<T*>(a.out)[row] = from_f32<T>(bias + a.shift * sum);
    }
}

}  // namespace moored
