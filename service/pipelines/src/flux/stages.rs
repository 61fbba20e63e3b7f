//! Computation of a request's stages.
//!
//! A request has one random generator, whose draws are in the order of the reference: image to image first draws the
//! sample of the encoded picture (`retrieve_latents`), then the noise of the latent. The two are different stages
//! here, so denoising draws the first again and discards it. Numbers are drawn in f32 on every card. (diffusers draws
//! in the dtype of its encodings: its noise differs under bf16.)

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::bounds::PIXELS_PER_TOKEN;
use ops::Finite;

use super::control_net::{ControlNet, Controls, PreparedControl, acts_in};
use super::edit::{
    CONTROL, ENCODE_CONTROL, ENCODE_MASKED, ENCODE_REFERENCE, MASKED, REFERENCE, Variant, fill_conditioning,
    masked_picture,
};
use super::model::FluxModel;
use super::transformer::{Conditioning, Prompted, Reference, Transformer, pack, unpack};
use crate::adapters::{AdaptedTensors, AttachedAdapters, UsedAs};
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoders::kl::stages::{Run, deliver, send_preview};
use crate::autoencoders::kl::{Chunking, VaeDecoder};
use crate::sampling::{Conditions, Prompts};
use crate::start::{Start, start};
use crate::tensors::{from_host, to_host};
use crate::text::clip::ClipEncoder;
use crate::text::t5::T5Encoder;
use crate::{ControlUse, HostTensor, Image, Observer, Request, StageError, StageRun, Values};

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

/// The encodings of a prompt, and what all steps share of them.
struct Condition {
    pooled: Tensor,
    sequence: Tensor,
    conditioning: Conditioning,
}

/// Inputs of a stage of one request.
pub struct Stage<'a> {
    pub model: &'a FluxModel,
    /// The request; must be valid.
    pub request: &'a Request,
    /// Looks up the tensors of a resident component.
    pub tensors: &'a dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
    /// Device of the tensors.
    pub device: &'a Device,
    /// Receives progress and results.
    pub observer: &'a mut dyn Observer,
}

impl Stage<'_> {
    /// Computes a stage on one of its rungs: the values that it gives.
    ///
    /// # Errors
    /// [`StageError`].
    pub fn run(&mut self, stage: &StageRun<'_>) -> Result<Values, StageError> {
        let named = |name: &str, value| Values::from([(name.to_owned(), value)]);
        let latent = |latent| named(LATENT, latent);
        let result = match stage.plan.name.as_str() {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_image(stage.rung).map(latent),
            ENCODE_MASKED => self.encode_masked(stage.rung).map(|value| named(MASKED, value)),
            ENCODE_REFERENCE => self
                .encode_reference(stage.rung)
                .map(|value| named(REFERENCE, value)),
            DENOISE => self.denoise(stage).map(latent),
            DECODE => self.decode(stage).map(|()| Values::new()),
            other => match other
                .strip_prefix(ENCODE_CONTROL)
                .and_then(|number| number.parse().ok())
            {
                Some(number) => {
                    let value = format!("{CONTROL}{number}");
                    self.encode_control(number, stage.rung)
                        .map(|control| named(&value, control))
                }
                None => Err(StageError::BadInput(format!("there is no stage {other}"))),
            },
        };
        result.map_err(|error| error.of_stage(&stage.plan.name))
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let request = self.request;
        let cancelled = || self.observer.cancelled();
        let (texts, names) = (Prompts::texts(request), encodings(request));
        let mut values = Values::new();

        let component = (self.tensors)("text_encoder")?;
        let adapted = AdaptedTensors::new(&component, &self.attached("text_encoder", UsedAs::Text)?);
        let clip = ClipEncoder::with_adapters(&self.model.clip, "text_encoder", &adapted)?;
        for ((_, text), (pooled, _)) in texts.iter().zip(names.iter()) {
            let ids = self.model.clip_tokenizer.encode(text)?;
            let encoded = clip.forward(&ids, &cancelled)?.pooled;
            values.insert((*pooled).to_owned(), to_host(&encoded)?);
        }

        let most = request.max_sequence_length as usize;
        let component = (self.tensors)("text_encoder_2")?;
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
        let tensors = (self.tensors)("vae")?;
        work(&Run {
            config: &self.model.vae,
            tensors: &tensors,
            dtype: self.model.precision.dtype,
            device: self.device,
            cancelled: &|| self.observer.cancelled(),
        })
    }

    fn encode_image(&mut self, rung: usize) -> Result<HostTensor, StageError> {
        let image = self.request.image()?;
        let (start, draws) = (image.init_image.as_ref(), image.controls.len());
        self.vae(|vae| vae.encode(start, (self.request.seed, draws), rung))
    }

    /// The latent of a control picture, whose draw is behind those of the control pictures before it.
    fn encode_control(&mut self, number: usize, rung: usize) -> Result<HostTensor, StageError> {
        let control = self
            .request
            .image()?
            .controls
            .get(number)
            .map(|control| &control.image);
        self.vae(|vae| vae.encode(control, (self.request.seed, number), rung))
    }

    /// The latent of what the mask leaves of the start, whose draw is behind those of the start and of the noise.
    fn encode_masked(&mut self, rung: usize) -> Result<HostTensor, StageError> {
        let image = self.request.image()?;
        let draws = image.controls.len() + 1 + usize::from(image.init_image.is_some());
        let picture = masked_picture(image)?;
        self.vae(|vae| vae.encode_masked(&picture, (self.request.seed, draws), rung))
    }

    fn encode_reference(&mut self, rung: usize) -> Result<HostTensor, StageError> {
        let reference = self.request.image()?.references.first();
        let reference = reference
            .ok_or_else(|| StageError::BadInput("there is no reference picture to encode".to_owned()))?;
        self.vae(|vae| vae.encode_mode(reference, rung))
    }

    fn denoise(&mut self, stage: &StageRun<'_>) -> Result<HostTensor, StageError> {
        let config = &self.model.transformer;
        let tokens = self.request.max_sequence_length as usize;
        let image_latent = stage.value_if_taken(LATENT)?;
        let image = self.request.image()?.clone();
        let Image { width, height, .. } = image;
        let rows = (height / PIXELS_PER_TOKEN) as usize;
        let columns = (width / PIXELS_PER_TOKEN) as usize;
        let sigmas = self.model.scheduler.sigmas(self.request.steps, rows * columns);
        let shape = self.model.autoencoder().latent(&image).shape;
        let Start { sigmas, latent, kept } =
            start(sigmas, self.request, &shape, image_latent, image.controls.len())?;
        // Fill blends nothing: the mask is its input.
        let kept = kept.filter(|_| self.model.variant != Variant::Fill);
        let kept = kept.map(|kept| kept.arranged(pack)).transpose()?;

        let component = (self.tensors)("transformer")?;
        let adapters = self.attached("transformer", UsedAs::Steps)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let transformer =
            Transformer::with_adapters(config, &adapted).map_err(|missing| StageError::Missing {
                component: "transformer".to_owned(),
                missing,
            })?;
        let dtype = self.model.precision.dtype;
        let reference = match stage.value_if_taken(REFERENCE)? {
            Some(latent) => Some(self.packed(latent, REFERENCE)?),
            None => None,
        };
        let reference = image.references.first().zip(reference.as_ref());
        let reference = reference.map(|(picture, tokens)| Reference {
            tokens,
            rows: (picture.height / PIXELS_PER_TOKEN) as usize,
            columns: (picture.width / PIXELS_PER_TOKEN) as usize,
        });
        let guidance = self.request.guidance;
        let encodings = encodings(self.request).try_map(|(pooled, sequence)| {
            Ok::<_, StageError>((self.encoding(stage, pooled)?, self.encoding(stage, sequence)?))
        })?;
        let (pooled, sequence) = encodings.prompt.clone();
        let prompted = Prompted {
            reference,
            sequence: &sequence,
            pooled: &pooled,
            guidance,
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
            self.request,
            (1, rows * columns, config.out_width()),
            (dtype, self.device),
        )?;
        let controls = self.prepared_controls(stage, &image, &prompted, &times)?;

        // Transposing a latent on the host costs nothing. Two tensors, since both are written.
        let latent = pack(&latent)?.contiguous()?;
        let mut seen = latent.to_dtype(dtype)?.copy()?.to_device(self.device)?;
        let mut latent = latent.to_device(self.device)?;
        let beside = (rows * columns, self.model.reference_tokens(&image));
        let step_buffers = transformer.step_buffers_beside(1, tokens, beside, (dtype, self.device))?;
        // The latent, and behind it in each token what conditions it.
        let input = match stage.value_if_taken(MASKED)? {
            Some(masked) => {
                let masked = from_host(masked, MASKED, DType::F32, &Device::Cpu)?;
                let conditioning = fill_conditioning(&image, &masked)?.to_dtype(dtype)?;
                let input = Tensor::zeros((1, rows * columns, config.in_channels), dtype, self.device)?;
                let width = config.out_width();
                let behind = input.narrow(2, width, config.in_channels - width)?;
                ops::copy_rows(&conditioning.contiguous()?.to_device(self.device)?, &behind)?;
                Some(input)
            }
            None => None,
        };
        let finite = Finite::new(self.device)?;
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change are those of what all steps share, too.
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
                ops::copy_rows(&seen, &input.narrow(2, 0, config.out_width())?)?;
            }
            let input = input.as_ref().unwrap_or(&seen);
            let mut go_on = || self.observer.check_cancelled();
            let (double_blocks, single_blocks) = (config.num_layers, config.num_single_layers);
            let mut beside = Controls {
                active: Vec::new(),
                double_blocks,
                single_blocks,
            };
            for (each, control) in &controls {
                if acts_in(each, step, steps) {
                    control.compute(&seen, step, &mut go_on)?;
                    beside.active.push(control);
                }
            }
            // What ControlNets add is that of the prompt under both conditions, as in the reference.
            let velocity = conditions.predict(|each| {
                transformer.velocity_beside(
                    input,
                    &each.conditioning,
                    row,
                    &step_buffers,
                    &mut beside,
                    &mut go_on,
                )
            })?;
            let (sigma, next) = (sigmas[step], sigmas[step + 1]);
            velocity.step(&latent, f64::from(next - sigma), (&seen, &finite))?;
            // Checking for finiteness synchronizes with the card, on purpose: a reported step has completed, and a
            // cancelled one is the last. The card idles for the microseconds until the next step is enqueued.
            if !finite.is_finite()? {
                let step = step as u32 + 1;
                return Err(adapters.named_as_cause(StageError::NotFinite {
                    component: "transformer".to_owned(),
                    step,
                }));
            }
            if let Some(kept) = &kept {
                let blended = kept.blended(&latent, next)?;
                seen = blended.to_dtype(dtype)?.copy()?.to_device(self.device)?;
                latent = blended.to_device(self.device)?;
            }
            self.observer.step(step as u32 + 1, steps as u32);
            if self.request.preview && step + 1 < steps && self.observer.wants_preview() {
                let clean = velocity.ahead_of(&latent, f64::from(-next))?;
                let clean = unpack(&clean, rows, columns)?;
                let preview = self.vae(|vae| vae.preview(&clean))?;
                send_preview(preview, self.observer);
            }
        }
        to_host(&unpack(&latent.to_device(&Device::Cpu)?, rows, columns)?)
    }

    /// The request's adapters for a component.
    fn attached(&self, base: &str, used_as: UsedAs) -> Result<AttachedAdapters, StageError> {
        let uses = &self.request.adapters;
        self.model.adapters.attach(uses, base, used_as, self.tensors)
    }

    /// The request's ControlNets that act, with what all steps share.
    fn prepared_controls<'i>(
        &self,
        stage: &StageRun<'_>,
        image: &'i Image,
        prompted: &Prompted<'_>,
        times: &[f32],
    ) -> Result<Vec<(&'i ControlUse, PreparedControl)>, StageError> {
        let mut prepared = Vec::new();
        for (number, each, net) in self.model.controls_of(self.request, image) {
            let name = format!("{CONTROL}{number}");
            let control = self.packed(stage.value(&name)?, &name)?;
            let tensors = (self.tensors)(&net.component)?;
            let net = ControlNet::new(&net.config, &tensors).map_err(|missing| StageError::Missing {
                component: net.component.clone(),
                missing,
            })?;
            prepared.push((each, net.prepared(prompted, times, control, each)?));
        }
        Ok(prepared)
    }

    /// A latent as tokens, in the dtype of the card.
    fn packed(&self, latent: &HostTensor, name: &str) -> Result<Tensor, StageError> {
        let latent = from_host(latent, name, DType::F32, &Device::Cpu)?;
        let tokens = pack(&latent)?
            .contiguous()?
            .to_dtype(self.model.precision.dtype)?;
        Ok(tokens.to_device(self.device)?)
    }

    /// One tensor of the encoded text, in the dtype of the card.
    fn encoding(&self, stage: &StageRun<'_>, name: &str) -> Result<Tensor, StageError> {
        from_host(stage.value(name)?, name, self.model.precision.dtype, self.device)
    }

    fn decode(&mut self, stage: &StageRun<'_>) -> Result<(), StageError> {
        let image = self.request.image()?;
        let latent = stage.value(LATENT)?;
        let picture = self.vae(|vae| vae.decode(latent, stage.rung))?;
        deliver(picture, image, self.observer);
        Ok(())
    }

    /// Decodes a latent in the transformer's scale to f32 `[1, 3, height, width]` of -1 to 1, not clamped. The latent
    /// may be in host memory.
    ///
    /// # Errors
    /// [`StageError`].
    pub fn decoded(&self, latent: &Tensor, chunking: Chunking) -> Result<Tensor, StageError> {
        let decoder = VaeDecoder::new(&self.model.vae, &*(self.tensors)("vae")?)?;
        let latent = self.model.vae.unscaled(&latent.to_device(&Device::Cpu)?)?;
        let latent = latent.to_device(self.device)?;
        decoder.decode(&latent, chunking, &|| self.observer.cancelled())
    }
}
