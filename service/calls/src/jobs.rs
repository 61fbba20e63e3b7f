//! The jobs of the queue and those that are kept, as clients see them.

use std::collections::BTreeMap;
use std::time::Duration;

use engine::Error;
use engine::queue::{JobInfo, Queue};

use crate::caller::Caller;
use crate::kept::Kept;
use crate::results::Started;

/// Answers requests about jobs. Cheap to clone.
#[derive(Clone)]
pub struct Jobs {
    queue: Queue,
    kept: Kept,
}

/// A job of a list.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedJob {
    pub info: JobInfo,
    /// Of a detached job whose end is written: its results can be fetched.
    pub end: Option<ListedEnd>,
    /// Whether it is detached, and can be fetched now or once its end is written.
    pub is_kept: bool,
}

/// The end of a detached job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedEnd {
    /// Time since then.
    pub ago: Duration,
    /// How long its results can still be fetched.
    pub results_for: Duration,
}

impl Jobs {
    pub(crate) fn new(queue: Queue, kept: Kept) -> Jobs {
        Jobs { queue, kept }
    }

    /// The jobs that are queued or run, then those that are held from before a restart, and on request those that have ended: the
    /// recent ones, and all whose results are kept.
    pub async fn list(&self, include_ended: bool) -> Vec<ListedJob> {
        let in_queue = self.queue.jobs(include_ended).await;
        let ended = match include_ended {
            true => self.kept.ended(),
            false => Vec::new(),
        };
        let mut kept: BTreeMap<_, _> = ended
            .iter()
            .map(|ended| (ended.info.id.clone(), ended.end))
            .collect();
        let listed = |info: JobInfo, end: Option<ListedEnd>| ListedJob {
            is_kept: end.is_some() || self.kept.knows(&info.id),
            info,
            end,
        };
        let mut jobs: Vec<ListedJob> = Vec::new();
        let (live, recent): (Vec<JobInfo>, Vec<JobInfo>) =
            in_queue.into_iter().partition(|info| !info.state.has_ended());
        jobs.extend(live.into_iter().map(|info| listed(info, None)));
        jobs.extend(self.kept.held().into_iter().map(|info| listed(info, None)));
        for info in recent {
            let end = kept.remove(&info.id);
            jobs.push(listed(info, end));
        }
        let older = ended
            .into_iter()
            .filter(|ended| kept.contains_key(&ended.info.id));
        jobs.extend(older.map(|ended| listed(ended.info, Some(ended.end))));
        jobs
    }

    /// As [`Jobs::list`], those whose results the caller may have: its own, and everybody's where there are no tokens.
    pub async fn list_within(&self, include_ended: bool, caller: &Caller) -> Vec<ListedJob> {
        let reach = caller.reach();
        let mut jobs = self.list(include_ended).await;
        jobs.retain(|job| reach.has(&job.info.account));
        jobs
    }

    /// The caller's own jobs that have not ended.
    pub async fn own(&self, caller: &Caller) -> Vec<JobInfo> {
        let account = caller.account();
        let jobs = self.list(false).await.into_iter().map(|job| job.info);
        jobs.filter(|info| info.account == account).collect()
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
        let reach = caller.reach_of_jobs();
        let queue = self.queue.within(reach.clone());
        if release_latents {
            self.kept.forget_latents_of(id, &reach).await;
        }
        let cancelled = match release_latents {
            true => queue.discard(id, client.clone()).await,
            false => queue.cancel(id, client.clone()).await,
        };
        match cancelled {
            Err(Error::JobNotFound(missing)) => {
                let of_kept = self.kept.cancel(id, client, &reach).await?;
                of_kept.ok_or(Error::JobNotFound(missing))
            }
            cancelled => cancelled,
        }
    }

    /// Forgets what a detached job of the caller has left, once it has ended. False: there is none.
    ///
    /// # Errors
    /// [`Error::NotKept`]: it is still kept.
    pub async fn forget(&self, id: &str, caller: &Caller) -> Result<bool, Error> {
        self.kept.forget(id, &caller.reach()).await
    }

    /// The events of a detached job that its caller has submitted: its progress from now on, and once it has ended its results.
    ///
    /// # Errors
    /// [`Error::JobNotFound`] where there is none, it was not detached, or its results have expired.
    pub fn fetch(&self, id: &str, caller: &Caller) -> Result<Started, Error> {
        self.kept.fetch(id, &caller.reach())
    }
}
