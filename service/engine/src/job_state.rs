//! The state of a job.

use serde::{Deserialize, Serialize};

/// The state of a job, as lists show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobState {
    /// Kept from before a restart, and not in the queue yet.
    Held,
    /// Queued after other jobs.
    Queued,
    /// Waiting for memory that is late, or that other programs hold.
    Waiting,
    Running,
    Done,
    Failed,
    Cancelled,
}

impl JobState {
    /// Whether the job has ended.
    pub fn has_ended(self) -> bool {
        match self {
            JobState::Held | JobState::Queued | JobState::Waiting | JobState::Running => false,
            JobState::Done | JobState::Failed | JobState::Cancelled => true,
        }
    }

    /// Its name in the public API.
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Held => "held",
            JobState::Queued => "queued",
            JobState::Waiting => "waiting",
            JobState::Running => "running",
            JobState::Done => "done",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }
}
