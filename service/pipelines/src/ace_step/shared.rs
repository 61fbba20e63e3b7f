//! Rounds of several requests in shared passes. Their tokens are one batch; each item has its own step, source, mask,
//! condition and set of adapters.
//!
//! A pass of several items has products of other shapes, so results equal those of requests that run alone only within
//! rounding. A request with one slot never shares a pass, and is reproducible to the bit.

use std::rc::Rc;

use candle_core::Tensor;
use gpu::Timeline;

use super::kept::{KeptPass, MadeFrom, PassBuffers};
use super::model::{AceStepModel, TRANSFORMER};
use super::plan::DENOISE;
use super::sampling::{Attends, Conditions, Sampling, silence_of, values_of_conditions};
use super::transformer::{Times, Transformer};
use crate::adapters::AttachedAdapters;
use crate::rounds::{check_shared, set_of_adapters};
use crate::stage::Stage;
use crate::{Kept, Observer, StageError, StageRun, Unobserved, Values};

/// A request in the passes.
struct Slot {
    /// The stage's place among the stages.
    number: usize,
    /// Number of its set of adapters.
    set: usize,
    sampling: Sampling,
    conditions: Conditions,
    /// The sigmas of its steps, and their modulations.
    sigmas: Vec<f32>,
    times: Rc<Times>,
    /// Number of steps that are done.
    made: usize,
    /// Why the request has left the passes. Its place in the batch is still computed, and the result is unused.
    left: Option<StageError>,
}

impl Slot {
    /// The step of a pass, from 0; `None` if its round has fewer.
    fn step(&self, pass: usize) -> Option<usize> {
        let steps = &self.sampling.round.steps;
        let step = steps.start as usize + pass;
        (step < steps.end as usize).then_some(step)
    }

    /// Whether the request has steps left.
    fn goes_on(&self) -> bool {
        self.left.is_none() && self.made < self.sampling.round.steps.len()
    }

    fn has(&self, attends: Attends) -> bool {
        self.conditions.of(attends).is_some()
    }
}

/// A pass of the transformer.
struct Pass {
    attends: Attends,
    /// Places of the slots in the pass.
    places: Vec<usize>,
}

/// The passes of each step.
fn passes_of(slots: &[Slot]) -> Vec<Vec<Pass>> {
    let rounds = slots.iter().map(|slot| slot.sampling.round.steps.len());
    let steps = (0..rounds.max().unwrap_or(0)).map(|number| {
        let passes = Attends::ALL.map(|attends| {
            let slots = slots.iter().enumerate();
            let in_pass = slots.filter(|(_, slot)| slot.has(attends) && slot.step(number).is_some());
            let places = in_pass.map(|(place, _)| place).collect();
            Pass { attends, places }
        });
        let some = passes.into_iter().filter(|pass| !pass.places.is_empty());
        some.collect()
    });
    steps.collect()
}

/// Requests in shared passes, and the observer of their steps.
struct Together<'a> {
    slots: Vec<Slot>,
    /// The sets of adapters.
    sets: &'a [AttachedAdapters],
    observer: &'a mut dyn Observer,
}

impl Together<'_> {
    /// Ends the passes when no request is left in them.
    fn check_left(&self) -> Result<(), StageError> {
        let stays = |slot: &Slot| slot.goes_on() && !self.observer.is_cancelled(slot.number);
        match self.slots.iter().any(stays) {
            true => Ok(()),
            false => Err(StageError::Cancelled),
        }
    }

    /// Runs pass `pass` of step `number` of the rounds, and advances the requests whose step it completes.
    fn run(
        &mut self,
        number: usize,
        pass: &Pass,
        transformer: &Transformer,
        buffers: &mut PassBuffers,
    ) -> Result<(), StageError> {
        let mut requests = Vec::with_capacity(pass.places.len());
        for &place in &pass.places {
            let slot = self.slots.get(place);
            let of_pass = |slot: &Slot| {
                let conditioning = slot.conditions.of(pass.attends)?;
                Some((slot.step(number)?, Rc::clone(conditioning)))
            };
            if let Some(slot) = slot
                && let Some((step, conditioning)) = of_pass(slot)
            {
                buffers.put_modulations(requests.len(), &slot.times.step(step)?)?;
                buffers.steps.put_latents(place, slot.sampling.seen())?;
                requests.push((place, conditioning));
            }
        }
        let count = requests.len();
        buffers.compute(transformer, (pass.attends, requests), &mut || self.check_left())?;
        let velocities = (0..count).map(|item| buffers.steps.velocity(item));
        let velocities: Vec<Tensor> = velocities.collect::<candle_core::Result<_>>()?;
        // A velocity that is not mixed is overwritten by the next pass.
        for (&place, velocity) in pass.places.iter().zip(velocities) {
            let Some(slot) = self.slots.get_mut(place) else {
                continue;
            };
            let of_step: Vec<Attends> = slot.conditions.all().map(|(attends, _)| attends).collect();
            let is_last = of_step.last() == Some(&pass.attends);
            slot.sampling.take(pass.attends, velocity, of_step.len() == 1)?;
            let (Some(step), true, None) = (slot.step(number), is_last, &slot.left) else {
                continue;
            };
            if self.observer.is_cancelled(slot.number) {
                slot.left = Some(StageError::Cancelled);
                continue;
            }
            match slot.sampling.advance(step) {
                Ok(()) => {
                    slot.made += 1;
                    let of = slot.sampling.round.of;
                    self.observer.step_of(slot.number, step as u32 + 1, of);
                }
                Err(error @ StageError::NotFinite { .. }) => {
                    slot.left = Some(match self.sets.get(slot.set) {
                        Some(adapters) => adapters.named_as_cause(error),
                        None => error,
                    });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Runs all passes of the rounds.
    fn run_all(&mut self, transformer: &Transformer, buffers: &mut PassBuffers) -> Result<(), StageError> {
        for (place, slot) in self.slots.iter().enumerate() {
            buffers.steps.put_context(place, &slot.sampling.context)?;
        }
        let steps = passes_of(&self.slots);
        for (number, passes) in steps.iter().enumerate() {
            for pass in passes {
                match self.run(number, pass, transformer, buffers) {
                    Err(StageError::Cancelled) => {
                        for slot in self.slots.iter_mut().filter(|slot| slot.goes_on()) {
                            slot.left = Some(StageError::Cancelled);
                        }
                        return Ok(());
                    }
                    other => other?,
                }
            }
        }
        Ok(())
    }
}

fn key_of(run: &StageRun<'_>) -> String {
    run.plan
        .shared
        .as_ref()
        .map_or(String::new(), |shared| shared.key.clone())
}

impl AceStepModel {
    /// Runs rounds of several requests ([`Model::run_shared`](crate::Model::run_shared)).
    ///
    /// # Errors
    /// Errors that concern all requests: stages that cannot share a pass; errors of the device.
    pub(super) fn denoise_shared(
        &self,
        stages: &[StageRun<'_>],
        kept: &mut Kept,
        observer: &mut dyn Observer,
    ) -> Result<Vec<Result<Values, StageError>>, StageError> {
        check_shared(stages)?;
        let mut timeline = Timeline::begin("shared pass");
        let Some(first) = stages.first().filter(|first| first.plan.name == DENOISE) else {
            return Err(StageError::BadInput("only sampling shares passes".to_owned()));
        };
        let names: Vec<String> = stages.iter().map(|run| set_of_adapters(run.request)).collect();
        let key = key_of(first);
        let serves = |kept: &KeptPass| kept.serves(&self.transformer, (&key, first.copied()), &names);
        let mut pass = match kept.take().filter(serves) {
            Some(kept) => kept,
            None => self.new_pass(stages, &names)?,
        };
        let set_of_stage: Vec<usize> = names.iter().map(|name| pass.number_of(name)).collect();
        let mut values = Vec::new();
        for (run, set) in stages.iter().zip(&set_of_stage) {
            values.extend(values_of_conditions(run).map(|value| (value, *set)));
        }
        pass.conditionings.keep_only(&values);
        if let Some(buffers) = &mut pass.buffers {
            buffers.keep_only(&pass.conditionings);
        }
        let silences = stages.iter().filter_map(silence_of).map(|value| (value, 0));
        pass.contexts.keep_only(&silences.collect::<Vec<_>>());
        let mut results: Vec<Result<Values, StageError>> = Vec::new();
        let mut slots: Vec<Slot> = Vec::new();
        for (number, (run, set)) in stages.iter().zip(set_of_stage).enumerate() {
            match self.slot((number, run), set, &mut pass, observer) {
                Ok(slot) => {
                    // Next to each other, those with one set of adapters share the products of its terms, and those of them with
                    // one condition attend to it together. The sets are in the order of their numbers, in which their factors lie.
                    let begins_as = |other: &Slot| other.conditions.begins_as(&slot.conditions);
                    let of_condition = slots.iter().rposition(begins_as);
                    let of_set = slots.partition_point(|other| other.set <= slot.set);
                    let place = of_condition.map_or(of_set, |last| last + 1);
                    slots.insert(place, slot);
                    results.push(Ok(Values::new()));
                }
                Err(error @ StageError::Tensor(_)) => return Err(error),
                Err(error) => results.push(Err(error)),
            }
        }
        let Some(one) = slots.first() else {
            return Ok(results);
        };
        let frames = one.sampling.context.dim(0)?;
        timeline.part("begin the requests");
        let on = (self.parts.dtype(), first.device);
        let schedules: Vec<_> = slots.iter().map(|slot| (&slot.sigmas, slot.set)).collect();
        pass.times.keep_only(&schedules);
        let mut buffers = match pass.buffers.take().filter(|buffers| buffers.are_for(slots.len())) {
            Some(buffers) => buffers,
            None => PassBuffers::new(&pass.transformer, (slots.len(), frames), on)?,
        };
        let round = Attends::ALL.map(|attends| {
            let of_slots = slots.iter().filter_map(|slot| slot.conditions.of(attends));
            (attends, of_slots.map(Rc::clone).collect())
        });
        buffers.begin_round(&round)?;
        let mut together = Together {
            slots,
            sets: &pass.sets,
            observer,
        };
        together.run_all(&pass.transformer, &mut buffers)?;
        timeline.part("passes");
        let goes_on = |slot: &Slot| slot.left.is_none() && !slot.sampling.round.is_last();
        let any_goes_on = together.slots.iter().any(goes_on);
        for slot in together.slots {
            if let Some(result) = results.get_mut(slot.number) {
                *result = match slot.left {
                    Some(error) => Err(error),
                    None => slot.sampling.values(),
                };
            }
        }
        timeline.part("copy the latents");
        if any_goes_on {
            pass.buffers = Some(buffers);
            kept.put(pass);
        }
        Ok(results)
    }

    /// The transformer with the sets of adapters of stages, whose sets have these names.
    fn new_pass(&self, stages: &[StageRun<'_>], names: &[String]) -> Result<KeptPass, StageError> {
        let (mut named, mut of_each): (Vec<String>, Vec<&StageRun<'_>>) = (Vec::new(), Vec::new());
        for (run, name) in stages.iter().zip(names) {
            if !named.contains(name) {
                of_each.push(run);
                named.push(name.clone());
            }
        }
        let first = stages.first();
        let first = first.ok_or_else(|| StageError::BadInput("a pass over no request".to_owned()))?;
        let dtype = self.parts.dtype();
        let sets = self.adapters.attach_sets(TRANSFORMER, &of_each, dtype)?;
        let mut unobserved = Unobserved;
        let transformer = Stage::new(self, first, &mut unobserved).transformer(&sets)?;
        Ok(KeptPass {
            key: key_of(first),
            copied: first.copied().to_vec(),
            named,
            sets,
            transformer,
            conditionings: MadeFrom::default(),
            contexts: MadeFrom::default(),
            times: MadeFrom::default(),
            buffers: None,
        })
    }

    fn slot(
        &self,
        (number, run): (usize, &StageRun<'_>),
        set: usize,
        pass: &mut KeptPass,
        observer: &dyn Observer,
    ) -> Result<Slot, StageError> {
        // Without this its terms would be left out.
        if let Some(problem) = self.adapters.problems(&run.request.adapters).into_iter().next() {
            return Err(StageError::BadInput(problem.problem));
        }
        let mut unobserved = Unobserved;
        let stage = Stage::new(self, run, &mut unobserved);
        let mut go_on = || match observer.is_cancelled(number) {
            true => Err(StageError::Cancelled),
            false => Ok(()),
        };
        let sampling = Sampling::begin(&stage, &mut pass.contexts)?;
        let sigmas = sampling.latent.sigmas()[..sampling.steps()].to_vec();
        let of_set = (&pass.transformer, set);
        let conditions = stage.conditions(of_set, &mut pass.conditionings, &mut go_on)?;
        let make = || pass.transformer.times_of_set(&sigmas, set, stage.on());
        let times = pass.times.of((&sigmas, set), make)?;
        Ok(Slot {
            number,
            set,
            sampling,
            conditions,
            sigmas,
            times,
            made: 0,
            left: None,
        })
    }
}
