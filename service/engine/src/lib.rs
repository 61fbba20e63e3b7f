//! RUNS. Two halves that communicate by [`messages`]: [`queue`] is the supervisor's (jobs, fair queueing, patience,
//! latents), [`card`] the worker's (one thread that owns one card: ledger, moves, stages).
//!
//! Independent of protocols, processes and file formats: the binary transports the messages.

pub mod admission;
pub mod card;
pub mod job;
pub mod library;
pub mod messages;
pub mod need;
pub mod queue;
mod stamps;
mod standing;

mod error;

pub use error::{CancelledBy, Change, ChangedTo, Error, Fallback, JobBound, Shortfall};
