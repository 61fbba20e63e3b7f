//! Latents to sound: diffusers' `OobleckDecoder`.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::copy_rows;

use super::config::OobleckConfig;
use super::layers::Half;
use super::windows::{Window, Windows, windows_of};
use crate::autoencoders::source::{device_of, dtype_of_maps, unsupported};

/// The decoder of tracks. Weights are folded into filters when it is made, which takes the bytes that
/// [`super::decode_scratch`] counts.
#[derive(Clone, Debug)]
pub struct OobleckDecoder {
    config: OobleckConfig,
    dtype: DType,
    device: Device,
    half: Half,
}

impl OobleckDecoder {
    /// The decoder with the tensors of the `vae` component, with diffusers' names (`decoder.*`,
    /// [`OobleckConfig::tensor_shapes`]).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &OobleckConfig, tensors: &ComponentTensors) -> Result<OobleckDecoder, StageError> {
        let dtype = dtype_of_maps(tensors, "decoder.conv1.bias")?;
        OobleckDecoder::in_dtype(config, tensors, dtype)
    }

    /// [`OobleckDecoder::new`] with sequences of this dtype, on any device: the computation of a card in a narrow dtype
    /// can be reproduced on the CPU.
    ///
    /// # Errors
    /// Errors of [`OobleckDecoder::new`].
    pub fn in_dtype(
        config: &OobleckConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<OobleckDecoder, StageError> {
        config.check().map_err(unsupported)?;
        Ok(OobleckDecoder {
            half: Half::new(&config.decoder(), tensors, dtype)?,
            dtype,
            device: device_of(tensors, "decoder.conv1.bias")?,
            config: config.clone(),
        })
    }

    /// Decodes latents `[1, frames, decoder_input_channels]`, f32, f16 or bf16, in host memory or on the device of the weights.
    /// Delivers samples as they are done, in order and each once: the index of the first, and `[n, audio_channels]` f32 on the
    /// device of the weights, about from -1 to 1 but not clipped. In all there are [`OobleckConfig::samples`] of them.
    ///
    /// The delivered samples do not depend on `windows`: to the bit on the CPU, within rounding on a card.
    /// `cancelled` is polled before every layer.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::BadInput`] for latents of another shape; errors of `deliver`.
    pub fn decode(
        &self,
        latents: &Tensor,
        windows: Windows,
        cancelled: &dyn Fn() -> bool,
        deliver: &mut dyn FnMut(usize, Tensor) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        self.decode_part(
            latents,
            0..latents.dims().get(1).copied().unwrap_or(0),
            windows,
            cancelled,
            deliver,
        )
    }

    /// As [`OobleckDecoder::decode`], beginning with the window of a frame: the windows before it follow at the end. The
    /// windows are the same, and so is every sample.
    ///
    /// # Errors
    /// Errors of [`OobleckDecoder::decode`].
    pub fn decode_from(
        &self,
        latents: &Tensor,
        from: usize,
        windows: Windows,
        cancelled: &dyn Fn() -> bool,
        deliver: &mut dyn FnMut(usize, Tensor) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let frames = self.frames_of(latents)?;
        let mut list = windows_of(frames, 0..frames, windows, self.config.decode_margins());
        let begins = list
            .iter()
            .position(|window| (window.keep_first..window.keep_end).contains(&from));
        list.rotate_left(begins.unwrap_or(0));
        self.decode_windows(latents, &list, cancelled, deliver)
    }

    /// As [`OobleckDecoder::decode`], of some of the frames: delivers the samples that the whole track has there. Frame `f` has
    /// [`OobleckConfig::hop`] samples, from `f * hop` on. Only the frames on which these samples depend are decoded. This takes
    /// no more memory than [`super::decode_scratch`] of these frames and of the frames around them that the layers see.
    ///
    /// # Errors
    /// Errors of [`OobleckDecoder::decode`]; [`StageError::BadInput`] for frames that the latents do not have.
    pub fn decode_part(
        &self,
        latents: &Tensor,
        kept: Range<usize>,
        windows: Windows,
        cancelled: &dyn Fn() -> bool,
        deliver: &mut dyn FnMut(usize, Tensor) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let frames = self.frames_of(latents)?;
        if kept.start > kept.end || kept.end > frames {
            return Err(StageError::BadInput(format!("frames {kept:?} of {frames}")));
        }
        let list = windows_of(frames, kept, windows, self.config.decode_margins());
        self.decode_windows(latents, &list, cancelled, deliver)
    }

    /// Frames of latents `[1, frames, decoder_input_channels]`.
    fn frames_of(&self, latents: &Tensor) -> Result<usize, StageError> {
        let expected = self.config.decoder_input_channels;
        match *latents.dims() {
            [1, frames, channels] if channels == expected && self.config.samples(frames) > 0 => Ok(frames),
            ref found => {
                let problem =
                    format!("latents of shape {found:?} where [1, frames, {expected}] are expected");
                Err(StageError::BadInput(problem))
            }
        }
    }

    fn decode_windows(
        &self,
        latents: &Tensor,
        list: &[Window],
        cancelled: &dyn Fn() -> bool,
        deliver: &mut dyn FnMut(usize, Tensor) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let latents = latents.squeeze(0)?.contiguous()?.to_device(&self.device)?;
        let frames = latents.dim(0)?;
        let (hop, samples) = (self.config.hop(), self.config.samples(frames));
        for window in list {
            let x = latents.narrow(0, window.first, window.end - window.first)?;
            let decoded = self.decode_window(&x, cancelled)?;
            // The window's first sample is that of its first frame, for any strides; only the track's end may
            // be short of its last frame.
            let first = window.keep_first * hop;
            let end = (window.keep_end * hop).min(samples);
            if first >= end {
                continue;
            }
            let kept = decoded.narrow(0, first - window.first * hop, end - first)?;
            let kept = kept.narrow(1, 0, self.config.audio_channels)?;
            let piece = ops::blank(kept.dims(), DType::F32, &self.device)?;
            copy_rows(&kept, &piece)?;
            drop(decoded);
            drop(kept);
            deliver(first, piece)?;
        }
        Ok(())
    }

    /// Decodes the latents of a window to a sequence of samples.
    fn decode_window(&self, latents: &Tensor, cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let x = ops::blank(latents.dims(), self.dtype, &self.device)?;
        copy_rows(latents, &x)?;
        self.half.run(x, cancelled)
    }
}
