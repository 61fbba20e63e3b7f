//! Picture to latent: `AutoencoderKL.encode`.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;

use super::config::VaeConfig;
use super::scratch::Chunking;
use crate::autoencoders::half::Half;
use crate::autoencoders::moments::Moments;
use crate::autoencoders::source::{device_of, dtype_of_maps, finite, unsupported};
use crate::autoencoders::tiles::in_tiles;

/// The encoder of an autoencoder.
#[derive(Clone, Debug)]
pub struct VaeEncoder {
    config: VaeConfig,
    dtype: DType,
    device: Device,
    half: Half,
}

impl VaeEncoder {
    /// The encoder with the tensors of the `vae` component, with diffusers' names (`encoder.*`, `quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &VaeConfig, tensors: &ComponentTensors) -> Result<VaeEncoder, StageError> {
        VaeEncoder::in_dtype(config, tensors, dtype_of_maps(tensors, "encoder.conv_in.bias")?)
    }

    /// [`VaeEncoder::new`] with maps of this dtype, on any device (see [`super::VaeDecoder::in_dtype`]).
    ///
    /// # Errors
    /// Errors of [`VaeEncoder::new`].
    pub fn in_dtype(
        config: &VaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<VaeEncoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(VaeEncoder {
            half: Half::new(&config.table().encoder(), tensors, dtype)?,
            dtype,
            device: device_of(tensors, "encoder.conv_in.bias")?,
            config: config.clone(),
        })
    }

    /// Encodes `picture`, f32 `[1, in_channels, height, width]` of -1 to 1, with dimensions that are multiples of
    /// [`VaeConfig::factor`]: `AutoencoderKL.encode`. Strips and tiles are in latent rows.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for a picture of another
    /// shape.
    pub fn encode(
        &self,
        picture: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        match *picture.dims() {
            [1, channels, height, width] => self.check([height, width, channels])?,
            ref other => {
                return Err(StageError::BadInput(format!(
                    "a picture of shape {other:?} where [1, {}, h, w] is expected",
                    self.config.in_channels
                )));
            }
        }
        let map = ops::planes_to_map(&picture.to_dtype(DType::F32)?, (1.0, 0.0), self.dtype)?;
        let frame = map.unsqueeze(0)?;
        drop(map);
        self.encoded(frame, chunking, cancelled)
    }

    /// Encodes an 8-bit picture, row by row, with the autoencoder's number of channels
    /// (`VaeImageProcessor.preprocess` and [`VaeEncoder::encode`]).
    ///
    /// # Errors
    /// Errors of [`VaeEncoder::encode`].
    pub fn encode_rgb8(
        &self,
        rgb: &[u8],
        (width, height): (usize, usize),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let shape = [height, width, self.config.in_channels];
        self.check(shape)?;
        let frame = ops::bytes_to_map(rgb, shape, self.dtype, &self.device)?.unsqueeze(0)?;
        self.encoded(frame, chunking, cancelled)
    }

    fn check(&self, shape: [usize; 3]) -> Result<(), StageError> {
        let (factor, expected) = (self.config.factor(), self.config.in_channels);
        let [height, width, channels] = shape;
        let fits = |size: usize| size > 0 && size.is_multiple_of(factor);
        if channels == expected && fits(height) && fits(width) {
            return Ok(());
        }
        Err(StageError::BadInput(format!(
            "a picture of {width}x{height} with {channels} channels where {expected} and multiples of {factor} are expected"
        )))
    }

    /// Encodes a map `[1, h, w, c]` of one frame, which is dropped as soon as it is read.
    fn encoded(
        &self,
        picture: Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let factor = self.config.factor();
        let encode = |tile: Tensor| {
            let walk = chunking.walk(tile.dim(1)? / factor, cancelled);
            self.half.run(tile, walk)
        };
        let moments = match chunking {
            Chunking::Whole | Chunking::Strips { .. } => encode(picture)?,
            Chunking::Tiles { latent_size } => {
                in_tiles(picture, (latent_size * factor, latent_size), &encode)?
            }
        };
        let (moments, is_finite) = ops::map_to_planes(&moments.squeeze(0)?)?;
        finite(is_finite)?;
        Ok(Moments::of_planes(&moments.to_device(&Device::Cpu)?)?)
    }
}
