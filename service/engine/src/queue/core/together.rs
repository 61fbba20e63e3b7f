//! Stages that two cards run together: both orders, what they offer each other, and their ends. The job goes on by the end of the
//! first part alone. When that has ended, the second is stopped; when the second ends and has not completed, the first is stopped, and
//! the stage is run again.

use model::MAX_CARDS;
use residency::Policy;
use tokio::time::Instant;

use super::Core;
use crate::error::Error;
use crate::job::{JobEventKind, JobId};
use crate::messages::{Failure, ModelLocation, Order, Outcome, Ticket, Together, Work};
use crate::need::Need;
use crate::queue::cards::{Death, Fault, InFlight, Joint};
use crate::queue::placing::Companion;
use crate::queue::record::JobRecord;

/// What the order of a second part is made of.
pub(super) struct SecondPart {
    companion: Companion,
    entry_key: String,
    model: ModelLocation,
    need: Need,
    work: Work,
    policy: Policy,
    expected_ms: f64,
}

impl Core {
    /// The second part of a job's next step, on another card. It makes no previews: those of the first part are shown.
    pub(super) fn second_part(
        &self,
        job: &JobRecord,
        companion: Companion,
        now: Instant,
    ) -> Result<SecondPart, Error> {
        let (view, card) = (self.view(now), companion.card);
        let none = || Error::Internal("a job was started on a second card that has nothing to do".into());
        let step = job.step().ok_or_else(none)?;
        let need = view
            .need_without_previews(job, job.cursor, card)
            .ok_or_else(none)?;
        Ok(SecondPart {
            companion,
            entry_key: job.entry.key.clone(),
            model: self.location(&job.entry, card),
            work: self.work_of(job, step, &need)?,
            need,
            policy: view.policy(job, card),
            expected_ms: view.expected_step_ms(job, job.cursor, Some(card)).0,
        })
    }

    /// Sends both parts of a stage, each to its card.
    pub(super) fn start_both(&mut self, index: usize, first: (Order, InFlight), second: SecondPart) {
        let (mut order, in_flight) = first;
        let ticket = self.ticket();
        let SecondPart { companion, need, .. } = second;
        let of = MAX_CARDS;
        let other = Order {
            ticket,
            job: order.job.clone(),
            model: second.model,
            work: second.work,
            policy: second.policy,
            allow_low_memory: companion.low_memory,
            headroom: need.headroom,
            components: need.model.clone(),
            sharing: Vec::new(),
            together: Some(Together { part: 1, of }),
            is_ahead: false,
        };
        order.together = Some(Together { part: 0, of });
        let (job, sent) = (in_flight.job.clone(), in_flight.sent);
        let assisting = InFlight::new(ticket, job, &second.entry_key, need, second.expected_ms, sent)
            .joint_with(Joint::new(false, (index, order.ticket)));
        let leading = in_flight.joint_with(Joint::new(true, (companion.card, ticket)));
        self.cards[index].order(order, leading);
        self.cards[companion.card].order(other, assisting);
    }

    /// A part of a stage offers the other one something.
    pub(super) fn offered(&mut self, index: usize, ticket: Ticket, offer: bytes::Bytes, now: Instant) {
        let Some(running) = self.cards[index].running(ticket) else {
            return;
        };
        running.has_begun = true;
        let Some((card, other)) = running.offers(now) else {
            return;
        };
        let Some(card) = self.cards.get_mut(card) else {
            return;
        };
        if card.running(other).is_some() {
            return card.pass_offer(other, offer, now);
        }
        // Nobody answers any more: it would wait for ever.
        let fault = Fault::Failed {
            card: card.description.id.clone(),
            error: Error::Internal(
                "a part of a stage had ended when the other offered it something".to_owned(),
            ),
        };
        self.break_off((index, ticket), fault, now);
    }

    /// The order of a first part has ended, in whatever way: the second is not needed any more. Its card time until now is charged
    /// with that of the first.
    pub(super) fn end_second_part(&mut self, first: &InFlight, is_charged: bool, now: Instant) {
        let Some((card, ticket)) = first.second_part() else {
            return;
        };
        let Some(running) = self.cards.get_mut(card).and_then(|card| card.running(ticket)) else {
            return;
        };
        let since = running.sent;
        if let Some(joint) = running.joint.as_mut() {
            joint.is_charged = true;
        }
        if is_charged {
            self.charge(first.job.as_ref(), since, now);
        }
        self.cards[card].cancel_part(ticket, now);
    }

    /// The order of a second part has ended.
    pub(super) fn second_part_ended(
        &mut self,
        index: usize,
        running: &InFlight,
        outcome: Outcome,
        now: Instant,
    ) {
        let (Some(id), Some(joint)) = (&running.job, &running.joint) else {
            return;
        };
        if !joint.is_charged && !matches!(outcome, Outcome::Wait(_) | Outcome::Never { .. }) {
            self.charge(Some(id), running.sent, now);
        }
        if let Outcome::Completed(completed) = &outcome
            && let Some(plan) = &running.need.plan
        {
            let card = &self.cards[index].description;
            let job = self.jobs.get(id);
            let open = job.and_then(|job| Some((job, job.models.get(&card.compute_dtype)?)));
            if let Some((job, open)) = open {
                let key = (
                    job.entry.key.clone(),
                    running.need.name.clone(),
                    plan.shape.clone(),
                );
                let family = open.model.family();
                self.learned
                    .stage_completed(key, family, &running.need, (index, card), completed);
            }
        }
        let (card, ticket) = joint.other;
        let Some(first) = self.cards.get_mut(card).and_then(|card| card.running(ticket)) else {
            return; // it has ended before
        };
        let is_needed = first.waits_for_offer();
        let on = self.id_of_card(index);
        let fault = match outcome {
            Outcome::Completed(_) if !is_needed => return,
            Outcome::Completed(_) => Fault::Failed {
                card: on,
                error: Error::Internal("a part of a stage ended while the other waited for it".to_owned()),
            },
            Outcome::Wait(shortage) => {
                self.refused(id, index, shortage, now);
                Fault::NotBegun
            }
            Outcome::Never { .. } => {
                if let Some(job) = self.jobs.get_mut(id) {
                    job.attempt.never_on.insert(index);
                }
                Fault::NotBegun
            }
            Outcome::Cancelled => Fault::Failed {
                card: on,
                error: Error::Internal("the worker cancelled a stage without a request".to_owned()),
            },
            Outcome::Failed(Failure::Replaced { message }) => Fault::Replaced { message },
            Outcome::Failed(failure) => Fault::Failed {
                card: on,
                error: self.failed(id, index, running, failure),
            },
        };
        self.break_off((card, ticket), fault, now);
    }

    /// The worker of a second part has died.
    pub(super) fn second_part_lost(&mut self, running: &InFlight, death: Death, now: Instant) {
        let Some(joint) = &running.joint else { return };
        if death.has_begun && !joint.is_charged {
            self.charge(running.job.as_ref(), running.sent, now);
        }
        self.break_off(joint.other, Fault::Died(death), now);
    }

    /// Stops the first part of a stage whose second one has ended: when it has stopped, the stage is run again.
    fn break_off(&mut self, (card, ticket): (usize, Ticket), fault: Fault, now: Instant) {
        let Some(card) = self.cards.get_mut(card) else {
            return;
        };
        if let Some(joint) = card.running(ticket).and_then(|first| first.joint.as_mut()) {
            joint.fault.get_or_insert(fault);
        }
        card.cancel_part(ticket, now);
    }

    /// Why the stage of a first part that has ended is to be run again, if it is: the second part was lost to it. On one card a stage
    /// that runs out of memory is tried once more by its worker; on two that is done here.
    pub(super) fn fault_of(
        &mut self,
        id: &JobId,
        index: usize,
        running: &mut InFlight,
        outcome: &Outcome,
    ) -> Option<Fault> {
        if matches!(
            outcome,
            Outcome::Completed(_) | Outcome::Wait(_) | Outcome::Never { .. }
        ) {
            return None; // its own answer decides
        }
        if let Some(fault) = running.joint.as_mut()?.fault.take() {
            return Some(fault);
        }
        match outcome {
            Outcome::Failed(failure @ Failure::OutOfMemory { .. }) => Some(Fault::Failed {
                card: self.id_of_card(index),
                error: self.failed(id, index, running, failure.clone()),
            }),
            _ => None,
        }
    }

    /// Both parts of a job's stage have stopped, or will: it is run again, unless that was tried before.
    pub(super) fn run_parts_again(&mut self, id: &JobId, running: &InFlight, fault: Fault, now: Instant) {
        let (card, error) = match fault {
            Fault::NotBegun => return, // what its card answered decides when
            Fault::Died(death) => return self.after_death(id, running, death, now),
            Fault::Replaced { message } => {
                if !self.reopen(id, &message, now) {
                    self.fail(id, Error::ModelChanged(message), now);
                }
                return;
            }
            Fault::Failed { card, error } => (card, error),
        };
        let Some(job) = self.jobs.get_mut(id) else { return };
        job.attempt.deaths += 1;
        if job.attempt.deaths > 1 {
            return self.fail_of(id, error, now);
        }
        let stage = running.need.name.clone();
        job.begun = true; // it goes before those that have not begun
        let reason = match error {
            Error::OutOfMemory(_) => "OUT_OF_MEMORY",
            _ => "PART_FAILED",
        };
        let message = format!("{stage} failed on {card}, one of its two cards ({error}); it starts again");
        tracing::warn!(job = %id, message, "a stage on two cards starts again");
        job.emit(
            now,
            JobEventKind::Retrying {
                reason: reason.into(),
                message,
                stage,
            },
        );
    }

    fn id_of_card(&self, index: usize) -> String {
        self.cards[index].description.id.clone()
    }

    /// Charges the card time of a second part to its job's account.
    fn charge(&mut self, id: Option<&JobId>, since: Instant, now: Instant) {
        if let Some(job) = id.and_then(|id| self.jobs.get(id)) {
            let card_ms = now.duration_since(since).as_secs_f64() * 1000.0;
            self.shares.charge(&job.options, card_ms);
        }
    }
}
