//! Convolution of a strip of rows.
//!
//! A strip is first read into a *padded strip*: the rows that its outputs look at, normalised, activated and
//! enlarged as the layer wants them, with zeros only where the map truly ends. The convolution itself then has
//! no edges, and its outputs do not depend on where strips begin. Neither the normalised nor the enlarged map
//! ever exists as a whole.

use candle_core::{DType, Device, Result, Storage, Tensor};
use gpu::Weight;
use rayon::prelude::*;

use super::norm::Affine;

/// Bounds of the buffer that a convolution unrolls patches into: a third of the whole unrolled strip at most.
const LEAST_UNROLLED_BYTES: usize = 1 << 20;
const MOST_UNROLLED_BYTES: usize = 32 << 20;

/// Bytes in f32 that channels are read into a strip with at a time where that is composed, unless one has more.
pub(super) const PART_BYTES: usize = 32 << 20;

/// Zeros around a map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Padding {
    pub(super) before: usize,
    pub(super) after: usize,
}

impl Padding {
    /// None: 1x1 convolutions.
    pub(super) const NONE: Padding = Padding { before: 0, after: 0 };
    /// What keeps the size under 3x3.
    pub(super) const AROUND: Padding = Padding { before: 1, after: 1 };
    /// `Downsample2D` pads below and on the right only.
    pub(super) const BEHIND: Padding = Padding { before: 0, after: 1 };
}

/// How rows of a map are read into a padded strip.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading<'a> {
    /// Group norm as a factor and a summand per channel, followed by SiLU.
    pub(super) normed: Option<&'a Affine>,
    /// Nearest-neighbour enlargement by two.
    pub(super) enlarged: bool,
    pub(super) padding: Padding,
}

impl Reading<'_> {
    /// Height or width of what is read, of a map of this height or width.
    pub(super) fn size(&self, size: usize) -> usize {
        if self.enlarged { size * 2 } else { size }
    }

    /// Rows `first..first + rows` of the padded map (counted from its topmost row of zeros) of `map`
    /// `[1, c, h, w]`, as `[1, c, rows, w + padding]`.
    pub(super) fn strip(&self, map: &Tensor, first: usize, rows: usize) -> Result<Tensor> {
        match map.device() {
            Device::Cpu if map.dtype() == DType::F32 => self.strip_on_cpu(map, first, rows),
            // Nothing to be done to it: a view, where a copy would be a whole map in an undivided decode.
            _ if self.is_plain() => map.narrow(2, first, rows),
            _ => self.strip_by_operations(map, first, rows),
        }
    }

    fn is_plain(&self) -> bool {
        self.normed.is_none() && !self.enlarged && self.padding.before + self.padding.after == 0
    }

    fn strip_on_cpu(&self, map: &Tensor, first: usize, rows: usize) -> Result<Tensor> {
        let (_, channels, map_height, map_width) = map.dims4()?;
        let (height, width) = (self.size(map_height), self.size(map_width));
        let padded_width = width + self.padding.before + self.padding.after;
        let affine = self.normed.map(Affine::to_vecs).transpose()?;
        let mut padded = vec![0f32; channels * rows * padded_width];
        with_f32_slice(map, |data| {
            padded
                .par_chunks_mut(rows * padded_width)
                .enumerate()
                .for_each(|(channel, target)| {
                    let plane = &data[channel * map_height * map_width..][..map_height * map_width];
                    for (row, target) in target.chunks_mut(padded_width).enumerate() {
                        let Some(y) = (first + row)
                            .checked_sub(self.padding.before)
                            .filter(|y| *y < height)
                        else {
                            continue;
                        };
                        let y = if self.enlarged { y / 2 } else { y };
                        let source = &plane[y * map_width..][..map_width];
                        let target = &mut target[self.padding.before..][..width];
                        let wide = if self.enlarged { 2 } else { 1 };
                        match &affine {
                            Some((factors, summands)) => {
                                let (factor, summand) = (factors[channel], summands[channel]);
                                for (target, value) in target.chunks_mut(wide).zip(source) {
                                    let value = value * factor + summand;
                                    target.fill(value / (1.0 + (-value).exp()));
                                }
                            }
                            None if self.enlarged => {
                                target
                                    .chunks_mut(wide)
                                    .zip(source)
                                    .for_each(|(pair, value)| pair.fill(*value));
                            }
                            None => target.copy_from_slice(source),
                        }
                    }
                });
        })?;
        Tensor::from_vec(padded, (1, channels, rows, padded_width), &Device::Cpu)
    }

    /// The same by tensor operations, wherever the map is. Channels are taken some at a time, so that the
    /// temporaries in f32 stay small beside the strip.
    fn strip_by_operations(&self, map: &Tensor, first: usize, rows: usize) -> Result<Tensor> {
        let (_, channels, map_height, map_width) = map.dims4()?;
        let height = self.size(map_height);
        let padded_width = self.size(map_width) + self.padding.before + self.padding.after;
        // The rows that are not zeros: from `top` up to `bottom`, counted in what is read.
        let top = first.saturating_sub(self.padding.before).min(height);
        let bottom = (first + rows).saturating_sub(self.padding.before).min(height);
        let zeros_above = self.padding.before.saturating_sub(first).min(rows);
        let zeros_below = rows - zeros_above - (bottom - top);
        let part = PART_BYTES / (rows * padded_width * size_of::<f32>()).max(1);
        let part = part.clamp(1, channels);
        let padded = Tensor::zeros((1, channels, rows, padded_width), map.dtype(), map.device())?;
        for channel in (0..channels).step_by(part) {
            let part = part.min(channels - channel);
            let scale = if self.enlarged { 2 } else { 1 };
            let (map_top, map_bottom) = (top / scale, bottom.div_ceil(scale));
            let mut piece = map
                .narrow(1, channel, part)?
                .narrow(2, map_top, map_bottom - map_top)?;
            if let Some(affine) = self.normed {
                piece = affine.apply(&piece, channel)?.silu()?.to_dtype(map.dtype())?;
            }
            if self.enlarged {
                piece = piece
                    .contiguous()?
                    .upsample_nearest2d((map_bottom - map_top) * 2, map_width * 2)?
                    .narrow(2, top - map_top * 2, bottom - top)?;
            }
            let piece = piece
                .pad_with_zeros(2, zeros_above, zeros_below)?
                .pad_with_zeros(3, self.padding.before, self.padding.after)?
                .contiguous()?;
            padded.slice_set(&piece, 1, channel)?;
        }
        Ok(padded)
    }
}

/// A convolution with its bias.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    /// `[out, in, k, k]`. One that is held quantized is dequantized whenever it is run: convolutions are small.
    weight: Weight,
    /// `[out]`.
    bias: Tensor,
    stride: usize,
}

impl Convolution {
    /// Of a weight `[out, in, k, k]` and a bias `[out]`.
    ///
    /// # Errors
    /// When the weight has another rank.
    pub(super) fn new(weight: Weight, bias: Tensor, stride: usize) -> Result<Convolution> {
        if weight.dims().len() != 4 {
            candle_core::bail!("a convolution with a weight of shape {:?}", weight.dims())
        }
        let weight = match weight {
            Weight::Full(weight) => Weight::Full(weight.contiguous()?),
            quantized @ Weight::Quantized(_) => quantized,
        };
        Ok(Convolution {
            weight,
            bias: bias.contiguous()?,
            stride,
        })
    }

    pub(super) fn out_channels(&self) -> usize {
        self.weight.dims()[0]
    }

    fn kernel(&self) -> usize {
        self.weight.dims()[2]
    }

    /// The weight as a matrix `[out, in * k * k]` in this dtype.
    fn matrix(&self, dtype: DType) -> Result<Tensor> {
        let (rows, columns) = gpu::rows_and_columns(self.weight.dims());
        in_full(&self.weight, dtype)?.reshape((rows, columns))
    }

    /// Rows of a padded strip that so many rows of outputs look at.
    pub(super) fn rows_in(&self, rows_out: usize) -> usize {
        (rows_out - 1) * self.stride + self.kernel()
    }

    /// The row of the padded map that a row of outputs begins at.
    pub(super) fn first_row_in(&self, row_out: usize) -> usize {
        row_out * self.stride
    }

    /// Every output that lies wholly in `padded` `[1, in, h, w]`.
    pub(super) fn forward(&self, padded: &Tensor) -> Result<Tensor> {
        let (out_channels, in_channels, kernel) = (self.out_channels(), self.weight.dims()[1], self.kernel());
        let (_, _, height, width) = padded.dims4()?;
        let (rows, columns) = (
            (height - kernel) / self.stride + 1,
            (width - kernel) / self.stride + 1,
        );
        let slab = slab_rows(in_channels, kernel, rows, columns, padded.dtype().size_in_bytes());
        match padded.device() {
            Device::Cpu if padded.dtype() == DType::F32 => {
                let geometry = Geometry {
                    in_channels,
                    kernel,
                    stride: self.stride,
                    width,
                    height,
                    columns,
                };
                self.forward_on_cpu(padded, geometry, out_channels, rows, slab)
            }
            _ => self.forward_by_operations(padded, out_channels, (rows, columns), slab),
        }
    }

    /// Patches of some rows at a time are unrolled into a matrix, and one multiplication does them all.
    /// candle's own convolution on the CPU transposes the whole map first and unrolls value by value: it takes
    /// several times as long.
    fn forward_on_cpu(
        &self,
        padded: &Tensor,
        geometry: Geometry,
        out_channels: usize,
        rows: usize,
        slab: usize,
    ) -> Result<Tensor> {
        let columns = geometry.columns;
        let unrolled_rows = geometry.in_channels * geometry.kernel * geometry.kernel;
        let weight = self.matrix(DType::F32)?;
        let bias = self.bias.to_vec1::<f32>()?;
        let mut out = vec![0f32; out_channels * rows * columns];
        for first in (0..rows).step_by(slab) {
            let count = slab.min(rows - first);
            let unrolled = with_f32_slice(padded, |data| geometry.unroll(data, first, count))?;
            let unrolled = Tensor::from_vec(unrolled, (unrolled_rows, count * columns), &Device::Cpu)?;
            let product = weight.matmul(&unrolled)?;
            with_f32_slice(&product, |product| {
                out.par_chunks_mut(rows * columns)
                    .zip(product.par_chunks(count * columns))
                    .zip(&bias)
                    .for_each(|((plane, product), bias)| {
                        let target = &mut plane[first * columns..][..count * columns];
                        target
                            .iter_mut()
                            .zip(product)
                            .for_each(|(target, value)| *target = value + bias);
                    });
            })?;
        }
        Tensor::from_vec(out, (1, out_channels, rows, columns), &Device::Cpu)
    }

    /// The same by tensor operations: a card's matrix units multiply in the narrow dtype and add in f32, and all that
    /// is needed can be counted. (cuDNN as candle drives it does neither: it is given no math type, and asks for a
    /// workspace of its own choice.)
    fn forward_by_operations(
        &self,
        padded: &Tensor,
        out_channels: usize,
        (rows, columns): (usize, usize),
        slab: usize,
    ) -> Result<Tensor> {
        let weight = self.matrix(padded.dtype())?;
        let bias = self.bias.reshape((1, out_channels, 1, 1))?;
        let convolve = |first: usize, count: usize| -> Result<Tensor> {
            let unrolled = match self.stride {
                1 => self.unroll_neighbours(padded, first, count)?,
                _ => self.unroll_strided(padded, first, count, columns)?,
            };
            let product = weight.matmul(&unrolled)?;
            drop(unrolled);
            let line = if self.stride == 1 { padded.dim(3)? } else { columns };
            let missing = count * line - product.dim(1)?;
            product
                .pad_with_zeros(1, 0, missing)?
                .reshape((1, out_channels, count, line))?
                .narrow(3, 0, columns)?
                .broadcast_add(&bias)
        };
        if slab >= rows {
            return convolve(0, rows);
        }
        let out = Tensor::zeros((1, out_channels, rows, columns), padded.dtype(), padded.device())?;
        for first in (0..rows).step_by(slab) {
            let count = slab.min(rows - first);
            out.slice_set(&convolve(first, count)?, 2, first)?;
        }
        Ok(out)
    }

    /// The matrix `[in * k * k, n]` of the patches of `count` rows of outputs under a stride of one. Rows of the strip
    /// lie behind one another, so a tap is one run of every channel, from where it begins; the patches that reach over
    /// the end of a row are there too, and are dropped from the product. `n` is `count` rows of the strip without the
    /// last such patches.
    fn unroll_neighbours(&self, padded: &Tensor, first: usize, count: usize) -> Result<Tensor> {
        let (_, channels, height, width) = padded.dims4()?;
        let kernel = self.kernel();
        let run = count * width - (kernel - 1);
        let flat = padded.reshape((channels, height * width))?;
        let tap = |tap: usize| {
            let start = (first + tap / kernel) * width + tap % kernel;
            flat.narrow(1, start, run)?.unsqueeze(1)
        };
        let taps = (0..kernel * kernel).map(tap).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&taps, 1)?
            .contiguous()?
            .reshape((channels * kernel * kernel, run))
    }

    /// The matrix `[in * k * k, count * columns]` of the patches of `count` rows of outputs under any stride.
    fn unroll_strided(&self, padded: &Tensor, first: usize, count: usize, columns: usize) -> Result<Tensor> {
        let channels = padded.dim(1)?;
        let kernel = self.kernel();
        let every = |first: usize, count: usize| {
            let indices: Vec<u32> = (0..count).map(|i| (first + i * self.stride) as u32).collect();
            Tensor::new(indices, padded.device())
        };
        let mut taps = Vec::with_capacity(kernel * kernel);
        for dy in 0..kernel {
            let rows = padded.index_select(&every(first * self.stride + dy, count)?, 2)?;
            for dx in 0..kernel {
                let tap = rows.index_select(&every(dx, columns)?, 3)?;
                taps.push(tap.reshape((channels, 1, count * columns))?);
            }
        }
        Tensor::cat(&taps, 1)?.reshape((channels * kernel * kernel, count * columns))
    }
}

/// A weight in full precision: as it is, or dequantized to this dtype.
pub(super) fn in_full(weight: &Weight, dtype: DType) -> Result<Tensor> {
    match weight {
        Weight::Full(weight) => Ok(weight.clone()),
        Weight::Quantized(quantized) => ops::dequantize(quantized, dtype),
    }
}

/// Rows of outputs whose patches are unrolled at a time.
pub(super) fn slab_rows(
    in_channels: usize,
    kernel: usize,
    rows: usize,
    columns: usize,
    bytes_per_value: usize,
) -> usize {
    let bytes_per_row = in_channels * kernel * kernel * columns * bytes_per_value;
    // Narrow numbers are a card's, which wants more of them at a time.
    let most = if bytes_per_value < 4 {
        2 * MOST_UNROLLED_BYTES
    } else {
        MOST_UNROLLED_BYTES
    };
    let budget = (bytes_per_row * rows / 3).clamp(LEAST_UNROLLED_BYTES, most);
    (budget / bytes_per_row.max(1)).clamp(1, rows.max(1))
}

#[derive(Clone, Copy)]
struct Geometry {
    in_channels: usize,
    kernel: usize,
    stride: usize,
    width: usize,
    height: usize,
    columns: usize,
}

impl Geometry {
    /// The matrix `[in * k * k, count * columns]` whose columns are the patches of rows `first..` of outputs.
    fn unroll(&self, padded: &[f32], first: usize, count: usize) -> Vec<f32> {
        let taps = self.kernel * self.kernel;
        let line = count * self.columns;
        let mut unrolled = vec![0f32; self.in_channels * taps * line];
        unrolled
            .par_chunks_mut(taps * line)
            .enumerate()
            .for_each(|(channel, block)| {
                let plane = &padded[channel * self.height * self.width..][..self.height * self.width];
                for (tap, block) in block.chunks_mut(line).enumerate() {
                    let (dy, dx) = (tap / self.kernel, tap % self.kernel);
                    for (row, target) in block.chunks_mut(self.columns).enumerate() {
                        let source = &plane[((first + row) * self.stride + dy) * self.width + dx..];
                        if self.stride == 1 {
                            target.copy_from_slice(&source[..self.columns]);
                        } else {
                            let strided = source.iter().step_by(self.stride);
                            target
                                .iter_mut()
                                .zip(strided)
                                .for_each(|(target, value)| *target = *value);
                        }
                    }
                }
            });
        unrolled
    }
}

/// Calls `f` with the values of a contiguous f32 tensor on the CPU, without copying them.
pub(super) fn with_f32_slice<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        candle_core::bail!("a contiguous tensor on the CPU is expected")
    };
    Ok(f(&storage.as_slice::<f32>()?[start..end]))
}

#[cfg(test)]
mod tests {
    use super::super::norm::GroupNorm;
    use super::*;
    use crate::device::{here, test_device};

    /// Numbers of about -1 to 1 without a pattern.
    fn numbers(shape: &[usize], seed: u32) -> Result<Tensor> {
        let next = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some((*state >> 8) as f32 / (1 << 23) as f32 - 1.0)
        };
        let values = std::iter::repeat_n((), shape.iter().product()).scan(seed, |state, ()| next(state));
        Tensor::from_vec(values.collect(), shape, &Device::Cpu)
    }

    fn assert_close(actual: &Tensor, expected: &Tensor) -> Result<()> {
        assert_eq!(actual.dims(), expected.dims());
        let worst = (actual.to_device(&Device::Cpu)? - expected)?
            .abs()?
            .flatten_all()?
            .max(0)?
            .to_scalar::<f32>()?;
        let most = if test_device().is_cpu() { 1e-5 } else { 1e-4 };
        assert!(worst < most, "{worst:e}");
        Ok(())
    }

    /// Cards take the road of tensor operations; it can be walked on the CPU too.
    #[test]
    fn tensor_operations_read_the_same_strips() -> Result<()> {
        let map = (numbers(&[1, 40, 7, 5], 1)? * 3.0)?;
        let norm = GroupNorm::new(numbers(&[40], 2)?, numbers(&[40], 3)?, 8)?;
        let affine = norm.measure(&map)?;
        let there = Affine {
            factors: here(&affine.factors),
            summands: here(&affine.summands),
        };
        let map_there = here(&map);
        for padding in [Padding::NONE, Padding::AROUND, Padding::BEHIND] {
            for (normed, enlarged) in [(None, false), (Some(&affine), false), (None, true)] {
                let reading = Reading {
                    normed,
                    enlarged,
                    padding,
                };
                let reading_there = Reading {
                    normed: normed.map(|_| &there),
                    ..reading
                };
                let height = reading.size(7) + padding.before + padding.after;
                for first in 0..height - 2 {
                    for rows in 3..=height - first {
                        assert_close(
                            &reading_there.strip_by_operations(&map_there, first, rows)?,
                            &reading.strip_on_cpu(&map, first, rows)?,
                        )?;
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn tensor_operations_convolve_the_same() -> Result<()> {
        for (kernel, stride) in [(3, 1), (3, 2), (1, 1)] {
            let weight = numbers(&[7, 5, kernel, kernel], 1)?;
            let convolution = Convolution::new(Weight::Full(weight.clone()), numbers(&[7], 2)?, stride)?;
            let padded = numbers(&[1, 5, 13, 9], 3)?;
            let whole = padded.conv2d(&weight, 0, stride, 1, 1)?;
            let expected = whole.broadcast_add(&convolution.bias.reshape((1, 7, 1, 1))?)?;
            let (_, _, rows, columns) = expected.dims4()?;
            let geometry = Geometry {
                in_channels: 5,
                kernel,
                stride,
                width: 9,
                height: 13,
                columns,
            };
            let there = Convolution::new(Weight::Full(here(&weight)), here(&convolution.bias), stride)?;
            let padded_there = here(&padded);
            for slab in [1, 2, 5, rows] {
                assert_close(
                    &convolution.forward_on_cpu(&padded, geometry, 7, rows, slab)?,
                    &expected,
                )?;
                let by_operations = there.forward_by_operations(&padded_there, 7, (rows, columns), slab)?;
                assert_close(&by_operations, &expected)?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_quantized_weight_convolves_as_the_numbers_that_it_stands_for() -> Result<()> {
        // Codes of int8 in a pattern, and other scales for every row.
        let shape = [4, 5, 3, 3];
        let scales = [0.5f32, 1.0, 2.0, 3.0];
        let code = |i: usize| (i * 37 % 251) as u8 as i8;
        let numbers: Vec<f32> = (0..4 * 45)
            .map(|i| f32::from(code(i)) * scales[i / 45] * gpu::INT8_STEP)
            .collect();
        let mut bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        bytes.extend((0..4 * 45).map(|i| code(i) as u8));
        let length = bytes.len();
        let held = gpu::QuantizedWeight {
            bytes: here(&Tensor::from_vec(bytes, length, &Device::Cpu)?),
            format: gpu::WeightFormat::Int8,
            shape: shape.to_vec(),
        };
        let quantized = Convolution::new(Weight::Quantized(held), here(&numbers_of_bias()?), 1)?;
        let full = Tensor::from_vec(numbers, &shape, &Device::Cpu)?;
        let full = Convolution::new(Weight::Full(full), numbers_of_bias()?, 1)?;
        let padded = self::numbers(&[1, 5, 7, 6], 3)?;
        assert_close(&quantized.forward(&here(&padded))?, &full.forward(&padded)?)
    }

    fn numbers_of_bias() -> Result<Tensor> {
        numbers(&[4], 2)
    }
}
