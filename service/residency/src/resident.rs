//! One component on the card, as the ledger records it.

use serde::{Deserialize, Serialize};

use crate::nouns::{Bytes, Component, Millis};
use crate::parts::Part;

/// Half-life, in milliseconds, of the weight of earlier uses in [`Resident::heat`].
pub const HEAT_HALF_LIFE_MS: u64 = 600_000;

/// The state of a component between absent and resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidentState {
    /// Booked; its bytes are being copied.
    Loading,
    /// Loaded: all of the component, or of its part.
    Resident,
    /// More or fewer of its blocks are being kept on the card; the bytes of the larger part are booked.
    Resizing,
    /// Being freed; its bytes are not usable yet.
    Evicting,
}

/// A change of the part of a component on the card.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Resize {
    pub(crate) from: Part,
    pub(crate) to: Part,
}

/// A component that has bytes booked on the card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resident {
    pub component: Component,
    /// How much of it is on the card; while that changes, the part with more bytes.
    pub part: Part,
    /// The change that is under way, in [`ResidentState::Resizing`].
    pub(crate) resizing: Option<Resize>,
    pub state: ResidentState,
    /// Number of stages that run on it: a refcount.
    pub leases: u32,
    pub pinned: bool,
    /// Number of holds that name it: a refcount.
    pub held: u32,
    /// Time of the last lease, release or load.
    pub last_used: Millis,
    /// Exponentially decayed count of uses, as of `last_used`.
    pub heat: f64,
}

impl Resident {
    pub(crate) fn loading(component: Component, part: Part, now: Millis) -> Resident {
        Resident {
            component,
            part,
            resizing: None,
            state: ResidentState::Loading,
            leases: 0,
            pinned: false,
            held: 0,
            last_used: now,
            heat: 1.0,
        }
    }

    /// Bytes on the card, as booked.
    pub fn bytes(&self) -> Bytes {
        self.component.bytes_of(self.part)
    }

    /// Whether a plan may evict it: loaded, and neither leased, pinned nor held.
    pub fn is_idle(&self) -> bool {
        self.state == ResidentState::Resident && self.leases == 0 && !self.pinned && self.held == 0
    }

    /// Estimated probability of another use, from 0 to 1, by frequency and recency.
    pub(crate) fn chance_of_use(&self, now: Millis) -> f64 {
        let heat = self.heat_at(now);
        heat / (1.0 + heat)
    }

    /// Cost of evicting it, per byte: seconds to reload it times the probability of another use.
    pub(crate) fn cost_per_byte(&self, now: Millis) -> f64 {
        let seconds = self.component.reload_seconds.max(0.0); // NaN becomes 0
        seconds * self.chance_of_use(now) / self.component.bytes.0.max(1) as f64
    }

    pub(crate) fn used(&mut self, now: Millis) {
        self.heat = self.heat_at(now) + 1.0;
        self.last_used = self.last_used.max(now);
    }

    fn heat_at(&self, now: Millis) -> f64 {
        let half_lives = now.since(self.last_used) as f64 / HEAT_HALF_LIFE_MS as f64;
        self.heat * (-half_lives).exp2()
    }
}
