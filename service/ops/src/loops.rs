//! Loops over rows of f32, compiled for the vectors that a processor has. The build is for every x86-64, whose vectors
//! hold four numbers; those of most processors hold eight or sixteen, which is seen when the program runs.
//!
//! In what [`vectorised`] compiles, additions and products are done in the same order whatever the vectors (and never
//! fused), so that the numbers are the same on all processors. What [`by_processor`] compiles may fuse them: products of
//! matrices and attention, whose last digits may differ from one processor to another.

#![allow(unsafe_code)] // Calls of what is compiled for the processor at hand.

use crate::rows::exp;

/// Compiles a function for AVX-512, for AVX2 and for every processor, and calls the widest that the processor has. What
/// its body calls is `#[inline(always)]`, or it would be compiled for every processor alone.
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
                    // SAFETY: the processor has what the function is compiled for.
                    return unsafe { with_avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has what the function is compiled for.
                    return unsafe { with_avx2($($argument),*) };
                }
            }
            // In a block of its own: for other processors this is the whole function.
            $body
        }
    };
}
pub(crate) use vectorised;

/// What a loop is compiled for.
///
/// # Safety
/// Of the unsafe functions: the processor must be of this kind, as it is within what [`by_processor`] compiles, and as many
/// numbers as a vector has must be at the address.
pub(crate) trait Processor {
    /// Some f32.
    type Vector: Copy;
    /// Numbers of a vector.
    const LANES: usize;

    /// `a b + c`, rounded once if the processor has an instruction for it.
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;
    /// The same number in all lanes.
    unsafe fn all(number: f32) -> Self::Vector;
    /// What is there.
    unsafe fn load(from: *const f32) -> Self::Vector;
    /// Writes a vector there.
    unsafe fn store(vector: Self::Vector, to: *mut f32);
    /// `a b + c` in each lane.
    unsafe fn multiply_add_vectors(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
}

/// A kind of x86-64 that has FMA, with its vectors and instructions.
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
                // SAFETY: the processor has the instruction (the caller's).
                unsafe { std::arch::x86_64::$all(number) }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self::Vector {
                // SAFETY: a vector is there, and the processor has the instruction (the caller's).
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

/// Every processor that the program runs on. Without an instruction for it, rounding once would be a call.
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
        // SAFETY: four numbers are there (the caller's), and an array is aligned as they are.
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

/// Compiles a generic function for each [`Processor`], and calls it for the one at hand. The function, and what it calls, is
/// `#[inline(always)]`, or it would be compiled for every processor alone.
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
                    // SAFETY: the processor has what the function is compiled for.
                    return unsafe { with_avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor has what the function is compiled for.
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

/// Sum of `f` of every number of a row, with [`LANES`] partial sums: they run side by side, and the error stays small.
#[inline(always)]
fn accumulate(row: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut partial = [0f32; LANES];
    let mut parts = row.chunks_exact(LANES);
    for part in &mut parts {
        for (sum, &v) in partial.iter_mut().zip(part) {
            *sum += f(v);
        }
    }
    // The rest is part of the first sums, which the same lanes add.
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
    /// A row less its mean, if it is `centred`, by the root of its mean square.
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
    /// A row times as many numbers.
    pub(crate) fn multiply_in_place(row: &mut [f32], by: &[f32]) {
        for (v, &b) in row.iter_mut().zip(by) {
            *v *= b;
        }
    }
}

vectorised! {
    /// A row times as many numbers, each with one added.
    pub(crate) fn modulate_in_place(row: &mut [f32], scale: &[f32]) {
        for (v, &s) in row.iter_mut().zip(scale) {
            *v *= 1.0 + s;
        }
    }
}

vectorised! {
    /// Root-mean-square norm of a row in its place.
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
    /// Neighbouring pairs `(a, b)` become `(a cos - b sin, b cos + a sin)`, in their place.
    pub(crate) fn rotate_in_place(row: &mut [f32], cos: &[f32], sin: &[f32]) {
        for (pair, (&cos, &sin)) in row.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * cos - b * sin;
            pair[1] = b * cos + a * sin;
        }
    }
}

vectorised! {
    /// `x * sigmoid(x)` in its place.
    pub(crate) fn silu_in_place(numbers: &mut [f32]) {
        for v in numbers {
            *v /= 1.0 + exp(-*v);
        }
    }
}

vectorised! {
    /// `x * sigmoid(1.702 x)` in its place.
    pub(crate) fn quick_gelu_in_place(numbers: &mut [f32]) {
        for v in numbers {
            *v /= 1.0 + exp(-1.702 * *v);
        }
    }
}

vectorised! {
    /// GELU by its approximation with tanh, in its place. `(1 + tanh u) / 2 = 1 / (1 + exp -2u)`: one exponential, and
    /// no cancellation far below zero.
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

    /// Numbers over -4 to 4.
    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * i) as f32 * 0.37).sin() * 4.0).collect()
    }

    #[test]
    fn sums_hold_every_number_whatever_the_length() {
        for length in [0, 1, 31, 32, 33, 64, 100] {
            let row: Vec<f32> = (1..=length).map(|i| i as f32).collect();
            assert_eq!(accumulate(&row, |v| v), (length * (length + 1) / 2) as f32);
        }
    }

    #[test]
    fn loops_are_what_they_say_whatever_the_length() {
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
    fn numbers_are_the_same_whatever_the_vectors() {
        // One number at a time is what no vector is made of.
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
