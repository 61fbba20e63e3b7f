//! [`crate::convolve()`] on the CPU, without unrolling patches: neighbouring positions lie side by side, so what a row of a
//! filter looks at is one run of memory, and the runs of neighbouring outputs overlap. One product for each row of outputs
//! and row of the filter takes them as a matrix whose rows overlap, and adds to what the rows before gave.
#![allow(unsafe_code)] // Products of matrices whose rows overlap.

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor};
use gemm::Parallelism;
use rayon::prelude::*;

use crate::convolve::{Filter, Onto, Shape};
use crate::place::{apart_from, with_rows, write_rows};
use crate::rows::with_numbers;

/// Tasks for each thread, so that none waits for long.
const TASKS: usize = 4;

/// Positions that one product is taken over at most and at least: what it packs stays in a cache, and it is worth the
/// packing.
const MOST_POSITIONS: usize = 512;
const LEAST_POSITIONS: usize = 32;

/// Rows of a task at most. More make no product faster.
const MOST_ROWS: usize = 8;

/// `[out, in, taps]` to `[taps, in, out]`, f32.
pub(crate) fn taps_first(weight: &Tensor) -> Result<Tensor> {
    let (outputs, inputs, taps) = weight.dims3()?;
    let mut held = vec![0f32; outputs * inputs * taps];
    with_numbers(weight, |numbers| {
        held.par_chunks_mut(inputs * outputs)
            .enumerate()
            .for_each(|(tap, of_tap)| {
                for (input, of_input) in of_tap.chunks_mut(outputs).enumerate() {
                    for (output, number) in of_input.iter_mut().enumerate() {
                        *number = numbers[(output * inputs + input) * taps + tap];
                    }
                }
            });
        Ok(())
    })?;
    Tensor::from_vec(held, (taps, inputs, outputs), weight.device())
}

/// A convolution whose shapes were checked.
pub(crate) fn convolve(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    if out.dtype() != DType::F32 {
        // Narrow numbers are computed with in f32, and rounded once.
        let wide = out.to_dtype(DType::F32)?;
        convolve_f32(x, filter, bias, shape, &wide, onto)?;
        return with_rows(&wide, shape.outputs, |wide| {
            write_rows(out, shape.outputs, |row, numbers| {
                numbers.copy_from_slice(wide.row(row))
            })
        });
    }
    convolve_f32(&apart_from(x, out)?, filter, bias, shape, out, onto)
}

fn convolve_f32(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    let bias = match bias {
        Some(bias) => bias.to_dtype(DType::F32)?.to_vec1::<f32>()?,
        None => vec![0.0; shape.outputs],
    };
    let mut shape = *shape;
    if shape.is_product() {
        // Where every position is by itself, all of them are one row.
        let positions = shape.positions();
        (shape.batch, shape.sides, shape.out) = (1, [1, 1, positions], [1, 1, positions]);
    }
    with_numbers(x, |x| {
        with_numbers(&filter.held, |filter| {
            let work = Work {
                x,
                filter,
                bias: &bias,
                shape,
                onto,
                // One tap is kept as it came.
                stride_of_input: if shape.taps() == 1 { 1 } else { shape.outputs },
                stride_of_output: if shape.taps() == 1 { shape.inputs } else { 1 },
            };
            out.inplace_op1(&work)
        })
    })
}

struct Work<'a> {
    x: &'a [f32],
    filter: &'a [f32],
    bias: &'a [f32],
    shape: Shape,
    onto: Onto,
    /// From an input of the filter to the next, and from an output.
    stride_of_input: usize,
    stride_of_output: usize,
}

/// Some rows of one frame of the outputs, or some columns of one row.
#[derive(Clone, Copy)]
struct Part {
    /// Frames of all maps before it.
    frame: usize,
    first_row: usize,
    rows: usize,
    first_column: usize,
    columns: usize,
}

impl InplaceOp1 for Work<'_> {
    fn name(&self) -> &'static str {
        "convolve"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::F32(numbers), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            candle_core::bail!("contiguous f32 numbers are expected");
        };
        self.all(&mut numbers[start..end]);
        Ok(())
    }
}

impl Work<'_> {
    fn all(&self, out: &mut [f32]) {
        let Shape {
            out: sides, outputs, ..
        } = self.shape;
        let [_, height, width] = sides;
        let tasks = TASKS * rayon::current_num_threads();
        for (frame, plane) in out.chunks_mut(height * width * outputs).enumerate() {
            if height >= tasks / 2 {
                let rows = (height / tasks).clamp(1, MOST_ROWS);
                plane
                    .par_chunks_mut(rows * width * outputs)
                    .enumerate()
                    .for_each(|(index, out)| {
                        let part = Part {
                            frame,
                            first_row: index * rows,
                            rows: out.len() / (width * outputs),
                            first_column: 0,
                            columns: width,
                        };
                        self.part(part, out);
                    });
                continue;
            }
            let columns = (width * height)
                .div_ceil(tasks)
                .clamp(LEAST_POSITIONS, MOST_POSITIONS);
            plane
                .par_chunks_mut(width * outputs)
                .enumerate()
                .for_each(|(first_row, row)| {
                    row.par_chunks_mut(columns * outputs)
                        .enumerate()
                        .for_each(|(index, out)| {
                            let part = Part {
                                frame,
                                first_row,
                                rows: 1,
                                first_column: index * columns,
                                columns: out.len() / outputs,
                            };
                            self.part(part, out);
                        });
                });
        }
    }

    fn part(&self, part: Part, out: &mut [f32]) {
        for position in out.chunks_mut(self.shape.outputs) {
            match self.onto {
                Onto::Nothing => position.copy_from_slice(self.bias),
                Onto::Itself => {
                    for (number, bias) in position.iter_mut().zip(self.bias) {
                        *number += bias;
                    }
                }
            }
        }
        let Shape {
            sides,
            kernel,
            steps,
            out: written,
            ..
        } = self.shape;
        let (map, frame) = (part.frame / written[0], part.frame % written[0]);
        for frame_of_filter in 0..kernel[0] {
            let frame = (frame * steps.strides[0] + frame_of_filter).checked_sub(steps.before[0]);
            let Some(frame) = frame.filter(|frame| *frame < sides[0]) else {
                continue;
            };
            for row_of_filter in 0..kernel[1] {
                let row_of_all = frame_of_filter * kernel[1] + row_of_filter;
                self.row_of_filter(part, map * sides[0] + frame, row_of_filter, row_of_all, out);
            }
        }
    }

    /// Adds what one row of the filter gives, of frame `frame` of all maps.
    fn row_of_filter(
        &self,
        part: Part,
        frame: usize,
        row_of_filter: usize,
        row_of_all: usize,
        out: &mut [f32],
    ) {
        let Shape {
            sides,
            kernel,
            steps,
            inputs,
            outputs,
            ..
        } = self.shape;
        let ([_, height, width], [_, step_down, step]) = (sides, steps.strides);
        // Rows of the part that look at a row of the map.
        let down = |row: usize| (part.first_row + row) * step_down + row_of_filter;
        let looks = |row: &usize| {
            down(*row)
                .checked_sub(steps.before[1])
                .is_some_and(|y| y < height)
        };
        let (Some(first), Some(last)) = ((0..part.rows).find(looks), (0..part.rows).rfind(looks)) else {
            return;
        };
        let row_at = |row: usize| (frame * height + down(row) - steps.before[1]) * width * inputs;
        // Columns whose taps are all inside the map: the others are few, and are taken one by one over all rows.
        let taps_of = |column: usize| {
            let begin = (part.first_column + column) * step;
            let first = steps.before[2].saturating_sub(begin);
            let last = kernel[2].min((width + steps.before[2]).saturating_sub(begin));
            (first, last.max(first))
        };
        let is_whole = |column: &usize| taps_of(*column) == (0, kernel[2]);
        let whole = match (0..part.columns).find(is_whole) {
            Some(from) => from..(from..part.columns).rfind(is_whole).map_or(from, |last| last + 1),
            None => 0..0,
        };
        let filter_at = |tap: usize| (row_of_all * kernel[2] + tap) * inputs * outputs;
        for column in (0..whole.start).chain(whole.end..part.columns) {
            let (tap, end) = taps_of(column);
            if tap == end {
                continue;
            }
            let x = (part.first_column + column) * step + tap - steps.before[2];
            self.multiply_any(Product {
                out: &mut out[(first * part.columns + column) * outputs..],
                out_stride: part.columns * outputs,
                positions: last - first + 1,
                x: &self.x[row_at(first) + x * inputs..],
                x_stride: step_down * width * inputs,
                filter: &self.filter[filter_at(tap)..],
                depth: (end - tap) * inputs,
            });
        }
        for row in first..=last {
            for column in whole.clone().step_by(MOST_POSITIONS) {
                let x = (part.first_column + column) * step - steps.before[2];
                self.multiply_any(Product {
                    out: &mut out[(row * part.columns + column) * outputs..],
                    out_stride: outputs,
                    positions: MOST_POSITIONS.min(whole.end - column),
                    x: &self.x[row_at(row) + x * inputs..],
                    x_stride: step * inputs,
                    filter: &self.filter[filter_at(0)..],
                    depth: kernel[2] * inputs,
                });
            }
        }
    }

    /// One position alone would go another way, with its sums in another order: it is taken twice, so that what an output
    /// is does not depend on how many are computed with it.
    fn multiply_any(&self, product: Product<'_>) {
        if product.positions > 1 {
            return self.multiply(product);
        }
        let position = &mut product.out[..self.shape.outputs];
        let mut twice = [&*position, &*position].concat();
        self.multiply(Product {
            out: &mut twice,
            out_stride: self.shape.outputs,
            positions: 2,
            x_stride: 0,
            ..product
        });
        product.out[..self.shape.outputs].copy_from_slice(&twice[..self.shape.outputs]);
    }

    fn multiply(&self, product: Product<'_>) {
        let Product {
            out,
            out_stride,
            positions,
            x,
            x_stride,
            filter,
            depth,
        } = product;
        let outputs = self.shape.outputs;
        let reach = |count: usize, stride: usize, more: usize| (count - 1) * stride + more;
        assert!(
            reach(positions, out_stride, outputs) <= out.len()
                && reach(positions, x_stride, depth) <= x.len()
                && reach(depth, self.stride_of_input, 1) + (outputs - 1) * self.stride_of_output
                    <= filter.len(),
            "a product beyond its operands"
        );
        // SAFETY: all that is read and written was just seen to be inside of the slices; rows of the result do not
        // overlap, as their distance is the outputs' number at least.
        unsafe {
            gemm::gemm(
                positions,
                outputs,
                depth,
                out.as_mut_ptr(),
                1,
                out_stride as isize,
                true,
                x.as_ptr(),
                1,
                x_stride as isize,
                filter.as_ptr(),
                self.stride_of_output as isize,
                self.stride_of_input as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// `out += x filter` over positions: rows of `x` of `depth` numbers, which may overlap.
struct Product<'a> {
    out: &'a mut [f32],
    out_stride: usize,
    positions: usize,
    x: &'a [f32],
    x_stride: usize,
    filter: &'a [f32],
    depth: usize,
}
