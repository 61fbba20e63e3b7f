//! The encoder's output: a Gaussian for each number of a latent.

use candle_core::Tensor;

/// Smallest standard deviation.
const LEAST: f64 = 1e-4;

/// Mean and standard deviation of a track's latents (diffusers' `OobleckDiagonalGaussianDistribution`). Both tensors are
/// in host memory: they are small, and few operations follow.
#[derive(Clone, Debug)]
pub struct OobleckMoments {
    /// f32 `[1, frames, channels]`: the distribution's `mode()`.
    pub mean: Tensor,
    /// f32 `[1, frames, channels]`: `softplus(scale) + 1e-4`.
    pub deviation: Tensor,
}

impl OobleckMoments {
    /// The moments of the encoder's output `[frames, 2 channels]`, f32 in host memory: means, then scales.
    pub(super) fn of(output: &Tensor) -> candle_core::Result<OobleckMoments> {
        let (frames, both) = output.dims2()?;
        let channels = both / 2;
        let half = |first| output.narrow(1, first, channels)?.reshape((1, frames, channels));
        // softplus(x) = max(x, 0) + ln(1 + e^-|x|)
        let scale: Tensor = half(channels)?;
        let tail = (scale.abs()?.neg()?.exp()? + 1.0)?.log()?;
        Ok(OobleckMoments {
            mean: half(0)?.contiguous()?,
            deviation: ((scale.relu()? + tail)? + LEAST)?,
        })
    }

    /// The sample for standard-normal `noise` of the mean's shape: `mean + deviation * noise`. The reference draws its
    /// noise as `[1, channels, frames]`: transpose it.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn sample(&self, noise: &Tensor) -> candle_core::Result<Tensor> {
        &self.mean + (&self.deviation * noise)?
    }
}
