//! The sampling of a request: its context, its state between steps and between rounds, and the mix of velocities.

use std::rc::Rc;

use candle_core::{DType, Device, Tensor};

use super::guidance::Guidance;
use super::kept::MadeFrom;
use super::model::{AceStepModel, TRANSFORMER};
use super::plan::{
    CONDITION, GUIDANCE, HINT, LATENT, NO_CONDITION, PLAIN_CONDITION, SAMPLING, SILENCE, SOURCE,
};
use super::strengths::{Held, mixed};
use super::tasks::{first_step_of, frames_of_window, starts_from_source, window_of};
use super::transformer::{Conditioning, Transformer};
use crate::adapters::{AdaptedTensors, AttachedAdapters};
use crate::noise::Generator;
use crate::rounds::Round;
use crate::sampling::{Prediction, SampledLatent};
use crate::stage::Stage;
use crate::tensors::to_host;
use crate::{AudioTask, HostTensor, StageError, StageRun, Values};

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

/// The condition that a pass attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attends {
    /// The condition of the request.
    With,
    /// No condition: the unconditional pass of guidance.
    Without,
    /// The condition of a new track, with which a cover of less strength is mixed.
    Plain,
}

impl Attends {
    /// In the order of the passes of a step.
    pub(super) const ALL: [Attends; 3] = [Attends::With, Attends::Without, Attends::Plain];
}

/// The values of conditions, in the order of the passes that attend to them.
const CONDITIONS: [(Attends, &str); 3] = [
    (Attends::With, CONDITION),
    (Attends::Without, NO_CONDITION),
    (Attends::Plain, PLAIN_CONDITION),
];

/// The values that the conditions of a stage are made from. One that is missing fails its stage alone, where its condition is made.
pub(super) fn values_of_conditions<'a>(run: &'a StageRun<'_>) -> impl Iterator<Item = &'a HostTensor> {
    let taken = CONDITIONS.iter();
    taken.filter_map(|(_, name)| run.value_if_taken(name).ok().flatten())
}

/// The silence of a stage, as of [`values_of_conditions`].
pub(super) fn silence_of<'a>(run: &'a StageRun<'_>) -> Option<&'a HostTensor> {
    run.value_if_taken(SILENCE).ok().flatten()
}

/// The conditions of a request's steps, in the order of their passes.
pub(super) struct Conditions(Vec<(Attends, Rc<Conditioning>)>);

impl Conditions {
    pub(super) fn all(&self) -> impl Iterator<Item = (Attends, &Rc<Conditioning>)> {
        self.0
            .iter()
            .map(|(attends, conditioning)| (*attends, conditioning))
    }

    /// The condition of a pass, if there is such a pass.
    pub(super) fn of(&self, attends: Attends) -> Option<&Rc<Conditioning>> {
        let mut all = self.0.iter();
        all.find(|(of, _)| *of == attends)
            .map(|(_, conditioning)| conditioning)
    }

    /// Whether the first pass of both attends to one conditioning.
    pub(super) fn begins_as(&self, other: &Conditions) -> bool {
        match (self.0.first(), other.0.first()) {
            (Some((_, own)), Some((_, others))) => Rc::ptr_eq(own, others),
            _ => false,
        }
    }
}

/// A request's sampling, at a step of a round.
pub(super) struct Sampling {
    pub(super) round: Round,
    /// Source and mask, `[frames, 2 channels]`.
    pub(super) context: Rc<Tensor>,
    /// `[frames, channels]`.
    pub(super) latent: SampledLatent,
    /// The guidance of a guided request.
    guidance: Option<Guidance>,
    /// Share of the cover's velocity in the mix with [`Attends::Plain`], from 0 to 1.
    strength: f32,
    /// Frames that begin later.
    held: Option<Held>,
    /// The first step that is run, of all in the schedule.
    first_step: u32,
    velocity: Velocity,
}

/// The velocity of a step.
enum Velocity {
    /// The velocity of the only pass of a step, in the step buffers.
    Whole(Tensor),
    /// Mixed from several passes, in host memory: the transfer is cheap, since velocities are small.
    Mixed(Vec<f32>),
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>, StageError> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    Ok(tensor.flatten_all()?.to_vec1()?)
}

impl Sampling {
    /// The state at the beginning of a stage: noise and the source, or the state after the round before.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for values that do not fit; errors of the device.
    pub(super) fn begin(
        stage: &Stage<'_, AceStepModel>,
        contexts: &mut MadeFrom<HostTensor, Tensor>,
    ) -> Result<Sampling, StageError> {
        let (model, request) = (stage.model, stage.run.request);
        let (dtype, device) = stage.on();
        let audio = stage.audio()?;
        let channels = model.vae.decoder_input_channels;
        let mut generator = Generator::new(request.seed);
        let mut source = match stage.run.value_if_taken(SOURCE)? {
            Some(_) => Some(stage.sample(SOURCE, &mut generator)?),
            None => None,
        };
        if stage.run.value_if_taken(LATENT)?.is_some() {
            source = Some(stage.host_value(LATENT)?.squeeze(0)?);
        }
        let context = stage.context(source.as_ref(), contexts)?;
        let frames = context.dim(0)?;
        let mut sigmas = sigmas(request.steps, model.shift);
        let first_step = first_step_of(request, audio).min(request.steps.saturating_sub(1));
        sigmas.drain(..first_step as usize);
        let round = Round::of_plan(stage.run.plan, SAMPLING, request.steps - first_step)?;
        let state = round.begins_with(SAMPLING);
        let mut noise = || -> Result<Tensor, StageError> {
            if audio.reference.is_some() {
                generator.skip_normal(model.frames_of_timbre() * channels);
            }
            let noise = generator.normal(frames * channels);
            Ok(Tensor::from_vec(noise, (frames, channels), &Device::Cpu)?)
        };
        let source = source.filter(|_| starts_from_source(request, audio));
        let (latent, held) = match (&state, source) {
            (None, None) => (noise()?, None),
            (Some(state), None) => (stage.host_value(state)?.squeeze(0)?, None),
            (state, Some(source)) => {
                let noise = noise()?;
                let latent = match state {
                    None => mixed(&source, &noise, sigmas[0])?,
                    Some(state) => stage.host_value(state)?.squeeze(0)?,
                };
                let schedule = (model.frames_per_second(), request.steps);
                let held = (!audio.strengths.is_empty())
                    .then(|| Held::new((source, noise), &audio.strengths, schedule));
                (latent, held.transpose()?)
            }
        };
        if latent.dims() != [frames, channels] {
            let found = latent.dims();
            return Err(StageError::BadInput(format!(
                "a latent {found:?} of {frames} frames"
            )));
        }
        let guidance = model
            .is_guided(request)
            .then(|| Guidance::new(request.guidance, channels));
        let guidance = match (guidance, round.begins_with(GUIDANCE)) {
            (Some(guidance), Some(name)) => Some(guidance.resumed(numbers(&stage.host_value(&name)?)?)),
            (guidance, _) => guidance,
        };
        Ok(Sampling {
            round,
            context,
            latent: SampledLatent::new(&latent, sigmas, None, (dtype, device))?,
            guidance,
            strength: request.strength,
            held,
            first_step,
            velocity: Velocity::Mixed(Vec::new()),
        })
    }

    /// Steps that are run, of all rounds.
    pub(super) fn steps(&self) -> usize {
        self.latent.steps()
    }

    /// The latent in the dtype of the transformer, which reads it.
    pub(super) fn seen(&self) -> &Tensor {
        self.latent.seen()
    }

    /// Takes the velocity of a pass. The tensor is valid until the next pass; if the pass is the only one of the step, it is
    /// not copied.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn take(
        &mut self,
        attends: Attends,
        velocity: Tensor,
        is_only: bool,
    ) -> Result<(), StageError> {
        match (attends, &mut self.velocity) {
            (Attends::With, whole) if is_only => *whole = Velocity::Whole(velocity),
            (Attends::With, mixed) => *mixed = Velocity::Mixed(numbers(&velocity)?),
            (Attends::Without, Velocity::Mixed(mixed)) => {
                if let Some(guidance) = &mut self.guidance {
                    *mixed = guidance.guided(mixed, &numbers(&velocity)?);
                }
            }
            (Attends::Plain, Velocity::Mixed(mixed)) => {
                let strength = self.strength;
                for (mixed, plain) in mixed.iter_mut().zip(numbers(&velocity)?) {
                    *mixed = strength * *mixed + (1.0 - strength) * plain;
                }
            }
            (Attends::Without | Attends::Plain, Velocity::Whole(_)) => {}
        }
        Ok(())
    }

    /// Makes step `step`, from 0, by the velocity that was taken.
    ///
    /// # Errors
    /// [`StageError::NotFinite`]; errors of the device.
    pub(super) fn advance(&mut self, step: usize) -> Result<(), StageError> {
        let taken = std::mem::replace(&mut self.velocity, Velocity::Mixed(Vec::new()));
        let velocity = match taken {
            Velocity::Whole(velocity) => velocity,
            Velocity::Mixed(mixed) => {
                let seen = self.seen();
                let mixed = Tensor::from_vec(mixed, seen.shape(), &Device::Cpu)?;
                mixed.to_dtype(seen.dtype())?.to_device(seen.device())?
            }
        };
        self.latent
            .advance(step, &Prediction::of(&velocity), TRANSFORMER)?;
        let next = self.first_step + step as u32 + 1;
        if let Some(held) = self.held.as_ref().filter(|held| held.holds_before(next)) {
            let latent = held.before(next, self.latent.sigmas()[step + 1], &self.latent.on_host()?)?;
            self.latent.replace(&latent)?;
        }
        Ok(())
    }

    /// The values of the stage: the latent, or the state at which the next round begins.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn values(&self) -> Result<Values, StageError> {
        let latent = self.round.leaves(SAMPLING).unwrap_or_else(|| LATENT.to_owned());
        let mut values = Values::from([(latent, to_host(&self.latent.on_host()?.unsqueeze(0)?)?)]);
        if let (Some(guidance), Some(name)) = (&self.guidance, self.round.leaves(GUIDANCE)) {
            let (frames, channels) = self.seen().dims2()?;
            let running = guidance.running().to_vec();
            let running = Tensor::from_vec(running, (1, frames, channels), &Device::Cpu)?;
            values.insert(name, to_host(&running)?);
        }
        Ok(values)
    }
}

impl Stage<'_, AceStepModel> {
    /// Source and mask of a request, `[frames, 2 channels]` on the device. New tracks of one length have one, `contexts` has it after
    /// the first.
    fn context(
        &self,
        source: Option<&Tensor>,
        contexts: &mut MadeFrom<HostTensor, Tensor>,
    ) -> Result<Rc<Tensor>, StageError> {
        let (dtype, device) = self.on();
        let make = || {
            let context = self.host_context(source)?;
            Ok(context.to_dtype(dtype)?.to_device(device)?)
        };
        match self.audio()?.task {
            AudioTask::TextToMusic => contexts.of((self.run.value(SILENCE)?, 0), make),
            _ => Ok(Rc::new(make()?)),
        }
    }

    /// Source and mask of a request, f32 `[frames, 2 channels]` in host memory.
    fn host_context(&self, source: Option<&Tensor>) -> Result<Tensor, StageError> {
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

    /// The transformer with sets of adapters, at least one.
    pub(super) fn transformer(&self, sets: &[AttachedAdapters]) -> Result<Transformer, StageError> {
        let component = (self.run.tensors)(TRANSFORMER)?;
        let adapted = AdaptedTensors::of_sets(&component, sets);
        let transformer = Transformer::with_adapters(&self.model.transformer, &adapted);
        transformer.map_err(StageError::missing_in(TRANSFORMER))
    }

    /// The conditions of the request's steps with a set of adapters, some of which may be known. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`.
    pub(super) fn conditions(
        &self,
        (transformer, set): (&Transformer, usize),
        known: &mut MadeFrom<HostTensor, Conditioning>,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Conditions, StageError> {
        let mut conditions = Vec::new();
        for (attends, name) in CONDITIONS {
            if attends == Attends::With || self.run.value_if_taken(name)?.is_some() {
                let conditioning = known.of((self.run.value(name)?, set), || {
                    transformer.condition_of_set(&self.value(name)?, set, go_on)
                })?;
                conditions.push((attends, conditioning));
            }
        }
        Ok(Conditions(conditions))
    }

    /// The conditions of a request that is alone in its passes.
    fn conditions_alone(&self, transformer: &Transformer) -> Result<Conditions, StageError> {
        let mut go_on = || self.observer.check_cancelled();
        self.conditions((transformer, 0), &mut MadeFrom::default(), &mut go_on)
    }

    /// Runs a round that is alone in its passes. For most requests this is a round of all steps.
    pub(super) fn denoise(&mut self) -> Result<Values, StageError> {
        let (model, on) = (self.model, self.on());
        let mut sampling = Sampling::begin(self, &mut MadeFrom::default())?;
        let adapters = model.adapters.attach_to_sampler(TRANSFORMER, &self.run, on.0)?;
        let transformer = self.transformer(std::slice::from_ref(&adapters))?;
        let mut attended = self.conditions_alone(&transformer)?;
        // The modulations of all steps, in every round: products of fewer rows may round differently.
        let steps = sampling.steps();
        let mut times = transformer.times(&sampling.latent.sigmas()[..steps], on)?;
        let buffers = transformer.step_buffers(&sampling.context)?;
        let (round, of) = (sampling.round.steps.clone(), sampling.round.of);
        for step in round.start as usize..round.end as usize {
            self.observer.check_cancelled()?;
            let mut row = step;
            if !adapters.are_constant() {
                adapters.set_step(step, steps);
                times = transformer.times(&sampling.latent.sigmas()[step..=step], on)?;
                attended = self.conditions_alone(&transformer)?;
                row = 0;
            }
            let is_only = attended.all().count() == 1;
            for (attends, conditioning) in attended.all() {
                let mut go_on = || self.observer.check_cancelled();
                let of_step = (&times, row);
                let velocity =
                    transformer.velocity(sampling.seen(), of_step, conditioning, &buffers, &mut go_on)?;
                sampling.take(attends, velocity, is_only)?;
            }
            let advanced = sampling.advance(step);
            advanced.map_err(|error| adapters.named_as_cause(error))?;
            self.observer.step(step as u32 + 1, of);
        }
        sampling.values()
    }
}
