//! Computation of a request's stages, as in diffusers' `ZImagePipeline` and `ZImageImg2ImgPipeline`.
//!
//! Random draws are in the order of the reference: image to image first draws the sample of the encoded picture, then
//! the noise of the latent. The two are different stages here, so denoising draws the first again and discards it.
//! Numbers are drawn in f32 on every card, as in the reference.

use candle_core::{DType, Device, Tensor};
use ops::{Finite, euler};

use super::model::{TEXT_ENCODER, TRANSFORMER, VAE, ZImageModel};
use super::transformer::{Transformer, latent_of, patches_of, times};
use crate::adapters::{AdaptedTensors, UsedAs};
use crate::autoencoder_kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoder_kl::stages::{Run, deliver, send_preview};
use crate::start::{Start, start};
use crate::tensors::{from_host, to_host};
use crate::text::qwen3::Qwen3Encoder;
use crate::{HostTensor, Observer, StageError, StageRun, Values};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const DENOISE: &str = "denoise";

/// Name of the text encoder's states among the values, `[tokens, cap_feat_dim]`.
pub(super) const CAPTION: &str = "caption";

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
            ENCODE_TEXT => self.encode_text().map(|caption| named(CAPTION, caption)),
            ENCODE_IMAGE => self.encode_image().map(|latent| named(LATENT, latent)),
            DENOISE => self.denoise().map(|latent| named(LATENT, latent)),
            DECODE => self.decode().map(|()| Values::new()),
            other => Err(StageError::BadInput(format!("there is no stage {other}"))),
        };
        result.map_err(|error| error.of_stage(name))
    }

    fn encode_text(&mut self) -> Result<HostTensor, StageError> {
        let ids = self.model.tokens(self.run.request)?;
        let tensors = (self.run.tensors)(TEXT_ENCODER)?;
        let encoder = Qwen3Encoder::new(&self.model.text, self.model.depth, TEXT_ENCODER, &tensors)?;
        to_host(&encoder.forward(&ids, &|| self.observer.cancelled())?)
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
        let caption = from_host(self.run.value(CAPTION)?, CAPTION, dtype, self.run.device)?;
        let image = self.run.request.image()?;
        let lengths = self.model.lengths(image, caption.dim(0)?);
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
        let mut conditioning =
            transformer.condition(&caption, size, &times, &mut || self.observer.check_cancelled())?;

        // Transposing a latent on the host costs nothing. Two tensors, since both are written.
        let latent = patches_of(&latent)?.contiguous()?;
        let mut seen = latent.to_dtype(dtype)?.copy()?.to_device(self.run.device)?;
        let mut latent = latent.to_device(self.run.device)?;
        let step_buffers = transformer.step_buffers(&lengths, (dtype, self.run.device))?;
        let finite = Finite::new(self.run.device)?;
        let steps = sigmas.len() - 1;
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change are those of what all steps share, too.
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                let times = &times[step..=step];
                conditioning =
                    transformer.condition(&caption, size, times, &mut || self.observer.check_cancelled())?;
                row = 0;
            }
            let direction = transformer.direction(&seen, &conditioning, row, &step_buffers, &mut || {
                self.observer.check_cancelled()
            })?;
            let (sigma, next) = (sigmas[step], sigmas[step + 1]);
            // The velocity is the negative of the transformer's output.
            euler(&latent, direction, f64::from(sigma - next), &seen, &finite)?;
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
                let clean = without_noise(&latent, direction, next)?;
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

/// The predicted final latent of a step, in host memory: the latent plus the direction times the remaining sigma.
fn without_noise(latent: &Tensor, direction: &Tensor, sigma: f32) -> candle_core::Result<Tensor> {
    let direction = direction.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    latent.to_device(&Device::Cpu)? + (direction * f64::from(sigma))?
}
