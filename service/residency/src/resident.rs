//! One component on the card, as the ledger sees it.

use serde::{Deserialize, Serialize};

use crate::nouns::{Component, Millis};

/// After this many milliseconds without a use, the memory of earlier uses counts half.
pub const HEAT_HALF_LIFE_MS: u64 = 600_000;

/// Where a component is on its way to the card or off it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResidentState {
    /// Booked; its bytes are on their way.
    Loading,
    /// All of it is there.
    Resident,
    /// Being freed; its bytes are not ours to plan with yet.
    Evicting,
}

/// A component that has bytes booked on the card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resident {
    /// What it is.
    pub component: Component,
    /// Where it is on its way.
    pub state: ResidentState,
    /// Stages that run on it right now.
    pub leases: u32,
    /// Whether somebody wants it to stay until unpinned.
    pub pinned: bool,
    /// How many clients' holds name it.
    pub held: u32,
    /// When it was last leased, released or loaded.
    pub last_used: Millis,
    /// How many stages have run on it since it was loaded.
    pub uses: u64,
    /// Uses, decayed to `last_used`: what the chance of another use is computed from.
    pub heat: f64,
    /// Until when the janitor leaves it alone, where somebody said so.
    pub keep_alive: Option<Millis>,
    /// Whether `keep_alive` went by and was reported.
    pub lapsed: bool,
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
            uses: 0,
            heat: 1.0,
            keep_alive: None,
            lapsed: false,
        }
    }

    /// Whether a planner may evict it: all of it is here, and nobody runs on it, pins it or holds it.
    pub fn is_idle(&self) -> bool {
        self.state == ResidentState::Resident && self.leases == 0 && !self.pinned && self.held == 0
    }

    /// Chance of another use between 0 and 1, from how often and how lately it was used.
    pub fn chance_of_use(&self, now: Millis) -> f64 {
        let heat = self.heat_at(now);
        heat / (1.0 + heat)
    }

    /// What evicting it costs: seconds to bring it back times the chance that somebody will want it, per byte.
    /// A component whose keep-alive is over costs nothing.
    pub fn cost_per_byte(&self, now: Millis) -> f64 {
        if self.keep_alive_is_over(now) {
            return 0.0;
        }
        let seconds = self.component.reload_seconds.max(0.0); // a NaN counts as zero
        seconds * self.chance_of_use(now) / self.component.bytes.0.max(1) as f64
    }

    /// Whether it had a keep-alive, and that is over.
    pub fn keep_alive_is_over(&self, now: Millis) -> bool {
        self.keep_alive.is_some_and(|until| until <= now)
    }

    pub(crate) fn used(&mut self, now: Millis) {
        self.heat = self.heat_at(now) + 1.0;
        self.uses += 1;
        self.last_used = self.last_used.max(now);
    }

    fn heat_at(&self, now: Millis) -> f64 {
        let half_lives = now.since(self.last_used) as f64 / HEAT_HALF_LIFE_MS as f64;
        self.heat * (-half_lives).exp2()
    }
}
