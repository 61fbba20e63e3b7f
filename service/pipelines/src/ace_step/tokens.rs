//! The tokenizer of latents, 25 frames a second to 5 tokens, and its inverse: diffusers' `AceStepAudioTokenizer` and
//! `AceStepAudioTokenDetokenizer`. A cover is made from a source that passed through both.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor, Weight};

use super::condition::LIBRARIES;
use super::config::TokenConfig;
use super::layers::Encoder;
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;

/// Tokens that are processed in one pass. Tokens are independent, so the number changes only the memory.
const AT_A_TIME: usize = 256;

/// The tokenizer over resident tensors.
pub struct AudioTokenizer {
    project: Linear,
    embed: Linear,
    /// `[1, 1, hidden_size]`: in front of the frames of each token; its state becomes the token.
    special: Tensor,
    pooler: Encoder,
    quantizer: Quantizer,
    frames: usize,
}

/// Tokens of a track.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[tokens, hidden_size]`, in the dtype of the latents and on their device.
    pub quantized: Tensor,
    /// The code of each token: the number in a mixed base, in which the first level counts one.
    pub codes: Vec<u32>,
}

impl AudioTokenizer {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub fn new(config: &TokenConfig, tensors: &ComponentTensors) -> Result<AudioTokenizer, MissingTensor> {
        let tensors = &AdaptedTensors::from(tensors);
        let width = config.layer.hidden_size;
        let channels = config.audio_acoustic_hidden_dim;
        Ok(AudioTokenizer {
            project: Linear::new(tensors, "audio_acoustic_proj", channels, width)?,
            embed: Linear::new(tensors, "attention_pooler.embed_tokens", width, width)?,
            special: tensors.shaped("attention_pooler.special_token", &[1, 1, width])?,
            pooler: Encoder::new(
                tensors,
                "attention_pooler.",
                config.num_attention_pooler_hidden_layers,
                &config.layer,
            )?,
            quantizer: Quantizer::new(config, tensors)?,
            frames: config.pool_window_size,
        })
    }

    /// The tokens of latents `[frames, channels]`. An incomplete last token is filled with the beginning of
    /// `silence`, `[.., channels]` in the same dtype and place. `go_on` is called before every layer.
    ///
    /// # Errors
    /// When shapes do not match; errors of the device, and of `go_on`.
    pub fn tokenize(
        &self,
        latents: &Tensor,
        silence: &Tensor,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tokens, StageError> {
        let (frames, channels) = latents.dims2()?;
        let (dtype, device) = (latents.dtype(), latents.device());
        let tokens = frames.div_ceil(self.frames);
        let width = self.special.dim(2)?;
        let whole = Tensor::zeros((tokens * self.frames, channels), dtype, device)?;
        ops::copy_rows(latents, &whole.narrow(0, 0, frames)?)?;
        let missing = tokens * self.frames - frames;
        if missing > 0 {
            let filled = silence.narrow(0, 0, missing)?;
            ops::copy_rows(&filled, &whole.narrow(0, frames, missing)?)?;
        }
        let quantized = Tensor::zeros((tokens, width), dtype, device)?;
        let mut codes = Vec::with_capacity(tokens);
        for first in (0..tokens).step_by(AT_A_TIME) {
            let count = AT_A_TIME.min(tokens - first);
            let part = whole.narrow(0, first * self.frames, count * self.frames)?;
            let embedded = self.embed.forward(&self.project.forward(&part)?)?;
            let embedded = embedded.reshape((count, self.frames, width))?;
            let buffers = self.pooler.buffers((count, 1 + self.frames), (dtype, device))?;
            // The buffers begin as zeros.
            let places = buffers.sum.narrow(1, 0, 1)?.squeeze(1)?;
            ops::add_residual(&places, &self.special.reshape((1, width))?, None)?;
            ops::copy_rows(&embedded, &buffers.sum.narrow(1, 1, self.frames)?)?;
            self.pooler.run(&buffers, go_on)?;
            let pooled = buffers.normed.narrow(1, 0, 1)?.squeeze(1)?;
            let (numbers, of_part) = self.quantizer.quantize(&pooled)?;
            ops::copy_rows(&numbers, &quantized.narrow(0, first, count)?)?;
            codes.extend(of_part);
        }
        Ok(Tokens { quantized, codes })
    }

    /// Predicted activation bytes of tokenizing `frames` frames.
    pub fn scratch(config: &TokenConfig, frames: usize, dtype: DType) -> u64 {
        let tokens = frames.div_ceil(config.pool_window_size);
        passed(config, tokens, 1 + config.pool_window_size, dtype)
    }
}

/// Bytes of a pass over tokens of `rows` rows each, and of its input and output.
fn passed(config: &TokenConfig, tokens: usize, rows: usize, dtype: DType) -> u64 {
    let at_once = tokens.min(AT_A_TIME);
    let size = dtype.size_in_bytes();
    let width = config.layer.hidden_size;
    let frames = tokens * config.pool_window_size * config.audio_acoustic_hidden_dim;
    let kept = 3 * frames + 2 * tokens * width + 2 * at_once * rows * width;
    Encoder::scratch(&config.layer, (at_once, rows), dtype) + (kept * size) as u64 + LIBRARIES
}

/// Finite scalar quantization (Mentzer et al. 2023) as `ResidualFSQ` with one quantizer: each number of a projected token
/// is bounded, then rounded to one of its levels. In f32, in host memory: a token has few numbers, and the rounding
/// must not depend on the device.
struct Quantizer {
    /// `[numbers, hidden_size]` and `[numbers]`.
    into: (Tensor, Tensor),
    /// `[hidden_size, numbers]` and `[hidden_size]`.
    out: (Tensor, Tensor),
    levels: Vec<usize>,
}

impl Quantizer {
    fn new(config: &TokenConfig, tensors: &AdaptedTensors<'_>) -> Result<Quantizer, MissingTensor> {
        let levels = config.levels();
        let layer = |name: &str, outputs: usize, inputs: usize| {
            let on_host = |name: String, shape: &[usize]| {
                let tensor = tensors.shaped(&name, shape)?;
                let narrowed = tensor
                    .to_device(&Device::Cpu)
                    .and_then(|tensor| tensor.to_dtype(DType::F32));
                narrowed.map_err(|error| MissingTensor {
                    name,
                    problem: error.to_string(),
                })
            };
            let weight = on_host(format!("quantizer.{name}.weight"), &[outputs, inputs])?;
            Ok((weight, on_host(format!("quantizer.{name}.bias"), &[outputs])?))
        };
        Ok(Quantizer {
            into: layer("project_in", levels.len(), config.fsq_dim)?,
            out: layer("project_out", config.fsq_dim, levels.len())?,
            levels,
        })
    }

    /// The quantized rows of `[n, hidden_size]`, on their device, and the code of each row.
    fn quantize(&self, rows: &Tensor) -> Result<(Tensor, Vec<u32>), StageError> {
        let host = rows.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?;
        let weight = Weight::Full(self.into.0.clone());
        let layer = ops::LinearLayer::new(&weight, Some(&self.into.1));
        let mut numbers = ops::linear(&host, &layer)?.flatten_all()?.to_vec1::<f32>()?;
        let mut codes = Vec::with_capacity(numbers.len() / self.levels.len());
        for token in numbers.chunks_exact_mut(self.levels.len()) {
            let (mut code, mut basis) = (0u32, 1u32);
            for (number, &levels) in token.iter_mut().zip(&self.levels) {
                let steps = (levels - 1) as f32;
                let bound = 1.0 + 1.0 / steps;
                let bounded = (*number / bound).tanh() * bound;
                let level = (steps * (bounded.clamp(-1.0, 1.0) + 1.0) / 2.0 + 0.5).floor();
                *number = 2.0 / steps * level - 1.0;
                code = code.wrapping_add(basis.wrapping_mul(level as u32));
                basis = basis.wrapping_mul(levels as u32);
            }
            codes.push(code);
        }
        let numbers = Tensor::from_vec(numbers, (codes.len(), self.levels.len()), &Device::Cpu)?;
        let weight = Weight::Full(self.out.0.clone());
        let out = ops::linear(&numbers, &ops::LinearLayer::new(&weight, Some(&self.out.1)))?;
        Ok((out.to_dtype(rows.dtype())?.to_device(rows.device())?, codes))
    }
}

/// The inverse over resident tensors.
pub struct AudioDetokenizer {
    embed: Linear,
    /// `[1, frames, hidden_size]`: added to the token, one for each of its frames.
    special: Tensor,
    layers: Encoder,
    out: Linear,
    frames: usize,
}

impl AudioDetokenizer {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub fn new(config: &TokenConfig, tensors: &ComponentTensors) -> Result<AudioDetokenizer, MissingTensor> {
        let tensors = &AdaptedTensors::from(tensors);
        let (width, frames) = (config.layer.hidden_size, config.pool_window_size);
        Ok(AudioDetokenizer {
            embed: Linear::new(tensors, "embed_tokens", width, width)?,
            special: tensors.shaped("special_tokens", &[1, frames, width])?,
            layers: Encoder::new(
                tensors,
                "",
                config.num_attention_pooler_hidden_layers,
                &config.layer,
            )?,
            out: Linear::new(tensors, "proj_out", width, config.audio_acoustic_hidden_dim)?,
            frames,
        })
    }

    /// Latents `[tokens * frames of a token, channels]` of tokens `[tokens, hidden_size]`. `go_on` is called before every
    /// layer.
    ///
    /// # Errors
    /// When shapes do not match; errors of the device, and of `go_on`.
    pub fn latents(
        &self,
        tokens: &Tensor,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tensor, StageError> {
        let (all, width) = tokens.dims2()?;
        let (dtype, device) = (tokens.dtype(), tokens.device());
        let mut parts = Vec::new();
        for first in (0..all).step_by(AT_A_TIME) {
            let count = AT_A_TIME.min(all - first);
            let embedded = self
                .embed
                .forward(&tokens.narrow(0, first, count)?.contiguous()?)?;
            let buffers = self.layers.buffers((count, self.frames), (dtype, device))?;
            for frame in 0..self.frames {
                let rows = buffers.sum.narrow(1, frame, 1)?.squeeze(1)?;
                ops::copy_rows(&embedded, &rows)?;
                let special = self.special.narrow(1, frame, 1)?.reshape((1, width))?;
                ops::add_residual(&rows, &special, None)?;
            }
            self.layers.run(&buffers, go_on)?;
            let part = self.out.forward(&buffers.normed)?;
            parts.push(part.reshape((count * self.frames, part.dim(2)?))?);
        }
        let channels = parts.first().map_or(Ok(0), |part| part.dim(1))?;
        let latents = Tensor::zeros((all * self.frames, channels), dtype, device)?;
        let mut first = 0;
        for part in parts {
            let rows = part.dim(0)?;
            ops::copy_rows(&part, &latents.narrow(0, first, rows)?)?;
            first += rows;
        }
        Ok(latents)
    }

    /// Predicted activation bytes for `frames` frames.
    pub fn scratch(config: &TokenConfig, frames: usize, dtype: DType) -> u64 {
        let tokens = frames.div_ceil(config.pool_window_size);
        passed(config, tokens, config.pool_window_size, dtype)
    }
}
