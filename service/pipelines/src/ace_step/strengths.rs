//! A separate strength for each frame of a track: "Differential Diffusion: Giving Each Pixel Its Strength" (Levin and Fried
//! 2023), over time. Sampling begins at the step of the largest strength. Until the schedule reaches the strength of a frame,
//! the frame is the source's, at the noise of each step.

use candle_core::{Device, Tensor};
use model::{decimal, first_step};

use crate::StrengthPoint;

/// Strengths over the seconds of a track.
struct Curve(Vec<(f64, f32)>);

impl Curve {
    fn of(points: &[StrengthPoint]) -> Curve {
        let points = points.iter();
        Curve(
            points
                .map(|point| (decimal(point.seconds), point.strength))
                .collect(),
        )
    }

    /// The strength at a second: linear between points, constant before the first and after the last. Of several points at
    /// one second the last counts from there on. `None` without points.
    fn at(&self, seconds: f64) -> Option<f32> {
        let after = self.0.partition_point(|(at, _)| *at <= seconds);
        let before = after.checked_sub(1).and_then(|at| self.0.get(at));
        Some(match (before, self.0.get(after)) {
            (Some(&(from, low)), Some(&(to, high))) => {
                let (low, high) = (f64::from(low), f64::from(high));
                (low + (high - low) * (seconds - from) / (to - from)) as f32
            }
            (Some(&(_, only)), None) | (None, Some(&(_, only))) => only,
            (None, None) => return None,
        })
    }
}

/// The frames of a source that begin later than the sampling.
#[derive(Debug)]
pub(super) struct Held {
    /// f32 `[frames, channels]` in host memory.
    pub(super) source: Tensor,
    /// The noise that the source is mixed with, of the same shape.
    pub(super) noise: Tensor,
    /// The first step of each frame, in the schedule; the number of all steps for a frame that never changes.
    pub(super) first_steps: Vec<u32>,
}

impl Held {
    /// For `per_second` frames a second, in a schedule of `steps` steps.
    pub(super) fn new(
        (source, noise): (Tensor, Tensor),
        points: &[StrengthPoint],
        (per_second, steps): (f64, u32),
    ) -> candle_core::Result<Held> {
        let frames = source.dim(0)?;
        let curve = Curve::of(points);
        let first = |frame: usize| {
            let strength = curve.at(frame as f64 / per_second);
            strength.map_or(0, |strength| first_step(steps, strength))
        };
        Ok(Held {
            source,
            noise,
            first_steps: (0..frames).map(first).collect(),
        })
    }

    /// Whether some frames are not yet sampled when step `next`, from 0, begins: the step before must not change them.
    pub(super) fn holds_before(&self, next: u32) -> bool {
        self.first_steps.iter().any(|first| *first >= next)
    }

    /// The latent with which step `next` begins, at `sigma`, f32 in host memory: frames whose first step is this one or later are the
    /// source's.
    pub(super) fn before(&self, next: u32, sigma: f32, latent: &Tensor) -> candle_core::Result<Tensor> {
        let (frames, channels) = latent.dims2()?;
        let of = |tensor: &Tensor| tensor.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>();
        let (mut numbers, kept) = (of(latent)?, of(&mixed(&self.source, &self.noise, sigma)?)?);
        let rows = numbers
            .chunks_exact_mut(channels)
            .zip(kept.chunks_exact(channels));
        for ((row, kept), first) in rows.zip(&self.first_steps) {
            if *first >= next {
                row.copy_from_slice(kept);
            }
        }
        Tensor::from_vec(numbers, (frames, channels), &Device::Cpu)
    }
}

/// A source at the noise of `sigma`.
pub(super) fn mixed(source: &Tensor, noise: &Tensor, sigma: f32) -> candle_core::Result<Tensor> {
    let sigma = f64::from(sigma);
    (noise * sigma)? + (source * (1.0 - sigma))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strengths_are_linear_between_points() {
        let points = [(1.0, 0.5), (1.2, 1.0), (1.2, 0.0), (4.0, 0.5)];
        let curve = Curve::of(&points.map(|(seconds, strength)| StrengthPoint { seconds, strength }));
        for (seconds, expected) in [(0.0, 0.5), (1.1, 0.75), (1.2, 0.0), (2.6, 0.25), (9.0, 0.5)] {
            let found = curve.at(seconds);
            assert!(
                found.is_some_and(|found| (found - expected).abs() < 1e-6),
                "{seconds}: {found:?}"
            );
        }
        assert_eq!(Curve::of(&[]).at(1.0), None);
    }
}
