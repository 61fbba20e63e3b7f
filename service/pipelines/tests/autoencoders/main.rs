//! The autoencoders against diffusers, their strips, tiles and windows against the whole, and their memory against the
//! prediction.
// What tests share is outside of them; figures are for readers of the tests' output.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "../../../ops/tests/device/mod.rs"]
mod device;
mod formula;
mod hunyuan;
mod kl;
mod made_up;
mod mmaudio;
#[path = "../numbers/mod.rs"]
mod numbers;
mod oobleck;
#[path = "../shapes_asked/mod.rs"]
mod shapes_asked;
mod wan;

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use gpu::allocator;

#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

static ALONE: RwLock<()> = RwLock::new(());

/// Held by tests that measure memory, which is that of the whole process.
fn alone() -> RwLockWriteGuard<'static, ()> {
    ALONE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Held by all others.
fn together() -> RwLockReadGuard<'static, ()> {
    ALONE.read().unwrap_or_else(PoisonError::into_inner)
}

/// Peak bytes that `work` allocates in addition to those allocated before it, and its result.
fn peak_of<R>(work: impl FnOnce() -> R) -> (u64, R) {
    let before = allocator::mark();
    let result = work();
    (allocator::peak_since_mark().0 - before.0, result)
}

/// Peak bytes of `run`, once its threads have the buffers that they keep for products: runs until the peak falls no further, at
/// most five times.
fn settled_peak<R>(run: impl Fn() -> R) -> u64 {
    let mut least = peak_of(&run).0;
    for _ in 0..4 {
        let peak = peak_of(&run).0;
        if peak >= least {
            break;
        }
        least = peak;
    }
    least
}

/// Two threads on any machine: each keeps a buffer of about a megabyte for its products.
fn on_two_threads(measure: impl FnOnce() + Send) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build();
    pool.expect("two threads").install(measure);
}
