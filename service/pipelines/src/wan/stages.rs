//! Computation of a request's stages, as in diffusers' `WanPipeline` and `WanImageToVideoPipeline`.
//!
//! The only random numbers are the noise of the latent, drawn in f32 on every card, as in the reference.

use candle_core::{DType, Device, Tensor};
use model::plan::of_rung;

use super::model::{Kind, TEXT_ENCODER, VAE, WanModel};
use super::plan::{DECODE, ENCODE_IMAGE, ENCODE_TEXT, LATENT, Part, PassOrder, START, STATE, texts};
use super::times::Times;
use super::tokens::{latent_of_tokens, tokens_of};
use super::transformer::{Seen, StepBuffers, Texts, Transformer};
use crate::adapters::{AdaptedTensors, AttachedAdapters, UsedAs};
use crate::attention::AttentionPrecision;
use crate::autoencoders::wan::{
    FrameDecoding, WanVaeDecoder, WanVaeEncoder, decode_ladder, encode_ladder, frames_to_rgb8,
};
use crate::hunyuan::preview::ColourMap;
use crate::noise::Generator;
use crate::rotary::Rotations;
use crate::sampling::{Conditions, Prediction, Prompts};
use crate::shared_stage::{Half, OtherCard};
use crate::stage::{Stage, named, unknown};
use crate::tensors::to_host;
use crate::text::t5::T5Encoder;
use crate::unipc::{UniPcLatent, UniPcState};
use crate::{HostTensor, InitImage, Piece, StageError, Values};

/// The state that all steps share: the times, and the texts of each pass.
struct Conditioning {
    times: Times,
    passes: Vec<Texts>,
}

/// What is sampled with.
struct Sampling<'a> {
    transformer: &'a Transformer,
    rotations: Rotations,
    buffers: StepBuffers,
    /// The prediction under the negative prompt, where one follows the other.
    kept: Option<Tensor>,
    /// The card that computes the other pass.
    other: Option<OtherCard>,
    guidance: f64,
}

impl Stage<'_, WanModel> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_image().map(|latent| named(START, latent)),
            DECODE => self.decode().map(|()| Values::new()),
            other => match self
                .model
                .parts_of(self.run.request)
                .into_iter()
                .find(|part| part.stage == other)
            {
                Some(part) => self.denoise(&part),
                None => Err(unknown(other)),
            },
        };
        result.map_err(|error| error.of_stage(name))
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let tensors = (self.run.tensors)(TEXT_ENCODER)?;
        let encoder = T5Encoder::new(&self.model.text, TEXT_ENCODER, &tensors)?;
        let mut values = Values::new();
        let request = self.run.request;
        for (text, name) in Prompts::texts(request).iter().zip(texts(request).iter()) {
            let ids = self.model.ids(request, text.1)?;
            let states = encoder.forward(&ids, &|| self.observer.cancelled())?;
            values.insert((*name).to_owned(), to_host(&states)?);
        }
        Ok(values)
    }

    /// The picture that the film begins with.
    fn start(&self) -> Result<&InitImage, StageError> {
        let start = self.run.request.video()?.init_image.as_ref();
        start.ok_or_else(|| StageError::BadInput("there is no picture to start from".to_owned()))
    }

    fn encode_image(&mut self) -> Result<HostTensor, StageError> {
        let (image, config) = (self.start()?, &self.model.vae);
        let video = self.run.request.video()?;
        let frames = self.model.frames_to_encode(video);
        let rungs = encode_ladder(config, self.model.sides(video), frames, self.model.parts.dtype());
        let chunking = of_rung(&rungs, self.run.rung)?;
        let component = (self.run.tensors)(VAE)?;
        let encoder = WanVaeEncoder::new(config, &component)?;
        let size = (image.width as usize, image.height as usize);
        let cancelled = || self.observer.cancelled();
        let moments = encoder.encode_beginning(&image.rgb, frames, size, chunking, &cancelled)?;
        to_host(&config.scaled(&moments.mean)?)
    }

    /// The states of the texts, zero-padded, in the dtype of the transformer: of each pass, or of both in one.
    fn padded_texts(&self, way: PassOrder) -> Result<Vec<Tensor>, StageError> {
        let ((dtype, device), request) = (self.on(), self.run.request);
        let rows = request.max_sequence_length as usize;
        let mut all = Vec::new();
        for name in texts(request).iter() {
            let states = self.host_value(name)?;
            let (_, tokens, width) = states.dims3()?;
            let zeros = Tensor::zeros((1, rows.saturating_sub(tokens), width), DType::F32, &Device::Cpu)?;
            all.push(Tensor::cat(&[states, zeros], 1)?);
        }
        if way == PassOrder::Together {
            all = vec![Tensor::cat(&all, 0)?];
        }
        let on_card = |states: Tensor| states.to_dtype(dtype)?.contiguous()?.to_device(device);
        Ok(all.into_iter().map(on_card).collect::<candle_core::Result<_>>()?)
    }

    /// The latent that the sampling starts from: noise, or where the stage before it ended.
    fn latent_at_start(&self, part: &Part) -> Result<UniPcLatent, StageError> {
        let (on, request, model) = (self.on(), self.run.request, self.model);
        let schedule = model.schedule(request);
        if part.steps.start > 0 {
            let [latent, corrected, last, before] = STATE.map(|name| self.host_value(name));
            let state = UniPcState {
                latent: latent?,
                corrected: corrected?,
                clean: [last?, before?],
            };
            return Ok(UniPcLatent::of_state(&state, schedule, on)?);
        }
        let video = request.video()?;
        let shape = model.latent_shape(video, model.vae.latents(video.frames as usize));
        let mut generator = Generator::new(request.seed);
        let noise = generator.normal(shape.iter().product());
        let noise = tokens_of(&Tensor::from_vec(noise, &shape[1..], &Device::Cpu)?)?;
        let counts = model.tokens(video);
        let sampled = noise.narrow(1, counts.first, counts.sampled)?;
        Ok(UniPcLatent::new(&sampled.contiguous()?, schedule, on)?)
    }

    /// What each token of the latent is seen with, as tokens: the encoded picture, after a mask where it conditions every cell.
    fn seen_with(&self) -> Result<Option<Tensor>, StageError> {
        let (dtype, device) = self.on();
        if self.run.value_if_taken(START)?.is_none() {
            return Ok(None);
        }
        let start = self.host_value(START)?.squeeze(0)?;
        let seen = match self.model.kind {
            Kind::Picture => {
                let (channels, latents, h, w) = start.dims4()?;
                let mask = self.model.transformer.conditions() - channels;
                let first = Tensor::ones((mask, 1, h, w), DType::F32, &Device::Cpu)?;
                let others = Tensor::zeros((mask, latents - 1, h, w), DType::F32, &Device::Cpu)?;
                Tensor::cat(&[Tensor::cat(&[first, others], 1)?, start], 0)?
            }
            Kind::Text | Kind::TextOrPicture => start,
        };
        let tokens = tokens_of(&seen)?.to_dtype(dtype)?;
        Ok(Some(tokens.contiguous()?.to_device(device)?))
    }

    /// The state of these steps.
    fn conditioning(
        &self,
        transformer: &Transformer,
        texts: &[Tensor],
        times: &[f32],
    ) -> Result<Conditioning, StageError> {
        let mut go_on = || self.observer.check_cancelled();
        let passes = texts.iter().map(|text| transformer.texts(text, &mut go_on));
        let passes = passes.collect::<Result<_, _>>()?;
        Ok(Conditioning {
            times: transformer.times(times, self.on())?,
            passes,
        })
    }

    fn denoise(&mut self, part: &Part) -> Result<Values, StageError> {
        let ((dtype, device), request, model) = (self.on(), self.run.request, self.model);
        let video = request.video()?;
        let ways = model.ways(request, video);
        let way = ways[self.run.rung % ways.len()];
        let half = Half::of(&self.run)?;
        let mut padded = self.padded_texts(way)?;
        if let Some(half) = half {
            // The prompt is the first.
            padded = padded.drain(..).skip(half.number()).take(1).collect();
        }
        let passes = texts(request).iter().count();

        let component = (self.run.tensors)(part.component)?;
        let adapters =
            model
                .adapters
                .attach(&request.adapters, part.component, UsedAs::Steps, self.run.tensors)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let transformer = Transformer::with_adapters(&model.transformer, &adapted, part.component)?;
        let mut latent = self.latent_at_start(part)?;
        let all_times = latent.schedule().times.clone();
        self.observer.check_cancelled()?;
        let mut conditioning = self.conditioning(&transformer, &padded, &all_times)?;

        let (h, w) = model.sides(video);
        let sides = (h / 2, w / 2);
        let (counts, batch) = (model.tokens(video), model.batch(way, passes));
        let condition = self.seen_with()?;
        let seen = match (&condition, model.kind) {
            (Some(condition), Kind::Picture) => Seen::Conditioned(condition),
            (Some(picture), _) => Seen::After(picture),
            (None, _) => Seen::Alone,
        };
        let kept = (way == PassOrder::OneByOne && passes > 1)
            .then(|| Tensor::zeros(latent.seen().shape(), dtype, device))
            .transpose()?;
        let bytes = Conditions::<()>::kept_bytes(latent.seen().elem_count(), dtype);
        let other = OtherCard::meet(half, bytes, device, &mut *self.observer)?;
        let sampling = Sampling {
            other,
            rotations: transformer.rotations(model.vae.latents(video.frames as usize), sides, device)?,
            buffers: transformer
                .step_buffers((batch, counts), seen, (dtype, device))?
                .with_attention(AttentionPrecision::asked(request)),
            transformer: &transformer,
            kept,
            guidance: part.guidance,
        };
        let colours = match (&video.init_image, self.run.plan.preview.is_some()) {
            (Some(image), true) if image.is_whole() => {
                let start = self.host_value(START)?.squeeze(0)?.narrow(1, 0, 1)?;
                Some(ColourMap::learned(image, &start)?)
            }
            (None, true) => {
                let published = model.vae.colours();
                published.map(|colours| ColourMap::of_table(&colours.weights, colours.of_zeros))
            }
            _ => None,
        };
        for step in part.steps.clone() {
            self.observer.check_cancelled()?;
            // Strengths that change also change the state that otherwise all steps share.
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, all_times.len());
                conditioning = self.conditioning(&transformer, &padded, &all_times[step..=step])?;
                row = 0;
            }
            self.step(
                (step, row),
                &mut latent,
                &sampling,
                &conditioning,
                (part, &adapters),
            )?;
            let is_shown = step + 1 < part.steps.end && self.observer.wants_preview();
            if let (Some(colours), true) = (&colours, is_shown) {
                let clean = latent_of_tokens(&latent.clean_on_host()?, sides)?;
                let preview = colours.preview(&clean.narrow(1, clean.dim(1)? / 2, 1)?.contiguous()?)?;
                self.observer.preview(preview.width, preview.height, preview.rgb);
            }
        }
        if let Some(other) = &sampling.other {
            other.close(&mut *self.observer)?;
        }
        self.left_by(part, &latent, sides)
    }

    /// Makes a step, `step` of the schedule and `row` of the times, and reports it.
    fn step(
        &mut self,
        (step, row): (usize, usize),
        latent: &mut UniPcLatent,
        sampling: &Sampling<'_>,
        conditioning: &Conditioning,
        (part, adapters): (&Part, &AttachedAdapters),
    ) -> Result<(), StageError> {
        let seen = latent.seen().clone();
        let mut go_on = || self.observer.check_cancelled();
        let mut predict = |texts: &Texts| {
            let times = (&conditioning.times, row);
            let texts = (texts, &sampling.rotations);
            sampling
                .transformer
                .velocity(&seen, times, texts, &sampling.buffers, &mut go_on)
        };
        let advanced = match (conditioning.passes.as_slice(), &sampling.kept, &sampling.other) {
            ([own], Some(theirs), Some(other)) => {
                let own = predict(own)?;
                other.swap(own, theirs)?;
                other.wait_for_work(&*self.observer)?;
                let [prompt, negative] = other.in_order(own, theirs);
                let velocity = Prediction::guided(prompt, negative, sampling.guidance);
                latent.advance(step, &velocity, part.component)
            }
            ([prompt, negative], Some(kept), None) => {
                ops::copy_rows(predict(negative)?, kept)?;
                let velocity = Prediction::guided(predict(prompt)?, kept, sampling.guidance);
                latent.advance(step, &velocity, part.component)
            }
            ([both], _, None) => {
                let velocity = predict(both)?;
                match velocity.dim(0)? {
                    1 => latent.advance(step, &Prediction::of(velocity), part.component),
                    _ => {
                        let [prompt, negative] = [0, 1].map(|item| velocity.narrow(0, item, 1));
                        let (prompt, negative) = (prompt?, negative?);
                        let velocity = Prediction::guided(&prompt, &negative, sampling.guidance);
                        latent.advance(step, &velocity, part.component)
                    }
                }
            }
            _ => Err(StageError::BadInput("a step without a text".to_owned())),
        };
        advanced.map_err(|error| adapters.named_as_cause(error))?;
        let done = step + 1 - part.steps.start;
        self.observer.step(done as u32, part.steps.len() as u32);
        Ok(())
    }

    /// The values after the last step of a transformer.
    fn left_by(
        &self,
        part: &Part,
        latent: &UniPcLatent,
        sides: (usize, usize),
    ) -> Result<Values, StageError> {
        if !part.is_last {
            let state = latent.state()?;
            let [clean, before] = state.clean;
            let state = [state.latent, state.corrected, clean, before];
            let named = STATE.iter().zip(&state);
            return named
                .map(|(name, tensor)| Ok(((*name).to_owned(), to_host(tensor)?)))
                .collect();
        }
        let mut sampled = latent_of_tokens(&latent.on_host()?, sides)?;
        if self.model.tokens(self.run.request.video()?).first > 0 {
            sampled = Tensor::cat(&[self.host_value(START)?.squeeze(0)?, sampled], 1)?;
        }
        Ok(named(LATENT, to_host(&sampled.unsqueeze(0)?)?))
    }

    fn decode(&mut self) -> Result<(), StageError> {
        let video = self.run.request.video()?.clone();
        let config = &self.model.vae;
        let latents = self.host_value(LATENT)?;
        let dtype = self.model.parts.dtype();
        let rungs = decode_ladder(config, self.model.sides(&video), latents.dim(2)?, dtype);
        let chunking = of_rung(&rungs, self.run.rung)?;
        let component = (self.run.tensors)(VAE)?;
        let decoder = WanVaeDecoder::new(config, &component)?;
        self.observer.check_cancelled()?;
        let format = video.format(None);
        let at_a_time = match video.frames_at_a_time {
            0 => usize::MAX,
            most => most as usize,
        };
        let observer = std::cell::RefCell::new(&mut *self.observer);
        let cancelled = || observer.borrow().cancelled();
        let how = FrameDecoding {
            chunking,
            cancelled: &cancelled,
        };
        decoder.decode_frames(&config.unscaled(&latents)?, &how, &mut |first, frames| {
            let count = frames.dim(0)?;
            for begin in (0..count).step_by(at_a_time.min(count.max(1))) {
                let some = frames.narrow(0, begin, at_a_time.min(count - begin))?;
                observer.borrow_mut().deliver(Piece {
                    track: String::new(),
                    format,
                    first: (first + begin) as u64,
                    data: frames_to_rgb8(&some)?.into(),
                });
            }
            Ok(())
        })
    }
}
