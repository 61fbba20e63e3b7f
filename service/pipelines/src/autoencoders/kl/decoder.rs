//! Latent to picture: `AutoencoderKL.decode`.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;

use super::config::VaeConfig;
use super::picture::Rgb8;
use super::scratch::Chunking;
use crate::autoencoders::half::Half;
use crate::autoencoders::source::{dtype_of_maps, finite, unsupported};
use crate::autoencoders::tiles::in_tiles;

/// The decoder of an autoencoder. Its tensors are shared with the component.
#[derive(Clone, Debug)]
pub struct VaeDecoder {
    config: VaeConfig,
    dtype: DType,
    half: Half,
}

impl VaeDecoder {
    /// The decoder with the tensors of the `vae` component, with diffusers' names (`decoder.*`, `post_quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &VaeConfig, tensors: &ComponentTensors) -> Result<VaeDecoder, StageError> {
        VaeDecoder::in_dtype(config, tensors, dtype_of_maps(tensors, "decoder.conv_in.bias")?)
    }

    /// [`VaeDecoder::new`] with maps of this dtype, on any device: the computation of a card in a narrow dtype can be
    /// reproduced on the CPU.
    ///
    /// # Errors
    /// Errors of [`VaeDecoder::new`].
    pub fn in_dtype(
        config: &VaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<VaeDecoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(VaeDecoder {
            half: Half::new(&config.table().decoder(), tensors, dtype)?,
            dtype,
            config: config.clone(),
        })
    }

    /// Decodes `latent`, f32 `[1, latent_channels, h, w]` in the autoencoder's scale (see [`VaeConfig::unscaled`]),
    /// to `[1, out_channels, 8h, 8w]` in f32, -1 to 1 and not clamped: `AutoencoderKL.decode`. `cancelled` is called
    /// before every layer and every strip.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for a latent of another
    /// shape.
    pub fn decode(
        &self,
        latent: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let map = self.decoded(latent, (1.0, 0.0), chunking, cancelled)?;
        let (picture, is_finite) = ops::map_to_planes(&map)?;
        finite(is_finite)?;
        Ok(picture)
    }

    /// Decodes `latent`, f32 `[1, latent_channels, h, w]` in the transformer's scale, to an 8-bit picture
    /// (`VaeImageProcessor.postprocess`): only bytes are copied from the card.
    ///
    /// # Errors
    /// Errors of [`VaeDecoder::decode`]; [`StageError::BadInput`] for an autoencoder without three channels.
    pub fn decode_to_rgb8(
        &self,
        latent: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Rgb8, StageError> {
        if self.config.out_channels != 3 {
            let problem = format!(
                "a picture of {} channels where 3 are expected",
                self.config.out_channels
            );
            return Err(StageError::BadInput(problem));
        }
        let map = self.decoded(latent, self.config.unscaling(), chunking, cancelled)?;
        let (height, width, _) = map.dims3()?;
        let (rgb, is_finite) = ops::map_to_bytes(&map)?;
        finite(is_finite)?;
        Ok(Rgb8 { width, height, rgb })
    }

    /// Decodes to a map `[8h, 8w, out_channels]`, after an affine transformation of the latent.
    fn decoded(
        &self,
        latent: &Tensor,
        affine: (f64, f64),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let expected = self.config.latent_channels;
        if !matches!(*latent.dims(), [1, channels, rows, columns] if channels == expected && rows > 0 && columns > 0)
        {
            let found = latent.dims();
            let problem = format!("a latent of shape {found:?} where [1, {expected}, h, w] is expected");
            return Err(StageError::BadInput(problem));
        }
        let latent = ops::planes_to_map(&latent.to_dtype(DType::F32)?, affine, self.dtype)?.unsqueeze(0)?;
        let decode = |tile: Tensor| {
            let walk = chunking.walk(tile.dim(1)?, cancelled);
            self.half.run(tile, walk)
        };
        let picture = match chunking {
            Chunking::Whole | Chunking::Strips { .. } => decode(latent)?,
            Chunking::Tiles { latent_size } => {
                let sizes = (latent_size, latent_size * self.config.factor());
                in_tiles(latent, sizes, &decode)?
            }
        };
        Ok(picture.squeeze(0)?)
    }
}
