// Around cuDNN's attention over e4m3 codes: codes of queries, keys and values, and numbers of the codes of the result, in the rows that
// they are of.
#pragma once
#include "fp8.cuh"
#include "softmax.cuh"

namespace moored {

// Mirrors the struct in `cuda/attention_in_fp8.rs`. Queries, keys and values, in this order.
struct CodesArguments {
    void* x[3];  // [batch, tokens, columns] with distances, aligned to 16 bytes; columns are a multiple of UNIT
    unsigned long long batch_stride[3], token_stride[3];
    unsigned* greatest;  // magnitudes as bits of f32, 0 at first
    float* scales;       // 16 bytes from each other: `Fp8Scales`
    unsigned tokens[3], columns[3];
    unsigned batch;
    unsigned unused;
};

// The tensor of a block. Fields are selected by branches: an index unknown at compile time would copy all arguments to local memory.
struct CodesTask {
    uint8_t* x;
    unsigned long long batch_stride, token_stride;
    unsigned tokens, columns;

    __device__ explicit CodesTask(const CodesArguments& a) {
        const unsigned which = blockIdx.y;
        const auto chosen = [which](const auto& of) { return which == 0 ? of[0] : which == 1 ? of[1] : of[2]; };
        x = static_cast<uint8_t*>(chosen(a.x));
        batch_stride = chosen(a.batch_stride), token_stride = chosen(a.token_stride);
        tokens = chosen(a.tokens), columns = chosen(a.columns);
    }

    template <class T>
    __device__ T* row(unsigned row) const {
        return reinterpret_cast<T*>(x) + row / tokens * batch_stride + row % tokens * token_stride;
    }
};

// Magnitudes are compared as bits, whose order is theirs. What is no number is left to the codes.
template <class T>
__device__ inline void greatest_of_rows(const CodesArguments& a) {
    __shared__ float warps[32];
    const CodesTask task(a);
    const unsigned units = task.columns / UNIT;
    const unsigned long long all = static_cast<unsigned long long>(a.batch) * task.tokens * units;
    float most = 0;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) {
        float numbers[UNIT];
        read_wide(task.row<T>(i / units) + i % units * UNIT, numbers);
        for (unsigned n = 0; n < UNIT; n++) most = fmaxf(most, fabsf(numbers[n]));
    }
    most = most_of_block(most, warps);
    if (threadIdx.x == 0) atomicMax(a.greatest + blockIdx.y, __float_as_uint(most));
}

// A block has a row: all of it is read before the codes are written to its beginning.
template <class T>
__device__ inline void codes_in_rows(const CodesArguments& a) {
    // Weights are at most 1. A power of two, so that their scale costs no digit.
    constexpr float WEIGHT_SCALE = 256.0f;
    constexpr unsigned APART = 4;
    // A step of 0 would make cuDNN's result no number. What is smaller becomes 0.
    constexpr float NEGLIGIBLE = 1e-20f;
    const CodesTask task(a);
    const float greatest = __uint_as_float(a.greatest[blockIdx.y]);
    const float scale = greatest < NEGLIGIBLE ? 1.0f : greatest / E4m3Codes::MOST;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        a.scales[blockIdx.y * APART] = scale;
        if (blockIdx.y == 2) {
            a.scales[3 * APART] = WEIGHT_SCALE;
            a.scales[4 * APART] = 1.0f / WEIGHT_SCALE;
            a.scales[5 * APART] = 1.0f / scale;
        }
    }
    if (blockIdx.x >= a.batch * task.tokens) return;
    T* row = task.row<T>(blockIdx.x);
    const unsigned at = threadIdx.x * UNIT;
    float numbers[UNIT];
    read_unit<true>(row, at, task.columns, numbers);
    __syncthreads();
    if (at < task.columns) E4m3Codes::write(numbers, 1.0f / scale, reinterpret_cast<uint8_t*>(row) + at);
}

// Mirrors the struct in `cuda/attention_in_fp8.rs`.
struct NumbersArguments {
    void* x;
    unsigned long long batch_stride, token_stride;
    const float* step;
    const uint8_t* rest;    // codes [tokens, columns] over the last keys, with the logarithms of the sums of rows over the first keys
    const float* sums;      // and the last, from a head to the next `queries` and `rest_queries`; or null
    const float* rest_sums;
    unsigned tokens, columns, width, queries, rest_queries, unused;
};

__device__ inline void read_codes(const uint8_t* codes, float factor, float numbers[UNIT]) {
    __nv_fp8x2_storage_t pairs[UNIT / 2];
    load<uint2>(codes, pairs);
    for (unsigned i = 0; i < UNIT; i += 2) {
        const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(pairs[i / 2], __NV_E4M3);
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&both));
        numbers[i] = pair.x * factor, numbers[i + 1] = pair.y * factor;
    }
}

// A block has a row: all of its codes, which lie at its end, are read before the numbers are written.
template <class T>
__device__ inline void numbers_in_rows(const NumbersArguments& a) {
    T* row = static_cast<T*>(a.x) + blockIdx.x / a.tokens * a.batch_stride + blockIdx.x % a.tokens * a.token_stride;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(row) + a.columns * (sizeof(T) - 1);
    const unsigned at = threadIdx.x * UNIT;
    const bool is_there = at < a.columns;
    const float step = *a.step;
    float numbers[UNIT];
    if (is_there && a.rest) {
        const unsigned head = at / a.width;
        const Shares shares(a.sums[static_cast<size_t>(head) * a.queries + blockIdx.x],
                            a.rest_sums[static_cast<size_t>(head) * a.rest_queries + blockIdx.x]);
        float rest[UNIT];
        read_codes(codes + at, step * shares.first, numbers);
        read_codes(a.rest + static_cast<size_t>(blockIdx.x) * a.columns + at, step * shares.second, rest);
        for (unsigned i = 0; i < UNIT; i++) numbers[i] += rest[i];
    } else if (is_there) {
        read_codes(codes + at, step, numbers);
    }
    __syncthreads();
    if (is_there) write_wide(numbers, row + at);
}

}  // namespace moored

#define ATTENTION_IN_FP8(dtype, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) greatest_of_rows_##dtype(moored::CodesArguments a) {               \
        moored::greatest_of_rows<T>(a);                                                                                  \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(1024) codes_in_rows_##dtype(moored::CodesArguments a) {                 \
        moored::codes_in_rows<T>(a);                                                                                     \
    }                                                                                                                    \
    extern "C" __global__ void __launch_bounds__(1024) numbers_in_rows_##dtype(moored::NumbersArguments a) {             \
        moored::numbers_in_rows<T>(a);                                                                                   \
    }
ATTENTION_IN_FP8(f16, __half)
ATTENTION_IN_FP8(bf16, __nv_bfloat16)
