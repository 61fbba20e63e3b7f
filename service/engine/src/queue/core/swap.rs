//! The steps of a swap that send no order: its begin, the unloads, and the undo.

use tokio::time::Instant;

use super::Core;
use crate::error::Error;
use crate::job::{JobEventKind, JobId, StageReport};
use crate::messages::{Answer, Command};
use crate::moved::{Freed, Kept};
use crate::need::ids_of;
use crate::queue::cards::PendingRequest;
use crate::queue::record::State;
use crate::queue::steps::{JobSteps, Model, undo_of_swap};
use crate::queue::swap::Unloading;

impl Core {
    /// Before a step of a swap: begins it, and puts an unload of the replaced model before the step where both do not fit.
    pub(super) fn prepare_swap_step(&mut self, id: &JobId, index: usize, now: Instant) {
        let view = self.view(now);
        let job = self.jobs.get(id).filter(|job| !job.is_decided());
        let Some((job, swap)) = job.and_then(|job| Some((job, job.swap.as_ref()?))) else {
            return;
        };
        let begins = swap.begun.is_none().then(|| view.begin_swap(job, index));
        let Some(begun) = begins.as_ref().or(swap.begun.as_ref()) else {
            return;
        };
        let fits = view.fits_beside(job, &begun.alone, index);
        let card = &self.cards[index];
        let there = begun.alone.iter().any(|c| card.ledger.is_resident(&c.id));
        let (generation, card_id) = (card.generation, &card.description.id);
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(swap) = &mut job.swap else { return };
        job.begun = true; // it goes before those that have not begun
        swap.begun = begins.or(swap.begun.take());
        let Some(begun) = &mut swap.begun else { return };
        begun.away |= !fits;
        if begun.away && begun.told != Some(generation) {
            begun.told = Some(generation);
            if there {
                tracing::info!(job = %id, card = %card_id, "both do not fit: the old model leaves first");
                job.steps.unload_before(job.cursor, Model::Replaced);
            }
        }
        self.send_claims(index, false, now);
    }

    /// Sends workers the unloads of the swap's next step. False: there is nothing to unload.
    pub(super) fn begin_unload(&mut self, id: &JobId, now: Instant) -> bool {
        let Some(job) = self.jobs.get(id) else {
            return false;
        };
        let is_proven = job.is_proven();
        if let Some(swap) = job.swap.as_ref().filter(|_| is_proven) {
            // The turning point: the pins and holds of the old model are the new one's from here on.
            self.claims.pass_on(&swap.old.key, &job.entry.key);
        }
        let (leave, kept) = self.view(now).unload_of_swap(job);
        let Some(job) = self.jobs.get_mut(id) else {
            return false;
        };
        job.report.kept.extend(kept);
        if leave.is_empty() {
            return false;
        }
        job.enter(State::Running { ending: None }, now);
        let begun = job.swap.as_mut().and_then(|swap| swap.begun.as_mut());
        if let Some(begun) = begun {
            job.last_card = Some(begun.card);
            begun.unloading = Some(Unloading {
                outstanding: leave.len(),
                since: now,
            });
        }
        for (index, components) in &leave {
            let card = &self.cards[*index].description.id;
            for component in components {
                let (component, card) = (component.clone(), card.clone());
                job.emit(now, JobEventKind::Evicting { component, card });
            }
        }
        for (index, components) in leave {
            self.send_claims(index, false, now);
            let request_id = self.number();
            let components = ids_of(&components);
            let command = Command::Unload {
                id: request_id,
                components: components.clone(),
            };
            let waiting = PendingRequest::Swap {
                job: id.clone(),
                components,
            };
            self.cards[index].send_request(request_id, waiting, command, now);
        }
        if is_proven {
            self.claims_changed(now);
        }
        self.dirty = true;
        true
    }

    /// A worker has answered an unload of a swap.
    pub(super) fn unloaded_for_swap(&mut self, id: &JobId, index: usize, answer: Answer, now: Instant) {
        let card = self.cards[index].description.id.clone();
        let Some(job) = self.jobs.get_mut(id) else {
            return; // the service ends
        };
        let is_proven = job.is_proven();
        match answer {
            Answer::Unloaded { freed, kept, .. } if is_proven => {
                job.report.freed.extend(Freed::on(&card, freed));
                job.report.kept.extend(Kept::on(&card, kept));
            }
            Answer::Unloaded { .. } => {}
            Answer::Trimmed(_) | Answer::Failed(_) => {
                tracing::warn!(job = %id, %card, ?answer, "a swap could not unload");
            }
        }
        let begun = job.swap.as_mut().and_then(|swap| swap.begun.as_mut());
        let Some(unloading) = begun.and_then(|begun| begun.unloading.as_mut()) else {
            return;
        };
        unloading.outstanding = unloading.outstanding.saturating_sub(1);
        if unloading.outstanding > 0 {
            return;
        }
        let took = now.duration_since(unloading.since);
        gpu::Timeline::log("swap", "round trip of an unload", took);
        let report = StageReport {
            name: "unload".into(),
            moves: took,
            card,
            ..StageReport::default()
        };
        job.stage_done(report, now);
        match std::mem::replace(&mut job.state, State::queued_on(index)) {
            State::Running { ending: Some(ending) } if !is_proven => self.fail(id, ending, now),
            _ => {
                job.go_to(job.cursor + 1);
                self.advance(id, now);
            }
        }
    }

    /// A swap failed after it had begun: its undo list replaces its steps.
    pub(super) fn undo_swap(&mut self, id: &JobId, error: Error, now: Instant) {
        let Some(job) = self.jobs.get(id) else { return };
        let is_displaced = !self.view(now).displaced(job).is_empty();
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(swap) = &mut job.swap else { return };
        swap.failed = Some(error.clone());
        let (new, old) = (job.entry.key.clone(), swap.old.key.clone());
        let keeps = swap.card();
        job.steps = JobSteps::new(undo_of_swap(), &job.plans);
        job.go_to(0);
        job.enter(
            State::Queued {
                position: None,
                keeps,
            },
            now,
        );
        if is_displaced {
            let message = format!("{new} failed its proof ({error}); {old} is restored");
            tracing::warn!(job = %id, message, "a swap is undone");
            job.emit(
                now,
                JobEventKind::Retrying {
                    reason: "RESTORING".to_owned(),
                    message,
                    stage: "restore".into(),
                },
            );
        }
        self.advance(id, now);
    }
}
