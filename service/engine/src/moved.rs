//! Results of unloads and reservations: components that left a card, components that stayed, and reserved memory.

use residency::{Bytes, Component};
use serde::{Deserialize, Serialize};

use crate::messages::KeptBecause;

/// A component that left a card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Freed {
    /// The component.
    pub component: Component,
    /// Id of the card that it left.
    pub card: String,
    /// Bytes that were booked to it.
    pub booked: Bytes,
    /// Bytes that the driver shows as free since.
    pub freed: Bytes,
}

/// A component that stayed on a card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// The component.
    pub component: Component,
    /// Id of the card that it is on.
    pub card: String,
    /// Why it stayed.
    pub reason: KeptBecause,
}

/// Memory that was reserved for another program.
#[derive(Clone, Debug, PartialEq)]
pub struct Reserved {
    /// Id of the reservation, by which it is released.
    pub id: String,
    /// Id of the card.
    pub card: String,
    /// Bytes that are reserved.
    pub bytes: Bytes,
    /// Components that were evicted for it.
    pub evicted: Vec<Freed>,
}

impl Freed {
    /// The components that a worker reports as unloaded from a card.
    pub(crate) fn on(card: &str, freed: Vec<(Component, gpu::Unloaded)>) -> Vec<Freed> {
        let freed = freed.into_iter().map(|(component, unloaded)| Freed {
            component,
            card: card.to_owned(),
            booked: unloaded.booked,
            freed: unloaded.freed,
        });
        freed.collect()
    }
}

impl Kept {
    /// The components that a worker reports as kept on a card, with the reasons.
    pub(crate) fn on(card: &str, kept: Vec<(Component, KeptBecause)>) -> Vec<Kept> {
        let kept = kept.into_iter().map(|(component, reason)| Kept {
            component,
            card: card.to_owned(),
            reason,
        });
        kept.collect()
    }
}
