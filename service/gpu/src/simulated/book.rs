//! The accounts of a simulated card. Every byte is in exactly one of them, always: what a move takes from
//! one it gives to another, and what is free is what remains.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use residency::{Bytes, Holder};

use super::clock::SimulatedClock;
use super::settings::SimulatedSettings;
use super::world::SimulatedWorld;

/// The accounts of a simulated card at one moment. They add up to the capacity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulatedAccounts {
    /// Components.
    pub components: Bytes,
    /// Activations.
    pub scratch: Bytes,
    /// Freed activations that the pool keeps.
    pub slack: Bytes,
    /// Library workspaces.
    pub workspaces: Bytes,
    /// The process itself.
    pub context: Bytes,
    /// Others, as far as they got what they want.
    pub foreign: Vec<Holder>,
    /// Freed by us, and not free yet.
    pub lagging: Bytes,
    /// Free.
    pub free: Bytes,
}

/// Not enough memory on a simulated card for scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {needed} needed, {free} free")]
pub struct OutOfMemory {
    /// Bytes that were asked for.
    pub needed: Bytes,
    /// Bytes that could have been had.
    pub free: Bytes,
}

/// The book, shared between a card and the scratch that is out.
#[derive(Clone)]
pub(crate) struct SharedBook(Arc<Mutex<Book>>);

pub(crate) struct Book {
    capacity: Bytes,
    context: Bytes,
    workspaces: Bytes,
    keeps_slack: bool,
    lag_ms: u64,
    /// The largest piece of activations that can be had.
    largest: Option<Bytes>,
    clock: Arc<dyn SimulatedClock>,
    world: SimulatedWorld,
    components: Bytes,
    scratch: Bytes,
    scratch_peak: Bytes,
    slack: Bytes,
    /// When it shows up as free, and how much.
    lagging: Vec<(u64, Bytes)>,
}

impl Book {
    /// What is neither ours nor on its way.
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

    /// Bytes for a component come from what is free: slack belongs to the pool of activations.
    pub(crate) fn take_component(&mut self, bytes: Bytes) -> Result<(), OutOfMemory> {
        let free = self.accounts().free;
        if bytes > free {
            return Err(OutOfMemory { needed: bytes, free });
        }
        self.components += bytes;
        Ok(())
    }

    /// A load that failed gives back at once; an unload may lag.
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
        // Each method leaves whole accounts behind, also for somebody who panicked between two of them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn use_scratch(&self, bytes: Bytes) -> Result<ScratchGuard, OutOfMemory> {
        self.lock().take_scratch(bytes)?;
        Ok(ScratchGuard {
            book: self.clone(),
            bytes,
        })
    }

    /// From here on, [`simulated_scratch`] on this thread takes from this card.
    pub(crate) fn make_current(&self) {
        CURRENT.with(|current| *current.borrow_mut() = Arc::downgrade(&self.0));
    }
}

/// Scratch of a simulated card; it returns when this is dropped.
pub struct ScratchGuard {
    book: SharedBook,
    bytes: Bytes,
}

impl ScratchGuard {
    /// How much it is.
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

/// Takes scratch from the simulated card whose stage runs on this thread ([`crate::Gpu::begin_stage`] says
/// which): how mathematics that exists in arithmetic only uses memory, since a device is all that it is given.
/// `None` on a thread whose card is real.
///
/// # Errors
/// [`OutOfMemory`] if the card has not so much; nothing is taken then.
pub fn simulated_scratch(bytes: Bytes) -> Result<Option<ScratchGuard>, OutOfMemory> {
    let Some(book) = CURRENT.with(|current| current.borrow().upgrade()) else {
        return Ok(None);
    };
    SharedBook(book).use_scratch(bytes).map(Some)
}
