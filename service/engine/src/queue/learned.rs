//! Measurements of earlier jobs: activation peaks, seconds of stages and of loads, and requests that end workers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpu::CardDescription;
use model::StagePlan;
use residency::{Bytes, Component, ComponentId, RunOutcome, ScratchBook, ScratchKey};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::job::{JobId, StageName};
use crate::messages::Completed;
use crate::need::Need;

/// Jobs of one model and shape that may end with the loss of their workers before others like them are refused.
const LOSSES_BEFORE_REFUSAL: usize = 2;
/// Time for which they are refused.
const REFUSAL_DURATION: Duration = Duration::from_secs(600);
/// Most entries of each table. A full table is cleared.
const REMEMBERED: usize = 4096;

/// A stage of a model at a shape: (entry key, stage, shape).
pub(super) type StageKey = (String, StageName, String);

/// Key of a measured pace: a stage of a model at a shape and a rung, on a card (by index).
pub(super) type PaceKey = (StageKey, usize);

/// The measured pace of an order.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct KnownPace {
    /// The longest time between two steps of the stage.
    pub(super) between_steps: Option<Duration>,
    /// How long the stage takes as a whole, if this worker has run it already.
    pub(super) whole: Option<Duration>,
    /// Speed of loads on the card.
    pub(super) bytes_per_second: Option<f64>,
}

/// How long the passes of a stage take with all of its components on the card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PassTime {
    pub(super) pass_seconds: f64,
    pub(super) passes: u32,
    pub(super) passes_in_step: u32,
}

/// The measurement of a stage that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Took {
    /// The longest time between two of its steps.
    BetweenSteps(Duration),
    /// The whole stage, as it has no steps.
    Whole(Duration),
}

/// The work at which a worker was too slow.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum TooSlow {
    /// A load of so many bytes.
    Load(Bytes),
    Stage(PaceKey),
}

#[derive(Default)]
pub(super) struct Learned {
    scratch: ScratchBook,
    /// Milliseconds that stages run, by card.
    stage_ms: BTreeMap<StageKey, BTreeMap<usize, f64>>,
    /// Seconds of a pass with all components on the card, by card.
    pass_seconds: BTreeMap<StageKey, BTreeMap<usize, f64>>,
    /// The time of passes of the last stage that ran with a component on a card.
    last_pass_times: BTreeMap<(usize, ComponentId), PassTime>,
    load_seconds: BTreeMap<ComponentId, f64>,
    /// The longest time between two steps.
    between_steps: BTreeMap<PaceKey, Duration>,
    /// How long stages without steps run, each with the generation of the worker that it last ran on: the first in a
    /// worker may take longer.
    stage_durations: BTreeMap<PaceKey, (Duration, u64)>,
    /// Bytes a second of loads, by card.
    load_speed: BTreeMap<usize, f64>,
    losses: BTreeMap<(String, String), WorkerLosses>,
}

/// What was learned, as it is kept over a restart. Stages without steps are not in it: the first one in a worker takes longer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeptLearned {
    scratch: ScratchBook,
    load_seconds: Vec<(ComponentId, f64)>,
    /// By the id of the card.
    of_cards: BTreeMap<String, LearnedOfCard>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct LearnedOfCard {
    stage_ms: Vec<(StageKey, f64)>,
    pass_seconds: Vec<(StageKey, f64)>,
    between_steps: Vec<(StageKey, Duration)>,
    load_speed: Option<f64>,
}

struct WorkerLosses {
    jobs: BTreeSet<JobId>,
    last: Instant,
}

/// The figures of one card, by index.
fn of_card<T: Copy>(by_key: &BTreeMap<StageKey, BTreeMap<usize, T>>, card: usize) -> Vec<(StageKey, T)> {
    let of_card = by_key
        .iter()
        .filter_map(|(key, by_card)| Some((key.clone(), *by_card.get(&card)?)));
    of_card.collect()
}

impl Learned {
    /// What is kept over a restart. `cards` are the ids of the cards.
    pub(super) fn kept(&self, cards: &[&str]) -> KeptLearned {
        let of_card = |(card, id): (usize, &&str)| {
            let paces = self.between_steps.iter().filter(|((_, on), _)| *on == card);
            let learned = LearnedOfCard {
                stage_ms: of_card(&self.stage_ms, card),
                pass_seconds: of_card(&self.pass_seconds, card),
                between_steps: paces.map(|((key, _), pace)| (key.clone(), *pace)).collect(),
                load_speed: self.load_speed.get(&card).copied(),
            };
            ((*id).to_owned(), learned)
        };
        KeptLearned {
            scratch: self.scratch.clone(),
            load_seconds: self.load_seconds.clone().into_iter().collect(),
            of_cards: cards.iter().enumerate().map(of_card).collect(),
        }
    }

    /// Takes over what was learned before. What this process has learned already stays.
    pub(super) fn restore(&mut self, kept: KeptLearned, cards: &[&str]) {
        if self.scratch == ScratchBook::new() {
            self.scratch = kept.scratch;
        }
        for (id, seconds) in kept.load_seconds {
            self.load_seconds.entry(id).or_insert(seconds);
        }
        for (card, id) in cards.iter().enumerate() {
            let Some(learned) = kept.of_cards.get(*id) else {
                continue;
            };
            for (key, ms) in &learned.stage_ms {
                let by_card = self.stage_ms.entry(key.clone()).or_default();
                by_card.entry(card).or_insert(*ms);
            }
            for (key, seconds) in &learned.pass_seconds {
                let by_card = self.pass_seconds.entry(key.clone()).or_default();
                by_card.entry(card).or_insert(*seconds);
            }
            for (key, pace) in &learned.between_steps {
                self.between_steps.entry((key.clone(), card)).or_insert(*pace);
            }
            if let Some(speed) = learned.load_speed {
                self.load_speed.entry(card).or_insert(speed);
            }
        }
    }

    /// Puts learned peaks into a stage's rungs, and learned seconds into its components.
    pub(super) fn improve(&self, need: &mut Need, family: &str, card: &CardDescription) {
        self.time_loads(&mut need.components);
        let Some(plan) = &mut need.plan else { return };
        let mut key = scratch_key(family, plan, &need.components, "", card);
        for rung in &mut plan.rungs {
            key.shape = shape_of_scratch(&plan.shape, &rung.label, plan.steps);
            rung.scratch = self.scratch.estimate(&key, rung.scratch);
        }
    }

    fn time_loads(&self, components: &mut [Component]) {
        for component in components {
            if let Some(&seconds) = self.load_seconds.get(&component.id) {
                component.reload_seconds = seconds;
            }
        }
    }

    pub(super) fn knows_scratch(
        &self,
        need: &Need,
        rung: &str,
        family: &str,
        card: &CardDescription,
    ) -> bool {
        need.plan.as_ref().is_some_and(|plan| {
            let key = scratch_key(family, plan, &need.components, rung, card);
            self.scratch.peaks(&key).next().is_some()
        })
    }

    /// A stage ran to its end.
    pub(super) fn stage_completed(
        &mut self,
        key: StageKey,
        family: &str,
        need: &Need,
        (index, card): (usize, &CardDescription),
        completed: &Completed,
    ) {
        if let Some(plan) = &need.plan {
            let scratch_key = scratch_key(family, plan, &need.components, &completed.chunking, card);
            let outcome = RunOutcome::Succeeded { room: completed.room };
            self.scratch.learn(&scratch_key, completed.peak_scratch, outcome);
        }
        if self.stage_ms.len() >= REMEMBERED && !self.stage_ms.contains_key(&key) {
            self.stage_ms.clear();
        }
        let ms = completed.run_ms as f64;
        let by_card = self.stage_ms.entry(key).or_default();
        by_card
            .entry(index)
            .and_modify(|known| *known = *known * 0.7 + ms * 0.3)
            .or_insert(ms);
    }

    /// Passes of a stage took so many seconds each, with all components on the card. The fastest counts: what a first run waits for
    /// besides is no part of them.
    pub(super) fn passed(&mut self, key: StageKey, card: usize, seconds: f64) {
        if self.pass_seconds.len() >= REMEMBERED && !self.pass_seconds.contains_key(&key) {
            self.pass_seconds.clear();
        }
        let by_card = self.pass_seconds.entry(key).or_default();
        let known = by_card.entry(card).or_insert(seconds);
        *known = known.min(seconds);
    }

    /// Seconds of a pass of a stage with all components on a card, if one like it ran there.
    pub(super) fn pass_seconds(&self, key: &StageKey, card: usize) -> Option<f64> {
        self.pass_seconds.get(key)?.get(&card).copied()
    }

    /// A stage whose passes take this time ran with these components on a card.
    pub(super) fn ran_in(&mut self, card: usize, components: &[Component], time: PassTime) {
        if self.last_pass_times.len() >= REMEMBERED {
            self.last_pass_times.clear();
        }
        let ids = components.iter().map(|component| component.id.clone());
        self.last_pass_times.extend(ids.map(|id| ((card, id), time)));
    }

    /// The time of passes of the last stage that ran with a component on a card.
    pub(super) fn last_pass_time(&self, card: usize, id: &ComponentId) -> Option<PassTime> {
        self.last_pass_times.get(&(card, id.clone())).copied()
    }

    /// A stage ran out of memory: records that its room was not enough.
    pub(super) fn out_of_memory(&mut self, family: &str, need: &Need, card: &CardDescription, room: Bytes) {
        let Some(plan) = &need.plan else { return };
        for rung in &plan.rungs {
            let key = scratch_key(family, plan, &need.components, &rung.label, card);
            self.scratch
                .learn(&key, Bytes::ZERO, RunOutcome::OutOfMemory { room });
        }
    }

    fn loads_completed(&mut self, loads: &[(ComponentId, f64)]) {
        for (id, seconds) in loads {
            if self.load_seconds.len() >= REMEMBERED && !self.load_seconds.contains_key(id) {
                self.load_seconds.clear();
            }
            self.load_seconds.insert(id.clone(), *seconds);
        }
    }

    /// Milliseconds that a stage takes on a card, if one like it ran there.
    pub(super) fn stage_ms_on(&self, key: &StageKey, card: usize) -> Option<f64> {
        self.stage_ms.get(key)?.get(&card).copied()
    }

    /// The card on which a stage like it ran fastest, with the milliseconds that it takes there.
    pub(super) fn fastest(&self, key: &StageKey) -> Option<(usize, f64)> {
        let by_card = self.stage_ms.get(key)?.iter().map(|(card, ms)| (*card, *ms));
        by_card.min_by(|one, other| one.1.total_cmp(&other.1))
    }

    /// The measured pace of a stage (`None`: of loads alone) in the worker of a card, by index and generation.
    pub(super) fn pace(&self, (card, generation): (usize, u64), key: Option<&PaceKey>) -> KnownPace {
        let whole = key.and_then(|key| self.stage_durations.get(key));
        KnownPace {
            between_steps: key.and_then(|key| self.between_steps.get(key)).copied(),
            whole: whole.filter(|(_, of)| *of == generation).map(|(run, _)| *run),
            bytes_per_second: self.load_speed.get(&card).copied(),
        }
    }

    /// An order for these components ran to its end in the worker of a card, by index and generation.
    pub(super) fn order_completed(
        &mut self,
        (card, generation): (usize, u64),
        components: &[Component],
        load_seconds: &[(ComponentId, f64)],
        stage: Option<(PaceKey, Took)>,
    ) {
        self.loads_completed(load_seconds);
        self.load_speed(card, components, load_seconds);
        match stage {
            Some((key, Took::BetweenSteps(longest))) => self.stepped(key, longest),
            Some((key, Took::Whole(run))) => self.ran(key, run, generation),
            None => {}
        }
    }

    /// Records loads on a card, with the seconds of each. A slow load counts in full at once, faster ones gradually.
    fn load_speed(&mut self, card: usize, components: &[Component], loads: &[(ComponentId, f64)]) {
        let bytes_of = |id: &ComponentId| components.iter().find(|c| c.id == *id).map(|c| c.bytes);
        for (bytes, seconds) in loads.iter().filter_map(|(id, s)| Some((bytes_of(id)?, *s))) {
            if bytes > Bytes::ZERO && seconds > 0.0 {
                let speed = bytes.0 as f64 / seconds;
                let known = self.load_speed.entry(card).or_insert(speed);
                *known = if speed < *known {
                    speed
                } else {
                    *known * 0.7 + speed * 0.3
                };
            }
        }
    }

    /// Records the longest time between two steps of a completed stage. A longer time than before counts in full at once.
    fn stepped(&mut self, key: PaceKey, longest: Duration) {
        if self.between_steps.len() >= REMEMBERED && !self.between_steps.contains_key(&key) {
            self.between_steps.clear();
        }
        let known = self.between_steps.entry(key).or_insert(longest);
        *known = slower_at_once(*known, longest);
    }

    /// A stage ran to its end in a worker of this generation.
    fn ran(&mut self, key: PaceKey, run: Duration, generation: u64) {
        if self.stage_durations.len() >= REMEMBERED && !self.stage_durations.contains_key(&key) {
            self.stage_durations.clear();
        }
        let known = self.stage_durations.entry(key).or_insert((run, generation));
        *known = (slower_at_once(known.0, run), generation);
    }

    /// A worker was ended by a learned limit. Raises the learned time, so that a too strict limit does not end the next worker too.
    pub(super) fn raise_stage_times(&mut self, card: usize, what: &TooSlow, usual: Duration) {
        match what {
            TooSlow::Load(bytes) => {
                if let Some(known) = self.load_speed.get_mut(&card) {
                    *known = known.min(bytes.0 as f64 / usual.as_secs_f64().max(1e-3));
                }
            }
            TooSlow::Stage(key) => {
                let whole = self.stage_durations.get_mut(key).map(|(whole, _)| whole);
                for known in self.between_steps.get_mut(key).into_iter().chain(whole) {
                    *known = usual.max(*known);
                }
            }
        }
    }

    /// A job ended because its workers died in a stage of this shape.
    pub(super) fn died(&mut self, model_key: &str, shape: &str, job: &JobId, now: Instant) {
        let pair = (model_key.to_owned(), shape.to_owned());
        let losses = self.losses.entry(pair).or_insert_with(|| WorkerLosses {
            jobs: BTreeSet::new(),
            last: now,
        });
        losses.jobs.insert(job.clone());
        losses.last = now;
    }

    /// Whether any request has killed workers recently.
    pub(super) fn has_losses(&self) -> bool {
        !self.losses.is_empty()
    }

    /// The number of jobs that died in a stage of this shape, if it is enough to refuse another.
    pub(super) fn refuses(&self, model_key: &str, shape: &str) -> Option<u32> {
        let losses = self.losses.get(&(model_key.to_owned(), shape.to_owned()))?;
        (losses.jobs.len() >= LOSSES_BEFORE_REFUSAL).then_some(losses.jobs.len() as u32)
    }

    /// Forgets worker losses of an entry that was unloaded, or of all.
    pub(super) fn forget_losses(&mut self, model_key: Option<&str>) {
        self.losses
            .retain(|(key, _), _| model_key.is_some_and(|forgiven| forgiven != key));
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.losses
            .retain(|_, losses| now < losses.last + REFUSAL_DURATION);
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.losses
            .values()
            .map(|losses| losses.last + REFUSAL_DURATION)
            .min()
    }
}

fn slower_at_once(known: Duration, now: Duration) -> Duration {
    if now > known {
        now
    } else {
        known.mul_f64(0.7) + now.mul_f64(0.3)
    }
}

/// Key of a peak. It includes the number of steps, since a stage may hold data for each of its steps.
fn shape_of_scratch(shape: &str, rung: &str, steps: u32) -> String {
    format!("{shape} {rung} s{steps}")
}

/// A peak depends on the architecture that a stage runs, and a family has many: peaks of its smallest model must not
/// count for the largest. The name and the bytes of each component identify the architecture (their dtype is part of
/// the key anyway). Identities would not do better: other weights of the same architecture need the same
/// scratch, and a component whose identity changes from its path to its hash would have to learn again. Stages that
/// agree in all of that and differ in architecture all the same are not known among checkpoints.
fn architecture(family: &str, components: &[Component]) -> String {
    let mut words = family.to_owned();
    for component in components {
        words.push_str(&format!(" {}={}", component.name, component.bytes.0));
    }
    words
}

fn scratch_key(
    family: &str,
    plan: &StagePlan,
    components: &[Component],
    rung: &str,
    card: &CardDescription,
) -> ScratchKey {
    let capability = card
        .compute_capability
        .map(|(major, minor)| format!("{major}.{minor}"));
    ScratchKey {
        family: architecture(family, components),
        stage: plan.name.clone(),
        shape: shape_of_scratch(&plan.shape, rung, plan.steps),
        dtype: card.compute_dtype.clone(),
        build: env!("CARGO_PKG_VERSION").to_owned(),
        compute_capability: capability.unwrap_or_else(|| "cpu".to_owned()),
    }
}
