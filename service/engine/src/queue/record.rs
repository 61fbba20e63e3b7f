//! One job as the queue keeps it: its work, its progress, its results and its listeners.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use model::{
    Covered, MediaFormat, Piece, Role, SharedPass, StagePlan, ValueShape, Values, identity_of_values,
};
use residency::{Bytes, Component, ComponentId, Wait};
use tokio::time::Instant;

use super::learned::StageKey;
use super::listener::{Mailbox, Unread};
use super::observer::{Happening, ObservedJob, Observers};
use super::reductions::{Reduction, Reductions};
use super::replay::Replay;
use super::request::OpenModels;
use super::steps::{JobStep, JobStepKind, JobSteps, Model, decodable};
use super::swap::Swap;
use crate::error::{Error, Shortfall};
use crate::job::{
    Call, JobEvent, JobEventKind, JobId, JobOptions, JobReport, JobWork, Run, StageName, StageReport,
};
use crate::job_state::JobState;
use crate::library::Entry;
use crate::messages::Shortage;
use crate::need::{Need, ids_of, named};

/// The state of a job.
#[derive(Debug)]
pub(super) enum State {
    /// Queued after other jobs of this service.
    Queued {
        /// The position that the client was sent last.
        position: Option<u32>,
        /// The card that it has just run on, and may go on with before any other job.
        keeps: Option<usize>,
    },
    /// Waiting for memory that is late or that other programs hold.
    Waiting { since: Instant },
    /// Its model is opened anew, as its files were replaced before anything of the result was made.
    Reopening,
    /// A worker runs an order of it, or unloads components for it.
    Running {
        /// The error with which it ends as soon as the worker has stopped.
        ending: Option<Error>,
    },
    /// A stage ran out of memory: it ends with this error as soon as the alternatives are known.
    OutOfMemory(Box<Shortfall>),
}

impl State {
    pub(super) fn queued() -> State {
        State::Queued {
            position: None,
            keeps: None,
        }
    }

    /// Queued directly after a step on this card, on which it may go on.
    pub(super) fn queued_on(card: usize) -> State {
        State::Queued {
            position: None,
            keeps: Some(card),
        }
    }

    /// The state as lists show it.
    pub(super) fn listed(&self) -> JobState {
        match self {
            State::Queued { .. } | State::Reopening | State::OutOfMemory(_) => JobState::Queued,
            State::Waiting { .. } => JobState::Waiting,
            State::Running { .. } => JobState::Running,
        }
    }
}

/// The attempts to start the next step. Each step begins with an empty record.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    pub(super) patience: Option<Patience>,
    /// By card.
    pub(super) refusals: BTreeMap<usize, Refusal>,
    /// Cards whose workers answered `Never`.
    pub(super) never_on: BTreeSet<usize>,
    /// Memory may be short: patience is over, or the stage exceeds the card.
    pub(super) low_memory: bool,
    /// How many workers died of the step.
    pub(super) deaths: u32,
    /// How many workers died that had the step's order and had not begun it.
    pub(super) deaths_before: u32,
    /// It shares no passes, since it failed in a shared one.
    pub(super) alone: bool,
    /// It has let a pass of jobs that it shared one with go first.
    pub(super) yielded: bool,
}

/// Patience for the next step.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    pub(super) wait: Wait,
    pub(super) next_tick: Instant,
    pub(super) shortage: Shortage,
}

/// A worker said that memory is short although its ledger had room: not asked again on the same snapshot for a while.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) snapshot: u64,
    pub(super) until: Instant,
    pub(super) shortage: Shortage,
}

pub(super) struct JobRecord {
    pub(super) id: JobId,
    /// Order of arrival.
    pub(super) arrival: u64,
    pub(super) options: JobOptions,
    pub(super) entry: Arc<Entry>,
    pub(super) work: JobWork,
    pub(super) models: OpenModels,
    pub(super) reductions: Reductions,
    /// For a plan without a job: the model in formats that lose less.
    pub(super) upgrades: Vec<Reduction>,
    /// Plans by compute dtype.
    pub(super) plans: BTreeMap<String, Vec<StagePlan>>,
    /// The keys of its stages' values, by stage and dtype, as far as they were asked for. They follow from its models and plans; each
    /// turn asks for those of every queued job, and a key is a hash of much.
    pub(super) memo_keys: RefCell<BTreeMap<(usize, String), Option<String>>>,
    pub(super) accepted: Instant,

    pub(super) steps: JobSteps,
    pub(super) cursor: usize,
    /// Values of stages that run once for all items.
    pub(super) values: Values,
    /// Values of an item that later stages take. Those that decoding takes are in the store instead.
    pub(super) item_values: BTreeMap<u32, Values>,
    /// Values that the job started from.
    pub(super) start_values: Values,
    /// The delivered range of each track, by item and name.
    pub(super) delivered: BTreeMap<(u32, String), (MediaFormat, Covered)>,
    /// The run that proves a load's model.
    pub(super) proof: Option<Run>,
    /// The swap of a load that replaces another model.
    pub(super) swap: Option<Box<Swap>>,
    /// Values in the store by item, each under a lease of this job.
    pub(super) latents: BTreeMap<u32, String>,
    /// Items whose latents were reported to the client.
    pub(super) told: BTreeSet<u32>,
    /// A latent of a client that the job works on, under a lease.
    pub(super) input_latent: Option<String>,

    pub(super) state: State,
    /// Whether its model was opened anew: that is done once.
    pub(super) reopened: bool,
    pub(super) attempt: Attempt,
    pub(super) last_card: Option<usize>,
    /// Whether a stage of it has run: such a job is before all that have not begun.
    pub(super) begun: bool,
    pub(super) overtaken: u32,
    /// Time that it waited for memory since the last stage.
    pub(super) waited: Duration,
    /// Whether latents that it makes from now on are released.
    pub(super) releases_latents: bool,

    pub(super) report: JobReport,
    /// Steps done and all steps of the stage that runs or ran last.
    pub(super) steps_done: (u32, u32),
    pub(super) listeners: BTreeMap<u64, Arc<Mailbox>>,
    /// Counts the bytes that its listeners have not read.
    pub(super) unread: Arc<Unread>,
    pub(super) detached: bool,
    /// Events for clients that join later.
    pub(super) replay: Replay,
    pub(super) observers: Observers,
}

impl JobRecord {
    pub(super) fn step(&self) -> Option<JobStep> {
        self.steps.get(self.cursor).copied()
    }

    /// The call that submitted it.
    pub(super) fn call(&self) -> Call {
        match &self.work {
            JobWork::Run(run) => run.call,
            JobWork::Load { .. } => Call::Load,
        }
    }

    pub(super) fn seed(&self) -> u64 {
        match &self.work {
            JobWork::Run(run) => run.request.seed,
            JobWork::Load { .. } => 0,
        }
    }

    /// Whether the client asked for latents. Without that, it gets them only if the job fails.
    pub(super) fn keeps_latents(&self) -> bool {
        match &self.work {
            JobWork::Run(run) => run.keep_latent || run.until < Role::Decode,
            JobWork::Load { .. } => false,
        }
    }

    /// The stages that it runs: its own, or those of its proof.
    pub(super) fn run(&self) -> Option<&Run> {
        match &self.work {
            JobWork::Run(run) => Some(run),
            JobWork::Load { .. } => self.proof.as_ref(),
        }
    }

    /// Its stages on cards of a dtype.
    pub(super) fn plan(&self, dtype: &str) -> &[StagePlan] {
        self.plans.get(dtype).map_or(&[], Vec::as_slice)
    }

    /// A stage as any card would run it: all that does not depend on a card is alike.
    pub(super) fn stage(&self, step: JobStep) -> Option<&StagePlan> {
        let JobStepKind::Stage(stage) = step.kind else {
            return None;
        };
        self.plans.values().next()?.get(stage)
    }

    /// The key of the stage at `index`, without previews; `None` for a step that is no stage.
    pub(super) fn stage_key(&self, index: usize) -> Option<StageKey> {
        let step = *self.steps.get(index)?;
        let shape = self.stage(step)?.shape.clone();
        Some((self.entry.key.clone(), self.name_of(step), shape))
    }

    /// How the step at `index` shares passes with stages of other jobs: not on two cards.
    pub(super) fn shared_pass(&self, index: usize) -> Option<&SharedPass> {
        let pass = self.stage(*self.steps.get(index)?)?.shared.as_ref();
        pass.filter(|_| !self.is_on_two_cards(index))
    }

    /// Whether two cards run the step at `index` together.
    pub(super) fn is_on_two_cards(&self, index: usize) -> bool {
        let is_asked_for = self.run().is_some_and(|run| run.request.cards > 1);
        is_asked_for
            && self
                .steps
                .get(index)
                .is_some_and(|step| self.is_of(*step, Role::Sample))
    }

    /// Whether two cards run any of its steps together.
    pub(super) fn needs_two_cards(&self) -> bool {
        (0..self.steps.len()).any(|index| self.is_on_two_cards(index))
    }

    /// Whether it is sampled in rounds, which may share passes: it gives up its card between them.
    pub(super) fn is_in_rounds(&self) -> bool {
        (0..self.steps.len()).any(|index| self.shared_pass(index).is_some())
    }

    /// The name of a step.
    pub(super) fn name_of(&self, step: JobStep) -> StageName {
        match step.kind {
            JobStepKind::Load(Model::Own) => "load".into(),
            JobStepKind::Load(Model::Replaced) => "restore".into(),
            JobStepKind::Unload(_) => "unload".into(),
            JobStepKind::Stage(_) => self.stage(step).map_or("", |stage| stage.name.as_str()).into(),
        }
    }

    /// The name of the next step; empty: there is none.
    pub(super) fn stage_name(&self) -> StageName {
        self.step().map_or_else(|| "".into(), |step| self.name_of(step))
    }

    /// Whether a step is of this role.
    pub(super) fn is_of(&self, step: JobStep, role: Role) -> bool {
        self.stage(step).is_some_and(|stage| stage.role == role)
    }

    /// All components that its stages use, and the activations of the largest stage.
    pub(super) fn whole_bytes(&self, dtype: &str) -> Bytes {
        let plan = self.plan(dtype);
        let all = self.models.get(dtype).map_or(&[][..], |open| &open.components);
        let is_used =
            |c: &&Component| plan.is_empty() || plan.iter().any(|stage| stage.components.contains(&c.name));
        let scratch = plan
            .iter()
            .filter_map(|stage| stage.rungs.iter().map(|rung| rung.scratch).min());
        all.iter().filter(is_used).map(|c| c.bytes).sum::<Bytes>() + scratch.max().unwrap_or(Bytes::ZERO)
    }

    /// Whether a component of its model can be on the card in a part.
    pub(super) fn is_streamable(&self, dtype: &str) -> bool {
        let all = self.models.get(dtype).map_or(&[][..], |open| &open.components);
        all.iter().any(|component| !component.parts.sizes().is_empty())
    }

    /// Whether its model has a component of this name.
    pub(super) fn has_component(&self, name: &str) -> bool {
        let mut all = self.models.values().flat_map(|open| &open.components);
        all.any(|component| component.name == name)
    }

    /// The components of these names, with their current identities.
    pub(super) fn components(&self, names: &[String], dtype: &str) -> Vec<Component> {
        let all = self.models.get(dtype).map_or(&[][..], |open| &open.components);
        named(names, all)
    }

    /// The need of the step at `index` on cards of this dtype, by the family's plan.
    pub(super) fn need(&self, index: usize, dtype: &str) -> Option<Need> {
        let step = *self.steps.get(index)?;
        let stage = match step.kind {
            JobStepKind::Stage(stage) => stage,
            JobStepKind::Load(Model::Own) => return self.load_need(dtype),
            JobStepKind::Load(Model::Replaced) => return self.restore_need(step),
            JobStepKind::Unload(_) => return None,
        };
        let plan = self.plan(dtype).get(stage)?.clone();
        let all = &self.models.get(dtype)?.components;
        Some(Need::of_stage(
            plan,
            all,
            self.needed_later(index, dtype, all),
            self.options.headroom,
        ))
    }

    /// Components that the stages after the step at `index` need.
    fn needed_later(&self, index: usize, dtype: &str, all: &[Component]) -> Vec<ComponentId> {
        let names = self.steps.needed_later(index, dtype);
        let components = names.filter_map(|name| all.iter().find(|component| component.name == *name));
        components.map(|component| component.id.clone()).collect()
    }

    fn load_need(&self, dtype: &str) -> Option<Need> {
        let JobWork::Load {
            components: names, ..
        } = &self.work
        else {
            return None;
        };
        let all = &self.models.get(dtype)?.components;
        let named = all.iter().filter(|c| names.is_empty() || names.contains(&c.name));
        Some(Need {
            name: "load".into(),
            components: named.cloned().collect(),
            plan: None,
            headroom: self.options.headroom,
            later: Vec::new(),
            model: ids_of(all),
        })
    }

    fn restore_need(&self, step: JobStep) -> Option<Need> {
        let components = &self.swap.as_ref()?.begun.as_ref()?.before;
        Some(Need {
            name: self.name_of(step),
            components: components.clone(),
            plan: None,
            headroom: Bytes::ZERO, // a restored component was there before, so the new model's headroom does not apply
            later: Vec::new(),
            model: ids_of(components),
        })
    }

    /// The inputs of a stage, from all values of the job; `kept` are the values in the store for its item.
    pub(super) fn input(&self, step: JobStep, kept: &Values) -> Values {
        let own = self.item_values.get(&step.item);
        let takes = self.stage(step).into_iter().flat_map(|stage| &stage.takes);
        let found = takes.filter_map(|value| {
            let name = &value.name;
            let item = own.and_then(|own| own.get(name)).or_else(|| kept.get(name));
            let found = item
                .or_else(|| self.values.get(name))
                .or_else(|| self.start_values.get(name));
            Some((name.clone(), found?.clone()))
        });
        found.collect()
    }

    /// The steps for an item that follow the next step.
    fn later_of(&self, item: u32) -> impl Iterator<Item = (JobStep, &StagePlan)> {
        let later = self.steps.iter().skip(self.cursor + 1).copied();
        let of_item = later.filter(move |step| step.item == item);
        of_item.filter_map(|step| Some((step, self.stage(step)?)))
    }

    /// Whether a value of this step belongs in the store: values to decode next, and values that the job
    /// ends with.
    pub(super) fn belongs_in_store(&self, step: JobStep, name: &str) -> bool {
        if self.is_of(step, Role::Decode) {
            return false; // left for the next decode
        }
        let takes = |stage: &StagePlan| stage.takes.iter().any(|value| value.name == name);
        let next = self.later_of(step.item).find(|(_, stage)| takes(stage));
        match next {
            Some((_, stage)) => stage.role == Role::Decode,
            None => {
                let plan = self.plans.values().next().map_or(&[][..], Vec::as_slice);
                decodable(plan).iter().any(|value| value.name == name)
            }
        }
    }

    /// Whether these are all the values that its decodes take.
    pub(super) fn is_decodable(&self, values: &[ValueShape]) -> bool {
        let plan = self.plans.values().next().map_or(&[][..], Vec::as_slice);
        let has = |name: &str| values.iter().any(|value| value.name == name);
        decodable(plan).iter().all(|value| has(&value.name))
    }

    /// Whether a later step of an item decodes.
    pub(super) fn decodes_later(&self, item: u32) -> bool {
        self.later_of(item).any(|(_, stage)| stage.role == Role::Decode)
    }

    /// Forgets values of an item that no later step takes.
    pub(super) fn forget_untaken(&mut self, item: u32) {
        let taken: BTreeSet<String> = self
            .later_of(item)
            .flat_map(|(_, stage)| stage.takes.iter().map(|value| value.name.clone()))
            .collect();
        if let Some(values) = self.item_values.get_mut(&item) {
            values.retain(|name, _| taken.contains(name));
            if values.is_empty() {
                self.item_values.remove(&item);
            }
        }
    }

    /// The job as observers know it.
    pub(super) fn observed(&self, now: Instant) -> ObservedJob<'_> {
        ObservedJob {
            id: &self.id,
            call: self.call(),
            model: &self.entry.key,
            client: &self.options.client,
            trace: &self.options.trace,
            age: now.duration_since(self.accepted),
        }
    }

    /// Adds a stage to the report.
    pub(super) fn stage_done(&mut self, report: StageReport, now: Instant) {
        self.observers.tell(&Happening::Stage {
            job: self.observed(now),
            report: &report,
        });
        self.report.stages.push(report);
    }

    /// Sends an event to all listeners, and keeps it for clients that join later.
    pub(super) fn emit(&mut self, now: Instant, kind: JobEventKind) {
        self.observers.tell(&Happening::Event {
            job: self.observed(now),
            event: &kind,
        });
        let mut event = JobEvent {
            at_ms: now.duration_since(self.accepted).as_millis() as u64,
            kind,
        };
        self.replay.keep(&event);
        let mut to_encode = None;
        if let JobEventKind::Piece { item, seed, piece } = &mut event.kind {
            to_encode = Some((*item, *seed, piece.clone()));
            piece.data = self.unread.count(std::mem::take(&mut piece.data));
        }
        let id = &self.id;
        self.listeners.retain(|listener, mailbox| {
            let is_for_client = to_encode.is_none() || !mailbox.is_encoded_instead();
            let reads = !is_for_client || mailbox.push(event.clone());
            if let Some((item, seed, piece)) = to_encode.as_ref().filter(|_| reads) {
                mailbox.push_to_encode(*item, *seed, piece);
            }
            if !reads {
                tracing::warn!(job = %id, listener, "a listener does not read its results: it is dropped");
            }
            reads
        });
    }

    /// Adds another submission of the same job: the job is detached if any submission is, and the latest deadline counts.
    pub(super) fn joined_by(&mut self, options: &JobOptions) {
        self.detached |= options.detach;
        let deadlines = self.options.deadline.zip(options.deadline);
        self.options.deadline = deadlines.map(|(earlier, other)| earlier.max(other));
    }

    /// The deadline of the job. A caller's deadline ends neither a detached job nor a swap that is past its turning
    /// point.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.options
            .deadline
            .filter(|_| !self.detached && !self.is_decided())
    }

    /// Whether the service encodes its result.
    pub(super) fn is_encoded(&self) -> bool {
        self.listeners.values().any(|mailbox| mailbox.is_encoded())
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.state, State::Running { .. })
    }

    /// Whether its end is decided, and only its worker has to stop.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.state, State::Running { ending: Some(_) })
    }

    /// The card that it has just run on, and may go on with before any other job.
    pub(super) fn kept_card(&self) -> Option<usize> {
        match self.state {
            State::Queued { keeps, .. } => keeps,
            State::Waiting { .. } | State::Reopening | State::Running { .. } | State::OutOfMemory(_) => None,
        }
    }

    pub(super) fn give_up_card(&mut self) {
        if let State::Queued { keeps, .. } = &mut self.state {
            *keeps = None;
        }
    }

    /// Changes its state, and books the time that was spent waiting.
    pub(super) fn enter(&mut self, state: State, now: Instant) {
        if let State::Waiting { since } = self.state {
            let lasted = now.duration_since(since);
            self.waited += lasted;
            let patience = self.attempt.patience.as_ref();
            self.observers.tell(&Happening::Waited {
                job: self.observed(now),
                cause: patience.map_or("unknown", |patience| patience.shortage.cause.as_str()),
                lasted,
            });
        }
        self.state = state;
    }

    /// A worker has an order of it.
    pub(super) fn run_on(&mut self, card: usize, now: Instant) {
        self.enter(State::Running { ending: None }, now);
        self.last_card = Some(card);
        self.steps_done = (0, 0);
    }

    /// Queues the job after the others; one that is queued already keeps its place.
    pub(super) fn queue_up(&mut self, now: Instant) {
        if !matches!(self.state, State::Queued { .. } | State::OutOfMemory(_)) {
            self.enter(State::queued(), now);
        }
    }

    /// Whether it may begin again with another version of its model: nothing of its result has been made, and its input does not
    /// depend on the present version.
    pub(super) fn may_begin_again(&self) -> bool {
        let made_nothing =
            self.item_values.is_empty() && self.latents.is_empty() && self.delivered.is_empty();
        !self.reopened && made_nothing && self.input_latent.is_none() && self.swap.is_none()
    }

    /// Begins again with the model of `opened`, a new record of the same job.
    pub(super) fn begin_again(&mut self, opened: JobRecord, now: Instant) {
        self.models = opened.models;
        self.plans = opened.plans;
        self.memo_keys.take();
        self.proof = opened.proof;
        self.steps = opened.steps;
        self.reductions = opened.reductions;
        self.values.clear();
        self.go_to(0);
        self.enter(State::queued(), now);
    }

    /// Goes to another step, and forgets the attempts for the last one.
    pub(super) fn go_to(&mut self, cursor: usize) {
        self.cursor = cursor;
        self.attempt = Attempt::default();
    }

    /// The key under which other jobs may reuse a stage's values, on cards of a dtype. `None`: they may not; values of a
    /// stage that runs once per item never are.
    pub(super) fn memo_key(&self, stage: usize, dtype: &str) -> Option<String> {
        let of = (stage, dtype.to_owned());
        if let Some(known) = self.memo_keys.borrow().get(&of) {
            return known.clone();
        }
        let key = self.new_memo_key(stage, dtype);
        self.memo_keys.borrow_mut().insert(of, key.clone());
        key
    }

    fn new_memo_key(&self, stage: usize, dtype: &str) -> Option<String> {
        let model = &self.models.get(dtype)?.model;
        let identities = |names: &[String]| {
            let components = self.components(names, dtype).into_iter();
            components.map(|component| component.id.0.to_string()).collect()
        };
        identity_of_values(&**model, self.plan(dtype), stage, &identities)
    }

    /// Id of the decoder of its latents: the first component that decodes.
    pub(super) fn decoder_id(&self, dtype: &str) -> String {
        let decode = self.plan(dtype).iter().find(|stage| stage.role == Role::Decode);
        let components = decode.map_or(Vec::new(), |stage| self.components(&stage.components, dtype));
        let decoder = components.first();
        decoder
            .map(|component| content_of(&component.id).to_owned())
            .unwrap_or_default()
    }

    /// The number of the next step, from 1, and the number of all steps, as clients see them: without unloads.
    pub(super) fn place_of_step(&self) -> (u32, u32) {
        let told = |steps: &[JobStep]| steps.iter().filter(|step| !step.is_unload()).count() as u32;
        (told(&self.steps[..self.cursor]) + 1, told(&self.steps))
    }

    /// Items whose values have not been decoded.
    pub(super) fn undecoded_items(&self) -> Vec<u32> {
        let left = self.steps.iter().skip(self.cursor);
        let decodes = left.filter(|step| self.is_of(**step, Role::Decode));
        decodes.map(|step| step.item).collect()
    }

    /// Records the delivered range of a track, and returns events for the part of a piece that the client lacks: a
    /// stage that is run again delivers from the beginning. Pieces of a proof give no events.
    pub(super) fn deliver(&mut self, item: u32, piece: &Piece) -> Vec<JobEventKind> {
        let Some(units) = piece.units() else {
            tracing::warn!(job = %self.id, format = ?piece.format, "a stage delivered an invalid piece of its result");
            return Vec::new();
        };
        let track = self.delivered.entry((item, piece.track.clone()));
        let (_, covered) = track.or_insert_with(|| (piece.format, Covered::default()));
        let new = covered.add(piece.first..piece.first + units);
        if self.is_load() {
            return Vec::new();
        }
        let seed = self.seed().wrapping_add(u64::from(item));
        let new = new.into_iter().filter_map(|units| piece.of_units(units));
        new.map(|piece| JobEventKind::Piece { item, seed, piece })
            .collect()
    }

    /// Checks that an item has been delivered completely, in the requested format.
    pub(super) fn check_delivered(&self, step: JobStep) -> Result<(), Error> {
        let of_item = self.delivered.iter().filter(|((item, _), _)| *item == step.item);
        let tracks: Vec<_> = of_item
            .map(|((_, track), (format, covered))| (track.as_str(), format, covered))
            .collect();
        let asked = self.run().map(|run| &run.request.medium);
        let formats = tracks.iter().map(|(track, format, _)| (*track, **format));
        if asked.is_some_and(|asked| asked.is_made_of(formats))
            && tracks
                .iter()
                .all(|(_, format, covered)| covered.is_whole(format.units()))
        {
            return Ok(());
        }
        let (key, stage) = (&self.entry.key, self.name_of(step));
        let asked = asked.map_or("result", |asked| asked.name());
        let told = format!(
            "{stage} of {key} delivered {tracks:?}, which is not the whole {asked} that was asked for"
        );
        Err(match self.is_load() {
            true => Error::ModelDamaged(format!("{key} failed its proof: {told}")),
            false => Error::Internal(told),
        })
    }
}

/// An identity without its dtype and format: a latent fits the same decoder on every card, in any format.
pub(super) fn content_of(id: &ComponentId) -> &str {
    let parts = if id.0.starts_with("path:") {
        id.0.rsplit_once('@')
    } else {
        id.0.split_once(':')
    };
    parts.map_or(&*id.0, |(content, _)| content)
}

/// Bytes of a request's inputs (such as pictures), which stay in memory while the job exists.
pub(super) fn input_bytes(work: &JobWork) -> Bytes {
    match work {
        JobWork::Run(run) => Bytes(run.request.input_bytes()),
        JobWork::Load { .. } => Bytes::ZERO,
    }
}
