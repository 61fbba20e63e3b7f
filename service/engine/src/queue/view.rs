//! The state that a decision may read, without a way to change it: orders, places, offers and reports are
//! functions of a [`View`].

use std::collections::BTreeMap;

use model::PreviewNeed;
use residency::{Bytes, Millis, Policy};
use tokio::time::Instant;

use super::Settings;
use super::cards::CardRecord;
use super::claims::Claims;
use super::latents::Latents;
use super::learned::Learned;
use super::memos::Memos;
use super::record::{JobRecord, State};
use super::shares::Shares;
use super::steps::JobStepKind;
use super::unloads::PendingUnload;
use crate::admission::{Admission, choose_rung};
use crate::error::Error;
use crate::job::JobId;
use crate::need::Need;

/// The state as of `now`.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub(super) now: Instant,
    /// The same moment in the unit of patience.
    pub(super) time: Millis,
    pub(super) settings: &'a Settings,
    pub(super) cards: &'a [CardRecord],
    pub(super) jobs: &'a BTreeMap<JobId, JobRecord>,
    pub(super) claims: &'a Claims,
    pub(super) unloads: &'a [PendingUnload],
    pub(super) learned: &'a Learned,
    pub(super) memos: &'a Memos,
    pub(super) latents: &'a Latents,
    pub(super) shares: &'a Shares,
}

impl<'a> View<'a> {
    /// The only card that a job may run on: the card of its swap, or the one that the client prefers, as long as that
    /// exists.
    pub(super) fn only_card(&self, job: &JobRecord) -> Option<usize> {
        if let Some(begun) = job.swap.as_ref().and_then(|swap| swap.card()) {
            return Some(begun);
        }
        let hint = &job.options.card_hint;
        let named = self.cards.iter().position(|card| card.description.id == *hint);
        let card = named.or_else(|| self.card_of_swap(job))?;
        self.cards[card].is_ready().then_some(card)
    }

    /// Whether a job may use a card at all. A job of two cards does all of its work on cards that have another of their kind.
    pub(super) fn may_use(&self, job: &JobRecord, card: usize) -> bool {
        self.only_card(job).is_none_or(|only| only == card)
            && job
                .models
                .contains_key(&self.cards[card].description.compute_dtype)
            && (!job.needs_two_cards() || self.has_companion(card))
    }

    /// The cards that a job could run on, now or once their workers have started.
    pub(super) fn usable_cards(&self, job: &JobRecord) -> Vec<usize> {
        (0..self.cards.len())
            .filter(|&card| self.may_use(job, card))
            .collect()
    }

    /// The first step whose values are not cached; the last of all is run in any case.
    pub(super) fn next_step(&self, job: &JobRecord, dtype: &str) -> usize {
        let last = job.steps.len().saturating_sub(1);
        let mut next = job.cursor;
        while next < last && self.is_cached(job, next, dtype) {
            next += 1;
        }
        next
    }

    /// Whether a step's values are cached, as another job's stage gave them.
    pub(super) fn is_cached(&self, job: &JobRecord, index: usize, dtype: &str) -> bool {
        let Some(JobStepKind::Stage(stage)) = job.steps.get(index).map(|step| step.kind) else {
            return false;
        };
        job.memo_key(stage, dtype)
            .is_some_and(|key| self.memos.contains(&key) && self.may_take_cached_values(job))
    }

    /// A step's need on a card, with all that was learned. None: the step needs no memory. Previews are made only if their
    /// memory is available at once.
    pub(super) fn need_on(&self, job: &JobRecord, index: usize, card: usize) -> Option<Need> {
        let description = &self.cards[card].description;
        let need = job.need(index, &description.compute_dtype)?;
        let mut need = need.on_card(description);
        let open = job.models.get(&description.compute_dtype)?;
        if let Some(plan) = need.plan.as_ref().filter(|plan| plan.preview.is_some()) {
            let plan = plan.clone().with_previews();
            let previewed = Need::of_stage(plan, &open.components, need.later.clone(), need.headroom);
            let mut previewed = previewed.on_card(description);
            self.learned
                .improve(&mut previewed, open.model.family(), description);
            let ledger = self.ledger_for(job, card);
            let now = self.cards[card].ledger_now(self.now);
            let admission = choose_rung(&ledger, &previewed, self.policy(job, card), now);
            if matches!(admission, Admission::Run { .. }) {
                return Some(previewed);
            }
        }
        if let Some(plan) = &mut need.plan {
            plan.preview.take_if(|previews| *previews != PreviewNeed::NOTHING);
        }
        self.learned.improve(&mut need, open.model.family(), description);
        Some(need)
    }

    /// A step's need on a card that makes no previews.
    pub(super) fn need_without_previews(&self, job: &JobRecord, index: usize, card: usize) -> Option<Need> {
        let description = &self.cards[card].description;
        let mut need = job.need(index, &description.compute_dtype)?.on_card(description);
        need.plan.as_mut().and_then(|plan| plan.preview.take());
        let open = job.models.get(&description.compute_dtype)?;
        self.learned.improve(&mut need, open.model.family(), description);
        Some(need)
    }

    /// The eviction policy for a job on a card: the configured one, or else one large component at a time if the
    /// job's model does not fit the card as a whole, and has no blocks that could be streamed instead.
    pub(super) fn policy(&self, job: &JobRecord, card: usize) -> Policy {
        self.settings.policy.unwrap_or_else(|| {
            let card = &self.cards[card];
            let dtype = &card.description.compute_dtype;
            match job.whole_bytes(dtype) > card.ledger.capacity() && !job.is_streamable(dtype) {
                true => Policy::Exclusive,
                false => Policy::Shared,
            }
        })
    }

    /// Bytes of the components that a job still needs and that are not resident on a card.
    pub(super) fn missing_bytes(&self, job: &JobRecord, card: usize) -> Bytes {
        let dtype = &self.cards[card].description.compute_dtype;
        let ledger = &self.cards[card].ledger;
        let next = self.next_step(job, dtype);
        let needs = (next..job.steps.len()).filter_map(|index| job.need(index, dtype));
        let mut components: Vec<_> = needs.flat_map(|need| need.components).collect();
        components.sort_by(|a, b| a.id.cmp(&b.id));
        components.dedup_by(|a, b| a.id == b.id);
        let missing = components.iter().filter(|c| !ledger.is_resident(&c.id));
        missing.map(|c| c.bytes).sum()
    }

    /// Jobs that no worker has an order of.
    pub(super) fn idle_jobs(&self) -> impl Iterator<Item = &'a JobRecord> {
        self.jobs.values().filter(|job| !job.is_running())
    }

    /// Why a job that has not begun is refused: others like it have killed their workers.
    pub(super) fn refusal_after_deaths(&self, job: &JobRecord) -> Option<Error> {
        if job.begun || !self.learned.has_losses() {
            return None;
        }
        let mut steps = job.steps.iter().filter(|step| !step.is_unload());
        steps.find_map(|&step| {
            let shape = job.stage(step).map_or("", |stage| stage.shape.as_str());
            let deaths = self.learned.refuses(&job.entry.key, shape)?;
            Some(Error::WorkerDied {
                card: "every card that tried".to_owned(),
                stage: job.name_of(step).to_string(),
                deaths,
            })
        })
    }

    /// The cards that were asked for (empty: all), as far as a worker is ready there.
    pub(super) fn ready_cards(&self, card: &str) -> Vec<usize> {
        let is_asked_for = |index: &usize| {
            let found = &self.cards[*index];
            found.is_ready() && (card.is_empty() || found.description.id == card)
        };
        (0..self.cards.len()).filter(is_asked_for).collect()
    }

    /// Why none of the cards that were asked for (empty: all) can be used.
    pub(super) fn not_ready(&self, card: &str) -> Error {
        let ids = || self.cards.iter().map(|c| c.description.id.as_str());
        if !card.is_empty() && ids().all(|id| id != card) {
            let there_are = ids().collect::<Vec<_>>().join(", ");
            return Error::Invalid(vec![model::RequestError {
                field: "card".into(),
                problem: format!("is {card:?}; there are {there_are}"),
            }]);
        }
        let states = self
            .cards
            .iter()
            .map(|c| format!("{} is {}", c.description.id, c.state().as_str()));
        Error::CardNotReady(states.collect::<Vec<_>>().join(", "))
    }

    /// Whether a queued job's position is sent to its listeners: not if the job is about to be refused.
    pub(super) fn is_in_line(job: &JobRecord) -> bool {
        matches!(job.state, State::Queued { .. }) && !job.is_near_refusal()
    }
}
