//! An exchange between two threads of one process, by which tests compute parts of a stage without cards.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor};

use crate::copy_rows;

/// What was sent to an end, and not yet received.
#[derive(Debug, Default)]
struct Sent {
    rows: VecDeque<Tensor>,
    is_over: bool,
}

#[derive(Debug, Default)]
struct Mailbox {
    sent: Mutex<Sent>,
    changed: Condvar,
}

impl Mailbox {
    fn sent(&self) -> MutexGuard<'_, Sent> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Sent)) {
        change(&mut self.sent());
        self.changed.notify_all();
    }
}

/// The ends of this process that the other one has not found yet, by number.
static ENDS: LazyLock<Mutex<HashMap<u64, Arc<Mailbox>>>> = LazyLock::new(Mutex::default);

/// This end, before it knows the other.
pub(super) struct OwnEnd(Arc<Mailbox>);

#[derive(Debug)]
pub(super) struct HostEnd {
    own: Arc<Mailbox>,
    other: Arc<Mailbox>,
}

impl OwnEnd {
    /// An end, and the bytes by which the other finds it.
    pub(super) fn new() -> (OwnEnd, Vec<u8>) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        let mut ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
        ends.insert(number, Arc::clone(&mailbox));
        let offer = [u64::from(std::process::id()), number].map(u64::to_le_bytes);
        (OwnEnd(mailbox), offer.concat())
    }

    /// The exchange with the end that has sent this.
    pub(super) fn with(self, offer: &[u8]) -> Result<HostEnd> {
        let own = u64::from(std::process::id()).to_le_bytes();
        let number = offer.strip_prefix(&own).map(<[u8; 8]>::try_from);
        let Some(Ok(number)) = number else {
            candle_core::bail!("an exchange without cards is between threads of one process");
        };
        let mut ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
        match ends.remove(&u64::from_le_bytes(number)) {
            Some(other) => Ok(HostEnd { own: self.0, other }),
            None => candle_core::bail!("the other end of an exchange is gone"),
        }
    }
}

impl HostEnd {
    pub(super) fn swap(&self, own: &Tensor, theirs: &Tensor) -> Result<()> {
        let copy = own.force_contiguous()?;
        self.other.change(|sent| sent.rows.push_back(copy));
        let mut sent = self.own.sent();
        loop {
            if let Some(rows) = sent.rows.pop_front() {
                return copy_rows(&rows, theirs);
            }
            if sent.is_over {
                candle_core::bail!("the other end of an exchange has ended");
            }
            sent = self
                .own
                .changed
                .wait(sent)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for HostEnd {
    fn drop(&mut self) {
        self.other.change(|sent| sent.is_over = true);
    }
}
