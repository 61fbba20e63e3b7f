//! Frames to latents: `AutoencoderKLWan.encode`, the first frame and then four at a time.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;

use super::config::WanVaeConfig;
use super::latent;
use super::scratch::Chunking;
use super::stream::Stream;
use super::table::{self, Layer};
use super::tensors::Tensors;
use crate::autoencoders::moments::Moments;
use crate::autoencoders::source::{TensorSource, device_of, dtype_of_maps, finite, unsupported};
use crate::maps::Convolution;

const FIRST: &str = "encoder.conv_in.bias";

/// The encoder of pictures and films.
#[derive(Clone, Debug)]
pub struct WanVaeEncoder {
    config: WanVaeConfig,
    dtype: DType,
    device: Device,
    layers: Vec<Layer<Convolution, Tensor>>,
}

impl WanVaeEncoder {
    /// The encoder with the tensors of the `vae` component, with diffusers' names (`encoder.*`, `quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &WanVaeConfig, tensors: &ComponentTensors) -> Result<WanVaeEncoder, StageError> {
        WanVaeEncoder::in_dtype(config, tensors, dtype_of_maps(tensors, FIRST)?)
    }

    /// [`WanVaeEncoder::new`] with maps of this dtype, on any device (see [`super::WanVaeDecoder::in_dtype`]).
    ///
    /// # Errors
    /// Errors of [`WanVaeEncoder::new`].
    pub fn in_dtype(
        config: &WanVaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<WanVaeEncoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(WanVaeEncoder {
            layers: table::encoder(config, &mut TensorSource { tensors, dtype })?,
            dtype,
            device: device_of(tensors, FIRST)?,
            config: config.clone(),
        })
    }

    /// Encodes `frames`, `[n, height, width, 3]` of -1 to 1 in f32, f16 or bf16 on the device of the weights, with sides
    /// that are multiples of [`WanVaeConfig::factor`], to moments `[1, z_dim, (n - 1) / 4 + 1, h, w]` in the scale of the
    /// autoencoder ([`WanVaeConfig::scaled`]). Frames after the last four are left out, as in the reference.
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
            let found = frames.dims();
            let problem = format!("frames of shape {found:?} where [n, h, w, c] are expected");
            return Err(StageError::BadInput(problem));
        };
        let shape = [count, height, width, channels];
        self.encoded(shape, chunking, cancelled, &|first, count| {
            let given = frames.narrow(0, first, count)?;
            let map = ops::blank(given.dims(), self.dtype, &self.device)?;
            ops::copy_rows(&given, &map)?;
            Ok(map)
        })
    }

    /// Encodes `count` 8-bit frames of this width and height, frame by frame and row by row (`VideoProcessor.preprocess_video`
    /// and [`WanVaeEncoder::encode`]). They are copied to the card as they are encoded.
    ///
    /// # Errors
    /// Errors of [`WanVaeEncoder::encode`].
    pub fn encode_rgb8(
        &self,
        rgb: &[u8],
        count: usize,
        (width, height): (usize, usize),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let channels = self.config.channels_of_frames();
        let of_frame = width * height * channels;
        if rgb.len() != count * of_frame {
            let (found, expected) = (rgb.len(), count * of_frame);
            let problem = format!("{found} bytes where {count} frames of {width}x{height} have {expected}");
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

    /// Encodes a film of `count` frames that begins with an 8-bit picture of this width and height, and is zero after it: what a
    /// film from a picture is conditioned on.
    ///
    /// # Errors
    /// Errors of [`WanVaeEncoder::encode`].
    pub fn encode_beginning(
        &self,
        rgb: &[u8],
        count: usize,
        (width, height): (usize, usize),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let channels = self.config.channels_of_frames();
        if rgb.len() != width * height * channels {
            let problem = format!("{} bytes of a picture of {width}x{height}", rgb.len());
            return Err(StageError::BadInput(problem));
        }
        self.encoded(
            [count, height, width, channels],
            chunking,
            cancelled,
            &|first, count| match first {
                0 => {
                    let map = ops::bytes_to_map(rgb, [height, width, channels], self.dtype, &self.device)?;
                    map.reshape((1, height, width, channels))
                }
                _ => Tensor::zeros((count, height, width, channels), self.dtype, &self.device),
            },
        )
    }

    fn check(&self, [count, height, width, channels]: [usize; 4]) -> Result<(), StageError> {
        let (factor, expected) = (self.config.factor(), self.config.channels_of_frames());
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
        let moments = 2 * self.config.z_dim;
        let a = Tensors {
            device: &self.device,
            dtype: self.dtype,
            pieces: chunking.pieces(),
            cancelled,
        };
        let (patch, channels) = (self.config.patch(), self.config.in_channels);
        let sides = [height / patch, width / patch, channels];
        let mut stream = Stream::new(&a, &self.layers, sides)?;
        let joined = ops::blank(&[length, h, w, moments], self.dtype, &self.device)?;
        for index in 0..length {
            let (first, count) = self.config.frames_of_latent(index);
            let latent = latent::encode(&self.config, &a, &mut stream, bring(first, count)?)?;
            ops::copy_rows(&latent, &joined.narrow(0, index, 1)?)?;
        }
        drop(stream);
        let lines = joined.reshape((length * h, w, moments))?;
        let (planes, is_finite) = ops::map_to_planes(&lines)?;
        finite(is_finite)?;
        let planes = planes
            .to_device(&Device::Cpu)?
            .reshape((1, moments, length, h, w))?;
        Ok(Moments::of_planes(&planes)?)
    }
}
