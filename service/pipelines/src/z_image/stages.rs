//! Computation of a request's stages, as in diffusers' `ZImagePipeline`, `ZImageImg2ImgPipeline` and `ZImageInpaintPipeline`.
//!
//! Random draws are in the order of the reference: image to image first draws the sample of the encoded picture, then
//! the noise of the latent. The two are different stages here, so denoising draws the first again and discards it.
//! Numbers are drawn in f32 on every card, as in the reference.
//!
//! A negative prompt is a second condition of every step ([`Conditions`]): the reference's `guidance_scale` is the true guidance
//! less 1. Its `cfg_normalization` and `cfg_truncation` are settings of the model ([`GuidanceRule`](crate::defaults::GuidanceRule)).

use candle_core::Tensor;

use super::model::{TEXT_ENCODER, TRANSFORMER, ZImageModel};
use super::transformer::{Conditioning, Transformer, latent_of, patches_of, times};
use crate::adapters::{AdaptedTensors, UsedAs};
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoders::kl::stages::send_preview;
use crate::sampling::{Conditions, Prompts, SampledLatent};
use crate::stage::{Stage, named, unknown};
use crate::start::{Start, StartRule, start};
use crate::tensors::to_host;
use crate::text::qwen3::Qwen3Encoder;
use crate::{HostTensor, Request, StageError, Values};

/// Names of the stages.
pub(super) const ENCODE_TEXT: &str = "encode_text";
pub(super) const DENOISE: &str = "denoise";

/// Name of the text encoder's states among the values, `[tokens, cap_feat_dim]`.
const CAPTION: &str = "caption";

/// The encoding of a prompt, and the state that all steps share.
struct Condition {
    caption: Tensor,
    conditioning: Conditioning,
}

impl Stage<'_, ZImageModel> {
    /// Computes the values of the stage.
    ///
    /// # Errors
    /// [`StageError`].
    pub(super) fn run(&mut self) -> Result<Values, StageError> {
        let name = self.run.plan.name.as_str();
        let result = match name {
            ENCODE_TEXT => self.encode_text(),
            ENCODE_IMAGE => self.encode_image().map(|latent| named(LATENT, latent)),
            DENOISE => self.denoise().map(|latent| named(LATENT, latent)),
            DECODE => self.model.autoencoder().decode(self).map(|()| Values::new()),
            other => Err(unknown(other)),
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

    fn encode_image(&mut self) -> Result<HostTensor, StageError> {
        let request = self.run.request;
        let image = request.image()?.init_image.as_ref();
        let autoencoder = self.model.autoencoder();
        autoencoder.with(self, |vae| vae.encode(image, (request.seed, 0), self.run.rung))
    }

    fn denoise(&mut self) -> Result<HostTensor, StageError> {
        let (model, request, on) = (self.model, self.run.request, self.on());
        let image = request.image()?;
        let captions = captions(request).try_map(|name| self.value(name))?;
        let tokens = captions.iter().map(|caption| caption.dims()[0]);
        let lengths = model.lengths(image, tokens.max().unwrap_or_default());
        let size = (lengths.rows, lengths.columns);
        let shape = model.autoencoder().latent(image).shape;
        let start_latent = self.run.value_if_taken(LATENT)?;
        let sigmas = model
            .scheduler
            .sigmas_from_both_ends(request.steps, lengths.picture());
        let rule = StartRule::drawn_after(0);
        let Start { sigmas, latent, kept } = start(sigmas, request, &shape, start_latent, rule)?;
        let kept = kept.map(|kept| kept.arranged(patches_of)).transpose()?;

        let component = (self.run.tensors)(TRANSFORMER)?;
        let adapters =
            model
                .adapters
                .attach(&request.adapters, TRANSFORMER, UsedAs::Steps, self.run.tensors)?;
        let adapted = AdaptedTensors::new(&component, &adapters);
        let transformer = Transformer::with_adapters(&model.transformer, &adapted)
            .map_err(StageError::missing_in(TRANSFORMER))?;
        let times = times(&sigmas);
        let modulated = transformer.modulated(&times, on)?;
        let conditions = captions.try_map(|caption| {
            let mut go_on = || self.observer.check_cancelled();
            let conditioning = transformer.condition_of(&caption, size, &modulated, &mut go_on)?;
            Ok::<_, StageError>(Condition {
                caption,
                conditioning,
            })
        })?;
        let shape = (1, lengths.picture(), model.transformer.patch_width());
        let mut conditions =
            Conditions::new(conditions, request, shape, on)?.of_length(model.guidance.length());

        // Transposing a latent on the host costs nothing.
        let mut latent = SampledLatent::new(&patches_of(&latent)?, sigmas, kept, on)?;
        let step_buffers = transformer
            .step_buffers(&lengths, on)?
            .with_attention(AttentionPrecision::asked(request));
        let steps = latent.steps();
        for step in 0..steps {
            self.observer.check_cancelled()?;
            // Strengths that change also change the state that otherwise all steps share.
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
            let conditions = conditions.guided(model.guidance.guides_at(times[step]));
            let velocity = conditions
                .predict(|each, _| {
                    let conditioning = &each.conditioning;
                    transformer.direction(latent.seen(), conditioning, row, &step_buffers, &mut go_on)
                })?
                .negated();
            let shown = self.advance(step, &mut latent, &velocity, (TRANSFORMER, &adapters))?;
            if let Some(shown) = shown {
                let clean = latent_of(&shown, size.0, size.1)?;
                let preview = model.autoencoder().with(self, |vae| vae.preview(&clean))?;
                send_preview(preview, self.observer);
            }
        }
        to_host(&latent_of(&latent.on_host()?, size.0, size.1)?)
    }
}

/// The names of a request's encodings.
pub(super) fn captions(request: &Request) -> Prompts<&'static str> {
    Prompts::of(request, CAPTION, "negative_caption")
}
