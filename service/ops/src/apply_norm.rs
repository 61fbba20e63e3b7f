//! Reading of a channels-last feature map by a layer: normalization, SiLU, upsampling and padding in one pass over
//! the rows that are requested, into a buffer of the caller.

#![allow(unsafe_code)] // Instructions that not every processor has.

use candle_core::{D, DType, Result, Tensor};

use crate::group_moments::Affine;
use crate::place::{Rows, apart_from, with_rows, write_rows};
use crate::rows::exp;

/// Normalization of the channels of a position.
#[derive(Clone, Copy, Debug)]
pub enum ChannelNorm<'a> {
    None,
    /// Per-channel scale and shift ([`crate::group_moments()`]).
    Affine(&'a Affine),
    /// RMS norm, `x / max(length of x, eps) * sqrt(c) * weight` (diffusers' `WanRMS_norm`).
    Rms {
        /// `[c]`, in the dtype of the map.
        weight: &'a Tensor,
        /// Lower bound of the length of `x`.
        eps: f64,
    },
    /// `x` divided by the sum of its root mean square and `eps` (the pixel norm of magnitude-preserving layers; Karras et
    /// al. 2024).
    Unit {
        /// Added to the root mean square.
        eps: f64,
    },
}

/// Padding mode outside of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pad {
    /// Zeros, applied after the norm.
    Zero,
    /// The nearest position of the map.
    Replicate,
}

/// Nearest-neighbour upsampling along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enlarge {
    /// Every position once.
    Not,
    /// Every position twice (`Upsample2D`).
    Twice,
    /// Every position twice, except the first: frames of a causal autoencoder
    /// (`HunyuanVideoUpsampleCausal3D`).
    TwiceButFirst,
}

impl Enlarge {
    /// Number of positions after upsampling `size` of them, which is at least 1.
    pub const fn size(self, size: usize) -> usize {
        match self {
            Enlarge::Not => size,
            Enlarge::Twice => 2 * size,
            Enlarge::TwiceButFirst => 2 * size - 1,
        }
    }

    /// The position before upsampling, for one after it.
    const fn source(self, place: usize) -> usize {
        match self {
            Enlarge::Not => place,
            Enlarge::Twice => place / 2,
            Enlarge::TwiceButFirst => place.div_ceil(2),
        }
    }
}

/// How a feature map is read.
#[derive(Clone, Copy, Debug)]
pub struct MapReading<'a> {
    /// Normalization, applied first.
    pub norm: ChannelNorm<'a>,
    /// Apply SiLU, `x * sigmoid(x)`, after the norm.
    pub silu: bool,
    /// Upsampling of frames, rows and columns.
    pub enlarge: [Enlarge; 3],
    /// Padding mode.
    pub pad: Pad,
}

impl MapReading<'_> {
    /// The identity, with zero padding.
    pub const PLAIN: MapReading<'static> = MapReading {
        norm: ChannelNorm::None,
        silu: false,
        enlarge: [Enlarge::Not; 3],
        pad: Pad::Zero,
    };
}

/// Dimensions of a map `[h, w, c]` or `[t, h, w, c]`: frames, height, width, channels.
pub(crate) fn sides(map: &Tensor) -> Result<[usize; 4]> {
    match *map.dims() {
        [height, width, channels] => Ok([1, height, width, channels]),
        [frames, height, width, channels] => Ok([frames, height, width, channels]),
        ref other => {
            candle_core::bail!("a map of shape {other:?} where [h, w, c] or [t, h, w, c] is expected")
        }
    }
}

/// Reads a region of a map `x` `[h, w, c]` or `[t, h, w, c]` into `out`, of the same rank, channels and dtype. The
/// region starts at `from` (frame, row, column, in coordinates of the upsampled map; positions outside of the map are
/// padding) and has the size of `out`. Both may be strided views whose rows are contiguous; the positions of `x` may
/// also be a part of longer ones (`narrow` along channels) in a contiguous map. `out` must not overlap `x`.
///
/// # Errors
/// When shapes do not match.
pub fn apply_norm(x: &Tensor, reading: &MapReading<'_>, from: [i64; 3], out: &Tensor) -> Result<()> {
    let ([_, height, width, channels], written) = (sides(x)?, sides(out)?);
    let vectors = match reading.norm {
        ChannelNorm::None | ChannelNorm::Unit { .. } => vec![],
        ChannelNorm::Affine(affine) => vec![(&affine.factors, DType::F32), (&affine.summands, DType::F32)],
        ChannelNorm::Rms { weight, .. } => vec![(weight, x.dtype())],
    };
    let fits = x.rank() == out.rank()
        && written[3] == channels
        && x.dtype() == out.dtype()
        && vectors
            .iter()
            .all(|(vector, dtype)| vector.dims() == [channels] && vector.dtype() == *dtype);
    if !fits || height * width * channels == 0 {
        candle_core::bail!("a map of shape {:?} read into {:?}", x.dims(), out.dims());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::apply_norm(x, reading, from, out);
    }
    read_on_cpu(x, reading, from, out)
}

/// The source position for a position along an axis; `None` for zero padding.
fn source(place: i64, size: usize, enlarge: Enlarge, pad: Pad) -> Option<usize> {
    let last = enlarge.size(size) as i64 - 1;
    let inside = (0..=last).contains(&place);
    match pad {
        Pad::Zero if !inside => None,
        _ => Some(enlarge.source(place.clamp(0, last) as usize)),
    }
}

fn read_on_cpu(x: &Tensor, reading: &MapReading<'_>, from: [i64; 3], out: &Tensor) -> Result<()> {
    let [frames, height, width, channels] = sides(x)?;
    let [_, rows_out, columns_out, _] = sides(out)?;
    let of_position = OfPosition::new(reading, channels)?;
    let x = apart_from(x, out)?;
    let columns: Vec<Option<usize>> = (0..columns_out)
        .map(|column| source(from[2] + column as i64, width, reading.enlarge[2], reading.pad))
        .collect();
    Rows::of(out, columns_out * channels)?;
    // Rows of the map; or its positions, where they are parts of longer ones.
    let of_row = match Rows::of(&x, width * channels) {
        Ok(_) => width,
        Err(_) => 1,
    };
    with_rows(&x, of_row * channels, |x| {
        write_rows(out, columns_out * channels, |row, numbers| {
            let (frame, row) = (row / rows_out, row % rows_out);
            let frame = source(from[0] + frame as i64, frames, reading.enlarge[0], reading.pad);
            let row = source(from[1] + row as i64, height, reading.enlarge[1], reading.pad);
            let (Some(frame), Some(row)) = (frame, row) else {
                return numbers.fill(0.0);
            };
            let line = frame * height + row;
            let whole = (of_row == width).then(|| x.row(line));
            let position = |column: usize| match whole {
                Some(whole) => &whole[column * channels..][..channels],
                None => x.row(line * width + column),
            };
            let mut before = None;
            for (index, column) in columns.iter().enumerate() {
                let (written, rest) = numbers.split_at_mut(index * channels);
                let target = &mut rest[..channels];
                match column {
                    None => target.fill(0.0),
                    // A repeated position is a copy of the previous one.
                    Some(_) if before == Some(column) => {
                        target.copy_from_slice(&written[(index - 1) * channels..]);
                    }
                    Some(column) => of_position.read(position(*column), target),
                }
                before = Some(column);
            }
        })
    })
}

/// What the elements of a position are divided by before the factors are applied.
enum Divisor {
    One,
    /// Their length, or the least one.
    Length {
        least: f64,
    },
    /// Their root mean square plus a number.
    RootMeanSquare {
        added: f64,
    },
}

/// The transformation of each position, on the CPU.
struct OfPosition {
    factors: Vec<f32>,
    summands: Vec<f32>,
    divisor: Divisor,
    is_plain: bool,
    silu: bool,
    is_wide: bool,
}

impl OfPosition {
    fn new(reading: &MapReading<'_>, channels: usize) -> Result<OfPosition> {
        let (factors, summands, divisor) = match reading.norm {
            ChannelNorm::None => (vec![1.0; channels], vec![0.0; channels], Divisor::One),
            ChannelNorm::Affine(affine) => (
                affine.factors.to_vec1()?,
                affine.summands.to_vec1()?,
                Divisor::One,
            ),
            ChannelNorm::Rms { weight, eps } => {
                let weight = weight.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                let root = (channels as f64).sqrt() as f32;
                let factors = weight.iter().map(|weight| weight * root).collect();
                (factors, vec![0.0; channels], Divisor::Length { least: eps })
            }
            ChannelNorm::Unit { eps } => {
                let divisor = Divisor::RootMeanSquare { added: eps };
                (vec![1.0; channels], vec![0.0; channels], divisor)
            }
        };
        Ok(OfPosition {
            factors,
            summands,
            divisor,
            is_plain: matches!(reading.norm, ChannelNorm::None) && !reading.silu,
            silu: reading.silu,
            is_wide: has_wide_instructions(),
        })
    }

    fn read(&self, from: &[f32], to: &mut [f32]) {
        if self.is_plain {
            return to.copy_from_slice(from);
        }
        let square = || -> f64 {
            let squares = from.iter().map(|&value| f64::from(value) * f64::from(value));
            squares.sum()
        };
        let by = match self.divisor {
            Divisor::One => 1.0,
            Divisor::Length { least } => (1.0 / square().sqrt().max(least)) as f32,
            Divisor::RootMeanSquare { added } => {
                (1.0 / ((square() / from.len() as f64).sqrt() + added)) as f32
            }
        };
        #[cfg(target_arch = "x86_64")]
        if self.is_wide {
            // SAFETY: both instruction sets were detected.
            return unsafe { affine_wide(from, by, &self.factors, &self.summands, self.silu, to) };
        }
        affine(from, by, &self.factors, &self.summands, self.silu, to);
    }
}

fn has_wide_instructions() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The same function compiled for AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn affine_wide(from: &[f32], by: f32, factors: &[f32], summands: &[f32], silu: bool, to: &mut [f32]) {
    affine(from, by, factors, summands, silu, to);
}

#[inline(always)]
fn affine(from: &[f32], by: f32, factors: &[f32], summands: &[f32], silu: bool, to: &mut [f32]) {
    let weights = factors.iter().zip(summands);
    let pairs = to.iter_mut().zip(from).zip(weights);
    if silu {
        pairs.for_each(|((to, from), (factor, summand))| {
            let value = from * by * factor + summand;
            *to = value / (1.0 + exp(-value));
        });
    } else {
        pairs.for_each(|((to, from), (factor, summand))| *to = from * by * factor + summand);
    }
}

/// `out += x`, row by row: [`apply_norm`] for residual connections. Both are `[.., c]` of one dtype.
///
/// # Errors
/// When shapes do not match.
pub fn add_rows(x: &Tensor, out: &Tensor) -> Result<()> {
    add_scaled(x, 1.0, out)
}

/// `out += factor x`, row by row. Both are `[.., c]` of one dtype.
///
/// # Errors
/// When shapes do not match.
pub fn add_scaled(x: &Tensor, factor: f64, out: &Tensor) -> Result<()> {
    let factor = factor as f32;
    let channels = x.dim(D::Minus1)?;
    if x.dims() != out.dims() || x.dtype() != out.dtype() {
        candle_core::bail!("{:?} added to {:?}", x.dims(), out.dims());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::add_rows(x, factor, None, true, out);
    }
    let x = apart_from(x, out)?;
    with_rows(&x, channels, |x| {
        write_rows(out, channels, |row, numbers| {
            for (number, value) in numbers.iter_mut().zip(x.row(row)) {
                *number += factor * value;
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    /// Reference implementation in f64, element by element.
    fn naive(x: &Tensor, reading: &MapReading<'_>, from: [i64; 3], shape: &[usize]) -> Result<Tensor> {
        let [frames, height, width, channels] = sides(x)?;
        let numbers = x.flatten_all()?.to_vec1::<f32>()?;
        let out = Tensor::zeros(shape, DType::F32, &Device::Cpu)?;
        let [frames_out, rows, columns, _] = sides(&out)?;
        let host = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec1::<f32>();
        let (factors, summands) = match reading.norm {
            ChannelNorm::Affine(affine) => (host(&affine.factors)?, host(&affine.summands)?),
            ChannelNorm::Rms { weight, .. } => (host(weight)?, vec![0.0; channels]),
            ChannelNorm::None | ChannelNorm::Unit { .. } => (vec![1.0; channels], vec![0.0; channels]),
        };
        let mut result = Vec::new();
        for (t, y, x) in (0..frames_out as i64)
            .flat_map(|t| (0..rows as i64).flat_map(move |y| (0..columns as i64).map(move |x| (t, y, x))))
        {
            let at = [from[0] + t, from[1] + y, from[2] + x];
            // The source of every position of the enlarged map, listed.
            let listed: Vec<Vec<usize>> = [frames, height, width]
                .into_iter()
                .zip(reading.enlarge)
                .map(|(size, enlarge)| match enlarge {
                    Enlarge::Not => (0..size).collect(),
                    Enlarge::Twice => (0..size).flat_map(|i| [i, i]).collect(),
                    Enlarge::TwiceButFirst => (0..size).flat_map(|i| [i, i]).skip(1).collect(),
                })
                .collect();
            let outside = (0..3).any(|i| at[i] < 0 || at[i] >= listed[i].len() as i64);
            let [t, y, x] = [0, 1, 2].map(|i| listed[i][(at[i].max(0) as usize).min(listed[i].len() - 1)]);
            let begin = ((t * height + y) * width + x) * channels;
            let position = &numbers[begin..][..channels];
            let length: f64 = position.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
            for channel in 0..channels {
                let mut value = f64::from(position[channel]);
                if let ChannelNorm::Rms { eps, .. } = reading.norm {
                    value = value / length.max(eps) * (channels as f64).sqrt();
                }
                if let ChannelNorm::Unit { eps } = reading.norm {
                    value /= length / (channels as f64).sqrt() + eps;
                }
                value = value * f64::from(factors[channel]) + f64::from(summands[channel]);
                if reading.silu {
                    value /= 1.0 + (-value).exp();
                }
                let zero = outside && reading.pad == Pad::Zero;
                result.push(if zero { 0.0 } else { value as f32 });
            }
        }
        Tensor::from_vec(result, shape, &Device::Cpu)
    }

    #[test]
    fn a_region_of_a_map_equals_the_reference() -> Result<()> {
        for channels in [1, 3, 8, 20, 64] {
            let x = (random(&[2, 5, 7, channels], channels as u64)? * 4.0)?;
            let (a, b) = (random(&[channels], 2)?, random(&[channels], 3)?);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let there = |t: &Tensor| here(t).to_dtype(dtype);
                let affine = Affine {
                    factors: here(&a),
                    summands: here(&b),
                };
                let weight = there(&a)?;
                let rms = ChannelNorm::Rms {
                    weight: &weight,
                    eps: 1e-12,
                };
                let there_x = there(&x)?;
                let exact = there_x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                let unit = ChannelNorm::Unit { eps: 0.25 };
                for norm in [ChannelNorm::None, ChannelNorm::Affine(&affine), rms, unit] {
                    use Enlarge::{Not, Twice, TwiceButFirst};
                    for (enlarge, pad, silu) in [
                        ([Not; 3], Pad::Zero, true),
                        ([Not, Twice, Twice], Pad::Zero, false),
                        ([Not; 3], Pad::Replicate, false),
                        ([Not, Twice, Twice], Pad::Replicate, true),
                        ([TwiceButFirst, Twice, Not], Pad::Zero, false),
                        ([Twice, TwiceButFirst, Twice], Pad::Replicate, true),
                    ] {
                        let reading = MapReading {
                            norm,
                            silu,
                            enlarge,
                            pad,
                        };
                        let places = [
                            ([0, 0, 0], [2, 5, 7]),
                            ([-2, -1, -1], [5, 8, 9]),
                            ([1, 3, 2], [1, 1, 4]),
                            ([0, 1, 0], [1, 9, 15]),
                        ];
                        for (from, [frames, rows, columns]) in places {
                            // A view of a larger buffer: the view must be overwritten completely, and the rest must
                            // not change.
                            let buffer = here(&Tensor::full(
                                7f32,
                                (frames, rows + 2, columns + 1, channels),
                                &Device::Cpu,
                            )?)
                            .to_dtype(dtype)?;
                            let window = buffer.narrow(1, 1, rows)?.narrow(2, 0, columns)?;
                            apply_norm(&there_x, &reading, from, &window)?;
                            let expected = naive(&exact, &reading, from, window.dims())?;
                            let found = window.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                            // A result of all zeros has no relative error.
                            let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };
                            assert_close(&(found + 1e-3)?, &(expected + 1e-3)?, most)?;
                            let sum = |t: &Tensor| {
                                t.to_dtype(DType::F32)?
                                    .to_device(&Device::Cpu)?
                                    .sum_all()?
                                    .to_scalar::<f32>()
                            };
                            let beside = [
                                buffer.narrow(1, 0, 1)?,
                                buffer.narrow(1, rows + 1, 1)?,
                                buffer.narrow(2, columns, 1)?,
                            ];
                            for beside in beside {
                                assert_eq!(sum(&beside.contiguous()?)?, 7.0 * beside.elem_count() as f32);
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn a_map_is_read_with_its_axes_exchanged_or_out_of_longer_positions() -> Result<()> {
        let x = random(&[3, 4, 5, 16], 1)?;
        let reading = MapReading {
            enlarge: [Enlarge::Twice, Enlarge::TwiceButFirst, Enlarge::Twice],
            pad: Pad::Replicate,
            ..MapReading::PLAIN
        };
        for dtype in [DType::F32, DType::BF16] {
            let there = here(&x).to_dtype(dtype)?;
            let exact = there.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            let views = |x: &Tensor| {
                let part = x.narrow(3, 8, 8)?;
                Ok::<_, candle_core::Error>([x.permute((1, 0, 2, 3))?, part.clone(), part.narrow(0, 1, 2)?])
            };
            for (view, exact) in views(&there)?.iter().zip(views(&exact)?) {
                let shape = [5, 6, 9, view.dim(3)?];
                let out = here(&Tensor::zeros(&shape[..], DType::F32, &Device::Cpu)?).to_dtype(dtype)?;
                apply_norm(view, &reading, [-1, -2, 1], &out)?;
                let expected = naive(&exact.contiguous()?, &reading, [-1, -2, 1], &shape)?;
                let found = out.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                assert_close(&found, &expected, 0.0)?;
            }
        }
        Ok(())
    }

    #[test]
    fn rows_are_added_in_place() -> Result<()> {
        for channels in [5, 16] {
            let (x, y) = (random(&[3, 4, channels], 1)?, random(&[5, 4, channels], 2)?);
            let expected = (&x + y.narrow(0, 1, 3)?)?;
            let there = here(&y);
            add_rows(&here(&x), &there.narrow(0, 1, 3)?)?;
            assert_close(&there.narrow(0, 1, 3)?, &expected, 0.0)?;
            assert_close(&there.narrow(0, 4, 1)?, &y.narrow(0, 4, 1)?, 0.0)?;
            add_scaled(&here(&x), -0.75, &there.narrow(0, 1, 3)?)?;
            assert_close(&there.narrow(0, 1, 3)?, &(&expected + (&x * -0.75)?)?, 1e-6)?;
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let x = here(&random(&[2, 2, 4], 1)?);
        for shape in [vec![2, 2, 5], vec![1, 2, 2, 4], vec![2, 4]] {
            let out = here(&random(&shape, 1)?);
            assert!(
                apply_norm(&x, &MapReading::PLAIN, [0; 3], &out).is_err(),
                "{shape:?}"
            );
        }
        Ok(())
    }
}
