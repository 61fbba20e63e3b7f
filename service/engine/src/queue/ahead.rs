//! Which order is sent to a worker that still has another. Between the end of an order and the next one the answer goes to the
//! supervisor, and the order to the worker: some milliseconds in which a card computes nothing. So the worker of jobs in rounds, whose
//! orders are as short, is sent its next order before the last has ended.
//!
//! It is an order that the queue would send next in any case, as far as it knows: nobody else's turn is taken, and only the choice is
//! made earlier by the time of one short order. The worker plans it again when it begins it, like any other.

use super::cards::InFlight;
use super::passes::are_alike;
use super::record::{JobRecord, State};
use super::steps::JobStepKind;
use super::view::View;
use crate::admission::{Admission, choose_rung};
use crate::job::JobId;

/// Longest expected time of both orders, in milliseconds: the gap after a longer one is a small part of it, and what arrives
/// meanwhile would wait for it.
const LONGEST_MS: f64 = 50.0;

impl View<'_> {
    /// The job whose turn is next on a card whose worker has an order, and the job whose pass it lets go first, if any: the next
    /// stage of the latter, else of the former, can be sent to the worker already.
    pub(super) fn next_ahead(&self, card: usize) -> Option<(JobId, Option<JobId>)> {
        let running = self.cards[card].takes_ahead()?;
        if running.expected_ms > LONGEST_MS || !self.gives_up_card(running, card) {
            return None;
        }
        // Jobs in rounds that wait for those in flight have no turn now. Any other job has one, and is not overtaken.
        let order = self.fair_order();
        let mut jobs = order.iter().map_while(|id| {
            let job = self.jobs.get(id)?;
            job.is_in_rounds().then_some(job)
        });
        let job = jobs.find(|job| !self.joins_running(job, card))?;
        let pass = self.pass_before(&job.id, card);
        let sent = match &pass {
            Some(pass) => self.jobs.get(pass)?,
            None => job,
        };
        self.can_go_ahead(sent, card, running)
            .then(|| (job.id.clone(), pass))
    }

    /// The job of a full pass, that goes before the next stage of a job that has left such passes: then that stage can be sent
    /// while the pass runs, and the card waits for neither. A job lets one pass go first, and only a short one.
    pub(super) fn pass_before(&self, id: &JobId, card: usize) -> Option<JobId> {
        let job = self.jobs.get(id).filter(|job| !job.attempt.yielded)?;
        let left = job.cursor.checked_sub(1).and_then(|last| job.shared_pass(last))?;
        if job.shared_pass(job.cursor).is_some() || !self.is_short(job, job.cursor, card) {
            return None;
        }
        let can_lead = |other: &&JobRecord| {
            other.begun
                && matches!(other.state, State::Queued { .. })
                && !other.attempt.alone
                && other
                    .shared_pass(other.cursor)
                    .is_some_and(|pass| are_alike((job, left), (other, pass)))
                && self.may_use(other, card)
                && !self.joins_running(other, card)
        };
        let lead = self
            .idle_jobs()
            .filter(can_lead)
            .min_by_key(|other| other.arrival)?;
        if !self.is_short(lead, lead.cursor, card) {
            return None;
        }
        let (sharing, _) = self.shared_with(lead, card)?;
        (sharing.len() + 1 >= left.slots as usize).then(|| lead.id.clone())
    }

    /// Whether the job of an order does not go on with the card when the order ends: it ends too, or passes are between.
    fn gives_up_card(&self, running: &InFlight, card: usize) -> bool {
        let died = |job: &JobRecord| job.attempt.deaths + job.attempt.deaths_before > 0;
        // Whose death it was would not be known of two orders.
        let mut jobs = running.all_jobs().filter_map(|id| self.jobs.get(id));
        if jobs.any(died) {
            return false;
        }
        let job = running.job.as_ref().and_then(|id| self.jobs.get(id));
        job.filter(|job| self.may_use(job, card) && job.is_in_rounds())
            .is_some_and(|job| {
                let (now, next) = (job.cursor, job.cursor + 1);
                next >= job.steps.len() || job.shared_pass(now).is_some() || job.shared_pass(next).is_some()
            })
    }

    /// Whether a job's next pass is one that jobs of the order in flight will share: it waits for them.
    fn joins_running(&self, job: &JobRecord, card: usize) -> bool {
        let Some(pass) = self.next_shared(job, card) else {
            return false;
        };
        let running = self.cards[card].in_flight.iter();
        let mut running = running
            .flat_map(InFlight::all_jobs)
            .filter_map(|id| self.jobs.get(id));
        running.any(|other| {
            let next = other.shared_pass(other.cursor + 1);
            !other.is_ending() && next.is_some_and(|next| are_alike((job, pass), (other, next)))
        })
    }

    /// Whether a step is known to take a short time on a card.
    fn is_short(&self, job: &JobRecord, step: usize, card: usize) -> bool {
        let (ms, is_known) = self.expected_step_ms(job, step, Some(card));
        is_known && ms <= LONGEST_MS
    }

    /// Whether a job's next stage would begin at once after an order: it is short and fits beside it, its values are not being made,
    /// and no attempt at it has failed. It is of the same model, whose files the worker has opened: for those of another it might have
    /// to be started again.
    fn can_go_ahead(&self, job: &JobRecord, card: usize, running: &InFlight) -> bool {
        let dtype = &self.cards[card].description.compute_dtype;
        let attempt = &job.attempt;
        let is_first_attempt = attempt.refusals.is_empty()
            && attempt.never_on.is_empty()
            && attempt.deaths + attempt.deaths_before == 0
            && !attempt.low_memory
            && !attempt.alone;
        let is_queued = matches!(job.state, State::Queued { .. });
        let other = running.job.as_ref().and_then(|id| self.jobs.get(id));
        if !is_first_attempt
            || !is_queued
            || other.is_none_or(|other| other.entry.key != job.entry.key)
            || !self.may_use(job, card)
            || self.waits_for_unload(job)
            || self.refusal_after_deaths(job).is_some()
        {
            return false;
        }
        let next = self.next_step(job, dtype);
        if !self.is_short(job, next, card) || self.is_made_by(running, job, next, dtype) {
            return false;
        }
        let Some(need) = self.need_on(job, next, card) else {
            return false;
        };
        let ledger = self.ledger_for(job, card);
        let now = self.cards[card].ledger_now(self.now);
        let admission = choose_rung(&ledger, &need, self.policy(job, card), now);
        matches!(admission, Admission::Run { rung: 0, moves } if moves.is_empty())
    }

    /// Whether an order makes the values of a job's step for the cache.
    fn is_made_by(&self, running: &InFlight, job: &JobRecord, step: usize, dtype: &str) -> bool {
        let key = |job: &JobRecord, step: usize| match job.steps.get(step)?.kind {
            JobStepKind::Stage(stage) => job.memo_key(stage, dtype),
            JobStepKind::Load(_) | JobStepKind::Unload(_) => None,
        };
        let other = running.job.as_ref().and_then(|id| self.jobs.get(id));
        let made = other.and_then(|other| key(other, other.cursor));
        made.is_some() && made == key(job, step)
    }
}
