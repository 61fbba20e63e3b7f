//! The types that every crate shares: bytes, components, stages, points in time.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::parts::Parts;

/// A number of bytes. Arithmetic saturates: no account can be negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Bytes = Bytes(0);

    /// `n` MiB.
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Bytes {
        Bytes(n << 30)
    }
}

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Bytes) {
        *self = *self - other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(items: I) -> Bytes {
        items.fold(Bytes::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    /// Binary units with one decimal: `22.2 GiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 {
            write!(f, "{} B", self.0)
        } else {
            write!(f, "{value:.1} {}", UNITS[unit])
        }
    }
}

/// A point in time in milliseconds since an epoch that the caller chooses. This crate has no clock: the caller passes
/// the time, so that tests can too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Millis(pub u64);

impl Millis {
    /// This point plus `milliseconds`, saturating.
    pub fn after(self, milliseconds: u64) -> Millis {
        Millis(self.0.saturating_add(milliseconds))
    }

    /// Milliseconds since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Millis) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Identity of a component: hash of its content (or, until that is known, its resolved path), quantization and dtype.
/// Entries with the same identity share one copy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ComponentId(pub Arc<str>);

impl ComponentId {
    /// An identity from its text.
    pub fn new(text: impl Into<Arc<str>>) -> ComponentId {
        ComponentId(text.into())
    }
}

impl fmt::Display for ComponentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The unit of residence: it is loaded, leased, pinned and evicted under one account, whole or in a part ([`Parts`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Component {
    pub id: ComponentId,
    /// The component's name in diffusers: `transformer`, `vae`, `text_encoder_2`.
    pub name: String,
    /// Exact bytes on the card, known from the checkpoint's header before anything is read.
    pub bytes: Bytes,
    /// Measured or predicted seconds to reload it: the cheapest to reload is evicted first.
    pub reload_seconds: f64,
    /// The parts of it that can be on the card while the rest is streamed; none if it has to be there whole.
    pub parts: Parts,
}

/// The needs of one stage of a job on the card while it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageNeed {
    /// Stage name: `encode_text`, `encode_image`, `denoise`, `decode`, or `load` for a plain load.
    pub name: String,
    /// Components that must be resident when the stage starts.
    pub components: Vec<Component>,
    /// Activation bytes at the stage's peak: the family's prediction, or the learned estimate.
    pub scratch: Bytes,
    /// Bytes of the card that stay free while it runs, if the job asks for more than the card's own headroom.
    pub headroom: Bytes,
    /// Components that later stages of the job need: they are evicted last, since they would be reloaded at once.
    pub later: Vec<ComponentId>,
    /// All components of its model, sorted. Pins and holds of these alone do not keep the stage from running: its model's components
    /// make room for each other, after those of all others.
    pub model: Vec<ComponentId>,
    /// How often the stage goes over the blocks of its components. What is streamed crosses the link in each pass.
    pub passes: u32,
}

impl StageNeed {
    /// Bytes of whole components and scratch: the stage's peak on the card where nothing is streamed.
    pub fn peak(&self) -> Bytes {
        self.components.iter().map(|c| c.bytes).sum::<Bytes>() + self.scratch
    }

    /// The stage's peak on the card where as much as possible is streamed.
    pub fn least_peak(&self) -> Bytes {
        let least = self.components.iter().map(|c| c.bytes_of(c.least()));
        least.sum::<Bytes>() + self.scratch
    }
}

/// A holder of memory that is not available to us.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process name if visible, or a description such as `other processes` or a reservation's label.
    pub name: String,
    /// Process id if visible; inside a container it often is not.
    pub pid: Option<u32>,
    pub bytes: Bytes,
}

/// The driver's figures of a card's memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverTruth {
    pub total: Bytes,
    /// Free according to the driver (for system memory: available inside the cgroup, page cache counted as free).
    pub free: Bytes,
    /// Allocated from component pools.
    pub components: Bytes,
    /// Allocated for activations at this moment.
    pub scratch: Bytes,
    /// Reserved by our pools and unused: can be allocated without asking the driver.
    pub slack: Bytes,
    /// Workspaces of libraries, and the padding of component pools to the driver's granularity.
    pub workspaces: Bytes,
    /// The context itself: code, stacks, fixed cost of the process on the card.
    pub context: Bytes,
    /// Visible holders in other processes.
    pub holders: Vec<Holder>,
}

impl DriverTruth {
    /// The figures of a card of which the service may use at most `limit` bytes: memory beyond the limit is left out. Memory of
    /// other processes counts only as far as it reduces these bytes.
    #[must_use]
    pub fn limited_to(mut self, limit: Bytes) -> DriverTruth {
        let own = self.components + self.scratch + self.slack + self.workspaces + self.context;
        self.total = self.total.min(limit);
        self.free = self.free.min(self.total - own);
        if own + self.free >= self.total {
            self.holders.clear();
        }
        self
    }
}
