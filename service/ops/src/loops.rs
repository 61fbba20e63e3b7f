//! Loops over rows of f32, compiled for the vector extensions of x86-64. The build targets baseline x86-64 with
//! vectors of four floats; AVX2 and AVX-512 (eight and sixteen) are detected at run time.
//!
//! In functions compiled by [`vectorised`], operations are in the same order for every vector width and never fused,
//! so that results are identical on all processors. Functions compiled by [`by_processor`] may use FMA: matrix
//! products and attention, whose last digits may differ between processors.

#![allow(unsafe_code)] // Calls of functions compiled for the processor at hand.

use crate::rows::exp;

/// Compiles a function for AVX-512, AVX2 and baseline, and calls the widest that is supported. Its callees must be
/// `#[inline(always)]`, or they are compiled for baseline only.
macro_rules! vectorised {
    (
        $(#[$attribute:meta])*
        $visible:vis fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $result:ty)? $body:block
    ) => {
        $(#[$attribute])*
        $visible fn $name($($argument: $kind),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn with_avx512($($argument: $kind),*) $(-> $result)? $body
                #[target_feature(enable = "avx2")]
                fn with_avx2($($argument: $kind),*) $(-> $result)? $body
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    // SAFETY: the processor has the extensions for which the function is compiled.
                    return unsafe { with_avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has the extensions for which the function is compiled.
                    return unsafe { with_avx2($($argument),*) };
                }
            }
            // In a separate block: without these extensions it is the whole function.
            $body
        }
    };
}
pub(crate) use vectorised;

/// A target of loops: a vector extension.
///
/// # Safety
/// For the unsafe functions: the processor must support the extension, as it does within functions compiled by
/// [`by_processor`], and a whole vector must be readable or writable at the address.
pub(crate) trait Processor {
    /// A vector of f32.
    type Vector: Copy;
    /// Elements per vector.
    const LANES: usize;

    /// `a b + c`, fused if the processor supports it.
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;
    /// Broadcasts a number to all lanes.
    unsafe fn all(number: f32) -> Self::Vector;
    /// Loads an unaligned vector.
    unsafe fn load(from: *const f32) -> Self::Vector;
    /// Stores an unaligned vector.
    unsafe fn store(vector: Self::Vector, to: *mut f32);
    /// `a b + c` per lane.
    unsafe fn multiply_add_vectors(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
}

/// Defines a [`Processor`] of x86-64 with FMA.
#[cfg(target_arch = "x86_64")]
macro_rules! processor {
    ($(#[$attribute:meta])* $name:ident, $vector:ident, $all:ident, $load:ident, $store:ident, $multiply_add:ident) => {
        $(#[$attribute])*
        pub(crate) struct $name;

        impl Processor for $name {
            type Vector = std::arch::x86_64::$vector;
            const LANES: usize = size_of::<Self::Vector>() / size_of::<f32>();

            #[inline(always)]
            fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
                a.mul_add(b, c)
            }

            #[inline(always)]
            unsafe fn all(number: f32) -> Self::Vector {
                // SAFETY: the processor has the instruction (the caller's obligation).
                unsafe { std::arch::x86_64::$all(number) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self::Vector {
                // SAFETY: a vector is readable, and the processor has the instruction (the caller's obligation).
                unsafe { std::arch::x86_64::$load(from) }
            }

            #[inline(always)]
            unsafe fn store(vector: Self::Vector, to: *mut f32) {
                // SAFETY: as above.
                unsafe { std::arch::x86_64::$store(to, vector) }
            }

            #[inline(always)]
            unsafe fn multiply_add_vectors(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
                // SAFETY: the processor has the instruction (the caller's).
                unsafe { std::arch::x86_64::$multiply_add(a, b, c) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
processor! {
    /// x86-64 with AVX-512 and FMA.
    Avx512, __m512, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps
}

#[cfg(target_arch = "x86_64")]
processor! {
    /// x86-64 with AVX2 and FMA.
    Avx2, __m256, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps
}

/// Baseline: every processor that the program runs on. Without the instruction, a fused multiply-add would be a call.
pub(crate) struct Any;

impl Processor for Any {
    type Vector = [f32; 4];
    const LANES: usize = 4;

    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }

    #[inline(always)]
    unsafe fn all(number: f32) -> [f32; 4] {
        [number; 4]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; 4] {
        // SAFETY: four numbers are readable (the caller's obligation), and an array has their alignment.
        unsafe { *from.cast() }
    }

    #[inline(always)]
    unsafe fn store(vector: [f32; 4], to: *mut f32) {
        // SAFETY: as above.
        unsafe { *to.cast() = vector }
    }

    #[inline(always)]
    unsafe fn multiply_add_vectors(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        [0, 1, 2, 3].map(|i| a[i] * b[i] + c[i])
    }
}

/// Compiles a generic function for each [`Processor`], and calls it for the detected one. The function, and its
/// callees, must be `#[inline(always)]`, or they are compiled for baseline only.
macro_rules! by_processor {
    (
        $(#[$attribute:meta])*
        $visible:vis fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $result:ty)? = $generic:ident
    ) => {
        $(#[$attribute])*
        $visible fn $name($($argument: $kind),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
                fn with_avx512($($argument: $kind),*) $(-> $result)? {
                    $generic::<$crate::loops::Avx512>($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn with_avx2($($argument: $kind),*) $(-> $result)? {
                    $generic::<$crate::loops::Avx2>($($argument),*)
                }
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("fma")
                {
                    // SAFETY: the processor has the extensions for which the function is compiled.
                    return unsafe { with_avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor has the extensions for which the function is compiled.
                    return unsafe { with_avx2($($argument),*) };
                }
            }
            $generic::<$crate::loops::Any>($($argument),*)
        }
    };
}
pub(crate) use by_processor;

/// Partial sums of a row: four vectors of eight, or two of sixteen.
const LANES: usize = 32;

/// Sum of `f` over a row, with [`LANES`] partial sums, which vectorize and keep the error small.
#[inline(always)]
fn accumulate(row: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut partial = [0f32; LANES];
    let mut parts = row.chunks_exact(LANES);
    for part in &mut parts {
        for (sum, &v) in partial.iter_mut().zip(part) {
            *sum += f(v);
        }
    }
    // The remainder is added to the first partial sums.
    for (sum, &v) in partial.iter_mut().zip(parts.remainder()) {
        *sum += f(v);
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            partial[i] += partial[i + width];
        }
    }
    partial[0]
}

vectorised! {
    /// Normalizes a row by its root mean square, after subtracting the mean if `centred`.
    pub(crate) fn normalised_row(row: &[f32], centred: bool, eps: f32, out: &mut [f32]) {
        let mean = if centred { accumulate(row, |v| v) / row.len() as f32 } else { 0.0 };
        let variance = accumulate(row, |v| (v - mean) * (v - mean)) / row.len() as f32;
        let factor = 1.0 / (variance + eps).sqrt();
        for (o, &v) in out.iter_mut().zip(row) {
            *o = (v - mean) * factor;
        }
    }
}

vectorised! {
    /// Elementwise product, in place.
    pub(crate) fn multiply_in_place(row: &mut [f32], by: &[f32]) {
        for (v, &b) in row.iter_mut().zip(by) {
            *v *= b;
        }
    }
}

vectorised! {
    /// `row *= 1 + scale`, elementwise.
    pub(crate) fn modulate_in_place(row: &mut [f32], scale: &[f32]) {
        for (v, &s) in row.iter_mut().zip(scale) {
            *v *= 1.0 + s;
        }
    }
}

vectorised! {
    /// RMS norm of a row, in place.
    pub(crate) fn rms_norm_in_place(row: &mut [f32], weight: &[f32], eps: f32) {
        let mean_square = accumulate(row, |v| v * v) / row.len() as f32;
        let factor = 1.0 / (mean_square + eps).sqrt();
        for (v, &w) in row.iter_mut().zip(weight) {
            *v = *v * factor * w;
        }
    }
}

vectorised! {
    /// `x += gate * y`.
    pub(crate) fn gated_in_place(x: &mut [f32], y: &[f32], gate: &[f32]) {
        for ((x, &y), &gate) in x.iter_mut().zip(y).zip(gate) {
            *x += gate * y;
        }
    }
}

vectorised! {
    /// `row += bias`.
    pub(crate) fn add_in_place(row: &mut [f32], bias: &[f32]) {
        for (v, &b) in row.iter_mut().zip(bias) {
            *v += b;
        }
    }
}

vectorised! {
    /// Rotates adjacent pairs `(a, b)` to `(a cos - b sin, b cos + a sin)`, in place.
    pub(crate) fn rotate_in_place(row: &mut [f32], cos: &[f32], sin: &[f32]) {
        for (pair, (&cos, &sin)) in row.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * cos - b * sin;
            pair[1] = b * cos + a * sin;
        }
    }
}

vectorised! {
    /// `x * sigmoid(x)`, in place.
    pub(crate) fn silu_in_place(numbers: &mut [f32]) {
        for v in numbers {
            *v /= 1.0 + exp(-*v);
        }
    }
}

vectorised! {
    /// `x * sigmoid(1.702 x)`, in place.
    pub(crate) fn quick_gelu_in_place(numbers: &mut [f32]) {
        for v in numbers {
            *v /= 1.0 + exp(-1.702 * *v);
        }
    }
}

vectorised! {
    /// GELU in its tanh approximation, in place. `(1 + tanh u) / 2 = 1 / (1 + exp -2u)`: one exponential, and no
    /// cancellation far below zero.
    pub(crate) fn gelu_tanh_in_place(numbers: &mut [f32]) {
        const TWICE_ROOT_2_OVER_PI: f32 = 1.595_769;
        for v in numbers {
            *v /= 1.0 + exp(-TWICE_ROOT_2_OVER_PI * (*v + 0.044_715 * *v * *v * *v));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from -4 to 4.
    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * i) as f32 * 0.37).sin() * 4.0).collect()
    }

    #[test]
    fn sums_include_every_element_for_every_length() {
        for length in [0, 1, 31, 32, 33, 64, 100] {
            let row: Vec<f32> = (1..=length).map(|i| i as f32).collect();
            assert_eq!(accumulate(&row, |v| v), (length * (length + 1) / 2) as f32);
        }
    }

    #[test]
    fn loops_equal_the_reference_for_every_length() {
        for length in [2, 30, 32, 66] {
            let (row, weight, more) = (numbers(length), numbers(length + 3), numbers(length + 9));
            let (weight, more) = (&weight[3..], &more[9..]);
            let check = |f: &dyn Fn(&mut [f32]), expected: &dyn Fn(usize) -> f32| {
                let mut place = row.clone();
                f(&mut place);
                for (i, found) in place.iter().enumerate() {
                    assert!((found - expected(i)).abs() < 1e-4, "{found} at {i} of {length}");
                }
            };
            let square = row.iter().map(|v| v * v).sum::<f32>() / length as f32;
            check(&|place| rms_norm_in_place(place, weight, 1e-6), &|i| {
                row[i] / (square + 1e-6).sqrt() * weight[i]
            });
            check(&|place| gated_in_place(place, weight, more), &|i| {
                row[i] + weight[i] * more[i]
            });
            check(&|place| multiply_in_place(place, weight), &|i| row[i] * weight[i]);
            check(&|place| modulate_in_place(place, weight), &|i| {
                row[i] * (1.0 + weight[i])
            });
            let half = length / 2;
            check(
                &|place| rotate_in_place(place, &weight[..half], &more[..half]),
                &|i| {
                    let (pair, (a, b)) = (i / 2, (row[i / 2 * 2], row[i / 2 * 2 + 1]));
                    match i % 2 {
                        0 => a * weight[pair] - b * more[pair],
                        _ => b * weight[pair] + a * more[pair],
                    }
                },
            );
            let mut normalised = vec![f32::NAN; length];
            for centred in [true, false] {
                normalised_row(&row, centred, 1e-6, &mut normalised);
                let mean = if centred {
                    row.iter().sum::<f32>() / length as f32
                } else {
                    0.0
                };
                let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / length as f32;
                for (found, v) in normalised.iter().zip(&row) {
                    assert!((found - (v - mean) / (variance + 1e-6).sqrt()).abs() < 1e-4);
                }
            }
        }
    }

    #[test]
    fn results_do_not_depend_on_the_vector_width() {
        // One element at a time is never vectorized.
        let row = numbers(77);
        let mut together = row.clone();
        gelu_tanh_in_place(&mut together);
        for (&v, &expected) in row.iter().zip(&together) {
            let mut alone = [v];
            gelu_tanh_in_place(&mut alone);
            assert_eq!(alone[0].to_bits(), expected.to_bits());
        }
    }
}
