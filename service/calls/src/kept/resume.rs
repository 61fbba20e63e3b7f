//! Jobs from before a restart are submitted again: in the order of their acceptance, a few at a time.

use std::sync::Arc;
use std::time::Duration;

use engine::Error;
use engine::job::JobId;
use engine::queue::JobInfo;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Kept;
use super::records::{JOBS, KeptJob};

/// How often a job is begun at the most: once, and twice again.
const MOST_BEGUN: u32 = 3;
/// Time after which a job that found no place in the queue is submitted again.
const RETRY: Duration = Duration::from_secs(5);

impl Kept {
    /// Submits all jobs that are held.
    pub(super) async fn resume_all(&self) {
        let places = Arc::new(Semaphore::new(self.0.settings.resumed_at_once.max(1)));
        for JobInfo { id, .. } in self.held() {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            self.resume(&id, Some(place)).await;
        }
    }

    /// Submits a job, unless it is held no more. `place` is given up at its end.
    pub(super) async fn resume(&self, id: &JobId, place: Option<OwnedSemaphorePermit>) {
        let Some(open) = self.take_held(id) else { return };
        match self.submit_again(id, place).await {
            Ok(()) => {}
            Err(Error::ShuttingDown) => self.hold_again(id),
            Err(error) => {
                tracing::warn!(job = %id, %error, "a job from before the restart cannot run again");
                if let Err(error) = self.end_without_results(id, open, error).await {
                    tracing::warn!(job = %id, %error, "its end is not written");
                    self.hold_again(id);
                }
            }
        }
        self.changed();
    }

    async fn submit_again(&self, id: &JobId, place: Option<OwnedSemaphorePermit>) -> Result<(), Error> {
        let key = id.clone();
        let job = self
            .on_disk(move |kept| kept.journal.get::<KeptJob>(JOBS, &key))
            .await?;
        let job = job.ok_or_else(|| Error::JobNotFound(id.to_string()))?;
        if job.begun >= MOST_BEGUN {
            return Err(Error::LostTooOften { times: job.begun });
        }
        let mut spec = job.spec;
        spec.options.id = Some(id.clone());
        spec.options.most_jobs = None; // it was accepted
        loop {
            if let Some(start) = &job.start {
                let account = spec.options.account.clone();
                self.0
                    .queue
                    .restore_latent(start.clone(), account, id.clone())
                    .await?;
            }
            match self.0.queue.submit_kept(spec.clone()).await {
                Ok((_, Some(keeper))) => {
                    tracing::info!(job = %id, begun = job.begun, "a job from before the restart is in the queue again");
                    let as_file = job.output.as_file_of(&spec.work);
                    self.keep(keeper, (job.output, as_file), None, || None, place);
                    return Ok(());
                }
                Ok((_, None)) => {
                    return Err(Error::Internal("a job that is kept is not detached".to_owned()));
                }
                Err(
                    Error::QueueFull { .. }
                    | Error::TooManyJobs(_)
                    | Error::InputsFull { .. }
                    | Error::ClientLimit(_),
                ) => {
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
}
