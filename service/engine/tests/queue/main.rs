//! The queue with scripted workers, in paused time.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used)] // a test binary of several files

mod ahead;
mod bounds;
mod encoding;
mod faults;
mod fixture;
mod flow;
mod passes;
mod quantized;
mod room;
mod schedule;
mod shares;
mod sharing;
mod swaps;
mod terms;
mod together;
mod watchdog;
mod watching;
mod worker;
