//! Whether somebody waits for some work still: long work looks now and then, and ends without a result where nobody does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody waits for some work still.
#[derive(Clone, Debug)]
pub struct Caller(Arc<AtomicBool>);

/// The caller has gone, so the work ends without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// Tells the work that its caller has gone, when it is dropped.
#[derive(Debug)]
pub struct Waits(Caller);

impl Caller {
    /// A caller, and what it keeps while it waits.
    pub fn new() -> (Caller, Waits) {
        let caller = Caller(Arc::new(AtomicBool::new(true)));
        (caller.clone(), Waits(caller))
    }

    /// Whether somebody waits.
    ///
    /// # Errors
    /// [`Gone`] once nobody waits any more.
    pub fn check(&self) -> Result<(), Gone> {
        match self.0.load(Ordering::Relaxed) {
            true => Ok(()),
            false => Err(Gone),
        }
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Relaxed);
    }
}

/// Callers of tests.
#[cfg(test)]
impl Caller {
    /// One that has left.
    pub(crate) fn gone() -> Caller {
        Caller::new().0
    }

    /// One that never leaves.
    pub(crate) fn staying() -> Caller {
        let (caller, waits) = Caller::new();
        std::mem::forget(waits);
        caller
    }
}
