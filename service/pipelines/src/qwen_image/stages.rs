//! Computation of a request's stages, as in diffusers' pipelines of Qwen-Image.
//!
//! Random draws are in the order of the reference: from a picture, the sample of the encoded picture is drawn first, and then the
//! noise of the latent. The two are different stages here, so denoising draws the first again and discards it.

use candle_core::{DType, Tensor};

use super::model::{QwenImageModel, TEXT_ENCODER, TRANSFORMER, VISION};
use super::references::{ENCODE_PICTURE, ENCODE_REFERENCE, PICTURE, REFERENCE, places};
use super::transformer::{Prompted, TokenCounts, Transformer};
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::flux::{pack, unpack};
use crate::sampling::{Conditions, Length, Prompts, SampledLatent};
use crate::stage::{Stage, named, unknown};
use crate::start::{Start, StartRule, start};
use crate::tensors::to_host;
use crate::text::qwen2_vl::Qwen2VlEncoder;
use crate::vision::qwen2_vl::QwenVisionTower;
use crate::{HostTensor, InitImage, Request, RequestError, StageError, Values};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const DENOISE: &str = "denoise";

/// Name of the text encoder's states among the values, `[1, tokens, joint_attention_dim]`.
const CAPTION: &str = "caption";

impl Stage<'_, QwenImageModel> {
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
            other => {
                let of = |prefix: &str| other.strip_prefix(prefix);
                match (of(ENCODE_PICTURE), of(ENCODE_REFERENCE)) {
                    (Some(number), _) => {
                        let value = format!("{PICTURE}{number}");
                        self.encode_picture().map(|tokens| named(&value, tokens))
                    }
                    (None, Some(number)) => {
                        let value = format!("{REFERENCE}{number}");
                        self.encode_reference().map(|latent| named(&value, latent))
                    }
                    (None, None) => Err(unknown(other)),
                }
            }
        };
        result.map_err(|error| error.of_stage(name))
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let (request, model) = (self.run.request, self.model);
        let image = request.image()?;
        let tensors = (self.run.tensors)(TEXT_ENCODER)?;
        let encoder = Qwen2VlEncoder::new(&model.text, TEXT_ENCODER, &tensors)?;
        let pictures = (0..image.references.len()).map(|number| self.value(&format!("{PICTURE}{number}")));
        let pictures = pictures.collect::<Result<Vec<Tensor>, StageError>>()?;
        let prompts = model.prompts(request, image).map_err(bad_input)?;
        let mut values = Values::new();
        for (prompt, name) in prompts.iter().zip(captions(request).iter()) {
            let states = encoder.forward(prompt, &pictures, &|| self.observer.cancelled())?;
            values.insert((*name).to_owned(), to_host(&states)?);
        }
        Ok(values)
    }

    /// The reference picture in the part of the request that the stage has, which is the only one.
    fn reference(&self) -> Result<Option<&InitImage>, StageError> {
        Ok(self.run.request.image()?.references.first())
    }

    /// The tokens of the vision tower.
    fn encode_picture(&self) -> Result<HostTensor, StageError> {
        let model = self.model;
        let reference = self.reference()?;
        let reference =
            reference.ok_or_else(|| StageError::BadInput("there is no picture to encode".to_owned()))?;
        let tensors = (self.run.tensors)(VISION)?;
        let tower = QwenVisionTower::new(&model.text.vision, VISION, &tensors)?;
        let grid = model.grid(reference).map_err(bad_input)?;
        let patches = model.patches(reference)?;
        to_host(&tower.forward(&patches, grid, &|| self.observer.cancelled())?)
    }

    fn encode_reference(&self) -> Result<HostTensor, StageError> {
        self.model.autoencoder().encode_mode(self, self.reference()?)
    }

    fn encode_start(&self) -> Result<HostTensor, StageError> {
        let request = self.run.request;
        let start = request.image()?.init_image.as_ref();
        self.model.autoencoder().encode_drawn(self, start, request.seed)
    }

    /// The tokens of all references, on the device in the dtype of the model.
    fn reference_tokens(&self) -> Result<Option<Tensor>, StageError> {
        let (dtype, device) = self.on();
        let numbers = 0..self.run.request.image()?.references.len();
        let tokens = numbers.map(|number| Ok(pack(&self.host_value(&format!("{REFERENCE}{number}"))?)?));
        let tokens = tokens.collect::<Result<Vec<Tensor>, StageError>>()?;
        if tokens.is_empty() {
            return Ok(None);
        }
        let tokens = Tensor::cat(&tokens, 1)?.to_dtype(dtype)?;
        Ok(Some(tokens.to_device(device)?))
    }

    fn denoise(&mut self) -> Result<HostTensor, StageError> {
        let (model, request, on) = (self.model, self.run.request, self.on());
        let image = request.image()?;
        let captions = captions(request).try_map(|name| self.value(name))?;
        let references = self.reference_tokens()?;
        let places = places(image);
        let lengths = captions.iter().map(|caption| caption.dims()[1]);
        let tokens = TokenCounts {
            text: lengths.max().unwrap_or(0),
            generated: places[0].tokens(),
            references: references.as_ref().map_or(0, |tokens| tokens.dims()[1]),
        };
        let shape = model.autoencoder().latent(image).shape;
        let start_latent = self.run.value_if_taken(LATENT)?;
        let sigmas = model.scheduler.sigmas(request.steps, tokens.generated);
        let rule = StartRule::drawn_after(0);
        let Start { sigmas, latent, kept } = start(sigmas, request, &shape, start_latent, rule)?;
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
        self.observer.check_cancelled()?;
        let mut modulated = transformer.modulated(&times, on)?;
        let conditions = captions.try_map(|caption| {
            transformer.condition(&Prompted {
                sequence: &caption,
                places: &places,
                references: references.as_ref(),
            })
        })?;
        let shape = (1, tokens.generated, model.transformer.in_channels);
        let cached = (1, tokens.generated, model.transformer.width());
        let conditions = Conditions::new(conditions, request, shape, on)?.of_length(Length::OfPrompt);
        let conditions = conditions.with_caches(request, cached, on)?;

        // Transposing a latent on the host costs nothing.
        let mut latent = SampledLatent::new(&pack(&latent)?, sigmas, kept, on)?;
        let step_buffers = transformer
            .step_buffers(tokens, on)?
            .with_attention(AttentionPrecision::asked(request));
        let place = places[0];
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change also change the state that otherwise all steps share.
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                modulated = transformer.modulated(&times[step..=step], on)?;
                row = 0;
            }
            let mut go_on = || self.observer.check_cancelled();
            let velocity = conditions.predict(|each, cache| {
                let times = (&modulated, row);
                transformer.velocity_cached(latent.seen(), times, (each, cache), &step_buffers, &mut go_on)
            })?;
            let shown = self.advance(step, &mut latent, &velocity, (TRANSFORMER, &adapters))?;
            if let Some(shown) = shown {
                let clean = unpack(&shown.to_dtype(DType::F32)?, place.rows, place.columns)?;
                model.autoencoder().preview(self, &clean)?;
            }
        }
        self.report_left_out(&conditions);
        to_host(&unpack(&latent.on_host()?, place.rows, place.columns)?)
    }
}

/// The names of a request's encodings.
pub(super) fn captions(request: &Request) -> Prompts<&'static str> {
    Prompts::of(request, CAPTION, "negative_caption")
}

/// The error for a request that was planned otherwise.
fn bad_input(error: RequestError) -> StageError {
    StageError::BadInput(error.to_string())
}
