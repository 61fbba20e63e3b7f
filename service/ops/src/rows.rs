//! Elements of tensors on the CPU.

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};

/// Whether our CPU loops apply to this tensor.
pub(crate) fn on_cpu(x: &Tensor) -> bool {
    matches!(x.device(), Device::Cpu)
}

/// Calls `f` with the elements of a CPU tensor as row-major f32. Copies only if they are not that already.
pub(crate) fn with_numbers<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let x = x.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(numbers)), Some((start, end))) => f(&numbers[start..end]),
        _ => candle_core::bail!("a contiguous f32 tensor on the CPU is expected"),
    }
}

/// `exp(x)`, to two units in the last place, without a branch or a call, so that loops vectorize. Arguments below -87
/// give 1e-38 rather than 0, above 88 give 1.7e38.
///
/// `x` is split into `n ln 2` and a remainder of at most half of ln 2. The remainder is evaluated by Cephes'
/// polynomial; `n`, rounded by adding a constant whose last digit is a one, is already in place to become the
/// exponent.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    exp_by(x, |a, b, c| a * b + c)
}

/// [`exp`] with a given `a b + c`.
#[inline(always)]
pub(crate) fn exp_by(x: f32, multiply_add: impl Fn(f32, f32, f32) -> f32) -> f32 {
    const ROUNDER: f32 = 12_582_912.0; // 1.5 * 2^23
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 6] = [
        1.987_569_1e-4,
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        0.166_666_65,
        0.5,
    ];
    let x = x.clamp(-87.0, 88.0);
    let rounded = multiply_add(x, std::f32::consts::LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let rest = multiply_add(n, -LN_2_LOW, multiply_add(n, -LN_2_HIGH, x));
    let mut sum = POLYNOMIAL[0];
    for coefficient in &POLYNOMIAL[1..] {
        sum = multiply_add(sum, rest, *coefficient);
    }
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    (multiply_add(sum * rest, rest, rest) + 1.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_to_two_units_in_the_last_place() {
        for i in -870_000..880_000 {
            let x = i as f32 / 10_000.0;
            let right = f64::from(x).exp();
            for found in [exp(x), exp_by(x, f32::mul_add)] {
                let apart = (f64::from(found) - right).abs() / right;
                assert!(apart <= 2.5 * f64::from(f32::EPSILON), "{x}: {apart:e}");
            }
        }
        assert!(exp(f32::NEG_INFINITY) < 2e-38 && exp(f32::INFINITY) > 1e38 && exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }
}
