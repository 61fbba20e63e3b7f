//! The words that every room shares: bytes, components, stages, points in time.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A number of bytes. Subtraction saturates at zero: no account can owe memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes at all.
    pub const ZERO: Bytes = Bytes(0);

    /// `n` times 1024².
    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }

    /// `n` times 1024³.
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

/// A point in time in milliseconds since an epoch that the caller chooses. This crate has no clock:
/// whoever calls says what time it is, so that tests can say so too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Millis(pub u64);

impl Millis {
    /// This point, `milliseconds` later.
    pub fn after(self, milliseconds: u64) -> Millis {
        Millis(self.0.saturating_add(milliseconds))
    }

    /// Milliseconds that have gone by since `earlier`; zero if `earlier` lies ahead.
    pub fn since(self, earlier: Millis) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Identity of a component: its content (or, until that is known, its resolved path), quantization and
/// dtype. Two entries that name the same identity share one copy.
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

/// The unit of residence: what is loaded, leased, pinned and evicted as one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Component {
    /// Identity: content, quantization and dtype.
    pub id: ComponentId,
    /// Its name in the words of diffusers: `transformer`, `vae`, `text_encoder_2`.
    pub name: String,
    /// Exact bytes on the card, known from the checkpoint header before anything is read.
    pub bytes: Bytes,
    /// Measured or predicted seconds to bring it back, so that the cheapest to bring back leaves first.
    pub reload_seconds: f64,
}

/// What one stage of a job needs on the card while it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageNeed {
    /// `encode_text`, `encode_image`, `denoise`, `decode`, or `load` for a plain load.
    pub name: String,
    /// All of these must be resident when the stage starts.
    pub components: Vec<Component>,
    /// Activation bytes at the stage's peak, predicted by the family and corrected by what was learned.
    pub scratch: Bytes,
}

impl StageNeed {
    /// Components and scratch together: what the card must hold at the stage's peak.
    pub fn peak(&self) -> Bytes {
        self.components.iter().map(|c| c.bytes).sum::<Bytes>() + self.scratch
    }
}

/// Somebody who holds memory of the card that is not ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process name where it is visible, or a description such as `other processes` or a reservation's label.
    pub name: String,
    /// Process id where it is visible; in containers it often is not.
    pub pid: Option<u32>,
    /// Bytes held.
    pub bytes: Bytes,
}

/// What the driver says of a card's memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverTruth {
    /// Capacity of the card.
    pub total: Bytes,
    /// Free according to the driver (system memory: available inside the cgroup, page cache counted as free).
    pub free: Bytes,
    /// Allocated from component pools.
    pub components: Bytes,
    /// Allocated for activations right now.
    pub scratch: Bytes,
    /// Reserved by our pools and not in use: ours to hand out without asking the driver.
    pub slack: Bytes,
    /// Library workspaces.
    pub workspaces: Bytes,
    /// The context itself: code, stacks, fixed costs of the process on the card.
    pub context: Bytes,
    /// Other holders that are visible.
    pub holders: Vec<Holder>,
}
