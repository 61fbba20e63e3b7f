//! The boundaries of each room, and properties that hold everywhere.
#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

mod choose;
mod fallback;
mod given;
mod ledger;
mod patience;
mod plan;
mod properties;
mod scratch;
