//! The output of encoders: a Gaussian for each number of a latent.

use candle_core::{Device, Tensor};

use crate::noise::Generator;

/// The encoder's output: a Gaussian per latent value (`DiagonalGaussianDistribution`). Both tensors are in host
/// memory: they are small, and few operations follow.
#[derive(Clone, Debug)]
pub struct Moments {
    /// f32 `[1, latent_channels, h, w]`: the distribution's `mode()`.
    pub mean: Tensor,
    /// f32 `[1, latent_channels, h, w]`, clamped to -30 to 20.
    pub log_variance: Tensor,
}

impl Moments {
    /// From the encoder's last map in host memory, `[1, 2 channels, ..]`: means, then logarithms of variances.
    pub(crate) fn of_planes(planes: &Tensor) -> candle_core::Result<Moments> {
        let channels = planes.dim(1)? / 2;
        Ok(Moments {
            mean: planes.narrow(1, 0, channels)?.contiguous()?,
            log_variance: planes
                .narrow(1, channels, channels)?
                .clamp(-30f32, 20f32)?
                .contiguous()?,
        })
    }

    /// The sample that a generator draws next.
    pub(crate) fn drawn(&self, generator: &mut Generator) -> candle_core::Result<Tensor> {
        let noise = generator.normal(self.mean.elem_count());
        self.sample(&Tensor::from_vec(noise, self.mean.shape(), &Device::Cpu)?)
    }

    /// The sample for standard-normal `noise` of the mean's shape: `mean + exp(log_variance / 2) * noise`.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn sample(&self, noise: &Tensor) -> candle_core::Result<Tensor> {
        &self.mean + ((&self.log_variance * 0.5)?.exp()? * noise)?
    }
}
