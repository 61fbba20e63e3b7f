//! One job as the queue keeps it: what it wants, how far it is, what it has made, who listens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use model::{
    Covered, MediaFormat, Piece, Role, SharedPass, StagePlan, ValueShape, Values, identity_of_values,
};
use residency::{Bytes, Component, ComponentId, Wait};
use tokio::time::Instant;

use super::listener::{Mailbox, Unread};
use super::reductions::{Reduction, Reductions};
use super::replay::Replay;
use super::request::OpenModels;
use super::steps::{Model, Step, StepKind, Steps, decodable};
use super::swap::Swap;
use crate::error::{Error, Shortfall};
use crate::job::{Call, JobEvent, JobEventKind, JobId, JobOptions, JobReport, JobWork, Run, StageName};
use crate::job_state::JobState;
use crate::library::Entry;
use crate::messages::Shortage;
use crate::need::{Need, named};

/// Where a job is on its way.
#[derive(Debug)]
pub(super) enum State {
    /// Behind our own jobs.
    Queued {
        /// What the client was told last.
        position: Option<u32>,
        /// The card that it has just run on, and may go on with before any other job.
        keeps: Option<usize>,
    },
    /// For memory that is late or that others have.
    Waiting { since: Instant },
    /// Its model is opened anew, as its files were replaced before anything of the result was made.
    Reopening,
    /// A worker has an order of it, or unloads for it.
    Running {
        /// What it ends with as soon as the worker lets go.
        ending: Option<Error>,
    },
    /// A stage ran out of memory: it ends with this as soon as it is known what would fit instead.
    OutOfMemory(Box<Shortfall>),
}

impl State {
    pub(super) fn queued() -> State {
        State::Queued {
            position: None,
            keeps: None,
        }
    }

    /// Just off a card, which it may go on with.
    pub(super) fn queued_on(card: usize) -> State {
        State::Queued {
            position: None,
            keeps: Some(card),
        }
    }

    /// As lists show it.
    pub(super) fn listed(&self) -> JobState {
        match self {
            State::Queued { .. } | State::Reopening | State::OutOfMemory(_) => JobState::Queued,
            State::Waiting { .. } => JobState::Waiting,
            State::Running { .. } => JobState::Running,
        }
    }
}

/// What was tried to start the step that comes next. Each step begins with none of it.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    pub(super) patience: Option<Patience>,
    /// By card.
    pub(super) refusals: BTreeMap<usize, Refusal>,
    /// Cards whose workers said never.
    pub(super) never_on: BTreeSet<usize>,
    /// Memory may be short: patience is over, or the stage exceeds the card.
    pub(super) low_memory: bool,
    /// How many workers died of the step.
    pub(super) deaths: u32,
    /// It shares no passes: it failed where it did.
    pub(super) alone: bool,
}

/// Patience for the step that comes next.
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
    /// For a plan that is only asked for: the model in formats that lose less.
    pub(super) upgrades: Vec<Reduction>,
    /// Plans by compute dtype.
    pub(super) plans: BTreeMap<String, Vec<StagePlan>>,
    pub(super) accepted: Instant,

    pub(super) steps: Steps,
    pub(super) cursor: usize,
    /// What stages gave that run once for all items.
    pub(super) values: Values,
    /// What stages gave for an item and later ones take; what decoding takes is in the store instead.
    pub(super) item_values: BTreeMap<u32, Values>,
    /// What the job started from.
    pub(super) brought: Values,
    /// How much of each item's tracks the client has.
    pub(super) delivered: BTreeMap<(u32, String), (MediaFormat, Covered)>,
    /// The run that proves a load's model.
    pub(super) proof: Option<Run>,
    /// What a load replaces.
    pub(super) swap: Option<Box<Swap>>,
    /// Values in the store by item, each under a lease of this job.
    pub(super) latents: BTreeMap<u32, String>,
    /// Items whose latents the client knows of.
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
    /// For memory, since the last stage.
    pub(super) waited: Duration,
    /// Whether latents that it makes from now on are released.
    pub(super) releases_latents: bool,

    pub(super) report: JobReport,
    /// Of the stage that runs or ran last: steps done, and steps in all.
    pub(super) steps_done: (u32, u32),
    pub(super) listeners: BTreeMap<u64, Arc<Mailbox>>,
    /// Counts what its listeners have not read.
    pub(super) unread: Arc<Unread>,
    pub(super) detached: bool,
    /// For those who join later.
    pub(super) replay: Replay,
}

impl JobRecord {
    pub(super) fn step(&self) -> Option<Step> {
        self.steps.get(self.cursor).copied()
    }

    /// The call that it is of.
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

    /// Whether the client asked for latents, rather than getting them because something failed.
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
    pub(super) fn stage(&self, step: Step) -> Option<&StagePlan> {
        let StepKind::Stage(stage) = step.kind else {
            return None;
        };
        self.plans.values().next()?.get(stage)
    }

    /// How the step that comes next shares passes with stages of other jobs.
    pub(super) fn shared_pass(&self, index: usize) -> Option<&SharedPass> {
        self.stage(*self.steps.get(index)?)?.shared.as_ref()
    }

    /// What a step is called.
    pub(super) fn name_of(&self, step: Step) -> StageName {
        match step.kind {
            StepKind::Load(Model::Own) => "load".into(),
            StepKind::Load(Model::Replaced) => "restore".into(),
            StepKind::Unload(_) => "unload".into(),
            StepKind::Stage(_) => self.stage(step).map_or("", |stage| stage.name.as_str()).into(),
        }
    }

    /// What the step that comes next is called; empty: there is none.
    pub(super) fn stage_name(&self) -> StageName {
        self.step().map_or_else(|| "".into(), |step| self.name_of(step))
    }

    /// Whether a step is of this role.
    pub(super) fn is_of(&self, step: Step, role: Role) -> bool {
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

    /// The components of these names, under the identities that they go by.
    pub(super) fn components(&self, names: &[String], dtype: &str) -> Vec<Component> {
        let all = self.models.get(dtype).map_or(&[][..], |open| &open.components);
        named(names, all)
    }

    /// What the step at `index` needs on cards of this dtype, as the family says.
    pub(super) fn need(&self, index: usize, dtype: &str) -> Option<Need> {
        let step = *self.steps.get(index)?;
        let stage = match step.kind {
            StepKind::Stage(stage) => stage,
            StepKind::Load(Model::Own) => return self.load_need(dtype),
            StepKind::Load(Model::Replaced) => return self.restore_need(step),
            StepKind::Unload(_) => return None,
        };
        let plan = self.plan(dtype).get(stage)?.clone();
        let all = &self.models.get(dtype)?.components;
        Some(Need::of_stage(
            plan,
            all,
            self.needed_behind(index, dtype, all),
            self.options.headroom,
        ))
    }

    /// Components that the stages behind the step at `index` need.
    fn needed_behind(&self, index: usize, dtype: &str, all: &[Component]) -> Vec<ComponentId> {
        let names = self.steps.needed_behind(index, dtype);
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
        let all = self.models.get(dtype)?.components.iter();
        let named = all.filter(|c| names.is_empty() || names.contains(&c.name));
        Some(Need {
            name: "load".into(),
            components: named.cloned().collect(),
            plan: None,
            headroom: self.options.headroom,
            later: Vec::new(),
        })
    }

    fn restore_need(&self, step: Step) -> Option<Need> {
        Some(Need {
            name: self.name_of(step),
            components: self.swap.as_ref()?.begun.as_ref()?.before.clone(),
            plan: None,
            headroom: Bytes::ZERO, // what was there before comes back whatever the new model was to leave free
            later: Vec::new(),
        })
    }

    /// What a stage takes, of all that the job has; `kept` is what is in the store for its item.
    pub(super) fn input(&self, step: Step, kept: &Values) -> Values {
        let own = self.item_values.get(&step.item);
        let takes = self.stage(step).into_iter().flat_map(|stage| &stage.takes);
        let found = takes.filter_map(|value| {
            let name = &value.name;
            let item = own.and_then(|own| own.get(name)).or_else(|| kept.get(name));
            let found = item
                .or_else(|| self.values.get(name))
                .or_else(|| self.brought.get(name));
            Some((name.clone(), found?.clone()))
        });
        found.collect()
    }

    /// The steps behind the one that comes next, that are for an item.
    fn later_of(&self, item: u32) -> impl Iterator<Item = (Step, &StagePlan)> {
        let later = self.steps.iter().skip(self.cursor + 1).copied();
        let of_item = later.filter(move |step| step.item == item);
        of_item.filter_map(|step| Some((step, self.stage(step)?)))
    }

    /// Whether a value that the step that comes next gives belongs in the store: what is decoded next, and what the job
    /// ends with.
    pub(super) fn belongs_in_store(&self, step: Step, name: &str) -> bool {
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

    /// Tells everybody who listens, and remembers it for those who join.
    pub(super) fn emit(&mut self, now: Instant, kind: JobEventKind) {
        let mut event = JobEvent {
            at_ms: now.duration_since(self.accepted).as_millis() as u64,
            kind,
        };
        self.replay.keep(&event);
        if let JobEventKind::Piece { piece, .. } = &mut event.kind {
            piece.data = self.unread.count(std::mem::take(&mut piece.data));
        }
        let id = &self.id;
        self.listeners.retain(|listener, mailbox| {
            let reads = mailbox.push(event.clone());
            if !reads {
                tracing::warn!(job = %id, listener, "a listener does not read its results: it is dropped");
            }
            reads
        });
    }

    /// Another submission of the same job: it is detached if any of them is, and has until the latest deadline.
    pub(super) fn joined_by(&mut self, options: &JobOptions) {
        self.detached |= options.detach;
        let deadlines = self.options.deadline.zip(options.deadline);
        self.options.deadline = deadlines.map(|(earlier, other)| earlier.max(other));
    }

    /// When it must be done. A caller's deadline is no end to a job that goes on without its callers, nor to a swap that
    /// is past its turning point.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.options
            .deadline
            .filter(|_| !self.detached && !self.is_decided())
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.state, State::Running { .. })
    }

    /// Whether it is decided how it ends, and only its worker has to let go.
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
            self.waited += now.duration_since(since);
        }
        self.state = state;
    }

    /// A worker has an order of it.
    pub(super) fn run_on(&mut self, card: usize, now: Instant) {
        self.enter(State::Running { ending: None }, now);
        self.last_card = Some(card);
        self.steps_done = (0, 0);
    }

    /// Goes behind other jobs; one that is there already stays where it is.
    pub(super) fn queue_up(&mut self, now: Instant) {
        if !matches!(self.state, State::Queued { .. } | State::OutOfMemory(_)) {
            self.enter(State::queued(), now);
        }
    }

    /// Whether it may begin again with another version of its model: nothing of its result has been made, and it works on
    /// nothing that belongs to the version that it has.
    pub(super) fn may_begin_again(&self) -> bool {
        let made_nothing =
            self.item_values.is_empty() && self.latents.is_empty() && self.delivered.is_empty();
        !self.reopened && made_nothing && self.input_latent.is_none() && self.swap.is_none()
    }

    /// Begins again with its model as it was opened for this record, which is of the same job.
    pub(super) fn begin_again(&mut self, opened: JobRecord, now: Instant) {
        self.models = opened.models;
        self.plans = opened.plans;
        self.proof = opened.proof;
        self.steps = opened.steps;
        self.reductions = opened.reductions;
        self.values.clear();
        self.go_to(0);
        self.enter(State::queued(), now);
    }

    /// The step that comes next is another one: what was tried for the last is forgotten.
    pub(super) fn go_to(&mut self, cursor: usize) {
        self.cursor = cursor;
        self.attempt = Attempt::default();
    }

    /// The key under which other jobs may reuse a stage's values, on cards of a dtype. `None`: they may not; values of a
    /// stage that runs once per item never are.
    pub(super) fn memo_key(&self, stage: usize, dtype: &str) -> Option<String> {
        let model = &self.models.get(dtype)?.model;
        let identities = |names: &[String]| {
            let components = self.components(names, dtype).into_iter();
            components.map(|component| component.id.0.to_string()).collect()
        };
        identity_of_values(&**model, self.plan(dtype), stage, &identities)
    }

    /// What its latents belong to: the first component that decodes.
    pub(super) fn decoder_id(&self, dtype: &str) -> String {
        let decode = self.plan(dtype).iter().find(|stage| stage.role == Role::Decode);
        let components = decode.map_or(Vec::new(), |stage| self.components(&stage.components, dtype));
        let decoder = components.first();
        decoder
            .map(|component| content_of(&component.id).to_owned())
            .unwrap_or_default()
    }

    /// The number of the step that comes next, from 1, and how many there are that clients are told of.
    pub(super) fn place_of_step(&self) -> (u32, u32) {
        let told = |steps: &[Step]| steps.iter().filter(|step| !step.is_unload()).count() as u32;
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

    /// Whether all of an item has been delivered, in the format that was asked for.
    pub(super) fn check_delivered(&self, step: Step) -> Result<(), Error> {
        let of_item = self.delivered.iter().filter(|((item, _), _)| *item == step.item);
        let tracks: Vec<_> = of_item.map(|(_, delivered)| delivered).collect();
        let asked = self.run().map(|run| &run.request.medium);
        let is_whole = |(format, covered): &&(MediaFormat, Covered)| {
            covered.is_whole(format.units()) && asked.is_some_and(|asked| asked.is_made_as(format))
        };
        if !tracks.is_empty() && tracks.iter().all(is_whole) {
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

/// An identity without its dtype and format: a latent fits the same decoder on every card, however it is held there.
pub(super) fn content_of(id: &ComponentId) -> &str {
    let parts = if id.0.starts_with("path:") {
        id.0.rsplit_once('@')
    } else {
        id.0.split_once(':')
    };
    parts.map_or(&*id.0, |(content, _)| content)
}

/// What a piece of work brings along and keeps in memory.
pub(super) fn input_bytes(work: &JobWork) -> Bytes {
    match work {
        JobWork::Run(run) => Bytes(run.request.input_bytes()),
        JobWork::Load { .. } => Bytes::ZERO,
    }
}
