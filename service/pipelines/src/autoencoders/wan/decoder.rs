//! Latents to frames: `AutoencoderKLWan.decode`, latent by latent.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;

use super::config::WanVaeConfig;
use super::latent;
use super::scratch::Chunking;
use super::stream::Stream;
use super::table::{self, Layer};
use super::tensors::Tensors;
use crate::autoencoders::source::{TensorSource, device_of, dtype_of_maps, unsupported};
use crate::maps::Convolution;

const FIRST: &str = "decoder.conv_in.bias";

/// The decoder of films. Its tensors are shared with the component.
#[derive(Clone, Debug)]
pub struct WanVaeDecoder {
    config: WanVaeConfig,
    dtype: DType,
    device: Device,
    layers: Vec<Layer<Convolution, Tensor>>,
}

/// How a film is decoded. Nothing of it changes a frame.
#[derive(Clone, Copy)]
pub struct FrameDecoding<'a> {
    pub chunking: Chunking,
    /// Called before every layer of every piece.
    pub cancelled: &'a dyn Fn() -> bool,
}

impl WanVaeDecoder {
    /// The decoder with the tensors of the `vae` component, with diffusers' names (`decoder.*`, `post_quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &WanVaeConfig, tensors: &ComponentTensors) -> Result<WanVaeDecoder, StageError> {
        WanVaeDecoder::in_dtype(config, tensors, dtype_of_maps(tensors, FIRST)?)
    }

    /// [`WanVaeDecoder::new`] with maps of this dtype, on any device: the computation of a card in a narrow dtype can be
    /// reproduced on the CPU.
    ///
    /// # Errors
    /// Errors of [`WanVaeDecoder::new`].
    pub fn in_dtype(
        config: &WanVaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<WanVaeDecoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(WanVaeDecoder {
            layers: table::decoder(config, &mut TensorSource { tensors, dtype })?,
            dtype,
            device: device_of(tensors, FIRST)?,
            config: config.clone(),
        })
    }

    /// The configuration with which the decoder was made.
    pub fn config(&self) -> &WanVaeConfig {
        &self.config
    }

    /// The dtype of maps.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Begins a film whose latents are `h` by `w`. This allocates what the layers will remember.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for latents of no rows or columns; errors of the device.
    pub fn begin(&self, (h, w): (usize, usize), chunking: Chunking) -> Result<Decoding<'_>, StageError> {
        if h * w == 0 {
            return Err(StageError::BadInput(format!("latents of {h}x{w}")));
        }
        let a = self.arithmetic(chunking, &|| false);
        Ok(Decoding {
            decoder: self,
            sides: (h, w),
            chunking,
            stream: Stream::new(&a, &self.layers, [h, w, self.config.z_dim])?,
        })
    }

    fn arithmetic<'a>(&'a self, chunking: Chunking, cancelled: &'a dyn Fn() -> bool) -> Tensors<'a> {
        Tensors {
            device: &self.device,
            dtype: self.dtype,
            pieces: chunking.pieces(),
            cancelled,
        }
    }

    /// Decodes `latents`, f32 `[1, z_dim, l, h, w]` in the scale of the autoencoder ([`WanVaeConfig::unscaled`]), to the
    /// `4 (l - 1) + 1` frames of `AutoencoderKLWan.decode`. `deliver` is called with the index of a frame, and with the
    /// frames from there on, `[n, height, width, 3]` in the dtype of maps, -1 to 1 and not clamped. Each frame is delivered once
    /// and in order, as soon as its latent is decoded.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::BadInput`] for latents of another shape; errors of `deliver`. Whether
    /// values are finite is found by [`super::frames_to_rgb8`].
    pub fn decode_frames(
        &self,
        latents: &Tensor,
        how: &FrameDecoding<'_>,
        deliver: &mut dyn FnMut(usize, Tensor) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let (length, h, w) = self.sides_of(latents)?;
        let mut decoding = self.begin((h, w), how.chunking)?;
        let mut next = 0;
        for index in 0..length {
            let frames = decoding.next(&latents.narrow(2, index, 1)?, how.cancelled)?;
            let count = frames.dim(0)?;
            deliver(next, frames)?;
            next += count;
        }
        Ok(())
    }

    /// Number, height and width of latents.
    fn sides_of(&self, latents: &Tensor) -> Result<(usize, usize, usize), StageError> {
        match *latents.dims() {
            [1, channels, length, h, w] if channels == self.config.z_dim && length * h * w > 0 => {
                Ok((length, h, w))
            }
            ref found => {
                let channels = self.config.z_dim;
                Err(StageError::BadInput(format!(
                    "latents of shape {found:?} where [1, {channels}, l, h, w] are expected"
                )))
            }
        }
    }
}

/// A film that is being decoded. It owns what the layers remember of the latents before: a decode may stop after any latent and
/// go on later, and one that is dropped leaves nothing.
pub struct Decoding<'a> {
    decoder: &'a WanVaeDecoder,
    sides: (usize, usize),
    chunking: Chunking,
    stream: Stream<'a, Convolution, Tensor, Tensor>,
}

impl Decoding<'_> {
    /// Decodes the next latent, f32 `[1, z_dim, 1, h, w]`, to its frames `[n, height, width, 3]`: one for the first latent, four
    /// for every other one.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::BadInput`] for a latent of another shape, and after a latent that was not
    /// finished: the film has to begin again then.
    pub fn next(&mut self, latent: &Tensor, cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let (length, h, w) = self.decoder.sides_of(latent)?;
        if length != 1 || (h, w) != self.sides {
            let ((height, width), found) = (self.sides, latent.dims());
            return Err(StageError::BadInput(format!(
                "latents of shape {found:?} where one of {height}x{width} is expected"
            )));
        }
        let decoder = self.decoder;
        // Contiguous before it is copied to a card: a view would take the memory of its whole tensor there.
        let planes = ops::in_dtype(latent, DType::F32)?.to_device(&decoder.device)?;
        let planes = planes.reshape((1, decoder.config.z_dim, h, w))?;
        let map = ops::planes_to_map(&planes, (1.0, 0.0), decoder.dtype)?.unsqueeze(0)?;
        drop(planes);
        let a = decoder.arithmetic(self.chunking, cancelled);
        latent::decode(&decoder.config, &a, &mut self.stream, map)
    }
}
