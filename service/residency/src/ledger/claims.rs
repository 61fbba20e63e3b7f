//! What others ask of the card's memory: pins, holds, keep-alives, reservations, and how they end.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{LATE_AT_MOST_MS, Ledger, Name};
use crate::nouns::{Bytes, ComponentId, Millis};

/// Names a client's hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HoldId(pub Name);

/// Names another program's reservation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReservationId(pub Name);

impl HoldId {
    /// A hold's name from its text.
    pub fn new(text: impl Into<Name>) -> HoldId {
        HoldId(text.into())
    }
}

impl ReservationId {
    /// A reservation's name from its text.
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

/// Something whose time was over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expired {
    /// A client did not renew its hold.
    Hold(HoldId),
    /// Another program's reservation ended.
    Reservation {
        /// Its name.
        id: ReservationId,
        /// What it was for.
        label: String,
        /// What it had booked.
        bytes: Bytes,
    },
    /// Nobody has used this component for as long as it was to be kept alive: the janitor may have it.
    KeepAlive(ComponentId),
    /// Evicted bytes never came back: somebody else has them. They count as foreign from here on.
    Late(Bytes),
}

impl Ledger {
    /// Keeps a component on the card until it is unpinned, from now or from when it is loaded.
    pub fn pin(&mut self, id: ComponentId) {
        if let Some(resident) = self.residents.get_mut(&id) {
            resident.pinned = true;
        }
        self.pins.insert(id);
    }

    /// Ends a pin. False if there was none.
    pub fn unpin(&mut self, id: &ComponentId) -> bool {
        if let Some(resident) = self.residents.get_mut(id) {
            resident.pinned = false;
        }
        self.pins.remove(id)
    }

    /// All pins, of residents and of what may be loaded later.
    pub fn pins(&self) -> impl Iterator<Item = &ComponentId> {
        self.pins.iter()
    }

    /// Keeps components on the card for a client until a point in time. A hold of the same name is replaced.
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

    /// A client used what it holds: its hold lasts until `until`, or as long as it did if that is later. False if
    /// there is no such hold.
    pub fn renew_hold(&mut self, hold: &HoldId, until: Millis) -> bool {
        let Some(hold) = self.holds.get_mut(hold) else {
            return false;
        };
        hold.until = hold.until.max(until);
        true
    }

    /// Ends a hold. False if there was none.
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

    /// Books bytes for another program until a point in time. A reservation of the same name is replaced. What others
    /// take from now on counts as taken from reservations first.
    pub fn reserve(&mut self, r: ReservationId, label: String, bytes: Bytes, until: Millis) {
        self.release_reservation(&r);
        if self.reservations.is_empty() {
            self.foreign_before_reservations = self.book.foreign;
        }
        self.reservations.insert(r, Reservation { label, bytes, until });
    }

    /// Ends a reservation. False if there was none.
    pub fn release_reservation(&mut self, r: &ReservationId) -> bool {
        let taken = self.reserved() - self.untaken();
        let Some(gone) = self.reservations.remove(r) else {
            return false;
        };
        // What its program took stays where it is: foreign, and no longer anybody's reservation.
        self.foreign_before_reservations += gone.bytes.min(taken);
        true
    }

    /// Until when the janitor leaves a component alone; `None` leaves it to the janitor's own policy. False if the
    /// component is not on the card. Whoever runs a stage renews it.
    pub fn set_keep_alive(&mut self, id: &ComponentId, until: Option<Millis>) -> bool {
        let Some(resident) = self.residents.get_mut(id) else {
            return false;
        };
        resident.keep_alive = until;
        resident.lapsed = false;
        true
    }

    /// Ends holds and reservations whose time is over, and names the components that were kept alive long enough.
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

    /// Bytes of all reservations.
    pub(crate) fn reserved(&self) -> Bytes {
        self.reservations.values().map(|r| r.bytes).sum()
    }

    /// Reserved bytes that nobody has taken yet.
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
