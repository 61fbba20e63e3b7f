//! Unit tests of each module at its boundaries, and properties over all of them.
#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

mod fallback;
mod given;
mod holes;
mod ledger;
mod patience;
mod plan;
mod properties;
mod scratch;
