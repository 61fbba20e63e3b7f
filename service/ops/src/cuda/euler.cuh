// Euler step on a latent in f32, its copy for the next step, and whether it is finite.
#pragma once
#include "numbers.cuh"

namespace moored {

template <class T>
__device__ inline void euler(float* latent, const T* velocity, T* seen, unsigned* not_finite, float by, unsigned count) {
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const float number = latent[at] + to_f32(velocity[at]) * by;
    latent[at] = number;
    seen[at] = from_f32<T>(number);
    if (!isfinite(number)) *not_finite = 1;
}

}  // namespace moored

struct EulerArguments {
    float* latent;
    const void* velocity;
    void* seen;
    unsigned* not_finite;
    float by;
    unsigned count;
};

#define EULER(name, T)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) euler_##name(EulerArguments a) {                              \
        moored::euler(a.latent, static_cast<const T*>(a.velocity), static_cast<T*>(a.seen), a.not_finite, a.by,     \
                      a.count);                                                                                     \
    }
EULER(f32, float)
EULER(f16, __half)
EULER(bf16, __nv_bfloat16)
