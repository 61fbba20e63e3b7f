// Dequantizes weights to f32, f16 or bf16. A thread writes `UNITS` times eight consecutive elements, sixteen bytes of
// a narrow dtype; writes of a block are coalesced, and each thread reads all of its codes before it computes, since
// the kernel is memory-bound. Each format's `read` gives eight elements with one scale; the arithmetic and its order
// are specified by the CPU loops (`dequantize/*.rs`), with identical bits: no fused operations (`-fmad=false`),
// denormals are kept.
#pragma once
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace moored {

constexpr unsigned UNIT = 8;

// Units per thread, and block size.
constexpr unsigned UNITS = 4;
constexpr unsigned DEQUANTIZE_THREADS = 256;

// Warp size.
constexpr unsigned LANES = 32;

// Addresses and sizes of the parts of a weight. The weight itself is aligned to 16 bytes.
struct Weight {
    const uint8_t* bytes;
    const uint8_t* scales;
    const uint8_t* codes;
    unsigned numbers;
    unsigned columns;
};

__device__ inline float f32_at(const uint8_t* bytes, unsigned index) {
    return reinterpret_cast<const float*>(bytes)[index];
}

__device__ inline float f16_at(const uint8_t* bytes) {
    return __half2float(*reinterpret_cast<const __half*>(bytes));
}

// One load or store of a whole `Wide`, at an aligned address; copying its content bytewise costs no registers.
template <class Wide>
__device__ inline void load(const void* from, void* to) {
    const Wide wide = *static_cast<const Wide*>(from);
    memcpy(to, &wide, sizeof(Wide));
}

template <class Wide>
__device__ inline void store(const void* from, void* to) {
    Wide wide;
    memcpy(&wide, from, sizeof(Wide));
    *static_cast<Wide*>(to) = wide;
}

// Eight bytes by the widest loads that their alignment allows. Loads of a warp are coalesced.
__device__ inline void load8(const uint8_t* from, uint8_t* to) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(from);
    if (at % 8 == 0) {
        load<uint2>(from, to);
    } else if (at % 4 == 0) {
        for (int i = 0; i < 8; i += 4) load<uint32_t>(from + i, to + i);
    } else if (at % 2 == 0) {
        for (int i = 0; i < 8; i += 2) load<uint16_t>(from + i, to + i);
    } else {
        for (int i = 0; i < 8; i++) to[i] = from[i];
    }
}

// 1 sign, 4 exponent (bias 7), 3 mantissa. Their bits in place of f32's are 2^120 times too small; 0x7F is NaN.
__device__ inline float e4m3(uint8_t code) {
    const float size = __uint_as_float((code & 0x7Fu) << 20) * __uint_as_float((127u + 120u) << 23);
    const float number = (code & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000u) : size;
    return code & 0x80 ? -number : number;
}

// A format defines the size of its table (0: none), whether `read_regular` may read eight aligned codes at once, and
// `read`, for up to eight codes at any position.

// One byte per element: `Value::of(code, scale)`, with the scale of the row.
template <class Value>
struct ByRow {
    static constexpr unsigned TABLE = 0;
    __device__ static bool is_regular(const Weight& w) {
        return reinterpret_cast<uintptr_t>(w.codes) % UNIT == 0 && w.columns % UNIT == 0;
    }
    __device__ static void read_regular(const Weight& w, const float*, unsigned first, float* out) {
        uint8_t codes[UNIT];
        load<uint2>(w.codes + first, codes);
        const float scale = Value::scale(w, first / w.columns);
        for (unsigned i = 0; i < UNIT; i++) out[i] = Value::of(codes[i], scale);
    }
    __device__ static void read(const Weight& w, const float*, unsigned first, unsigned count, float* out) {
        uint8_t codes[UNIT];
        if (count == UNIT) {
            load8(w.codes + first, codes);
        } else {
            for (unsigned i = 0; i < count; i++) codes[i] = w.codes[first + i];
        }
        unsigned row = first / w.columns, column = first % w.columns;
        float scale = Value::scale(w, row);
        for (unsigned i = 0; i < UNIT && i < count; i++, column++) {
            if (column == w.columns) {
                column = 0;
                scale = Value::scale(w, ++row);
            }
            out[i] = Value::of(codes[i], scale);
        }
    }
};

struct Int8Value {
    __device__ static float scale(const Weight& w, unsigned row) { return f32_at(w.scales, row); }
    // 1/127 as bitsandbytes writes it.
    __device__ static float of(uint8_t code, float absmax) {
        return static_cast<float>(static_cast<int8_t>(code)) * absmax * 7.874015718698502e-3f;
    }
};

struct Fp8Value {
    __device__ static float of(uint8_t code, float scale) { return e4m3(code) * scale; }
};
struct Fp8None : Fp8Value {
    __device__ static float scale(const Weight&, unsigned) { return 1.0f; }
};
struct Fp8Tensor : Fp8Value {
    __device__ static float scale(const Weight& w, unsigned) { return f32_at(w.scales, 0); }
};
struct Fp8Rows : Fp8Value {
    __device__ static float scale(const Weight& w, unsigned row) { return f32_at(w.scales, row); }
};

// The upper half of a binary16.
struct E5m2Value {
    __device__ static float of(uint8_t code, float scale) {
        return __half2float(__ushort_as_half(static_cast<unsigned short>(code << 8))) * scale;
    }
};
struct E5m2None : E5m2Value {
    __device__ static float scale(const Weight&, unsigned) { return 1.0f; }
};
struct E5m2Tensor : E5m2Value {
    __device__ static float scale(const Weight& w, unsigned) { return f32_at(w.scales, 0); }
};
struct E5m2Rows : E5m2Value {
    __device__ static float scale(const Weight& w, unsigned row) { return f32_at(w.scales, row); }
};

struct ScaledInt8Value {
    __device__ static float of(uint8_t code, float scale) {
        return static_cast<float>(static_cast<int8_t>(code)) * scale;
    }
};
struct Int8Tensor : ScaledInt8Value {
    __device__ static float scale(const Weight& w, unsigned) { return f32_at(w.scales, 0); }
};
struct Int8Rows : ScaledInt8Value {
    __device__ static float scale(const Weight& w, unsigned row) { return f32_at(w.scales, row); }
};

// Eight nibbles, the high one first, of a block of 64 with one absolute maximum. Each lane has its own copy of the
// table in shared memory, in its own bank.
template <class Absmax>
struct ByTable {
    static constexpr unsigned TABLE = 16;
    __device__ static bool is_regular(const Weight& w) {
        return reinterpret_cast<uintptr_t>(w.codes) % (UNIT / 2) == 0;
    }
    __device__ static void look_up(const float* table, const uint8_t* codes, float absmax, unsigned count, float* out) {
        for (unsigned i = 0; i < UNIT && i < count; i++) {
            const unsigned code = i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15;
            out[i] = table[code * LANES] * absmax;
        }
    }
    __device__ static void read_regular(const Weight& w, const float* table, unsigned first, float* out) {
        uint8_t codes[UNIT / 2];
        load<uint32_t>(w.codes + first / 2, codes);
        look_up(table, codes, Absmax::of(w, first / 64), UNIT, out);
    }
    __device__ static void read(const Weight& w, const float* table, unsigned first, unsigned count, float* out) {
        uint8_t codes[UNIT / 2];
        for (unsigned i = 0; i < (count + 1) / 2; i++) codes[i] = w.codes[first / 2 + i];
        look_up(table, codes, Absmax::of(w, first / 64), count, out);
    }
};

struct PlainAbsmax {
    __device__ static float of(const Weight& w, unsigned block) { return f32_at(w.scales, block); }
};
// The table of 16, then the nested one of 256, the offset, and the nested absolute maxima.
struct NestedAbsmax {
    __device__ static float of(const Weight& w, unsigned block) {
        const float value = f32_at(w.bytes, 16 + w.scales[block]);
        return value * f32_at(w.bytes, 16 + 256 + 1 + block / 256) + f32_at(w.bytes, 16 + 256);
    }
};

// Eight codes of four bits, by the widest load that their alignment allows.
__device__ inline void load_nibbles(const uint8_t* from, uint8_t* to) {
    if (reinterpret_cast<uintptr_t>(from) % 4 == 0) {
        load<uint32_t>(from, to);
    } else {
        for (int i = 0; i < 4; i++) to[i] = from[i];
    }
}

// A code of eight, the low nibble of a byte first.
__device__ inline unsigned low_first(const uint8_t* codes, unsigned i) { return codes[i / 2] >> (i % 2 * 4) & 15; }

// The place of a scale in the order of tensor cores: tiles of 128 rows by four blocks.
__device__ inline size_t swizzled(unsigned row, unsigned block, unsigned blocks) {
    const size_t tile = static_cast<size_t>(row / 128) * ((blocks + 3) / 4) + block / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

// 1 sign, 2 exponent (bias 1), 1 mantissa.
__device__ inline float e2m1(unsigned code) {
    const unsigned exponent = code >> 1 & 3, mantissa = code & 1;
    const float size = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                     : (1.0f + 0.5f * static_cast<float>(mantissa)) *
                                           static_cast<float>(1u << exponent) * 0.5f;
    return code & 8 ? -size : size;
}

// Formats of which rows are whole units of eight: `Units::read(w, table, first, out)` gives eight elements of a row.
template <class Units>
struct ByUnit {
    static constexpr unsigned TABLE = Units::TABLE;
    __device__ static bool is_regular(const Weight&) { return true; }
    __device__ static void read_regular(const Weight& w, const float* table, unsigned first, float* out) {
        Units::read(w, table, first, out);
    }
    __device__ static void read(const Weight& w, const float* table, unsigned first, unsigned, float* out) {
        Units::read(w, table, first, out);
    }
};

struct Int4 {
    static constexpr unsigned TABLE = 0;
    __device__ static void read(const Weight& w, const float*, unsigned first, float* out) {
        uint8_t codes[UNIT / 2];
        load_nibbles(w.codes + first / 2, codes);
        const float scale = f32_at(w.scales, first / w.columns);
        for (unsigned i = 0; i < UNIT; i++) {
            const int code = static_cast<int8_t>(low_first(codes, i) << 4) >> 4;
            out[i] = static_cast<float>(code) * scale;
        }
    }
};

// A scale for each row, then one for each group of columns, in e4m3 or f32 (WIDE); the result is on the grid of int8. Codes of
// four bits index a table of 16, which comes first; SIX bits are a number, whose upper two bits are at the end of a row.
template <bool SIX, bool WIDE>
struct W4A8 {
    static constexpr unsigned TABLE = SIX ? 0 : 16;
    __device__ static void read(const Weight& w, const float* table, unsigned first, float* out) {
        constexpr unsigned WIDTH = WIDE ? 4 : 1;
        const unsigned rows = w.numbers / w.columns, row = first / w.columns, column = first % w.columns;
        const uint8_t* line = w.codes + static_cast<size_t>(row) * (w.columns / 4 * (SIX ? 3 : 2));
        uint8_t codes[UNIT / 2];
        load_nibbles(line + column / 2, codes);
        const uint8_t* groups = w.scales + 4 * static_cast<size_t>(rows);
        const unsigned group = w.numbers / (static_cast<unsigned>(w.codes - groups) / WIDTH);
        const float in_group = WIDE ? f32_at(groups, first / group) : e4m3(groups[first / group]);
        const float in_row = f32_at(w.scales, row);
        const uint8_t* upper = line + w.columns / 2 + column / 4;
        for (unsigned i = 0; i < UNIT; i++) {
            float value;
            if constexpr (SIX) {
                const int code = low_first(codes, i) | (upper[i / 4] >> (i % 4 * 2) & 3) << 4;
                value = static_cast<float>(code - 32);
            } else {
                value = table[low_first(codes, i) * LANES];
            }
            const float scaled = value * in_group;
            const float on_grid = isnan(scaled) ? scaled : fminf(fmaxf(rintf(scaled), -127.0f), 127.0f);
            out[i] = on_grid * in_row;
        }
    }
};

using W4A8Plain = W4A8<false, false>;
using W4A8Wide = W4A8<false, true>;
using W6A8Plain = W4A8<true, false>;
using W6A8Wide = W4A8<true, true>;

// A scale for each block of 128 rows and columns; the last blocks are cut, and eight codes may reach over a block's end.
struct BlockFp8 {
    static constexpr unsigned TABLE = 0;
    __device__ static bool is_regular(const Weight&) { return false; }
    __device__ static void read_regular(const Weight&, const float*, unsigned, float*) {}
    __device__ static void read(const Weight& w, const float*, unsigned first, unsigned count, float* out) {
        const unsigned across = (w.columns + 127) / 128;
        for (unsigned i = 0; i < UNIT && i < count; i++) {
            const unsigned row = (first + i) / w.columns, column = (first + i) % w.columns;
            out[i] = e4m3(w.codes[first + i]) * f32_at(w.scales, row / 128 * across + column / 128);
        }
    }
};

// The scale of the tensor and padding, factors of columns if there are any, a scale in e4m3 for each 16 columns, then codes.
template <bool SWIZZLED, bool HIGH_FIRST, bool FACTORS>
struct Nvfp4 {
    static constexpr unsigned TABLE = 0;
    __device__ static void read(const Weight& w, const float*, unsigned first, float* out) {
        uint8_t codes[UNIT / 2];
        load_nibbles(w.codes + first / 2, codes);
        const unsigned row = first / w.columns, column = first % w.columns, block = column / 16, blocks = w.columns / 16;
        const size_t place = SWIZZLED ? swizzled(row, block, blocks) : static_cast<size_t>(row) * blocks + block;
        const uint8_t* scales = w.bytes + 16 + (FACTORS ? 4 * static_cast<size_t>(w.columns) : 0);
        const float scale = e4m3(scales[place]) * f32_at(w.bytes, 0);
        for (unsigned i = 0; i < UNIT; i++) {
            out[i] = e2m1(low_first(codes, HIGH_FIRST ? i ^ 1 : i)) * scale;
            if constexpr (FACTORS) out[i] *= f32_at(w.bytes, 4 + column + i);
        }
    }
};

using Nvfp4Tiles = Nvfp4<true, true, false>;
using Nvfp4TilesColumns = Nvfp4<true, true, true>;
using Nvfp4Rows = Nvfp4<false, false, false>;
using Nvfp4RowsColumns = Nvfp4<false, false, true>;
using Nvfp4Low = Nvfp4<true, false, false>;
using Nvfp4LowColumns = Nvfp4<true, false, true>;

// A power of two for each 32 columns, then codes.
template <bool SWIZZLED>
struct Mxfp8 {
    static constexpr unsigned TABLE = 0;
    __device__ static void read(const Weight& w, const float*, unsigned first, float* out) {
        uint8_t codes[UNIT];
        load8(w.codes + first, codes);
        const unsigned row = first / w.columns, block = first % w.columns / 32, blocks = w.columns / 32;
        const size_t place = SWIZZLED ? swizzled(row, block, blocks) : static_cast<size_t>(row) * blocks + block;
        const unsigned exponent = w.bytes[place];
        const float scale = __uint_as_float(exponent << 23);
        for (unsigned i = 0; i < UNIT; i++) out[i] = e4m3(codes[i]) * scale;
    }
};

using Mxfp8Tiles = Mxfp8<true>;
using Mxfp8Rows = Mxfp8<false>;

// Sum of four numbers less twice the one opposite: a row of the Hadamard matrix of four. Lanes `apart` and `2 apart` apart hold
// the others.
__device__ inline float turned(float x, unsigned apart, unsigned lanes) {
    const float pair = x + __shfl_xor_sync(lanes, x, apart);
    const float sum = pair + __shfl_xor_sync(lanes, pair, 2 * apart);
    return sum - 2.0f * __shfl_xor_sync(lanes, x, 3 * apart);
}

// Multiplies groups of numbers by a Hadamard matrix over its square root, which is its own inverse. A group is in GROUP / 8
// neighbouring lanes, which call this together. The order is that of `Rotation::turn`.
template <unsigned GROUP>
__device__ inline void rotate_groups(float* out) {
    constexpr unsigned COUNT = GROUP / UNIT;
    const unsigned lane = threadIdx.x % LANES;
    const unsigned lanes = COUNT == LANES ? 0xFFFFFFFFu : ((1u << COUNT % LANES) - 1) << (lane / COUNT * COUNT);
    for (unsigned i = 0; i < UNIT; i += 4) {
        const float a = out[i], b = out[i + 1], c = out[i + 2], d = out[i + 3];
        const float sum = (a + b) + (c + d);
        out[i] = sum - 2.0f * d;
        out[i + 1] = sum - 2.0f * c;
        out[i + 2] = sum - 2.0f * b;
        out[i + 3] = sum - 2.0f * a;
    }
    // The second factor: half of it is in the next lane.
    for (unsigned i = 0; i < 4; i++) {
        const float a = out[i], b = out[i + 4], pair = a + b;
        const float sum = pair + __shfl_xor_sync(lanes, pair, 1);
        const float opposite = __shfl_xor_sync(lanes, b, 1);
        out[i + 4] = sum - 2.0f * __shfl_xor_sync(lanes, a, 1);
        out[i] = sum - 2.0f * opposite;
    }
    if constexpr (GROUP >= 64) {
        for (unsigned i = 0; i < UNIT; i++) out[i] = turned(out[i], 2, lanes);
    }
    if constexpr (GROUP >= 256) {
        for (unsigned i = 0; i < UNIT; i++) out[i] = turned(out[i], 8, lanes);
    }
    constexpr float FACTOR = GROUP == 16 ? 0.25f : GROUP == 64 ? 0.125f : 0.0625f;
    for (unsigned i = 0; i < UNIT; i++) out[i] *= FACTOR;
}

// Groups of columns that were rotated before they were quantized are rotated back. Numbers are whole groups.
template <class Format, unsigned GROUP>
struct Rotated {
    static constexpr unsigned TABLE = Format::TABLE;
    __device__ static bool is_regular(const Weight&) { return true; }
    __device__ static void read_regular(const Weight& w, const float* table, unsigned first, float* out) {
        Format::read(w, table, first, UNIT, out);
        rotate_groups<GROUP>(out);
    }
    __device__ static void read(const Weight& w, const float* table, unsigned first, unsigned, float* out) {
        read_regular(w, table, first, out);
    }
};

template <class Format>
using RotatedBy16 = Rotated<Format, 16>;
template <class Format>
using RotatedBy64 = Rotated<Format, 64>;
template <class Format>
using RotatedBy256 = Rotated<Format, 256>;

// Blocks of llama.cpp: `Block::read(block, j, out)` gives elements j to j + 8 of a block.
template <class Block>
struct ByBlock {
    static constexpr unsigned TABLE = 0;
    __device__ static bool is_regular(const Weight&) { return true; }
    __device__ static void read_regular(const Weight& w, const float*, unsigned first, float* out) {
        const size_t block = first / Block::NUMBERS;
        Block::read(w.codes + block * Block::BYTES, first % Block::NUMBERS, out);
    }
    // A block has a multiple of eight numbers.
    __device__ static void read(const Weight& w, const float* table, unsigned first, unsigned, float* out) {
        read_regular(w, table, first, out);
    }
};

struct Q4_0 {
    static constexpr unsigned NUMBERS = 32, BYTES = 18;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 2 + j % 16, codes);
        const float d = f16_at(b);
        for (unsigned i = 0; i < UNIT; i++) out[i] = d * static_cast<float>((codes[i] >> (j / 16 * 4) & 15) - 8);
    }
};

struct Q4_1 {
    static constexpr unsigned NUMBERS = 32, BYTES = 20;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 4 + j % 16, codes);
        const float d = f16_at(b), least = f16_at(b + 2);
        for (unsigned i = 0; i < UNIT; i++) out[i] = d * static_cast<float>(codes[i] >> (j / 16 * 4) & 15) + least;
    }
};

// 5-bit codes: the fifth bits of eight codes are one byte.
__device__ inline void five_bits(const uint8_t* b, unsigned j, int* out) {
    uint8_t codes[UNIT];
    load8(b + 4 + j % 16, codes);
    const unsigned fifth = b[j / 8];
    for (unsigned i = 0; i < UNIT; i++) out[i] = (codes[i] >> (j / 16 * 4) & 15) | (fifth >> i & 1) << 4;
}

struct Q5_0 {
    static constexpr unsigned NUMBERS = 32, BYTES = 22;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        int codes[UNIT];
        five_bits(b + 2, j, codes);
        const float d = f16_at(b);
        for (unsigned i = 0; i < UNIT; i++) out[i] = d * static_cast<float>(codes[i] - 16);
    }
};

struct Q5_1 {
    static constexpr unsigned NUMBERS = 32, BYTES = 24;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        int codes[UNIT];
        five_bits(b + 4, j, codes);
        const float d = f16_at(b), least = f16_at(b + 2);
        for (unsigned i = 0; i < UNIT; i++) out[i] = d * static_cast<float>(codes[i]) + least;
    }
};

struct Q8_0 {
    static constexpr unsigned NUMBERS = 32, BYTES = 34;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 2 + j, codes);
        const float d = f16_at(b);
        for (unsigned i = 0; i < UNIT; i++) out[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * d;
    }
};

struct Q2_K {
    static constexpr unsigned NUMBERS = 256, BYTES = 84;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 16 + j / 128 * 32 + j % 32, codes);
        const unsigned shift = j % 128 / 32 * 2, both = b[j / 16];
        const float scale = f16_at(b + 80) * static_cast<float>(both & 15);
        const float least = f16_at(b + 82) * static_cast<float>(both >> 4);
        for (unsigned i = 0; i < UNIT; i++) out[i] = scale * static_cast<float>(codes[i] >> shift & 3) - least;
    }
};

struct Q3_K {
    static constexpr unsigned NUMBERS = 256, BYTES = 110;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT], masks[UNIT];
        load8(b + 32 + j / 128 * 32 + j % 32, codes);
        load8(b + j % 32, masks);
        const unsigned group = j / 16, shift = j % 128 / 32 * 2;
        const int low = b[96 + group % 8] >> (group / 8 * 4) & 15;
        const int high = b[104 + group % 4] >> (group / 4 * 2) & 3;
        const float scale = f16_at(b + 108) * static_cast<float>((low | high << 4) - 32);
        for (unsigned i = 0; i < UNIT; i++) {
            const int missing = masks[i] >> (j / 32) & 1 ? 0 : 4;
            out[i] = scale * static_cast<float>((codes[i] >> shift & 3) - missing);
        }
    }
};

// Scale and minimum of 32 elements, 6 bits each.
__device__ inline void scale_and_least(const uint8_t* b, unsigned group, float* scale, float* least) {
    const float d = f16_at(b), d_least = f16_at(b + 2);
    const uint8_t* s = b + 4 + group;
    const int scale_code = group < 4 ? s[0] & 63 : (s[4] & 15) | (s[-4] >> 2 & 0x30);
    const int least_code = group < 4 ? s[4] & 63 : s[4] >> 4 | (s[0] >> 2 & 0x30);
    *scale = d * static_cast<float>(scale_code);
    *least = d_least * static_cast<float>(least_code);
}

struct Q4_K {
    static constexpr unsigned NUMBERS = 256, BYTES = 144;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 16 + j / 64 * 32 + j % 32, codes);
        float scale, least;
        scale_and_least(b, j / 32, &scale, &least);
        const unsigned shift = j % 64 / 32 * 4;
        for (unsigned i = 0; i < UNIT; i++) out[i] = scale * static_cast<float>(codes[i] >> shift & 15) - least;
    }
};

struct Q5_K {
    static constexpr unsigned NUMBERS = 256, BYTES = 176;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT], fifths[UNIT];
        load8(b + 48 + j / 64 * 32 + j % 32, codes);
        load8(b + 16 + j % 32, fifths);
        float scale, least;
        scale_and_least(b, j / 32, &scale, &least);
        const unsigned shift = j % 64 / 32 * 4;
        for (unsigned i = 0; i < UNIT; i++) {
            const int code = (codes[i] >> shift & 15) | (fifths[i] >> (j / 32) & 1) << 4;
            out[i] = scale * static_cast<float>(code) - least;
        }
    }
};

struct Q6_K {
    static constexpr unsigned NUMBERS = 256, BYTES = 210;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t lows[UNIT], highs[UNIT];
        load8(b + j / 128 * 64 + j % 64, lows);
        load8(b + 128 + j / 128 * 32 + j % 32, highs);
        const unsigned low_shift = j % 128 / 64 * 4, high_shift = j % 128 / 32 * 2;
        const float scale = f16_at(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + j / 16]));
        for (unsigned i = 0; i < UNIT; i++) {
            const int code = (lows[i] >> low_shift & 15) | (highs[i] >> high_shift & 3) << 4;
            out[i] = scale * static_cast<float>(code - 32);
        }
    }
};

// The values of four bits of IQ4_NL and IQ4_XS.
__device__ const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct IQ4_NL {
    static constexpr unsigned NUMBERS = 32, BYTES = 18;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 2 + j % 16, codes);
        const float d = f16_at(b);
        for (unsigned i = 0; i < UNIT; i++) out[i] = d * static_cast<float>(IQ4[codes[i] >> (j / 16 * 4) & 15]);
    }
};

struct IQ4_XS {
    static constexpr unsigned NUMBERS = 256, BYTES = 136;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        const unsigned group = j / 32;
        load8(b + 8 + group * 16 + j % 16, codes);
        const unsigned upper = b[2] | b[3] << 8;
        const int low = b[4 + group / 2] >> (group % 2 * 4) & 15, high = upper >> (2 * group) & 3;
        const float scale = f16_at(b) * static_cast<float>((low | high << 4) - 32);
        for (unsigned i = 0; i < UNIT; i++) out[i] = scale * static_cast<float>(IQ4[codes[i] >> (j % 32 / 16 * 4) & 15]);
    }
};

// An exponent of a power of two, then codes: half of the power, by twice the value.
struct Mxfp4 {
    static constexpr unsigned NUMBERS = 32, BYTES = 17;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 1 + j % 16, codes);
        const unsigned exponent = b[0];
        const float d = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
        for (unsigned i = 0; i < UNIT; i++) out[i] = d * (2.0f * e2m1(codes[i] >> (j / 16 * 4) & 15));
    }
};

// Four scales in e4m3 without a sign, then eight bytes of codes for each: low nibbles, then high ones.
struct Nvfp4Blocks {
    static constexpr unsigned NUMBERS = 64, BYTES = 36;
    __device__ static void read(const uint8_t* b, unsigned j, float* out) {
        uint8_t codes[UNIT];
        load8(b + 4 + j / 16 * 8, codes);
        const unsigned code = b[j / 16] & 0x7F;
        const float scale = code == 0x7F ? 0.0f : e4m3(code);
        for (unsigned i = 0; i < UNIT; i++) out[i] = scale * e2m1(codes[i] >> (j % 16 / 8 * 4) & 15);
    }
};

__device__ inline void round_to(float number, float* out) { *out = number; }
__device__ inline void round_to(float number, __half* out) { *out = __float2half_rn(number); }
__device__ inline void round_to(float number, __nv_bfloat16* out) { *out = __float2bfloat16_rn(number); }

// Eight consecutive elements, aligned to their size, stored by sixteen bytes at a time.
template <class T>
__device__ inline void store8(const float* numbers, T* out) {
    constexpr unsigned IN_STORE = 16 / sizeof(T);
    T rounded[UNIT];
    for (unsigned i = 0; i < UNIT; i++) round_to(numbers[i], &rounded[i]);
    for (unsigned i = 0; i < UNIT; i += IN_STORE) store<uint4>(rounded + i, out + i);
}

template <class Format, class T>
__device__ inline void dequantize(const Weight& w, T* out) {
    __shared__ float tables[Format::TABLE * LANES + 1];
    if constexpr (Format::TABLE > 0) {
        for (unsigned i = threadIdx.x; i < Format::TABLE * LANES; i += DEQUANTIZE_THREADS) {
            tables[i] = f32_at(w.bytes, i / LANES);
        }
        __syncthreads();
    }
    const float* table = tables + threadIdx.x % LANES;
    const size_t block = static_cast<size_t>(blockIdx.x) * DEQUANTIZE_THREADS * UNITS * UNIT;
    const size_t begin = block + threadIdx.x * UNIT;
    float numbers[UNITS][UNIT];
    if (block + DEQUANTIZE_THREADS * UNITS * UNIT <= w.numbers && Format::is_regular(w)) {
#pragma unroll
        for (unsigned unit = 0; unit < UNITS; unit++) {
            const size_t first = begin + unit * DEQUANTIZE_THREADS * UNIT;
            Format::read_regular(w, table, static_cast<unsigned>(first), numbers[unit]);
        }
#pragma unroll
        for (unsigned unit = 0; unit < UNITS; unit++) {
            store8(numbers[unit], out + begin + unit * DEQUANTIZE_THREADS * UNIT);
        }
        return;
    }
    for (unsigned unit = 0; unit < UNITS; unit++) {
        const size_t wide = begin + unit * DEQUANTIZE_THREADS * UNIT;
        if (wide >= w.numbers) return;
        const unsigned first = static_cast<unsigned>(wide);
        const unsigned count = min(UNIT, w.numbers - first);
        Format::read(w, table, first, count, numbers[0]);
        if (count == UNIT) {
            store8(numbers[0], out + first);
        } else {
            for (unsigned i = 0; i < count; i++) round_to(numbers[0][i], &out[first + i]);
        }
    }
}

}  // namespace moored
