//! Claims on the card's memory: pins, holds and reservations. They last until they are released: the caller keeps their times
//! to live, and releases them when they expire.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Ledger, Name};
use crate::nouns::{Bytes, ComponentId};
use crate::parts::Part;
use crate::resident::Resident;

/// Identifies the pin of a model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PinId(pub Name);

/// Identifies a client's hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HoldId(pub Name);

/// Identifies another program's reservation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReservationId(pub Name);

impl PinId {
    /// A pin's identifier from its text.
    pub fn new(text: impl Into<Name>) -> PinId {
        PinId(text.into())
    }
}

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
pub(crate) struct Reservation {
    pub(crate) label: String,
    pub(crate) bytes: Bytes,
}

/// For whom a component is pinned or held, as a stage sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// For the model of the stage, all of it: the stage may do with it as if there were no claim.
    OfItsModel,
    /// For another model, or for another one too.
    OfOthers,
}

impl Ledger {
    /// Who has a claim on a component, for a stage of a model with these components, which are sorted. A pin or a hold that keeps
    /// other components too is of others.
    pub(crate) fn claim_on(&self, resident: &Resident, model: &[ComponentId]) -> Option<Claim> {
        if !resident.pinned && resident.held == 0 {
            return None;
        }
        let id = &resident.component.id;
        let all = self.pins.values().chain(self.holds.values());
        let mut on_it = all.filter(|kept| kept.binary_search(id).is_ok());
        let is_of_model = |id: &ComponentId| model.binary_search(id).is_ok();
        let is_own = on_it.all(|kept| kept.iter().all(is_of_model));
        Some(if is_own {
            Claim::OfItsModel
        } else {
            Claim::OfOthers
        })
    }

    /// Bytes that pins keep from stages of a model with these components, which are sorted.
    pub fn pinned_for_others(&self, model: &[ComponentId]) -> Bytes {
        let pinned = self.residents.values().filter(|r| r.pinned);
        pinned.map(|r| self.kept_for_others(r, model)).sum()
    }

    /// Bytes that a component keeps for those who claimed it, while a stage of a model with these components wants them: all of one
    /// that is whole; of one that is streamed already, more may be streamed.
    pub(crate) fn kept_for_others(&self, resident: &Resident, model: &[ComponentId]) -> Bytes {
        let component = &resident.component;
        match (self.claim_on(resident, model), resident.part) {
            (Some(Claim::OfOthers), Part::WHOLE) => resident.bytes(),
            (Some(Claim::OfOthers), _) => resident.bytes().min(component.bytes_of(component.least())),
            (Some(Claim::OfItsModel) | None, _) => Bytes::ZERO,
        }
    }

    /// Keeps the components of a model on the card until it is unpinned, those that are loaded later too. Replaces a pin with the
    /// same id.
    pub fn pin(&mut self, model: PinId, components: Vec<ComponentId>) {
        self.unpin(&model);
        let components = sorted(components);
        for id in &components {
            if let Some(resident) = self.residents.get_mut(id) {
                resident.pinned = true;
            }
        }
        self.pins.insert(model, components);
    }

    /// Removes a pin. False if there was none.
    pub fn unpin(&mut self, model: &PinId) -> bool {
        let Some(components) = self.pins.remove(model) else {
            return false;
        };
        for id in components {
            let is_pinned = self.is_pinned(&id);
            if let Some(resident) = self.residents.get_mut(&id) {
                resident.pinned = is_pinned;
            }
        }
        true
    }

    /// All pins with their components, which are sorted, including those that are not loaded.
    pub fn pins(&self) -> impl Iterator<Item = (&PinId, &[ComponentId])> {
        self.pins.iter().map(|(id, components)| (id, &components[..]))
    }

    pub(crate) fn is_pinned(&self, id: &ComponentId) -> bool {
        self.pins
            .values()
            .any(|components| components.binary_search(id).is_ok())
    }

    /// Keeps components on the card for a client until the hold is released. Replaces a hold with the same id.
    pub fn hold(&mut self, hold: HoldId, components: Vec<ComponentId>) {
        self.release_hold(&hold);
        let components = sorted(components);
        for id in &components {
            if let Some(resident) = self.residents.get_mut(id) {
                resident.held += 1;
            }
        }
        self.holds.insert(hold, components);
    }

    /// All holds with their components, which are sorted.
    pub fn holds(&self) -> impl Iterator<Item = (&HoldId, &[ComponentId])> {
        self.holds.iter().map(|(id, components)| (id, &components[..]))
    }

    /// Removes a hold. False if there was none.
    pub fn release_hold(&mut self, hold: &HoldId) -> bool {
        let Some(components) = self.holds.remove(hold) else {
            return false;
        };
        for id in &components {
            if let Some(resident) = self.residents.get_mut(id) {
                resident.held = resident.held.saturating_sub(1);
            }
        }
        true
    }

    /// Reserves bytes for another program until the reservation is released. Replaces a reservation with the same id.
    /// Growth of foreign memory from now on counts as use of reservations first.
    pub fn reserve(&mut self, r: ReservationId, label: String, bytes: Bytes) {
        self.release_reservation(&r);
        if self.reservations.is_empty() {
            self.foreign_before_reservations = self.book.foreign;
        }
        self.reservations.insert(r, Reservation { label, bytes });
    }

    /// Bytes that other programs held when the first of the reservations was made; `None` without a reservation.
    pub fn foreign_before_reservations(&self) -> Option<Bytes> {
        (!self.reservations.is_empty()).then_some(self.foreign_before_reservations)
    }

    /// Records that the reservations were made on an earlier ledger of this card, when other programs held `foreign` bytes.
    /// Bytes that they hold beyond this count as use of the reservations.
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
            .filter(|components| components.binary_search(id).is_ok())
            .count() as u32
    }
}

fn sorted(mut components: Vec<ComponentId>) -> Vec<ComponentId> {
    components.sort_unstable();
    components.dedup();
    components
}
