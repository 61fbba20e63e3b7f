//! Jobs of the queue, as HTTP tells of them.

use std::time::Duration;

use calls::{Caller, ListedJob, Service};
use engine::Error;
use engine::JobState;
use engine::job::Call;

use crate::results::now;

/// A job by its id, among the caller's that make films.
///
/// # Errors
/// [`Error::JobNotFound`].
pub(crate) async fn film(service: &Service, id: &str, caller: &Caller) -> Result<ListedJob, Error> {
    let found = films(service, caller)
        .await
        .into_iter()
        .find(|job| job.info.id.to_string() == id);
    found.ok_or_else(|| Error::JobNotFound(id.to_owned()))
}

/// The jobs that make films and are the caller's, or anybody's where there are no tokens, the newest last.
pub(crate) async fn films(service: &Service, caller: &Caller) -> Vec<ListedJob> {
    let mut jobs = service.jobs.list_within(true, caller).await;
    // Others have ended and are not kept: nothing can be asked of them.
    jobs.retain(|job| job.info.call == Call::GenerateVideo && (job.is_kept || !job.info.state.has_ended()));
    jobs.sort_by_key(created);
    jobs
}

/// The state of a job in OpenAI's words, and how much of it is done, of 100.
pub(crate) fn progress(job: &ListedJob) -> (&'static str, u32) {
    let info = &job.info;
    match info.state {
        JobState::Held | JobState::Queued | JobState::Waiting => ("queued", 0),
        // A film is decoded after its steps: they are nine tenths of it.
        JobState::Running => (
            "in_progress",
            (90 * info.step).checked_div(info.steps.max(1)).unwrap_or(0),
        ),
        // Its end is being written: then it can be fetched.
        JobState::Done | JobState::Failed | JobState::Cancelled if job.end.is_none() => ("in_progress", 99),
        JobState::Done => ("completed", 100),
        JobState::Failed | JobState::Cancelled => ("failed", 0),
    }
}

/// When a job was accepted, in Unix seconds.
pub(crate) fn created(job: &ListedJob) -> u64 {
    let since_end = job.end.map_or(Duration::ZERO, |end| end.ago);
    now().saturating_sub((job.info.age + since_end).as_secs())
}
