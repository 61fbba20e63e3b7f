//! Claims on the card's memory: pins, holds, keep-alives and reservations, and how they expire.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{LATE_AT_MOST_MS, Ledger, Name};
use crate::nouns::{Bytes, ComponentId, Millis};

/// Identifies a client's hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HoldId(pub Name);

/// Identifies another program's reservation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReservationId(pub Name);

impl HoldId {
    /// A hold's identifier from its text.
    pub fn new(text: impl Into<Name>) -> HoldId {
        HoldId(text.into())
    }
}

impl ReservationId {
    /// A reservation's identifier from its text.
    pub fn new(text: impl Into<Name>) -> ReservationId {
        ReservationId(text.into())
    }
}

impl fmt::Display for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hold {
    pub(crate) components: Vec<ComponentId>,
    pub(crate) until: Millis,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reservation {
    pub(crate) label: String,
    pub(crate) bytes: Bytes,
    pub(crate) until: Millis,
}

/// A claim whose time is over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expired {
    /// A hold that its client did not renew.
    Hold(HoldId),
    /// A reservation of another program.
    Reservation {
        id: ReservationId,
        /// What the reservation was for, in its owner's words.
        label: String,
        /// Bytes that were reserved.
        bytes: Bytes,
    },
    /// A component that was unused for its whole keep-alive: the janitor may evict it.
    KeepAlive(ComponentId),
    /// Evicted bytes that the driver never showed as free. They count as foreign from here on.
    Late(Bytes),
}

impl Ledger {
    /// Keeps a component on the card until it is unpinned. Also valid for a component that is loaded later.
    pub fn pin(&mut self, id: ComponentId) {
        if let Some(resident) = self.residents.get_mut(&id) {
            resident.pinned = true;
        }
        self.pins.insert(id);
    }

    /// Removes a pin. False if there was none.
    pub fn unpin(&mut self, id: &ComponentId) -> bool {
        if let Some(resident) = self.residents.get_mut(id) {
            resident.pinned = false;
        }
        self.pins.remove(id)
    }

    /// All pins, including those of components that are not loaded.
    pub fn pins(&self) -> impl Iterator<Item = &ComponentId> {
        self.pins.iter()
    }

    /// Keeps components on the card for a client until `until`. Replaces a hold with the same id.
    pub fn hold(&mut self, hold: HoldId, mut components: Vec<ComponentId>, until: Millis) {
        self.release_hold(&hold);
        components.sort_unstable();
        components.dedup();
        for id in &components {
            if let Some(resident) = self.residents.get_mut(id) {
                resident.held += 1;
            }
        }
        self.holds.insert(hold, Hold { components, until });
    }

    /// All holds with their components, which are sorted.
    pub fn holds(&self) -> impl Iterator<Item = (&HoldId, &[ComponentId])> {
        self.holds.iter().map(|(id, hold)| (id, &hold.components[..]))
    }

    /// Extends a hold to `until`; never shortens it. False if there is no such hold.
    pub fn renew_hold(&mut self, hold: &HoldId, until: Millis) -> bool {
        let Some(hold) = self.holds.get_mut(hold) else {
            return false;
        };
        hold.until = hold.until.max(until);
        true
    }

    /// Removes a hold. False if there was none.
    pub fn release_hold(&mut self, hold: &HoldId) -> bool {
        let Some(hold) = self.holds.remove(hold) else {
            return false;
        };
        for id in &hold.components {
            if let Some(resident) = self.residents.get_mut(id) {
                resident.held = resident.held.saturating_sub(1);
            }
        }
        true
    }

    /// Reserves bytes for another program until `until`. Replaces a reservation with the same id. Growth of foreign
    /// memory from now on counts as use of reservations first.
    pub fn reserve(&mut self, r: ReservationId, label: String, bytes: Bytes, until: Millis) {
        self.release_reservation(&r);
        if self.reservations.is_empty() {
            self.foreign_before_reservations = self.book.foreign;
        }
        self.reservations.insert(r, Reservation { label, bytes, until });
    }

    /// What others held when the first of the reservations was made; `None` without one.
    pub fn foreign_before_reservations(&self) -> Option<Bytes> {
        (!self.reservations.is_empty()).then_some(self.foreign_before_reservations)
    }

    /// The reservations were made on an earlier ledger of this card, when others held so much: what they hold beyond it
    /// counts as use of them.
    pub fn reserved_beside(&mut self, foreign: Bytes) {
        self.foreign_before_reservations = self.foreign_before_reservations.min(foreign);
    }

    /// All reservations with their labels and bytes.
    pub fn reservations(&self) -> impl Iterator<Item = (&ReservationId, &str, Bytes)> {
        let all = self.reservations.iter();
        all.map(|(id, reservation)| (id, reservation.label.as_str(), reservation.bytes))
    }

    /// Removes a reservation. False if there was none.
    pub fn release_reservation(&mut self, r: &ReservationId) -> bool {
        let taken = self.reserved() - self.untaken();
        let Some(gone) = self.reservations.remove(r) else {
            return false;
        };
        // Bytes that its program has allocated stay foreign, and no longer count as use of a reservation.
        self.foreign_before_reservations += gone.bytes.min(taken);
        true
    }

    /// Sets the time until which the janitor must not evict a component; `None` leaves it to the janitor's policy.
    /// False if the component is not on the card. Callers renew it with every stage.
    pub fn set_keep_alive(&mut self, id: &ComponentId, until: Option<Millis>) -> bool {
        let Some(resident) = self.residents.get_mut(id) else {
            return false;
        };
        resident.keep_alive = until;
        resident.lapsed = false;
        true
    }

    /// Removes holds and reservations that have expired, and reports keep-alives that have (each once) and late bytes
    /// that were written off.
    pub fn expire(&mut self, now: Millis) -> Vec<Expired> {
        let mut expired = Vec::new();
        let holds: Vec<HoldId> = self
            .holds
            .iter()
            .filter(|(_, h)| h.until <= now)
            .map(|(id, _)| id.clone())
            .collect();
        for id in holds {
            self.release_hold(&id);
            expired.push(Expired::Hold(id));
        }
        let over = self.reservations.iter().filter(|(_, r)| r.until <= now);
        let over: Vec<_> = over
            .map(|(id, r)| (id.clone(), r.label.clone(), r.bytes))
            .collect();
        for (id, label, bytes) in over {
            self.release_reservation(&id);
            expired.push(Expired::Reservation { id, label, bytes });
        }
        for resident in self.residents.values_mut() {
            if !resident.lapsed && resident.keep_alive_is_over(now) {
                resident.lapsed = true;
                expired.push(Expired::KeepAlive(resident.component.id.clone()));
            }
        }
        if self.late > Bytes::ZERO {
            let since = *self.late_since.get_or_insert(now);
            if now.since(since) >= LATE_AT_MOST_MS {
                expired.push(Expired::Late(self.write_off_late()));
            }
        }
        expired
    }

    /// Bytes of all reservations, used or not.
    pub(crate) fn reserved(&self) -> Bytes {
        self.reservations.values().map(|r| r.bytes).sum()
    }

    /// Reserved bytes that are not in use yet.
    pub(crate) fn untaken(&self) -> Bytes {
        self.reserved() - (self.book.foreign - self.foreign_before_reservations)
    }

    pub(crate) fn holds_on(&self, id: &ComponentId) -> u32 {
        self.holds
            .values()
            .filter(|h| h.components.binary_search(id).is_ok())
            .count() as u32
    }
}
