//! Computation of a request's stages, as in diffusers' SDXL pipelines.
//!
//! A request has one random generator, whose draws are in the order of the reference: the sample of the encoded picture, the
//! noise, the sample of the masked picture (also where the UNet does not see it), then the noise of ancestral steps. Different
//! stages make them, so each draws again what was drawn before.

use candle_core::{DType, Device, Tensor};
use model::Rung;

use super::model::{SdxlModel, TEXT_ENCODER, TEXT_ENCODER_2, UNET};
use super::unet::{Conditioning, Prompted, Unet};
use crate::adapters::{AdaptedTensors, AttachedAdapters, UsedAs};
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoders::kl::stages::send_preview;
use crate::noise::Generator;
use crate::samplers::{Beginning, Sampled};
use crate::sampling::Prompts;
use crate::stage::{Stage, named, unknown};
use crate::start::{Kept, MaskCells, cells, is_from_latent, masked_picture};
use crate::tensors::{from_host, to_host};
use crate::text::clip::{ClipEncoder, ClipProjection};
use crate::{HostTensor, Image, Request, StageError, Values};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const ENCODE_MASKED: &str = "encode_masked";
pub(super) const DENOISE: &str = "denoise";

/// Name of the masked picture's latent, of the shape of the latent.
pub(super) const MASKED: &str = "masked";

/// Names of the states of both text encoders, `[1, tokens, cross_attention_dim]`, and of the pooled state of the second.
pub const STATES: &str = "states";
/// See [`STATES`].
pub const POOLED: &str = "pooled";

/// The names of a request's encodings: states, and pooled.
pub(super) fn encodings(request: &Request) -> Prompts<(&'static str, &'static str)> {
    Prompts::of(request, (STATES, POOLED), ("negative_states", "negative_pooled"))
}

/// End of the label of a rung that predicts under one condition after the other.
const ONE_BY_ONE: &str = ", one condition at a time";

/// How the conditions of a request are predicted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Both as items of one pass.
    Together,
    /// One after the other, in half the memory.
    OneByOne,
    /// There is one.
    Alone,
}

impl Way {
    /// Items of a pass.
    pub(super) fn items(self) -> usize {
        match self {
            Way::Together => 2,
            Way::OneByOne | Way::Alone => 1,
        }
    }

    /// The rung of sampling in this way.
    pub(super) fn labelled(self, rung: Rung) -> Rung {
        match self {
            Way::Together | Way::Alone => rung,
            Way::OneByOne => Rung {
                label: format!("{}{ONE_BY_ONE}", rung.label),
                ..rung
            },
        }
    }

    /// The way of a rung of sampling.
    fn of_rung(request: &Request, rung: Option<&Rung>) -> Way {
        let is_one_by_one = rung.is_some_and(|rung| rung.label.ends_with(ONE_BY_ONE));
        let way = ways(request).first().filter(|_| !is_one_by_one);
        way.copied().unwrap_or(Way::OneByOne)
    }
}

/// The ways to predict under the conditions of a request, the best first.
pub(super) fn ways(request: &Request) -> &'static [Way] {
    match request.negative() {
        Some(_) => &[Way::Together, Way::OneByOne],
        None => &[Way::Alone],
    }
}

/// The conditions of a request, each as the UNet takes it: both in one, or one in each.
struct Conditions {
    negative: Option<Prompted>,
    prompt: Prompted,
    way: Way,
}

impl Conditions {
    /// The conditioning of each pass of a step, in order.
    fn of(&self, unet: &Unet, on: (DType, &Device)) -> Result<Vec<Conditioning>, StageError> {
        let all: Vec<&Prompted> = self.negative.iter().chain([&self.prompt]).collect();
        let passes: Vec<&[&Prompted]> = match self.way {
            Way::Together => vec![&all],
            Way::OneByOne | Way::Alone => all.chunks(1).collect(),
        };
        passes
            .into_iter()
            .map(|items| unet.condition(items, on))
            .collect()
    }
}

impl Stage<'_, SdxlModel> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_image().map(|latent| named(LATENT, latent)),
            ENCODE_MASKED => self.encode_masked().map(|latent| named(MASKED, latent)),
            DENOISE => self.denoise().map(|latent| named(LATENT, latent)),
            DECODE => self.model.autoencoder().decode(self).map(|()| Values::new()),
            other => Err(unknown(other)),
        };
        result.map_err(|error| error.of_stage(name))
    }

    /// The request's adapters for a component.
    fn attached(&self, base: &str, used_as: UsedAs) -> Result<AttachedAdapters, StageError> {
        let uses = &self.run.request.adapters;
        self.model.adapters.attach(uses, base, used_as, self.run.tensors)
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let (request, model, (dtype, device)) = (self.run.request, self.model, self.on());
        let cancelled = || self.observer.cancelled();
        let texts = model.texts(request);
        let count = model.chunk_count(request)?;
        let length = model.chunk_length();
        let [first, second] = &model.encoders;
        let widths = [first.hidden_size, second.hidden_size];
        let blank = |width: usize| ops::blank(&[count * length, width], dtype, device);
        let mut encoded = Vec::new();
        for (_, text) in texts.iter() {
            let chunks = model.chunks(request, text, count)?;
            encoded.push((chunks, blank(widths[0] + widths[1])?));
        }
        let mut pooled = Vec::new();
        for (encoder, name) in [TEXT_ENCODER, TEXT_ENCODER_2].into_iter().enumerate() {
            let component = (self.run.tensors)(name)?;
            let adapted = AdaptedTensors::new(&component, &self.attached(name, UsedAs::Text)?);
            let config = &model.encoders[encoder];
            let clip = ClipEncoder::with_adapters(config, name, &adapted)?;
            for (chunks, states) in &encoded {
                let own = states.narrow(1, encoder * widths[0], widths[encoder])?;
                for (number, ids) in chunks[encoder].iter().enumerate() {
                    let rows = own.narrow(0, number * length, length)?;
                    let output = clip.forward_with_states(ids, &rows, &cancelled)?;
                    // The pooled state of a prompt is that of its first chunk, as in the second encoder alone.
                    if name == TEXT_ENCODER_2 && number == 0 {
                        let projection = ClipProjection::new(config, name, &component)?;
                        pooled.push(projection.forward(&output.pooled)?);
                    }
                }
            }
        }
        let names = encodings(request);
        let mut values = Values::new();
        for ((names, (_, states)), pooled) in names.iter().zip(&encoded).zip(&pooled) {
            values.insert(names.0.to_owned(), to_host(&states.unsqueeze(0)?)?);
            values.insert(names.1.to_owned(), to_host(pooled)?);
        }
        Ok(values)
    }

    fn encode_image(&mut self) -> Result<HostTensor, StageError> {
        let image = self.run.request.image()?.init_image.as_ref();
        let autoencoder = self.model.autoencoder();
        let draw = (self.run.request.seed, 0);
        autoencoder.with(self, |vae| vae.encode(image, draw, self.run.rung))
    }

    /// The latent of the masked picture, drawn after those before it and the noise.
    fn encode_masked(&mut self) -> Result<HostTensor, StageError> {
        let request = self.run.request;
        let picture = masked_picture(request.image()?)?;
        let draws = self.draws_of_start() + 1;
        let autoencoder = self.model.autoencoder();
        autoencoder.with(self, |vae| {
            vae.encode_masked(&picture, (request.seed, draws), self.run.rung)
        })
    }

    /// Draws before the noise: the sample of the start picture.
    fn draws_of_start(&self) -> usize {
        let request = self.run.request;
        let is_drawn = self.model.reads_start(request) && !request.from_values;
        usize::from(is_drawn)
    }

    /// The encodings of a text on the device.
    fn prompted(&self, (states, pooled): (&str, &str), image: &Image) -> Result<Prompted, StageError> {
        Ok(Prompted {
            states: self.value(states)?,
            pooled: self.value(pooled)?,
            ids: time_ids(image),
        })
    }

    /// The conditions of a request: its prompt, and its negative prompt or zeros in place of it.
    fn conditions(&self, image: &Image) -> Result<Conditions, StageError> {
        let request = self.run.request;
        let names = encodings(request);
        let prompt = self.prompted(names.prompt, image)?;
        let (dtype, device) = self.on();
        let negative = match names.negative {
            None => None,
            Some(_) if self.model.negative_is_zero(request) => Some(Prompted {
                states: Tensor::zeros(prompt.states.shape(), dtype, device)?,
                pooled: Tensor::zeros(prompt.pooled.shape(), dtype, device)?,
                ids: prompt.ids,
            }),
            Some(names) => Some(self.prompted(names, image)?),
        };
        Ok(Conditions {
            negative,
            prompt,
            way: Way::of_rung(request, self.run.plan.rungs.get(self.run.rung)),
        })
    }

    /// The latent that sampling begins with.
    fn begin(&self, image: &Image) -> Result<Sampled, StageError> {
        let (model, request) = (self.model, self.run.request);
        let shape = model.autoencoder().latent(image).shape;
        let count = shape.iter().product();
        let mut generator = Generator::new(request.seed);
        (0..self.draws_of_start()).for_each(|_| generator.skip_normal(count));
        let noise = Tensor::from_vec(generator.normal(count), shape.as_slice(), &Device::Cpu)?;
        if model.unet.takes_mask() || (image.mask.is_some() && !request.from_values) {
            generator.skip_normal(count);
        }
        let start = self.run.value_if_taken(LATENT)?;
        let start = start.map(|start| from_host(start, LATENT, DType::F32, &Device::Cpu));
        let start = start.transpose()?;
        let first = model.first_step(request) as usize;
        let schedule = model.noise.schedule(request.steps, request.sampler);
        if first >= schedule.times.len() {
            return Err(StageError::BadInput(format!(
                "a strength of {} leaves none of {} steps",
                request.strength, request.steps
            )));
        }
        // With a mask, all of the schedule begins with noise alone.
        let begins_with_start = image.mask.is_none() || request.strength < 1.0 || request.from_values;
        let mask = image.mask.as_ref().filter(|_| !model.unet.takes_mask());
        let kept = mask.zip(start.as_ref()).map(|(mask, start)| {
            Ok::<_, StageError>(Kept {
                mask: cells(mask, MaskCells::TopLeft, &shape)?,
                noise: noise.clone(),
                image: start.clone(),
            })
        });
        let beginning = Beginning {
            image: start.as_ref().map(|start| (start, begins_with_start)),
            first: if is_from_latent(request) { first } else { 0 },
        };
        Ok(Sampled::new(
            schedule,
            &noise,
            &beginning,
            kept.transpose()?,
            generator,
        )?)
    }

    /// What an inpainting UNet sees beside the latent, `[1, 5, h, w]` in host memory: the mask, and the masked picture.
    fn seen_beside(&self, image: &Image) -> Result<Option<Tensor>, StageError> {
        if self.run.value_if_taken(MASKED)?.is_none() {
            return Ok(None);
        }
        let masked = self.host_value(MASKED)?;
        let (_, _, height, width) = masked.dims4()?;
        let shape = [1, 1, height, width];
        let mask = match &image.mask {
            Some(mask) => cells(mask, MaskCells::TopLeft, &shape)?,
            None => Tensor::ones(&shape, DType::F32, &Device::Cpu)?,
        };
        Ok(Some(Tensor::cat(&[mask, masked], 1)?))
    }

    fn denoise(&mut self) -> Result<HostTensor, StageError> {
        let (request, on) = (self.run.request, self.on());
        let image = request.image()?;
        let conditions = self.conditions(image)?;
        let mut sampled = self.begin(image)?;
        let beside = self.seen_beside(image)?;

        let component = (self.run.tensors)(UNET)?;
        let adapters = self.model.adapters.attach_to_sampler(UNET, &self.run, on.0)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let unet = Unet::with_adapters(&self.model.unet, &adapted).map_err(StageError::missing_in(UNET))?;
        self.observer.check_cancelled()?;
        let mut passes = conditions.of(&unet, on)?;
        let items = conditions.way.items();
        let (_, _, height, width) = sampled.latent().dims4()?;
        let scratch = unet.scratch((items, height * width), on)?;
        let steps = sampled.steps();
        let of = steps.len();
        for (number, step) in steps.enumerate() {
            self.observer.check_cancelled()?;
            // Strengths that change also change what is computed once.
            if !adapters.are_constant() {
                adapters.set_step(number, of);
                passes = conditions.of(&unet, on)?;
            }
            let seen = sampled.seen(step)?;
            let seen = match &beside {
                Some(beside) => Tensor::cat(&[&seen, beside], 1)?,
                None => seen,
            };
            let seen = as_map(&seen, items, on)?;
            let mut predictions = Vec::new();
            for conditioning in &passes {
                let mut go_on = || self.observer.check_cancelled();
                let output = unet.forward(&seen, sampled.time(step), conditioning, &scratch, &mut go_on)?;
                for item in 0..items {
                    let output = output.narrow(0, item, 1)?.squeeze(0)?;
                    let (planes, is_finite) = ops::map_to_planes(&output)?;
                    if !is_finite {
                        let error = StageError::NotFinite {
                            component: UNET.to_owned(),
                            step: number as u32 + 1,
                        };
                        return Err(adapters.named_as_cause(error));
                    }
                    predictions.push(planes.to_device(&Device::Cpu)?);
                }
            }
            sampled.advance(step, &guided(&predictions, request.true_guidance)?)?;
            self.observer.step(number as u32 + 1, of as u32);
            let is_shown = request.preview && number + 1 < of && self.observer.wants_preview();
            if let Some(clean) = sampled.clean().filter(|_| is_shown) {
                let preview = self.model.autoencoder().with(self, |vae| vae.preview(clean))?;
                send_preview(preview, self.observer);
            }
        }
        to_host(sampled.latent())
    }
}

/// The prediction under the prompt alone, or led away from that under the negative prompt, which is before it.
fn guided(predictions: &[Tensor], guidance: f32) -> candle_core::Result<Tensor> {
    match predictions {
        [negative, prompt] => negative + ((prompt - negative)? * f64::from(guidance))?,
        [prompt] => Ok(prompt.clone()),
        others => candle_core::bail!("{} predictions of a step", others.len()),
    }
}

/// Planes `[1, c, h, w]` in host memory as a map `[items, h, w, c]` on the device, the same for each item.
fn as_map(planes: &Tensor, items: usize, (dtype, device): (DType, &Device)) -> candle_core::Result<Tensor> {
    let map = planes.permute((0, 2, 3, 1))?.contiguous()?;
    let maps = vec![&map; items];
    Tensor::cat(&maps, 0)?.to_dtype(dtype)?.to_device(device)
}

/// Height and width of the original picture, the corner it was cut at, and the height and width that are asked for.
fn time_ids(image: &Image) -> [f32; 6] {
    let (height, width) = (image.height as f32, image.width as f32);
    [height, width, 0.0, 0.0, height, width]
}
