// Quantization on the card. The host side and the formats are in quantize.rs beside this and in format.rs. Arithmetic
// is IEEE f32, rounded half to even after each operation, with the same bytes as on the CPU: no fused multiply-adds
// (-fmad=false), subnormals are kept.

typedef unsigned long long u64;
typedef unsigned int u32;

struct F32 { float value; };
struct F16 { unsigned short bits; };
struct Bf16 { unsigned short bits; };

// The 16 values of nf4, ascending.
struct Table { float values[16]; };
// The 256 values of nested scales in nf4-double, ascending.
struct NestedTable { float values[256]; };

// -- one number ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float number(F32 x) { return x.value; }

__device__ __forceinline__ float number(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ __forceinline__ float number(F16 x) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }

// int8 code: round((x / absmax) * 127).
__device__ __forceinline__ unsigned char int8_code(float x, float absmax) {
  if (absmax == 0.0f) return 0;
  return (unsigned char)(signed char)(int)rintf(__fmul_rn(__fdiv_rn(x, absmax), 127.0f));
}

// Rounds to e4m3 (1 sign, 4 exponent, 3 mantissa bits), saturating at 448, ties to even.
__device__ __forceinline__ unsigned char e4m3_of(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, size = bits & 0x7FFFFFFFu;
  // Below 2^-6 all steps are 2^-9, and 8 of them are the code of 2^-6.
  if (size < 0x3C800000u) return (unsigned char)(sign | (u32)rintf(__fmul_rn(__uint_as_float(size), 512.0f)));
  const u32 rounded = size + 0x7FFFFu + (size >> 20 & 1u); // a carry moves to the next exponent
  return (unsigned char)(sign | ((rounded >> 20) - ((127u - 7u) << 3)));
}

__device__ __forceinline__ float fp8_scale(float absmax) { return __fdiv_rn(absmax, 448.0f); }

__device__ __forceinline__ unsigned char fp8_code(float x, float scale) {
  if (scale == 0.0f) return 0;
  return e4m3_of(fminf(fmaxf(__fdiv_rn(x, scale), -448.0f), 448.0f));
}

__device__ __forceinline__ float midpoint(const float *values, int i) {
  return __fmul_rn(__fadd_rn(values[i], values[i + 1]), 0.5f);
}

// Number of midpoints of the table below x / absmax.
__device__ __forceinline__ u32 nf4_code(float x, float absmax, const Table &table) {
  const float y = absmax == 0.0f ? 0.0f : __fdiv_rn(x, absmax);
  u32 code = 0;
#pragma unroll
  for (int i = 0; i < 15; i++) code += y > midpoint(table.values, i);
  return code;
}

// The same for 256 values.
__device__ __forceinline__ unsigned char nested_code(float centred, float absmax, const float *values) {
  const float y = absmax == 0.0f ? 0.0f : __fdiv_rn(centred, absmax);
  int code = 0; // midpoints before it are exceeded
#pragma unroll
  for (int step = 128; step > 0; step /= 2)
    if (y > midpoint(values, code + step - 1)) code += step;
  return (unsigned char)code;
}

// -- many numbers ----------------------------------------------------------------------------------------------------

// Maximum of non-negative values over a warp, in every thread.
__device__ __forceinline__ float largest_in_warp(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, lane));
  return value;
}

// The same for a block of whole warps.
__device__ __forceinline__ float largest_in_block(float value) {
  __shared__ float of_warps[32];
  value = largest_in_warp(value);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  float largest = 0.0f;
  for (u32 warp = 0; warp < blockDim.x / 32; warp++) largest = fmaxf(largest, of_warps[warp]);
  return largest;
}

__device__ __forceinline__ float scale_of(float absmax, bool fp8) { return fp8 ? fp8_scale(absmax) : absmax; }

// A block of threads quantizes one row of `columns` elements, with its own scale.
template <typename T, bool FP8>
__device__ __forceinline__ void
quantize_row(const T *numbers, u64 columns, float *scales, unsigned char *codes, u32 *not_finite, u32 tensor) {
  const T *row = numbers + blockIdx.x * columns;
  unsigned char *to = codes + blockIdx.x * columns;
  float absmax = 0.0f;
  bool finite = true;
  for (u64 i = threadIdx.x; i < columns; i += blockDim.x) {
    const float x = number(row[i]);
    finite = finite && is_finite(x);
    absmax = fmaxf(absmax, fabsf(x));
  }
  if (!finite) atomicMin(not_finite, tensor);
  const float scale = scale_of(largest_in_block(absmax), FP8);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (u64 i = threadIdx.x; i < columns; i += blockDim.x) {
    const float x = number(row[i]);
    to[i] = FP8 ? fp8_code(x, scale) : int8_code(x, scale);
  }
}

// Numbers of a row that are rotated at a time: a multiple of every group.
#define PIECE 4096u

// Multiplies the groups of a piece of a row by their Hadamard matrix over its square root (`Rotation::turn`). The piece is whole
// groups; all threads of the block take part.
template <typename T>
__device__ __forceinline__ void turn(const T *from, u32 count, u32 group, float *piece) {
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) piece[i] = number(from[i]);
  u32 root = 1;
  for (u32 apart = 1; apart < group; apart *= 4, root *= 2) {
    __syncthreads();
    for (u32 four = threadIdx.x; four < count / 4; four += blockDim.x) {
      float *at = piece + four / apart * apart * 4 + four % apart;
      const float a = at[0], b = at[apart], c = at[2 * apart], d = at[3 * apart];
      const float sum = __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d));
      at[0] = __fsub_rn(sum, __fmul_rn(2.0f, d));
      at[apart] = __fsub_rn(sum, __fmul_rn(2.0f, c));
      at[2 * apart] = __fsub_rn(sum, __fmul_rn(2.0f, b));
      at[3 * apart] = __fsub_rn(sum, __fmul_rn(2.0f, a));
    }
  }
  __syncthreads();
  const float factor = __fdiv_rn(1.0f, (float)root);
  for (u32 i = threadIdx.x; i < count; i += blockDim.x) piece[i] = __fmul_rn(piece[i], factor);
  __syncthreads();
}

// A block of threads rotates the groups of one row, and quantizes it with its own scale.
template <typename T>
__device__ __forceinline__ void rotate_row(
    const T *numbers, u64 columns, u32 group, float *scales, unsigned char *codes, u32 *not_finite, u32 tensor) {
  __shared__ float piece[PIECE];
  const T *row = numbers + blockIdx.x * columns;
  unsigned char *to = codes + blockIdx.x * columns;
  float absmax = 0.0f;
  bool finite = true;
  for (u64 first = 0; first < columns; first += PIECE) {
    const u32 count = (u32)(columns - first < PIECE ? columns - first : PIECE);
    turn(row + first, count, group, piece);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
      finite = finite && is_finite(piece[i]);
      absmax = fmaxf(absmax, fabsf(piece[i]));
    }
    __syncthreads();
  }
  if (!finite) atomicMin(not_finite, tensor);
  const float scale = __fdiv_rn(largest_in_block(absmax), 127.0f);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (u64 first = 0; first < columns; first += PIECE) {
    const u32 count = (u32)(columns - first < PIECE ? columns - first : PIECE);
    turn(row + first, count, group, piece);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
      // A scale that is denormal is rounded by so much that quotients are beyond 127.
      const float quotient = scale == 0.0f ? 0.0f : __fdiv_rn(piece[i], scale);
      const float code = rintf(fminf(fmaxf(quotient, -127.0f), 127.0f));
      to[first + i] = (unsigned char)(signed char)(int)code;
    }
    __syncthreads();
  }
}

// A warp quantizes one block of 64 elements: two of them and one byte per thread.
template <typename T>
__device__ __forceinline__ void quantize_nf4(
    const T *numbers, u64 count, const Table &table, float *absmax, unsigned char *codes, u32 *not_finite, u32 tensor) {
  const u64 block = blockIdx.x * (u64)(blockDim.x / 32) + threadIdx.x / 32;
  if (block * 64 >= count) return; // whole warps only
  const u64 first = block * 64 + threadIdx.x % 32 * 2;
  const float high = first < count ? number(numbers[first]) : 0.0f;
  const float low = first + 1 < count ? number(numbers[first + 1]) : 0.0f;
  if (!is_finite(high) || !is_finite(low)) atomicMin(not_finite, tensor);
  const float largest = largest_in_warp(fmaxf(fabsf(high), fabsf(low)));
  if (threadIdx.x % 32 == 0) absmax[block] = largest;
  if (first >= count) return;
  const u32 behind = first + 1 < count ? nf4_code(low, largest, table) : 0; // an odd last byte ends in zeros
  codes[first / 2] = (unsigned char)(nf4_code(high, largest, table) << 4 | behind);
}

#define FOR(NAME, T)                                                                                                   \
  extern "C" __global__ void int8_rows_##NAME(                                                                         \
      const T *numbers, u64 columns, float *scales, unsigned char *codes, u32 *not_finite, u32 tensor) {               \
    quantize_row<T, false>(numbers, columns, scales, codes, not_finite, tensor);                                       \
  }                                                                                                                    \
  extern "C" __global__ void fp8_rows_##NAME(                                                                          \
      const T *numbers, u64 columns, float *scales, unsigned char *codes, u32 *not_finite, u32 tensor) {               \
    quantize_row<T, true>(numbers, columns, scales, codes, not_finite, tensor);                                        \
  }                                                                                                                    \
  extern "C" __global__ void int8_rotated_##NAME(                                                                      \
      const T *numbers, u64 columns, u32 group, float *scales, unsigned char *codes, u32 *not_finite, u32 tensor) {    \
    rotate_row<T>(numbers, columns, group, scales, codes, not_finite, tensor);                                         \
  }                                                                                                                    \
  extern "C" __global__ void nf4_##NAME(                                                                               \
      const T *numbers, u64 count, float *absmax, unsigned char *codes, u32 *not_finite, u32 tensor,                   \
      const __grid_constant__ Table table) {                                                                           \
    quantize_nf4<T>(numbers, count, table, absmax, codes, not_finite, tensor);                                         \
  }

FOR(f32, F32)
FOR(f16, F16)
FOR(bf16, Bf16)

// Writes the tables of a layout: `count` is 16, or 16 + 256. One block of 256 threads.
extern "C" __global__ void write_tables(
    float *to, u32 count, const __grid_constant__ Table table, const __grid_constant__ NestedTable nested) {
  if (threadIdx.x < 16) to[threadIdx.x] = table.values[threadIdx.x];
  if (threadIdx.x < count - 16) to[16 + threadIdx.x] = nested.values[threadIdx.x];
}

// The mean of all absolute maxima, in f64 and in this order: 256 strided sums, then pairwise. One block of 256
// threads.
extern "C" __global__ void nested_offset(const float *absmax, u64 blocks, float *offset) {
  __shared__ double partial[256];
  double sum = 0.0;
  u64 i = threadIdx.x;
  for (; i + 15 * 256 < blocks; i += 16 * 256) {
    float some[16]; // all are under way before the first is needed
#pragma unroll
    for (int k = 0; k < 16; k++) some[k] = absmax[i + k * 256];
#pragma unroll
    for (int k = 0; k < 16; k++) sum = __dadd_rn(sum, (double)some[k]);
  }
  for (; i < blocks; i += 256) sum = __dadd_rn(sum, (double)absmax[i]);
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (u32 stride = 128; stride > 0; stride /= 2) {
    if (threadIdx.x < stride) partial[threadIdx.x] = __dadd_rn(partial[threadIdx.x], partial[threadIdx.x + stride]);
    __syncthreads();
  }
  if (threadIdx.x == 0) *offset = __double2float_rn(__ddiv_rn(partial[0], (double)blocks));
}

// Quantizes 256 absolute maxima, less the offset, with their own scale. One block of 256 threads per 256.
extern "C" __global__ void nested_scales(
    const float *absmax, u64 blocks, const float *offset, float *nested_absmax, unsigned char *codes,
    const __grid_constant__ NestedTable nested) {
  __shared__ float values[256];
  values[threadIdx.x] = nested.values[threadIdx.x];
  const u64 i = blockIdx.x * 256ull + threadIdx.x;
  const float centred = i < blocks ? __fsub_rn(absmax[i], *offset) : 0.0f;
  const float largest = largest_in_block(fabsf(centred)); // it also makes `values` seen by all
  if (threadIdx.x == 0) nested_absmax[blockIdx.x] = largest;
  if (i < blocks) codes[i] = nested_code(centred, largest, values);
}
