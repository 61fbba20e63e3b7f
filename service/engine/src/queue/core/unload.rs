//! Unloads entries from cards: on request, after the jobs that use them, or when they have been unused for long.

use residency::Bytes;
use tokio::time::Instant;

use super::Core;
use crate::error::{CancelledBy, Error};
use crate::library::Entry;
use crate::messages::{Answer, Command};
use crate::queue::cards::PendingRequest;
use crate::queue::report::UnloadReport;
use crate::queue::request::{OpenModels, Reply};
use crate::queue::unloads::{EntryToUnload, PendingTrim, PendingUnload};

impl Core {
    /// A known entry by its key, with its components at its last use.
    pub(in crate::queue) fn known_to_unload(&self, key: &str) -> Option<EntryToUnload> {
        let known = self.claims.get(key)?;
        Some(EntryToUnload {
            key: key.to_owned(),
            components: known.components_by_dtype().clone(),
        })
    }

    /// An entry with its components, as it was opened.
    pub(in crate::queue) fn opened_to_unload(&mut self, entry: &Entry, models: &OpenModels) -> EntryToUnload {
        let refreshed = self.refreshed(entry, models).into_iter();
        EntryToUnload {
            key: entry.key.clone(),
            components: refreshed.map(|(dtype, open)| (dtype, open.components)).collect(),
        }
    }

    pub(in crate::queue) fn unload(
        &mut self,
        entry: Option<EntryToUnload>,
        forced_by: Option<String>,
        reply: Reply<Result<UnloadReport, Error>>,
        now: Instant,
    ) {
        self.learned
            .forget_losses(entry.as_ref().map(|entry| entry.key.as_str()));
        let mut pending = PendingUnload::new(self.number(), entry, reply);
        let users = self.jobs.values().filter(|job| pending.concerns(job));
        pending.waits_for = users.map(|job| job.id.clone()).collect();
        if forced_by.is_some() {
            pending.report.cancelled_jobs = pending.waits_for.iter().cloned().collect();
        }
        let cancelled = pending.report.cancelled_jobs.clone();
        let by = CancelledBy::Unload {
            entry: pending.entry.as_ref().map(|entry| entry.key.clone()),
            client: forced_by.unwrap_or_default(),
        };
        self.unloads.push(pending);
        for id in cancelled {
            self.stop(&id, Error::Cancelled(by.clone()), now);
        }
        self.replan = true;
    }

    /// Sends unloads whose jobs have ended, and forgets those that nobody waits for any more.
    pub(super) fn send_due_unloads(&mut self, now: Instant) {
        let before = self.unloads.len();
        self.unloads.retain(PendingUnload::is_asked_for);
        for position in 0..self.unloads.len() {
            if self.unloads[position].is_due() {
                self.send_unload(position, now);
            }
        }
        let answered = self
            .unloads
            .extract_if(.., |unload| unload.outstanding == Some(0));
        answered.for_each(PendingUnload::reply);
        self.replan |= self.unloads.len() != before;
    }

    fn send_unload(&mut self, position: usize, now: Instant) {
        let id = self.unloads[position].id;
        let mut outstanding = 0;
        for index in 0..self.cards.len() {
            let (view, unload) = (self.view(now), &self.unloads[position]);
            let card = &self.cards[index];
            let dtype = &card.description.compute_dtype;
            let concerned = unload.concerned(card.ledger.on_card_or_host(), dtype);
            let (leave, keep) = view.partition_leaving(&unload.leaving(dtype), concerned, index);
            self.unloads[position].report.kept.extend(keep);
            if !leave.is_empty() && self.cards[index].is_ready() {
                let request_id = self.number();
                let command = Command::Unload {
                    id: request_id,
                    components: leave.clone(),
                };
                let waiting = PendingRequest::Unload {
                    unload: id,
                    components: leave,
                };
                self.cards[index].send_request(request_id, waiting, command, now);
                outstanding += 1;
            }
        }
        self.unloads[position].outstanding = Some(outstanding);
    }

    pub(super) fn unloaded(&mut self, id: u64, index: usize, answer: Answer) {
        let card = &self.cards[index].description.id;
        if let Some(unload) = self.unloads.iter_mut().find(|unload| unload.id == id) {
            unload.answered(card, answer);
        }
    }

    pub(in crate::queue) fn trim(&mut self, card: &str, reply: Reply<Result<Bytes, Error>>, now: Instant) {
        let asked = self.view(now).ready_cards(card);
        if asked.is_empty() {
            let _ = reply.send(Err(self.view(now).not_ready(card)));
            return;
        }
        let trim = self.number();
        self.trims.insert(trim, PendingTrim::new(asked.len(), reply));
        for index in asked {
            let id = self.number();
            self.cards[index].send_request(id, PendingRequest::Trim { trim }, Command::Trim { id }, now);
        }
    }

    pub(super) fn trimmed(&mut self, id: u64, answer: Answer) {
        let is_last = self.trims.get_mut(&id).is_some_and(|trim| trim.answered(answer));
        let done = if is_last { self.trims.remove(&id) } else { None };
        done.into_iter().for_each(PendingTrim::reply);
    }

    /// Unloads entries that have been unused for long. Entries that become idle at the same time are unloaded together, so
    /// that none of them keeps a shared component for another.
    pub(super) fn unload_idle_entries(&mut self, now: Instant) {
        if self.view(now).next_idle_unload().is_some_and(|at| at <= now) {
            let idle = self.view(now).idle_entries();
            for key in &idle {
                self.claims.asked(key, now); // asked once, then again after as long
            }
            for index in 0..self.cards.len() {
                let components = self.view(now).idle_to_unload(&idle, index);
                if !components.is_empty() {
                    let id = self.number();
                    let command = Command::Unload { id, components };
                    self.cards[index].send_request(id, PendingRequest::KeepAlive, command, now);
                }
            }
        }
        self.forget_entries();
    }

    /// Forgets entries that no job and no card has any more.
    fn forget_entries(&mut self) {
        let (jobs, cards) = (&self.jobs, &self.cards);
        self.dirty |= self.claims.forget(|key, known| {
            jobs.values().any(|job| job.concerns(key))
                || cards
                    .iter()
                    .any(|card| card.ledger.on_card_or_host().any(|c| known.names(&c.id)))
        });
    }
}
