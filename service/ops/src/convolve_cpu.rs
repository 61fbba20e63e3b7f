//! Convolution of a padded strip on the CPU, channels last. Nothing is unrolled: the `s * c` numbers that one row of a
//! filter looks at lie next to each other in the strip, and the next pixel's begin `stride * c` further on, which is a
//! matrix of overlapping rows. One product for each row of the filter adds it to some pixels of a row of the result, which
//! are in the first cache meanwhile.
#![allow(unsafe_code)] // Products of the gemm crate.

use candle_core::Result;
use gemm::Parallelism;
use rayon::prelude::*;

/// Output channels are counted in vectors of the widest processors.
const VECTOR: usize = 16;
/// Pixels of a product: up to so many, the gemm crate takes the filter as it lies.
const PIXELS: usize = 48;
/// Multiplications of a task at least.
const LEAST_WORK: usize = 1 << 20;

/// A filter with its output channels innermost.
pub(crate) struct Filter {
    /// `[r, s * c, lanes]`; channels after the last are zeros.
    numbers: Vec<f32>,
    outputs: usize,
    lanes: usize,
    rows: usize,
    columns: usize,
    channels: usize,
}

impl Filter {
    /// Of `[k, r, s, c]`: output channels, rows, columns, input channels.
    ///
    /// # Errors
    /// When there are not as many numbers.
    pub(crate) fn new(filter: &[f32], [outputs, rows, columns, channels]: [usize; 4]) -> Result<Filter> {
        let taps = rows * columns * channels;
        if filter.len() != outputs * taps || filter.is_empty() {
            candle_core::bail!(
                "a filter of {} numbers for {:?}",
                filter.len(),
                [outputs, rows, columns, channels]
            );
        }
        let lanes = outputs.next_multiple_of(VECTOR);
        let mut numbers = vec![0.0; taps * lanes];
        for (output, of_output) in filter.chunks_exact(taps).enumerate() {
            for (to, &from) in numbers[output..].iter_mut().step_by(lanes).zip(of_output) {
                *to = from;
            }
        }
        Ok(Filter {
            numbers,
            outputs,
            lanes,
            rows,
            columns,
            channels,
        })
    }
}

/// Every output that lies wholly in the strip `x` `[rows, width, c]` (it is padded already), with the bias `[k]` added:
/// `[rows_out, width_out, k]`, where `rows_out` is `(rows - r) / stride + 1`, and so is `width_out`. As
/// `torch.nn.functional.conv2d`. The numbers do not depend on how many threads there are.
///
/// # Errors
/// When sizes do not fit.
pub(crate) fn convolve(
    (x, [rows, width]): (&[f32], [usize; 2]),
    filter: &Filter,
    bias: &[f32],
    stride: usize,
    out: &mut [f32],
) -> Result<()> {
    let fits = stride > 0
        && rows >= filter.rows
        && width >= filter.columns
        && x.len() == rows * width * filter.channels
        && bias.len() == filter.outputs;
    let (rows_out, width_out) = match fits {
        true => (
            (rows - filter.rows) / stride + 1,
            (width - filter.columns) / stride + 1,
        ),
        false => (0, 0),
    };
    let row_out = width_out * filter.outputs;
    if !fits || out.len() != rows_out * row_out {
        candle_core::bail!(
            "a convolution of {rows} x {width} pixels, {} numbers, to {} numbers",
            x.len(),
            out.len()
        );
    }
    // Pieces of a row where rows are few, several rows where they are short.
    let work_of_pixel = filter.lanes * filter.rows * filter.columns * filter.channels;
    let pixels = (LEAST_WORK / work_of_pixel).max(1).next_multiple_of(PIXELS);
    let piece = pixels.min(width_out);
    let pieces: Vec<(usize, usize, &mut [f32])> = out
        .chunks_exact_mut(row_out)
        .enumerate()
        .flat_map(|(row, of_row)| {
            let pieces = of_row.chunks_mut(piece * filter.outputs).enumerate();
            pieces.map(move |(i, numbers)| (row, i * piece, numbers))
        })
        .collect();
    pieces
        .into_par_iter()
        .with_min_len((pixels / piece).max(1))
        .for_each(|(row, first, numbers)| {
            let begin = (row * stride * width + first * stride) * filter.channels;
            pixels_of_row(&x[begin..], width, filter, bias, stride, numbers);
        });
    Ok(())
}

/// Some pixels of a row of the result; `x` begins where the first looks at.
fn pixels_of_row(x: &[f32], width: usize, filter: &Filter, bias: &[f32], stride: usize, out: &mut [f32]) {
    let (outputs, lanes) = (filter.outputs, filter.lanes);
    let run = filter.columns * filter.channels;
    let step = stride * filter.channels;
    let mut wide = [0f32; PIXELS * VECTOR];
    for (part, out) in out.chunks_mut(PIXELS * outputs).enumerate() {
        let count = out.len() / outputs;
        let x = &x[part * PIXELS * step..];
        // Channels that fill no vector are computed beside the result, if they are few, and copied.
        let (target, distance) = match lanes == VECTOR && outputs < lanes {
            true => (&mut wide[..count * lanes], lanes),
            false => (&mut out[..], outputs),
        };
        for pixel in target.chunks_exact_mut(distance) {
            pixel[..outputs].copy_from_slice(bias);
        }
        for row in 0..filter.rows {
            let from = &x[row * width * filter.channels..];
            let taps = &filter.numbers[row * run * lanes..][..run * lanes];
            // The last number that is looked at.
            debug_assert!((count - 1) * step + run <= from.len());
            // SAFETY: `target` is [count, distance], of which `distance` or fewer are written; `taps` is [run, lanes]; the
            // sizes of the strip were compared with those of the result, so that what each pixel looks at is within it.
            unsafe {
                gemm::gemm(
                    distance,
                    count,
                    run,
                    target.as_mut_ptr(),
                    distance as isize,
                    1,
                    true,
                    taps.as_ptr(),
                    lanes as isize,
                    1,
                    from.as_ptr(),
                    step as isize,
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
        if distance != outputs {
            for (to, from) in out.chunks_exact_mut(outputs).zip(wide.chunks_exact(lanes)) {
                to.copy_from_slice(&from[..outputs]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * i + seed) as f32 * 0.37).sin()).collect()
    }

    #[test]
    fn convolutions_equal_their_definition() -> Result<()> {
        // Output channels, rows and columns of the filter, input channels; stride; rows and columns of the strip.
        let cases = [
            ([16, 3, 3, 16], 1, [5, 130]),
            ([3, 3, 3, 16], 1, [4, 50]),
            ([20, 3, 3, 5], 1, [6, 7]),
            ([64, 1, 1, 32], 1, [3, 49]),
            ([32, 3, 3, 8], 2, [9, 100]),
            ([7, 2, 3, 1], 3, [2, 3]),
            ([1, 1, 1, 1], 1, [1, 1]),
        ];
        for (shape, stride, [rows, width]) in cases {
            let [outputs, high, wide, channels] = shape;
            let (filter, bias) = (numbers(shape.iter().product(), 1), numbers(outputs, 2));
            let x = numbers(rows * width * channels, 3);
            let (rows_out, width_out) = ((rows - high) / stride + 1, (width - wide) / stride + 1);
            let mut out = vec![f32::NAN; rows_out * width_out * outputs];
            convolve(
                (&x, [rows, width]),
                &Filter::new(&filter, shape)?,
                &bias,
                stride,
                &mut out,
            )?;
            for (at, &found) in out.iter().enumerate() {
                let (k, pixel) = (at % outputs, at / outputs);
                let (row, column) = (pixel / width_out * stride, pixel % width_out * stride);
                let mut sum = f64::from(bias[k]);
                for tap in 0..high * wide * channels {
                    let (r, s, c) = (tap / channels / wide, tap / channels % wide, tap % channels);
                    let seen = x[((row + r) * width + column + s) * channels + c];
                    sum += f64::from(filter[k * high * wide * channels + tap]) * f64::from(seen);
                }
                assert!(
                    (f64::from(found) - sum).abs() < 1e-4,
                    "{shape:?} {at}: {found} {sum}"
                );
            }
        }
        Ok(())
    }

    #[test]
    fn sizes_must_fit() -> Result<()> {
        let filter = Filter::new(&[1.0; 36], [4, 3, 3, 1])?;
        let strip = [1.0; 25];
        let mut out = [0.0; 36];
        convolve((&strip, [5, 5]), &filter, &[0.0; 4], 1, &mut out)?;
        assert_eq!(out, [9.0; 36]);
        assert!(convolve((&strip, [5, 5]), &filter, &[0.0; 4], 1, &mut out[..32]).is_err());
        assert!(convolve((&strip, [5, 5]), &filter, &[0.0; 3], 1, &mut out).is_err());
        assert!(convolve((&strip[..20], [5, 5]), &filter, &[0.0; 4], 1, &mut out).is_err());
        assert!(convolve((&strip, [2, 12]), &filter, &[0.0; 4], 1, &mut out).is_err());
        assert!(Filter::new(&[1.0; 35], [4, 3, 3, 1]).is_err());
        Ok(())
    }
}
