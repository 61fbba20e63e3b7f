//! How jobs go on and end. A job ends exactly once, and all that it held is released then.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Core;
use crate::error::Error;
use crate::job::{JobEventKind, JobId, Reach};
use crate::job_state::JobState;
use crate::queue::observer::Happening;
use crate::queue::record::{JobRecord, State};
use crate::queue::steps::{JobStepKind, Model};

impl Core {
    /// Ends a job from outside: at once if it only waits, else as soon as its worker has stopped.
    pub(super) fn stop(&mut self, id: &JobId, why: Error, now: Instant) {
        let Some(job) = self.jobs.get_mut(id) else {
            return;
        };
        if job.is_decided() && why != Error::ShuttingDown {
            return; // it ends by itself
        }
        let State::Running { ending } = &mut job.state else {
            return self.fail(id, why, now);
        };
        ending.get_or_insert(why);
        let on_two = job.needs_two_cards();
        let last = job.last_card;
        for index in (0..self.cards.len()).filter(|index| on_two || last == Some(*index)) {
            self.cards[index].cancel(id);
            self.end_unneeded_order(index, now);
        }
        self.dirty = true;
    }

    /// A worker whose order no job needs any more must end the order within the time limit of a cancel.
    pub(super) fn end_unneeded_order(&mut self, index: usize, now: Instant) {
        let is_ending = |id: &JobId| self.jobs.get(id).is_some_and(JobRecord::is_ending);
        let running = self.cards[index].in_flight.as_mut();
        if let Some(running) = running
            && running.job.as_ref().is_some_and(is_ending)
            && running.sharing.values().all(is_ending)
        {
            running.cancelled.get_or_insert(now);
        }
    }

    /// A job cannot go on. A swap that has begun is undone before it ends.
    pub(super) fn fail(&mut self, id: &JobId, error: Error, now: Instant) {
        let Some(job) = self.jobs.get(id) else { return };
        let Some(swap) = job.swap.as_ref().filter(|_| !job.is_proven()) else {
            return self.end(id, Err(error), now);
        };
        if let Some(first) = &swap.failed {
            tracing::warn!(job = %id, old = swap.old.key, problem = %error, "the old model could not be restored");
            let first = first.clone();
            return self.end(id, Err(first), now);
        }
        if swap.begun.is_none() || error == Error::ShuttingDown {
            return self.end(id, Err(error), now);
        }
        self.undo_swap(id, error, now);
    }

    /// Goes on with a job's next step, or ends it where there is none.
    pub(super) fn advance(&mut self, id: &JobId, now: Instant) {
        self.replan = true;
        while let Some(job) = self.jobs.get(id) {
            let is_needless = match job.step().map(|step| step.kind) {
                None => {
                    let failed = job.swap.as_ref().and_then(|swap| swap.failed.clone());
                    return self.end(id, failed.map_or(Ok(()), Err), now);
                }
                Some(JobStepKind::Unload(_)) => !self.begin_unload(id, now),
                Some(JobStepKind::Load(Model::Replaced)) => self.view(now).displaced(job).is_empty(),
                Some(JobStepKind::Load(Model::Own) | JobStepKind::Stage(_)) => false,
            };
            if !is_needless {
                return;
            }
            if let Some(job) = self.jobs.get_mut(id) {
                job.go_to(job.cursor + 1);
            }
        }
    }

    /// Ends a job: releases what it holds, and emits its last event.
    pub(super) fn end(&mut self, id: &JobId, result: Result<(), Error>, now: Instant) {
        self.replan = true;
        self.dirty = true;
        if result
            .as_ref()
            .is_err_and(|error| !matches!(error, Error::Cancelled(_)))
        {
            self.emit_undecoded_latents(id, now);
        }
        let Some(mut job) = self.jobs.remove(id) else {
            return;
        };
        job.enter(State::queued(), now);
        let mut info = self.view(now).info(&job);
        job.report.total = now.duration_since(job.accepted);
        log_end(&job, &info.card, &result);
        job.observers.tell(&Happening::Ended {
            job: job.observed(now),
            report: &job.report,
            result: result.as_ref().copied(),
        });
        match result {
            Ok(()) => {
                info.state = JobState::Done;
                let mut report = std::mem::take(&mut job.report);
                report.seed = job.seed();
                job.emit(now, JobEventKind::Done(Arc::new(report)));
            }
            Err(error) => {
                info.state = match error {
                    Error::Cancelled(_) => JobState::Cancelled,
                    _ => JobState::Failed,
                };
                info.error = Some(error.clone());
                job.emit(now, JobEventKind::Failed(error));
            }
        }
        for mailbox in job.listeners.values() {
            mailbox.close();
        }
        for latent in job.latents.values().chain(job.input_latent.iter()) {
            self.latents.release(latent, now);
        }
        if job.releases_latents {
            self.latents.give_up_made_by(&job.id, &Reach::All);
        }
        self.shares.leave(&job.options);
        self.claims.used(&job.entry.key, now);
        if let Some(swap) = &job.swap {
            self.claims.used(&swap.old.key, now);
            self.claims_changed(now);
        }
        for unload in &mut self.unloads {
            unload.job_ended(&job.id);
        }
        self.ended.list(info, self.settings.ended_kept);
        self.ended.retain_events(job, now);
    }

    /// A job that fails before a decode emits its latents, so that the sampling need not be repeated.
    fn emit_undecoded_latents(&mut self, id: &JobId, now: Instant) {
        let Some(job) = self.jobs.get(id).filter(|job| !job.is_load()) else {
            return;
        };
        for item in job.undecoded_items() {
            self.emit_latent(id, item, now);
        }
    }

    /// Emits an item's latent, once, when it has all values that its decodes take.
    pub(super) fn emit_latent(&mut self, id: &JobId, item: u32, now: Instant) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        let Some(latent) = job.latents.get(&item).filter(|_| !job.told.contains(&item)) else {
            return;
        };
        if let Ok(info) = self.latents.info(latent, now)
            && job.is_decodable(&info.values)
        {
            self.latents.keep(latent);
            job.told.insert(item);
            job.emit(now, JobEventKind::Latent { info, item });
        }
    }
}

/// Logs a line for each job that ends: its card, and the times of its phases.
fn log_end(job: &JobRecord, card: &str, result: &Result<(), Error>) {
    let stages = || job.report.stages.iter();
    let (waited, moved, ran): (Duration, Duration, Duration) = (
        stages().map(|stage| stage.wait).sum(),
        stages().map(|stage| stage.moves).sum(),
        stages().map(|stage| stage.run).sum(),
    );
    let peak = stages().map(|stage| stage.peak_bytes).max().unwrap_or_default();
    let (total, model, client) = (job.report.total, &job.entry.key, &job.options.client);
    let (job, waited) = (&job.id, waited + job.waited);
    match result {
        Ok(()) => {
            tracing::info!(%job, client, model, card, ?total, ?waited, ?moved, ?ran, %peak, "done");
        }
        Err(error) => {
            tracing::info!(%job, client, model, card, ?total, ?waited, ?moved, ?ran, %peak, %error, "ended");
        }
    }
}
