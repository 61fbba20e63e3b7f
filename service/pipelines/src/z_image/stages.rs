//! Computation of a request's stages, as in diffusers' `ZImagePipeline` and `ZImageImg2ImgPipeline`.
//!
//! Random draws are in the order of the reference: image to image first draws the sample of the encoded picture, then
//! the noise of the latent. The two are different stages here, so denoising draws the first again and discards it.
//! Numbers are drawn in f32 on every card, as in the reference.
//!
//! A negative prompt is a second condition of every step ([`Conditions`]): the reference's `guidance_scale` is the true guidance
//! less 1. Its `cfg_normalization` and `cfg_truncation` are left at their defaults, which change nothing; others are not offered.

use candle_core::{Device, Tensor};
use ops::Finite;

use super::model::{TEXT_ENCODER, TRANSFORMER, VAE, ZImageModel};
use super::transformer::{Conditioning, Transformer, latent_of, patches_of, times};
use crate::adapters::{AdaptedTensors, UsedAs};
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoders::kl::stages::{Run, deliver, send_preview};
use crate::sampling::{Conditions, Prompts};
use crate::start::{Start, start};
use crate::tensors::{from_host, to_host};
use crate::text::qwen3::Qwen3Encoder;
use crate::{HostTensor, Observer, Request, StageError, StageRun, Values};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const DENOISE: &str = "denoise";

/// Name of the text encoder's states among the values, `[tokens, cap_feat_dim]`.
const CAPTION: &str = "caption";

/// The encoding of a prompt, and what all steps share of it.
struct Condition {
    caption: Tensor,
    conditioning: Conditioning,
}

/// A stage of one request.
pub(super) struct Stage<'a> {
    pub(super) model: &'a ZImageModel,
    /// Inputs of the stage.
    pub(super) run: StageRun<'a>,
    /// Receives progress and results.
    pub(super) observer: &'a mut dyn Observer,
}

impl Stage<'_> {
    /// Computes the values that the stage gives.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let named = |name: &str, value| Values::from([(name.to_owned(), value)]);
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_image().map(|latent| named(LATENT, latent)),
            DENOISE => self.denoise().map(|latent| named(LATENT, latent)),
            DECODE => self.decode().map(|()| Values::new()),
            other => Err(StageError::BadInput(format!("there is no stage {other}"))),
        };
        result.map_err(|error| error.of_stage(name))
    }

    fn encode_text(&mut self) -> Result<Values, StageError> {
        let tensors = (self.run.tensors)(TEXT_ENCODER)?;
        let encoder = Qwen3Encoder::new(&self.model.text, self.model.depth, TEXT_ENCODER, &tensors)?;
        let mut values = Values::new();
        let request = self.run.request;
        for (text, name) in Prompts::texts(request).iter().zip(captions(request).iter()) {
            let ids = self.model.tokens(request, text.1)?;
            let states = encoder.forward(&ids, &|| self.observer.cancelled())?;
            values.insert((*name).to_owned(), to_host(&states)?);
        }
        Ok(values)
    }

    /// Runs `work` with the autoencoder.
    fn vae<R>(&self, work: impl FnOnce(&Run<'_>) -> Result<R, StageError>) -> Result<R, StageError> {
        let tensors = (self.run.tensors)(VAE)?;
        work(&Run {
            config: &self.model.vae,
            tensors: &tensors,
            dtype: self.model.precision.dtype,
            device: self.run.device,
            cancelled: &|| self.observer.cancelled(),
        })
    }

    fn encode_image(&mut self) -> Result<HostTensor, StageError> {
        let image = self.run.request.image()?.init_image.as_ref();
        self.vae(|vae| vae.encode(image, (self.run.request.seed, 0), self.run.rung))
    }

    fn denoise(&mut self) -> Result<HostTensor, StageError> {
        let dtype = self.model.precision.dtype;
        let image = self.run.request.image()?;
        let on = (dtype, self.run.device);
        let captions =
            captions(self.run.request).try_map(|name| from_host(self.run.value(name)?, name, on.0, on.1))?;
        let tokens = captions.iter().map(|caption| caption.dims()[0]);
        let lengths = self.model.lengths(image, tokens.max().unwrap_or_default());
        let (rows, columns) = (lengths.rows, lengths.columns);
        let shape = self.model.autoencoder().latent(image).shape;
        let brought = self.run.value_if_taken(LATENT)?;
        let steps = self.run.request.steps;
        let sigmas = self
            .model
            .scheduler
            .sigmas_from_both_ends(steps, lengths.picture());
        let Start { sigmas, latent, kept } = start(sigmas, self.run.request, &shape, brought, 0)?;
        let kept = kept.map(|kept| kept.arranged(patches_of)).transpose()?;

        let component = (self.run.tensors)(TRANSFORMER)?;
        let uses = &self.run.request.adapters;
        let adapters = self
            .model
            .adapters
            .attach(uses, TRANSFORMER, UsedAs::Steps, self.run.tensors)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let transformer =
            Transformer::with_adapters(&self.model.transformer, &adapted).map_err(|missing| {
                StageError::Missing {
                    component: TRANSFORMER.to_owned(),
                    missing,
                }
            })?;
        let times = times(&sigmas);
        let size = (rows, columns);
        let modulated = transformer.modulated(&times, on)?;
        let conditions = captions.try_map(|caption| {
            let mut go_on = || self.observer.check_cancelled();
            let conditioning = transformer.condition_of(&caption, size, &modulated, &mut go_on)?;
            Ok::<_, StageError>(Condition {
                caption,
                conditioning,
            })
        })?;
        let shape = (1, lengths.picture(), self.model.transformer.patch_width());
        let mut conditions = Conditions::new(conditions, self.run.request, shape, on)?;

        // Transposing a latent on the host costs nothing. Two tensors, since both are written.
        let latent = patches_of(&latent)?.contiguous()?;
        let mut seen = latent.to_dtype(dtype)?.copy()?.to_device(self.run.device)?;
        let mut latent = latent.to_device(self.run.device)?;
        let step_buffers = transformer.step_buffers(&lengths, on)?;
        let finite = Finite::new(self.run.device)?;
        let steps = sigmas.len() - 1;
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change are those of what all steps share, too.
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                let modulated = transformer.modulated(&times[step..=step], on)?;
                for each in conditions.iter_mut() {
                    let mut go_on = || self.observer.check_cancelled();
                    each.conditioning =
                        transformer.condition_of(&each.caption, size, &modulated, &mut go_on)?;
                }
                row = 0;
            }
            let mut go_on = || self.observer.check_cancelled();
            let direction = conditions.predict(|each| {
                transformer.direction(&seen, &each.conditioning, row, &step_buffers, &mut go_on)
            })?;
            let (sigma, next) = (sigmas[step], sigmas[step + 1]);
            // The velocity is the negative of the transformer's output.
            direction.step(&latent, f64::from(sigma - next), (&seen, &finite))?;
            // Checking for finiteness synchronizes with the card, on purpose: a reported step has completed.
            if !finite.is_finite()? {
                return Err(adapters.named_as_cause(StageError::NotFinite {
                    component: TRANSFORMER.to_owned(),
                    step: step as u32 + 1,
                }));
            }
            if let Some(kept) = &kept {
                let blended = kept.blended(&latent, next)?;
                seen = blended.to_dtype(dtype)?.copy()?.to_device(self.run.device)?;
                latent = blended.to_device(self.run.device)?;
            }
            self.observer.step(step as u32 + 1, steps as u32);
            if self.run.request.preview && step + 1 < steps && self.observer.wants_preview() {
                let clean = direction.ahead_of(&latent, f64::from(next))?;
                let clean = latent_of(&clean, rows, columns)?;
                let preview = self.vae(|vae| vae.preview(&clean))?;
                send_preview(preview, self.observer);
            }
        }
        to_host(&latent_of(&latent.to_device(&Device::Cpu)?, rows, columns)?)
    }

    fn decode(&mut self) -> Result<(), StageError> {
        let image = self.run.request.image()?;
        let latent = self.run.value(LATENT)?;
        let picture = self.vae(|vae| vae.decode(latent, self.run.rung))?;
        deliver(picture, image, self.observer);
        Ok(())
    }
}

/// The names of a request's encodings.
pub(super) fn captions(request: &Request) -> Prompts<&'static str> {
    Prompts::of(request, CAPTION, "negative_caption")
}
