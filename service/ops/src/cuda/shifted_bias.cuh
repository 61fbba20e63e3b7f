// The bias of a layer of SVDQuant in int4 whose inputs are shifted before they are multiplied by its codes: the sum of each
// row of the weight without its low-rank product, by the shift, and the bias. One block for each row.
#pragma once
#include "numbers.cuh"
#include "svdquant.cuh"

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
    // A thread has two eights of columns of a tile. Their words are those of two rows.
    const TileRow of(row % 128);
    float sum = 0;
    for (unsigned at = threadIdx.x; at < a.columns / 16; at += blockDim.x) {
        const unsigned eight = at % 4, column = at / 4 * 64 + eight * UNIT;
        const size_t tile = static_cast<size_t>(row / 128) * (a.columns / 64) + at / 4;
        uint32_t words[2][2];
        load_words(w, tile, of, eight, words);
        for (unsigned half = 0; half < 2; half++) {
            const float scale = SvdquantInt4::scale(w, tile, row, of, half * 2 + eight / 2);
            for (unsigned i = 0; i < UNIT; i++) {
                sum += SvdquantInt4::number(words[of.eight][half], i) * scale * f32_at(w.bytes, column + half * 32 + i);
            }
        }
    }
    sum = sum_of_block(sum, warps);
    if (threadIdx.x == 0) {
        const float bias = a.bias ? to_f32(static_cast<const T*>(a.bias)[row]) : 0.0f;
        static_cast<T*>(a.out)[row] = from_f32<T>(bias + a.shift * sum);
    }
}

}  // namespace moored
