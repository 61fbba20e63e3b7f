//! RUNS. Two halves that meet in [`messages`]: [`queue`] is the supervisor's (jobs, waiting room, fairness,
//! patience, latents), [`card`] the worker's (one thread that owns one card: ledger, moves, stages).
//!
//! Nothing here knows a protocol, a process or a file format: the binary carries the messages.

pub mod admission;
pub mod card;
pub mod job;
pub mod library;
pub mod messages;
pub mod queue;

mod error;

pub use error::{Error, Fallback, Shortfall};
