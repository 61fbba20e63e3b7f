// QK-norm and rotary position embedding, in place. A block processes a token of queries or of keys; a warp a head at
// a time, a lane two pairs at a time.
#pragma once
#include "numbers.cuh"

namespace moored {

// Mirrors the struct in `cuda/rope.rs`.
struct RopeArguments {
    void* x[2];            // queries and keys, [batch, tokens, heads, width] with strides
    const void* weight[2]; // T, [width], or [heads * width] across heads; null: no norm
    const float* cos;      // [tokens, width / 2]; null: no rotation
    const float* sin;
    unsigned long long batch_stride[2], token_stride[2], head_stride[2];
    unsigned heads[2];
    unsigned tokens;
    unsigned width;        // even
    float eps;
    unsigned is_across;    // one norm over all heads
    unsigned is_halves;    // pairs are (i, i + width / 2) rather than (2 i, 2 i + 1)
};

// The work of a block. Fields are selected by branches: an index unknown at compile time would copy all arguments to
// local memory.
template <class T>
struct RopeTask {
    T* x;
    const T* weight;
    unsigned long long head_stride;
    unsigned heads, token;

    __device__ explicit RopeTask(const RopeArguments& a) {
        const bool is_key = blockIdx.y != 0;
        token = blockIdx.x % a.tokens;
        const unsigned long long batch = blockIdx.x / a.tokens;
        x = static_cast<T*>(is_key ? a.x[1] : a.x[0]) + batch * (is_key ? a.batch_stride[1] : a.batch_stride[0]) +
            token * (is_key ? a.token_stride[1] : a.token_stride[0]);
        weight = static_cast<const T*>(is_key ? a.weight[1] : a.weight[0]);
        head_stride = is_key ? a.head_stride[1] : a.head_stride[0];
        heads = is_key ? a.heads[1] : a.heads[0];
    }
};

template <class T>
__device__ inline void rope(const RopeArguments& a) {
    __shared__ float warps[32];
    const RopeTask<T> task(a);
    const unsigned token = task.token;
    T* x = task.x;
    const T* weight = task.weight;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = a.width / 2;
    const unsigned apart = a.is_halves ? pairs : 1, step = a.is_halves ? 1 : 2;
    const float* cos = a.cos ? a.cos + static_cast<size_t>(token) * pairs : nullptr;
    const float* sin = a.sin ? a.sin + static_cast<size_t>(token) * pairs : nullptr;

    float factor = 1;
    if (weight && a.is_across) {
        float square = 0;
        for (unsigned head = warp; head < task.heads; head += blockDim.x / 32) {
            const T* numbers = x + head * task.head_stride;
            for (unsigned i = lane; i < a.width; i += 32) {
                const float number = to_f32(numbers[i]);
                square += number * number;
            }
        }
        factor = 1.0f / sqrtf(sum_of_block(square, warps) / (a.width * task.heads) + a.eps);
    }
    for (unsigned head = warp; head < task.heads; head += blockDim.x / 32) {
        T* numbers = x + head * task.head_stride;
        const T* by = weight ? weight + (a.is_across ? head * a.width : 0) : nullptr;
        if (weight && !a.is_across) {
            float square = 0;
            for (unsigned pair = lane; pair < pairs; pair += 32) {
                const float first = to_f32(numbers[pair * step]), second = to_f32(numbers[pair * step + apart]);
                square += first * first + second * second;
            }
            factor = 1.0f / sqrtf(sum_of_warp(square) / a.width + a.eps);
        }
        for (unsigned pair = lane; pair < pairs; pair += 32) {
            const unsigned at = pair * step;
            float first = to_f32(numbers[at]), second = to_f32(numbers[at + apart]);
            if (by) {
                first = first * factor * to_f32(by[at]);
                second = second * factor * to_f32(by[at + apart]);
            }
            if (cos) {
                const float c = cos[pair], s = sin[pair], rotated = first * c - second * s;
                second = second * c + first * s;
                first = rotated;
            }
            numbers[at] = from_f32<T>(first);
            numbers[at + apart] = from_f32<T>(second);
        }
    }
}

// Specializations for heads of 128 numbers aligned to 16 bytes: half a warp per head, eight numbers per lane, read and written once.
// A block has as many half warps as heads, or loops. Pairs are adjacent numbers, or (halves) those of lanes eight apart, which may be
// without a rotation.
template <class T, bool HALVES>
__device__ inline void rope_128(const RopeArguments& a) {
    constexpr unsigned LANES = 16, PAIRS = HALVES ? UNIT : UNIT / 2;
    const RopeTask<T> task(a);
    const unsigned token = task.token, lane = threadIdx.x % LANES;
    T* x = task.x;
    const T* weight = task.weight;
    const bool turns = !HALVES || a.cos;
    float by[UNIT], cos[PAIRS], sin[PAIRS];
    if (weight) read_wide(weight + lane * UNIT, by);
    if (turns) {
        const size_t first = static_cast<size_t>(token) * 64 + (lane * PAIRS) % 64;
        for (unsigned i = 0; i < PAIRS; i += 4) {
            load<uint4>(a.cos + first + i, cos + i);
            load<uint4>(a.sin + first + i, sin + i);
        }
    }
    // Both halves of a warp loop equally often, since they reduce together.
    for (unsigned first = 0; first < task.heads; first += blockDim.x / LANES) {
        const unsigned head = first + threadIdx.x / LANES;
        const bool is_there = head < task.heads;
        T* numbers = x + (is_there ? head : 0) * task.head_stride + lane * UNIT;
        float n[UNIT];
        read_wide(numbers, n);
        if (weight) {
            float square = 0;
            for (unsigned i = 0; i < UNIT; i++) square += n[i] * n[i];
            for (int apart = LANES / 2; apart > 0; apart /= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, apart);
            const float factor = 1.0f / sqrtf(square / 128.0f + a.eps);
            for (unsigned i = 0; i < UNIT; i++) n[i] = n[i] * factor * by[i];
        }
        if (HALVES && turns) {
            for (unsigned i = 0; i < UNIT; i++) {
                const float other = __shfl_xor_sync(0xFFFFFFFFu, n[i], LANES / 2);
                n[i] = lane < LANES / 2 ? n[i] * cos[i] - other * sin[i] : n[i] * cos[i] + other * sin[i];
            }
        }
        if (!HALVES) {
            for (unsigned pair = 0; pair < UNIT / 2; pair++) {
                const float left = n[2 * pair], right = n[2 * pair + 1];
                n[2 * pair] = left * cos[pair] - right * sin[pair];
                n[2 * pair + 1] = right * cos[pair] + left * sin[pair];
            }
        }
        if (is_there) write_wide(n, numbers);
    }
}

}  // namespace moored

#define ROPE(name, T) \
    extern "C" __global__ void __launch_bounds__(256) rope_##name(moored::RopeArguments a) { moored::rope<T>(a); }
ROPE(f32, float)
ROPE(f16, __half)
ROPE(bf16, __nv_bfloat16)
#define ROPE_128(name, pairs, T, HALVES)                                                                \
    extern "C" __global__ void __launch_bounds__(512) rope_128_##pairs##_##name(moored::RopeArguments a) { \
        moored::rope_128<T, HALVES>(a);                                                                 \
    }
ROPE_128(f16, neighbours, __half, false)
ROPE_128(bf16, neighbours, __nv_bfloat16, false)
ROPE_128(f16, halves, __half, true)
ROPE_128(bf16, halves, __nv_bfloat16, true)
