//! Computation of a request's stages, as in diffusers' `Flux2KleinPipeline` and `Flux2KleinInpaintPipeline`.
//!
//! Pictures are encoded without a draw, so the noise is the only draw of a request. It has the shape of the latent: patches of
//! two by two cells of the autoencoder. A picture to start from is a reference picture too, the first.

use candle_core::{DType, Device, Tensor};

use super::model::{Flux2Model, TEXT_ENCODER, TRANSFORMER};
use super::references::{ENCODE_REFERENCE, REFERENCE, places};
use super::transformer::{Conditioning, Prompted, Transformer, pack, unpack};
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoders::kl::stages::send_preview;
use crate::place::Place;
use crate::sampling::{Conditions, Prompts, SampledLatent};
use crate::stage::{Stage, named, unknown};
use crate::start::{MaskCells, Start, StartRule, start};
use crate::tensors::{from_host, to_host};
use crate::text::qwen3::Qwen3Encoder;
use crate::{HostTensor, InitImage, Request, StageError, Values};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const DENOISE: &str = "denoise";

/// Name of the text encoder's states among the values, `[1, tokens, joint_attention_dim]`.
const CAPTION: &str = "caption";

/// How a picture to start from is taken.
const START: StartRule = StartRule {
    draws_before: 0,
    is_drawn: false,
    cells: MaskCells::Middle,
};

/// The encoding of a prompt, and the state that all steps share.
struct Condition {
    caption: Tensor,
    conditioning: Conditioning,
}

impl Stage<'_, Flux2Model> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_start().map(|latent| named(LATENT, latent)),
            DENOISE => self.denoise().map(|latent| named(LATENT, latent)),
            DECODE => self.model.autoencoder().decode(self).map(|()| Values::new()),
            other => match other.strip_prefix(ENCODE_REFERENCE) {
                Some(number) => {
                    let value = format!("{REFERENCE}{number}");
                    self.encode_reference().map(|latent| named(&value, latent))
                }
                None => Err(unknown(other)),
            },
        };
        result.map_err(|error| error.of_stage(name))
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let (request, model) = (self.run.request, self.model);
        let tensors = (self.run.tensors)(TEXT_ENCODER)?;
        let encoder = Qwen3Encoder::new(&model.text, model.depth(), TEXT_ENCODER, &tensors)?;
        let mut values = Values::new();
        for ((_, text), name) in Prompts::texts(request).iter().zip(captions(request).iter()) {
            let mut ids = model.tokens(request, text)?;
            let attended = ids.len();
            ids.resize(request.max_sequence_length as usize, model.pad);
            let states = encoder.states(&ids, attended, &model.taken, &|| self.observer.cancelled())?;
            values.insert((*name).to_owned(), to_host(&states.unsqueeze(0)?)?);
        }
        Ok(values)
    }

    fn encode_start(&mut self) -> Result<HostTensor, StageError> {
        let image = self.run.request.image()?.init_image.as_ref();
        self.encode(image)
    }

    /// The latent of a reference picture, the only one in the part of the request that the stage has.
    fn encode_reference(&mut self) -> Result<HostTensor, StageError> {
        let reference = self.run.request.image()?.references.first();
        self.encode(reference)
    }

    fn encode(&self, picture: Option<&InitImage>) -> Result<HostTensor, StageError> {
        let picture =
            picture.ok_or_else(|| StageError::BadInput("there is no picture to encode".to_owned()))?;
        let autoencoder = self.model.autoencoder();
        autoencoder.with(self, |vae| vae.encode_mode(picture, self.run.rung))
    }

    /// The tokens of all pictures that the generated one refers to, on the device in the dtype of the model.
    fn reference_tokens(&self, start: Option<&HostTensor>) -> Result<Option<Tensor>, StageError> {
        let (dtype, device) = self.on();
        let mut tokens = Vec::new();
        if let Some(start) = start {
            tokens.push(pack(&from_host(start, LATENT, DType::F32, &Device::Cpu)?)?);
        }
        for number in 0..self.run.request.image()?.references.len() {
            tokens.push(pack(&self.host_value(&format!("{REFERENCE}{number}"))?)?);
        }
        if tokens.is_empty() {
            return Ok(None);
        }
        let tokens = Tensor::cat(&tokens, 1)?.to_dtype(dtype)?;
        Ok(Some(tokens.to_device(device)?))
    }

    fn denoise(&mut self) -> Result<HostTensor, StageError> {
        let (model, request, on) = (self.model, self.run.request, self.on());
        let image = request.image()?;
        let picture = Place::of_picture(image.width, image.height);
        let shape = model.autoencoder().latent(image).shape;
        let start_latent = self.run.value_if_taken(LATENT)?;
        let sigmas = model
            .scheduler
            .sigmas_of_mu(request.steps, mu(picture.tokens(), request.steps));
        let references = self.reference_tokens(start_latent)?;
        let places = places(request, image);
        let Start { sigmas, latent, kept } = start(sigmas, request, &shape, start_latent, START)?;
        let kept = kept.map(|kept| kept.arranged(pack)).transpose()?;

        let component = (self.run.tensors)(TRANSFORMER)?;
        let adapters = model.adapters.attach_to_sampler(TRANSFORMER, &self.run, on.0)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let transformer = Transformer::with_adapters(&model.transformer, &adapted)
            .map_err(StageError::missing_in(TRANSFORMER))?;
        let steps = sigmas.len() - 1;
        // The reference derives timesteps from the sigmas and sigmas from those, rounding twice.
        let times: Vec<f32> = sigmas[..steps]
            .iter()
            .map(|sigma| sigma * 1000.0 / 1000.0)
            .collect();
        let condition = |caption: &Tensor, times: &[f32]| {
            let prompted = Prompted {
                sequence: caption,
                picture,
                places: &places,
                references: references.as_ref(),
            };
            transformer.condition(&prompted, times)
        };
        self.observer.check_cancelled()?;
        let captions = captions(request).try_map(|name| self.value(name))?;
        let conditions = captions.try_map(|caption| {
            let conditioning = condition(&caption, &times)?;
            Ok::<_, StageError>(Condition {
                caption,
                conditioning,
            })
        })?;
        let shape = (1, picture.tokens(), model.transformer.in_channels);
        let cached = (1, picture.tokens(), model.transformer.width());
        let conditions = Conditions::new(conditions, request, shape, on)?;
        let mut conditions = conditions.with_caches(request, cached, on)?;

        // Transposing a latent on the host costs nothing.
        let mut latent = SampledLatent::new(&pack(&latent)?, sigmas, kept, on)?;
        let beside = places.iter().map(|place| place.tokens()).sum();
        let text = request.max_sequence_length as usize;
        let step_buffers = transformer
            .step_buffers(text, (picture.tokens(), beside), on)?
            .with_attention(AttentionPrecision::asked(request));
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change also change the state that otherwise all steps share.
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                for each in conditions.iter_mut() {
                    each.conditioning = condition(&each.caption, &times[step..=step])?;
                }
                row = 0;
            }
            let mut go_on = || self.observer.check_cancelled();
            let velocity = conditions.predict(|each, cache| {
                let conditioning = (&each.conditioning, cache);
                transformer.velocity_cached(latent.seen(), conditioning, row, &step_buffers, &mut go_on)
            })?;
            let shown = self.advance(step, &mut latent, &velocity, (TRANSFORMER, &adapters))?;
            if let Some(shown) = shown {
                let clean = unpack(&shown, picture)?;
                let preview = model.autoencoder().with(self, |vae| vae.preview(&clean))?;
                send_preview(preview, self.observer);
            }
        }
        self.report_left_out(&conditions);
        to_host(&unpack(&latent.on_host()?, picture)?)
    }
}

/// The names of a request's encodings.
pub(super) fn captions(request: &Request) -> Prompts<&'static str> {
    Prompts::of(request, CAPTION, "negative_caption")
}

/// Tokens from which the shift no longer depends on the number of steps.
const MANY_TOKENS: usize = 4300;

/// The exponent of the shift of the sigmas of `steps` steps over a picture of so many tokens: `compute_empirical_mu`, two lines
/// that were fitted at 10 and at 200 steps, between and beyond which it is linear in the steps.
pub fn mu(tokens: usize, steps: u32) -> f64 {
    let tokens_f = tokens as f64;
    let at_200 = 0.000_169_27 * tokens_f + 0.456_666_66;
    if tokens > MANY_TOKENS {
        return at_200;
    }
    let at_10 = 8.738_095_24e-5 * tokens_f + 1.898_333_33;
    let slope = (at_200 - at_10) / 190.0;
    slope * f64::from(steps) + at_200 - 200.0 * slope
}
