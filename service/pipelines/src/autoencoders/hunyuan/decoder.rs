//! Latents of one tile in time to frames: diffusers' `HunyuanVideoDecoder3D`.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;

use super::config::HunyuanVaeConfig;
use super::scratch::Chunking;
use crate::autoencoders::half::Half;
use crate::autoencoders::source::{dtype_of_maps, unsupported};
use crate::autoencoders::tiles::in_tiles;

/// The decoder of films. Its tensors are shared with the component.
#[derive(Clone, Debug)]
pub struct HunyuanVaeDecoder {
    config: HunyuanVaeConfig,
    dtype: DType,
    half: Half,
}

impl HunyuanVaeDecoder {
    /// The decoder with the tensors of the `vae` component, with diffusers' names (`decoder.*`, `post_quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
    ) -> Result<HunyuanVaeDecoder, StageError> {
        let dtype = dtype_of_maps(tensors, "decoder.conv_in.conv.bias")?;
        HunyuanVaeDecoder::in_dtype(config, tensors, dtype)
    }

    /// [`HunyuanVaeDecoder::new`] with maps of this dtype, on any device: the computation of a card in a narrow dtype
    /// can be reproduced on the CPU.
    ///
    /// # Errors
    /// Errors of [`HunyuanVaeDecoder::new`].
    pub fn in_dtype(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<HunyuanVaeDecoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(HunyuanVaeDecoder {
            half: Half::new(&config.table().decoder(), tensors, dtype)?,
            dtype,
            config: config.clone(),
        })
    }

    /// The configuration with which the decoder was made.
    pub fn config(&self) -> &HunyuanVaeConfig {
        &self.config
    }

    /// The dtype of maps.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Decodes latents `[l, h, w, c]` of one tile in time, contiguous and in the dtype of maps, to frames `[t, 8h, 8w, c]`.
    pub(super) fn decode_tile(
        &self,
        latents: Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let walk = chunking.walk(cancelled);
        match chunking {
            Chunking::Whole | Chunking::Strips { .. } => self.half.run(latents, walk),
            Chunking::Tiles { latent_size } => {
                let sizes = (latent_size, latent_size * self.config.factor());
                in_tiles(latents, sizes, &|tile| self.half.run(tile, walk))
            }
        }
    }
}
