//! The worker's half on a simulated card, with simulated models.
#![allow(clippy::unwrap_used)] // In helpers too, which clippy.toml's exception for tests passes over.

mod claims;
mod faults;
mod moves;
mod paced;
mod schedules;
mod shared;
mod stages;
mod support;
mod thread;
mod together;
#[path = "../watched/mod.rs"]
mod watched;
