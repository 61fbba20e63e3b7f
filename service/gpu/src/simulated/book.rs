//! The accounts of a simulated card. Invariant: every byte is in exactly one of them; free is the remainder.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use residency::{Bytes, Component, ComponentId, Holder, Layout, Owner, Part, Range};

use super::clock::SimulatedClock;
use super::settings::SimulatedSettings;
use super::world::SimulatedWorld;
use crate::load::LoadError;

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

/// Not enough memory on a simulated card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {needed} needed, {free} free{}", in_one_piece(*.largest))]
pub struct OutOfMemory {
    /// Bytes requested.
    pub needed: Bytes,
    /// Bytes available.
    pub free: Bytes,
    /// The largest of them in one piece, on a card that does not remap memory.
    pub largest: Option<Bytes>,
}

fn in_one_piece(largest: Option<Bytes>) -> String {
    largest.map_or_else(String::new, |largest| {
        format!(", at most {largest} of them in one piece")
    })
}

impl From<OutOfMemory> for LoadError {
    fn from(error: OutOfMemory) -> LoadError {
        let OutOfMemory {
            needed,
            free,
            largest,
        } = error;
        match largest {
            None => LoadError::OutOfMemory { needed, free },
            Some(largest) => LoadError::Fragmented {
                needed,
                free,
                largest,
            },
        }
    }
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
    lagging: Vec<Lagging>,
    /// Where everything lies, on a card that does not remap memory. Its holes add up to the free bytes.
    layout: Option<Layout>,
}

/// Bytes that become free later.
struct Lagging {
    due_ms: u64,
    bytes: Bytes,
    /// Their ranges in the layout.
    ranges: Vec<Range>,
}

impl Book {
    /// Bytes neither ours nor lagging.
    fn beyond_ours(&self) -> Bytes {
        let lagging: Bytes = self.lagging.iter().map(|each| each.bytes).sum();
        let fixed = self.context + self.workspaces;
        self.capacity - fixed - self.components - self.scratch - self.slack - lagging
    }

    pub(crate) fn accounts(&mut self) -> SimulatedAccounts {
        let now = self.clock.now_ms();
        let (late, due) = std::mem::take(&mut self.lagging)
            .into_iter()
            .partition(|each| each.due_ms > now);
        self.lagging = late;
        let mut free = self.beyond_ours();
        let mut foreign = self.world.wanted(now);
        for holder in &mut foreign {
            holder.bytes = holder.bytes.min(free);
            free -= holder.bytes;
        }
        foreign.retain(|holder| holder.bytes > Bytes::ZERO);
        if let Some(layout) = &mut self.layout {
            let due: Vec<Range> = due.into_iter().flat_map(|each: Lagging| each.ranges).collect();
            layout.free(|range| due.contains(range));
            layout.set_foreign(foreign.iter().map(|holder| holder.bytes).sum());
        }
        SimulatedAccounts {
            components: self.components,
            scratch: self.scratch,
            slack: self.slack,
            workspaces: self.workspaces,
            context: self.context,
            foreign,
            lagging: self.lagging.iter().map(|each| each.bytes).sum(),
            free,
        }
    }

    /// Where everything lies, on a card that does not remap memory.
    pub(crate) fn layout(&self) -> Option<&Layout> {
        self.layout.as_ref()
    }

    /// Allocates a part of a component from free memory, in which it grows by `grown` bytes: slack belongs to the activation pool.
    /// Returns its ranges before.
    pub(crate) fn take_component(
        &mut self,
        component: &Component,
        part: Part,
        grown: Bytes,
    ) -> Result<Vec<Range>, OutOfMemory> {
        let free = self.accounts().free;
        if grown > free {
            return Err(OutOfMemory {
                needed: grown,
                free,
                largest: None,
            });
        }
        let before = self.ranges_of(&component.id);
        if let Some(layout) = &mut self.layout {
            layout.hold(component, part).map_err(|no_hole| OutOfMemory {
                needed: no_hole.needed,
                free,
                largest: Some(no_hole.largest),
            })?;
        }
        self.components += grown;
        Ok(before)
    }

    /// Frees a component: at once after a failed load, with the configured lag after an unload.
    pub(crate) fn return_component(&mut self, component: &ComponentId, bytes: Bytes, at_once: bool) {
        self.components -= bytes;
        let layout = self.layout.as_mut();
        let freed = layout.map_or_else(Vec::new, |layout| layout.free_component(component));
        if !at_once {
            self.lag(bytes, &freed);
        }
    }

    /// Frees, with the configured lag, what a component has given up since it had these ranges.
    pub(crate) fn return_part(&mut self, component: &ComponentId, bytes: Bytes, mut before: Vec<Range>) {
        self.components -= bytes;
        let after = self.ranges_of(component);
        before.retain(|range| !after.contains(range));
        self.lag(bytes, &before);
    }

    /// Undoes [`Book::take_component`] of a component that had these ranges.
    pub(crate) fn undo(&mut self, component: &ComponentId, grown: Bytes, before: &[Range]) {
        self.components -= grown;
        if let Some(layout) = &mut self.layout {
            layout.free_component(component);
            for range in before {
                layout.fill(range);
            }
        }
    }

    fn ranges_of(&self, component: &ComponentId) -> Vec<Range> {
        let used = self.layout.iter().flat_map(Layout::used);
        used.filter(|range| range.owner.component() == Some(component))
            .cloned()
            .collect()
    }

    /// Returns the address, on a card that does not remap memory.
    fn take_scratch(&mut self, bytes: Bytes) -> Result<Option<u64>, OutOfMemory> {
        let free = self.accounts().free + self.slack;
        let usable = free.min(self.largest.unwrap_or(free));
        if bytes > usable {
            return Err(OutOfMemory {
                needed: bytes,
                free: usable,
                largest: None,
            });
        }
        // An allocation of no bytes has no range: it would begin where the next one does, and be mistaken for it.
        let layout = self.layout.as_mut().filter(|_| bytes > Bytes::ZERO);
        let (at, from_slack) = match layout {
            None => (None, bytes.min(self.slack)),
            Some(layout) => {
                let (at, is_kept) = layout.take_scratch(bytes).map_err(|no_hole| OutOfMemory {
                    needed: bytes,
                    free,
                    largest: Some(no_hole.largest),
                })?;
                (Some(at), if is_kept { bytes } else { Bytes::ZERO })
            }
        };
        self.slack -= from_slack;
        self.scratch += bytes;
        self.scratch_peak = self.scratch_peak.max(self.scratch);
        Ok(at)
    }

    fn return_scratch(&mut self, bytes: Bytes, at: Option<u64>) {
        self.scratch -= bytes;
        let range = at.map(|at| Range {
            at,
            bytes,
            owner: Owner::Scratch,
        });
        if let (Some(layout), Some(at)) = (&mut self.layout, at) {
            layout.return_scratch(at, self.keeps_slack);
        }
        if self.keeps_slack {
            self.slack += bytes;
        } else {
            self.lag(bytes, range.as_slice());
        }
    }

    pub(crate) fn trim(&mut self) -> Bytes {
        let trimmed = std::mem::take(&mut self.slack);
        let layout = self.layout.as_mut();
        let freed = layout.map_or_else(Vec::new, |layout| {
            layout.free(|range| range.owner == Owner::Slack)
        });
        self.lag(trimmed, &freed);
        trimmed
    }

    pub(crate) fn begin_stage(&mut self) {
        self.scratch_peak = self.scratch;
    }

    pub(crate) fn stage_peak(&self) -> Bytes {
        self.scratch_peak
    }

    /// Bytes that were freed from these ranges become free after the configured lag.
    fn lag(&mut self, bytes: Bytes, freed: &[Range]) {
        if self.lag_ms == 0 || bytes == Bytes::ZERO {
            return;
        }
        let mut lagging = Lagging {
            due_ms: self.clock.now_ms().saturating_add(self.lag_ms),
            bytes,
            ranges: Vec::new(),
        };
        if let Some(layout) = &mut self.layout {
            let late = freed.iter().map(|range| Range {
                owner: Owner::Late,
                ..range.clone()
            });
            lagging.ranges = late.flat_map(|range| layout.fill(&range)).collect();
            // What has been allocated again since does not lag.
            lagging.bytes = lagging.ranges.iter().map(|range| range.bytes).sum();
        }
        self.lagging.push(lagging);
    }
}

impl SharedBook {
    pub(crate) fn new(
        settings: &SimulatedSettings,
        world: SimulatedWorld,
        clock: Arc<dyn SimulatedClock>,
    ) -> SharedBook {
        let context = settings.context.min(settings.capacity);
        let workspaces = settings.workspaces.min(settings.capacity - context);
        let layout = (!settings.remaps).then(|| {
            let mut layout = Layout::new(settings.capacity);
            layout.fill(&Range {
                at: 0,
                bytes: context + workspaces,
                owner: Owner::Fixed,
            });
            layout
        });
        SharedBook(Arc::new(Mutex::new(Book {
            capacity: settings.capacity,
            context,
            workspaces,
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
            layout,
        })))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Book> {
        // Each method leaves consistent accounts, even if the caller panicked between two of them.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn use_scratch(&self, bytes: Bytes) -> Result<ScratchGuard, OutOfMemory> {
        let at = self.lock().take_scratch(bytes)?;
        Ok(ScratchGuard {
            book: self.clone(),
            bytes,
            at,
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
    /// Its address, on a card that does not remap memory.
    at: Option<u64>,
}

impl ScratchGuard {
    /// Bytes of this allocation.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }
}

impl Drop for ScratchGuard {
    fn drop(&mut self) {
        self.book.lock().return_scratch(self.bytes, self.at);
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
