//! Group norm over channels-last maps: statistics of a whole map, as a scale and shift per channel, with which any region of
//! the map can be normalized.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use crate::place::{Rows, RowsOf, apart_from, with_rows, write_rows};
use crate::rows::on_cpu;

/// Chunk size: positions summed in f32 before sums continue in f64; and chunks per task.
const CHUNK: usize = 64;
const CHUNKS: usize = 16;

/// `value * factor + summand`, per channel.
#[derive(Clone, Debug)]
pub struct Affine {
    pub factors: Tensor,
    pub summands: Tensor,
}

/// Parameters of a group norm over `c` channels.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm<'a> {
    /// Number of groups of neighbouring channels; divides `c`.
    pub groups: usize,
    /// `[c]`, in the dtype of the maps.
    pub weight: &'a Tensor,
    /// `[c]`, in the dtype of the maps.
    pub bias: &'a Tensor,
    /// Added to the variance.
    pub eps: f64,
}

/// Residual added to a map before its statistics are taken.
#[derive(Clone, Copy, Debug)]
pub struct Residual<'a> {
    /// Shape and dtype of the map.
    pub branch: &'a Tensor,
    /// `[c]`, added to every position.
    pub bias: Option<&'a Tensor>,
}

/// Statistics of a map `[.., c]` (`torch.nn.GroupNorm` with a batch of one; positions have one stride), as scale and
/// shift on the map's device. A residual is first added to the map, in place.
///
/// Mean and squares are computed in parts that depend on the shape alone, and merged in a fixed order (Chan, Golub,
/// LeVeque 1983), so the result is deterministic.
///
/// # Errors
/// When shapes do not match, or the group count does not divide the channels.
pub fn group_moments(x: &Tensor, add: Option<Residual<'_>>, norm: &GroupNorm<'_>) -> Result<Affine> {
    let channels = x.dim(candle_core::D::Minus1)?;
    let GroupNorm {
        groups, weight, bias, ..
    } = *norm;
    let vectors = [Some(weight), Some(bias), add.and_then(|add| add.bias)];
    let fits = groups > 0
        && channels.is_multiple_of(groups)
        && x.elem_count() > 0
        && vectors
            .into_iter()
            .flatten()
            .all(|vector| vector.dims() == [channels] && vector.dtype() == x.dtype())
        && add.is_none_or(|add| add.branch.dims() == x.dims() && add.branch.dtype() == x.dtype());
    if !fits || Rows::of(x, channels)?.batch != 1 {
        candle_core::bail!("moments of {:?} in {groups} groups by {weight:?}", x.dims());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::group_moments(x, add, norm);
    }
    if let Some(add) = add {
        add_residual(x, add)?;
    }
    on_cpu_only(x)?;
    let (weight, bias) = (to_f64(weight)?, to_f64(bias)?);
    let moments = with_rows(x, channels, |rows| Ok(measure(rows, channels, groups)))?;
    let of_group = channels / groups;
    let mut factors = Vec::with_capacity(channels);
    let mut summands = Vec::with_capacity(channels);
    for channel in 0..channels {
        let Moments { count, mean, squares } = moments[channel / of_group];
        let factor = weight[channel] / (squares / count + norm.eps).sqrt();
        factors.push(factor as f32);
        summands.push((bias[channel] - mean * factor) as f32);
    }
    Ok(Affine {
        factors: Tensor::from_vec(factors, channels, x.device())?,
        summands: Tensor::from_vec(summands, channels, x.device())?,
    })
}

fn on_cpu_only(x: &Tensor) -> Result<()> {
    if on_cpu(x) {
        return Ok(());
    }
    candle_core::bail!(
        "maps are measured on the CPU and on CUDA devices, not on {:?}",
        x.device()
    )
}

fn to_f64(vector: &Tensor) -> Result<Vec<f64>> {
    let numbers = vector.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?;
    Ok(numbers.into_iter().map(f64::from).collect())
}

/// `x += branch + bias` on the CPU.
fn add_residual(x: &Tensor, add: Residual<'_>) -> Result<()> {
    let channels = x.dim(candle_core::D::Minus1)?;
    let branch = apart_from(add.branch, x)?;
    let bias = match add.bias {
        Some(bias) => bias.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?,
        None => vec![0.0; channels],
    };
    with_rows(&branch, channels, |branch| {
        write_rows(x, channels, |row, numbers| {
            let added = branch.row(row).iter().zip(&bias);
            for (number, (value, bias)) in numbers.iter_mut().zip(added) {
                *number += value + bias;
            }
        })
    })
}

#[derive(Clone, Copy, Debug)]
struct Moments {
    count: f64,
    mean: f64,
    /// Sum of squared deviations from the mean.
    squares: f64,
}

impl Moments {
    const NONE: Moments = Moments {
        count: 0.0,
        mean: 0.0,
        squares: 0.0,
    };

    fn and(self, other: Moments) -> Moments {
        let count = self.count + other.count;
        if count == 0.0 {
            return self;
        }
        let distance = other.mean - self.mean;
        Moments {
            count,
            mean: self.mean + distance * other.count / count,
            squares: self.squares + other.squares + distance * distance * self.count * other.count / count,
        }
    }
}

/// Moments of each group.
fn measure(rows: &RowsOf<'_>, channels: usize, groups: usize) -> Vec<Moments> {
    let merged = |parts: &mut dyn Iterator<Item = Vec<Moments>>| {
        let mut whole = vec![Moments::NONE; groups];
        for part in parts {
            whole
                .iter_mut()
                .zip(part)
                .for_each(|(whole, part)| *whole = whole.and(part));
        }
        whole
    };
    let chunks = rows.count().div_ceil(CHUNK);
    let tasks: Vec<Vec<Moments>> = (0..chunks.div_ceil(CHUNKS))
        .into_par_iter()
        .map(|task| {
            let of_task = task * CHUNKS..chunks.min((task + 1) * CHUNKS);
            merged(&mut of_task.map(|chunk| {
                let first = chunk * CHUNK;
                measure_chunk(rows, first..rows.count().min(first + CHUNK), channels, groups)
            }))
        })
        .collect();
    merged(&mut tasks.into_iter())
}

/// Two passes over elements that stay in a cache. Channel sums vectorize.
fn measure_chunk(
    rows: &RowsOf<'_>,
    range: std::ops::Range<usize>,
    channels: usize,
    groups: usize,
) -> Vec<Moments> {
    let of_group = channels / groups;
    let count = (range.len() * of_group) as f64;
    let total = |sums: &[f32]| sums.iter().map(|&sum| f64::from(sum)).sum::<f64>();
    let mut sums = vec![0f32; channels];
    for row in range.clone() {
        for (sum, value) in sums.iter_mut().zip(rows.row(row)) {
            *sum += value;
        }
    }
    let means: Vec<f64> = sums.chunks(of_group).map(|group| total(group) / count).collect();
    let centres: Vec<f32> = (0..channels)
        .map(|channel| means[channel / of_group] as f32)
        .collect();
    let mut squares = vec![0f32; channels];
    for row in range {
        for ((square, value), centre) in squares.iter_mut().zip(rows.row(row)).zip(&centres) {
            let distance = value - centre;
            *square += distance * distance;
        }
    }
    means
        .into_iter()
        .zip(squares.chunks(of_group))
        .map(|(mean, group)| {
            // The centre is the mean rounded to f32.
            let off = mean - f64::from(mean as f32);
            let squares = (total(group) - count * off * off).max(0.0);
            Moments { count, mean, squares }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{assert_close, here, random};

    /// Reference implementation in f64.
    fn naive(x: &Tensor, groups: usize, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
        let channels = x.dim(candle_core::D::Minus1)?;
        let positions = x.elem_count() / channels;
        let wide = |x: &Tensor| x.to_dtype(DType::F64);
        let grouped = wide(x)?
            .reshape((positions, groups, channels / groups))?
            .transpose(0, 1)?
            .reshape((groups, ()))?;
        let centred = grouped.broadcast_sub(&grouped.mean_keepdim(1)?)?;
        let variance = centred.sqr()?.mean_keepdim(1)?;
        let normed = centred
            .broadcast_div(&(variance + eps)?.sqrt()?)?
            .reshape((groups, positions, channels / groups))?
            .transpose(0, 1)?
            .reshape(x.shape())?;
        normed.broadcast_mul(&wide(weight)?)?.broadcast_add(&wide(bias)?)
    }

    fn applied(x: &Tensor, affine: &Affine) -> Result<Tensor> {
        let x = x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        let wide = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64);
        x.broadcast_mul(&wide(&affine.factors)?)?
            .broadcast_add(&wide(&affine.summands)?)
    }

    #[test]
    fn factors_and_summands_equal_group_norm() -> Result<()> {
        // Odd sizes, groups of few and of many channels, a mean far from zero, more positions than a thread block
        // covers.
        let shapes: [(&[usize], usize); 8] = [
            (&[7, 5, 12], 4),
            (&[1, 1, 32], 8),
            (&[3, 70, 96], 8),
            (&[65, 130, 64], 32),
            (&[2, 3, 9, 6], 2),
            (&[300, 3], 1),
            (&[40, 41, 512], 32),
            (&[9, 10, 2560], 32),
        ];
        for (seed, (shape, groups)) in shapes.into_iter().enumerate() {
            let channels = shape[shape.len() - 1];
            let x = (random(shape, seed as u64 + 1)? + 3.0)?;
            let (weight, bias) = (random(&[channels], 20)?, random(&[channels], 30)?);
            let y = random(shape, 40)?;
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let there = |t: &Tensor| here(t).to_dtype(dtype);
                let back = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F32);
                let (x, weight, bias) = (there(&x)?, there(&weight)?, there(&bias)?);
                let norm = GroupNorm {
                    groups,
                    weight: &weight,
                    bias: &bias,
                    eps: 1e-6,
                };
                let found = group_moments(&x, None, &norm)?;
                let expected = naive(&back(&x)?, groups, &back(&weight)?, &back(&bias)?, 1e-6)?;
                assert_close(&applied(&x, &found)?, &expected, 3e-6)?;

                let branch = there(&y)?;
                let add = Residual {
                    branch: &branch,
                    bias: Some(&bias),
                };
                let sum = (back(&x)? + back(&branch)?.broadcast_add(&back(&bias)?)?)?;
                let found = group_moments(&x, Some(add), &norm)?;
                let rounding = if dtype == DType::F32 { 1e-6 } else { 6e-3 };
                assert_close(&back(&x)?, &sum, rounding)?;
                // The statistics are those of the stored (rounded) sum.
                let expected = naive(&back(&x)?, groups, &back(&weight)?, &back(&bias)?, 1e-6)?;
                assert_close(&applied(&x, &found)?, &expected, 3e-6)?;
            }
        }
        Ok(())
    }

    #[test]
    fn statistics_of_a_view_exclude_the_rest() -> Result<()> {
        let all = random(&[9, 4, 24], 1)?;
        let window = all.narrow(0, 2, 5)?.narrow(2, 8, 8)?;
        let (weight, bias) = (random(&[8], 2)?, random(&[8], 3)?);
        let (there, w, b) = (here(&all), here(&weight), here(&bias));
        let norm = GroupNorm {
            groups: 2,
            weight: &w,
            bias: &b,
            eps: 1e-6,
        };
        let found = group_moments(&there.narrow(0, 2, 5)?.narrow(2, 8, 8)?, None, &norm)?;
        let expected = naive(&window.contiguous()?, 2, &weight, &bias, 1e-6)?;
        assert_close(&applied(&window.contiguous()?, &found)?, &expected, 3e-6)
    }

    #[test]
    fn channels_must_divide_into_groups() -> Result<()> {
        let x = here(&random(&[2, 2, 7], 1)?);
        let vector = here(&random(&[7], 1)?);
        let norm = |groups| GroupNorm {
            groups,
            weight: &vector,
            bias: &vector,
            eps: 1e-6,
        };
        assert!(group_moments(&x, None, &norm(2)).is_err());
        assert!(group_moments(&x, None, &norm(0)).is_err());
        assert!(group_moments(&x, None, &norm(7)).is_ok());
        Ok(())
    }
}
