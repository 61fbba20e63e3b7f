//! Pins, holds and reservations, each with its end, and the entries that are known.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use residency::{Bytes, Component, ComponentId};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::report::ReservationStatus;
use super::request::OpenModels;
use crate::job::Reach;
use crate::library::Entry;
use crate::messages::Standing;

/// All claims, and the entries that are known.
#[derive(Default)]
pub(super) struct Claims {
    entries: BTreeMap<String, Known>,
    pins: BTreeSet<String>,
    holds: BTreeMap<String, Hold>,
    reservations: BTreeMap<String, Reservation>,
}

/// An entry that has components on cards, or a claim to.
pub(super) struct Known {
    pub(super) entry: Arc<Entry>,
    /// Components by compute dtype.
    components: BTreeMap<String, Vec<Component>>,
    pub(super) last_used: Instant,
    /// When it was last scheduled to be unloaded as unused.
    pub(super) asked: Option<Instant>,
}

struct Hold {
    owner: Holding,
    key: String,
    until: Instant,
}

/// Who holds a model: a client, by its name in its account.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) client: String,
    pub(super) account: String,
}

/// Who reserves memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserver {
    /// Name for display.
    pub label: String,
    /// The reservation ends with this process, which the caller watches.
    pub process: Option<u32>,
}

/// The claims as they are kept over a restart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeptClaims {
    /// Entries that are pinned.
    pub pins: Vec<Arc<Entry>>,
    pub holds: Vec<KeptHold>,
    pub reservations: Vec<KeptReservation>,
}

/// A hold as it is kept over a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptHold {
    pub id: String,
    pub entry: Arc<Entry>,
    /// Name of the client that holds it.
    pub client: String,
    /// Account of that client.
    pub account: String,
    /// Remaining time.
    pub left: Duration,
}

/// A reservation as it is kept over a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptReservation {
    pub id: String,
    /// Id of the card.
    pub card: String,
    pub by: Reserver,
    pub bytes: Bytes,
    /// Remaining time.
    pub left: Duration,
}

impl From<&str> for Reserver {
    /// A label alone.
    fn from(label: &str) -> Reserver {
        Reserver {
            label: label.to_owned(),
            process: None,
        }
    }
}

struct Reservation {
    card: usize,
    by: Reserver,
    bytes: Bytes,
    until: Instant,
}

impl Known {
    pub(super) fn components(&self, dtype: &str) -> &[Component] {
        self.components.get(dtype).map_or(&[], Vec::as_slice)
    }

    pub(super) fn components_by_dtype(&self) -> &BTreeMap<String, Vec<Component>> {
        &self.components
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &ComponentId> {
        self.components.values().flatten().map(|c| &c.id)
    }

    pub(super) fn names(&self, id: &ComponentId) -> bool {
        self.ids().any(|own| own == id)
    }
}

impl Claims {
    /// Records an entry that a request names.
    pub(super) fn learn(&mut self, entry: &Arc<Entry>, models: &OpenModels, now: Instant) {
        let components = models
            .iter()
            .map(|(dtype, open)| (dtype.clone(), open.components.clone()));
        let known = Known {
            entry: entry.clone(),
            components: components.collect(),
            last_used: now,
            asked: None,
        };
        self.entries.insert(entry.key.clone(), known);
    }

    pub(super) fn used(&mut self, key: &str, now: Instant) {
        if let Some(known) = self.entries.get_mut(key) {
            known.last_used = now;
        }
    }

    /// Records that an unused entry was scheduled to be unloaded.
    pub(super) fn asked(&mut self, key: &str, now: Instant) {
        if let Some(known) = self.entries.get_mut(key) {
            known.asked = Some(now);
        }
    }

    pub(super) fn known(&self) -> impl Iterator<Item = (&String, &Known)> {
        self.entries.iter()
    }

    pub(super) fn get(&self, key: &str) -> Option<&Known> {
        self.entries.get(key)
    }

    /// Forgets entries that are neither claimed nor in use; true if there were any.
    pub(super) fn forget(&mut self, is_in_use: impl Fn(&str, &Known) -> bool) -> bool {
        let before = self.entries.len();
        let (pins, holds) = (&self.pins, &self.holds);
        let claimed = |key: &String| pins.contains(key) || holds.values().any(|hold| hold.key == *key);
        self.entries
            .retain(|key, known| claimed(key) || is_in_use(key, known));
        before != self.entries.len()
    }

    pub(super) fn pinned(&self) -> Vec<String> {
        self.pins.iter().cloned().collect()
    }

    /// The components of an entry on cards of a dtype.
    pub(super) fn component_ids(&self, key: &str, dtype: &str) -> Vec<ComponentId> {
        let components = self
            .entries
            .get(key)
            .map_or(&[][..], |known| known.components(dtype));
        components.iter().map(|c| c.id.clone()).collect()
    }

    pub(super) fn is_pinned(&self, key: &str) -> bool {
        self.pins.contains(key)
    }

    /// The client that holds an entry, if any does.
    pub(super) fn holder(&self, key: &str) -> Option<&str> {
        self.holds
            .values()
            .find(|hold| hold.key == key)
            .map(|hold| hold.owner.client.as_str())
    }

    /// The holds of an entry.
    pub(super) fn holds_of<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        let holds = self.holds.iter().filter(move |(_, hold)| hold.key == key);
        holds.map(|(id, _)| id.as_str())
    }

    /// Transfers the pins and holds of the entry `from` to the entry `to`, which replaces it.
    pub(super) fn pass_on(&mut self, from: &str, to: &str) {
        if self.pins.remove(from) {
            self.pins.insert(to.to_owned());
        }
        for hold in self.holds.values_mut().filter(|hold| hold.key == from) {
            to.clone_into(&mut hold.key);
        }
    }

    pub(super) fn pin(&mut self, key: &str) {
        self.pins.insert(key.to_owned());
    }

    pub(super) fn unpin(&mut self, key: &str) {
        self.pins.remove(key);
    }

    /// Renews the hold that a client has on an entry.
    pub(super) fn renew_hold(&mut self, key: &str, owner: &Holding, until: Instant) -> Option<String> {
        let mut same = self.holds.iter_mut();
        let (id, hold) = same.find(|(_, hold)| hold.owner == *owner && hold.key == key)?;
        hold.until = until;
        Some(id.clone())
    }

    pub(super) fn hold(&mut self, key: String, owner: Holding, until: Instant) -> String {
        let id = format!("hold-{}", uuid::Uuid::new_v4().simple());
        self.holds.insert(id.clone(), Hold { owner, key, until });
        id
    }

    /// Puts a hold back that was there before.
    pub(super) fn restore_hold(&mut self, hold: KeptHold, now: Instant) {
        let owner = Holding {
            client: hold.client,
            account: hold.account,
        };
        let again = Hold {
            owner,
            key: hold.entry.key.clone(),
            until: now + hold.left,
        };
        self.holds.entry(hold.id).or_insert(again);
    }

    /// Puts a reservation of a card, by index, back that was there before.
    pub(super) fn restore_reservation(&mut self, card: usize, kept: KeptReservation, now: Instant) {
        let again = Reservation {
            card,
            by: kept.by,
            bytes: kept.bytes,
            until: now + kept.left,
        };
        self.reservations.entry(kept.id).or_insert(again);
    }

    /// All claims, to keep them over a restart. `cards` are the ids of the cards.
    pub(super) fn kept(&self, cards: &[&str], now: Instant) -> KeptClaims {
        let entry = |key: &String| self.entries.get(key).map(|known| known.entry.clone());
        let holds = self.holds.iter().filter_map(|(id, hold)| {
            Some(KeptHold {
                id: id.clone(),
                entry: entry(&hold.key)?,
                client: hold.owner.client.clone(),
                account: hold.owner.account.clone(),
                left: hold.until.saturating_duration_since(now),
            })
        });
        let reservations = self.reservations.iter().filter_map(|(id, reservation)| {
            Some(KeptReservation {
                id: id.clone(),
                card: (*cards.get(reservation.card)?).to_owned(),
                by: reservation.by.clone(),
                bytes: reservation.bytes,
                left: reservation.until.saturating_duration_since(now),
            })
        });
        KeptClaims {
            pins: self.pins.iter().filter_map(entry).collect(),
            holds: holds.collect(),
            reservations: reservations.collect(),
        }
    }

    pub(super) fn release_hold(&mut self, id: &str, reach: &Reach) -> bool {
        let is_there = self
            .holds
            .get(id)
            .is_some_and(|hold| reach.has(&hold.owner.account));
        is_there && self.holds.remove(id).is_some()
    }

    pub(super) fn release_holds_of(&mut self, account: &str) {
        self.holds.retain(|_, hold| hold.owner.account != account);
    }

    pub(super) fn reserve(&mut self, card: usize, by: Reserver, bytes: Bytes, until: Instant) -> String {
        let id = format!("reservation-{}", uuid::Uuid::new_v4().simple());
        let reservation = Reservation {
            card,
            by,
            bytes,
            until,
        };
        self.reservations.insert(id.clone(), reservation);
        id
    }

    /// A reservation, with the card that it is on.
    pub(super) fn reservation(&self, id: &str) -> Option<(usize, Bytes)> {
        let reservation = self.reservations.get(id)?;
        Some((reservation.card, reservation.bytes))
    }

    /// Changes the size and the end of a reservation. False: it has expired meanwhile.
    pub(super) fn renew_reservation(&mut self, id: &str, bytes: Bytes, until: Instant) -> bool {
        let reservation = self.reservations.get_mut(id);
        if let Some(reservation) = reservation {
            (reservation.bytes, reservation.until) = (bytes, until);
            return true;
        }
        false
    }

    pub(super) fn release_reservation(&mut self, id: &str) -> bool {
        self.reservations.remove(id).is_some()
    }

    /// Pinned components that a worker lost and that its successor is to reload, by entry.
    pub(super) fn pinned_among(
        &self,
        lost: &BTreeSet<ComponentId>,
        dtype: &str,
        away: &BTreeSet<String>,
    ) -> Vec<(Arc<Entry>, Vec<Component>)> {
        let pins = self.pins.iter().filter(|key| !away.contains(*key));
        let known = pins.filter_map(|key| self.entries.get(key));
        let of_each = known.map(|known| {
            let lost = known.components(dtype).iter().filter(|c| lost.contains(&c.id));
            (known.entry.clone(), lost.cloned().collect::<Vec<_>>())
        });
        of_each.filter(|(_, components)| !components.is_empty()).collect()
    }

    /// Ends claims that have expired; true if there were any.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let before = self.holds.len() + self.reservations.len();
        self.holds.retain(|_, hold| now < hold.until);
        self.reservations.retain(|_, reservation| now < reservation.until);
        before != self.holds.len() + self.reservations.len()
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let holds = self.holds.values().map(|hold| hold.until);
        holds
            .chain(self.reservations.values().map(|reservation| reservation.until))
            .min()
    }

    pub(super) fn reservations(&self, card: usize, now: Instant) -> Vec<ReservationStatus> {
        let of_card = self
            .reservations
            .iter()
            .filter(|(_, reservation)| reservation.card == card);
        of_card
            .map(|(id, reservation)| ReservationStatus {
                id: id.clone(),
                by: reservation.by.clone(),
                bytes: reservation.bytes,
                expires_in: reservation.until.saturating_duration_since(now),
            })
            .collect()
    }

    /// The set of claims for the worker of a card. Claims on the entries `away` are left out, as a swap has displaced them; the
    /// components `beside` a model that is to replace them are held.
    pub(super) fn standing(
        &self,
        card: usize,
        dtype: &str,
        away: &BTreeSet<String>,
        beside: Vec<(String, Vec<ComponentId>)>,
    ) -> Standing {
        let ids = |key: &String| self.component_ids(key, dtype);
        let pins = self.pins.iter().filter(|key| !away.contains(*key));
        let holds = self.holds.iter().filter(|(_, hold)| !away.contains(&hold.key));
        let reservations = self
            .reservations
            .iter()
            .filter(|(_, reservation)| reservation.card == card);
        Standing {
            pins: pins.map(|key| (key.clone(), ids(key))).collect(),
            holds: holds
                .map(|(id, hold)| (id.clone(), ids(&hold.key)))
                .chain(beside)
                .collect(),
            reservations: reservations
                .map(|(id, r)| (id.clone(), r.by.label.clone(), r.bytes))
                .collect(),
            foreign_before: None,
        }
    }
}
