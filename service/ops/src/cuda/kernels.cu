// Every kernel by its name.
#include "dequantize.cuh"
#include "fp8.cuh"

#define DEQUANTIZE_TO(format, read, dtype, T)                                                                    \
    extern "C" __global__ void __launch_bounds__(256) dequantize_##format##_##dtype(                             \
        const uint8_t* bytes, unsigned long long scales_at, unsigned long long codes_at, unsigned numbers,       \
        unsigned columns, T* out) {                                                                              \
        moored::dequantize<moored::read>({bytes, bytes + scales_at, bytes + codes_at, numbers, columns}, out);   \
    }
#define DEQUANTIZE(format, ...)                                                                                  \
    DEQUANTIZE_TO(format, __VA_ARGS__, f32, float)                                                               \
    DEQUANTIZE_TO(format, __VA_ARGS__, f16, __half)                                                              \
    DEQUANTIZE_TO(format, __VA_ARGS__, bf16, __nv_bfloat16)

DEQUANTIZE(int8, ByRow<moored::Int8Value>)
DEQUANTIZE(fp8_none, ByRow<moored::Fp8None>)
DEQUANTIZE(fp8_tensor, ByRow<moored::Fp8Tensor>)
DEQUANTIZE(fp8_rows, ByRow<moored::Fp8Rows>)
DEQUANTIZE(nf4, ByTable<moored::PlainAbsmax>)
DEQUANTIZE(nf4_double, ByTable<moored::NestedAbsmax>)
DEQUANTIZE(q4_0, ByBlock<moored::Q4_0>)
DEQUANTIZE(q4_1, ByBlock<moored::Q4_1>)
DEQUANTIZE(q5_0, ByBlock<moored::Q5_0>)
DEQUANTIZE(q5_1, ByBlock<moored::Q5_1>)
DEQUANTIZE(q8_0, ByBlock<moored::Q8_0>)
DEQUANTIZE(q2_k, ByBlock<moored::Q2_K>)
DEQUANTIZE(q3_k, ByBlock<moored::Q3_K>)
DEQUANTIZE(q4_k, ByBlock<moored::Q4_K>)
DEQUANTIZE(q5_k, ByBlock<moored::Q5_K>)
DEQUANTIZE(q6_k, ByBlock<moored::Q6_K>)

#define FP8(dtype, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        quantize_rows_##dtype(const T* x, uint8_t* codes, float* scales, unsigned columns) {                     \
        moored::quantize_rows(x, codes, scales, columns);                                                        \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        scale_product_##dtype(T* product, const float* x_scales, const float* w_scales, unsigned w_stride,       \
                              const T* bias, unsigned columns, float factor) {                                   \
        moored::scale_product(product, x_scales, w_scales, w_stride, bias, columns, factor);                     \
    }
FP8(f16, __half)
FP8(bf16, __nv_bfloat16)

// Names are made beside what they do.
#include "softmax.cuh"
#include "elementwise.cuh"
