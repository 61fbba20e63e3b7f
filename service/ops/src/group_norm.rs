//! Group norm over pictures, whose statistics can be gathered strip by strip.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use crate::rows::{on_cpu, with_numbers};

/// Mean and spread of each group of a picture, or of the strips seen so far. Strips add: the statistics
/// of a whole picture are those of its strips, to the last bits of f64.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupStatistics {
    /// Numbers in a group.
    count: f64,
    /// Mean of each group, `batch * groups` of them.
    mean: Vec<f64>,
    /// Sum of squared distances from the mean, likewise.
    squares: Vec<f64>,
}

impl GroupStatistics {
    /// Takes another strip of the same picture in.
    ///
    /// # Errors
    /// When the two have not the same number of groups.
    pub fn add(&mut self, other: &GroupStatistics) -> Result<()> {
        if self.mean.len() != other.mean.len() {
            candle_core::bail!(
                "statistics of {} and {} groups",
                self.mean.len(),
                other.mean.len()
            );
        }
        let total = self.count + other.count;
        for i in 0..self.mean.len() {
            let distance = other.mean[i] - self.mean[i];
            self.mean[i] += distance * other.count / total;
            self.squares[i] += other.squares[i] + distance * distance * self.count * other.count / total;
        }
        self.count = total;
        Ok(())
    }

    /// Mean and reciprocal standard deviation of group `i`.
    fn of_group(&self, i: usize, eps: f64) -> (f64, f64) {
        (self.mean[i], 1.0 / (self.squares[i] / self.count + eps).sqrt())
    }
}

/// Statistics of `x` `[b, c, h, w]` (or any `[b, c, ..]`) in `groups` groups of neighbouring channels.
///
/// # Errors
/// When the channels do not divide into the groups.
pub fn group_statistics(x: &Tensor, groups: usize) -> Result<GroupStatistics> {
    let (batch, channels) = (x.dim(0)?, x.dim(1)?);
    if groups == 0 || !channels.is_multiple_of(groups) {
        candle_core::bail!("{channels} channels do not divide into {groups} groups");
    }
    let count = x.elem_count() / (batch * groups).max(1);
    if !on_cpu(x) {
        let numbers = x.to_dtype(DType::F32)?.reshape((batch * groups, count))?;
        let mean = numbers.mean_keepdim(1)?;
        let squares = numbers.broadcast_sub(&mean)?.sqr()?.sum(1)?;
        let to_host = |t: Tensor| -> Result<Vec<f64>> { t.to_dtype(DType::F64)?.to_vec1() };
        return Ok(GroupStatistics {
            count: count as f64,
            mean: to_host(mean.squeeze(1)?)?,
            squares: to_host(squares)?,
        });
    }
    with_numbers(x, |numbers| {
        let (mean, squares) = numbers.par_chunks(count.max(1)).map(moments).unzip();
        Ok(GroupStatistics {
            count: count as f64,
            mean,
            squares,
        })
    })
}

/// Mean and sum of squared distances from it, in f64, in two passes.
fn moments(group: &[f32]) -> (f64, f64) {
    let sum_of = |f: &dyn Fn(&[f32]) -> f64| group.chunks(4096).map(f).sum::<f64>();
    let mean = sum_of(&|part| part.iter().map(|&v| f64::from(v)).sum()) / group.len() as f64;
    let squares = sum_of(&|part| {
        part.iter()
            .map(|&v| (f64::from(v) - mean) * (f64::from(v) - mean))
            .sum()
    });
    (mean, squares)
}

/// `torch.nn.GroupNorm`: `x` is `[b, c, h, w]`, `weight` and `bias` are `[c]`.
///
/// # Errors
/// When shapes do not fit.
pub fn group_norm(x: &Tensor, groups: usize, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    group_norm_with(x, &group_statistics(x, groups)?, weight, bias, eps)
}

/// [`group_norm`] with statistics that were gathered before: those of the whole picture for a strip of it.
///
/// # Errors
/// When shapes do not fit.
pub fn group_norm_with(
    x: &Tensor,
    statistics: &GroupStatistics,
    weight: &Tensor,
    bias: &Tensor,
    eps: f64,
) -> Result<Tensor> {
    let (batch, channels) = (x.dim(0)?, x.dim(1)?);
    let groups = statistics.mean.len() / batch.max(1);
    if groups == 0
        || !channels.is_multiple_of(groups)
        || weight.dims() != [channels]
        || bias.dims() != [channels]
    {
        candle_core::bail!(
            "group norm of {:?} in {groups} groups by {:?}",
            x.dims(),
            weight.dims()
        );
    }
    // Norm, weight and bias are one multiplication and one addition a channel.
    let weight = weight.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let bias = bias.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    let (mut factors, mut offsets) = (Vec::new(), Vec::new());
    for index in 0..batch * channels {
        let (mean, rstd) = statistics.of_group(index / (channels / groups), eps);
        let factor = rstd * f64::from(weight[index % channels]);
        factors.push(factor as f32);
        offsets.push((f64::from(bias[index % channels]) - mean * factor) as f32);
    }
    if !on_cpu(x) {
        let mut shape = vec![1; x.rank()];
        shape[..2].copy_from_slice(&[batch, channels]);
        let factors = Tensor::from_vec(factors, shape.as_slice(), x.device())?;
        let offsets = Tensor::from_vec(offsets, shape.as_slice(), x.device())?;
        let numbers = x.to_dtype(DType::F32)?;
        return numbers
            .broadcast_mul(&factors)?
            .broadcast_add(&offsets)?
            .to_dtype(x.dtype());
    }
    let plane = x.elem_count() / (batch * channels).max(1);
    let mut result = vec![0f32; x.elem_count()];
    if plane > 0 {
        with_numbers(x, |numbers| {
            let planes = result
                .par_chunks_mut(plane)
                .zip(numbers.par_chunks(plane))
                .enumerate();
            planes.for_each(|(index, (out, input))| {
                let (factor, offset) = (factors[index], offsets[index]);
                for (o, &v) in out.iter_mut().zip(input) {
                    *o = v * factor + offset;
                }
            });
            Ok(())
        })?;
    }
    Tensor::from_vec(result, x.shape(), x.device())?.to_dtype(x.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, here, random};

    fn naive(x: &Tensor, groups: usize, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
        let (batch, channels, height, width) = x.dims4()?;
        let grouped = x.reshape((batch, groups, channels / groups * height * width))?;
        let centred = grouped.broadcast_sub(&grouped.mean_keepdim(2)?)?;
        let variance = centred.sqr()?.mean_keepdim(2)?;
        let normalised = centred
            .broadcast_div(&(variance + eps)?.sqrt()?)?
            .reshape(x.shape())?;
        let per_channel = (1, channels, 1, 1);
        normalised
            .broadcast_mul(&weight.reshape(per_channel)?)?
            .broadcast_add(&bias.reshape(per_channel)?)
    }

    #[test]
    fn group_norm_equals_its_definition() -> Result<()> {
        let x = (random(&[2, 12, 7, 5], 1)? + 3.0)?;
        let (weight, bias) = (random(&[12], 2)?, random(&[12], 3)?);
        assert_close(
            &group_norm(&here(&x), 4, &here(&weight), &here(&bias), 1e-6)?,
            &naive(&x, 4, &weight, &bias, 1e-6)?,
            2e-6,
        )
    }

    #[test]
    fn strips_make_the_whole() -> Result<()> {
        let x = here(&random(&[1, 8, 11, 6], 1)?);
        let (weight, bias) = (here(&random(&[8], 2)?), here(&random(&[8], 3)?));
        let strips = [x.narrow(2, 0, 4)?, x.narrow(2, 4, 4)?, x.narrow(2, 8, 3)?];
        let mut statistics = group_statistics(&strips[0], 2)?;
        for strip in &strips[1..] {
            statistics.add(&group_statistics(strip, 2)?)?;
        }
        let parts = strips
            .iter()
            .map(|strip| group_norm_with(strip, &statistics, &weight, &bias, 1e-6))
            .collect::<Result<Vec<_>>>()?;
        assert_close(
            &Tensor::cat(&parts, 2)?,
            &group_norm(&x, 2, &weight, &bias, 1e-6)?,
            1e-7,
        )
    }

    #[test]
    fn channels_must_divide_into_groups() -> Result<()> {
        assert!(group_statistics(&random(&[1, 7, 2, 2], 1)?, 2).is_err());
        Ok(())
    }
}
