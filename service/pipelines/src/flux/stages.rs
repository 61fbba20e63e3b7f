//! Computation of a request's stages.
//!
//! A request has one random generator, whose draws are in the order of the reference: image to image first draws the
//! sample of the encoded picture (`retrieve_latents`), then the noise of the latent. The two are different stages
//! here, so denoising draws the first again and discards it. Numbers are drawn in f32 on every card. (diffusers draws
//! in the dtype of its encodings: its noise differs under bf16.)

use candle_core::Tensor;
use model::bounds::PIXELS_PER_TOKEN;

use super::control_net::{ControlNet, Controls, PreparedControl, acts_in};
use super::edit::{
    CONTROL, ENCODE_CONTROL, ENCODE_MASKED, ENCODE_REFERENCE, MASKED, REFERENCE, Variant, fill_conditioning,
};
use super::model::FluxModel;
use super::transformer::{Conditioning, Prompted, Reference, Transformer, pack, unpack};
use crate::adapters::{AdaptedTensors, AttachedAdapters, UsedAs};
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoders::kl::stages::{Run, send_preview};
use crate::sampling::{Conditions, Prompts, SampledLatent};
use crate::stage::{Stage, named, unknown};
use crate::start::{Start, StartRule, masked_picture, start};
use crate::tensors::to_host;
use crate::text::clip::ClipEncoder;
use crate::text::t5::T5Encoder;
use crate::{ControlUse, HostTensor, Image, Request, StageError, Values};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const DENOISE: &str = "denoise";

/// Name of CLIP's pooled output among the encodings.
pub const POOLED: &str = "pooled";
/// Name of T5's last hidden states among the encodings.
pub const SEQUENCE: &str = "sequence";

/// The names of a request's encodings, CLIP's and T5's.
pub(super) fn encodings(request: &Request) -> Prompts<(&'static str, &'static str)> {
    Prompts::of(
        request,
        (POOLED, SEQUENCE),
        ("negative_pooled", "negative_sequence"),
    )
}

/// The encodings of a prompt, and the state that all steps share.
struct Condition {
    pooled: Tensor,
    sequence: Tensor,
    conditioning: Conditioning,
}

impl Stage<'_, FluxModel> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_image().map(|latent| named(LATENT, latent)),
            ENCODE_MASKED => self.encode_masked().map(|value| named(MASKED, value)),
            ENCODE_REFERENCE => self.encode_reference().map(|value| named(REFERENCE, value)),
            DENOISE => self.denoise().map(|latent| named(LATENT, latent)),
            DECODE => self.model.autoencoder().decode(self).map(|()| Values::new()),
            other => {
                let number = other.strip_prefix(ENCODE_CONTROL);
                match number.and_then(|number| number.parse().ok()) {
                    Some(number) => {
                        let value = format!("{CONTROL}{number}");
                        self.encode_control(number).map(|control| named(&value, control))
                    }
                    None => Err(unknown(other)),
                }
            }
        };
        result.map_err(|error| error.of_stage(name))
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let request = self.run.request;
        let cancelled = || self.observer.cancelled();
        let (texts, names) = (Prompts::texts(request), encodings(request));
        let mut values = Values::new();

        let component = (self.run.tensors)("text_encoder")?;
        let adapted = AdaptedTensors::new(&component, &self.attached("text_encoder", UsedAs::Text)?);
        let clip = ClipEncoder::with_adapters(&self.model.clip, "text_encoder", &adapted)?;
        for ((_, text), (pooled, _)) in texts.iter().zip(names.iter()) {
            let ids = self.model.clip_tokenizer.encode(text)?;
            let encoded = clip.forward(&ids, &cancelled)?.pooled;
            values.insert((*pooled).to_owned(), to_host(&encoded)?);
        }

        let most = request.max_sequence_length as usize;
        let component = (self.run.tensors)("text_encoder_2")?;
        let adapted = AdaptedTensors::new(&component, &self.attached("text_encoder_2", UsedAs::Text)?);
        let t5 = T5Encoder::with_adapters(&self.model.t5, "text_encoder_2", &adapted)?;
        for ((_, text), (_, sequence)) in texts.iter().zip(names.iter()) {
            let ids = self.model.t5_tokenizer.encode(text, most)?;
            let encoded = t5.forward(&ids, &cancelled)?;
            values.insert((*sequence).to_owned(), to_host(&encoded)?);
        }
        Ok(values)
    }

    /// Runs `work` with the autoencoder.
    fn vae<R>(&self, work: impl FnOnce(&Run<'_>) -> Result<R, StageError>) -> Result<R, StageError> {
        self.model.autoencoder().with(self, work)
    }

    fn encode_image(&mut self) -> Result<HostTensor, StageError> {
        let image = self.run.request.image()?;
        let (start, draws) = (image.init_image.as_ref(), image.controls.len());
        self.vae(|vae| vae.encode(start, (self.run.request.seed, draws), self.run.rung))
    }

    /// The latent of a control picture, drawn after those of the control pictures before it.
    fn encode_control(&mut self, number: usize) -> Result<HostTensor, StageError> {
        let control = self
            .run
            .request
            .image()?
            .controls
            .get(number)
            .map(|control| &control.image);
        self.vae(|vae| vae.encode(control, (self.run.request.seed, number), self.run.rung))
    }

    /// The latent of the masked start picture, drawn after the start and the noise.
    fn encode_masked(&mut self) -> Result<HostTensor, StageError> {
        let image = self.run.request.image()?;
        let draws = image.controls.len() + 1 + usize::from(image.init_image.is_some());
        let picture = masked_picture(image)?;
        self.vae(|vae| vae.encode_masked(&picture, (self.run.request.seed, draws), self.run.rung))
    }

    fn encode_reference(&mut self) -> Result<HostTensor, StageError> {
        let reference = self.run.request.image()?.references.first();
        let reference = reference
            .ok_or_else(|| StageError::BadInput("there is no reference picture to encode".to_owned()))?;
        self.vae(|vae| vae.encode_mode(reference, self.run.rung))
    }

    fn denoise(&mut self) -> Result<HostTensor, StageError> {
        let (request, on) = (self.run.request, self.on());
        let config = &self.model.transformer;
        let image = request.image()?;
        let rows = (image.height / PIXELS_PER_TOKEN) as usize;
        let columns = (image.width / PIXELS_PER_TOKEN) as usize;
        let sigmas = self.model.scheduler.sigmas(request.steps, rows * columns);
        let shape = self.model.autoencoder().latent(image).shape;
        let start_latent = self.run.value_if_taken(LATENT)?;
        let Start { sigmas, latent, kept } = start(
            sigmas,
            request,
            &shape,
            start_latent,
            StartRule::drawn_after(image.controls.len()),
        )?;
        // Fill blends nothing: the mask is an input of the transformer.
        let kept = kept.filter(|_| self.model.variant != Variant::Fill);
        let kept = kept.map(|kept| kept.arranged(pack)).transpose()?;

        let component = (self.run.tensors)("transformer")?;
        let adapters = self
            .model
            .adapters
            .attach_to_sampler("transformer", &self.run, on.0)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let transformer =
            Transformer::with_adapters(config, &adapted).map_err(StageError::missing_in("transformer"))?;
        let reference = self.run.value_if_taken(REFERENCE)?;
        let reference = reference.map(|_| self.packed(REFERENCE)).transpose()?;
        let reference = image.references.first().zip(reference.as_ref());
        let reference = reference.map(|(picture, tokens)| Reference {
            tokens,
            rows: (picture.height / PIXELS_PER_TOKEN) as usize,
            columns: (picture.width / PIXELS_PER_TOKEN) as usize,
        });
        let encodings = encodings(request).try_map(|(pooled, sequence)| {
            Ok::<_, StageError>((self.value(pooled)?, self.value(sequence)?))
        })?;
        let (pooled, sequence) = encodings.prompt.clone();
        let prompted = Prompted {
            reference,
            sequence: &sequence,
            pooled: &pooled,
            guidance: request.guidance,
            rows,
            columns,
        };
        let steps = sigmas.len() - 1;
        // The reference derives timesteps from the sigmas and sigmas from those, rounding twice.
        let times: Vec<f32> = sigmas[..steps]
            .iter()
            .map(|sigma| sigma * 1000.0 / 1000.0)
            .collect();
        self.observer.check_cancelled()?;
        let condition = |pooled: Tensor, sequence: Tensor| -> Result<Condition, StageError> {
            let conditioning = transformer.condition(&prompted.of(&pooled, &sequence), &times)?;
            Ok(Condition {
                pooled,
                sequence,
                conditioning,
            })
        };
        let mut conditions = Conditions::new(
            encodings.try_map(|(pooled, sequence)| condition(pooled, sequence))?,
            request,
            (1, rows * columns, config.out_width()),
            on,
        )?
        .with_caches(request, (1, rows * columns, config.width()), on)?;
        let controls = self.prepared_controls(image, &prompted, &times)?;

        // Transposing a latent on the host costs nothing.
        let mut latent = SampledLatent::new(&pack(&latent)?, sigmas, kept, on)?;
        let (text, beside) = (
            request.max_sequence_length as usize,
            self.model.reference_tokens(image),
        );
        let step_buffers = transformer
            .step_buffers_beside(1, text, (rows * columns, beside), on)?
            .with_attention(AttentionPrecision::asked(request));
        let input = self.input_of_fill(image)?;
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change also change the state that otherwise all steps share.
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                for each in conditions.iter_mut() {
                    let prompted = prompted.of(&each.pooled, &each.sequence);
                    each.conditioning = transformer.condition(&prompted, &times[step..=step])?;
                }
                row = 0;
            }
            if let Some(input) = &input {
                ops::copy_rows(latent.seen(), &input.narrow(2, 0, config.out_width())?)?;
            }
            let input = input.as_ref().unwrap_or(latent.seen());
            let mut go_on = || self.observer.check_cancelled();
            let (double_blocks, single_blocks) = (config.num_layers, config.num_single_layers);
            let mut beside = Controls {
                active: Vec::new(),
                double_blocks,
                single_blocks,
            };
            for (each, control) in &controls {
                if acts_in(each, step, steps) {
                    control.compute(latent.seen(), step, &mut go_on)?;
                    beside.active.push(control);
                }
            }
            // ControlNets read the prompt alone, and their residuals are added under both conditions, as in the reference.
            let velocity = conditions.predict(|each, cache| {
                transformer.velocity_beside(
                    input,
                    (&each.conditioning, cache),
                    row,
                    &step_buffers,
                    &mut beside,
                    &mut go_on,
                )
            })?;
            let shown = self.advance(step, &mut latent, &velocity, ("transformer", &adapters))?;
            if let Some(shown) = shown {
                let preview = self.vae(|vae| vae.preview(&unpack(&shown, rows, columns)?))?;
                send_preview(preview, self.observer);
            }
        }
        self.report_left_out(&conditions);
        to_host(&unpack(&latent.on_host()?, rows, columns)?)
    }

    /// The request's adapters for a component.
    fn attached(&self, base: &str, used_as: UsedAs) -> Result<AttachedAdapters, StageError> {
        let uses = &self.run.request.adapters;
        self.model.adapters.attach(uses, base, used_as, self.run.tensors)
    }

    /// The request's ControlNets that act, with the state that all their steps share.
    fn prepared_controls<'i>(
        &self,
        image: &'i Image,
        prompted: &Prompted<'_>,
        times: &[f32],
    ) -> Result<Vec<(&'i ControlUse, PreparedControl)>, StageError> {
        let mut prepared = Vec::new();
        for (number, each, net) in self.model.controls_of(self.run.request, image) {
            let control = self.packed(&format!("{CONTROL}{number}"))?;
            let tensors = (self.run.tensors)(&net.component)?;
            let net =
                ControlNet::new(&net.config, &tensors).map_err(StageError::missing_in(&net.component))?;
            prepared.push((each, net.prepared(prompted, times, control, each)?));
        }
        Ok(prepared)
    }

    /// A latent as tokens on the device, in the dtype of the model.
    fn packed(&self, name: &str) -> Result<Tensor, StageError> {
        let (dtype, device) = self.on();
        let tokens = pack(&self.host_value(name)?)?.contiguous()?;
        Ok(tokens.to_dtype(dtype)?.to_device(device)?)
    }

    /// The input of Fill's transformer. Each token has the latent, which is written in each step, then its conditioning.
    fn input_of_fill(&self, image: &Image) -> Result<Option<Tensor>, StageError> {
        if self.run.value_if_taken(MASKED)?.is_none() {
            return Ok(None);
        }
        let ((dtype, device), config) = (self.on(), &self.model.transformer);
        let conditioning = fill_conditioning(image, &self.host_value(MASKED)?)?.to_dtype(dtype)?;
        let (_, tokens, _) = conditioning.dims3()?;
        let input = Tensor::zeros((1, tokens, config.in_channels), dtype, device)?;
        let width = config.out_width();
        let rest = input.narrow(2, width, config.in_channels - width)?;
        ops::copy_rows(&conditioning.contiguous()?.to_device(device)?, &rest)?;
        Ok(Some(input))
    }
}
