//! Where a job is on its way.

/// Where a job is on its way, as lists show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Behind other jobs of the queue.
    Queued,
    /// For memory that is late, or that others have.
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
