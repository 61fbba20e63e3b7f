//! Rounds of several requests in shared passes: their tokens are one batch, each item in a step of its own, with its own source,
//! mask and condition.
//!
//! A pass of more items has products of other shapes, so that results are those of requests that run alone within rounding. A
//! request with one slot never shares a pass, and is reproducible to the bit.

use super::model::{AceStepModel, TRANSFORMER};
use super::plan::DENOISE;
use super::sampling::{Attends, Conditions, Sampling};
use super::stages::Stage;
use super::transformer::{Item, Transformer};
use crate::adapters::UsedAs;
use crate::rounds::check_shared;
use crate::{Observer, StageError, StageRun, Unobserved, Values};

/// A request in the passes.
struct Slot {
    /// Its number among the stages.
    number: usize,
    sampling: Sampling,
    conditions: Conditions,
    /// Why it has left; its place is computed on, and nothing comes of it.
    left: Option<StageError>,
}

impl Slot {
    /// The step of a pass, from 0; `None` if its round has fewer.
    fn step(&self, pass: usize) -> Option<usize> {
        let steps = &self.sampling.round.steps;
        let step = steps.start as usize + pass;
        (step < steps.end as usize).then_some(step)
    }

    fn has(&self, attends: Attends) -> bool {
        self.conditions.all().any(|(of, _)| of == attends)
    }
}

/// A pass of the transformer.
struct Pass {
    attends: Attends,
    /// Places of the slots that are in it.
    places: Vec<usize>,
    /// Where the times of their steps begin.
    first_time: usize,
}

/// The passes of each step, and the times of all of them, side by side for each pass.
fn passes_of(slots: &[Slot]) -> (Vec<Vec<Pass>>, Vec<f32>) {
    let rounds = slots.iter().map(|slot| slot.sampling.round.steps.len());
    let mut times = Vec::new();
    let steps = (0..rounds.max().unwrap_or(0)).map(|pass| {
        let mut passes = Vec::new();
        for attends in [Attends::With, Attends::Without, Attends::Plain] {
            let first_time = times.len();
            let mut places = Vec::new();
            for (place, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.has(attends)) {
                if let Some(step) = slot.step(pass) {
                    places.push(place);
                    times.push(slot.sampling.sigmas[step]);
                }
            }
            if !places.is_empty() {
                passes.push(Pass {
                    attends,
                    places,
                    first_time,
                });
            }
        }
        passes
    });
    (steps.collect(), times)
}

impl AceStepModel {
    /// Runs rounds of several requests ([`Model::run_shared`](crate::Model::run_shared)).
    ///
    /// # Errors
    /// What concerns all of them: stages that cannot share a pass; errors of the device.
    pub(super) fn denoise_shared(
        &self,
        stages: &[StageRun<'_>],
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Values, StageError>>, StageError> {
        check_shared(stages)?;
        let Some(first) = stages.first().filter(|first| first.plan.name == DENOISE) else {
            return Err(StageError::BadInput("only sampling shares passes".to_owned()));
        };
        let on = (self.precision.dtype, first.device);
        // Adapters and their strengths are equal, as the key says.
        let uses = &first.request.adapters;
        let adapters = self
            .adapters
            .attach(uses, TRANSFORMER, UsedAs::Steps, first.tensors)?;
        let transformer = self.inputs(first, &mut Unobserved).transformer(&adapters)?;
        let mut results: Vec<Result<Values, StageError>> = Vec::new();
        let mut slots = Vec::new();
        for (number, run) in stages.iter().enumerate() {
            let slot = self.slot((number, run), &transformer, observer);
            results.push(Err(StageError::Cancelled));
            match slot {
                Ok(slot) => slots.push(slot),
                Err(error @ StageError::Tensor(_)) => return Err(error),
                Err(error) => results[number] = Err(error),
            }
        }
        if slots.is_empty() {
            return Ok(results);
        }
        let (steps, times) = passes_of(&slots);
        let times = transformer.times(&times, on)?;
        let contexts: Vec<_> = slots.iter().map(|slot| &slot.sampling.context).collect();
        let buffers = transformer.shared_buffers(&contexts)?;
        for (number, passes) in steps.iter().enumerate() {
            for pass in passes {
                let all_left = || {
                    let stays = |slot: &Slot| slot.left.is_none() && !observer.is_cancelled(slot.number);
                    match slots.iter().any(stays) {
                        true => Ok(()),
                        false => Err(StageError::Cancelled),
                    }
                };
                let items: Vec<Item<'_>> = pass
                    .places
                    .iter()
                    .filter_map(|&place| {
                        let slot = slots.get(place)?;
                        let mut conditions = slot.conditions.all();
                        let (_, conditioning) = conditions.find(|(of, _)| *of == pass.attends)?;
                        Some(Item {
                            place,
                            latents: &slot.sampling.seen,
                            conditioning,
                        })
                    })
                    .collect();
                let of_pass = (&times, pass.first_time);
                let found = transformer.velocities(&items, of_pass, &buffers, &mut || all_left());
                let velocities = match found {
                    Ok(velocities) => velocities,
                    Err(StageError::Cancelled) => {
                        for slot in slots.iter_mut().filter(|slot| slot.left.is_none()) {
                            slot.left = Some(StageError::Cancelled);
                        }
                        return Ok(finished(slots, results));
                    }
                    Err(error) => return Err(error),
                };
                for (&place, velocity) in pass.places.iter().zip(velocities) {
                    let slot = &mut slots[place];
                    let is_only = slot.conditions.all().count() == 1;
                    slot.sampling.take(pass.attends, velocity, is_only)?;
                }
                // What is in the buffers is gone with the next pass.
                for &place in &pass.places {
                    let slot = &mut slots[place];
                    let is_last = slot
                        .conditions
                        .all()
                        .last()
                        .is_some_and(|(of, _)| of == pass.attends);
                    let (true, Some(step), None) = (is_last, slot.step(number), &slot.left) else {
                        continue;
                    };
                    if observer.is_cancelled(slot.number) {
                        slot.left = Some(StageError::Cancelled);
                        continue;
                    }
                    match slot.sampling.advance(step) {
                        Ok(()) => observer.step_of(slot.number, step as u32 + 1, slot.sampling.round.of),
                        Err(error @ StageError::NotFinite { .. }) => {
                            slot.left = Some(adapters.named_as_cause(error));
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(finished(slots, results))
    }

    fn inputs<'a>(&'a self, run: &StageRun<'a>, observer: &'a mut dyn Observer) -> Stage<'a> {
        Stage {
            model: self,
            run: *run,
            observer,
        }
    }

    fn slot(
        &self,
        (number, run): (usize, &StageRun<'_>),
        transformer: &Transformer,
        observer: &dyn Observer,
    ) -> Result<Slot, StageError> {
        let mut unobserved = Unobserved;
        let stage = self.inputs(run, &mut unobserved);
        let mut go_on = || match observer.is_cancelled(number) {
            true => Err(StageError::Cancelled),
            false => Ok(()),
        };
        Ok(Slot {
            number,
            sampling: Sampling::begin(&stage)?,
            conditions: stage.conditions(transformer, &mut go_on)?,
            left: None,
        })
    }
}

/// The results with those of the slots.
fn finished(
    slots: Vec<Slot>,
    mut results: Vec<Result<Values, StageError>>,
) -> Vec<Result<Values, StageError>> {
    for slot in slots {
        if let Some(result) = results.get_mut(slot.number) {
            *result = match slot.left {
                Some(error) => Err(error),
                None => slot.sampling.values(),
            };
        }
    }
    results
}
