//! How jobs end: exactly once, with everything that they had handed back, and what is remembered of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::actor::Actor;
use super::record::{JobRecord, Phase, StepKind};
use super::report::JobInfo;
use crate::error::Error;
use crate::job::{JobEvent, JobEventKind, JobId, JobWork};

/// How long the events of a job with an idempotency key are kept after its end.
const RETAINED_FOR: Duration = Duration::from_secs(60);
/// Bound on the pictures among them, over all ended jobs.
const RETAINED_BYTES: usize = 256 << 20;

/// Jobs that have ended.
#[derive(Default)]
pub(super) struct Ended {
    /// The latest first.
    infos: VecDeque<JobInfo>,
    /// The oldest first.
    retained: VecDeque<Retained>,
}

/// What is kept for those who ask by the same idempotency key.
pub(super) struct Retained {
    pub(super) key: String,
    pub(super) id: JobId,
    pub(super) model_key: String,
    pub(super) work: JobWork,
    pub(super) events: Vec<JobEvent>,
    until: Instant,
}

impl Ended {
    pub(super) fn infos(&self) -> impl Iterator<Item = &JobInfo> {
        self.infos.iter()
    }

    pub(super) fn knows(&self, id: &str) -> bool {
        self.infos.iter().any(|info| &*info.id == id)
    }

    pub(super) fn by_key(&self, key: &str) -> Option<&Retained> {
        self.retained.iter().find(|retained| retained.key == key)
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.retained.retain(|retained| now < retained.until);
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.retained.front().map(|retained| retained.until)
    }

    fn list(&mut self, info: JobInfo, at_most: usize) {
        self.infos.push_front(info);
        self.infos.truncate(at_most);
    }

    fn retain(&mut self, retained: Retained) {
        self.retained.push_back(retained);
        while self.retained.iter().map(picture_bytes).sum::<usize>() > RETAINED_BYTES {
            self.retained.pop_front();
        }
    }
}

fn picture_bytes(retained: &Retained) -> usize {
    let bytes = retained.events.iter().map(|event| match &event.kind {
        JobEventKind::Picture { rgb, .. } => rgb.len(),
        _ => 0,
    });
    bytes.sum()
}

impl Actor {
    /// Ends a job from outside: at once where it only waits, else as soon as its worker lets go of it.
    pub(super) fn stop(&mut self, id: &JobId, why: Error, now: Instant) {
        let Some(mut job) = self.jobs.remove(id) else {
            return;
        };
        if job.phase != Phase::Running {
            self.end(job, Err(why), now);
            return;
        }
        job.ending.get_or_insert(why);
        if let Some(card) = job.last_card.and_then(|index| self.cards.get_mut(index))
            && card.in_flight.as_ref().and_then(|running| running.job.as_ref()) == Some(id)
        {
            card.cancel(now);
        }
        self.jobs.insert(id.clone(), job);
        self.dirty = true;
    }

    /// The last that a job does. It must have been taken off the list of jobs.
    pub(super) fn end(&mut self, mut job: JobRecord, result: Result<(), Error>, now: Instant) {
        job.enter(Phase::Queued, now);
        if result.as_ref().is_err_and(|error| *error != Error::Cancelled) {
            self.tell_of_latents_that_were_paid_for(&mut job, now);
        }
        let mut info = self.info(&job, None, now);
        match result {
            Ok(()) => {
                info.state = "done";
                let mut report = std::mem::take(&mut job.report);
                report.seed = job.seed();
                report.total = now.duration_since(job.accepted);
                job.emit(now, JobEventKind::Done(Arc::new(report)));
            }
            Err(error) => {
                info.state = if error == Error::Cancelled {
                    "cancelled"
                } else {
                    "failed"
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
        self.shares.leave(&job.options.client);
        self.claims.used(&job.entry.key, now);
        self.ended.list(info, self.settings.ended_kept);
        if let Some(events) = job.retained.take() {
            self.ended.retain(Retained {
                key: job.options.idempotency_key,
                id: job.id.clone(),
                model_key: job.entry.key.clone(),
                work: job.work,
                events,
                until: now + RETAINED_FOR,
            });
        }
        for unload in &mut self.unloads {
            unload.job_ended(&job.id);
        }
        self.replan = true;
        self.dirty = true;
    }

    /// A job that fails before a decode hands out the latent, so that the sampling need not be paid for again.
    fn tell_of_latents_that_were_paid_for(&mut self, job: &mut JobRecord, now: Instant) {
        let undecoded: Vec<u32> = job.steps[job.cursor.min(job.steps.len())..]
            .iter()
            .filter(|step| step.kind == StepKind::Stage(pipelines::StageKind::Decode))
            .map(|step| step.picture)
            .collect();
        for picture in undecoded {
            self.tell_of_latent(job, picture, now);
        }
    }

    /// Tells the client of a picture's latent, once.
    pub(super) fn tell_of_latent(&mut self, job: &mut JobRecord, picture: u32, now: Instant) {
        let Some(id) = job.latents.get(&picture) else {
            return;
        };
        if !job.told.contains(&picture)
            && let Ok(info) = self.latents.info(id, now)
        {
            self.latents.keep(id);
            job.told.insert(picture);
            job.emit(now, JobEventKind::Latent { info, picture });
        }
    }
}
