//! The one way that this crate walks over a tensor on the CPU.

use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};
use rayon::prelude::*;

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

/// A tensor like `x` with `f` of every number.
pub(crate) fn map_numbers(x: &Tensor, f: impl Fn(f32) -> f32 + Sync) -> Result<Tensor> {
    let mut result = vec![0f32; x.elem_count()];
    with_numbers(x, |numbers| {
        result
            .par_chunks_mut(GRAIN)
            .zip(numbers.par_chunks(GRAIN))
            .for_each(|(out, input)| {
                for (o, &i) in out.iter_mut().zip(input) {
                    *o = f(i);
                }
            });
        Ok(())
    })?;
    Tensor::from_vec(result, x.shape(), &Device::Cpu)?.to_dtype(x.dtype())
}

/// Sum of a row with eight partial sums: pairs of them run side by side, and the error stays small.
pub(crate) fn sum(row: &[f32]) -> f32 {
    accumulate(row, |v| v)
}

/// Sum of `f` of every number of a row, with eight partial sums.
pub(crate) fn accumulate(row: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut partial = [0f32; 8];
    let mut eights = row.chunks_exact(8);
    for eight in &mut eights {
        for (p, &v) in partial.iter_mut().zip(eight) {
            *p += f(v);
        }
    }
    let rest: f32 = eights.remainder().iter().map(|&v| f(v)).sum();
    partial.iter().sum::<f32>() + rest
}
