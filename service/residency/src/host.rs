//! The machine's memory that the components of a card hold: the last place before the disk.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::nouns::{Bytes, Component, ComponentId};

/// Memory of the machine that components hold: blocks that are streamed from it, and blocks of components that left the card, from
/// where they come back. Only what the system cannot take away counts: pinned copies, and pages of files that are registered with the
/// driver.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostMemory {
    /// The most that they may hold; `None`: what is available, less a share for others.
    pub limit: Option<Bytes>,
    pub components: BTreeMap<ComponentId, HostShare>,
}

/// What one component holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostShare {
    pub component: Component,
    pub bytes: Bytes,
}
