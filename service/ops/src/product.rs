//! Products of small matrices on one thread, without packing or transposing the operands, which would take as long as
//! a product of small depth. A tile of the result stays in registers over the whole depth.

#![allow(unsafe_code)] // Numbers of matrices whose bounds are checked once.

use crate::loops::{Processor, by_processor};

/// The columns of a product are a multiple of this.
pub(crate) const COLUMNS: usize = 16;

/// `out = left right`, or `out += left right`: `out` is `[rows, columns]`, `left` `[rows, depth]`, `right` `[depth,
/// columns]`. Rows of `left` may overlap, and its elements may have a stride. Strides are in elements.
///
/// Each element of the result is one sum in the order of the depth, independent of the rest of the product. FMA is
/// used if the processor supports it, so the last digits may differ between processors.
pub(crate) struct Product<'a> {
    pub(crate) rows: usize,
    /// A multiple of [`COLUMNS`].
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) out: &'a mut [f32],
    /// Row stride; at least `columns`.
    pub(crate) out_stride: usize,
    /// Accumulate into `out`.
    pub(crate) adds: bool,
    pub(crate) left: &'a [f32],
    /// Strides of rows and of elements in a row.
    pub(crate) left_strides: [usize; 2],
    pub(crate) right: &'a [f32],
    /// Row stride.
    pub(crate) right_stride: usize,
}

/// Computes a product.
///
/// # Panics
/// When an operand is out of bounds, or the column count is no multiple of [`COLUMNS`].
pub(crate) fn multiply(product: Product<'_>) {
    let Product {
        rows, columns, depth, ..
    } = product;
    if rows == 0 || columns == 0 {
        return;
    }
    let end = |[down, along]: [usize; 2], [rows, columns]: [usize; 2]| match rows * columns {
        0 => 0,
        _ => (rows - 1) * down + (columns - 1) * along + 1,
    };
    assert!(
        columns.is_multiple_of(COLUMNS)
            && product.out_stride >= columns
            && end([product.out_stride, 1], [rows, columns]) <= product.out.len()
            && end(product.left_strides, [rows, depth]) <= product.left.len()
            && end([product.right_stride, 1], [depth, columns]) <= product.right.len(),
        "a product beyond its operands"
    );
    multiply_checked(product);
}

by_processor! {
    /// A product with validated bounds.
    fn multiply_checked(product: Product<'_>) = columns
}

/// Iterates over the columns in the widest tiles whose sums fit in the registers.
#[inline(always)]
fn columns<P: Processor>(mut product: Product<'_>) {
    let mut first = 0;
    while first < product.columns {
        let vectors = (product.columns - first) / P::LANES;
        first += match P::LANES {
            // With 32 registers.
            16 => match vectors {
                4.. => rows::<P, 4, 6>(&mut product, first),
                3 => rows::<P, 3, 8>(&mut product, first),
                2 => rows::<P, 2, 12>(&mut product, first),
                _ => rows::<P, 1, 12>(&mut product, first),
            },
            // With 16 registers.
            _ => rows::<P, 2, 6>(&mut product, first),
        };
    }
}

/// All rows of some vectors of columns; returns the number of columns.
#[inline(always)]
fn rows<P: Processor, const VECTORS: usize, const ROWS: usize>(
    product: &mut Product<'_>,
    column: usize,
) -> usize {
    let mut row = 0;
    while row < product.rows {
        // SAFETY: rows up to `product.rows` and columns up to `product.columns` are within the operands (`multiply`), and
        // that many vectors are left: COLUMNS is two of the narrower ones at least. The processor is the caller's.
        row += unsafe {
            match product.rows - row {
                rest if rest >= ROWS => tile::<P, VECTORS, ROWS>(product, row, column),
                4.. => tile::<P, VECTORS, 4>(product, row, column),
                2.. => tile::<P, VECTORS, 2>(product, row, column),
                _ => tile::<P, VECTORS, 1>(product, row, column),
            }
        };
    }
    VECTORS * P::LANES
}

/// One tile; returns the number of rows.
///
/// # Safety
/// The tile must be within the result, its rows and columns within the operands, and the processor must be of this
/// kind.
#[inline(always)]
unsafe fn tile<P: Processor, const VECTORS: usize, const ROWS: usize>(
    product: &mut Product<'_>,
    row: usize,
    column: usize,
) -> usize {
    let [down, along] = product.left_strides;
    let (right_stride, out_stride) = (product.right_stride, product.out_stride);
    // SAFETY: as the caller says: `depth` rows of `right` are within it with these columns, these rows of `left` over the
    // whole depth, and these rows and columns of `out`, which no other reference covers.
    unsafe {
        let left = product.left.as_ptr().add(row * down);
        let right = product.right.as_ptr().add(column);
        let out = product.out.as_mut_ptr().add(row * out_stride + column);
        let mut sums = [[P::all(0.0); VECTORS]; ROWS];
        for k in 0..product.depth {
            let mut vectors = [P::all(0.0); VECTORS];
            for (j, vector) in vectors.iter_mut().enumerate() {
                *vector = P::load(right.add(k * right_stride + j * P::LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let number = P::all(*left.add(i * down + k * along));
                for (sum, &vector) in sums.iter_mut().zip(&vectors) {
                    *sum = P::multiply_add_vectors(vector, number, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                let to = out.add(i * out_stride + j * P::LANES);
                match product.adds {
                    true => P::store(P::multiply_add_vectors(sum, P::all(1.0), P::load(to)), to),
                    false => P::store(sum, to),
                }
            }
        }
    }
    ROWS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        let number = |i: usize| ((i * i + seed) as f32 * 0.37).sin();
        (0..count).map(number).collect()
    }

    #[test]
    fn products_equal_the_reference_for_all_sizes_and_strides() {
        for (rows, columns, depth) in [
            (1, 16, 1),
            (2, 32, 3),
            (7, 48, 17),
            (13, 64, 33),
            (29, 240, 5),
            (14, 240, 5),
            (3, 16, 0),
        ] {
            for (adds, left_strides, out_gap) in [
                (false, [depth, 1], 0),
                (true, [depth + 3, 1], 5),
                (true, [1, rows], 0),
                (false, [2, 1], 1),
            ] {
                let left = numbers(rows * (depth + 3) + rows * depth, 1);
                let (right_stride, out_stride) = (columns + 2, columns + out_gap);
                let right = numbers(depth * right_stride, 2);
                let before = numbers(rows * out_stride, 3);
                let mut out = before.clone();
                multiply(Product {
                    rows,
                    columns,
                    depth,
                    out: &mut out,
                    out_stride,
                    adds,
                    left: &left,
                    left_strides,
                    right: &right,
                    right_stride,
                });
                for (i, (&found, &before)) in out.iter().zip(&before).enumerate() {
                    let (row, column) = (i / out_stride, i % out_stride);
                    let product = |k: usize| {
                        let left = left[row * left_strides[0] + k * left_strides[1]];
                        f64::from(left) * f64::from(right[k * right_stride + column])
                    };
                    let expected = match column < columns {
                        true => {
                            (0..depth).map(product).sum::<f64>() + if adds { f64::from(before) } else { 0.0 }
                        }
                        false => f64::from(before),
                    };
                    assert!(
                        (f64::from(found) - expected).abs() < 1e-5,
                        "{found} for {expected} at {row}, {column} of {rows}x{columns}x{depth}"
                    );
                }
            }
        }
    }

    #[test]
    fn an_element_does_not_depend_on_the_rest_of_the_product() {
        let (rows, columns, depth) = (31, 112, 40);
        let (left, right) = (numbers(rows * depth, 1), numbers(depth * columns, 2));
        let of = |first_row: usize, rows: usize, first_column: usize, taken: usize| {
            let mut out = vec![0f32; rows * taken];
            multiply(Product {
                rows,
                columns: taken,
                depth,
                out: &mut out,
                out_stride: taken,
                adds: false,
                left: &left[first_row * depth..],
                left_strides: [depth, 1],
                right: &right[first_column..],
                right_stride: columns,
            });
            out
        };
        let all = of(0, rows, 0, columns);
        for row in 0..rows {
            for column in (0..columns).step_by(COLUMNS) {
                let alone = of(row, 1, column, COLUMNS);
                assert_eq!(alone, all[row * columns + column..][..COLUMNS]);
            }
        }
    }

    #[test]
    #[should_panic(expected = "beyond its operands")]
    fn operands_out_of_bounds_are_refused() {
        multiply(Product {
            rows: 2,
            columns: 16,
            depth: 3,
            out: &mut [0.0; 32],
            out_stride: 16,
            adds: false,
            left: &[0.0; 5],
            left_strides: [3, 1],
            right: &[0.0; 48],
            right_stride: 16,
        });
    }
}
