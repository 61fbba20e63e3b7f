//! Latents to a mel spectrogram.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::{Affine, ChannelNorm, MapReading, copy_rows};

use super::COMPONENT;
use super::config::MmAudioConfig;
use super::layers::{Loaded, Outcome, Source, read_rows};
use super::shapes::{DEVIATION, MEAN};

/// The decoder of spectrograms. Weights are made filters when it is made, which takes the bytes that
/// [`super::decode_scratch`] counts.
#[derive(Clone, Debug)]
pub struct MmAudioDecoder {
    config: MmAudioConfig,
    device: Device,
    layers: Vec<Loaded>,
    /// Deviations and means of bins.
    scale: Affine,
}

impl MmAudioDecoder {
    /// The decoder with the tensors of its component, under the authors' names ([`MmAudioConfig::tensor_shapes`]). On the
    /// CPU convolutions are computed in f32, on a card in the dtype of the weights.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &MmAudioConfig, tensors: &ComponentTensors) -> Result<MmAudioDecoder, StageError> {
        let weight = tensors
            .get("decoder.conv_in.weight")
            .map_err(super::layers::missing)?;
        let dtype = match weight.device() {
            Device::Cpu => DType::F32,
            _ => weight.dtype(),
        };
        MmAudioDecoder::in_dtype(config, tensors, dtype)
    }

    /// [`MmAudioDecoder::new`] with convolutions in this dtype, on any device.
    ///
    /// # Errors
    /// Errors of [`MmAudioDecoder::new`].
    pub fn in_dtype(
        config: &MmAudioConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<MmAudioDecoder, StageError> {
        config
            .check()
            .map_err(|problem| StageError::BadInput(format!("the audio VAE has {problem}")))?;
        let source = Source {
            tensors,
            has_normalised_weights: config.has_normalised_weights,
            dtype,
        };
        let layers = config.decoder();
        let layers = layers.iter().map(|layer| source.layer(layer));
        let of_bins = |name: &str| -> Outcome<Tensor> {
            let tensor = source.tensor(name, &[1, config.mel_bins, 1])?;
            Ok(ops::in_dtype(&tensor, DType::F32)?.flatten_all()?)
        };
        let scale = Affine {
            factors: of_bins(DEVIATION)?,
            summands: of_bins(MEAN)?,
        };
        Ok(MmAudioDecoder {
            device: scale.summands.device().clone(),
            layers: layers.collect::<Outcome<_>>()?,
            scale,
            config: config.clone(),
        })
    }

    /// Decodes latents `[1, frames, latent_channels]`, f32, f16 or bf16, in host memory or on the device of the weights, to a
    /// mel spectrogram `[2 frames, mel_bins]`, f32 on that device. `cancelled` is polled before every convolution.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for latents of another shape.
    pub fn decode(&self, latents: &Tensor, cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let expected = self.config.latent_channels;
        let frames = match *latents.dims() {
            [1, frames, channels] if channels == expected && frames > 0 => frames,
            ref found => {
                let problem =
                    format!("latents of shape {found:?} where [1, frames, {expected}] are expected");
                return Err(StageError::BadInput(problem));
            }
        };
        let latents = latents.squeeze(0)?.contiguous()?.to_device(&self.device)?;
        let mut x = Tensor::zeros((frames, self.config.input_channels()), DType::F32, &self.device)?;
        copy_rows(&latents, &x.narrow(1, 0, expected)?)?;
        drop(latents);
        for layer in &self.layers {
            x = layer.run(x, cancelled)?;
        }
        let scaled = MapReading {
            norm: ChannelNorm::Affine(&self.scale),
            ..MapReading::PLAIN
        };
        let mel = read_rows(&x.narrow(1, 0, self.config.mel_bins)?, &scaled)?;
        match ops::all_finite(&mel)? {
            true => Ok(mel),
            false => Err(StageError::NotFinite {
                component: COMPONENT.to_owned(),
                step: 0,
            }),
        }
    }
}
