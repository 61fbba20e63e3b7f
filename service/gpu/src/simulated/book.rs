//! The accounts of a simulated card. Invariant: every byte is in exactly one of them; free is the remainder.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use residency::{Bytes, Holder};

use super::clock::SimulatedClock;
use super::settings::SimulatedSettings;
use super::world::SimulatedWorld;

/// The accounts of a simulated card at one moment. They sum up to the capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulatedAccounts {
    pub components: Bytes,
    pub scratch: Bytes,
    /// Freed activations that the pool keeps reserved.
    pub slack: Bytes,
    pub workspaces: Bytes,
    /// Context of the process.
    pub context: Bytes,
    /// Foreign holders, with the bytes that they got.
    pub foreign: Vec<Holder>,
    /// Freed by us, and not free yet.
    pub lagging: Bytes,
    pub free: Bytes,
}

/// Not enough memory on a simulated card for scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {needed} needed, {free} free")]
pub struct OutOfMemory {
    /// Bytes requested.
    pub needed: Bytes,
    /// Bytes available for scratch.
    pub free: Bytes,
}

/// The book, shared between a card and its scratch guards.
#[derive(Clone)]
pub(crate) struct SharedBook(Arc<Mutex<Book>>);

pub(crate) struct Book {
    capacity: Bytes,
    context: Bytes,
    workspaces: Bytes,
    keeps_slack: bool,
    lag_ms: u64,
    /// Maximum of a single activation allocation.
    largest: Option<Bytes>,
    clock: Arc<dyn SimulatedClock>,
    world: SimulatedWorld,
    components: Bytes,
    scratch: Bytes,
    scratch_peak: Bytes,
    slack: Bytes,
    /// Time at which bytes become free, and their count.
    lagging: Vec<(u64, Bytes)>,
}

impl Book {
    /// Bytes neither ours nor lagging.
    fn beyond_ours(&self) -> Bytes {
        let lagging: Bytes = self.lagging.iter().map(|(_, bytes)| *bytes).sum();
        let fixed = self.context + self.workspaces;
        self.capacity - fixed - self.components - self.scratch - self.slack - lagging
    }

    pub(crate) fn accounts(&mut self) -> SimulatedAccounts {
        let now = self.clock.now_ms();
        self.lagging.retain(|(due, _)| *due > now);
        let mut free = self.beyond_ours();
        let mut foreign = self.world.wanted(now);
        for holder in &mut foreign {
            holder.bytes = holder.bytes.min(free);
            free -= holder.bytes;
        }
        foreign.retain(|holder| holder.bytes > Bytes::ZERO);
        SimulatedAccounts {
            components: self.components,
            scratch: self.scratch,
            slack: self.slack,
            workspaces: self.workspaces,
            context: self.context,
            foreign,
            lagging: self.lagging.iter().map(|(_, bytes)| *bytes).sum(),
            free,
        }
    }

    /// Allocates a component from free memory: slack belongs to the activation pool.
    pub(crate) fn take_component(&mut self, bytes: Bytes) -> Result<(), OutOfMemory> {
        let free = self.accounts().free;
        if bytes > free {
            return Err(OutOfMemory { needed: bytes, free });
        }
        self.components += bytes;
        Ok(())
    }

    /// Frees a component: at once after a failed load, with the configured lag after an unload.
    pub(crate) fn return_component(&mut self, bytes: Bytes, at_once: bool) {
        self.components -= bytes;
        if !at_once {
            self.lag(bytes);
        }
    }

    fn take_scratch(&mut self, bytes: Bytes) -> Result<(), OutOfMemory> {
        let usable = self.accounts().free + self.slack;
        let usable = usable.min(self.largest.unwrap_or(usable));
        if bytes > usable {
            return Err(OutOfMemory {
                needed: bytes,
                free: usable,
            });
        }
        self.slack -= bytes.min(self.slack);
        self.scratch += bytes;
        self.scratch_peak = self.scratch_peak.max(self.scratch);
        Ok(())
    }

    fn return_scratch(&mut self, bytes: Bytes) {
        self.scratch -= bytes;
        if self.keeps_slack {
            self.slack += bytes;
        } else {
            self.lag(bytes);
        }
    }

    pub(crate) fn trim(&mut self) -> Bytes {
        let trimmed = std::mem::take(&mut self.slack);
        self.lag(trimmed);
        trimmed
    }

    pub(crate) fn begin_stage(&mut self) {
        self.scratch_peak = self.scratch;
    }

    pub(crate) fn stage_peak(&self) -> Bytes {
        self.scratch_peak
    }

    fn lag(&mut self, bytes: Bytes) {
        if self.lag_ms > 0 && bytes > Bytes::ZERO {
            self.lagging
                .push((self.clock.now_ms().saturating_add(self.lag_ms), bytes));
        }
    }
}

impl SharedBook {
    pub(crate) fn new(
        settings: &SimulatedSettings,
        world: SimulatedWorld,
        clock: Arc<dyn SimulatedClock>,
    ) -> SharedBook {
        let context = settings.context.min(settings.capacity);
        SharedBook(Arc::new(Mutex::new(Book {
            capacity: settings.capacity,
            context,
            workspaces: settings.workspaces.min(settings.capacity - context),
            keeps_slack: settings.keeps_slack,
            lag_ms: settings.lag_ms,
            largest: settings.largest,
            clock,
            world,
            components: Bytes::ZERO,
            scratch: Bytes::ZERO,
            scratch_peak: Bytes::ZERO,
            slack: Bytes::ZERO,
            lagging: Vec::new(),
        })))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Book> {
        // Each method leaves consistent accounts, even if the caller panicked between two of them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn use_scratch(&self, bytes: Bytes) -> Result<ScratchGuard, OutOfMemory> {
        self.lock().take_scratch(bytes)?;
        Ok(ScratchGuard {
            book: self.clone(),
            bytes,
        })
    }

    /// Makes this the card of [`simulated_scratch`] on this thread.
    pub(crate) fn make_current(&self) {
        CURRENT.with(|current| *current.borrow_mut() = Arc::downgrade(&self.0));
    }
}

/// Scratch of a simulated card, freed on drop.
pub struct ScratchGuard {
    book: SharedBook,
    bytes: Bytes,
}

impl ScratchGuard {
    /// Bytes of this allocation.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }
}

impl Drop for ScratchGuard {
    fn drop(&mut self) {
        self.book.lock().return_scratch(self.bytes);
    }
}

impl std::fmt::Debug for ScratchGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScratchGuard")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

thread_local! {
    static CURRENT: RefCell<Weak<Mutex<Book>>> = const { RefCell::new(Weak::new()) };
}

/// Allocates scratch on the simulated card whose stage runs on this thread (set by [`crate::Gpu::begin_stage`]), for
/// simulated computations, which know only their device. `None` on a thread whose card is real.
///
/// # Errors
/// [`OutOfMemory`] if the card has not so much; nothing is allocated then.
pub fn simulated_scratch(bytes: Bytes) -> Result<Option<ScratchGuard>, OutOfMemory> {
    let Some(book) = CURRENT.with(|current| current.borrow().upgrade()) else {
        return Ok(None);
    };
    SharedBook(book).use_scratch(bytes).map(Some)
}
