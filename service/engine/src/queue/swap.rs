//! Swaps: a model takes another's place, and the other is not forgotten before the new one has proven itself.
//!
//! A swap is a load that names what it replaces. Where both fit, the old entry is held beside the new one; where they do
//! not, it leaves first, its pins and holds notwithstanding, and whoever needs it queues until the swap is over. Then
//! the new one is loaded and runs its smallest request. If that goes well, the old one's pins and holds pass on to it, and
//! what of the old one it does not share is unloaded. If anything goes wrong, what came in for it is unloaded again and
//! what left for it is brought back, before the job ends with the error.
//!
//! All of this is part of the job's own record: when the job is gone, so is everything that it changed for others.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use pipelines::Rung;
use residency::{Bytes, Component, ComponentId, HoldId, Ledger, Millis};
use tokio::time::Instant;

use super::actor::Actor;
use super::cards::Errand;
use super::record::{JobRecord, Phase};
use super::report::{Freed, Kept};
use super::request::OpenModels;
use super::steps::{Step, StepKind};
use super::unload::Leaving;
use crate::admission::{Admission, choose_rung};
use crate::error::Error;
use crate::job::{JobEventKind, JobId, JobWork, StageReport};
use crate::library::Entry;
use crate::messages::{Answer, Command};

/// What a load replaces, and how far that is.
pub(super) struct Swap {
    pub(super) old: Arc<Entry>,
    pub(super) old_models: OpenModels,
    /// Where it goes on; none: it has not begun.
    card: Option<usize>,
    /// The worker that it began on.
    generation: u64,
    /// What the card had of the old entry when it began...
    before: Vec<Component>,
    /// ...and of that what the new one does not share.
    alone: Vec<Component>,
    /// What the card had of the new entry then.
    new_before: BTreeSet<ComponentId>,
    /// Whether the old one has to leave first.
    away: bool,
    /// The worker that was told so.
    told: Option<u64>,
    /// Workers that have not answered an unload, and since when.
    outstanding: usize,
    since: Instant,
    end: End,
}

/// How it ends.
#[derive(Clone)]
enum End {
    /// That is open.
    Open,
    /// The new entry is proven, and the old one leaves.
    Proven,
    /// With this, as soon as the old one is back.
    Failed(Error),
}

impl Swap {
    pub(super) fn new(old: Arc<Entry>, old_models: OpenModels, now: Instant) -> Swap {
        Swap {
            old,
            old_models,
            card: None,
            generation: 0,
            before: Vec::new(),
            alone: Vec::new(),
            new_before: BTreeSet::new(),
            away: false,
            told: None,
            outstanding: 0,
            since: now,
            end: End::Open,
        }
    }

    /// What comes back if it fails.
    pub(super) fn before(&self) -> &[Component] {
        &self.before
    }

    /// The card that it has begun on.
    pub(super) fn card(&self) -> Option<usize> {
        self.card
    }

    /// Whether nothing but the end of the service can stop it: the new one is proven, or the old one comes back.
    pub(super) fn is_decided(&self) -> bool {
        !matches!(self.end, End::Open)
    }

    /// Whether the old entry is off the card, or may be at any moment, in spite of its pins and holds.
    fn is_away_from(&self, card: usize) -> bool {
        self.away && self.card == Some(card) && !matches!(self.end, End::Proven)
    }

    fn names(&self, id: &ComponentId) -> bool {
        self.old_models
            .values()
            .flat_map(|open| &open.components)
            .any(|component| component.id == *id)
    }
}

impl JobRecord {
    /// Whether an entry is the job's own, or the one that it replaces.
    pub(super) fn concerns(&self, key: &str) -> bool {
        self.entry.key == key || self.swap.as_ref().is_some_and(|swap| swap.old.key == key)
    }

    /// Whether a component is of the entry that it replaces.
    pub(super) fn replaces(&self, id: &ComponentId) -> bool {
        self.swap.as_ref().is_some_and(|swap| swap.names(id))
    }

    /// What the old entry has on cards of a dtype, and the new one does not share.
    fn old_alone(&self, dtype: &str) -> impl Iterator<Item = &Component> {
        let old = self
            .swap
            .iter()
            .filter_map(move |swap| swap.old_models.get(dtype));
        let new = self.models.get(dtype).map_or(&[][..], |open| &open.components);
        old.flat_map(|open| &open.components)
            .filter(|component| new.iter().all(|own| own.id != component.id))
    }
}

impl Actor {
    /// The card that a swap is tied to: where it has begun, else where most of the old entry is.
    pub(super) fn card_of_swap(&self, job: &JobRecord) -> Option<usize> {
        let swap = job.swap.as_ref()?;
        if swap.card.is_some() {
            return swap.card;
        }
        let there = |index: usize| -> Bytes {
            let card = &self.cards[index];
            let alone = job.old_alone(&card.description.compute_dtype);
            alone
                .filter(|c| card.ledger.is_resident(&c.id))
                .map(|c| c.bytes)
                .sum()
        };
        let most = (0..self.cards.len()).rev().max_by_key(|&index| there(index))?;
        (there(most) > Bytes::ZERO).then_some(most)
    }

    /// Whether a job has to wait for a swap on a card: it needs what had to leave, or is a swap of the same models.
    pub(super) fn is_behind_a_swap(&self, job: &JobRecord, index: usize) -> bool {
        let dtype = &self.cards[index].description.compute_dtype;
        let needs = |component: &Component| {
            let own = job.models.get(dtype).map_or(&[][..], |open| &open.components);
            own.iter().any(|own| own.id == component.id)
        };
        let begun = |job: &JobRecord| job.swap.as_ref().is_some_and(|swap| swap.card.is_some());
        self.jobs
            .values()
            .filter(|other| other.id != job.id)
            .any(|other| {
                let Some(swap) = &other.swap else { return false };
                let same = job.concerns(&other.entry.key) || job.concerns(&swap.old.key);
                (swap.is_away_from(index) && swap.alone.iter().any(needs))
                    || (job.swap.is_some() && !begun(job) && begun(other) && same)
            })
    }

    /// A card's ledger as a job's plan may see it: what a swap replaces may leave, whoever keeps it.
    pub(super) fn ledger_for(&self, job: &JobRecord, index: usize) -> Cow<'_, Ledger> {
        let card = &self.cards[index];
        let ledger = Cow::Borrowed(&*card.ledger);
        let Some(swap) = job.swap.as_ref().filter(|swap| !swap.is_decided()) else {
            return ledger;
        };
        let mut ledger = ledger.into_owned();
        for component in job.old_alone(&card.description.compute_dtype) {
            if !self.claims.is_pinned_by_another(&swap.old.key, &component.id) {
                ledger.unpin(&component.id);
            }
        }
        for hold in self.claims.holds_of(&swap.old.key) {
            ledger.release_hold(&HoldId::new(hold));
        }
        ledger.release_hold(&HoldId::new(hold_of(&job.id)));
        Cow::Owned(ledger)
    }

    /// Entries whose pins and holds do not count on a card for now, and what is held there instead.
    pub(super) fn swaps_on(&self, index: usize) -> (BTreeSet<&str>, Vec<(String, Vec<ComponentId>)>) {
        let (mut away, mut beside) = (BTreeSet::new(), Vec::new());
        for job in self.jobs.values() {
            let Some(swap) = job.swap.as_ref().filter(|swap| swap.card == Some(index)) else {
                continue;
            };
            if swap.is_away_from(index) {
                away.insert(&*swap.old.key);
            } else if !matches!(swap.end, End::Proven) {
                beside.push((hold_of(&job.id), ids(&swap.alone)));
            }
        }
        (away, beside)
    }

    /// Before a step of a swap: begins it, and has the old entry leave where both do not fit. None: the step comes
    /// when that is done.
    pub(super) fn make_way(&mut self, mut job: JobRecord, index: usize, now: Instant) -> Option<JobRecord> {
        let dtype = self.cards[index].description.compute_dtype.clone();
        if job.swap.as_ref().is_none_or(|swap| swap.is_decided()) {
            return Some(job);
        }
        let ledger = self.cards[index].ledger.clone();
        if job.swap.as_ref().is_some_and(|swap| swap.card.is_none()) {
            let resident = |c: &&Component| ledger.resident(&c.id).is_some();
            let alone = job.old_alone(&dtype).filter(resident).cloned().collect();
            let old = job.swap.iter().filter_map(|swap| swap.old_models.get(&dtype));
            let old = old.flat_map(|open| &open.components);
            let before = old.filter(resident).cloned().collect();
            let own = job.models.get(&dtype).map_or(&[][..], |open| &open.components);
            let new_before = own.iter().filter(resident).map(|c| c.id.clone()).collect();
            if let Some(swap) = &mut job.swap {
                (swap.card, swap.before, swap.alone) = (Some(index), before, alone);
                swap.new_before = new_before;
                swap.generation = self.cards[index].generation;
            }
            job.begun = true; // it goes before those that have not begun
        }
        let fits = self.fits_beside(&job, index, now);
        let generation = self.cards[index].generation;
        let swap = job.swap.as_mut()?;
        swap.away |= !fits;
        let mut leave: Vec<Component> = Vec::new();
        if swap.away && swap.told != Some(generation) {
            let there = swap.alone.iter().filter(|c| ledger.resident(&c.id).is_some());
            leave.extend(there.cloned());
            swap.told = Some(generation);
        }
        let id = job.id.clone();
        if leave.is_empty() {
            self.jobs.insert(id.clone(), job);
            self.stand(index, false);
            return self.jobs.remove(&id);
        }
        tracing::info!(job = %id, card = %self.cards[index].description.id, "both do not fit: the old model leaves first");
        job.last_card = Some(index);
        self.send_away(job, vec![(index, leave)], now);
        None
    }

    /// Whether the whole of the new entry and the proof's largest stage fit beside what is left of the old one.
    fn fits_beside(&self, job: &JobRecord, index: usize, now: Instant) -> bool {
        let Some(swap) = &job.swap else { return true };
        let card = &self.cards[index];
        let Some(open) = job.models.get(&card.description.compute_dtype) else {
            return true;
        };
        let needs = (0..job.steps.len()).filter_map(|step| self.need_on(job, step, index));
        let scratch = needs
            .map(|need| need.least_scratch())
            .max()
            .unwrap_or(Bytes::ZERO);
        let proof = [Rung {
            label: String::new(),
            scratch,
            approximate: false,
        }];
        let mut ledger = (*card.ledger).clone();
        ledger.hold(HoldId::new(hold_of(&job.id)), ids(&swap.alone), Millis(u64::MAX));
        let (policy, time) = (self.settings.policy, card.ledger_now(now));
        let admission = choose_rung(&ledger, &open.components, &proof, policy, time);
        matches!(admission, Admission::Run { .. })
    }

    /// Whether a job may take values that other jobs' stages gave. A proof may where the components of those stages stood on
    /// the card before the swap began, and stand there still: what was made with their identities is their own work. What
    /// came in for the swap has to prove itself.
    pub(super) fn may_take_known_values(&self, job: &JobRecord) -> bool {
        if !job.is_load() {
            return true;
        }
        let begun = job.swap.as_ref().and_then(|swap| Some((swap, swap.card?)));
        let Some((swap, card)) = begun.map(|(swap, index)| (swap, &self.cards[index])) else {
            return false;
        };
        let dtype = &card.description.compute_dtype;
        let kept = job.plan(dtype).iter().filter(|stage| stage.memo.is_some());
        let mut components = kept.flat_map(|stage| job.components(&stage.components, dtype));
        card.generation == swap.generation
            && components.all(|c| swap.new_before.contains(&c.id) && card.ledger.is_resident(&c.id))
    }

    /// A worker says that memory is short: the old entry does not stay beside the new one any longer.
    pub(super) fn gives_way(&mut self, job: &mut JobRecord) -> bool {
        let Some(swap) = job.swap.as_mut().filter(|swap| !swap.is_decided()) else {
            return false;
        };
        !std::mem::replace(&mut swap.away, true) && !swap.alone.is_empty()
    }

    /// Has components leave for a job, which goes on when they have.
    fn send_away(&mut self, mut job: JobRecord, leave: Vec<(usize, Vec<Component>)>, now: Instant) {
        let id = job.id.clone();
        job.enter(Phase::Running, now);
        job.keeps = None;
        if let Some(swap) = &mut job.swap {
            (swap.outstanding, swap.since) = (leave.len(), now);
        }
        for (index, components) in &leave {
            let card = &self.cards[*index].description.id;
            for component in components {
                let (component, card) = (component.clone(), card.clone());
                job.emit(now, JobEventKind::Evicting { component, card });
            }
        }
        self.jobs.insert(id.clone(), job);
        for (index, components) in leave {
            self.stand(index, false);
            let errand = self.number();
            let components = ids(&components);
            let command = Command::Unload {
                id: errand,
                components: components.clone(),
            };
            let waiting = Errand::Swap {
                job: id.clone(),
                components,
            };
            self.cards[index].errand(errand, waiting, command, now);
        }
        self.dirty = true;
    }

    /// A worker has unloaded what a swap had it unload.
    pub(super) fn sent_away(&mut self, id: &JobId, index: usize, answer: Answer, now: Instant) {
        let Some(mut job) = self.jobs.remove(id) else {
            return; // the service ends
        };
        let card = self.cards[index].description.id.clone();
        let Some(swap) = &mut job.swap else { return };
        swap.outstanding = swap.outstanding.saturating_sub(1);
        let (is_proven, took) = (matches!(swap.end, End::Proven), now.duration_since(swap.since));
        match answer {
            Answer::Unloaded { freed, kept, .. } if is_proven => {
                job.report
                    .freed
                    .extend(freed.into_iter().map(|(component, unloaded)| Freed {
                        component,
                        card: card.clone(),
                        booked: unloaded.booked,
                        freed: unloaded.freed,
                    }));
                job.report
                    .kept
                    .extend(kept.into_iter().map(|(component, reason)| Kept {
                        component,
                        card: card.clone(),
                        reason,
                    }));
            }
            Answer::Unloaded { .. } => {}
            Answer::Trimmed(_) | Answer::Failed(_) => {
                tracing::warn!(job = %id, %card, ?answer, "a swap could not unload");
            }
        }
        if swap.outstanding > 0 {
            self.jobs.insert(id.clone(), job);
            return;
        }
        gpu::Timeline::tell("swap", "unload, there and back", took);
        job.report.stages.push(StageReport {
            name: "unload".into(),
            moves: took,
            card,
            ..StageReport::default()
        });
        job.enter(Phase::Queued, now);
        let ending = job.ending.take();
        let end = job.swap.as_ref().map(|swap| swap.end.clone());
        match (end, ending) {
            (Some(End::Proven), _) => self.end(job, Ok(()), now),
            (_, Some(ending)) => self.end(job, Err(ending), now),
            (Some(End::Failed(_)), None) => self.load_back(job, now),
            (_, None) => {
                job.keeps = Some(index);
                self.jobs.insert(id.clone(), job);
            }
        }
    }

    /// At the end of a job: what a swap owes to its old entry. None: the job goes on until that is done.
    pub(super) fn see_swap_through(
        &mut self,
        mut job: JobRecord,
        result: Result<(), Error>,
        now: Instant,
    ) -> Option<(JobRecord, Result<(), Error>)> {
        let Some(swap) = &mut job.swap else {
            return Some((job, result));
        };
        match (&swap.end, result) {
            (End::Proven, result) => Some((job, result)),
            (End::Failed(error), result) => {
                if let Err(problem) = result {
                    tracing::warn!(job = %job.id, old = swap.old.key, %problem, "the old model could not be brought back");
                }
                let error = error.clone();
                Some((job, Err(error)))
            }
            (End::Open, Err(error)) if swap.card.is_none() || error == Error::ShuttingDown => {
                Some((job, Err(error)))
            }
            (End::Open, Err(error)) => {
                swap.end = End::Failed(error);
                self.undo(job, now);
                None
            }
            (End::Open, Ok(())) => {
                swap.end = End::Proven;
                self.let_go_of_old(job, now)
            }
        }
    }

    /// The new entry is proven: it takes over what the old one was kept for, and what it does not share leaves.
    fn let_go_of_old(&mut self, mut job: JobRecord, now: Instant) -> Option<(JobRecord, Result<(), Error>)> {
        let swap = job.swap.as_ref()?;
        let old = swap.old.clone();
        self.claims.pass_on(&old.key, &job.entry.key);
        let mut leave = Vec::new();
        for index in 0..self.cards.len() {
            let card = &self.cards[index];
            let dtype = &card.description.compute_dtype;
            let resident = |c: &&Component| card.ledger.resident(&c.id).is_some();
            let there: Vec<Component> = job.old_alone(dtype).filter(resident).cloned().collect();
            let components = swap
                .old_models
                .get(dtype)
                .map_or(&[][..], |open| &open.components);
            let leaving = Leaving::Entry {
                key: &old.key,
                components,
            };
            let (ids, kept) = self.who_may_leave(&leaving, there.clone(), index);
            job.report.kept.extend(kept);
            let leaves: Vec<Component> = there.into_iter().filter(|c| ids.contains(&c.id)).collect();
            if !leaves.is_empty() && card.is_ready() {
                leave.push((index, leaves));
            }
        }
        if leave.is_empty() {
            return Some((job, Ok(())));
        }
        self.send_away(job, leave, now);
        self.claims_changed(now);
        None
    }

    /// It failed: what came in for the new entry leaves, then the old one comes back.
    fn undo(&mut self, mut job: JobRecord, now: Instant) {
        let Some((swap, index)) = job.swap.as_ref().and_then(|swap| Some((swap, swap.card?))) else {
            return self.end(
                job,
                Err(Error::Internal("a swap failed that had not begun".into())),
                now,
            );
        };
        let card = &self.cards[index];
        let own = job.models.get(&card.description.compute_dtype);
        let own = own.map_or(&[][..], |open| &open.components);
        let came: Vec<Component> = own
            .iter()
            .filter(|c| card.ledger.resident(&c.id).is_some())
            .filter(|c| !swap.new_before.contains(&c.id) && !swap.names(&c.id))
            .cloned()
            .collect();
        let is_ready = card.is_ready();
        if let End::Failed(error) = &swap.end
            && self.displaced(&job).next().is_some()
        {
            let (new, old) = (&job.entry.key, &swap.old.key);
            let message = format!("{new} did not prove itself ({error}); {old} is brought back");
            let reason = "RESTORING".to_owned();
            let stage = "restore".into();
            tracing::warn!(job = %job.id, message, "a swap is undone");
            job.emit(
                now,
                JobEventKind::Retrying {
                    reason,
                    message,
                    stage,
                },
            );
        }
        (job.ending, job.out_of_memory) = (None, None); // the swap knows what it ends with
        if came.is_empty() || !is_ready {
            return self.load_back(job, now);
        }
        self.send_away(job, vec![(index, came)], now);
    }

    /// What a swap's card had of the old entry and has no more.
    fn displaced<'a>(&'a self, job: &'a JobRecord) -> impl Iterator<Item = &'a Component> {
        let swap = job.swap.iter().filter_map(|swap| Some((swap, swap.card?)));
        swap.flat_map(|(swap, index)| {
            let ledger = &self.cards[index].ledger;
            swap.before.iter().filter(move |c| !ledger.is_resident(&c.id))
        })
    }

    /// Brings back what has left, as the job's last step.
    fn load_back(&mut self, mut job: JobRecord, now: Instant) {
        if self.displaced(&job).next().is_none() {
            return self.end(job, Ok(()), now);
        }
        job.steps.push(Step {
            kind: StepKind::Restore,
            item: 0,
        });
        job.cursor = job.steps.len() - 1;
        job.keeps = job.swap.as_ref().and_then(|swap| swap.card);
        (job.deaths, job.low_memory, job.patience) = (0, false, None);
        job.refusals.clear();
        job.never_on.clear();
        job.enter(Phase::Queued, now);
        self.jobs.insert(job.id.clone(), job);
        self.replan = true;
    }
}

impl JobRecord {
    /// Whether what it generates is for the proof alone.
    pub(super) fn is_load(&self) -> bool {
        matches!(self.work, JobWork::Load { .. })
    }
}

fn ids(components: &[Component]) -> Vec<ComponentId> {
    components.iter().map(|c| c.id.clone()).collect()
}

/// What keeps the old entry while it stands beside the new one.
fn hold_of(job: &JobId) -> String {
    format!("swap of {job}")
}
