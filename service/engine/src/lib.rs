//! RUNS. Two halves that communicate by [`messages`]: [`queue`] is the supervisor's (jobs, fair queueing, patience,
//! latents), [`card`] the worker's (one thread that owns one card: ledger, moves, stages).
//!
//! Independent of protocols, processes and file formats: the binary transports the messages.

pub mod admission;
pub mod card;
pub mod job;
mod job_state;
pub mod library;
pub mod messages;
mod moved;
pub mod need;
mod not_opened;
pub mod queue;
mod stamps;
mod standing;

mod error;
mod wall_clock;

pub use job_state::JobState;
pub use moved::{Freed, Kept, Reserved};

pub use error::{CancelledBy, Change, ChangedTo, Error, Fallback, JobBound, Shortfall};
