//! Strided layouts: rows with a stride, in matrices with a stride. A tensor may be a view of a larger one
//! (`Tensor::narrow`), and operations write directly into such a view: results that belong together are written next
//! to each other, without a concatenation afterwards.

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

/// Minimum of elements per task: below, scheduling costs more than it saves.
const GRAIN: usize = 16 * 1024;

/// A tensor as matrices of rows. Strides are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Rows {
    /// Offset of the first element in the storage.
    pub(crate) start: usize,
    /// Number of matrices; 1 if all rows have one stride.
    pub(crate) batch: usize,
    /// Rows per matrix.
    pub(crate) rows: usize,
    /// Elements per row, contiguous.
    pub(crate) columns: usize,
    /// Stride of matrices; 0 for one matrix.
    pub(crate) batch_stride: usize,
    /// Stride of rows.
    pub(crate) row_stride: usize,
}

impl Rows {
    /// A tensor whose last axes form rows of `columns` elements, and whose other axes have one or two strides.
    ///
    /// # Errors
    /// For another layout: rows that are not contiguous, or three strides.
    pub(crate) fn of(tensor: &Tensor, columns: usize) -> Result<Rows> {
        let layout = tensor.layout();
        Rows::of_layout(layout, columns).ok_or_else(|| {
            candle_core::Error::Msg(format!(
                "a tensor of shape {:?} and strides {:?} is not rows of {columns} numbers",
                layout.dims(),
                layout.stride()
            ))
        })
    }

    fn of_layout(layout: &Layout, columns: usize) -> Option<Rows> {
        let mut axes = layout.dims().iter().zip(layout.stride()).rev();
        let (mut width, mut axes_of_row) = (1, 0);
        for (&dim, &stride) in axes.by_ref() {
            axes_of_row += 1;
            if dim != 1 && stride != width {
                return None;
            }
            width *= dim;
            if width >= columns {
                break;
            }
        }
        if width != columns {
            return None;
        }
        // Strides from the innermost axis on; an axis that is contiguous with the one inside it adds no stride.
        let mut distances: Vec<(usize, usize)> = Vec::new();
        for (&dim, &stride) in layout.dims().iter().zip(layout.stride()).rev().skip(axes_of_row) {
            if dim == 1 {
                continue;
            }
            match distances.last_mut() {
                Some((count, step)) if stride == *count * *step => *count *= dim,
                _ => distances.push((dim, stride)),
            }
        }
        let mut distances = distances.into_iter();
        let (rows, row_stride) = distances.next().unwrap_or((1, columns));
        let (batch, batch_stride) = distances.next().unwrap_or((1, 0));
        distances.next().is_none().then_some(Rows {
            start: layout.start_offset(),
            batch,
            rows,
            columns,
            batch_stride,
            row_stride,
        })
    }

    /// Number of rows of all matrices.
    pub(crate) fn count(&self) -> usize {
        self.batch * self.rows
    }

    /// Offset of a row, counted over all matrices.
    pub(crate) fn begin(&self, row: usize) -> usize {
        self.start + row / self.rows.max(1) * self.batch_stride + row % self.rows.max(1) * self.row_stride
    }
}

/// Number of elements that are contiguous in both tensors: the last axis, and preceding ones as long as both are
/// contiguous and of the same size.
pub(crate) fn widest_row(x: &Tensor, y: &Tensor) -> usize {
    let axes = |x: &Tensor| -> Vec<(usize, usize)> {
        let layout = x.layout();
        let axes = layout.dims().iter().copied().zip(layout.stride().iter().copied());
        axes.rev().collect()
    };
    let mut width = 1;
    for ((dim, stride), (other, other_stride)) in axes(x).into_iter().zip(axes(y)) {
        if dim != other || dim > 1 && (stride != width || other_stride != width) {
            break;
        }
        width *= dim;
    }
    width
}

/// Rows of f32 on the CPU, for reading.
pub(crate) struct RowsOf<'a> {
    numbers: &'a [f32],
    place: Rows,
}

impl RowsOf<'_> {
    /// A row, counted over all matrices.
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.numbers[self.place.begin(row)..][..self.place.columns]
    }

    /// Number of rows of all matrices.
    pub(crate) fn count(&self) -> usize {
        self.place.count()
    }
}

/// Calls `f` with the rows of a CPU tensor. Elements are copied only if they are not f32.
pub(crate) fn with_rows<R>(
    x: &Tensor,
    columns: usize,
    f: impl FnOnce(&RowsOf<'_>) -> Result<R>,
) -> Result<R> {
    let x = match x.dtype() {
        DType::F32 => x.clone(),
        _ => x.to_dtype(DType::F32)?,
    };
    let place = Rows::of(&x, columns)?;
    let (storage, _) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(numbers)) => f(&RowsOf { numbers, place }),
        _ => candle_core::bail!("an f32 tensor on the CPU is expected"),
    }
}

/// Copies a CPU tensor if it shares the storage of `out`, which is about to be write-locked: reading it meanwhile
/// would deadlock. Other tensors are returned unchanged.
pub(crate) fn apart_from(x: &Tensor, out: &Tensor) -> Result<Tensor> {
    if !matches!(x.device(), Device::Cpu) {
        return Ok(x.clone());
    }
    let is_same = {
        let ((x, _), (out, _)) = (x.storage_and_layout(), out.storage_and_layout());
        std::ptr::eq(&raw const *x, &raw const *out)
    };
    if is_same {
        x.force_contiguous()
    } else {
        Ok(x.clone())
    }
}

/// Calls `write(row, elements)` for every row of a CPU tensor, in parallel, with the current elements, which it
/// updates in place. Other tensors that it reads must have another storage ([`apart_from`]).
pub(crate) fn write_rows(
    out: &Tensor,
    columns: usize,
    write: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<()> {
    let place = Rows::of(out, columns)?;
    out.inplace_op1(&WriteRows { place, write })
}

struct WriteRows<F> {
    place: Rows,
    write: F,
}

impl<F: Fn(usize, &mut [f32]) + Sync> WriteRows<F> {
    /// Converts each row to f32 for `visit` and back, by `widen` and `narrow`.
    fn each<T: Copy + Send>(&self, numbers: &mut [T], visit: impl Fn(usize, &mut [T]) + Sync) {
        let Rows {
            start,
            batch,
            rows,
            columns,
            batch_stride,
            row_stride,
        } = self.place;
        if rows == 0 || columns == 0 {
            return;
        }
        let rows_per_task = GRAIN.div_ceil(columns);
        for matrix in 0..batch {
            let begin = start + matrix * batch_stride;
            numbers[begin..begin + (rows - 1) * row_stride + columns]
                .par_chunks_mut(rows_per_task * row_stride)
                .enumerate()
                .for_each(|(task, chunk)| {
                    for (i, row) in chunk.chunks_mut(row_stride).enumerate() {
                        visit(matrix * rows + task * rows_per_task + i, &mut row[..columns]);
                    }
                });
        }
    }

    fn widened<T: Copy + Send>(&self, numbers: &mut [T], widen: fn(T) -> f32, narrow: fn(f32) -> T) {
        self.each(numbers, |index, row| {
            let mut wide: Vec<f32> = row.iter().map(|&number| widen(number)).collect();
            (self.write)(index, &mut wide);
            row.iter_mut().zip(wide).for_each(|(to, from)| *to = narrow(from));
        });
    }
}

impl<F: Fn(usize, &mut [f32]) + Sync> InplaceOp1 for WriteRows<F> {
    fn name(&self) -> &'static str {
        "write-rows"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        match storage {
            CpuStorage::F32(numbers) => self.each(numbers, |index, row| (self.write)(index, row)),
            CpuStorage::F16(numbers) => self.widened(numbers, f16::to_f32, f16::from_f32),
            CpuStorage::BF16(numbers) => self.widened(numbers, bf16::to_f32, bf16::from_f32),
            _ => candle_core::bail!("rows of f32, f16 or bf16 are expected"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout_of(tensor: &Tensor, columns: usize) -> Result<(usize, [usize; 5])> {
        let rows = Rows::of(tensor, columns)?;
        let Rows {
            batch,
            rows: count,
            columns,
            batch_stride,
            row_stride,
            ..
        } = rows;
        Ok((rows.start, [batch, count, columns, batch_stride, row_stride]))
    }

    #[test]
    fn strided_views_are_rows_with_a_stride() -> Result<()> {
        let joint = Tensor::zeros((2, 7, 12, 4), DType::F32, &Device::Cpu)?;
        assert_eq!(layout_of(&joint, 48)?, (0, [1, 14, 48, 0, 48]));
        // Some heads of all tokens, and all heads of some tokens.
        assert_eq!(layout_of(&joint.narrow(2, 3, 2)?, 8)?, (12, [1, 14, 8, 0, 48]));
        assert_eq!(layout_of(&joint.narrow(1, 2, 5)?, 48)?, (96, [2, 5, 48, 336, 48]));
        // One matrix of a batch, a single row, and rows that are not contiguous.
        assert_eq!(layout_of(&joint.narrow(0, 1, 1)?, 48)?, (336, [1, 7, 48, 0, 48]));
        assert_eq!(
            layout_of(&joint.narrow(0, 1, 1)?.narrow(1, 3, 1)?, 48)?.1[..3],
            [1, 1, 48]
        );
        assert!(layout_of(&joint.transpose(1, 2)?, 28).is_err());
        assert!(layout_of(&joint, 7).is_err());
        Ok(())
    }

    #[test]
    fn the_widest_row_is_contiguous_in_both_tensors() -> Result<()> {
        let joint = Tensor::zeros((2, 7, 12, 4), DType::F32, &Device::Cpu)?;
        let heads = joint.narrow(2, 3, 2)?;
        assert_eq!(widest_row(&heads, &heads.contiguous()?), 8);
        assert_eq!(widest_row(&joint, &joint.copy()?), 2 * 7 * 12 * 4);
        assert_eq!(
            widest_row(&joint.narrow(1, 0, 3)?, &joint.narrow(1, 3, 3)?),
            3 * 48
        );
        Ok(())
    }

    #[test]
    fn a_write_to_a_view_leaves_the_rest_unchanged() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let all = Tensor::ones((2, 3, 5), dtype, &Device::Cpu)?;
            let window = all.narrow(2, 1, 3)?.narrow(1, 1, 2)?;
            write_rows(&window, 3, |row, numbers| {
                numbers.iter_mut().for_each(|number| *number += row as f32 + 1.0);
            })?;
            let found = all.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            let line = |number: f32| [1.0, number, number, number, 1.0];
            let expected = [line(1.0), line(2.0), line(3.0), line(1.0), line(4.0), line(5.0)].concat();
            assert_eq!(found, expected);
            with_rows(&window, 3, |rows| {
                assert_eq!((rows.count(), rows.row(3)), (4, [5.0; 3].as_slice()));
                Ok(())
            })?;
        }
        Ok(())
    }

    #[test]
    fn a_source_in_the_same_storage_is_copied_first() -> Result<()> {
        let all = Tensor::new(&[[1f32, 2.0], [0.0, 0.0]], &Device::Cpu)?;
        let (from, to) = (all.narrow(0, 0, 1)?, all.narrow(0, 1, 1)?);
        let from = apart_from(&from, &to)?;
        with_rows(&from, 2, |from| {
            write_rows(&to, 2, |_, numbers| numbers.copy_from_slice(from.row(0)))
        })?;
        assert_eq!(all.to_vec2::<f32>()?, [[1.0, 2.0], [1.0, 2.0]]);
        Ok(())
    }
}
