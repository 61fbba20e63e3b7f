//! [`crate::convolve()`] on the CPU, without unrolling patches: maps are channels-last, so the inputs of one filter
//! row are contiguous, and those of neighbouring outputs overlap. One matrix product per output row and filter row
//! takes them as a matrix with overlapping rows, and accumulates.
#![allow(unsafe_code)] // Products of matrices whose rows overlap.

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor};
use gemm::Parallelism;
use rayon::prelude::*;

use crate::convolve::{Filter, MapShape, Onto, TapOrder};
use crate::place::{apart_from, with_rows, write_rows};
use crate::rows::with_numbers;

/// Tasks per thread, to balance the load.
const TASKS: usize = 4;

/// Bounds of the positions of one matrix product: its packed operand stays in a cache, and amortizes the packing.
const MAX_POSITIONS: usize = 512;
const MIN_POSITIONS: usize = 32;

/// Most elements of a product that `gemm` may compute as dot products, where both operands have their depth in place:
/// these add in another order.
const MAX_DOT_PRODUCTS: usize = 16 * 16;

/// Maximum of rows of a task. More rows make no product faster.
const MAX_ROWS: usize = 8;

/// Permutes `[out, in, taps]` to `[taps, in, out]`, f32, with those taps that the order has.
pub(crate) fn taps_first(weight: &Tensor, order: TapOrder) -> Result<Tensor> {
    let (outputs, inputs, all) = weight.dims3()?;
    let taps = order.kernel.iter().product::<usize>();
    let mut held = vec![0f32; outputs * inputs * taps];
    with_numbers(weight, |numbers| {
        held.par_chunks_mut(inputs * outputs)
            .enumerate()
            .for_each(|(tap, of_tap)| {
                let tap = order.source(tap);
                for (input, of_input) in of_tap.chunks_mut(outputs).enumerate() {
                    for (output, number) in of_input.iter_mut().enumerate() {
                        *number = numbers[(output * inputs + input) * all + tap];
                    }
                }
            });
        Ok(())
    })?;
    Tensor::from_vec(held, (taps, inputs, outputs), weight.device())
}

/// A convolution with validated shapes.
pub(crate) fn convolve(
    x: &Tensor,
    filter: &Filter,
    bias: Option<&Tensor>,
    shape: &MapShape,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    if out.dtype() != DType::F32 {
        // Narrow dtypes are computed in f32 and rounded once.
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
    shape: &MapShape,
    out: &Tensor,
    onto: Onto,
) -> Result<()> {
    let bias = match bias {
        Some(bias) => bias.to_dtype(DType::F32)?.to_vec1::<f32>()?,
        None => vec![0.0; shape.outputs],
    };
    let mut shape = *shape;
    if shape.is_product() {
        // A 1x1 convolution treats all positions as one row.
        let positions = shape.positions();
        (shape.batch, shape.sides, shape.out) = (1, [1, 1, positions], [1, 1, positions]);
    }
    with_numbers(x, |x| {
        with_numbers(&filter.held, |filter| {
            let work = ConvolutionTask {
                x,
                filter,
                bias: &bias,
                shape,
                onto,
                // A filter of one tap keeps its original layout.
                stride_of_input: if shape.taps() == 1 { 1 } else { shape.outputs },
                stride_of_output: if shape.taps() == 1 { shape.inputs } else { 1 },
            };
            out.inplace_op1(&work)
        })
    })
}

struct ConvolutionTask<'a> {
    x: &'a [f32],
    filter: &'a [f32],
    bias: &'a [f32],
    shape: MapShape,
    onto: Onto,
    /// Strides of the filter, by input channel and by output channel.
    stride_of_input: usize,
    stride_of_output: usize,
}

/// Some rows of one frame of the outputs, or some columns of one row.
#[derive(Clone, Copy)]
struct Part {
    /// Index of the frame over the whole batch.
    frame: usize,
    first_row: usize,
    rows: usize,
    first_column: usize,
    columns: usize,
}

impl InplaceOp1 for ConvolutionTask<'_> {
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

impl ConvolutionTask<'_> {
    fn all(&self, out: &mut [f32]) {
        let MapShape {
            out: sides, outputs, ..
        } = self.shape;
        let [_, height, width] = sides;
        let tasks = TASKS * rayon::current_num_threads();
        if self.shape.is_by_columns() {
            return self.by_columns(out, tasks);
        }
        for (frame, plane) in out.chunks_mut(height * width * outputs).enumerate() {
            if height >= tasks / 2 {
                let rows = (height / tasks).clamp(1, MAX_ROWS);
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
                .clamp(MIN_POSITIONS, MAX_POSITIONS);
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

    /// Rows are contiguous in memory, and so are the inputs of one tap: positions of several rows are one product.
    fn by_columns(&self, out: &mut [f32], tasks: usize) {
        let MapShape {
            sides: [_, height, width],
            out: [_, written, _],
            kernel: [_, taps, _],
            inputs,
            outputs,
            ..
        } = self.shape;
        let positions = (written * width)
            .div_ceil(tasks)
            .clamp(MIN_POSITIONS, MAX_POSITIONS);
        let maps = out.chunks_mut(written * width * outputs);
        for (x, map) in self.x.chunks(height * width * inputs).zip(maps) {
            map.par_chunks_mut(positions * outputs)
                .enumerate()
                .for_each(|(index, out)| {
                    self.begin(out);
                    for tap in 0..taps {
                        self.multiply_any(RowProduct {
                            positions: out.len() / outputs,
                            out: &mut *out,
                            out_stride: outputs,
                            x: &x[(index * positions + tap * width) * inputs..],
                            x_stride: inputs,
                            filter: &self.filter[tap * inputs * outputs..],
                            depth: inputs,
                        });
                    }
                });
        }
    }

    /// Writes the bias to `out`, or adds it to the numbers in `out`.
    fn begin(&self, out: &mut [f32]) {
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
    }

    fn part(&self, part: Part, out: &mut [f32]) {
        self.begin(out);
        let MapShape {
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

    /// Adds the contribution of one filter row, for frame `frame` of the batch.
    fn row_of_filter(
        &self,
        part: Part,
        frame: usize,
        row_of_filter: usize,
        row_of_all: usize,
        out: &mut [f32],
    ) {
        let MapShape {
            sides,
            kernel,
            steps,
            inputs,
            outputs,
            ..
        } = self.shape;
        let ([_, height, width], [_, step_down, step]) = (sides, steps.strides);
        // Rows of the part whose inputs include a row of the map.
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
        // Columns whose taps are all inside the map. The border columns are few, and are computed one by one over all
        // rows.
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
            self.multiply_any(RowProduct {
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
            for column in whole.clone().step_by(MAX_POSITIONS) {
                let x = (part.first_column + column) * step - steps.before[2];
                self.multiply_any(RowProduct {
                    out: &mut out[(row * part.columns + column) * outputs..],
                    out_stride: outputs,
                    positions: MAX_POSITIONS.min(whole.end - column),
                    x: &self.x[row_at(row) + x * inputs..],
                    x_stride: step * inputs,
                    filter: &self.filter[filter_at(0)..],
                    depth: kernel[2] * inputs,
                });
            }
        }
    }

    /// Few positions would take another code path, with another order of summation: each of them is computed several
    /// times, so that an output does not depend on the number of positions computed with it.
    fn multiply_any(&self, product: RowProduct<'_>) {
        let outputs = self.shape.outputs;
        let least = match self.stride_of_input {
            1 => (MAX_DOT_PRODUCTS / outputs + 1).max(2),
            _ => 2,
        };
        if product.positions >= least {
            return self.multiply(product);
        }
        for position in 0..product.positions {
            let out = &mut product.out[position * product.out_stride..][..outputs];
            let mut repeated = out.repeat(least);
            self.multiply(RowProduct {
                out: &mut repeated,
                out_stride: outputs,
                positions: least,
                x: &product.x[position * product.x_stride..],
                x_stride: 0,
                filter: product.filter,
                depth: product.depth,
            });
            out.copy_from_slice(&repeated[..outputs]);
        }
    }

    fn multiply(&self, product: RowProduct<'_>) {
        let RowProduct {
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
        // SAFETY: all accesses were checked to be inside of the slices; rows of the result do not overlap, as their
        // stride is at least the number of outputs.
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

/// `out += x filter` over positions: rows of `x` of `depth` elements, which may overlap.
struct RowProduct<'a> {
    out: &'a mut [f32],
    out_stride: usize,
    positions: usize,
    x: &'a [f32],
    x_stride: usize,
    filter: &'a [f32],
    depth: usize,
}
