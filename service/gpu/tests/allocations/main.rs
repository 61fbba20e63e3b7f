//! The allocations of loads and readers. The allocator's counters are those of the whole process, so that one test runs at a time.
#![allow(clippy::unwrap_used, reason = "a test, in modules of its own")]

#[path = "../edits/mod.rs"]
mod edits;
mod loads;
mod readers;

use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

/// Held by the test that counts.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
