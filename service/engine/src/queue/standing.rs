//! What must stay on cards, and what must stay free: pins, holds, reservations, each with an end that is kept here.
//! Workers are told in full whenever it changes, and when they are new.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pipelines::RequestError;
use residency::{Bytes, Component, ComponentId};
use tokio::time::Instant;

use super::actor::Actor;
use super::cards::Errand;
use super::report::{Freed, ReservationStatus, Reserved};
use super::request::{OpenModels, Reply};
use crate::error::{Error, Shortfall};
use crate::library::Entry;
use crate::messages::{Answer, Command, Standing};

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
    /// When it was to leave last because nobody used it.
    pub(super) asked: Option<Instant>,
}

struct Hold {
    client: String,
    key: String,
    until: Instant,
}

struct Reservation {
    card: usize,
    label: String,
    bytes: Bytes,
    until: Instant,
}

impl Known {
    pub(super) fn components(&self, dtype: &str) -> &[Component] {
        self.components.get(dtype).map_or(&[], Vec::as_slice)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = &ComponentId> {
        self.components.values().flatten().map(|c| &c.id)
    }

    pub(super) fn names(&self, id: &ComponentId) -> bool {
        self.ids().any(|own| own == id)
    }
}

impl Claims {
    /// An entry is named by a request.
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

    /// It was to leave because nobody uses it.
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

    /// Forgets entries that nothing speaks for any more; true if there were any.
    pub(super) fn forget(&mut self, speaks_for: impl Fn(&str, &Known) -> bool) -> bool {
        let before = self.entries.len();
        let (pins, holds) = (&self.pins, &self.holds);
        let claimed = |key: &String| pins.contains(key) || holds.values().any(|hold| hold.key == *key);
        self.entries
            .retain(|key, known| claimed(key) || speaks_for(key, known));
        before != self.entries.len()
    }

    pub(super) fn pinned(&self) -> Vec<String> {
        self.pins.iter().cloned().collect()
    }

    pub(super) fn is_pinned(&self, key: &str) -> bool {
        self.pins.contains(key)
    }

    /// The client that holds an entry, if any does.
    pub(super) fn holder(&self, key: &str) -> Option<&str> {
        self.holds
            .values()
            .find(|hold| hold.key == key)
            .map(|hold| hold.client.as_str())
    }

    /// The holds of an entry.
    pub(super) fn holds_of<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        let holds = self.holds.iter().filter(move |(_, hold)| hold.key == key);
        holds.map(|(id, _)| id.as_str())
    }

    /// Whether another pinned entry has a component too.
    pub(super) fn is_pinned_by_another(&self, key: &str, id: &ComponentId) -> bool {
        let others = self.pins.iter().filter(|other| *other != key);
        let mut known = others.filter_map(|other| self.entries.get(other));
        known.any(|known| known.names(id))
    }

    /// An entry takes another's place: its pins and holds are its from now on.
    pub(super) fn pass_on(&mut self, from: &str, to: &str) {
        if self.pins.remove(from) {
            self.pins.insert(to.to_owned());
        }
        for hold in self.holds.values_mut().filter(|hold| hold.key == from) {
            to.clone_into(&mut hold.key);
        }
    }

    /// Ends what has run out; true if anything has.
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
                label: reservation.label.clone(),
                bytes: reservation.bytes,
                expires_in: reservation.until.saturating_duration_since(now),
            })
            .collect()
    }

    /// What the worker of a card must keep. Claims on entries that are `away` do not count there for now; what stands
    /// `beside` a model that is to replace it is held.
    fn standing(
        &self,
        card: usize,
        dtype: &str,
        away: &BTreeSet<&str>,
        beside: Vec<(String, Vec<ComponentId>)>,
    ) -> Standing {
        let ids = |key: &String| -> Vec<ComponentId> {
            let known = self.entries.get(key);
            known
                .map_or(&[][..], |known| known.components(dtype))
                .iter()
                .map(|c| c.id.clone())
                .collect()
        };
        let pins = self.pins.iter().filter(|key| !away.contains(key.as_str()));
        let pins: BTreeSet<ComponentId> = pins.flat_map(ids).collect();
        let holds = self
            .holds
            .iter()
            .filter(|(_, hold)| !away.contains(hold.key.as_str()));
        let reservations = self
            .reservations
            .iter()
            .filter(|(_, reservation)| reservation.card == card);
        Standing {
            pins: pins.into_iter().collect(),
            holds: holds
                .map(|(id, hold)| (id.clone(), ids(&hold.key)))
                .chain(beside)
                .collect(),
            reservations: reservations
                .map(|(id, r)| (id.clone(), r.label.clone(), r.bytes))
                .collect(),
        }
    }
}

impl Actor {
    pub(super) fn pin(
        &mut self,
        entry: &Arc<Entry>,
        models: &OpenModels,
        unpin: bool,
        now: Instant,
    ) -> Vec<String> {
        let models = self.refreshed(entry, models);
        self.claims.learn(entry, &models, now);
        if unpin {
            self.claims.pins.remove(&entry.key);
        } else {
            self.claims.pins.insert(entry.key.clone());
        }
        self.claims_changed(now);
        self.claims.pinned()
    }

    pub(super) fn hold(
        &mut self,
        entry: &Arc<Entry>,
        models: &OpenModels,
        client: String,
        ttl: Duration,
        now: Instant,
    ) -> String {
        let models = self.refreshed(entry, models);
        self.claims.learn(entry, &models, now);
        let mut same = self.claims.holds.iter_mut();
        let renewed = same.find(|(_, hold)| hold.client == client && hold.key == entry.key);
        if let Some((id, hold)) = renewed {
            hold.until = now + ttl;
            return id.clone();
        }
        let id = format!("hold-{}", uuid::Uuid::new_v4().simple());
        self.claims.holds.insert(
            id.clone(),
            Hold {
                client,
                key: entry.key.clone(),
                until: now + ttl,
            },
        );
        self.claims_changed(now);
        id
    }

    pub(super) fn release_hold(&mut self, id: &str, now: Instant) -> bool {
        let released = self.claims.holds.remove(id).is_some();
        self.claims_changed(now);
        released
    }

    pub(super) fn release_reservation(&mut self, id: &str, now: Instant) -> bool {
        let released = self.claims.reservations.remove(id).is_some();
        self.claims_changed(now);
        released
    }

    /// Tells the workers whom it concerns.
    pub(super) fn claims_changed(&mut self, _now: Instant) {
        for index in 0..self.cards.len() {
            self.stand(index, false);
        }
        self.replan = true;
        self.dirty = true;
    }

    /// Tells one worker what must stay, and brings a fresh one's pinned components back.
    pub(super) fn stand(&mut self, index: usize, fresh_worker: bool) {
        let dtype = self.cards[index].description.compute_dtype.clone();
        let (away, beside) = self.swaps_on(index);
        let standing = self.claims.standing(index, &dtype, &away, beside);
        let away: BTreeSet<String> = away.into_iter().map(str::to_owned).collect();
        let card = &mut self.cards[index];
        card.stand(standing, fresh_worker);
        if !fresh_worker {
            return;
        }
        let lost = std::mem::take(&mut card.lost_residents);
        for known in self
            .claims
            .pins
            .iter()
            .filter(|key| !away.contains(*key)) // its swap brings it back
            .filter_map(|key| self.claims.entries.get(key))
        {
            let back = known.components(&dtype).iter().filter(|c| lost.contains(&c.id));
            let back: Vec<Component> = back.cloned().collect();
            if !back.is_empty() {
                card.restore.push_back((known.entry.clone(), back));
            }
        }
    }

    pub(super) fn reserve(
        &mut self,
        card: &str,
        bytes: Bytes,
        ttl: Duration,
        label: String,
        reply: Reply<Result<Reserved, Error>>,
        now: Instant,
    ) {
        let room =
            |index: usize| self.cards[index].ledger.total() - self.cards[index].ledger.accounts().foreign;
        let ready = (0..self.cards.len()).filter(|&index| self.cards[index].is_ready());
        let wanted = ready.filter(|&index| card.is_empty() || self.cards[index].description.id == card);
        let Some(index) = wanted.max_by_key(|&index| room(index)) else {
            let _ = reply.send(Err(self.not_ready(card)));
            return;
        };
        let id = self.number();
        let errand = Errand::Reserve(Wanted {
            label,
            bytes,
            ttl,
            reply,
        });
        self.cards[index].errand(id, errand, Command::MakeRoom { id, bytes }, now);
    }

    /// The worker has made room, or as much as it could. Until now nothing was sent that could have taken it.
    pub(super) fn room_made(&mut self, index: usize, wanted: Wanted, answer: Answer, now: Instant) {
        let Wanted {
            label,
            bytes,
            ttl,
            reply,
        } = wanted;
        let card = self.cards[index].description.id.clone();
        let result = match answer {
            Answer::Unloaded { freed, short, .. } if short == Bytes::ZERO => {
                let id = format!("reservation-{}", uuid::Uuid::new_v4().simple());
                let reservation = Reservation {
                    card: index,
                    label,
                    bytes,
                    until: now + ttl,
                };
                self.claims.reservations.insert(id.clone(), reservation);
                let evicted = freed.into_iter().map(|(component, unloaded)| Freed {
                    component,
                    card: card.clone(),
                    booked: unloaded.booked,
                    freed: unloaded.freed,
                });
                Ok(Reserved {
                    id,
                    bytes,
                    evicted: evicted.collect(),
                    card: card.clone(),
                })
            }
            Answer::Unloaded { short, .. } => {
                let ledger = &self.cards[index].ledger;
                Err(Error::MemoryTaken(Box::new(Shortfall {
                    stage: "reserve".into(),
                    needed: bytes,
                    free: bytes - short,
                    capacity: ledger.total(),
                    holders: ledger.holders(),
                    fallbacks: Vec::new(),
                })))
            }
            Answer::Trimmed(_) => Err(Error::Internal(
                "a worker trimmed when it was to make room".into(),
            )),
            Answer::Failed(problem) => Err(Error::Internal(problem)),
        };
        if let Err(Ok(unwanted)) = reply.send(result) {
            self.claims.reservations.remove(&unwanted.id); // whoever asked has left
        }
        self.claims_changed(now);
    }

    /// Why none of the cards that were asked for (empty: all) can be used.
    pub(super) fn not_ready(&self, card: &str) -> Error {
        let ids = || self.cards.iter().map(|c| c.description.id.as_str());
        if !card.is_empty() && ids().all(|id| id != card) {
            let there_are = ids().collect::<Vec<_>>().join(", ");
            return Error::Invalid(vec![RequestError {
                field: "card".into(),
                problem: format!("is {card:?}; there are {there_are}"),
            }]);
        }
        let states = self
            .cards
            .iter()
            .map(|c| format!("{} is {}", c.description.id, c.state_name()));
        Error::CardNotReady(states.collect::<Vec<_>>().join(", "))
    }
}

/// A reservation that is being made.
pub(super) struct Wanted {
    pub(super) label: String,
    pub(super) bytes: Bytes,
    pub(super) ttl: Duration,
    pub(super) reply: Reply<Result<Reserved, Error>>,
}
