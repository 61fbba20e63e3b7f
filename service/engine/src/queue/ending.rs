//! How jobs end: exactly once, with everything that they had handed back, and what is remembered of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use residency::Bytes;
use tokio::time::Instant;

use super::actor::Actor;
use super::listener::piece_bytes;
use super::record::{JobRecord, Phase, input_bytes};
use super::report::JobInfo;
use crate::error::Error;
use crate::job::{JobEvent, JobEventKind, JobId, JobWork};

/// How long the events of a job with an idempotency key are kept after its end.
const RETAINED_FOR: Duration = Duration::from_secs(60);
/// Bound on the pictures among them and on the init images of their jobs, over all ended jobs.
const RETAINED_BYTES: Bytes = Bytes::mib(256);
/// How many of these jobs there are at the most.
const RETAINED_JOBS: usize = 1_000;

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
        let mut bytes = self.retained.iter().map(Retained::bytes).sum::<Bytes>();
        while bytes > RETAINED_BYTES || self.retained.len() > RETAINED_JOBS {
            let Some(oldest) = self.retained.pop_front() else {
                return;
            };
            bytes -= oldest.bytes();
        }
    }
}

impl Retained {
    fn bytes(&self) -> Bytes {
        let pieces = self.events.iter().map(|event| piece_bytes(&event.kind));
        pieces.sum::<Bytes>() + input_bytes(&self.work)
    }
}

impl Actor {
    /// Ends a job from outside: at once where it only waits, else as soon as its worker lets go of it.
    pub(super) fn stop(&mut self, id: &JobId, why: Error, now: Instant) {
        let Some(mut job) = self.jobs.remove(id) else {
            return;
        };
        let decided = job.swap.as_ref().is_some_and(|swap| swap.is_decided());
        if decided && why != Error::ShuttingDown {
            self.jobs.insert(id.clone(), job); // it ends by itself
            return;
        }
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

    /// The last that a job does, but for what a swap still owes. It must have been taken off the list of jobs.
    pub(super) fn end(&mut self, job: JobRecord, result: Result<(), Error>, now: Instant) {
        self.replan = true;
        self.dirty = true;
        let Some((mut job, result)) = self.see_swap_through(job, result, now) else {
            return;
        };
        job.enter(Phase::Queued, now);
        if !job.is_load() && result.as_ref().is_err_and(|error| *error != Error::Cancelled) {
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
        if job.releases_latents {
            self.latents.give_up_made_by(&job.id);
        }
        self.shares.leave(&job.options.client);
        self.claims.used(&job.entry.key, now);
        if let Some(swap) = &job.swap {
            self.claims.used(&swap.old.key, now);
            self.claims_changed(now);
        }
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
    }

    /// A job that fails before a decode hands out the latent, so that the sampling need not be paid for again.
    fn tell_of_latents_that_were_paid_for(&mut self, job: &mut JobRecord, now: Instant) {
        let undecoded: Vec<u32> = job.steps[job.cursor.min(job.steps.len())..]
            .iter()
            .filter(|step| job.is_of(**step, pipelines::Role::Decode))
            .map(|step| step.item)
            .collect();
        for item in undecoded {
            self.tell_of_latent(job, item, now);
        }
    }

    /// Tells the client of an item's latent, once.
    pub(super) fn tell_of_latent(&mut self, job: &mut JobRecord, item: u32, now: Instant) {
        let Some(id) = job.latents.get(&item) else {
            return;
        };
        if !job.told.contains(&item)
            && let Ok(info) = self.latents.info(id, now)
        {
            self.latents.keep(id);
            job.told.insert(item);
            job.emit(now, JobEventKind::Latent { info, item });
        }
    }
}

#[cfg(test)]
mod tests {
    use pipelines::{Image, InitImage, Medium, Request, Role};

    use super::*;
    use crate::job::Run;

    fn retained(key: usize, rgb: Option<bytes::Bytes>) -> Retained {
        let image = Image {
            init_image: rgb.map(|rgb| InitImage {
                width: 16,
                height: 16,
                rgb,
            }),
            ..Image::of(16, 16)
        };
        let run = Run {
            call: "EncodeImage",
            request: Request::of(Medium::Image(image), 1, 0.0, 0),
            count: 1,
            start: None,
            until: Role::Encode,
            keep_latent: true,
            preview_interval_ms: 0,
        };
        Retained {
            key: key.to_string(),
            id: "job".into(),
            model_key: "a".into(),
            work: JobWork::Run(run),
            events: Vec::new(),
            until: Instant::now() + RETAINED_FOR,
        }
    }

    fn oldest_of(count: usize, rgb: Option<bytes::Bytes>) -> (usize, String) {
        let mut ended = Ended::default();
        for key in 0..count {
            ended.retain(retained(key, rgb.clone()));
        }
        let oldest = ended.retained.front().map(|retained| retained.key.clone());
        (ended.retained.len(), oldest.unwrap_or_default())
    }

    #[tokio::test]
    async fn what_is_retained_is_bounded_in_number_and_in_bytes_and_the_oldest_goes_first() {
        assert_eq!(oldest_of(1_002, None), (1_000, "2".to_owned()));
        let image: bytes::Bytes = vec![0; 48 << 20].into();
        assert_eq!(
            oldest_of(7, Some(image)),
            (5, "2".to_owned()),
            "an init image counts"
        );
    }
}
