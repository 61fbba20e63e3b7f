//! A mel spectrogram to a track.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::{Nonlinearity, copy_rows};

use super::COMPONENT;
use super::antialias::Antialiased;
use super::config::VocoderConfig;
use super::layers::{Source, Stage, missing};
use crate::autoencoders::mmaudio::layers::{Outcome, Wide};

/// The vocoder. Weights are made filters when it is made, which takes the bytes that [`super::vocode_scratch`] counts.
#[derive(Clone, Debug)]
pub struct Vocoder {
    config: VocoderConfig,
    device: Device,
    first: Wide,
    stages: Vec<Stage>,
    activation: Antialiased,
    last: Wide,
}

impl Vocoder {
    /// The vocoder with the tensors of its component ([`VocoderConfig::tensor_shapes`]). On the CPU convolutions are computed
    /// in f32, on a card in the dtype of the biases.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported vocoder, [`StageError::Missing`] for a tensor that is missing or not of
    /// the configuration's shape.
    pub fn new(config: &VocoderConfig, tensors: &ComponentTensors) -> Result<Vocoder, StageError> {
        let bias = tensors.get("conv_pre.bias").map_err(missing)?;
        let dtype = match bias.device() {
            Device::Cpu => DType::F32,
            _ => bias.dtype(),
        };
        Vocoder::in_dtype(config, tensors, dtype)
    }

    /// [`Vocoder::new`] with convolutions in this dtype, on any device.
    ///
    /// # Errors
    /// Errors of [`Vocoder::new`].
    pub fn in_dtype(
        config: &VocoderConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<Vocoder, StageError> {
        config
            .check()
            .map_err(|problem| StageError::BadInput(format!("the vocoder has {problem}")))?;
        let source = Source { tensors, dtype };
        let table = config.table();
        let stages = table.stages.iter().map(|stage| source.stage(stage));
        Ok(Vocoder {
            device: tensors.get("conv_pre.bias").map_err(missing)?.device().clone(),
            first: source.convolution(&table.first)?,
            stages: stages.collect::<Outcome<_>>()?,
            activation: source.activation(&table.activation, table.last.channels.0)?,
            last: source.convolution(&table.last)?,
            config: config.clone(),
        })
    }

    /// The track of a mel spectrogram `[frames, num_mels]`, f32, f16 or bf16: [`VocoderConfig::hop`] samples of each frame,
    /// `[samples, 1]` of -1 to 1, f32 on the device of the weights. `cancelled` is polled before every convolution.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for a spectrogram of another shape.
    pub fn vocode(&self, mel: &Tensor, cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let bins = self.config.num_mels;
        let frames = match *mel.dims() {
            [frames, found] if found == bins && frames > 0 => frames,
            ref found => {
                let problem = format!("a spectrogram of shape {found:?} where [frames, {bins}] are expected");
                return Err(StageError::BadInput(problem));
            }
        };
        let mel = mel.contiguous()?.to_device(&self.device)?;
        let inputs = self.first.filter.shape().inputs;
        let mut x = Tensor::zeros((frames, inputs), DType::F32, &self.device)?;
        copy_rows(&mel, &x.narrow(1, 0, bins)?)?;
        drop(mel);
        x = self.first.run(&x, cancelled)?;
        for stage in &self.stages {
            x = stage.forward(x, cancelled)?;
        }
        x = self.activation.before(&self.last, &x, cancelled)?;
        let track = ops::in_dtype(&x.narrow(1, 0, 1)?, DType::F32)?;
        ops::activate(&track, Nonlinearity::Tanh)?;
        match ops::all_finite(&track)? {
            true => Ok(track),
            false => Err(StageError::NotFinite {
                component: COMPONENT.to_owned(),
                step: 0,
            }),
        }
    }
}
