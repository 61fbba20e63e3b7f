//! Which jobs' stages run in one pass of a model: those of jobs whose next stages have equal keys
//! ([`model::SharedPass`]), as many as each of them allows and memory takes. Their models are one base, maybe with other adapters.

use std::collections::BTreeSet;

use model::{MAX_SETS, SharedPass};

use super::record::{JobRecord, State};
use super::view::View;
use crate::admission::{Admission, choose_rung};
use crate::job::JobId;
use crate::need::Need;

/// Whether passes of two jobs are alike: of one base, whatever their adapters are, and of one key.
pub(super) fn are_alike(
    (job, pass): (&JobRecord, &SharedPass),
    (other, of_other): (&JobRecord, &SharedPass),
) -> bool {
    job.entry.is_of_one_base(&other.entry) && pass.key == of_other.key
}

impl View<'_> {
    /// The jobs that share the passes of a job's next stage on a card, the earliest first, and their common need; `None`
    /// if it runs alone.
    pub(super) fn shared_with(&self, job: &JobRecord, card: usize) -> Option<(Vec<JobId>, Need)> {
        let shared = job.shared_pass(job.cursor).filter(|_| !job.attempt.alone)?;
        let mut candidates: Vec<&JobRecord> = self
            .idle_jobs()
            .filter(|other| other.id != job.id && self.can_share(other, job, card))
            .collect();
        candidates.retain(|other| other.begun || self.is_within_its_share(other));
        candidates.sort_unstable_by_key(|other| other.arrival);
        let mut together: Vec<(&JobRecord, &SharedPass)> = Vec::new();
        let mut most = shared.slots as usize;
        for other in candidates {
            let Some(pass) = self.next_shared(other, card) else {
                continue;
            };
            let allows = pass.slots as usize;
            let passes = together.iter().map(|(_, pass)| *pass).chain([shared, pass]);
            let is_allowed = together.len() + 2 <= most.min(allows) && SharedPass::sets(passes) <= MAX_SETS;
            let mut others = together.iter();
            if is_allowed && others.all(|(one, _)| self.are_of_one_base(one, other, card)) {
                most = most.min(allows);
                together.push((other, pass));
            }
        }
        while !together.is_empty() {
            let need = self.need_of_shared(job, card, &together)?;
            let ledger = self.ledger_for(job, card);
            let now = self.cards[card].ledger_now(self.now);
            let admission = choose_rung(&ledger, &need, self.policy(job, card), now);
            if matches!(admission, Admission::Run { .. }) {
                let together = together.iter().map(|(other, _)| other.id.clone());
                return Some((together.collect(), need));
            }
            together.pop();
        }
        None
    }

    /// How the stage that a job would run next on a card shares passes.
    pub(super) fn next_shared<'j>(&self, job: &'j JobRecord, card: usize) -> Option<&'j model::SharedPass> {
        let dtype = &self.cards[card].description.compute_dtype;
        job.shared_pass(self.next_step(job, dtype))
    }

    fn can_share(&self, other: &JobRecord, job: &JobRecord, card: usize) -> bool {
        let key = job.shared_pass(job.cursor).map(|pass| &pass.key);
        matches!(other.state, State::Queued { .. })
            && self.are_of_one_base(other, job, card)
            && other.options.headroom == job.options.headroom
            && !other.attempt.alone
            && !self.waits_for_unload(other)
            && self.may_use(other, card)
            && self.next_shared(other, card).map(|pass| &pass.key) == key
    }

    /// Whether the models of two jobs are one base in one version, so that one model with the adapters of both computes either's stage:
    /// components, and adapters, of one name are the same.
    fn are_of_one_base(&self, one: &JobRecord, other: &JobRecord, card: usize) -> bool {
        let dtype = &self.cards[card].description.compute_dtype;
        let (Some(own), Some(others)) = (one.models.get(dtype), other.models.get(dtype)) else {
            return false;
        };
        let adapters_differ = || {
            let mut pairs = one.entry.adapters.iter().flat_map(|own| {
                let others = other.entry.adapters.iter();
                others.map(move |other| (own, other))
            });
            pairs.any(|(own, other)| own.name == other.name && own != other)
        };
        let components_differ = || {
            let mut own = own.components.iter();
            own.any(|own| {
                let mut others = others.components.iter();
                others.any(|other| other.name == own.name && other.id != own.id)
            })
        };
        one.entry.is_of_one_base(&other.entry) && !adapters_differ() && !components_differ()
    }

    /// The need of a job's next stage together with those of others: the components of all of them, and their activations, no less than
    /// predicted.
    fn need_of_shared(
        &self,
        job: &JobRecord,
        card: usize,
        together: &[(&JobRecord, &SharedPass)],
    ) -> Option<Need> {
        let description = &self.cards[card].description;
        let dtype = &description.compute_dtype;
        let open = job.models.get(dtype)?;
        let mut need = job.need(job.cursor, dtype)?;
        for (other, _) in together {
            need.add_components_of(other.need(self.next_step(other, dtype), dtype)?);
        }
        let passes: Vec<&SharedPass> = together.iter().map(|(_, pass)| *pass).collect();
        let mut plan = need.plan.take()?.shared_with(&passes);
        plan.preview = None;
        need.plan = Some(plan);
        need = need.on_card(description);
        if need.rungs().is_empty() {
            return None;
        }
        let predicted: Vec<_> = need.rungs().iter().map(|rung| rung.scratch).collect();
        self.learned.improve(&mut need, open.model.family(), description);
        // What a round keeps is not in the peak of the next one, and requests with one condition need less than those with several.
        let rungs = need.plan.iter_mut().flat_map(|plan| &mut plan.rungs);
        for (rung, predicted) in rungs.zip(predicted) {
            rung.scratch = rung.scratch.max(predicted);
        }
        Some(need)
    }

    /// The order with joiners first: a job that could join a shared pass after its earlier steps is put before the job of that pass.
    /// That holds only for clients whose share of the cards is not larger than the share of clients that wait.
    pub(super) fn with_joiners_first(&self, order: Vec<JobId>) -> Vec<JobId> {
        let jobs: Vec<&JobRecord> = order.iter().filter_map(|id| self.jobs.get(id)).collect();
        if !jobs.iter().any(|job| self.passes_next(job)) {
            return order;
        }
        let mut placed: BTreeSet<&JobId> = BTreeSet::new();
        let mut changed = Vec::with_capacity(order.len());
        for (place, job) in jobs.iter().enumerate() {
            if placed.contains(&job.id) {
                continue;
            }
            if let Some(pass) = self.any_pass(job).filter(|_| self.passes_next(job)) {
                let has_pass = |other: &JobRecord| {
                    let of = self.any_pass(other);
                    of.is_some_and(|of| are_alike((job, pass), (other, of)))
                };
                let joins = |other: &&&JobRecord| {
                    !placed.contains(&other.id)
                        && has_pass(other)
                        && !self.passes_next(other)
                        && self.is_within_its_share(other)
                };
                let joining = jobs[place + 1..].iter().filter(joins);
                // No more jobs are prepared than can share the pass, as jobs that have begun go before jobs of waiting clients.
                let is_ready = |other: &&&JobRecord| has_pass(other) && self.passes_next(other);
                let ready = jobs.iter().filter(is_ready);
                let free = (pass.slots as usize).saturating_sub(ready.clone().count());
                let mut sets: BTreeSet<&str> = BTreeSet::from([pass.adapters.as_str()]);
                sets.extend(ready.filter_map(|ready| Some(self.any_pass(ready)?.adapters.as_str())));
                let joining = joining.filter(|other| {
                    let other = **other;
                    let set = self.any_pass(other).map_or("", |of| of.adapters.as_str());
                    sets.contains(set) || sets.len() < MAX_SETS && sets.insert(set)
                });
                let joining = joining.take(free);
                let joining: Vec<&JobId> = joining.map(|job| &job.id).collect();
                placed.extend(joining.iter().copied());
                changed.extend(joining.into_iter().cloned());
            }
            placed.insert(&job.id);
            changed.push(job.id.clone());
        }
        changed
    }

    /// Whether a job's next stage shares passes, on cards of the first dtype that it was opened for.
    fn passes_next(&self, job: &JobRecord) -> bool {
        let dtype = job.models.keys().next();
        dtype.is_some_and(|dtype| job.shared_pass(self.next_step(job, dtype)).is_some())
    }

    /// The first pass that a job still shares.
    fn any_pass<'j>(&self, job: &'j JobRecord) -> Option<&'j model::SharedPass> {
        (job.cursor..job.steps.len()).find_map(|index| job.shared_pass(index))
    }

    /// Whether a job may join others ahead of its turn: only if neither its account nor its client has had more card time than
    /// another with a queued job. Jobs that have begun go on, so this bound ends a chain of joining jobs if others wait.
    fn is_within_its_share(&self, job: &JobRecord) -> bool {
        let queued = |other: &&JobRecord| matches!(other.state, State::Queued { .. });
        let mut others = self.idle_jobs().filter(queued);
        others.all(|other| self.lead_ms(job, other) <= 0.0)
    }
}
