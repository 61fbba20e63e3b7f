// Elementwise operations on strided views. A thread processes eight elements of a row.
#pragma once
#include <cmath>

#include "numbers.cuh"

namespace moored {

// A tensor as matrices of rows (`place.rs`). Strides are in elements.
struct Place {
    unsigned long long start;
    unsigned long long batch_stride;
    unsigned long long row_stride;
    unsigned rows;  // of a matrix
    unsigned unused;

    template <class T>
    __device__ T* row(unsigned index) const {
        return reinterpret_cast<T*>(start) + index / rows * batch_stride + index % rows * row_stride;
    }
};

// The elements of a thread.
struct Unit {
    unsigned row;
    unsigned column;
};

__device__ inline bool unit_of(unsigned rows, unsigned columns, Unit& unit) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned units = (columns + UNIT - 1) / UNIT;
    unit.row = index / units;
    unit.column = index % units * UNIT;
    return unit.row < rows;
}

// Copies rows, or looks rows of a table up by id, converting the dtype.
struct CopyArguments {
    Place from;
    Place to;
    const unsigned* ids;   // null: row i goes to row i; else row ids[i] does
    unsigned rows;         // that are written
    unsigned columns;
    unsigned table;        // rows of the table: an id beyond becomes NaN
    unsigned wide;
};

template <bool WIDE, class From, class To>
__device__ inline void copy_unit(const CopyArguments& a, Unit unit) {
    float numbers[UNIT];
    const unsigned from = a.ids ? a.ids[unit.row] : unit.row;
    if (from < a.table) {
        read_unit<WIDE>(a.from.row<const From>(from), unit.column, a.columns, numbers);
    } else {
        for (unsigned i = 0; i < UNIT; i++) numbers[i] = NAN;
    }
    write_unit<WIDE>(numbers, a.to.row<To>(unit.row), unit.column, a.columns);
}

template <class From, class To>
__device__ inline void copy_rows(const CopyArguments& a) {
    Unit unit;
    if (!unit_of(a.rows, a.columns, unit)) return;
    if (a.wide) {
        copy_unit<true, From, To>(a, unit);
    } else {
        copy_unit<false, From, To>(a, unit);
    }
}

// The activations of `activation.rs`, in its order.
enum Nonlinearity : unsigned { GELU, GELU_TANH, QUICK_GELU, SILU, TANH, HARD_TANH };

__device__ inline float activated(float v, unsigned by, float most) {
    switch (by) {
        case GELU: return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
        case GELU_TANH: return v / (1.0f + expf(-1.5957691216057308f * (v + 0.044715f * v * v * v)));
        case QUICK_GELU: return v / (1.0f + expf(-1.702f * v));
        case TANH: return tanhf(v);
        case HARD_TANH: return v < -most ? -most : v > most ? most : v;
        default: return v / (1.0f + expf(-v));
    }
}

// out = activated(gate) * up, or activated(gate) without up. `out` may be `gate` or `up`.
struct GluArguments {
    Place gate;
    Place up;
    Place out;
    unsigned rows;
    unsigned columns;
    unsigned by;
    unsigned has_up;
    unsigned wide;
    float most;  // of a hard tanh
};

template <bool WIDE, class T>
__device__ inline void glu_unit(const GluArguments& a, Unit unit) {
    float numbers[UNIT], up[UNIT];
    // Both are read before either is used.
    read_unit<WIDE>(a.gate.row<const T>(unit.row), unit.column, a.columns, numbers);
    if (a.has_up) read_unit<WIDE>(a.up.row<const T>(unit.row), unit.column, a.columns, up);
    for (unsigned i = 0; i < UNIT; i++) {
        numbers[i] = activated(numbers[i], a.by, a.most);
        if (a.has_up) numbers[i] *= up[i];
    }
    write_unit<WIDE>(numbers, a.out.row<T>(unit.row), unit.column, a.columns);
}

template <class T>
__device__ inline void glu(const GluArguments& a) {
    Unit unit;
    if (!unit_of(a.rows, a.columns, unit)) return;
    if (a.wide) {
        glu_unit<true, T>(a, unit);
    } else {
        glu_unit<false, T>(a, unit);
    }
}

// Sets a flag if an element is not finite.
struct FiniteArguments {
    Place x;
    unsigned* flag;
    unsigned rows;
    unsigned columns;
    unsigned wide;
    unsigned unused;
};

template <class T>
__device__ inline void find_not_finite(const FiniteArguments& a) {
    Unit unit;
    if (!unit_of(a.rows, a.columns, unit)) return;
    float numbers[UNIT];
    if (a.wide) {
        read_unit<true>(a.x.row<const T>(unit.row), unit.column, a.columns, numbers);
    } else {
        read_unit<false>(a.x.row<const T>(unit.row), unit.column, a.columns, numbers);
    }
    bool is_finite = true;
    for (unsigned i = 0; i < UNIT; i++) is_finite &= isfinite(numbers[i]);
    if (!is_finite) *a.flag = 1;
}

// out[head, query, key] = table[buckets[key - query + queries - 1], head]: `out` is [heads, queries, keys], contiguous, and
// so is `table`, [buckets, heads].
struct RelativeBiasArguments {
    const void* table;
    const unsigned* buckets;
    void* out;
    unsigned heads;
    unsigned queries;
    unsigned keys;
    unsigned known;  // rows of the table: a bucket beyond becomes NaN
};

template <class T>
__device__ inline void relative_bias(const RelativeBiasArguments& a) {
    Unit unit;
    if (!unit_of(a.heads * a.queries, a.keys, unit)) return;
    const unsigned head = unit.row / a.queries, query = unit.row % a.queries;
    T* out = static_cast<T*>(a.out) + static_cast<size_t>(unit.row) * a.keys;
    for (unsigned key = unit.column; key < min(unit.column + UNIT, a.keys); key++) {
        const unsigned bucket = a.buckets[key + a.queries - 1 - query];
        out[key] = bucket < a.known ? static_cast<const T*>(a.table)[bucket * a.heads + head] : from_f32<T>(NAN);
    }
}

// Sums of |x - base - kept| and of |kept|, a pair for each block, in a fixed order.
struct ChangeArguments {
    Place x;
    Place base;
    Place kept;
    float* sums;
    unsigned rows;
    unsigned columns;
    unsigned wide;
    unsigned unused;
};

template <bool WIDE, class T>
__device__ inline void change_of_unit(const ChangeArguments& a, Unit unit, float* sums) {
    float x[UNIT], base[UNIT], kept[UNIT];
    read_unit<WIDE>(a.x.row<const T>(unit.row), unit.column, a.columns, x);
    read_unit<WIDE>(a.base.row<const T>(unit.row), unit.column, a.columns, base);
    read_unit<WIDE>(a.kept.row<const T>(unit.row), unit.column, a.columns, kept);
    for (unsigned i = 0; i < UNIT; i++) {
        sums[0] += fabsf(x[i] - base[i] - kept[i]);
        sums[1] += fabsf(kept[i]);
    }
}

template <class T>
__device__ inline void sum_changes(const ChangeArguments& a) {
    __shared__ float warps[32];
    float sums[2] = {0.0f, 0.0f};
    const unsigned units = (a.columns + UNIT - 1) / UNIT;
    const unsigned count = a.rows * units;
    for (unsigned index = blockIdx.x * blockDim.x + threadIdx.x; index < count; index += gridDim.x * blockDim.x) {
        const Unit unit{index / units, index % units * UNIT};
        if (a.wide) {
            change_of_unit<true, T>(a, unit, sums);
        } else {
            change_of_unit<false, T>(a, unit, sums);
        }
    }
    for (unsigned which = 0; which < 2; which++) {
        const float sum = sum_of_block(sums[which], warps);
        if (threadIdx.x == 0) a.sums[2 * blockIdx.x + which] = sum;
    }
}

}  // namespace moored

#define COPY(from, From, to, To)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) copy_rows_##from##_##to(moored::CopyArguments a) {       \
        moored::copy_rows<From, To>(a);                                                                        \
    }
#define ELEMENTWISE(name, T)                                                                                   \
    COPY(name, T, f32, float)                                                                                  \
    COPY(name, T, f16, __half)                                                                                 \
    COPY(name, T, bf16, __nv_bfloat16)                                                                         \
    extern "C" __global__ void __launch_bounds__(256) glu_##name(moored::GluArguments a) { moored::glu<T>(a); } \
    extern "C" __global__ void __launch_bounds__(256) find_not_finite_##name(moored::FiniteArguments a) {      \
        moored::find_not_finite<T>(a);                                                                         \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) sum_changes_##name(moored::ChangeArguments a) {          \
        moored::sum_changes<T>(a);                                                                             \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) relative_bias_##name(moored::RelativeBiasArguments a) {  \
        moored::relative_bias<T>(a);                                                                           \
    }
ELEMENTWISE(f32, float)
ELEMENTWISE(f16, __half)
ELEMENTWISE(bf16, __nv_bfloat16)
#undef ELEMENTWISE
#undef COPY
