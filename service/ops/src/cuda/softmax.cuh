// Softmax of attention's scores, in place, in f32: a row of f32 becomes weights of a possibly narrower dtype, at the
// beginning of the row.
#pragma once
#include <cmath>

#include "numbers.cuh"

namespace moored {

// Block size, and maximum of scores of a row per thread in registers.
constexpr unsigned SOFTMAX_THREADS = 256;
constexpr unsigned SOFTMAX_KEPT = 32;

// Mirrors the struct in `cuda/attention.rs`. Block (query of the chunk, head).
struct SoftmaxArguments {
    float* scores;         // [heads, queries, row]
    const void* bias;      // null for none; the distances of heads and queries may be 0
    const unsigned* most;  // null, or how many keys there are for all queries: one number
    unsigned long long bias_head;
    unsigned long long bias_query;
    unsigned row;          // from a row of scores to the next
    unsigned queries;      // of the chunk
    unsigned first_query;  // of the chunk, among all
    unsigned keys;
    unsigned before;  // keys that a query sees before its own place, and after it: the largest number for all of them
    unsigned after;
};

template <class T>
struct ScoreRow {
    const float* scores;
    const T* bias;
    unsigned first;  // the keys that are seen: first to end
    unsigned end;

    __device__ float at(unsigned key) const {
        if (key < first || key >= end) return -INFINITY;
        return scores[key] + (bias ? to_f32(bias[key]) : 0.0f);
    }
};

// Weight of a score. A fully masked row has no weights: its maximum is minus infinity.
__device__ inline float weight_of(float score, float highest) {
    return score == -INFINITY ? 0.0f : expf(score - highest);
}

// The whole row is in registers before the first weight is written.
template <class T>
__device__ inline void softmax_kept(const ScoreRow<T>& row, unsigned keys, T* out, float* warps) {
    float kept[SOFTMAX_KEPT];
    float highest = -INFINITY;
#pragma unroll
    for (unsigned i = 0; i < SOFTMAX_KEPT; i++) {
        const unsigned key = i * SOFTMAX_THREADS + threadIdx.x;
        kept[i] = key < keys ? row.at(key) : -INFINITY;
        highest = fmaxf(highest, kept[i]);
    }
    highest = most_of_block(highest, warps);
    float sum = 0;
#pragma unroll
    for (unsigned i = 0; i < SOFTMAX_KEPT; i++) {
        kept[i] = weight_of(kept[i], highest);
        sum += kept[i];
    }
    sum = sum_of_block(sum, warps);
    const float factor = sum > 0 ? 1.0f / sum : (sum == 0 ? 0.0f : sum);
#pragma unroll
    for (unsigned i = 0; i < SOFTMAX_KEPT; i++) {
        const unsigned key = i * SOFTMAX_THREADS + threadIdx.x;
        if (key < keys) out[key] = from_f32<T>(kept[i] * factor);
    }
}

// A longer row: one pass for the maximum, one for the sum, one for the weights. A weight is never wider than its
// score, so that writes only overwrite scores that the block has read.
template <class T>
__device__ inline void softmax_streamed(const ScoreRow<T>& row, unsigned keys, T* out, float* warps) {
    float highest = -INFINITY;
    for (unsigned key = threadIdx.x; key < keys; key += SOFTMAX_THREADS) highest = fmaxf(highest, row.at(key));
    highest = most_of_block(highest, warps);
    float sum = 0;
    for (unsigned key = threadIdx.x; key < keys; key += SOFTMAX_THREADS) sum += weight_of(row.at(key), highest);
    sum = sum_of_block(sum, warps);
    const float factor = sum > 0 ? 1.0f / sum : (sum == 0 ? 0.0f : sum);
    for (unsigned start = 0; start < keys; start += SOFTMAX_THREADS) {
        const unsigned key = start + threadIdx.x;
        const float weight = key < keys ? weight_of(row.at(key), highest) * factor : 0.0f;
        __syncthreads();
        if (key < keys) out[key] = from_f32<T>(weight);
    }
}

template <class T>
__device__ inline void softmax(const SoftmaxArguments& a) {
    __shared__ float warps[SOFTMAX_THREADS / 32];
    const unsigned query = a.first_query + blockIdx.x;
    const size_t begin = (static_cast<size_t>(blockIdx.y) * a.queries + blockIdx.x) * a.row;
    float* scores = a.scores + begin;
    const unsigned keys = a.most ? min(*a.most, a.keys) : a.keys;
    // Without overflow.
    const unsigned after = a.keys - min(query, a.keys) > a.after ? query + a.after + 1 : a.keys;
    ScoreRow<T> row;
    row.scores = scores;
    row.bias = a.bias ? static_cast<const T*>(a.bias) + blockIdx.y * a.bias_head + query * a.bias_query : nullptr;
    row.first = query > a.before ? query - a.before : 0;
    row.end = min(keys, after);
    T* out = reinterpret_cast<T*>(scores);
    if (a.keys <= SOFTMAX_KEPT * SOFTMAX_THREADS) {
        softmax_kept(row, a.keys, out, warps);
    } else {
        softmax_streamed(row, a.keys, out, warps);
    }
}

// Mirrors the struct in `cuda/attention.rs`.
struct PartsArguments {
    void* out;              // T: of the first query that is added, with what its row has of the first keys
    const void* rest;       // T, [queries, heads, width]: what it has of the others
    const float* sums;      // logarithms of the sums of rows over the first keys, from a head to the next `queries`
    const float* rest_sums; // and over the others, from a head to the next `rest_queries`
    unsigned long long row;  // from a query to the next in `out`
    unsigned added, heads, width, queries, rest_queries, unused;
};

// The shares of two parts of the keys in the sum of a row, from the logarithms of their sums.
struct Shares {
    float first, second;

    __device__ Shares(float of_first, float of_second)
        : first(1.0f / (1.0f + expf(of_second - of_first))), second(1.0f / (1.0f + expf(of_first - of_second))) {}
};

// Adds the parts of a row by their shares in its sum.
template <class T>
__device__ inline void add_parts(const PartsArguments& a) {
    const unsigned units = a.heads * a.width / UNIT;
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned query = i / units, at = i % units * UNIT, head = at / a.width;
    if (query >= a.added) return;
    const Shares shares(a.sums[static_cast<size_t>(head) * a.queries + query],
                        a.rest_sums[static_cast<size_t>(head) * a.rest_queries + query]);
    T* out = static_cast<T*>(a.out) + query * a.row + at;
    float numbers[UNIT], rest[UNIT];
    read_wide(out, numbers);
    read_wide(static_cast<const T*>(a.rest) + static_cast<size_t>(query) * a.heads * a.width + at, rest);
    for (unsigned n = 0; n < UNIT; n++) numbers[n] = shares.first * numbers[n] + shares.second * rest[n];
    write_wide(numbers, out);
}

}  // namespace moored

#define ADD_PARTS(name, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) add_parts_##name(moored::PartsArguments a) { moored::add_parts<T>(a); }
ADD_PARTS(f16, __half)
ADD_PARTS(bf16, __nv_bfloat16)
#undef ADD_PARTS
#define SOFTMAX(name, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) softmax_##name(moored::SoftmaxArguments a) { moored::softmax<T>(a); }
SOFTMAX(f32, float)
SOFTMAX(f16, __half)
SOFTMAX(bf16, __nv_bfloat16)
#undef SOFTMAX
