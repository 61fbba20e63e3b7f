//! The model of a card: the figures that the driver would report. It knows nothing of the ledger.

use std::collections::BTreeMap;

use residency::{Bytes, ComponentId, DriverTruth, Millis};

pub(crate) struct Card {
    pub(crate) total: Bytes,
    pub(crate) context: Bytes,
    pub(crate) workspaces: Bytes,
    pub(crate) slack: Bytes,
    pub(crate) scratch: Bytes,
    pub(crate) foreign: Bytes,
    pub(crate) components: BTreeMap<ComponentId, Bytes>,
    /// Freed, not shown as free until then.
    late: Vec<(Bytes, Millis)>,
}

impl Card {
    pub(crate) fn new(total: Bytes, context: Bytes, workspaces: Bytes) -> Card {
        let zero = Bytes::ZERO;
        let (components, late) = (BTreeMap::new(), Vec::new());
        Card {
            total,
            context,
            workspaces,
            slack: zero,
            scratch: zero,
            foreign: zero,
            components,
            late,
        }
    }

    pub(crate) fn in_components(&self) -> Bytes {
        self.components.values().copied().sum()
    }

    pub(crate) fn late(&self) -> Bytes {
        self.late.iter().map(|(bytes, _)| *bytes).sum()
    }

    pub(crate) fn free(&self) -> Bytes {
        let ours = self.context + self.workspaces + self.slack + self.scratch + self.in_components();
        let taken = ours + self.foreign + self.late();
        assert!(
            taken <= self.total,
            "the model itself is wrong: {taken} of {} taken",
            self.total
        );
        self.total - taken
    }

    pub(crate) fn truth(&self) -> DriverTruth {
        DriverTruth {
            total: self.total,
            free: self.free(),
            components: self.in_components(),
            scratch: self.scratch,
            slack: self.slack,
            workspaces: self.workspaces,
            context: self.context,
            holders: Vec::new(),
            layout: None,
        }
    }

    pub(crate) fn tick(&mut self, now: Millis) {
        self.late.retain(|(_, until)| *until > now);
    }

    /// Component pools take from the driver's free memory only.
    pub(crate) fn allocate(&mut self, id: &ComponentId, bytes: Bytes) -> bool {
        let fits = bytes <= self.free();
        if fits {
            *self.components.entry(id.clone()).or_default() += bytes;
        }
        fits
    }

    pub(crate) fn release(&mut self, id: &ComponentId, shown_at: Option<Millis>) {
        if let (Some(bytes), Some(at)) = (self.components.remove(id), shown_at) {
            self.late.push((bytes, at));
        }
    }

    /// A component gives back all but `left` bytes.
    pub(crate) fn shrink(&mut self, id: &ComponentId, left: Bytes, shown_at: Option<Millis>) {
        if let Some(bytes) = self.components.get_mut(id) {
            let gone = *bytes - left;
            *bytes = left.min(*bytes);
            if let Some(at) = shown_at {
                self.late.push((gone, at));
            }
        }
    }

    /// Activations take slack first, then the driver's free memory.
    pub(crate) fn take_scratch(&mut self, bytes: Bytes) -> bool {
        let fits = bytes <= self.free() + self.slack;
        if fits {
            self.slack -= bytes; // saturates: bytes that slack lacks come from the free bytes
            self.scratch += bytes;
        }
        fits
    }

    pub(crate) fn give_scratch_back(&mut self, bytes: Bytes) {
        self.scratch -= bytes;
        self.slack += bytes;
    }

    pub(crate) fn trim(&mut self, shown_at: Option<Millis>) {
        let slack = std::mem::take(&mut self.slack);
        if let Some(at) = shown_at {
            self.late.push((slack, at));
        }
    }
}
