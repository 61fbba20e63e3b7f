//! Rounds of several requests in shared passes. Their tokens are one batch; each item has its own step, source, mask,
//! condition and set of adapters.
//!
//! A pass of several items has products of other shapes, so results equal those of requests that run alone only within
//! rounding. A request with one slot never shares a pass, and is reproducible to the bit.

use candle_core::{DType, Device, Tensor};

use super::buffers::StepBuffers;
use super::config::TransformerConfig;
use super::model::{AceStepModel, TRANSFORMER};
use super::plan::DENOISE;
use super::sampling::{Attends, Conditions, Known, Sampling, values_of_conditions};
use super::transformer::{Item, Times, Transformer};
use crate::adapters::{AttachedAdapters, SetsOfItems, UsedAs};
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
        self.conditions.all().any(|(of, _)| of == attends)
    }
}

/// A pass of the transformer.
struct Pass {
    attends: Attends,
    /// Places of the slots in the pass.
    places: Vec<usize>,
    /// Index of the first of their times.
    first_time: usize,
}

/// The times of all passes, and the set of adapters that each is embedded with.
#[derive(Default)]
struct PassTimes {
    times: Vec<f32>,
    sets: Vec<usize>,
}

/// The passes of each step, and their times, contiguous for each pass.
fn passes_of(slots: &[Slot]) -> (Vec<Vec<Pass>>, PassTimes) {
    let rounds = slots.iter().map(|slot| slot.sampling.round.steps.len());
    let mut all = PassTimes::default();
    let steps = (0..rounds.max().unwrap_or(0)).map(|pass| {
        let mut passes = Vec::new();
        for attends in [Attends::With, Attends::Without, Attends::Plain] {
            let first_time = all.times.len();
            let mut places = Vec::new();
            for (place, slot) in slots.iter().enumerate().filter(|(_, slot)| slot.has(attends)) {
                if let Some(step) = slot.step(pass) {
                    places.push(place);
                    all.times.push(slot.sampling.latent.sigmas()[step]);
                    all.sets.push(slot.set);
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
    (steps.collect(), all)
}

/// The transformer and the state with which passes are computed.
struct Computed<'a> {
    transformer: &'a Transformer,
    times: &'a Times,
    buffers: &'a StepBuffers,
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
    fn run(&mut self, number: usize, pass: &Pass, computed: &Computed<'_>) -> Result<(), StageError> {
        let item = |&place: &usize| {
            let slot = self.slots.get(place)?;
            let mut conditions = slot.conditions.all();
            let (_, conditioning) = conditions.find(|(of, _)| *of == pass.attends)?;
            Some(Item {
                place,
                latents: slot.sampling.seen(),
                conditioning,
            })
        };
        let items: Vec<Item<'_>> = pass.places.iter().filter_map(item).collect();
        let velocities = computed.transformer.velocities(
            &items,
            (computed.times, pass.first_time),
            computed.buffers,
            &mut || self.check_left(),
        )?;
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
    fn run_all(&mut self, transformer: &Transformer, on: (DType, &Device)) -> Result<(), StageError> {
        let (steps, PassTimes { times, sets }) = passes_of(&self.slots);
        let times = transformer.times_of_sets(&times, &SetsOfItems::of(sets), on)?;
        let contexts: Vec<&Tensor> = self.slots.iter().map(|slot| &slot.sampling.context).collect();
        let buffers = transformer.shared_buffers(&contexts)?;
        let computed = Computed {
            transformer,
            times: &times,
            buffers: &buffers,
        };
        for (number, passes) in steps.iter().enumerate() {
            for pass in passes {
                match self.run(number, pass, &computed) {
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

/// What passes of one key have in common: the handles of weights, the factors of adapters side by side, and the keys and values of
/// conditions. The next round of the same requests begins with it.
struct KeptPass {
    /// [`SharedPass::key`](crate::SharedPass::key).
    key: String,
    /// The names of the sets of adapters, in the order of their numbers.
    named: Vec<String>,
    sets: Vec<AttachedAdapters>,
    transformer: Transformer,
    known: Known,
}

fn key_of(run: &StageRun<'_>) -> String {
    run.plan
        .shared
        .as_ref()
        .map_or(String::new(), |shared| shared.key.clone())
}

impl KeptPass {
    /// Whether it is of this configuration, of the key of this stage, and of exactly the sets of these names, each named once or more.
    fn serves(&self, config: &TransformerConfig, first: &StageRun<'_>, names: &[String]) -> bool {
        self.transformer.config() == config
            && self.key == key_of(first)
            && names.iter().all(|name| self.named.contains(name))
            && self.named.iter().all(|name| names.contains(name))
    }

    /// Number of the set of this name; the first if there is none.
    fn number_of(&self, name: &str) -> usize {
        self.named.iter().position(|other| other == name).unwrap_or(0)
    }
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
        let Some(first) = stages.first().filter(|first| first.plan.name == DENOISE) else {
            return Err(StageError::BadInput("only sampling shares passes".to_owned()));
        };
        let names: Vec<String> = stages.iter().map(|run| set_of_adapters(run.request)).collect();
        let serves = |kept: &KeptPass| kept.serves(&self.transformer, first, &names);
        let mut pass = match kept.take().filter(serves) {
            Some(kept) => kept,
            None => self.new_pass(stages, &names)?,
        };
        let set_of_stage: Vec<usize> = names.iter().map(|name| pass.number_of(name)).collect();
        let mut values = Vec::new();
        for (run, set) in stages.iter().zip(&set_of_stage) {
            values.extend(values_of_conditions(run).map(|value| (value, *set)));
        }
        pass.known.keep_only(&values);
        let mut results: Vec<Result<Values, StageError>> = Vec::new();
        let mut slots: Vec<Slot> = Vec::new();
        let (transformer, sets) = (&pass.transformer, &pass.sets);
        for (number, (run, set)) in stages.iter().zip(set_of_stage).enumerate() {
            match self.slot((number, run), (transformer, set), &mut pass.known, observer) {
                Ok(slot) => {
                    // Next to each other, those with one set of adapters share the products of its terms, and those of them with
                    // one condition attend to it together.
                    let begins_as = |other: &Slot| other.conditions.begins_as(&slot.conditions);
                    let of_condition = slots.iter().rposition(begins_as);
                    let of_set = || slots.iter().rposition(|other| other.set == slot.set);
                    let place = of_condition.or_else(of_set).map_or(slots.len(), |last| last + 1);
                    slots.insert(place, slot);
                    results.push(Ok(Values::new()));
                }
                Err(error @ StageError::Tensor(_)) => return Err(error),
                Err(error) => results.push(Err(error)),
            }
        }
        if slots.is_empty() {
            return Ok(results);
        }
        let mut together = Together {
            slots,
            sets,
            observer,
        };
        together.run_all(transformer, (self.parts.dtype(), first.device))?;
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
        if any_goes_on {
            kept.put(pass);
        }
        Ok(results)
    }

    /// The transformer with the sets of adapters of stages, whose sets have these names.
    fn new_pass(&self, stages: &[StageRun<'_>], names: &[String]) -> Result<KeptPass, StageError> {
        let (mut named, mut sets): (Vec<String>, Vec<AttachedAdapters>) = (Vec::new(), Vec::new());
        for (run, name) in stages.iter().zip(names) {
            if !named.contains(name) {
                let uses = &run.request.adapters;
                let attached = self
                    .adapters
                    .attach(uses, TRANSFORMER, UsedAs::Steps, run.tensors);
                sets.push(attached?);
                named.push(name.clone());
            }
        }
        let first = stages.first();
        let first = first.ok_or_else(|| StageError::BadInput("a pass over no request".to_owned()))?;
        let mut unobserved = Unobserved;
        let transformer = Stage::new(self, first, &mut unobserved).transformer(&sets)?;
        Ok(KeptPass {
            key: key_of(first),
            named,
            sets,
            transformer,
            known: Known::default(),
        })
    }

    fn slot(
        &self,
        (number, run): (usize, &StageRun<'_>),
        (transformer, set): (&Transformer, usize),
        known: &mut Known,
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
        Ok(Slot {
            number,
            set,
            sampling: Sampling::begin(&stage)?,
            conditions: stage.conditions((transformer, set), known, &mut go_on)?,
            made: 0,
            left: None,
        })
    }
}
