//! Loads, evictions and leases. Each is a pair of entries (begin, then complete or abort), so that an interrupted one
//! is visible and can be undone.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Ledger;
use crate::nouns::{Bytes, Component, ComponentId, Millis, StageNeed};
use crate::parts::Part;
use crate::resident::{Resident, ResidentState, Resize};

/// Identifies the lease of one running stage on its components.
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
    /// A load of a component that is booked already.
    #[error("{0} is on the card already")]
    AlreadyThere(ComponentId),
    /// An entry about a component that is not booked.
    #[error("{0} is not on the card")]
    Unknown(ComponentId),
    /// A stage needs a component that is not loaded.
    #[error("{0} is not resident")]
    NotResident(ComponentId),
    /// The entry is not allowed in the component's state.
    #[error("{id} is {state:?}")]
    WrongState { id: ComponentId, state: ResidentState },
    /// An eviction of a component that a stage runs on, or a change of its part.
    #[error("{0} is in use")]
    Leased(ComponentId),
    /// A load of more bytes than are free or slack.
    #[error("{needed} needed, {available} available")]
    NoRoom {
        needed: Bytes,
        /// Free and slack bytes.
        available: Bytes,
    },
    /// A release of a lease that does not exist, or was released before.
    #[error("no lease {}", .0.0)]
    UnknownLease(LeaseId),
}

impl Ledger {
    /// Books the bytes of a component, or of a part of it, before the first of them is allocated.
    ///
    /// # Errors
    /// [`LedgerError::AlreadyThere`] if it is booked already, [`LedgerError::NoRoom`] if it exceeds free and slack
    /// bytes.
    pub fn begin_load(&mut self, c: &Component, part: Part, now: Millis) -> Result<(), LedgerError> {
        if self.residents.contains_key(&c.id) {
            return Err(LedgerError::AlreadyThere(c.id.clone()));
        }
        self.claim(c.bytes_of(part))?;
        let mut resident = Resident::loading(c.clone(), part, now);
        resident.pinned = self.is_pinned(&c.id);
        resident.held = self.holds_on(&c.id);
        self.residents.insert(c.id.clone(), resident);
        Ok(())
    }

    /// Marks a loading component as resident: its last byte has arrived.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if it is not loading.
    pub fn complete_load(&mut self, id: &ComponentId, now: Millis) -> Result<(), LedgerError> {
        let resident = self.in_state(id, ResidentState::Loading)?;
        resident.state = ResidentState::Resident;
        resident.last_used = resident.last_used.max(now);
        Ok(())
    }

    /// Removes a component whose load failed or was cancelled. Its bytes are late until the driver shows them as
    /// free.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if it is not loading.
    pub fn abort_load(&mut self, id: &ComponentId) -> Result<(), LedgerError> {
        self.in_state(id, ResidentState::Loading)?;
        self.leave(id);
        Ok(())
    }

    /// Starts to keep another part of a component on the card: books the bytes that it grows by. Bytes that it shrinks by are
    /// booked until [`Ledger::complete_resize`].
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if it is not resident,
    /// [`LedgerError::Leased`]; [`LedgerError::NoRoom`].
    pub fn begin_resize(&mut self, c: &Component, part: Part) -> Result<(), LedgerError> {
        let resident = self.in_state(&c.id, ResidentState::Resident)?;
        if resident.leases > 0 {
            return Err(LedgerError::Leased(c.id.clone()));
        }
        let (now, then) = (resident.bytes(), resident.component.bytes_of(part));
        self.claim(then - now)?;
        let resident = self.in_state(&c.id, ResidentState::Resident)?;
        resident.state = ResidentState::Resizing;
        resident.resizing = Some(Resize {
            from: resident.part,
            to: part,
        });
        if then > now {
            resident.part = part;
        }
        Ok(())
    }

    /// Completes a change of the part on the card. Bytes that it has shrunk by are late until the driver shows them as free or
    /// slack.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if no change has begun.
    pub fn complete_resize(&mut self, id: &ComponentId, now: Millis) -> Result<(), LedgerError> {
        let resident = self.in_state(id, ResidentState::Resizing)?;
        resident.last_used = resident.last_used.max(now);
        if self.end_resize(id, |resize| resize.to) > Bytes::ZERO {
            self.late_since = Some(now);
        }
        Ok(())
    }

    /// Cancels a change of the part on the card: what was there before it is there still, and no more.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if no change has begun.
    pub fn abort_resize(&mut self, id: &ComponentId) -> Result<(), LedgerError> {
        self.in_state(id, ResidentState::Resizing)?;
        self.end_resize(id, |resize| resize.from);
        Ok(())
    }

    /// Starts an eviction: from here on no stage can lease the component. Neither a pin nor a hold prevents it: the planner leaves
    /// claimed components to their models, and an unload keeps pinned ones.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if it is not resident,
    /// [`LedgerError::Leased`].
    pub fn begin_evict(&mut self, id: &ComponentId) -> Result<(), LedgerError> {
        let resident = self.in_state(id, ResidentState::Resident)?;
        if resident.leases > 0 {
            return Err(LedgerError::Leased(id.clone()));
        }
        resident.state = ResidentState::Evicting;
        Ok(())
    }

    /// Cancels an eviction that had begun: the component is still resident in full.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if no eviction has begun.
    pub fn abort_evict(&mut self, id: &ComponentId) -> Result<(), LedgerError> {
        self.in_state(id, ResidentState::Evicting)?.state = ResidentState::Resident;
        Ok(())
    }

    /// Completes an eviction. The component's bytes are late until the driver shows them as free or slack.
    ///
    /// # Errors
    /// [`LedgerError::Unknown`] if it is not booked, [`LedgerError::WrongState`] if no eviction has begun.
    pub fn complete_evict(&mut self, id: &ComponentId, now: Millis) -> Result<(), LedgerError> {
        self.in_state(id, ResidentState::Evicting)?;
        self.leave(id);
        self.late_since = Some(now);
        Ok(())
    }

    /// Books slack that was returned to the driver. It is late until the driver shows it as free.
    pub fn complete_trim(&mut self, trimmed: Bytes, now: Millis) {
        let bytes = trimmed.min(self.book.slack);
        if bytes > Bytes::ZERO {
            self.book.slack -= bytes;
            self.book.unexplained += bytes;
            self.late += bytes;
            self.late_since = Some(now);
        }
    }

    /// Starts a stage: all its components must be resident. Books its scratch, as far as bytes are available.
    ///
    /// # Errors
    /// [`LedgerError::NotResident`] for the first component that is not.
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

    /// Ends a stage. Its scratch counts as slack until the driver's figures differ, since pools keep the memory that they have
    /// allocated.
    ///
    /// # Errors
    /// [`LedgerError::UnknownLease`] if there is no such lease, or no longer.
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

    /// Number of stages that run under a lease.
    pub fn leases(&self) -> usize {
        self.leases.len()
    }

    /// Books further bytes of components.
    fn claim(&mut self, needed: Bytes) -> Result<(), LedgerError> {
        let available = self.within_reach();
        if needed > available {
            return Err(LedgerError::NoRoom { needed, available });
        }
        self.book.claim_components(needed);
        Ok(())
    }

    /// Ends a change of the part. Bytes that are no longer booked are late as far as they were really on the card; the result
    /// is their number.
    fn end_resize(&mut self, id: &ComponentId, part_of: impl FnOnce(Resize) -> Part) -> Bytes {
        let Some(resident) = self.residents.get_mut(id) else {
            return Bytes::ZERO;
        };
        let before = resident.bytes();
        resident.part = resident.resizing.take().map_or(resident.part, part_of);
        resident.state = ResidentState::Resident;
        let gone = before - resident.bytes();
        self.give_up(gone);
        gone
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

    /// Removes a component from the book. The bytes that were really on the card for it are late.
    fn leave(&mut self, id: &ComponentId) {
        if let Some(gone) = self.residents.remove(id) {
            self.give_up(gone.bytes());
        }
    }

    /// Bytes that are no longer booked for a component. Those that were really on the card are late.
    fn give_up(&mut self, gone: Bytes) {
        let bytes = gone.min(self.book.components - self.booked());
        self.book.components -= bytes;
        self.book.unexplained += bytes;
        self.late += bytes;
    }
}
