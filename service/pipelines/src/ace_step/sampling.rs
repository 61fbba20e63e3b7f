//! The sampling of a request: its context, its steps, and what mixes their velocities.

use candle_core::{DType, Device, Tensor};
use ops::{Finite, euler};

use super::guidance::Guidance;
use super::model::TRANSFORMER;
use super::plan::{CONDITION, HINT, LATENT, NO_CONDITION, PLAIN_CONDITION, SILENCE, SOURCE};
use super::stages::Stage;
use super::tasks::{first_step_of, frames_of_window, starts_from_source, window_of};
use super::transformer::{Conditioning, StepBuffers, Times, Transformer};
use crate::adapters::{AdaptedTensors, AttachedAdapters, UsedAs};
use crate::noise::Generator;
use crate::tensors::to_host;
use crate::{AudioTask, HostTensor, StageError};

/// The sigmas of `steps` steps, from 1 to the final 0, `steps + 1` values: `torch.linspace`, which computes in f32 from both
/// ends towards the middle, shifted.
pub fn sigmas(steps: u32, shift: f32) -> Vec<f32> {
    let stride = -1.0 / steps.max(1) as f32;
    let linear = (0..=steps).map(|i| match i < steps.div_ceil(2) {
        true => stride.mul_add(i as f32, 1.0),
        false => -stride * (steps - i) as f32,
    });
    linear
        .map(|time| shift * time / (1.0 + (shift - 1.0) * time))
        .collect()
}

/// What all steps share, at the current strengths of adapters.
struct Shared {
    times: Times,
    /// The condition, that of none if it is guided, and that of a new track if a cover is mixed with it.
    with: Conditioning,
    without: Option<Conditioning>,
    plain: Option<Conditioning>,
}

impl Stage<'_> {
    /// Source and mask of a request, f32 `[frames, 2 channels]` in host memory.
    fn context(&self, source: Option<&Tensor>) -> Result<Tensor, StageError> {
        let audio = self.audio()?;
        let silence = self.host_value(SILENCE)?;
        let (frames, _) = silence.dims2()?;
        let there = || source.ok_or_else(|| StageError::BadInput("there is no source".to_owned()));
        let (start, end) = match window_of(&audio.task) {
            Some(window) => frames_of_window(window, frames, self.model.frames_per_second()),
            None => (0, frames),
        };
        let changes: Vec<f32> = (0..frames)
            .map(|frame| f32::from(u8::from((start..end).contains(&frame))))
            .collect();
        let changes = Tensor::from_vec(changes, (frames, 1), &Device::Cpu)?;
        let changes = changes.broadcast_as(silence.shape())?.contiguous()?;
        let source = match &audio.task {
            AudioTask::TextToMusic => silence,
            AudioTask::Repaint { .. } => ((&changes * &silence)? + (changes.affine(-1.0, 1.0)? * there()?)?)?,
            AudioTask::Cover => self.host_value(HINT)?,
            AudioTask::Extract { .. } | AudioTask::Lego { .. } | AudioTask::Complete { .. } => {
                there()?.clone()
            }
        };
        Ok(Tensor::cat(&[source, changes], 1)?)
    }

    /// The transformer with adapters.
    fn transformer(&self, adapters: &AttachedAdapters) -> Result<Transformer, StageError> {
        let component = (self.run.tensors)(TRANSFORMER)?;
        let adapted = AdaptedTensors::new(&component, adapters);
        let transformer = Transformer::with_adapters(&self.model.transformer, &adapted);
        transformer.map_err(|missing| StageError::Missing {
            component: TRANSFORMER.to_owned(),
            missing,
        })
    }

    /// What steps of these times share.
    fn shared(&self, transformer: &Transformer, times: &[f32]) -> Result<Shared, StageError> {
        let condition =
            |name: &str| transformer.condition(&self.value(name)?, &mut || self.check_cancelled());
        let if_taken = |name: &str| match self.run.value_if_taken(name)? {
            Some(_) => condition(name).map(Some),
            None => Ok(None),
        };
        Ok(Shared {
            times: transformer.times(times, (self.model.precision.dtype, self.run.device))?,
            with: condition(CONDITION)?,
            without: if_taken(NO_CONDITION)?,
            plain: if_taken(PLAIN_CONDITION)?,
        })
    }

    pub(super) fn denoise(&mut self) -> Result<HostTensor, StageError> {
        let (model, request) = (self.model, self.run.request);
        let (dtype, device) = (model.precision.dtype, self.run.device);
        let audio = self.audio()?;
        let channels = model.vae.decoder_input_channels;
        let mut generator = Generator::new(request.seed);
        let mut source = match self.run.value_if_taken(SOURCE)? {
            Some(_) => Some(self.sample(SOURCE, &mut generator)?),
            None => None,
        };
        if self.run.value_if_taken(LATENT)?.is_some() {
            source = Some(self.host_value(LATENT)?.squeeze(0)?);
        }
        if audio.reference.is_some() {
            generator.skip_normal(model.frames_of_timbre() * channels);
        }
        let context = self.context(source.as_ref())?;
        let frames = context.dim(0)?;
        let noise = generator.normal(frames * channels);
        let mut latent = Tensor::from_vec(noise, (frames, channels), &Device::Cpu)?;
        let mut sigmas = sigmas(request.steps, model.shift);
        sigmas.drain(..(first_step_of(request, audio) as usize).min(sigmas.len().saturating_sub(2)));
        if let (true, Some(source)) = (starts_from_source(request, audio), &source) {
            let sigma = f64::from(sigmas[0]);
            latent = ((latent * sigma)? + (source * (1.0 - sigma))?)?;
        }
        let adapters =
            model
                .adapters
                .attach(&request.adapters, TRANSFORMER, UsedAs::Steps, self.run.tensors)?;
        let steps = sigmas.len() - 1;
        let transformer = self.transformer(&adapters)?;
        let mut shared = self.shared(&transformer, &sigmas[..steps])?;
        let buffers = transformer.step_buffers(&context.to_dtype(dtype)?.to_device(device)?)?;
        // Two tensors, since both are written.
        let seen = latent.to_dtype(dtype)?.copy()?.to_device(device)?;
        let latent = latent.to_device(device)?;
        let finite = Finite::new(device)?;
        let mut guidance = Guidance::new(request.guidance, channels);
        for step in 0..steps {
            self.check_cancelled()?;
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                shared = self.shared(&transformer, &sigmas[step..=step])?;
                row = 0;
            }
            let of_step = (&transformer, &shared, row);
            let velocity = self.velocity(of_step, &seen, &buffers, &mut guidance)?;
            let by = f64::from(sigmas[step + 1] - sigmas[step]);
            euler(&latent, &velocity, by, &seen, &finite)?;
            // Checking for finiteness synchronizes with the card, on purpose: a reported step has completed.
            if !finite.is_finite()? {
                return Err(adapters.named_as_cause(StageError::NotFinite {
                    component: TRANSFORMER.to_owned(),
                    step: step as u32 + 1,
                }));
            }
            self.observer.step(step as u32 + 1, steps as u32);
        }
        to_host(&latent.unsqueeze(0)?)
    }

    /// The velocity of a step: guided if there is a condition of none, mixed with that of a new track if there is one.
    fn velocity(
        &self,
        (transformer, shared, step): (&Transformer, &Shared, usize),
        seen: &Tensor,
        buffers: &StepBuffers,
        guidance: &mut Guidance,
    ) -> Result<Tensor, StageError> {
        let of = |conditioning: &Conditioning| {
            let mut go_on = || self.check_cancelled();
            transformer.velocity(seen, (&shared.times, step), conditioning, buffers, &mut go_on)
        };
        if shared.without.is_none() && shared.plain.is_none() {
            return of(&shared.with);
        }
        // Velocities are small beside what computes them: they are mixed in host memory.
        let numbers = |velocity: Tensor| -> Result<Vec<f32>, StageError> {
            let velocity = velocity.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            Ok(velocity.flatten_all()?.to_vec1()?)
        };
        let mut mixed = numbers(of(&shared.with)?)?;
        if let Some(without) = &shared.without {
            mixed = guidance.guided(&mixed, &numbers(of(without)?)?);
        }
        if let Some(plain) = &shared.plain {
            let strength = self.run.request.strength;
            for (mixed, plain) in mixed.iter_mut().zip(numbers(of(plain)?)?) {
                *mixed = strength * *mixed + (1.0 - strength) * plain;
            }
        }
        let mixed = Tensor::from_vec(mixed, seen.shape(), &Device::Cpu)?;
        Ok(mixed.to_dtype(seen.dtype())?.to_device(self.run.device)?)
    }
}
