//! One component on the card, as the ledger records it.

use serde::{Deserialize, Serialize};

use crate::nouns::{Component, Millis};

/// Half-life, in milliseconds, of the weight of earlier uses in [`Resident::heat`].
pub const HEAT_HALF_LIFE_MS: u64 = 600_000;

/// The state of a component between absent and resident.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidentState {
    /// Booked; its bytes are being copied.
    Loading,
    /// Loaded in full.
    Resident,
    /// Being freed; its bytes are not usable yet.
    Evicting,
}

/// A component that has bytes booked on the card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resident {
    pub component: Component,
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
    pub(crate) fn loading(component: Component, now: Millis) -> Resident {
        Resident {
            component,
            state: ResidentState::Loading,
            leases: 0,
            pinned: false,
            held: 0,
            last_used: now,
            heat: 1.0,
        }
    }

    /// Whether a plan may evict it: resident in full, and neither leased, pinned nor held.
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
