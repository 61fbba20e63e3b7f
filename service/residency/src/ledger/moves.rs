//! Loads, evictions and leases: each a pair of entries, so that an interrupted one can be seen and undone.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Ledger;
use crate::nouns::{Bytes, Component, ComponentId, Millis, StageNeed};
use crate::resident::{Resident, ResidentState};

/// One stage's right to run on its components.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lease {
    pub(crate) components: Vec<ComponentId>,
    pub(crate) scratch: Bytes,
}

/// Why the ledger refused an entry.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LedgerError {
    /// A load of something that is booked already.
    #[error("{0} is on the card already")]
    AlreadyThere(ComponentId),
    /// An entry about a component that has nothing booked.
    #[error("{0} is not on the card")]
    Unknown(ComponentId),
    /// A stage asked for a component that is not there in full.
    #[error("{0} is not resident")]
    NotResident(ComponentId),
    /// The entry does not follow from the component's state.
    #[error("{id} is {state:?}")]
    WrongState {
        /// The component.
        id: ComponentId,
        /// Its state.
        state: ResidentState,
    },
    /// An eviction of something a stage runs on.
    #[error("{0} is in use")]
    Leased(ComponentId),
    /// An eviction of something pinned.
    #[error("{0} is pinned")]
    Pinned(ComponentId),
    /// A load of more bytes than are free or slack.
    #[error("{needed} needed, {available} available")]
    NoRoom {
        /// Bytes of the component.
        needed: Bytes,
        /// Free and slack.
        available: Bytes,
    },
    /// A release of something never leased, or released before.
    #[error("no lease {}", .0.0)]
    UnknownLease(LeaseId),
}

impl Ledger {
    /// Books a component's bytes before the first of them is allocated.
    pub fn begin_load(&mut self, c: &Component, now: Millis) -> Result<(), LedgerError> {
        if self.residents.contains_key(&c.id) {
            return Err(LedgerError::AlreadyThere(c.id.clone()));
        }
        let available = self.within_reach();
        if c.bytes > available {
            return Err(LedgerError::NoRoom {
                needed: c.bytes,
                available,
            });
        }
        self.book.claim_components(c.bytes);
        let mut resident = Resident::loading(c.clone(), now);
        resident.pinned = self.pins.contains(&c.id);
        resident.held = self.holds_on(&c.id);
        self.residents.insert(c.id.clone(), resident);
        Ok(())
    }

    /// The last byte arrived.
    pub fn complete_load(&mut self, id: &ComponentId, now: Millis) -> Result<(), LedgerError> {
        let resident = self.in_state(id, ResidentState::Loading)?;
        resident.state = ResidentState::Resident;
        resident.last_used = resident.last_used.max(now);
        Ok(())
    }

    /// The load failed or was cancelled; what had arrived is freed. Its bytes are late until the driver shows them.
    pub fn abort_load(&mut self, id: &ComponentId) -> Result<(), LedgerError> {
        self.in_state(id, ResidentState::Loading)?;
        self.leave(id);
        Ok(())
    }

    /// An eviction starts: from here on no stage can lease it. Refused for what is leased or pinned. A hold does not
    /// bind the one who carries out an explicit unload; plans never evict what is held.
    pub fn begin_evict(&mut self, id: &ComponentId) -> Result<(), LedgerError> {
        let resident = self.in_state(id, ResidentState::Resident)?;
        if resident.leases > 0 {
            return Err(LedgerError::Leased(id.clone()));
        }
        if resident.pinned {
            return Err(LedgerError::Pinned(id.clone()));
        }
        resident.state = ResidentState::Evicting;
        Ok(())
    }

    /// An eviction that had begun does not happen: the component is still there in full.
    pub fn abort_evict(&mut self, id: &ComponentId) -> Result<(), LedgerError> {
        self.in_state(id, ResidentState::Evicting)?.state = ResidentState::Resident;
        Ok(())
    }

    /// The component is gone. Its bytes are late until the driver shows them as free or slack.
    pub fn complete_evict(&mut self, id: &ComponentId, now: Millis) -> Result<(), LedgerError> {
        self.in_state(id, ResidentState::Evicting)?;
        self.leave(id);
        self.late_since = Some(now);
        Ok(())
    }

    /// Slack was handed back to the driver. It is late until the driver shows it as free.
    pub fn complete_trim(&mut self, trimmed: Bytes, now: Millis) {
        let bytes = trimmed.min(self.book.slack);
        if bytes > Bytes::ZERO {
            self.book.slack -= bytes;
            self.book.unexplained += bytes;
            self.late += bytes;
            self.late_since = Some(now);
        }
    }

    /// A stage starts: all its components must be resident; its scratch is booked, as far as there are bytes for it.
    pub fn lease(&mut self, need: &StageNeed, now: Millis) -> Result<LeaseId, LedgerError> {
        let mut components: Vec<ComponentId> = need.components.iter().map(|c| c.id.clone()).collect();
        components.sort_unstable();
        components.dedup();
        if let Some(missing) = components.iter().find(|id| !self.is_resident(id)) {
            return Err(LedgerError::NotResident(missing.clone()));
        }
        for id in &components {
            if let Some(resident) = self.residents.get_mut(id) {
                resident.leases += 1;
                resident.used(now);
            }
        }
        self.book.claim_scratch(need.scratch);
        let lease = LeaseId(self.next_lease);
        self.next_lease += 1;
        self.leases.insert(
            lease,
            Lease {
                components,
                scratch: need.scratch,
            },
        );
        Ok(lease)
    }

    /// A stage ended. Its scratch is slack until the driver says otherwise, since pools keep what they have had.
    pub fn release(&mut self, lease: LeaseId, now: Millis) -> Result<(), LedgerError> {
        let Lease { components, scratch } = self
            .leases
            .remove(&lease)
            .ok_or(LedgerError::UnknownLease(lease))?;
        for id in &components {
            if let Some(resident) = self.residents.get_mut(id) {
                resident.leases = resident.leases.saturating_sub(1);
                resident.last_used = resident.last_used.max(now);
            }
        }
        let booked = scratch.min(self.book.scratch);
        self.book.scratch -= booked;
        self.book.slack += booked;
        Ok(())
    }

    /// How many stages run under a lease right now.
    pub fn leases(&self) -> usize {
        self.leases.len()
    }

    fn in_state(&mut self, id: &ComponentId, wanted: ResidentState) -> Result<&mut Resident, LedgerError> {
        match self.residents.get_mut(id) {
            None => Err(LedgerError::Unknown(id.clone())),
            Some(resident) if resident.state == wanted => Ok(resident),
            Some(resident) => Err(LedgerError::WrongState {
                id: id.clone(),
                state: resident.state,
            }),
        }
    }

    /// Takes a component off the books. What was really on the card for it is late.
    fn leave(&mut self, id: &ComponentId) {
        if let Some(gone) = self.residents.remove(id) {
            let bytes = gone.component.bytes.min(self.book.components - self.booked());
            self.book.components -= bytes;
            self.book.unexplained += bytes;
            self.late += bytes;
        }
    }
}
