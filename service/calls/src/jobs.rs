//! The jobs of the queue, as clients see them.

use engine::Error;
use engine::queue::{JobInfo, Queue};

use crate::caller::Caller;

/// Answers requests about jobs. Cheap to clone.
#[derive(Clone)]
pub struct Jobs {
    queue: Queue,
}

impl Jobs {
    pub(crate) fn new(queue: Queue) -> Jobs {
        Jobs { queue }
    }

    /// The jobs that are queued or run, and those that have ended recently.
    pub async fn list(&self, include_ended: bool) -> Vec<JobInfo> {
        self.queue.jobs(include_ended).await
    }

    /// Cancels a job; `release_latents` also drops the latents that it has kept. False if the job had ended.
    ///
    /// # Errors
    /// [`Error::JobNotFound`], and where the client's name is wrong.
    pub async fn cancel(
        &self,
        id: &str,
        client_id: String,
        release_latents: bool,
        caller: &Caller,
    ) -> Result<bool, Error> {
        let client = caller.name(client_id)?;
        let queue = self.queue.within(caller.reach_of_jobs());
        match release_latents {
            true => queue.discard(id, client).await,
            false => queue.cancel(id, client).await,
        }
    }
}
