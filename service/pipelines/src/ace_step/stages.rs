//! Computation of a request's stages, as in diffusers' `AceStepPipeline`; sampling is in `sampling.rs`.
//!
//! Random draws are in the order of the reference, from one generator: the sample of the source, that of the reference, then
//! the noise of the latent. They are in different stages here, so each repeats the draws before its own and discards them.
//! Numbers are drawn in f32 on every card.

use candle_core::{Device, Tensor};
use model::decimal;
use model::plan::of_rung;

use super::condition::ConditionEncoder;
use super::model::{AceStepModel, CONDITION_ENCODER, DETOKENIZER, TEXT_ENCODER, TOKENIZER, VAE};
use super::plan::{
    CONDITION, DECODE, DENOISE, ENCODE_CONDITION, ENCODE_REFERENCE, ENCODE_SOURCE, ENCODE_TEXT, HINT, LATENT,
    LYRICS, NO_CONDITION, PLAIN_CONDITION, PLAIN_TEXT, QUANTIZE_SOURCE, REFERENCE, SILENCE, SOURCE, TEXT,
};
use super::sound::{at_rate, in_whole_frames, parts_of_timbre};
use super::tokens::{AudioDetokenizer, AudioTokenizer};
use crate::autoencoders::oobleck::{
    OobleckDecoder, OobleckEncoder, OobleckMoments, decode_ladder, encode_ladder, pcm16_from_samples,
};
use crate::noise::Generator;
use crate::stage::{Stage, named, unknown};
use crate::tensors::to_host;
use crate::text::qwen3::Qwen3Encoder;
use crate::{Audio, Clip, HostTensor, MediaFormat, Medium, Piece, StageError, Values};

impl Stage<'_, AceStepModel> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_SOURCE => self.encode_source().map(|moments| named(SOURCE, moments)),
            ENCODE_REFERENCE => self.encode_reference().map(|moments| named(REFERENCE, moments)),
            ENCODE_CONDITION => self.encode_condition(),
            QUANTIZE_SOURCE => self.quantize_source().map(|hint| named(HINT, hint)),
            DENOISE => self.denoise(),
            DECODE => self.decode().map(|()| Values::new()),
            other => Err(unknown(other)),
        };
        result.map_err(|error| error.of_stage(name))
    }

    pub(super) fn audio(&self) -> Result<&Audio, StageError> {
        match &self.run.request.medium {
            Medium::Audio(audio) => Ok(audio),
            other => Err(StageError::BadInput(format!(
                "{} is asked for, and this model makes audio",
                other.name()
            ))),
        }
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let audio = self.audio()?;
        let prompt = self.model.prompt(self.run.request, audio)?;
        let tensors = (self.run.tensors)(TEXT_ENCODER)?;
        let layers = self.model.text.num_hidden_layers;
        let encoder = Qwen3Encoder::new(&self.model.text, layers, TEXT_ENCODER, &tensors)?;
        let cancelled = || self.observer.cancelled();
        let states = |ids: &[u32]| to_host(&encoder.last_hidden_state(ids, &cancelled)?);
        let mut values = Values::from([
            (TEXT.to_owned(), states(&prompt.text)?),
            (LYRICS.to_owned(), to_host(&encoder.embedded(&prompt.lyrics)?)?),
        ]);
        if let Some(ids) = &prompt.plain_text {
            values.insert(PLAIN_TEXT.to_owned(), states(ids)?);
        }
        Ok(values)
    }

    fn encode_source(&mut self) -> Result<HostTensor, StageError> {
        let samples = self.samples_of(self.audio()?.init_audio.as_ref())?;
        self.encode(&in_whole_frames(&samples, self.model.vae.hop().max(1))?)
    }

    fn encode_reference(&mut self) -> Result<HostTensor, StageError> {
        let samples = self.samples_of(self.audio()?.reference.as_ref())?;
        self.encode(&parts_of_timbre(&samples, self.model.vae.sampling_rate)?)
    }

    fn samples_of(&self, clip: Option<&Clip>) -> Result<Tensor, StageError> {
        let clip = clip.ok_or_else(|| StageError::BadInput("there is no track to encode".to_owned()))?;
        at_rate(clip, self.model.vae.sampling_rate, self.model.vae.audio_channels)
    }

    /// Mean and deviation of samples, `[2, frames, channels]`.
    fn encode(&self, samples: &Tensor) -> Result<HostTensor, StageError> {
        let (config, dtype) = (&self.model.vae, self.model.parts.dtype());
        let ladder = encode_ladder(config, samples.dim(0)?, dtype);
        let windows = of_rung(&ladder, self.run.rung)?;
        let tensors = (self.run.tensors)(VAE)?;
        let encoder = OobleckEncoder::new(config, &tensors)?;
        let moments = encoder.encode(samples, windows, &|| self.observer.cancelled())?;
        to_host(&Tensor::cat(&[moments.mean, moments.deviation], 0)?)
    }

    /// The next sample of moments, f32 `[frames, channels]`.
    pub(super) fn sample(&self, name: &str, generator: &mut Generator) -> Result<Tensor, StageError> {
        let moments = self.host_value(name)?;
        let (_, frames, channels) = moments.dims3()?;
        // The reference draws `[channels, frames]`.
        let noise = Tensor::from_vec(
            generator.normal(frames * channels),
            (1, channels, frames),
            &Device::Cpu,
        )?;
        let moments = OobleckMoments {
            mean: moments.narrow(0, 0, 1)?,
            deviation: moments.narrow(0, 1, 1)?,
        };
        let sample = moments.sample(&noise.transpose(1, 2)?.contiguous()?)?;
        Ok(sample.squeeze(0)?)
    }

    /// Numbers that are drawn for the source, where it is encoded.
    fn drawn_for_source(&self) -> Result<usize, StageError> {
        let audio = self.audio()?;
        let source = audio
            .init_audio
            .as_ref()
            .filter(|_| !self.run.request.from_values);
        let frames = source.map_or(0, |clip| self.model.frames_of_clip(clip));
        Ok(frames * self.model.vae.decoder_input_channels)
    }

    fn encode_condition(&mut self) -> Result<Values, StageError> {
        let (model, request) = (self.model, self.run.request);
        let audio = self.audio()?;
        let tensors = (self.run.tensors)(CONDITION_ENCODER)?;
        let encoder = ConditionEncoder::new(&model.condition, &tensors)
            .map_err(StageError::missing_in(CONDITION_ENCODER))?;
        let silence = encoder.silence(model.frames(audio))?;
        let timbre = match &audio.reference {
            None => encoder.start_of_silence(model.frames_of_timbre())?,
            Some(_) => {
                let mut generator = Generator::new(request.seed);
                match self.drawn_for_source()? {
                    0 => {}
                    drawn => generator.skip_normal(drawn),
                }
                self.sample(REFERENCE, &mut generator)?
            }
        };
        let timbre = timbre.to_dtype(model.parts.dtype())?.to_device(self.run.device)?;
        let lyrics = self.value(LYRICS)?;
        let condition = |text: &Tensor| -> Result<HostTensor, StageError> {
            let condition =
                encoder.condition(text, &lyrics, &timbre, &mut || self.observer.check_cancelled())?;
            if !ops::all_finite(&condition)? {
                return Err(StageError::NotFinite {
                    component: CONDITION_ENCODER.to_owned(),
                    step: 0,
                });
            }
            to_host(&condition)
        };
        let mut values = Values::from([
            (CONDITION.to_owned(), condition(&self.value(TEXT)?)?),
            (SILENCE.to_owned(), to_host(&silence)?),
        ]);
        if self.run.value_if_taken(PLAIN_TEXT)?.is_some() {
            values.insert(PLAIN_CONDITION.to_owned(), condition(&self.value(PLAIN_TEXT)?)?);
        }
        if model.is_guided(request) {
            values.insert(NO_CONDITION.to_owned(), to_host(&encoder.none()?)?);
        }
        Ok(values)
    }

    fn quantize_source(&mut self) -> Result<HostTensor, StageError> {
        let model = self.model;
        let tokens = model
            .tokens
            .as_ref()
            .ok_or_else(|| StageError::BadInput("the checkpoint has no tokenizer of latents".to_owned()))?;
        let source = self.sample(SOURCE, &mut Generator::new(self.run.request.seed))?;
        let frames = source.dim(0)?;
        let source = source.to_dtype(model.parts.dtype())?.to_device(self.run.device)?;
        // The silence of a short track has few frames: they are repeated to fill a token.
        let silence = self.host_value(SILENCE)?;
        let missing = frames.next_multiple_of(tokens.tokenizer.pool_window_size) - frames;
        let silence = match silence.dim(0)? {
            there if there < missing => silence.repeat((missing.div_ceil(there.max(1)), 1))?,
            _ => silence,
        };
        let silence = silence.to_dtype(source.dtype())?.to_device(self.run.device)?;
        let tensors = (self.run.tensors)(TOKENIZER)?;
        let tokenizer =
            AudioTokenizer::new(&tokens.tokenizer, &tensors).map_err(StageError::missing_in(TOKENIZER))?;
        let mut go_on = || self.observer.check_cancelled();
        let quantized = tokenizer.tokenize(&source, &silence, &mut go_on)?.quantized;
        let tensors = (self.run.tensors)(DETOKENIZER)?;
        let detokenizer = AudioDetokenizer::new(&tokens.detokenizer, &tensors)
            .map_err(StageError::missing_in(DETOKENIZER))?;
        let hint = detokenizer
            .latents(&quantized, &mut go_on)?
            .narrow(0, 0, frames)?;
        if !ops::all_finite(&hint)? {
            return Err(StageError::NotFinite {
                component: DETOKENIZER.to_owned(),
                step: 0,
            });
        }
        to_host(&hint)
    }

    fn decode(&mut self) -> Result<(), StageError> {
        let (config, dtype) = (&self.model.vae, self.model.parts.dtype());
        let latent = self.host_value(LATENT)?;
        let (_, frames, _) = latent.dims3()?;
        let windows = of_rung(&decode_ladder(config, frames, dtype), self.run.rung)?;
        let tensors = (self.run.tensors)(VAE)?;
        let decoder = OobleckDecoder::new(config, &tensors)?;
        let format = MediaFormat::Audio {
            samples_per_second: config.sampling_rate,
            channels: config.audio_channels as u32,
            samples: config.samples(frames) as u64,
        };
        // Beyond the end there is no such frame, and decoding is in the usual order.
        let from = decimal(self.audio()?.decode_from_seconds) * self.model.frames_per_second();
        let from = Some(from as usize).filter(|from| *from < frames).unwrap_or(0);
        // Both the question for cancellation and the delivery borrow the observer.
        let observer = std::cell::RefCell::new(&mut *self.observer);
        let cancelled = || observer.borrow().cancelled();
        decoder.decode_from(&latent, from, windows, &cancelled, &mut |first, samples| {
            let data = pcm16_from_samples(&samples)?;
            observer.borrow_mut().deliver(Piece {
                track: String::new(),
                format,
                first: first as u64,
                data: data.into(),
            });
            Ok(())
        })
    }
}
