//! The stages of a request, computed.
//!
//! A request has one generator, and its draws follow one another as in the reference: image to image first
//! draws the sample of the encoded picture (`retrieve_latents`), then the noise of the latent. The two are
//! different stages here, so denoising draws the first again and drops it. Numbers are drawn in f32 on
//! every card. (diffusers draws in the dtype of its encodings: under bf16 it has other noise.)

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use ops::{Finite, euler};

use super::bounds::{LONGEST_SIDE, PIXELS_PER_TOKEN};
use super::model::FluxModel;
use super::transformer::{Prompted, Transformer, pack, unpack};
use crate::autoencoder_kl::{Chunking, Rgb8, VaeDecoder, VaeEncoder, encode_ladder, ladder};
use crate::flow_match::first_step;
use crate::noise::Generator;
use crate::tensors::{from_host, to_host};
use crate::text::clip::ClipEncoder;
use crate::text::t5::T5Encoder;
use crate::text::tokenizers::TokenizeError;
use crate::{
    EncodedText, HostTensor, ImageRequest, Model, Observer, StageError, StageInput, StageKind, StageOutput,
    is_out_of_memory,
};

/// Name of CLIP's pooled output among the encodings.
pub const POOLED: &str = "pooled";
/// Name of T5's last hidden states among the encodings.
pub const SEQUENCE: &str = "sequence";

/// Everything that a stage of one request is computed from.
pub struct Stage<'a> {
    /// The checkpoint.
    pub model: &'a FluxModel,
    /// What is generated; must be valid.
    pub request: &'a ImageRequest,
    /// The tensors of a resident component.
    pub tensors: &'a dyn Fn(&str) -> Result<Arc<ComponentTensors>, StageError>,
    /// Where they are.
    pub device: &'a Device,
    /// Who watches.
    pub observer: &'a mut dyn Observer,
}

/// Where the denoising of a request begins, and what it begins with.
struct Start {
    /// Sigmas of the steps that are run, and the last, zero.
    sigmas: Vec<f32>,
    /// f32 `[1, channels, h, w]`, on the host.
    latent: Tensor,
}

impl Stage<'_> {
    /// Computes a stage on one of its rungs.
    ///
    /// # Errors
    /// [`StageError`].
    pub fn run(
        &mut self,
        kind: StageKind,
        rung: usize,
        input: &StageInput,
    ) -> Result<StageOutput, StageError> {
        let result = match kind {
            StageKind::EncodeText => self.encode_text().map(StageOutput::Text),
            StageKind::EncodeImage => self.encode_image(rung).map(StageOutput::Latent),
            StageKind::Denoise => self.denoise(input).map(StageOutput::Latent),
            StageKind::Decode => self.decode(rung, input),
        };
        result.map_err(|error| named_if_out_of_memory(error, kind))
    }

    fn go_on(&self) -> Result<(), StageError> {
        if self.observer.cancelled() {
            Err(StageError::Cancelled)
        } else {
            Ok(())
        }
    }

    fn encode_text(&mut self) -> Result<EncodedText, StageError> {
        let ImageRequest {
            prompt,
            max_sequence_length,
            ..
        } = self.request;
        let refused = |error: TokenizeError| StageError::BadInput(error.to_string());
        let cancelled = || self.observer.cancelled();

        let ids = self.model.clip_tokenizer.encode(prompt).map_err(refused)?;
        let clip = ClipEncoder::new(
            &self.model.clip,
            "text_encoder",
            &*(self.tensors)("text_encoder")?,
        )?;
        let pooled = to_host(&clip.forward(&ids, &cancelled)?.pooled)?;

        let ids = self
            .model
            .t5_tokenizer
            .encode(prompt, *max_sequence_length as usize)
            .map_err(refused)?;
        let t5 = T5Encoder::new(
            &self.model.t5,
            "text_encoder_2",
            &*(self.tensors)("text_encoder_2")?,
        )?;
        let sequence = to_host(&t5.forward(&ids, &cancelled)?)?;
        Ok(EncodedText {
            tensors: vec![(POOLED.to_owned(), pooled), (SEQUENCE.to_owned(), sequence)],
        })
    }

    fn encode_image(&mut self, rung: usize) -> Result<HostTensor, StageError> {
        let image = self.request.init_image.as_ref();
        let image = image.ok_or_else(|| StageError::BadInput("there is no image to encode".to_owned()))?;
        let (width, height) = (image.width as usize, image.height as usize);
        let vae = &self.model.vae;
        let rungs = encode_ladder(
            vae,
            height / vae.factor(),
            width / vae.factor(),
            self.model.precision.dtype,
        );
        let chunking = chunking_of(&rungs, rung)?;
        let encoder = VaeEncoder::new(vae, &*(self.tensors)("vae")?)?;
        let cancelled = || self.observer.cancelled();
        let moments = encoder.encode_rgb8(&image.rgb, (width, height), chunking, &cancelled)?;
        let noise = Generator::new(self.request.seed).normal(moments.mean.elem_count());
        let noise = Tensor::from_vec(noise, moments.mean.shape(), &Device::Cpu)?;
        to_host(&vae.scaled(&moments.sample(&noise)?)?)
    }

    /// The noise that a request starts from, mixed with the encoded image if there is one:
    /// `FluxImg2ImgPipeline.get_timesteps` and `prepare_latents`. It is computed in host memory: a card would have to load
    /// kernels for it.
    fn start(&self, image_latent: Option<&HostTensor>) -> Result<Start, StageError> {
        let ImageRequest {
            width,
            height,
            steps,
            seed,
            strength,
            ..
        } = *self.request;
        let shape = self.model.latent_shape(width, height);
        let count = shape.iter().product();
        let tokens = (width / PIXELS_PER_TOKEN) as usize * (height / PIXELS_PER_TOKEN) as usize;
        let mut sigmas = self.model.scheduler.sigmas(steps, tokens);

        let mut generator = Generator::new(seed);
        if self.request.init_image.is_some() {
            let _sample_of_the_encoded_image = generator.normal(count);
        }
        let noise = Tensor::from_vec(generator.normal(count), shape.as_slice(), &Device::Cpu)?;
        let Some(image_latent) = image_latent else {
            if self.request.init_image.is_some() {
                return Err(StageError::BadInput("the init image was not encoded".to_owned()));
            }
            return Ok(Start {
                sigmas,
                latent: noise,
            });
        };
        if image_latent.shape != shape {
            let problem = format!(
                "a latent of shape {:?} where {shape:?} is expected",
                image_latent.shape
            );
            return Err(StageError::BadInput(problem));
        }
        let first = first_step(steps, strength);
        if first >= steps {
            return Err(StageError::BadInput(format!(
                "a strength of {strength} leaves none of {steps} steps"
            )));
        }
        sigmas.drain(..first as usize);
        let image = from_host(image_latent, "the latent", DType::F32, &Device::Cpu)?;
        let sigma = f64::from(sigmas[0]);
        let latent = ((noise * sigma)? + (image * (1.0 - sigma))?)?;
        Ok(Start { sigmas, latent })
    }

    fn denoise(&mut self, input: &StageInput) -> Result<HostTensor, StageError> {
        let text = input.text.as_ref();
        let text = text.ok_or_else(|| StageError::BadInput("there is no encoded text".to_owned()))?;
        let config = &self.model.transformer;
        let pooled = self.encoding(text, POOLED, &[1, config.pooled_projection_dim])?;
        let tokens = self.request.max_sequence_length as usize;
        let sequence = self.encoding(text, SEQUENCE, &[1, tokens, config.joint_attention_dim])?;
        let Start { sigmas, latent } = self.start(input.latent.as_ref())?;

        let component = (self.tensors)("transformer")?;
        let transformer = Transformer::new(config, &component).map_err(|missing| StageError::Missing {
            component: "transformer".to_owned(),
            missing,
        })?;
        let rows = (self.request.height / PIXELS_PER_TOKEN) as usize;
        let columns = (self.request.width / PIXELS_PER_TOKEN) as usize;
        let guidance = self.request.guidance;
        let prompted = Prompted {
            sequence: &sequence,
            pooled: &pooled,
            guidance,
            rows,
            columns,
        };
        let steps = sigmas.len() - 1;
        // The reference makes timesteps of the sigmas and sigmas of those, rounding twice.
        let times: Vec<f32> = sigmas[..steps]
            .iter()
            .map(|sigma| sigma * 1000.0 / 1000.0)
            .collect();
        self.go_on()?;
        let conditioning = transformer.condition(&prompted, &times)?;

        // On the host the order of a latent costs nothing. Two tensors, since both are written.
        let dtype = self.model.precision.dtype;
        let latent = pack(&latent)?.contiguous()?;
        let seen = latent.to_dtype(dtype)?.copy()?.to_device(self.device)?;
        let latent = latent.to_device(self.device)?;
        let step_buffers = transformer.step_buffers(1, tokens, rows * columns, (dtype, self.device))?;
        let finite = Finite::new(self.device)?;
        for step in 0..steps {
            self.go_on()?;
            let velocity =
                transformer.velocity(&seen, &conditioning, step, &step_buffers, &mut || self.go_on())?;
            let (sigma, next) = (sigmas[step], sigmas[step + 1]);
            euler(&latent, velocity, f64::from(next - sigma), &seen, &finite)?;
            // To look is to wait for the card, which is meant: a step that is told of has been done, and one that is
            // cancelled is the last. It costs the card the microseconds in which the next step is asked for.
            if !finite.is_finite()? {
                let step = step as u32 + 1;
                return Err(StageError::NotFinite {
                    component: "transformer".to_owned(),
                    step,
                });
            }
            self.observer.step(step as u32 + 1, steps as u32);
            if self.request.preview && step + 1 < steps && self.observer.wants_preview() {
                let clean = without_noise(&latent, velocity, next)?;
                self.preview(&unpack(&clean, rows, columns)?)?;
            }
        }
        to_host(&unpack(&latent.to_device(&Device::Cpu)?, rows, columns)?)
    }

    /// One tensor of the encoded text, in the dtype of the card.
    fn encoding(&self, text: &EncodedText, name: &str, shape: &[usize]) -> Result<Tensor, StageError> {
        let tensor = text
            .tensors
            .iter()
            .find(|(found, _)| found == name)
            .map(|(_, tensor)| tensor);
        let tensor = tensor.filter(|tensor| tensor.shape == shape).ok_or_else(|| {
            let found: Vec<_> = text
                .tensors
                .iter()
                .map(|(name, tensor)| (name, &tensor.shape))
                .collect();
            StageError::BadInput(format!(
                "encoded text of {found:?} where {name} {shape:?} is expected"
            ))
        })?;
        from_host(tensor, name, self.model.precision.dtype, self.device)
    }

    /// Shows the picture that the denoising heads for, at half its size. `latent` is in host memory. A preview that fails
    /// costs no job.
    fn preview(&mut self, latent: &Tensor) -> Result<(), StageError> {
        let small = latent.avg_pool2d(2)?;
        match self.decoded_to_rgb8(&small.to_device(self.device)?, Chunking::Whole) {
            Ok(Rgb8 { width, height, rgb }) => {
                self.observer.preview(width as u32, height as u32, rgb);
                Ok(())
            }
            Err(StageError::Cancelled) => Err(StageError::Cancelled),
            Err(error) => {
                tracing::warn!(%error, "a preview could not be decoded");
                Ok(())
            }
        }
    }

    fn decode(&mut self, rung: usize, input: &StageInput) -> Result<StageOutput, StageError> {
        let latent = input.latent.as_ref();
        let latent = latent.ok_or_else(|| StageError::BadInput("there is no latent to decode".to_owned()))?;
        let longest = LONGEST_SIDE as usize / self.model.vae.factor();
        let (h, w) = match *latent.shape.as_slice() {
            [1, channels, h, w]
                if channels == self.model.vae.latent_channels
                    && (1..=longest).contains(&h)
                    && (1..=longest).contains(&w) =>
            {
                (h, w)
            }
            ref other => {
                let channels = self.model.vae.latent_channels;
                let problem = format!(
                    "a latent of shape {other:?} where [1, {channels}, h, w] up to {longest} is expected"
                );
                return Err(StageError::BadInput(problem));
            }
        };
        let chunking = chunking_of(&ladder(&self.model.vae, h, w, self.model.precision.dtype), rung)?;
        let latent = from_host(latent, "the latent", DType::F32, self.device)?;
        let Rgb8 { width, height, rgb } = self.decoded_to_rgb8(&latent, chunking)?;
        Ok(StageOutput::Picture {
            width: width as u32,
            height: height as u32,
            rgb: rgb.into(),
        })
    }

    fn decoded_to_rgb8(&self, latent: &Tensor, chunking: Chunking) -> Result<Rgb8, StageError> {
        let decoder = VaeDecoder::new(&self.model.vae, &*(self.tensors)("vae")?)?;
        decoder.decode_to_rgb8(latent, chunking, &|| self.observer.cancelled())
    }

    /// Decodes a latent, scaled as the transformer sees it, to f32 `[1, 3, height, width]` over -1 to 1, not
    /// clamped. The latent may be in host memory.
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

/// The latent that a step heads for, in host memory: what it made of it, less the velocity times the sigma that is left.
fn without_noise(latent: &Tensor, velocity: &Tensor, sigma: f32) -> candle_core::Result<Tensor> {
    let velocity = velocity.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    latent.to_device(&Device::Cpu)? - (velocity * f64::from(sigma))?
}

fn chunking_of(rungs: &[(Chunking, crate::Rung)], rung: usize) -> Result<Chunking, StageError> {
    let chosen = rungs.get(rung).map(|(chunking, _)| *chunking);
    chosen.ok_or_else(|| StageError::BadInput(format!("there is no rung {rung}; there are {}", rungs.len())))
}

/// An error of the tensor library that means that memory ran out says so in its words only.
fn named_if_out_of_memory(error: StageError, kind: StageKind) -> StageError {
    match error {
        StageError::Tensor(error) if is_out_of_memory(&error) => {
            StageError::OutOfMemory { stage: kind.name() }
        }
        other => other,
    }
}
