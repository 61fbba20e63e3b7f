//! The scale of latents by statistics of the checkpoint: `AutoencoderKLFlux2`, whose transformer sees patches of two by two
//! cells, normalised by the mean and the variance of each of their numbers.

use candle_core::{DType, Device, Result, Tensor};
use gpu::ComponentTensors;
use model::StageError;

use super::config::{PATCH, VaeConfig};
use super::table::STATISTICS;
use crate::autoencoders::COMPONENT;

/// Mean and standard deviation of the channels of the transformer's latents, f32 `[1, channels, 1, 1]` in host memory.
#[derive(Debug)]
pub(super) struct Statistics {
    mean: Tensor,
    deviation: Tensor,
}

impl Statistics {
    /// The statistics of a component; `None` for an autoencoder without any.
    ///
    /// # Errors
    /// [`StageError::Missing`] where the component lacks them, and errors of the device.
    pub(super) fn of(
        config: &VaeConfig,
        tensors: &ComponentTensors,
    ) -> std::result::Result<Option<Self>, StageError> {
        if config.patch_size.is_none() {
            return Ok(None);
        }
        let channels = config.transformer_channels();
        let read = |name: &str| -> std::result::Result<Tensor, StageError> {
            let tensor = tensors.shaped(name, &[channels]);
            let tensor = tensor
                .map_err(StageError::missing_in(COMPONENT))?
                .to_device(&Device::Cpu)?;
            Ok(tensor.to_dtype(DType::F32)?.reshape((1, channels, 1, 1))?)
        };
        let [mean, variance] = STATISTICS.map(read);
        Ok(Some(Statistics {
            mean: mean?,
            deviation: (variance? + config.batch_norm_eps)?.sqrt()?,
        }))
    }

    /// The transformer's latent of an autoencoder's, f32 `[1, c, 2 h, 2 w]` in host memory: `[1, 4 c, h, w]`
    /// (`Flux2KleinPipeline._patchify_latents`).
    ///
    /// # Errors
    /// When a side is odd.
    pub(super) fn to_transformer(&self, latent: &Tensor) -> Result<Tensor> {
        let (batch, channels, height, width) = latent.dims4()?;
        if height % PATCH != 0 || width % PATCH != 0 {
            candle_core::bail!("a latent of {height} x {width} does not divide into squares of {PATCH}");
        }
        let patches = latent
            .reshape((batch, channels, height / PATCH, PATCH, width / PATCH, PATCH))?
            .permute((0, 1, 3, 5, 2, 4))?
            .reshape((batch, channels * PATCH * PATCH, height / PATCH, width / PATCH))?;
        patches.broadcast_sub(&self.mean)?.broadcast_div(&self.deviation)
    }

    /// The autoencoder's latent of a transformer's, f32 `[1, 4 c, h, w]` in host memory: `[1, c, 2 h, 2 w]`.
    ///
    /// # Errors
    /// When the channels are not those of the statistics.
    pub(super) fn to_autoencoder(&self, latent: &Tensor) -> Result<Tensor> {
        let (batch, patch, rows, columns) = latent.dims4()?;
        let channels = patch / (PATCH * PATCH);
        latent
            .broadcast_mul(&self.deviation)?
            .broadcast_add(&self.mean)?
            .reshape((batch, channels, PATCH, PATCH, rows, columns))?
            .permute((0, 1, 4, 2, 5, 3))?
            .reshape((batch, channels, rows * PATCH, columns * PATCH))
    }
}
