//! Products of a linear layer on the CPU, written where they belong, with what follows them done while a piece of the
//! product is still in the caches.

#![allow(unsafe_code)] // Products of the gemm crate, and tasks that write one storage.

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor};
use gemm::Parallelism;
use rayon::prelude::*;

use crate::place::{Rows, apart_from, with_rows, write_rows};

/// Multiplications of a tile at least: some microseconds, many times what it costs to hand them to another thread.
const LEAST_WORK: usize = 1 << 20;
/// Tiles at most, where they are larger.
const MOST_TILES: usize = 64;
/// Rows of a tile at most. For each tile a part of the weight is packed, which many rows share.
const MOST_ROWS: usize = 256;
/// Columns of a tile at least, and what they are a multiple of: vectors of the widest processors.
const LEAST_COLUMNS: usize = 48;
const VECTOR: usize = 16;

/// What is done with a finished piece of a row of the product: the row, the column of the whole row that the piece begins
/// at, and its numbers, in their place.
pub(crate) type Finish<'a> = &'a (dyn Fn(usize, usize, &mut [f32]) + Sync);

/// `x Wᵀ`: `x` is rows of `k` numbers, `weight` is `[n, k]` in full precision, and as many rows of `n` numbers are written
/// to `out` (all may be windows; of `out`, which must not overlap `x`, and of `weight` the last axis is contiguous). Each
/// number goes through `finish` once, in a piece of its row; which pieces is not said. Sums are f32, and so are the numbers
/// that `finish` gets, whatever the dtypes. The numbers do not depend on how many threads there are.
///
/// # Errors
/// When shapes do not fit or the tensors are not on the CPU.
pub(crate) fn product_into(x: &Tensor, weight: &Tensor, out: &Tensor, finish: Finish<'_>) -> Result<()> {
    let (outputs, inputs) = weight.dims2()?;
    if out.dtype() != DType::F32 {
        let rows = out.elem_count() / outputs.max(1);
        let product = Tensor::zeros((rows, outputs), DType::F32, &Device::Cpu)?;
        product_into(x, weight, &product, finish)?;
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
    let (x, _) = x.storage_and_layout();
    let (weight, _) = weight.storage_and_layout();
    out.inplace_op1(&Product {
        x: numbers_of(&x)?,
        x_rows,
        weight: numbers_of(&weight)?,
        weight_rows,
        out_rows,
        finish,
    })
}

fn numbers_of(storage: &Storage) -> Result<&[f32]> {
    match storage {
        Storage::Cpu(CpuStorage::F32(numbers)) => Ok(numbers),
        _ => candle_core::bail!("an f32 tensor on the CPU is expected"),
    }
}

struct Product<'a> {
    x: &'a [f32],
    x_rows: Rows,
    weight: &'a [f32],
    weight_rows: Rows,
    out_rows: Rows,
    finish: Finish<'a>,
}

/// The storage of the result, of which tasks write different numbers.
struct Target(*mut f32);

// SAFETY: tiles have no number in common, and the rows of the result do not overlap (`is_within`).
unsafe impl Send for Target {}
// SAFETY: the same.
unsafe impl Sync for Target {}

/// Whether all rows are within so many numbers, and if they are `apart`, none overlaps another.
fn is_within(rows: &Rows, count: usize, apart: bool) -> bool {
    let Rows {
        start,
        batch,
        rows,
        columns,
        batch_stride,
        row_stride,
    } = *rows;
    let of_matrix = rows.saturating_sub(1) * row_stride + columns;
    let is_apart = (rows < 2 || row_stride >= columns) && (batch < 2 || batch_stride >= of_matrix);
    start + batch.saturating_sub(1) * batch_stride + of_matrix <= count && (is_apart || !apart)
}

/// Sizes of tiles: rows and columns. They depend on the shapes alone.
fn tile(rows: usize, columns: usize, inputs: usize) -> (usize, usize) {
    let tiles = (rows * columns * inputs / LEAST_WORK).clamp(1, MOST_TILES);
    let row_tiles = rows.div_ceil(MOST_ROWS);
    let column_tiles = tiles.div_ceil(row_tiles);
    let tile_columns = columns.div_ceil(column_tiles).max(LEAST_COLUMNS);
    (rows.div_ceil(row_tiles), tile_columns.next_multiple_of(VECTOR))
}

impl InplaceOp1 for Product<'_> {
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
        let target = Target(numbers.as_mut_ptr());
        // Rows of one matrix are equally far apart; a product is of one matrix of `x` and of the result.
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

impl Product<'_> {
    /// The product of some rows, which are equally far apart, and some columns.
    fn tile(&self, target: &Target, (row, rows): (usize, usize), (column, columns): (usize, usize)) {
        let inputs = self.weight_rows.columns;
        let begin = self.out_rows.begin(row) + column;
        let (x, weight) = (
            &self.x[self.x_rows.begin(row)..],
            &self.weight[self.weight_rows.begin(column)..],
        );
        // SAFETY: rows are within the storages (`is_within`), and no other tile has these of the result.
        unsafe {
            gemm::gemm(
                rows,
                columns,
                inputs,
                target.0.add(begin),
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
        for i in 0..rows {
            // SAFETY: as above; the slices of two rows do not overlap.
            let numbers = unsafe {
                std::slice::from_raw_parts_mut(target.0.add(begin + i * self.out_rows.row_stride), columns)
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

    fn poisoned(shape: &[usize]) -> Result<Tensor> {
        Tensor::full(f32::NAN, shape, &Device::Cpu)
    }

    #[test]
    fn products_equal_their_definition_for_all_sizes() -> Result<()> {
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
            // What follows sees each number once, and knows where it is.
            let follow = |row: usize, column: usize, numbers: &mut [f32]| {
                for (i, number) in numbers.iter_mut().enumerate() {
                    *number += (row * 3 + column + i) as f32 / 100.0;
                }
            };
            product_into(&x, &weight, &out, &follow)?;
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
    fn windows_of_two_matrices_are_read_and_written() -> Result<()> {
        let weight = random(&[20, 12], 2)?;
        let x = random(&[2, 9, 30], 1)?.narrow(1, 2, 6)?.narrow(2, 5, 12)?;
        let expected = defined(&x.contiguous()?.reshape((12, 12))?, &weight)?;
        for shape in [[2, 10, 50], [1, 20, 50]] {
            let all = Tensor::zeros(&shape, DType::F32, &Device::Cpu)?;
            let out = all.narrow(1, 3, 12 / shape[0])?.narrow(2, 7, 20)?;
            product_into(&x, &weight, &out, &|_, _, _| ())?;
            assert_close(&out.contiguous()?.reshape((12, 20))?, &expected, 2e-6)?;
            let rest =
                all.sqr()?.sum_all()?.to_scalar::<f32>()? - out.sqr()?.sum_all()?.to_scalar::<f32>()?;
            assert!(rest.abs() < 1e-2, "{rest}");
        }
        // From one part of a buffer to another.
        let all = random(&[12, 40], 3)?;
        let (x, out) = (all.narrow(1, 0, 12)?, all.narrow(1, 20, 20)?);
        let expected = defined(&x.contiguous()?, &weight)?;
        product_into(&x, &weight, &out, &|_, _, _| ())?;
        assert_close(&out, &expected, 2e-6)
    }

    #[test]
    fn narrow_results_are_rounded_after_what_follows() -> Result<()> {
        let (x, weight) = (random(&[30, 12], 1)?, random(&[20, 12], 2)?);
        let out = poisoned(&[30, 20])?.to_dtype(DType::BF16)?;
        let narrow = |t: &Tensor| t.to_dtype(DType::BF16);
        let (x, weight) = (narrow(&x)?, narrow(&weight)?);
        product_into(&x, &weight, &out, &|_, _, row| {
            row.iter_mut().for_each(|v| *v *= 3.0)
        })?;
        assert_close(&out, &(defined(&x, &weight)? * 3.0)?, 4e-3)
    }

    #[test]
    fn shapes_must_fit() -> Result<()> {
        let (x, weight) = (random(&[30, 12], 1)?, random(&[20, 12], 2)?);
        for shape in [[29, 20], [30, 19], [60, 10]] {
            assert!(product_into(&x, &weight, &poisoned(&shape)?, &|_, _, _| ()).is_err());
        }
        assert!(
            product_into(
                &random(&[30, 13], 1)?,
                &weight,
                &poisoned(&[30, 20])?,
                &|_, _, _| ()
            )
            .is_err()
        );
        Ok(())
    }

    #[test]
    fn the_numbers_do_not_depend_on_the_threads() -> Result<()> {
        let (x, weight) = (random(&[300, 192], 1)?, random(&[700, 192], 2)?);
        let with = |threads: usize| -> Result<Vec<f32>> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            let out = poisoned(&[300, 700])?;
            pool.map_err(candle_core::Error::wrap)?
                .install(|| product_into(&x, &weight, &out, &|_, _, _| ()))?;
            out.flatten_all()?.to_vec1()
        };
        assert_eq!(with(1)?, with(3)?);
        Ok(())
    }
}
