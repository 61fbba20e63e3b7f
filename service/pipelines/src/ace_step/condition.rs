//! The condition encoder: diffusers' `AceStepConditionEncoder`, for one request without padding.
//!
//! The condition that the transformer attends to has the encoded lyrics, then one token of the timbre, then the projected text.

use candle_core::Tensor;
use gpu::{ComponentTensors, MissingTensor};

use super::config::ConditionConfig;
use super::layers::Encoder;
use super::layout::{NULL, SILENCE};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;

/// An encoder that follows a projection.
struct Projected {
    projection: Linear,
    encoder: Encoder,
}

impl Projected {
    /// The encoded rows, `[1, n, hidden_size]`, of `[n, inputs]`.
    fn encoded(
        &self,
        rows: &Tensor,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tensor, StageError> {
        let buffers = self
            .encoder
            .buffers((1, rows.dim(0)?), (rows.dtype(), rows.device()))?;
        let projected = self.projection.forward(&rows.unsqueeze(0)?)?;
        ops::copy_rows(&projected, &buffers.sum)?;
        self.encoder.run(&buffers, go_on)?;
        Ok(buffers.normed)
    }
}

/// The condition encoder over resident tensors.
pub struct ConditionEncoder {
    text: Linear,
    lyrics: Projected,
    timbre: Projected,
    null: Tensor,
    silence: Option<Tensor>,
    channels: usize,
}

impl ConditionEncoder {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub fn new(
        config: &ConditionConfig,
        tensors: &ComponentTensors,
    ) -> Result<ConditionEncoder, MissingTensor> {
        let tensors = &AdaptedTensors::from(tensors);
        let width = config.layer.hidden_size;
        let projected = |name: &str, inputs, layers, layer: &_| {
            Ok(Projected {
                projection: Linear::new(tensors, &format!("{name}.embed_tokens"), inputs, width)?,
                encoder: Encoder::new(tensors, &format!("{name}."), layers, layer)?,
            })
        };
        Ok(ConditionEncoder {
            text: Linear::without_bias(tensors, "text_projector", config.text_hidden_dim, width)?,
            lyrics: projected(
                "lyric_encoder",
                config.text_hidden_dim,
                config.num_lyric_encoder_hidden_layers,
                &config.layer,
            )?,
            timbre: projected(
                "timbre_encoder",
                config.timbre_hidden_dim,
                config.num_timbre_encoder_hidden_layers,
                &config.layer.alternating(),
            )?,
            null: tensors.shaped(NULL, &[1, 1, width])?,
            silence: tensors.get(SILENCE).ok(),
            channels: config.timbre_hidden_dim,
        })
    }

    /// The condition, `[lyrics + 1 + text, hidden_size]`, of the text encoder's states `[text, text_hidden_dim]`, the
    /// embedded lyrics `[lyrics, text_hidden_dim]`, and latents of a track `[frames, timbre_hidden_dim]`. `go_on` is
    /// called before every layer.
    ///
    /// # Errors
    /// When shapes do not match; errors of the device, and of `go_on`.
    pub fn condition(
        &self,
        text: &Tensor,
        lyrics: &Tensor,
        timbre: &Tensor,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tensor, StageError> {
        let (of_text, of_lyrics) = (text.dim(0)?, lyrics.dim(0)?);
        let width = self.null.dim(2)?;
        let all = (of_lyrics + 1 + of_text, width);
        let condition = Tensor::zeros(all, text.dtype(), text.device())?;
        let encoded = self.lyrics.encoded(lyrics, go_on)?.squeeze(0)?;
        ops::copy_rows(&encoded, &condition.narrow(0, 0, of_lyrics)?)?;
        drop(encoded);
        let encoded = self.timbre.encoded(timbre, go_on)?.squeeze(0)?;
        ops::copy_rows(&encoded.narrow(0, 0, 1)?, &condition.narrow(0, of_lyrics, 1)?)?;
        drop(encoded);
        let projected = self.text.forward(text)?;
        ops::copy_rows(&projected, &condition.narrow(0, of_lyrics + 1, of_text)?)?;
        Ok(condition)
    }

    /// The condition of an unconditional pass, `[1, hidden_size]`. The reference repeats the row, which does not change
    /// attention to it.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn none(&self) -> candle_core::Result<Tensor> {
        self.null.squeeze(0)
    }

    /// `frames` latent frames of silence, `[frames, channels]` in the dtype of the component, in host memory: repeated
    /// where there are fewer.
    ///
    /// # Errors
    /// [`StageError::BadInput`] where the component has none.
    pub fn silence(&self, frames: usize) -> Result<Tensor, StageError> {
        let there = self.there_of_silence()?;
        let length = there.dim(0)?;
        let copies: Vec<Tensor> = (0..frames)
            .step_by(length)
            .map(|first| there.narrow(0, 0, length.min(frames - first)))
            .collect::<candle_core::Result<_>>()?;
        Ok(Tensor::cat(&copies, 0)?)
    }

    /// The first frames of silence, at most `frames`: not repeated.
    ///
    /// # Errors
    /// As [`ConditionEncoder::silence`].
    pub fn start_of_silence(&self, frames: usize) -> Result<Tensor, StageError> {
        let there = self.there_of_silence()?;
        let length = there.dim(0)?.min(frames);
        Ok(there.narrow(0, 0, length)?.contiguous()?)
    }

    /// All stored frames of silence, `[frames, channels]`. The authors' file has them as `[1, channels, frames]`.
    fn there_of_silence(&self) -> Result<Tensor, StageError> {
        let refused = || StageError::BadInput("the condition encoder has no latents of silence".to_owned());
        let silence = self.silence.as_ref().ok_or_else(refused)?;
        let silence = silence.to_device(&candle_core::Device::Cpu)?;
        match *silence.dims() {
            [1, _, channels] if channels == self.channels => Ok(silence.squeeze(0)?),
            [1, channels, _] if channels == self.channels => Ok(silence.squeeze(0)?.t()?.contiguous()?),
            _ => Err(refused()),
        }
    }

    /// Predicted activation bytes of [`ConditionEncoder::condition`] for `text` tokens of text, `lyrics` tokens of lyrics, and
    /// `timbre` frames of timbre.
    pub fn scratch(
        config: &ConditionConfig,
        (text, lyrics, timbre): (usize, usize, usize),
        dtype: candle_core::DType,
    ) -> u64 {
        let size = dtype.size_in_bytes();
        let width = config.layer.hidden_size;
        let encoder = |rows: usize| {
            Encoder::scratch(&config.layer, (1, rows), dtype) + ops::allocated(rows * width * size)
        };
        let inputs = (text + lyrics) * config.text_hidden_dim + timbre * config.timbre_hidden_dim;
        let results = (lyrics + 1 + 2 * text) * width;
        encoder(lyrics).max(encoder(timbre)) + ((inputs + results) * size) as u64 + LIBRARIES
    }
}

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
pub(super) const LIBRARIES: u64 = 4 << 20;
