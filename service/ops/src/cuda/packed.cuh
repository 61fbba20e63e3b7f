// Dequantizes codes in groups of columns with scales and zeros, and codes in the order of other programs' kernels. Places and the order of operations are those of `dequantize/packed.rs`.
#pragma once
#include "dequantize.cuh"

namespace moored {

// Types of scales and zeros.
struct F16 {
    static constexpr unsigned WIDTH = 2;
    __device__ static float at(const uint8_t* bytes, size_t index) { return f16_at(bytes + 2 * index); }
};
struct Bf16 {
    static constexpr unsigned WIDTH = 2;
    __device__ static float at(const uint8_t* bytes, size_t index) {
        const unsigned bits = *reinterpret_cast<const uint16_t*>(bytes + 2 * index);
        return __uint_as_float(bits << 16);
    }
};
struct F32 {
    static constexpr unsigned WIDTH = 4;
    __device__ static float at(const uint8_t* bytes, size_t index) {
        return reinterpret_cast<const float*>(bytes)[index];
    }
};

// A nibble of many, the low one of a byte first.
__device__ inline unsigned nibble_at(const uint8_t* codes, size_t index) {
    return codes[index / 2] >> (index % 2 * 4) & 15;
}

// A nibble in two's complement.
__device__ inline float signed_nibble(unsigned code) {
    return static_cast<float>(static_cast<int8_t>(code << 4) >> 4);
}

// A scale and a zero for each group of columns; an order says how many halves of a byte a zero has, and what codes are.
template <class Order, class Number>
struct Int4Groups {
    static constexpr unsigned TABLE = 0;
    __device__ static void read(const Weight& w, const float*, unsigned first, float* out) {
        const unsigned rows = w.numbers / w.columns, column = first % w.columns;
        const unsigned row = Order::stored_row(first / w.columns, rows);
        constexpr unsigned ZERO_HALVES = Order::ZERO_IS_CODE ? 1 : 2 * Number::WIDTH;
        const size_t halves = 2 * static_cast<size_t>(w.codes - w.scales);
        const unsigned groups = static_cast<unsigned>(halves / (2 * Number::WIDTH + ZERO_HALVES));
        const unsigned group = w.numbers / groups;
        const uint8_t* zeros = w.scales + static_cast<size_t>(groups) * Number::WIDTH;
        const unsigned of_group = column / group * rows;
        const float scale = Number::at(w.scales, of_group + row);
        float zero;
        if constexpr (Order::ZERO_IS_CODE) {
            zero = static_cast<float>(nibble_at(zeros, of_group + Order::nibble(row)));
        } else {
            zero = Number::at(zeros, of_group + row);
        }
        Order::read(w, row, column, rows, scale, zero, out);
    }
};

template <class Order>
using HalfGroups = Int4Groups<Order, F16>;
template <class Order>
using Bf16Groups = Int4Groups<Order, Bf16>;

struct InRows {
    static constexpr bool ZERO_IS_CODE = false;
    __device__ static unsigned stored_row(unsigned row, unsigned) { return row; }
};

struct LessEight : InRows {
    __device__ static void read(const Weight& w, unsigned row, unsigned column, unsigned, float scale, float zero,
                                float* out) {
        uint8_t codes[UNIT / 2];
        load_nibbles(w.codes + (static_cast<size_t>(row) * w.columns + column) / 2, codes);
        for (unsigned i = 0; i < UNIT; i++) {
            out[i] = static_cast<float>(static_cast<int>(low_first(codes, i)) - 8) * scale + zero;
        }
    }
};

struct Signed : InRows {
    __device__ static void read(const Weight& w, unsigned row, unsigned column, unsigned, float scale, float zero,
                                float* out) {
        uint8_t codes[UNIT / 2];
        load_nibbles(w.codes + (static_cast<size_t>(row) * w.columns + column) / 2, codes);
        for (unsigned i = 0; i < UNIT; i++) out[i] = signed_nibble(low_first(codes, i)) * scale + zero;
    }
};

// A line of words for each column; a word holds eight rows in the order 0 2 4 6 1 3 5 7.
struct AutoAwq : InRows {
    static constexpr bool ZERO_IS_CODE = true;
    __device__ static unsigned nibble(unsigned row) { return row / 8 * 8 + row % 8 / 2 + row % 2 * 4; }
    __device__ static void read(const Weight& w, unsigned row, unsigned column, unsigned rows, float scale, float zero,
                                float* out) {
        for (unsigned i = 0; i < UNIT; i++) {
            const unsigned code = nibble_at(w.codes, static_cast<size_t>(column + i) * rows + nibble(row));
            out[i] = (static_cast<float>(code) - zero) * scale;
        }
    }
};

// Four rows are interleaved in lines of 64 columns; a word of 16 bits holds four columns that are eight apart. PARTS of a
// row's number are interleaved.
template <unsigned PARTS>
struct TinyChat {
    static constexpr bool ZERO_IS_CODE = false;
    __device__ static unsigned stored_row(unsigned row, unsigned rows) {
        return row % (rows / PARTS) * PARTS + row / (rows / PARTS);
    }
    __device__ static void read(const Weight& w, unsigned row, unsigned column, unsigned, float scale, float zero,
                                float* out) {
        const size_t line = static_cast<size_t>(row / 4) * w.columns + column / 64 * 64;
        const size_t word = line + row % 4 * 16 + column % 64 / 32 * 8;
        uint16_t words[UNIT];
        load<uint4>(w.codes + 2 * word, words);
        for (unsigned i = 0; i < UNIT; i++) {
            out[i] = static_cast<float>(words[i] >> (column % 32 / 8 * 4) & 15) * scale + zero;
        }
    }
};

// Signed bytes with a scale and a zero, a signed byte, for each group of columns.
template <class Number>
struct Int8Groups {
    static constexpr unsigned TABLE = 0;
    __device__ static void read(const Weight& w, const float*, unsigned first, float* out) {
        uint8_t codes[UNIT];
        load8(w.codes + first, codes);
        const size_t groups = static_cast<size_t>(w.codes - w.scales) / (Number::WIDTH + 1);
        const uint8_t* zeros = w.scales + groups * Number::WIDTH;
        const unsigned group = first / static_cast<unsigned>(w.numbers / groups);
        const float scale = Number::at(w.scales, group);
        const float zero = static_cast<float>(static_cast<int8_t>(zeros[group]));
        for (unsigned i = 0; i < UNIT; i++) {
            out[i] = (static_cast<float>(static_cast<int8_t>(codes[i])) - zero) * scale;
        }
    }
};

}  // namespace moored
