//! Whether a caller still waits for work: long work checks that at intervals, and ends without a result where nobody waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The caller of some work, as the work sees it: whether it still waits for the result.
#[derive(Clone, Debug)]
pub struct Caller(Arc<AtomicBool>);

/// The caller has gone, so the work ends without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// The caller's side: dropping it signals the work that the caller has gone.
#[derive(Debug)]
pub struct Waits(Caller);

impl Caller {
    /// A caller for the work, and the value that the caller keeps for as long as it waits.
    pub fn new() -> (Caller, Waits) {
        let caller = Caller(Arc::new(AtomicBool::new(true)));
        (caller.clone(), Waits(caller))
    }

    /// Whether the caller still waits.
    ///
    /// # Errors
    /// [`Gone`] once the caller has gone.
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
    /// A caller that has left.
    pub(crate) fn gone() -> Caller {
        Caller::new().0
    }

    /// A caller that never leaves.
    pub(crate) fn staying() -> Caller {
        let (caller, waits) = Caller::new();
        std::mem::forget(waits);
        caller
    }
}
