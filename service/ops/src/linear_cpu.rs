//! Matrix products of linear layers on the CPU, written directly to their destination, with the epilogue applied
//! while a tile of the product is still in the caches.

#![allow(unsafe_code)] // Products of the gemm crate, and tasks that write one storage.

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor};
use gemm::Parallelism;
use rayon::prelude::*;

use crate::disjoint::{Disjoint, end_of};
use crate::place::{Rows, apart_from, with_rows, write_rows};

/// Minimum of multiplications per tile: some microseconds, many times the cost of scheduling it.
const MIN_WORK: usize = 1 << 20;
/// Maximum of tiles, if they are larger.
const MAX_TILES: usize = 64;
/// Maximum rows of a tile. A part of the weight is packed per tile, and shared by its rows.
const MAX_ROWS: usize = 256;
/// Minimum columns of a tile, and their multiple: the widest vectors.
const MIN_COLUMNS: usize = 48;
const VECTOR: usize = 16;

/// Epilogue of a finished piece of a row: called with the row, the column at which the piece begins, and its
/// elements, in place.
pub(crate) type FinishPiece<'a> = &'a (dyn Fn(usize, usize, &mut [f32]) + Sync);

/// `x Wᵀ + Σ left rightᵀ`: `x` is rows of `k` elements, `weight` is full-precision `[n, k]`, and rows of `n` elements
/// are written to `out` (all may be strided views; `out` and `weight` are contiguous in the last axis, and `out` must
/// not overlap `x`). `added` are pairs `[rows, r]` and `[n, r]`, each contiguous. Each element is passed to `finish`
/// exactly once, in a piece of its row of unspecified length. Sums, and the
/// elements passed to `finish`, are f32 whatever the dtypes. The result does not depend on the number of threads.
///
/// # Errors
/// When shapes do not match or the tensors are not on the CPU.
pub(crate) fn product_into(
    x: &Tensor,
    weight: &Tensor,
    added: &[(Tensor, Tensor)],
    out: &Tensor,
    finish: FinishPiece<'_>,
) -> Result<()> {
    let (outputs, inputs) = weight.dims2()?;
    if out.dtype() != DType::F32 {
        let rows = out.elem_count() / outputs.max(1);
        let product = Tensor::zeros((rows, outputs), DType::F32, &Device::Cpu)?;
        product_into(x, weight, added, &product, finish)?;
        return with_rows(&product, outputs, |product| {
            write_rows(out, outputs, |row, numbers| {
                numbers.copy_from_slice(product.row(row))
            })
        });
    }
    let x = apart_from(x, out)?.to_dtype(DType::F32)?;
    let weight = apart_from(weight, out)?.to_dtype(DType::F32)?;
    let (x_rows, weight_rows) = (Rows::of(&x, inputs)?, Rows::of(&weight, inputs)?);
    let out_rows = Rows::of(out, outputs)?;
    if x_rows.count() != out_rows.count() || weight_rows.batch > 1 {
        candle_core::bail!(
            "the product of {:?} and {:?} to {:?}",
            x.dims(),
            weight.dims(),
            out.dims()
        );
    }
    let added = added.iter().map(|(left, right)| {
        let (left, right) = (left.to_dtype(DType::F32)?, right.to_dtype(DType::F32)?);
        let (rows, rank) = left.dims2()?;
        let fits = right.dims() == [outputs, rank] && rows == out_rows.count();
        if !fits || !left.is_contiguous() || !right.is_contiguous() {
            candle_core::bail!(
                "the product of {:?} and {:?} added to {:?}",
                left.dims(),
                right.dims(),
                out.dims()
            );
        }
        Ok((left, right, rank))
    });
    let added = added.collect::<Result<Vec<_>>>()?;
    let stored: Vec<_> = added
        .iter()
        .map(|(left, right, rank)| (left.storage_and_layout(), right.storage_and_layout(), *rank))
        .collect();
    let added = stored.iter().map(|((left, left_at), (right, right_at), rank)| {
        Ok(Added {
            left: &numbers_of(left)?[left_at.start_offset()..],
            right: &numbers_of(right)?[right_at.start_offset()..],
            rank: *rank,
        })
    });
    let added = added.collect::<Result<Vec<_>>>()?;
    let (x, _) = x.storage_and_layout();
    let (weight, _) = weight.storage_and_layout();
    out.inplace_op1(&LinearProduct {
        x: numbers_of(&x)?,
        x_rows,
        weight: numbers_of(&weight)?,
        weight_rows,
        out_rows,
        added,
        finish,
    })
}

/// `left rightᵀ` of contiguous matrices `[rows, rank]` and `[outputs, rank]`.
struct Added<'a> {
    left: &'a [f32],
    right: &'a [f32],
    rank: usize,
}

fn numbers_of(storage: &Storage) -> Result<&[f32]> {
    match storage {
        Storage::Cpu(CpuStorage::F32(numbers)) => Ok(numbers),
        _ => candle_core::bail!("an f32 tensor on the CPU is expected"),
    }
}

struct LinearProduct<'a> {
    x: &'a [f32],
    x_rows: Rows,
    weight: &'a [f32],
    weight_rows: Rows,
    out_rows: Rows,
    added: Vec<Added<'a>>,
    finish: FinishPiece<'a>,
}

/// Whether all rows are within `count` elements, and if `apart`, do not overlap.
fn is_within(rows: &Rows, count: usize, apart: bool) -> bool {
    let Rows {
        start,
        batch,
        rows,
        columns,
        batch_stride,
        row_stride,
    } = *rows;
    let is_apart = || {
        let of_matrix = end_of(0, [(rows, row_stride)], columns);
        (rows < 2 || row_stride >= columns)
            && (batch < 2 || of_matrix.is_some_and(|of_matrix| batch_stride >= of_matrix))
    };
    let end = end_of(start, [(batch, batch_stride), (rows, row_stride)], columns);
    end.is_some_and(|end| end <= count) && (!apart || is_apart())
}

/// Rows and columns of a tile. They depend on the shapes alone, so that results are deterministic.
fn tile(rows: usize, columns: usize, inputs: usize) -> (usize, usize) {
    let tiles = (rows * columns * inputs / MIN_WORK).clamp(1, MAX_TILES);
    let row_tiles = rows.div_ceil(MAX_ROWS);
    let column_tiles = tiles.div_ceil(row_tiles);
    let tile_columns = columns.div_ceil(column_tiles).max(MIN_COLUMNS);
    (rows.div_ceil(row_tiles), tile_columns.next_multiple_of(VECTOR))
}

impl InplaceOp1 for LinearProduct<'_> {
    fn name(&self) -> &'static str {
        "product"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let CpuStorage::F32(numbers) = storage else {
            candle_core::bail!("a product to f32 is expected")
        };
        let (rows, columns) = (self.out_rows.count(), self.out_rows.columns);
        if rows == 0 || columns == 0 {
            return Ok(());
        }
        let are_within = is_within(&self.x_rows, self.x.len(), false)
            && is_within(&self.weight_rows, self.weight.len(), false)
            && is_within(&self.out_rows, numbers.len(), true)
            && self.weight_rows.rows == columns;
        if !are_within {
            candle_core::bail!("rows outside of their tensors, or over one another");
        }
        let target = Disjoint::of(numbers);
        // A matrix has one row stride; a product is of one matrix of `x` and one of the result.
        let matrices = self.x_rows.batch.max(self.out_rows.batch);
        let of_matrix = if self.x_rows.batch > 1 {
            self.x_rows.rows
        } else {
            self.out_rows.rows
        };
        let is_even = matrices == 1
            || [&self.x_rows, &self.out_rows]
                .iter()
                .all(|rows| rows.batch == 1 || rows.rows == of_matrix);
        let of_matrix = match (is_even, matrices) {
            (true, 1) => rows,
            (true, _) => of_matrix,
            (false, _) => 1,
        };
        let (tile_rows, tile_columns) = tile(of_matrix, columns, self.weight_rows.columns);
        let (row_tiles, column_tiles) = (of_matrix.div_ceil(tile_rows), columns.div_ceil(tile_columns));
        let tiles = rows / of_matrix * row_tiles * column_tiles;
        let work = |task: usize| {
            let (matrix, task) = (
                task / (row_tiles * column_tiles),
                task % (row_tiles * column_tiles),
            );
            let (row, column) = (
                task / column_tiles * tile_rows,
                task % column_tiles * tile_columns,
            );
            let count = tile_rows.min(of_matrix - row);
            let width = tile_columns.min(columns - column);
            self.tile(&target, (matrix * of_matrix + row, count), (column, width));
        };
        if tiles == 1 {
            work(0);
        } else {
            (0..tiles).into_par_iter().with_max_len(1).for_each(work);
        }
        Ok(())
    }
}

impl LinearProduct<'_> {
    /// The product of some rows, which have one stride, and some columns.
    fn tile(&self, target: &Disjoint<f32>, (row, rows): (usize, usize), (column, columns): (usize, usize)) {
        let inputs = self.weight_rows.columns;
        let begin = self.out_rows.begin(row) + column;
        let (x, weight) = (
            &self.x[self.x_rows.begin(row)..],
            &self.weight[self.weight_rows.begin(column)..],
        );
        // SAFETY: rows are within the storages (`is_within`), and no other tile writes these elements.
        unsafe {
            gemm::gemm(
                rows,
                columns,
                inputs,
                target.at(begin),
                1,
                self.out_rows.row_stride as isize,
                false,
                x.as_ptr(),
                1,
                self.x_rows.row_stride as isize,
                weight.as_ptr(),
                self.weight_rows.row_stride as isize,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
        for Added { left, right, rank } in &self.added {
            // SAFETY: as above; the factors have as many rows as the result has rows and columns (`product_into`).
            unsafe {
                gemm::gemm(
                    rows,
                    columns,
                    *rank,
                    target.at(begin),
                    1,
                    self.out_rows.row_stride as isize,
                    true,
                    left[row * rank..].as_ptr(),
                    1,
                    *rank as isize,
                    right[column * rank..].as_ptr(),
                    *rank as isize,
                    1,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    Parallelism::None,
                );
            }
        }
        for i in 0..rows {
            // SAFETY: as above; the slices of two rows do not overlap.
            let numbers = unsafe {
                std::slice::from_raw_parts_mut(target.at(begin + i * self.out_rows.row_stride), columns)
            };
            (self.finish)(row + i, column, numbers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, random};

    /// `x Wᵀ` in f64.
    fn defined(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let wide = |t: &Tensor| t.to_dtype(DType::F64);
        wide(x)?.matmul(&wide(weight)?.t()?)?.to_dtype(DType::F32)
    }

    #[test]
    fn rows_beyond_a_storage_or_over_one_another_are_refused() {
        let rows = Rows {
            start: 2,
            batch: 2,
            rows: 3,
            columns: 4,
            batch_stride: 20,
            row_stride: 5,
        };
        assert!(is_within(&rows, 2 + 20 + 10 + 4, true));
        assert!(!is_within(&rows, 2 + 20 + 10 + 3, false));
        let over_one_another = [
            Rows {
                row_stride: 3,
                ..rows
            },
            Rows {
                batch_stride: 13,
                ..rows
            },
        ];
        for other in over_one_another {
            assert!(is_within(&other, 36, false) && !is_within(&other, 36, true));
        }
        // The ends of these rows overflow: a sum that wraps around to zero would seem to be within any storage.
        for beyond in [
            Rows {
                row_stride: usize::MAX / 2 + 1,
                ..rows
            },
            Rows {
                batch_stride: usize::MAX - 10,
                ..rows
            },
            Rows {
                start: usize::MAX - 30,
                ..rows
            },
        ] {
            assert!(!is_within(&beyond, 36, false), "{beyond:?}");
        }
    }

    fn poisoned(shape: &[usize]) -> Result<Tensor> {
        Tensor::full(f32::NAN, shape, &Device::Cpu)
    }

    #[test]
    fn products_equal_the_reference_for_all_sizes() -> Result<()> {
        let sizes = [
            (1, 1, 1),
            (1, 300, 70),
            (3, 5, 7),
            (8, 1152, 192),
            (112, 192, 192),
            (112, 768, 192),
            (700, 50, 33),
            (513, 200, 96),
        ];
        for (rows, outputs, inputs) in sizes {
            let (x, weight) = (random(&[rows, inputs], 1)?, random(&[outputs, inputs], 2)?);
            let out = poisoned(&[rows, outputs])?;
            // The epilogue sees each element once, with its position.
            let follow = |row: usize, column: usize, numbers: &mut [f32]| {
                for (i, number) in numbers.iter_mut().enumerate() {
                    *number += (row * 3 + column + i) as f32 / 100.0;
                }
            };
            product_into(&x, &weight, &[], &out, &follow)?;
            let place = |count: usize, step: f32| -> Result<Tensor> {
                Tensor::arange(0f32, count as f32, &Device::Cpu)? * f64::from(step)
            };
            let places = place(rows, 0.03)?
                .unsqueeze(1)?
                .broadcast_add(&place(outputs, 0.01)?)?;
            assert_close(&out, &(defined(&x, &weight)? + places)?, 2e-6)?;
        }
        Ok(())
    }

    #[test]
    fn views_of_two_matrices_are_read_and_written() -> Result<()> {
        let weight = random(&[20, 12], 2)?;
        let x = random(&[2, 9, 30], 1)?.narrow(1, 2, 6)?.narrow(2, 5, 12)?;
        let expected = defined(&x.contiguous()?.reshape((12, 12))?, &weight)?;
        for shape in [[2, 10, 50], [1, 20, 50]] {
            let all = Tensor::zeros(&shape, DType::F32, &Device::Cpu)?;
            let out = all.narrow(1, 3, 12 / shape[0])?.narrow(2, 7, 20)?;
            product_into(&x, &weight, &[], &out, &|_, _, _| ())?;
            assert_close(&out.contiguous()?.reshape((12, 20))?, &expected, 2e-6)?;
            let rest =
                all.sqr()?.sum_all()?.to_scalar::<f32>()? - out.sqr()?.sum_all()?.to_scalar::<f32>()?;
            assert!(rest.abs() < 1e-2, "{rest}");
        }
        // From one region of a buffer to another.
        let all = random(&[12, 40], 3)?;
        let (x, out) = (all.narrow(1, 0, 12)?, all.narrow(1, 20, 20)?);
        let expected = defined(&x.contiguous()?, &weight)?;
        product_into(&x, &weight, &[], &out, &|_, _, _| ())?;
        assert_close(&out, &expected, 2e-6)
    }

    #[test]
    fn narrow_results_are_rounded_after_the_epilogue() -> Result<()> {
        let (x, weight) = (random(&[30, 12], 1)?, random(&[20, 12], 2)?);
        let out = poisoned(&[30, 20])?.to_dtype(DType::BF16)?;
        let narrow = |t: &Tensor| t.to_dtype(DType::BF16);
        let (x, weight) = (narrow(&x)?, narrow(&weight)?);
        product_into(&x, &weight, &[], &out, &|_, _, row| {
            row.iter_mut().for_each(|v| *v *= 3.0)
        })?;
        assert_close(&out, &(defined(&x, &weight)? * 3.0)?, 4e-3)
    }

    #[test]
    fn shapes_must_fit() -> Result<()> {
        let (x, weight) = (random(&[30, 12], 1)?, random(&[20, 12], 2)?);
        for shape in [[29, 20], [30, 19], [60, 10]] {
            assert!(product_into(&x, &weight, &[], &poisoned(&shape)?, &|_, _, _| ()).is_err());
        }
        assert!(
            product_into(
                &random(&[30, 13], 1)?,
                &weight,
                &[],
                &poisoned(&[30, 20])?,
                &|_, _, _| ()
            )
            .is_err()
        );
        Ok(())
    }

    #[test]
    fn the_result_does_not_depend_on_the_thread_count() -> Result<()> {
        let (x, weight) = (random(&[300, 192], 1)?, random(&[700, 192], 2)?);
        let with = |threads: usize| -> Result<Vec<f32>> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let out = poisoned(&[300, 700])?;
            pool.map_err(candle_core::Error::wrap)?
                .install(|| product_into(&x, &weight, &[], &out, &|_, _, _| ()))?;
            out.flatten_all()?.to_vec1()
        };
        assert_eq!(with(1)?, with(3)?);
        Ok(())
    }
}
