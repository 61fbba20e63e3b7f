//! Group norm in two passes: statistics of the whole map, then a factor and a summand per channel that any
//! strip can be normalised with.

use candle_core::{DType, Device, Result, Tensor};
use rayon::prelude::*;

use super::conv::{PART_BYTES, with_f32_slice};

/// The epsilon of every group norm of the autoencoder (`resnet_eps`).
const EPSILON: f64 = 1e-6;

/// Weights of a group norm.
#[derive(Clone, Debug)]
pub(super) struct GroupNorm {
    /// `[c]`.
    weight: Tensor,
    /// `[c]`.
    bias: Tensor,
    groups: usize,
}

/// A group norm once the map's statistics are known: `value * factor + summand`.
#[derive(Clone, Debug)]
pub(super) struct Affine {
    /// f32 `[c]`.
    pub(super) factors: Tensor,
    /// f32 `[c]`.
    pub(super) summands: Tensor,
}

impl Affine {
    /// Factors and summands in host memory.
    pub(super) fn to_vecs(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        Ok((self.factors.to_vec1()?, self.summands.to_vec1()?))
    }

    /// Applies those of channels `first_channel..` to `map`, in f32.
    pub(super) fn apply(&self, map: &Tensor, first_channel: usize) -> Result<Tensor> {
        let channels = map.dim(1)?;
        let factors = self
            .factors
            .narrow(0, first_channel, channels)?
            .reshape((1, channels, 1, 1))?;
        let summands = self
            .summands
            .narrow(0, first_channel, channels)?
            .reshape((1, channels, 1, 1))?;
        map.to_dtype(DType::F32)?
            .broadcast_mul(&factors)?
            .broadcast_add(&summands)
    }
}

impl GroupNorm {
    pub(super) fn new(weight: Tensor, bias: Tensor, groups: usize) -> Result<GroupNorm> {
        Ok(GroupNorm {
            weight: weight.to_dtype(DType::F32)?,
            bias: bias.to_dtype(DType::F32)?,
            groups,
        })
    }

    /// Measures a whole map `[1, c, h, w]`.
    pub(super) fn measure(&self, map: &Tensor) -> Result<Affine> {
        let channels = map.dim(1)?;
        let (means, deviations) = match map.device() {
            Device::Cpu if map.dtype() == DType::F32 => self.statistics_on_cpu(map)?,
            _ => self.statistics_by_operations(map)?,
        };
        let per_channel = |per_group: Tensor| -> Result<Tensor> {
            per_group
                .reshape((self.groups, 1))?
                .broadcast_as((self.groups, channels / self.groups))?
                .reshape(channels)
        };
        let factors = (per_channel(deviations.recip()?)? * &self.weight)?;
        let summands = (&self.bias - (per_channel(means)? * &factors)?)?;
        Ok(Affine { factors, summands })
    }

    /// Mean and standard deviation (with epsilon) of each group: f32 `[groups]` each. Sums are f64.
    fn statistics_on_cpu(&self, map: &Tensor) -> Result<(Tensor, Tensor)> {
        let values_per_group = map.elem_count() / self.groups;
        let statistics: Vec<(f32, f32)> = with_f32_slice(map, |data| {
            let measure = |group: &[f32]| {
                let count = group.len() as f64;
                let mean = sum_f64(group, |value| value) / count;
                let variance = sum_f64(group, |value| (value - mean) * (value - mean)) / count;
                (mean as f32, (variance + EPSILON).sqrt() as f32)
            };
            data.par_chunks(values_per_group).map(measure).collect()
        })?;
        let (means, deviations): (Vec<f32>, Vec<f32>) = statistics.into_iter().unzip();
        let groups = means.len();
        Ok((
            Tensor::from_vec(means, groups, &Device::Cpu)?,
            Tensor::from_vec(deviations, groups, &Device::Cpu)?,
        ))
    }

    /// The same by tensor operations, some groups at a time, or some rows of one: the temporaries in f32 are small
    /// beside the map. Rows are summed first, and then their sums: a card works on all rows side by side, and no sum
    /// is long enough to lose digits.
    fn statistics_by_operations(&self, map: &Tensor) -> Result<(Tensor, Tensor)> {
        let (_, channels, height, width) = map.dims4()?;
        let rows = channels / self.groups * height;
        let count = (rows * width) as f64;
        let map = map.reshape((self.groups, rows, width))?;
        let rows_at_a_time = (PART_BYTES / (width * size_of::<f32>())).max(1);
        let groups_at_a_time = (rows_at_a_time / rows).clamp(1, self.groups);
        let mut means = Vec::new();
        let mut variances = Vec::new();
        for first in (0..self.groups).step_by(groups_at_a_time) {
            let groups = map.narrow(0, first, groups_at_a_time.min(self.groups - first))?;
            let mean_of = |f: &dyn Fn(Tensor) -> Result<Tensor>| -> Result<Tensor> {
                let mut sums = Vec::new();
                for row in (0..rows).step_by(rows_at_a_time) {
                    let part = groups.narrow(1, row, rows_at_a_time.min(rows - row))?;
                    sums.push(f(part.to_dtype(DType::F32)?)?.sum(2)?);
                }
                Tensor::cat(&sums, 1)?.sum_keepdim(1)? / count
            };
            let mean = mean_of(&Ok)?;
            let centre = mean.unsqueeze(2)?;
            variances.push(mean_of(&|part| part.broadcast_sub(&centre)?.sqr())?);
            means.push(mean);
        }
        let deviations = (Tensor::cat(&variances, 0)?.flatten_all()? + EPSILON)?.sqrt()?;
        Ok((Tensor::cat(&means, 0)?.flatten_all()?, deviations))
    }
}

/// A sum in f64, over eight lanes that the compiler can keep in registers.
fn sum_f64(values: &[f32], f: impl Fn(f64) -> f64) -> f64 {
    let mut lanes = [0f64; 8];
    let chunks = values.chunks_exact(8);
    let rest: f64 = chunks.remainder().iter().map(|value| f(f64::from(*value))).sum();
    for chunk in chunks {
        lanes
            .iter_mut()
            .zip(chunk)
            .for_each(|(lane, value)| *lane += f(f64::from(*value)));
    }
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_measured_alike(norm: &GroupNorm, map: &Tensor, limit: f32) -> Result<()> {
        let (means, deviations) = norm.statistics_on_cpu(map)?;
        let (other_means, other_deviations) = norm.statistics_by_operations(&crate::device::here(map))?;
        for (a, b) in [(means, other_means), (deviations, other_deviations)] {
            let worst = (a - b.to_device(&Device::Cpu)?)?
                .abs()?
                .max(0)?
                .to_scalar::<f32>()?;
            assert!(worst < limit, "{worst:e}");
        }
        Ok(())
    }

    #[test]
    fn tensor_operations_measure_the_same() -> Result<()> {
        let values: Vec<f32> = (0..24 * 35)
            .map(|i| ((i * i) as f32 * 0.37).sin() * 2.0 + 5.0)
            .collect();
        let map = Tensor::from_vec(values, (1, 24, 7, 5), &Device::Cpu)?;
        let ones = Tensor::ones(24, DType::F32, &Device::Cpu)?;
        let norm = GroupNorm::new(ones.clone(), ones, 6)?;
        assert_measured_alike(&norm, &map, 1e-5)
    }

    #[test]
    fn a_group_may_be_larger_than_a_part() -> Result<()> {
        let rows = PART_BYTES / 4 / 1024 + 1000;
        let ramp = Tensor::arange(0f32, (2 * rows) as f32, &Device::Cpu)?.reshape((1, 2, rows, 1))?;
        let map = (ramp / rows as f64)?
            .broadcast_as((1, 2, rows, 1024))?
            .contiguous()?;
        let ones = Tensor::ones(2, DType::F32, &Device::Cpu)?;
        let norm = GroupNorm::new(ones.clone(), ones, 2)?;
        assert_measured_alike(&norm, &map, 1e-4)
    }
}
