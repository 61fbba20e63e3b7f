//! What the journal has of a job: while it is under way, and after its end.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine::Error;
use engine::JobState;
use engine::job::{Call, JobId, JobReport, JobSpec, JobWork, Latent, LatentInfo};
use engine::queue::JobInfo;
use journal::Table;
use model::LeftOut;
use serde::{Deserialize, Serialize};

use crate::chunks::{ChunkHead, Output};
use crate::resolved::ResolvedModel;

/// Jobs under way, by id.
pub(super) const JOBS: Table = Table("jobs");
/// Jobs that have ended, by id.
pub(super) const ENDED: Table = Table("ended");
/// What else outlives the service, by name.
pub(super) const STATE: Table = Table("state");

/// A time of the wall clock: milliseconds since 1970 (UTC).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Time(u64);

impl Time {
    pub(super) fn now() -> Time {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Time(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    /// The time after a while.
    #[cfg(test)]
    pub(super) fn after(self, passed: Duration) -> Time {
        Time(self.0 + u64::try_from(passed.as_millis()).unwrap_or(u64::MAX))
    }

    /// The time from this one to another; zero where the clock was set back.
    pub(super) fn until(self, later: Time) -> Duration {
        Duration::from_millis(later.0.saturating_sub(self.0))
    }
}

/// A job that was accepted and has not ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct KeptJob {
    /// Its place in the order of acceptance.
    pub(super) number: u64,
    /// With its id among the options.
    pub(super) spec: JobSpec,
    pub(super) output: Output,
    pub(super) model: ResolvedModel,
    pub(super) accepted: Time,
    /// How often it was begun.
    pub(super) begun: u32,
    /// The latent that it starts from.
    pub(super) start: Option<Latent>,
}

/// A job that has ended, and what it has made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct KeptEnd {
    pub(super) number: u64,
    pub(super) info: JobInfo,
    /// Its idempotency key; empty: none.
    pub(super) key: String,
    /// Identifies its work: see [`work_of`].
    pub(super) work: String,
    pub(super) model: ResolvedModel,
    pub(super) left_out: Vec<LeftOut>,
    pub(super) ended: Time,
    pub(super) outcome: Result<JobReport, Error>,
    pub(super) results: Vec<KeptResult>,
    pub(super) latents: Vec<KeptLatent>,
}

/// A result in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct KeptResult {
    /// Name of the file in the job's folder.
    pub(super) file: String,
    pub(super) item: u32,
    pub(super) track: String,
    pub(super) media_type: String,
    pub(super) head: Option<ChunkHead>,
    pub(super) bytes: u64,
}

/// A latent in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct KeptLatent {
    pub(super) file: String,
    pub(super) item: u32,
    pub(super) info: LatentInfo,
}

impl KeptJob {
    /// As lists show it before it is in the queue again.
    pub(super) fn info(&self, id: &JobId) -> JobInfo {
        let options = &self.spec.options;
        JobInfo {
            id: id.clone(),
            client: options.client.clone(),
            account: options.account.clone(),
            priority: options.priority,
            state: JobState::Held,
            call: call_of(&self.spec.work),
            model_key: self.spec.entry.key.clone(),
            card: String::new(),
            stage: "".into(),
            step: 0,
            steps: 0,
            position: 0,
            age: self.accepted.until(Time::now()),
            error: None,
            makes: self.spec.work.makes(),
        }
    }
}

impl KeptEnd {
    /// Bytes of its files.
    pub(super) fn bytes(&self) -> u64 {
        let results = self.results.iter().map(|result| result.bytes);
        let latents = self.latents.iter().map(|latent| latent.info.bytes.0);
        results.chain(latents).sum()
    }
}

fn call_of(work: &JobWork) -> Call {
    match work {
        JobWork::Run(run) => run.call,
        JobWork::Load { .. } => Call::Load,
    }
}

/// Identifies the work of a job with its model: two jobs of one key are the same where these are equal.
pub(super) fn work_of(spec: &JobSpec) -> String {
    let mut hasher = blake3::Hasher::new();
    let written = rmp_serde::encode::write_named(&mut hasher, &(&spec.entry.key, &spec.work));
    match written {
        Ok(()) => hasher.finalize().to_hex().to_string(),
        Err(problem) => format!("not known: {problem}"),
    }
}
