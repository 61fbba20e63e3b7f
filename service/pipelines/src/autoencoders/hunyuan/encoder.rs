//! Frames to latents: diffusers' `HunyuanVideoEncoder3D`, and `AutoencoderKLHunyuanVideo.encode` around it.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;

use super::config::HunyuanVaeConfig;
use super::film::blend;
use super::scratch::Chunking;
use super::time::encode_tiles;
use crate::autoencoders::half::Half;
use crate::autoencoders::moments::Moments;
use crate::autoencoders::source::{device_of, dtype_of_maps, finite, unsupported};
use crate::autoencoders::tiles::{copy, in_tiles};

/// The encoder of pictures and films.
#[derive(Clone, Debug)]
pub struct HunyuanVaeEncoder {
    config: HunyuanVaeConfig,
    dtype: DType,
    device: Device,
    half: Half,
}

impl HunyuanVaeEncoder {
    /// The encoder with the tensors of the `vae` component, with diffusers' names (`encoder.*`, `quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
    ) -> Result<HunyuanVaeEncoder, StageError> {
        let dtype = dtype_of_maps(tensors, "encoder.conv_in.conv.bias")?;
        HunyuanVaeEncoder::in_dtype(config, tensors, dtype)
    }

    /// [`HunyuanVaeEncoder::new`] with maps of this dtype, on any device (see
    /// [`super::HunyuanVaeDecoder::in_dtype`]).
    ///
    /// # Errors
    /// Errors of [`HunyuanVaeEncoder::new`].
    pub fn in_dtype(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<HunyuanVaeEncoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(HunyuanVaeEncoder {
            half: Half::new(&config.table().encoder(), tensors, dtype)?,
            dtype,
            device: device_of(tensors, "encoder.conv_in.conv.bias")?,
            config: config.clone(),
        })
    }

    /// Encodes `frames`, `[n, height, width, in_channels]` of -1 to 1 in f32, f16 or bf16 on the device of the
    /// weights, with sides that are multiples of [`HunyuanVaeConfig::factor`], to moments `[1, latent_channels,
    /// (n - 1) / 4 + 1, height / 8, width / 8]`: `AutoencoderKLHunyuanVideo.encode`, with its tiles in time.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for frames of another shape.
    pub fn encode(
        &self,
        frames: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let Ok((count, height, width, channels)) = frames.dims4() else {
            let problem = format!(
                "frames of shape {:?} where [n, h, w, c] are expected",
                frames.dims()
            );
            return Err(StageError::BadInput(problem));
        };
        let shape = [count, height, width, channels];
        self.encoded(shape, chunking, cancelled, &|first, count| {
            let tile = frames.narrow(0, first, count)?;
            let map = ops::blank(tile.dims(), self.dtype, &self.device)?;
            ops::copy_rows(&tile, &map)?;
            Ok(map)
        })
    }

    /// Encodes `count` 8-bit frames of this width and height, frame by frame and row by row, with the autoencoder's number of
    /// channels (`VideoProcessor.preprocess_video` and [`HunyuanVaeEncoder::encode`]). The frames are copied to the card one
    /// tile at a time.
    ///
    /// # Errors
    /// Errors of [`HunyuanVaeEncoder::encode`].
    pub fn encode_rgb8(
        &self,
        rgb: &[u8],
        count: usize,
        (width, height): (usize, usize),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let channels = self.config.in_channels;
        let of_frame = width * height * channels;
        if rgb.len() != count * of_frame {
            let problem = format!(
                "{} bytes where {count} frames of {width}x{height} have {}",
                rgb.len(),
                count * of_frame
            );
            return Err(StageError::BadInput(problem));
        }
        let shape = [count, height, width, channels];
        self.encoded(shape, chunking, cancelled, &|first, count| {
            let bytes = &rgb[first * of_frame..(first + count) * of_frame];
            let lines = [count * height, width, channels];
            let map = ops::bytes_to_map(bytes, lines, self.dtype, &self.device)?;
            map.reshape((count, height, width, channels))
        })
    }

    fn check(&self, [count, height, width, channels]: [usize; 4]) -> Result<(), StageError> {
        let (factor, expected) = (self.config.factor(), self.config.in_channels);
        let fits = |size: usize| size > 0 && size.is_multiple_of(factor);
        if channels == expected && count > 0 && fits(height) && fits(width) {
            return Ok(());
        }
        Err(StageError::BadInput(format!(
            "{count} frames of {width}x{height} with {channels} channels where {expected} and multiples of {factor} \
             are expected"
        )))
    }

    /// `bring(first, count)` returns the map of `count` frames from `first` on, `[count, height, width, channels]`.
    fn encoded(
        &self,
        shape: [usize; 4],
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
        bring: &dyn Fn(usize, usize) -> candle_core::Result<Tensor>,
    ) -> Result<Moments, StageError> {
        self.check(shape)?;
        let [frames, height, width, _] = shape;
        let factor = self.config.factor();
        let (length, h, w) = (self.config.latents(frames), height / factor, width / factor);
        let channels = self.config.latent_channels;
        let joined = ops::blank(&[length, h, w, 2 * channels], self.dtype, &self.device)?;
        let mut next = 0;
        let mut carried: Option<Tensor> = None;
        for tile in encode_tiles(&self.config, frames) {
            let moments = self.encode_tile(bring(tile.first, tile.count)?, chunking, cancelled)?;
            let outputs = moments.dim(0)? - tile.dropped;
            let moments = moments.narrow(0, tile.dropped, outputs)?;
            if let Some(before) = carried.take() {
                blend(&before, &moments, tile.blended)?;
            }
            if tile.carried > 0 {
                let last = moments.narrow(0, outputs - tile.carried, tile.carried)?;
                carried = Some(copy(&last)?);
            }
            let results = moments.narrow(0, 0, tile.kept)?;
            ops::copy_rows(&results, &joined.narrow(0, next, tile.kept)?)?;
            next += tile.kept;
        }
        let lines = joined.reshape((length * h, w, 2 * channels))?;
        let (planes, is_finite) = ops::map_to_planes(&lines)?;
        finite(is_finite)?;
        let planes = planes
            .to_device(&Device::Cpu)?
            .reshape((1, 2 * channels, length, h, w))?;
        Ok(Moments::of_planes(&planes)?)
    }

    /// Encodes frames `[t, h, w, c]` of one tile in time to moments `[l, h / 8, w / 8, 2 c]`.
    fn encode_tile(
        &self,
        frames: Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let walk = chunking.walk(cancelled);
        match chunking {
            Chunking::Whole | Chunking::Strips { .. } => self.half.run(frames, walk),
            Chunking::Tiles { latent_size } => {
                let sizes = (latent_size * self.config.factor(), latent_size);
                in_tiles(frames, sizes, &|tile| self.half.run(tile, walk))
            }
        }
    }
}
