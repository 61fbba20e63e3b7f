//! Cancellation of work on threads: long work checks at intervals whether it is cancelled, and ends without a result then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells some work whether it is cancelled.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicBool>);

/// The work is cancelled, and ends without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cancelled;

/// Cancels the work when it is dropped.
#[derive(Debug)]
pub struct CancelOnDrop(CancelToken);

impl CancelToken {
    /// A token for the work, and the guard that its caller keeps for as long as it waits for the result.
    pub fn new() -> (CancelToken, CancelOnDrop) {
        let token = CancelToken::default();
        (token.clone(), CancelOnDrop(token))
    }

    /// Whether the work goes on.
    ///
    /// # Errors
    /// [`Cancelled`] once it is cancelled.
    pub fn check(&self) -> Result<(), Cancelled> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(Cancelled),
            false => Ok(()),
        }
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}
