// Weights of SVDQuant: codes of four bits in the order of tensor cores, by their scales and by factors of columns, and the
// product of two factors in bf16, which is computed with tensor cores. Sums of that product are in f32 in no defined order;
// everything else is as in `dequantize/packed.rs`.
#pragma once
#include "fp8.cuh"
#include "packed.cuh"

namespace moored {

// A row of a tile of 128 rows by 64 columns: 16 of `sixteen`, 8 of `eight`, and `row`.
struct TileRow {
    unsigned sixteen, eight, row;
    __device__ explicit TileRow(unsigned of_tile) : sixteen(of_tile / 16), eight(of_tile / 8 % 2), row(of_tile % 8) {}
    __device__ TileRow(unsigned sixteen, unsigned eight, unsigned row) : sixteen(sixteen), eight(eight), row(row) {}
};

// Four words of a tile: those of two rows that are eight apart, each of the eights of columns `eight` and `eight + 4`.
__device__ inline void load_words(const Weight& w, size_t tile, const TileRow& of, unsigned eight, uint32_t words[2][2]) {
    load<uint4>(w.codes + tile * 4096 + (of.sixteen * 32 + of.row * 4 + eight) * 16, words);
}

// Codes by their scales; scales are followed by the low-rank product's factors.
struct SvdquantInt4 {
    __device__ static const uint8_t* low_rank(const Weight& w) { return w.scales + 2 * static_cast<size_t>(w.numbers / 64); }
    // That of a row of a tile, for all of its columns.
    __device__ static float scale(const Weight& w, size_t tile, unsigned, const TileRow& of, unsigned) {
        return Bf16::at(w.scales, tile * 128 + of.sixteen * 16 + of.row / 2 * 4 + of.eight * 2 + of.row % 2);
    }
    // 2^23 + 8 + code is exact in f32: less 2^23 + 8 it is the code.
    __device__ static float number(uint32_t word, unsigned i) {
        return __uint_as_float(0x4B000000u | ((word >> (4 * i) & 15) ^ 8)) - 8388616.0f;
    }
};

struct SvdquantFp4 {
    __device__ static const uint8_t* blocks(const Weight& w) {
        return w.scales + 4 * static_cast<size_t>(w.numbers / w.columns);
    }
    __device__ static const uint8_t* low_rank(const Weight& w) { return blocks(w) + w.numbers / 16; }
    // That of a row of the weight, by that of a row of a tile and sixteen of its columns.
    __device__ static float scale(const Weight& w, size_t tile, unsigned row, const TileRow& of, unsigned sixteen) {
        const unsigned place = of.row * 64 + (of.sixteen * 2 + of.eight) % 4 * 16 + of.sixteen / 2 * 4 + sixteen;
        return e4m3(blocks(w)[tile * 512 + place]) * f32_at(w.scales, row);
    }
    __device__ static float number(uint32_t word, unsigned i) { return e2m1(word >> (4 * i) & 15); }
};

// A block computes TILE_ROWS rows by TILE_COLUMNS columns of a weight, and each of its warps 64 of the columns.
constexpr unsigned TILE_ROWS = 128, TILE_COLUMNS = 128;
constexpr unsigned TILE_THREADS = TILE_COLUMNS / 64 * LANES;

// Ranks of the second factor that a block keeps in shared memory. A weight of more ranks reads them anew for every 16 rows.
constexpr unsigned KEPT_RANKS = 128;

// A matrix of 8 by 8 numbers of 16 bits, whose rows are held by four lanes each, transposed.
__device__ inline uint32_t transposed(uint32_t pair) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Adds the product of 16 by 16 and 16 by 8 numbers in bf16, in the fragments of `mma.m16n8k16`. Cards before 8.0 have no such
// instruction: their lanes get the numbers from each other.
__device__ inline void multiply_add(float sums[4], uint4 a, uint2 b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
#else
    const unsigned lane = threadIdx.x % LANES, quad = lane / 4 * 4;
    const auto product = [](uint32_t x, uint32_t y) {
        const float low = __uint_as_float(x << 16) * __uint_as_float(y << 16);
        return low + __uint_as_float(x & 0xFFFF0000u) * __uint_as_float(y & 0xFFFF0000u);
    };
    for (unsigned i = 0; i < 4; i++) {
        const uint32_t rows_low[] = {__shfl_sync(~0u, a.x, quad + i), __shfl_sync(~0u, a.y, quad + i)};
        const uint32_t rows_high[] = {__shfl_sync(~0u, a.z, quad + i), __shfl_sync(~0u, a.w, quad + i)};
        for (unsigned column = 0; column < 2; column++) {
            const unsigned from = (lane % 4 * 2 + column) * 4 + i;
            const uint32_t low = __shfl_sync(~0u, b.x, from), high = __shfl_sync(~0u, b.y, from);
            for (unsigned half = 0; half < 2; half++) {
                sums[half * 2 + column] += product(rows_low[half], low) + product(rows_high[half], high);
            }
        }
    }
#endif
}

// Calls `then(row, column, numbers)` for the units of a row at `column` and `column + 32`: a lane has those of two rows in each step,
// and four lanes the 64 columns of a row. All threads of a block call this together.
//
// Factors are stored in fragments of 16 by 16 numbers, whose lane (i % 8, j % 8 / 2) has the pairs at (i / 8, j / 8). Those of
// `up` are operands of the product as they are, but for the order of two pairs. Those of `down` are transposed. Columns 8t + 2k
// and 8t + 2k + 1 of 32, for t from 0 to 3, are the columns of product k, so that lane t gets the eight columns from 8t on.
template <class Codes, class Then>
__device__ inline void each_unit(const Weight& w, Then then) {
    extern __shared__ uint2 shared[];  // two bytes for each rank that is kept and each column
    const unsigned warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, group = lane / 4, t = lane % 4;
    const unsigned rows = w.numbers / w.columns;
    const unsigned column = blockIdx.x * TILE_COLUMNS + warp * 64;
    if (column >= w.columns) return;
    const size_t tile = static_cast<size_t>(blockIdx.y) * (w.columns / 64) + column / 64;
    float of_columns[2][UNIT];
    for (unsigned half = 0; half < 2; half++) {
        const uint8_t* at = w.bytes + 4 * (column + half * 32 + t * UNIT);
        load<uint4>(at, of_columns[half]);
        load<uint4>(at + 16, of_columns[half] + 4);
    }
    const uint8_t* down = Codes::low_rank(w);
    const unsigned ranks = static_cast<unsigned>((w.codes - down) / (2 * (static_cast<size_t>(rows) + w.columns)));
    const uint8_t* up = down + 2 * static_cast<size_t>(ranks) * w.columns;
    const size_t of_fragments = static_cast<size_t>(ranks / 16) * 512;
    uint2* kept = shared + warp * (min(ranks, KEPT_RANKS) / 16 * 8 * LANES) + lane;
    unsigned first_kept = ~0u;
    for (unsigned sixteen = 0; sixteen < TILE_ROWS / 16; sixteen++) {
        float sums[8][4] = {};
        for (unsigned first = 0; first < ranks; first += KEPT_RANKS) {
            const unsigned end = min(ranks, first + KEPT_RANKS);
            if (first != first_kept) {
                __syncwarp();
                for (unsigned rank = first; rank < end; rank += 16) {
                    for (unsigned k = 0; k < 8; k++) {
                        const uint8_t* pair = down + (column / 16 + k / 4 * 2 + t / 2) * of_fragments + rank * 32 +
                                              (group * 4 + k % 4) * 16 + t % 2 * 4;
                        const uint32_t low = *reinterpret_cast<const uint32_t*>(pair);
                        const uint32_t high = *reinterpret_cast<const uint32_t*>(pair + 8);
                        kept[((rank - first) / 16 * 8 + k) * LANES] = make_uint2(transposed(low), transposed(high));
                    }
                }
                __syncwarp();
                first_kept = first;
            }
            for (unsigned rank = first; rank < end; rank += 16) {
                const size_t fragment = (blockIdx.y * (TILE_ROWS / 16) + sixteen) * of_fragments + rank * 32;
                const uint4 pairs = *reinterpret_cast<const uint4*>(up + fragment + lane * 16);
                const uint4 of_rows = make_uint4(pairs.x, pairs.z, pairs.y, pairs.w);
#pragma unroll
                for (unsigned k = 0; k < 8; k++) {
                    multiply_add(sums[k], of_rows, kept[((rank - first) / 16 * 8 + k) * LANES]);
                }
            }
        }
        uint32_t words[2][2];
        load_words(w, tile, TileRow(sixteen, 0, group), t, words);
#pragma unroll
        for (unsigned eight = 0; eight < 2; eight++) {
            const TileRow of(sixteen, eight, group);
            const unsigned row = blockIdx.y * TILE_ROWS + sixteen * 16 + eight * 8 + group;
            float numbers[2][UNIT];
#pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                const float scale = Codes::scale(w, tile, row, of, half * 2 + t / 2);
#pragma unroll
                for (unsigned i = 0; i < UNIT; i++) {
                    const float code = Codes::number(words[eight][half], i) * scale * of_columns[half][i];
                    numbers[half][i] = code + sums[half * 4 + i / 2][eight * 2 + i % 2];
                }
            }
            then(row, column + t * UNIT, numbers);
        }
    }
}

template <class Codes, class T>
__device__ inline void dequantize_svdquant(const Weight& w, T* out) {
    each_unit<Codes>(w, [&](unsigned row, unsigned column, const float numbers[2][UNIT]) {
        T* at = out + static_cast<size_t>(row) * w.columns + column;
        store8(numbers[0], at);
        store8(numbers[1], at + 32);
    });
}

// The scales of rows in e4m3, to memory that is zero, unless they are made already. Sizes are ordered as their bits are.
template <class Codes>
__device__ inline void scale_svdquant(const RequantizeArguments& a) {
    __shared__ unsigned most[TILE_ROWS];
    if (a.made && *a.made) return;
    const Weight w = {a.bytes, a.bytes + a.scales_at, a.bytes + a.codes_at, a.rows * a.columns, a.columns};
    for (unsigned i = threadIdx.x; i < TILE_ROWS; i += blockDim.x) most[i] = 0;
    __syncthreads();
    each_unit<Codes>(w, [&](unsigned row, unsigned, const float numbers[2][UNIT]) {
        float absmax = 0;
        for (unsigned i = 0; i < UNIT; i++) absmax = fmaxf(absmax, fmaxf(fabsf(numbers[0][i]), fabsf(numbers[1][i])));
        absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, 1));
        absmax = fmaxf(absmax, __shfl_xor_sync(~0u, absmax, 2));
        if (threadIdx.x % 4 == 0) atomicMax(&most[row % TILE_ROWS], __float_as_uint(absmax / E4m3Codes::MOST));
    });
    __syncthreads();
    unsigned* scales = reinterpret_cast<unsigned*>(a.scales) + blockIdx.y * TILE_ROWS;
    for (unsigned i = threadIdx.x; i < TILE_ROWS; i += blockDim.x) atomicMax(&scales[i], most[i]);
}

// The codes of rows whose scales are made.
template <class Codes>
__device__ inline void requantize_svdquant(const RequantizeArguments& a) {
    // Only the kernel that makes scales reads it, which has ended.
    if (a.made && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *a.made = 1;
    const Weight w = {a.bytes, a.bytes + a.scales_at, a.bytes + a.codes_at, a.rows * a.columns, a.columns};
    each_unit<Codes>(w, [&](unsigned row, unsigned column, const float numbers[2][UNIT]) {
        const float factor = factor_of(a.scales[row]);
        uint8_t* at = a.codes + static_cast<size_t>(row) * w.columns + column;
        E4m3Codes::write(numbers[0], factor, at);
        E4m3Codes::write(numbers[1], factor, at + 32);
    });
}

}  // namespace moored
