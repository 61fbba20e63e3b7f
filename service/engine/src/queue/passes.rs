//! Which jobs' stages run in one pass of a model: those of jobs whose next stages have equal keys
//! ([`model::SharedPass`]), as many as each of them allows and memory takes.

use std::collections::BTreeSet;

use residency::Bytes;

use super::record::{JobRecord, State};
use super::view::View;
use crate::admission::{Admission, choose_rung};
use crate::job::JobId;
use crate::need::Need;

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
        let (mut together, mut scratch) = (Vec::new(), Vec::new());
        let mut most = shared.slots as usize;
        for other in candidates {
            let Some(pass) = self.next_shared(other, card) else {
                continue;
            };
            let allows = pass.slots as usize;
            if together.len() + 2 <= most.min(allows) {
                most = most.min(allows);
                together.push(other.id.clone());
                scratch.push(pass.scratch_each);
            }
        }
        while !together.is_empty() {
            let need = self.need_of_shared(job, card, &scratch)?;
            let ledger = self.ledger_for(job, card);
            let now = self.cards[card].ledger_now(self.now);
            let admission = choose_rung(&ledger, &need, self.policy(job, card), now);
            if matches!(admission, Admission::Run { rung: 0, .. }) {
                return Some((together, need));
            }
            together.pop();
            scratch.pop();
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
            && other.entry.key == job.entry.key
            && other.options.headroom == job.options.headroom
            && !other.attempt.alone
            && !self.waits_for_unload(other)
            && self.may_use(other, card)
            && self.next_shared(other, card).map(|pass| &pass.key) == key
    }

    fn need_of_shared(&self, job: &JobRecord, card: usize, others: &[Bytes]) -> Option<Need> {
        let description = &self.cards[card].description;
        let open = job.models.get(&description.compute_dtype)?;
        let mut need = job.need(job.cursor, &description.compute_dtype)?;
        let mut plan = need.plan.take()?.shared_with(others);
        plan.preview = None;
        plan.rungs.truncate(1);
        need.plan = Some(plan);
        self.learned.improve(&mut need, open.model.family(), description);
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
                    other.entry.key == job.entry.key
                        && self.any_pass(other).is_some_and(|of| of.key == pass.key)
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
                let free = (pass.slots as usize).saturating_sub(jobs.iter().filter(is_ready).count());
                let joining: Vec<&JobId> = joining.take(free).map(|job| &job.id).collect();
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
