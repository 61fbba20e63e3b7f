//! Sound to latents: diffusers' `OobleckEncoder`.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::copy_rows;

use super::config::OobleckConfig;
use super::layers::Half;
use super::moments::OobleckMoments;
use super::windows::{Window, Windows, windows_of};
use crate::autoencoders::source::{device_of, dtype_of_maps, finite, unsupported};

/// The encoder of tracks. Weights are folded into filters when it is made, which takes the bytes that
/// [`super::encode_scratch`] counts.
#[derive(Clone, Debug)]
pub struct OobleckEncoder {
    config: OobleckConfig,
    dtype: DType,
    device: Device,
    half: Half,
}

impl OobleckEncoder {
    /// The encoder with the tensors of the `vae` component, with diffusers' names (`encoder.*`,
    /// [`OobleckConfig::tensor_shapes`]).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &OobleckConfig, tensors: &ComponentTensors) -> Result<OobleckEncoder, StageError> {
        let dtype = dtype_of_maps(tensors, "encoder.conv1.bias")?;
        OobleckEncoder::in_dtype(config, tensors, dtype)
    }

    /// [`OobleckEncoder::new`] with sequences of this dtype, on any device (see
    /// [`super::OobleckDecoder::in_dtype`]).
    ///
    /// # Errors
    /// Errors of [`OobleckEncoder::new`].
    pub fn in_dtype(
        config: &OobleckConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<OobleckEncoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(OobleckEncoder {
            half: Half::new(&config.encoder(), tensors, dtype)?,
            dtype,
            device: device_of(tensors, "encoder.conv1.bias")?,
            config: config.clone(),
        })
    }

    /// Encodes samples `[n, audio_channels]`, f32, f16 or bf16, in host memory or on the device of the weights, of any number
    /// that has a latent frame ([`OobleckConfig::frames`]; the reference pipeline pads with zeros to whole frames first, and
    /// here the caller does). [`super::samples_from_pcm16`] makes samples of 16 bits. Samples in host memory are copied to the
    /// device one window at a time.
    ///
    /// The moments of all windows are concatenated, and can be sampled once. They do not depend on `windows`: to the bit on
    /// the CPU, within rounding on a card. `cancelled` is polled before every layer.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for samples of another shape, and for too
    /// few samples.
    pub fn encode(
        &self,
        samples: &Tensor,
        windows: Windows,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<OobleckMoments, StageError> {
        let expected = self.config.audio_channels;
        let (length, frames) = match *samples.dims() {
            [length, channels] if channels == expected => (length, self.config.frames(length)),
            _ => (0, 0),
        };
        if frames == 0 {
            let found = samples.dims();
            let problem =
                format!("samples of shape {found:?} where [n, {expected}] of a latent frame are expected");
            return Err(StageError::BadInput(problem));
        }
        let hop = self.config.hop();
        let whole = length.div_ceil(hop);
        let mut parts = Vec::new();
        for window in windows_of(whole, 0..whole, windows, self.config.encode_margins()) {
            // The strides may result in more or fewer frames than the track has hops: the difference is at the track's end.
            let keep_end = if window.end == whole {
                frames
            } else {
                window.keep_end
            };
            if window.keep_first >= keep_end {
                continue;
            }
            let end = (window.end * hop).min(length);
            let piece = samples.narrow(0, window.first * hop, end - window.first * hop)?;
            let encoded = self.encode_window(&piece, cancelled)?;
            parts.push(kept(&encoded, window, keep_end)?);
        }
        let output = Tensor::cat(&parts, 0)?;
        finite(ops::all_finite(&output)?)?;
        Ok(OobleckMoments::of(&output)?)
    }

    /// Encodes the samples of a window.
    fn encode_window(&self, samples: &Tensor, cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let (length, channels) = samples.dims2()?;
        // A window is a view, and a copy to the device would take all memory of its tensor: the window is made contiguous
        // first.
        let samples = match samples.device().same_device(&self.device) {
            true => samples.clone(),
            false => samples.force_contiguous()?.to_device(&self.device)?,
        };
        // Channels beyond the track's are zeros.
        let x = Tensor::zeros((length, self.config.sample_channels()), self.dtype, &self.device)?;
        copy_rows(&samples, &x.narrow(1, 0, channels)?)?;
        drop(samples);
        self.half.run(x, cancelled)
    }
}

/// The frames of a window that are kept, f32 in host memory.
fn kept(encoded: &Tensor, window: Window, keep_end: usize) -> Result<Tensor, StageError> {
    let kept = encoded.narrow(0, window.keep_first - window.first, keep_end - window.keep_first)?;
    let wide = ops::blank(kept.dims(), DType::F32, kept.device())?;
    copy_rows(&kept, &wide)?;
    Ok(wide.to_device(&Device::Cpu)?)
}
