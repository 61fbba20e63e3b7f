//! The state of a job.

/// The state of a job, as lists show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
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
    /// Its name in the public API.
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Queued => "queued",
            JobState::Waiting => "waiting",
            JobState::Running => "running",
            JobState::Done => "done",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }
}
