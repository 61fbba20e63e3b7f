//! Cards without a card: system memory, simulated ones, their names, and what loads, keeps and quantizes for all of them.
#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

mod cpu;
mod devices;
mod holders;
mod kept;
mod quantize;
mod simulated;
