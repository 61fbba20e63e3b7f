//! Computation of a request's stages, as in the authors' `OviFusionEngine`.
//!
//! The authors draw the noise of the film and that of the sound from a generator each, both with the request's seed. They draw on
//! a card and in bf16, which no other machine repeats; here it is drawn in f32 on the CPU, so a seed gives another film than
//! theirs.

use std::cell::RefCell;

use candle_core::{Device, Tensor};
use model::plan::of_rung;

use super::model::{AUDIO_VAE, OviModel, TEXT_ENCODER, TRANSFORMER, VAE, VOCODER};
use super::plan::{
    DECODE, DECODE_SOUND, DENOISE, ENCODE_IMAGE, ENCODE_TEXT, LATENT, NEGATIVES, SOUND, START, TEXT,
};
use super::prompts::Texts;
use super::sampling::{Guidance, Progress, PromptStates, Start, sample};
use super::transformer::FusionTransformer;
use crate::attention::AttentionPrecision;
use crate::autoencoders::mmaudio::MmAudioDecoder;
use crate::autoencoders::mmaudio::vocoder::Vocoder;
use crate::autoencoders::oobleck::pcm16_from_samples;
use crate::autoencoders::wan::{
    FrameDecoding, WanVaeDecoder, WanVaeEncoder, decode_ladder, encode_ladder, frames_to_rgb8,
};
use crate::noise::Generator;
use crate::stage::{Stage, named, unknown};
use crate::tensors::to_host;
use crate::text::t5::T5Encoder;
use crate::unipc::{Grid, Schedule};
use crate::{HostTensor, Observer, Piece, SOUND_OF_FILM, StageError, Values};

/// Shift of the sigmas towards noise.
const SHIFT: f64 = 5.0;

/// The block that is left out under the negative prompts, as the authors' configuration has it.
const SKIPPED: usize = 11;

/// How the scale of the sound grows with that of the film: the authors' are 3 and 4.
const OF_SOUND: f64 = 2.0 / 3.0;

/// Reports to an observer.
struct Reports<'a>(&'a mut dyn Observer);

impl Progress for Reports<'_> {
    fn go_on(&mut self) -> Result<(), StageError> {
        self.0.check_cancelled()
    }

    fn step(&mut self, step: usize, steps: usize) {
        self.0.step(step as u32, steps as u32);
    }
}

impl Stage<'_, OviModel> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_image().map(|latent| named(START, latent)),
            DENOISE => self.denoise(),
            DECODE_SOUND => self.decode_sound().map(|()| Values::new()),
            DECODE => self.decode().map(|()| Values::new()),
            other => Err(unknown(other)),
        };
        result.map_err(|error| error.of_stage(name))
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let texts = Texts::of(self.run.request, self.model.variant);
        let component = (self.run.tensors)(TEXT_ENCODER)?;
        let encoder = T5Encoder::new(&self.model.text, TEXT_ENCODER, &component)?;
        let cancelled = || self.observer.cancelled();
        let states = |text: &str| -> Result<HostTensor, StageError> {
            to_host(&encoder.forward(&self.model.tokens(self.run.request, text)?, &cancelled)?)
        };
        let mut values = Values::from([(TEXT.to_owned(), states(&texts.prompt)?)]);
        for (name, text) in NEGATIVES.iter().zip(texts.negative.iter().flatten()) {
            values.insert((*name).to_owned(), states(text)?);
        }
        Ok(values)
    }

    fn encode_image(&mut self) -> Result<HostTensor, StageError> {
        let image = self.run.request.video()?.init_image.as_ref();
        let image =
            image.ok_or_else(|| StageError::BadInput("there is no picture to start from".to_owned()))?;
        let config = &self.model.vae;
        let sides = config.latent_sides(image.width, image.height);
        let rungs = encode_ladder(config, sides, 1, self.model.parts.dtype());
        let chunking = of_rung(&rungs, self.run.rung)?;
        let component = (self.run.tensors)(VAE)?;
        let encoder = WanVaeEncoder::new(config, &component)?;
        let size = (image.width as usize, image.height as usize);
        let cancelled = || self.observer.cancelled();
        let moments = encoder.encode_rgb8(&image.rgb, 1, size, chunking, &cancelled)?;
        to_host(&config.scaled(&moments.mean)?)
    }

    /// Noise of this shape, from a generator of its own.
    fn noise(&self, shape: &[usize]) -> Result<Tensor, StageError> {
        let mut generator = Generator::new(self.run.request.seed);
        let numbers = generator.normal(shape.iter().product());
        Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?)
    }

    fn denoise(&mut self) -> Result<Values, StageError> {
        let (model, request, on) = (self.model, self.run.request, self.on());
        let video = request.video()?;
        let tokens = model.film_tokens(video);
        let shape = model.latent_shape(video, tokens.film[0]);
        let film = self.noise(&shape[1..])?;
        let sound = self.noise(&[tokens.sound, model.transformer.audio.in_dim])?;
        let picture = match self.run.value_if_taken(START)? {
            Some(_) => Some(self.host_value(START)?.squeeze(0)?),
            None => None,
        };
        let prompt = self.host_value(TEXT)?;
        let negative = match request.negative() {
            Some(_) => Some([self.host_value(NEGATIVES[0])?, self.host_value(NEGATIVES[1])?]),
            None => None,
        };
        let component = (self.run.tensors)(TRANSFORMER)?;
        let transformer = FusionTransformer::new(&model.transformer, &component)?
            .with_attention(AttentionPrecision::asked(request));
        self.observer.check_cancelled()?;
        let scale = f64::from(request.true_guidance);
        let guidance = Guidance {
            film: scale,
            sound: 1.0 + OF_SOUND * (scale - 1.0),
            skipped: (SKIPPED < model.transformer.video.num_layers).then_some(SKIPPED),
        };
        let schedule = Schedule::new(Grid::Authors, request.steps, SHIFT);
        let [film, sound] = sample(
            &transformer,
            &Start {
                film: &film,
                sound: &sound,
                picture: picture.as_ref(),
            },
            &PromptStates {
                prompt: &prompt,
                negative: negative.as_ref().map(|[film, sound]| [film, sound]),
            },
            (&schedule, &guidance),
            on,
            &mut Reports(&mut *self.observer),
        )?;
        Ok(Values::from([
            (LATENT.to_owned(), to_host(&film.unsqueeze(0)?)?),
            (SOUND.to_owned(), to_host(&sound.unsqueeze(0)?)?),
        ]))
    }

    fn decode_sound(&mut self) -> Result<(), StageError> {
        let model = self.model;
        let sound = model.sound(self.run.request.video()?);
        let latent = self.host_value(SOUND)?;
        let cancelled = || self.observer.cancelled();
        let mel = {
            let component = (self.run.tensors)(AUDIO_VAE)?;
            MmAudioDecoder::new(&model.audio_vae, &component)?.decode(&latent, &cancelled)?
        };
        let component = (self.run.tensors)(VOCODER)?;
        let track = Vocoder::new(&model.vocoder, &component)?.vocode(&mel, &cancelled)?;
        self.observer.deliver(Piece {
            track: SOUND_OF_FILM.to_owned(),
            format: sound.track(),
            first: 0,
            data: pcm16_from_samples(&track)?.into(),
        });
        Ok(())
    }

    fn decode(&mut self) -> Result<(), StageError> {
        let model = self.model;
        let video = self.run.request.video()?;
        let config = &model.vae;
        let latents = config.unscaled(&self.host_value(LATENT)?)?;
        let rungs = decode_ladder(config, model.sides(video), latents.dim(2)?, model.parts.dtype());
        let chunking = of_rung(&rungs, self.run.rung)?;
        let component = (self.run.tensors)(VAE)?;
        let decoder = WanVaeDecoder::new(config, &component)?;
        self.observer.check_cancelled()?;
        let format = video.format(Some(model.sound(video)));
        // Both the question for cancellation and the delivery borrow the observer.
        let observer = RefCell::new(&mut *self.observer);
        let cancelled = || observer.borrow().cancelled();
        let how = FrameDecoding {
            chunking,
            cancelled: &cancelled,
        };
        decoder.decode_frames(&latents, &how, &mut |first, frames| {
            let data = frames_to_rgb8(&frames)?;
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
