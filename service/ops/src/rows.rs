//! The one way that this crate walks over a tensor on the CPU.

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use rayon::prelude::*;

/// Bytes that a part of a tensor has in f32 where our own loops do not run, unless one row has more.
pub const PART_BYTES: usize = 16 << 20;

/// Numbers that one task works on at least: below, sharing work costs more than it gives.
const GRAIN: usize = 16 * 1024;

/// Whether our own loops run for this tensor.
pub(crate) fn on_cpu(x: &Tensor) -> bool {
    matches!(x.device(), Device::Cpu)
}

/// Calls `f` with the numbers of a CPU tensor as f32, row-major. Copies only what is not so already.
pub(crate) fn with_numbers<R>(x: &Tensor, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let x = x.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(numbers)), Some((start, end))) => f(&numbers[start..end]),
        _ => candle_core::bail!("a contiguous f32 tensor on the CPU is expected"),
    }
}

/// A tensor like `x` (shape, dtype) whose rows along the last axis are written by
/// `write(row_index, row_of_x, row_of_result)`, on all cores.
pub(crate) fn map_rows(x: &Tensor, write: impl Fn(usize, &[f32], &mut [f32]) + Sync) -> Result<Tensor> {
    let width = x.dim(candle_core::D::Minus1)?;
    let mut result = vec![0f32; x.elem_count()];
    if !result.is_empty() {
        let rows_per_task = GRAIN.div_ceil(width);
        with_numbers(x, |numbers| {
            let task = rows_per_task * width;
            result
                .par_chunks_mut(task)
                .zip(numbers.par_chunks(task))
                .enumerate()
                .for_each(|(task_index, (out, input))| {
                    let rows = out.chunks_exact_mut(width).zip(input.chunks_exact(width));
                    for (i, (row_out, row_in)) in rows.enumerate() {
                        write(task_index * rows_per_task + i, row_in, row_out);
                    }
                });
            Ok(())
        })?;
    }
    Tensor::from_vec(result, x.shape(), &Device::Cpu)?.to_dtype(x.dtype())
}

/// A tensor like `x`, composed of candle's operations a part along `axis` at a time: `compose` gets a part and the
/// index that it begins at, and gives one of the same shape and dtype. Its temporaries in f32 are as large as a part
/// of [`PART_BYTES`] each, however large `x` is; what is computed for a row does not depend on the parts.
pub(crate) fn in_parts(
    x: &Tensor,
    axis: usize,
    compose: impl Fn(&Tensor, usize) -> Result<Tensor>,
) -> Result<Tensor> {
    let rows = x.dim(axis)?;
    let row_bytes = x.elem_count() / rows.max(1) * size_of::<f32>();
    let part = (PART_BYTES / row_bytes.max(1)).clamp(1, rows.max(1));
    if part >= rows {
        return compose(x, 0);
    }
    let out = Tensor::zeros(x.shape(), x.dtype(), x.device())?;
    for start in (0..rows).step_by(part) {
        let composed = compose(&x.narrow(axis, start, part.min(rows - start))?, start)?;
        out.slice_set(&composed.contiguous()?, axis, start)?;
    }
    Ok(out)
}

/// [`in_parts`] over the rows of the last axis, all others taken together: `compose` gets `[rows, width]`.
pub(crate) fn in_parts_of_rows(x: &Tensor, compose: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    let width = x.dim(candle_core::D::Minus1)?;
    let rows = x.reshape((x.elem_count() / width.max(1), width))?;
    in_parts(&rows, 0, |part, _| compose(part))?.reshape(x.shape())
}

/// A tensor like `x` with the numbers that `change` leaves of them, many at a time.
pub(crate) fn map_numbers(x: &Tensor, change: impl Fn(&mut [f32]) + Sync) -> Result<Tensor> {
    let mut result = vec![0f32; x.elem_count()];
    with_numbers(x, |numbers| {
        result
            .par_chunks_mut(GRAIN)
            .zip(numbers.par_chunks(GRAIN))
            .for_each(|(out, input)| {
                out.copy_from_slice(input);
                change(out);
            });
        Ok(())
    })?;
    Tensor::from_vec(result, x.shape(), &Device::Cpu)?.to_dtype(x.dtype())
}

/// `e` to the `x`, to two units in the last place, without a branch or a call, so that loops over it become
/// vector instructions. Arguments below -87 give 1e-38 rather than 0, above 88 give 1.7e38.
///
/// `x` is `n` times ln 2 and a rest of at most half of it. The rest goes through a polynomial (Cephes'), and
/// `n`, rounded by adding a number whose last digit is a one, is already in place to become an exponent.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
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
    let rounded = x * std::f32::consts::LOG2_E + ROUNDER;
    let n = rounded - ROUNDER;
    let rest = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut sum = POLYNOMIAL[0];
    for coefficient in &POLYNOMIAL[1..] {
        sum = sum * rest + coefficient;
    }
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    (sum * rest * rest + rest + 1.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, here, random};

    #[test]
    fn exponentials_are_right_to_two_units_in_the_last_place() {
        for i in -870_000..880_000 {
            let x = i as f32 / 10_000.0;
            let right = f64::from(x).exp();
            let apart = (f64::from(exp(x)) - right).abs() / right;
            assert!(apart <= 2.5 * f64::from(f32::EPSILON), "{x}: {apart:e}");
        }
        assert!(exp(f32::NEG_INFINITY) < 2e-38 && exp(f32::INFINITY) > 1e38 && exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn parts_make_the_whole() -> Result<()> {
        let x = here(&random(&[3, 2_500_000], 1)?);
        let twice = |part: &Tensor, start: usize| {
            // A row has less than a part, two of them more.
            assert_eq!((part.dim(0)?, part.dtype()), (1, DType::F32));
            (part * 2.0)? + start as f64
        };
        let rows = here(&Tensor::new(&[[0f32], [1.0], [2.0]], &Device::Cpu)?);
        assert_close(&in_parts(&x, 0, twice)?, &(&x * 2.0)?.broadcast_add(&rows)?, 0.0)?;
        assert_close(&in_parts_of_rows(&x, |part| part.sqr())?, &x.sqr()?, 0.0)
    }
}
