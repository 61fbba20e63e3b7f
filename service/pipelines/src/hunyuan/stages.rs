//! Computation of a request's stages, as in diffusers' `HunyuanVideoPipeline` and `HunyuanVideoFramepackPipeline`.
//!
//! Random draws are in the order of the reference: FramePack first draws the sample of the start picture, then that of the end
//! picture if there is one, then the noise of each section. Each is a separate stage here, and skips the draws of the stages before it. Numbers are drawn in f32
//! on every card, as in the reference.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use candle_core::{DType, Device, Tensor};
use model::plan::of_rung;

use super::film::Film;
use super::model::{CLIP, HunyuanModel, LLAMA, TRANSFORMER, VAE, VISION};
use super::patches::{FULL, HALF, QUARTER, patches, unpatched};
use super::plan::{
    DECODE, DENOISE, ENCODE_END, ENCODE_IMAGE, ENCODE_TEXT, ENCODE_VISION, END, LATENT, LEFT, START,
    VISION_STATES, encodings, latent_of_section, longest,
};
use super::positions::{self, Axes};
use super::preview::ColourMap;
use super::sections::{LatentFrame, Sections};
use super::transformer::{Conditioning, Prompted, Seen, TokenCounts, Transformer};
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::autoencoders::hunyuan::{
    FrameDecoding, HunyuanVaeDecoder, HunyuanVaeEncoder, decode_ladder, encode_ladder,
};
use crate::noise::Generator;
use crate::rotary::Rotations;
use crate::sampling::{Conditions, Prompts, SampledLatent};
use crate::shared_stage::{Half, OtherCard};
use crate::stage::{Stage, named, unknown};
use crate::tensors::{from_host, to_host};
use crate::text::clip::ClipEncoder;
use crate::text::llama::LlamaEncoder;
use crate::vision::processor::bytes_through_floats;
use crate::vision::siglip::SiglipEncoder;
use crate::{HostTensor, InitImage, StageError, Values};

/// Largest factor of a dynamic shift of FramePack's sigmas: its exponent is at most the logarithm of this.
const MOST_SHIFT: f64 = 7.0;

/// A text of a request as the transformer reads it.
struct EncodedText {
    tokens: TokenCounts,
    states: Tensor,
    mean: Tensor,
    pooled: Tensor,
    rotations: Rotations,
}

impl Stage<'_, HunyuanModel> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_VISION => self.encode_vision().map(|states| named(VISION_STATES, states)),
            ENCODE_IMAGE => self
                .start()
                .and_then(|image| self.encode_image(image, 0))
                .map(|latent| named(START, latent)),
            ENCODE_END => self
                .end()
                .and_then(|image| self.encode_image(image, 1))
                .map(|latent| named(END, latent)),
            DENOISE => self.denoise(),
            DECODE => self.decode(),
            other => Err(unknown(other)),
        };
        result.map_err(|error| error.of_stage(name))
    }

    /// The sections, and the number of the stage's section, from 0.
    fn section(&self) -> Result<Option<(Sections, usize)>, StageError> {
        let sections = self.model.sections(self.run.request.video()?);
        match (sections, self.run.plan.section) {
            (Some(sections), Some(section)) if (1..=sections.count).contains(&(section.number as usize)) => {
                Ok(Some((sections, section.number as usize - 1)))
            }
            (None, None) => Ok(None),
            (_, section) => Err(StageError::BadInput(format!(
                "a film of other sections than {section:?}"
            ))),
        }
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let cancelled = || self.observer.cancelled();
        let request = self.run.request;
        let (texts, named) = (Prompts::texts(request), encodings(request));
        let mut values = Values::new();

        let component = (self.run.tensors)(CLIP)?;
        let clip = ClipEncoder::new(&self.model.clip, CLIP, &component)?;
        for ((_, text), (_, pooled)) in texts.iter().zip(named.iter()) {
            let ids = self.model.clip_tokenizer.encode(text)?;
            let encoded = to_host(&clip.forward(&ids, &cancelled)?.pooled)?;
            values.insert((*pooled).to_owned(), encoded);
        }

        let ids = self.model.prompt_ids(request)?;
        let component = (self.run.tensors)(LLAMA)?;
        let llama = LlamaEncoder::new(&self.model.llama, LLAMA, &component)?;
        for (ids, (text, _)) in ids.iter().zip(named.iter()) {
            let encoded = to_host(&llama.forward(ids, &cancelled)?)?;
            values.insert((*text).to_owned(), encoded);
        }
        Ok(values)
    }

    /// The start picture.
    fn start(&self) -> Result<&InitImage, StageError> {
        let start = self.run.request.video()?.init_image.as_ref();
        start.ok_or_else(|| StageError::BadInput("there is no picture to start from".to_owned()))
    }

    /// The picture that the film ends with.
    fn end(&self) -> Result<&InitImage, StageError> {
        let end = self.run.request.video()?.end_image.as_ref();
        end.ok_or_else(|| StageError::BadInput("there is no picture to end with".to_owned()))
    }

    fn encode_vision(&mut self) -> Result<HostTensor, StageError> {
        let image = self.start()?;
        let framepack = self.model.framepack.as_ref();
        let framepack =
            framepack.ok_or_else(|| StageError::BadInput("the model has no picture encoder".to_owned()))?;
        let bytes = bytes_through_floats(&image.rgb);
        let pixels = framepack.processor.pixels(&bytes, (image.width, image.height))?;
        let component = (self.run.tensors)(VISION)?;
        let encoder = SiglipEncoder::new(&framepack.vision, VISION, &component)?;
        to_host(&encoder.forward(&pixels, &|| self.observer.cancelled())?)
    }

    /// The latent of a picture, whose sample is drawn after those of so many others.
    fn encode_image(&self, image: &InitImage, others: usize) -> Result<HostTensor, StageError> {
        let config = &self.model.vae;
        let sides = config.latent_sides(image.width, image.height);
        let rungs = encode_ladder(config, sides, 1, self.model.parts.dtype());
        let chunking = of_rung(&rungs, self.run.rung)?;
        let component = (self.run.tensors)(VAE)?;
        let encoder = HunyuanVaeEncoder::new(config, &component)?;
        let size = (image.width as usize, image.height as usize);
        let cancelled = || self.observer.cancelled();
        let moments = encoder.encode_rgb8(&image.rgb, 1, size, chunking, &cancelled)?;
        let mut generator = Generator::new(self.run.request.seed);
        let of_each: usize = self
            .model
            .latent_shape(self.run.request.video()?, 1)
            .iter()
            .product();
        (0..others).for_each(|_| generator.skip_normal(of_each));
        let sample = moments.drawn(&mut generator)?;
        to_host(&(sample * config.scaling_factor)?)
    }

    /// A value in host memory, f32, without its first axis.
    fn latent(&self, name: &str) -> Result<Tensor, StageError> {
        Ok(self.host_value(name)?.squeeze(0)?)
    }

    /// Latent frames `[channels, frames, h, w]`, of the sections that the stage takes.
    fn frames(&self, frames: &[LatentFrame], sections: &Sections) -> Result<Tensor, StageError> {
        let shape = self.model.latent_shape(self.run.request.video()?, 1);
        let mut read: BTreeMap<String, Tensor> = BTreeMap::new();
        let mut found = Vec::with_capacity(frames.len());
        for frame in frames {
            let (name, index) = match *frame {
                LatentFrame::Zero => {
                    found.push(Tensor::zeros(&shape[1..], DType::F32, &Device::Cpu)?);
                    continue;
                }
                LatentFrame::End => (END.to_owned(), 0),
                LatentFrame::Start if self.run.value_if_taken(START)?.is_some() => (START.to_owned(), 0),
                // The latent of the section next to it in the film begins with the start picture.
                LatentFrame::Start => {
                    let holds = (0..sections.count).find(|section| sections.holds_start(*section));
                    (latent_of_section(holds.unwrap_or_default()), 0)
                }
                LatentFrame::Of { section, frame } => {
                    let first = usize::from(sections.holds_start(section));
                    (latent_of_section(section), first + frame)
                }
            };
            let latent = match read.entry(name) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let latent = self.latent(new.key())?;
                    new.insert(latent)
                }
            };
            found.push(latent.narrow(1, index, 1)?);
        }
        Ok(Tensor::cat(&found, 1)?)
    }

    /// The noise that a sampling starts from, `[channels, frames, h, w]`.
    fn noise(&self, section: Option<(Sections, usize)>) -> Result<Tensor, StageError> {
        let video = self.run.request.video()?;
        let frames = match section {
            Some((sections, _)) => sections.window,
            None => self.model.vae.latents(video.frames as usize),
        };
        let shape = self.model.latent_shape(video, frames);
        let count: usize = shape.iter().product();
        let mut generator = Generator::new(self.run.request.seed);
        if let Some((sections, section)) = section {
            let pictures = 1 + usize::from(sections.sees_end(0));
            let of_each: usize = self.model.latent_shape(video, 1).iter().product();
            (0..pictures).for_each(|_| generator.skip_normal(of_each));
            (0..section).for_each(|_| generator.skip_normal(count));
        }
        Ok(Tensor::from_vec(
            generator.normal(count),
            &shape[1..],
            &Device::Cpu,
        )?)
    }

    fn denoise(&mut self) -> Result<Values, StageError> {
        let config = &self.model.transformer;
        let ((dtype, device), request) = (self.on(), self.run.request);
        let video = request.video()?.clone();
        let section = self.section()?;
        let (h, w) = self.model.sides(&video);
        let sides = (h / 2, w / 2);
        let axes = Axes {
            widths: config.rope_axes_dim,
            theta: config.rope_theta,
        };
        let half = Half::of(&self.run)?;

        let on_card = |tensor: &Tensor| tensor.to_dtype(dtype)?.contiguous()?.to_device(device);

        let component = (self.run.tensors)(TRANSFORMER)?;
        let adapters = self
            .model
            .adapters
            .attach_to_sampler(TRANSFORMER, &self.run, dtype)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let transformer = Transformer::new(config, &adapted).map_err(StageError::missing_in(TRANSFORMER))?;

        let noise = self.noise(section)?;
        let frames = noise.dim(1)?;
        let context = section.map(|(sections, section)| (sections, sections.context(section)));
        let texts = encodings(request).try_map(|(text, pooled)| -> Result<EncodedText, StageError> {
            let states = self.host_value(text)?;
            let all = self.model.tokens(states.dim(1)?, &video);
            let before = all.text + all.vision;
            // Of half of the tokens they are put together in host memory.
            let on = if half.is_some() { &Device::Cpu } else { device };
            let rotations = match &context {
                None => positions::film(before, frames, sides, axes, on)?,
                Some((_, context)) => positions::section(before, context, sides, axes, on)?,
            };
            Ok(EncodedText {
                tokens: half.map_or(all, |half| all.half(half)),
                rotations: match half {
                    None => rotations,
                    Some(half) => rotations.of_ranges(&all.ranges(half), device)?,
                },
                mean: on_card(&states.mean(1)?)?,
                states: on_card(&states)?,
                pooled: self.value(pooled)?,
            })
        })?;
        let tokens = longest(&texts.map(|text| text.tokens));
        let all_sampled = self.model.tokens(0, &video).sampled;
        let seen = match &context {
            None => None,
            Some((sections, context)) => {
                let full = context.full.map(|(frame, _)| frame);
                let in_patches = |frames: &[LatentFrame], patch| -> Result<Tensor, StageError> {
                    Ok(on_card(&patches(&self.frames(frames, sections)?, patch)?)?)
                };
                Some([
                    in_patches(&context.quarter.0, QUARTER)?,
                    in_patches(&context.half.0, HALF)?,
                    in_patches(&full, FULL)?,
                    self.value(VISION_STATES)?,
                ])
            }
        };
        let seen = seen.as_ref().map(|[quarter, half, full, vision]| Seen {
            quarter,
            half,
            full,
            vision,
        });
        // Strengths of adapters that change also change what is seen.
        let conditioned = |sigmas: &[f32]| -> Result<Prompts<Conditioning>, StageError> {
            let embedded = match &seen {
                Some(seen) => transformer.embedded(seen)?,
                None => None,
            };
            let embedded = match (embedded, half) {
                (Some(embedded), Some(half)) => Some(embedded.half(half)?),
                (embedded, _) => embedded,
            };
            texts.as_ref().try_map(|text| {
                let prompted = Prompted {
                    text: &text.states,
                    mean: &text.mean,
                    pooled: &text.pooled,
                    guidance: request.guidance,
                    rotations: text.rotations.clone(),
                    seen: embedded.as_ref(),
                };
                transformer.condition(&prompted, sigmas)
            })
        };
        let scheduler = &self.model.scheduler;
        let sigmas = match section {
            Some(_) => scheduler.sigmas_with_most_mu(request.steps, all_sampled, MOST_SHIFT.ln()),
            None => scheduler.sigmas(request.steps, all_sampled),
        };
        let steps = sigmas.len() - 1;
        self.observer.check_cancelled()?;
        let shape = (1, tokens.sampled, config.token_width());
        let cached = (1, tokens.sampled, config.width());
        let mut conditions =
            Conditions::new(conditioned(&sigmas[..steps])?, request, shape, (dtype, device))?.with_caches(
                request,
                cached,
                (dtype, device),
            )?;

        let start = patches(&noise, FULL)?;
        let start = match half {
            None => start,
            Some(half) => {
                let own = half.own(all_sampled);
                start.narrow(1, own.start, own.len())?
            }
        };
        let mut latent = SampledLatent::new(&start, sigmas, None, (dtype, device))?;
        let bytes = tokens.exchanged_bytes(config, dtype);
        let other = OtherCard::meet(half, bytes, device, &mut *self.observer)?;
        let step_buffers = transformer
            .step_buffers(&tokens, (dtype, device))?
            .with_attention(AttentionPrecision::asked(request))
            .beside(other.clone());
        let colours = match (&video.init_image, request.preview) {
            (_, false) => None,
            (Some(image), true) if section.is_some() => {
                Some(ColourMap::learned(image, &self.latent(START)?)?)
            }
            (_, true) => ColourMap::published(&self.model.vae),
        };
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change also change the state that otherwise all steps share.
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                conditions.replace(conditioned(&latent.sigmas()[step..=step])?);
                row = 0;
            }
            let mut go_on = || self.observer.check_cancelled();
            let velocity = conditions.predict(|each, cache| {
                transformer.velocity(latent.seen(), (each, cache), row, &step_buffers, &mut go_on)
            })?;
            let shown = match &other {
                None => self.advance(step, &mut latent, &velocity, (TRANSFORMER, &adapters))?,
                Some(other) => {
                    let at = (step, all_sampled);
                    self.advance_beside(other, at, &mut latent, &velocity, (TRANSFORMER, &adapters))?
                }
            };
            if let (Some(colours), Some(shown)) = (&colours, shown) {
                let clean = unpatched(&shown, frames, sides)?;
                let preview = colours.preview(&clean.narrow(1, frames / 2, 1)?)?;
                self.observer.preview(preview.width, preview.height, preview.rgb);
            }
        }
        self.report_left_out(&conditions);
        let sampled = match &other {
            None => latent.on_host()?,
            Some(other) => {
                let all = other.gathered(latent.on_device(), all_sampled)?;
                other.close(&mut *self.observer)?;
                all.to_device(&Device::Cpu)?
            }
        };
        let sampled = unpatched(&sampled, frames, sides)?;
        let (name, sampled) = match section {
            None => (LATENT.to_owned(), sampled),
            Some((sections, section)) => {
                let whole = match sections.holds_start(section) {
                    true => Tensor::cat(&[self.latent(START)?, sampled], 1)?,
                    false => sampled,
                };
                (latent_of_section(section), whole)
            }
        };
        Ok(Values::from([(name, to_host(&sampled.unsqueeze(0)?)?)]))
    }

    fn decode(&mut self) -> Result<Values, StageError> {
        let video = self.run.request.video()?.clone();
        let section = self.section()?;
        let dtype = self.model.parts.dtype();
        let (latents, parts) = match section {
            None => {
                let latent = self.latent(LATENT)?;
                let parts = Film::whole_parts(video.frames as usize);
                (latent, parts)
            }
            Some((sections, section)) => {
                let latents = self.frames(&sections.decoded(section), &sections)?;
                (latents, sections.parts(section))
            }
        };
        let config = &self.model.vae;
        let rungs = decode_ladder(config, self.model.sides(&video), latents.dim(1)?, dtype);
        let chunking = of_rung(&rungs, self.run.rung)?;
        let component = (self.run.tensors)(VAE)?;
        let decoder = HunyuanVaeDecoder::new(config, &component)?;
        let left = match self.run.value_if_taken(LEFT)? {
            Some(left) => Some(from_host(left, LEFT, decoder.dtype(), &Device::Cpu)?),
            None => None,
        };
        let latents = latents.unsqueeze(0)?.contiguous()?.to_device(self.run.device)?;
        self.observer.check_cancelled()?;
        let observer = std::cell::RefCell::new(&mut *self.observer);
        let mut film = Film::new(&video, parts, left);
        let cancelled = || observer.borrow().cancelled();
        let how = FrameDecoding {
            chunking,
            frames_at_a_time: match video.frames_at_a_time {
                0 => usize::MAX,
                most => most as usize,
            },
            factor: config.unscaling(),
            cancelled: &cancelled,
        };
        decoder.decode_frames(&latents, &how, &mut |first, frames| {
            film.take(first, &frames, &mut |piece| observer.borrow_mut().deliver(piece))
        })?;
        let left = film.left()?;
        Ok(left
            .map(|left| Ok::<_, StageError>((LEFT.to_owned(), to_host(&left)?)))
            .transpose()?
            .into_iter()
            .collect())
    }
}
