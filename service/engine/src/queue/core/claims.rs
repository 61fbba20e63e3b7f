//! Pins, holds and reservations of clients. A worker is sent the whole set of claims when it is new and whenever the set changes.

use std::sync::Arc;
use std::time::Duration;

use model::RequestError;
use residency::{Bytes, Fits};
use tokio::time::Instant;

use super::Core;
use crate::error::{Change, ChangedTo, Error, Fallback, Shortfall};
use crate::job::Reach;
use crate::library::Entry;
use crate::messages::{Answer, Command};
use crate::moved::{Freed, Reserved};
use crate::queue::cards::{PendingRequest, ReservationRequest};
use crate::queue::claims::{Holding, KeptClaims, KeptHold, KeptReservation};
use crate::queue::request::{OpenModels, Reply};

impl Core {
    /// Returns the keys of all pinned entries.
    pub(in crate::queue) fn pin(
        &mut self,
        entry: &Arc<Entry>,
        models: &OpenModels,
        now: Instant,
    ) -> Vec<String> {
        let models = self.refreshed(entry, models);
        self.claims.learn(entry, &models, now);
        self.claims.pin(&entry.key);
        self.claims_changed(now);
        self.claims.pinned()
    }

    /// Returns the keys of all entries that are still pinned.
    pub(in crate::queue) fn unpin(&mut self, key: &str, now: Instant) -> Vec<String> {
        self.claims.unpin(key);
        self.claims_changed(now);
        self.claims.pinned()
    }

    /// Entries that have components on cards, jobs, pins or holds.
    pub(in crate::queue) fn known_entries(&self) -> Vec<Arc<Entry>> {
        self.claims
            .known()
            .map(|(_, known)| known.entry.clone())
            .collect()
    }

    pub(in crate::queue) fn hold(
        &mut self,
        entry: &Arc<Entry>,
        models: &OpenModels,
        owner: Holding,
        ttl: Duration,
        now: Instant,
    ) -> String {
        let models = self.refreshed(entry, models);
        self.claims.learn(entry, &models, now);
        if let Some(id) = self.claims.renew_hold(&entry.key, &owner, now + ttl) {
            return id;
        }
        let id = self.claims.hold(entry.key.clone(), owner, now + ttl);
        self.claims_changed(now);
        id
    }

    pub(in crate::queue) fn release_hold(&mut self, id: &str, reach: &Reach, now: Instant) -> bool {
        let released = self.claims.release_hold(id, reach);
        self.claims_changed(now);
        released
    }

    pub(in crate::queue) fn release_reservation(&mut self, id: &str, now: Instant) -> bool {
        let released = self.claims.release_reservation(id);
        self.claims_changed(now);
        released
    }

    /// All claims, to keep them over a restart.
    pub(in crate::queue) fn kept_claims(&self, now: Instant) -> KeptClaims {
        let cards: Vec<&str> = self.cards.iter().map(|card| &*card.description.id).collect();
        self.claims.kept(&cards, now)
    }

    pub(in crate::queue) fn restore_hold(&mut self, hold: KeptHold, models: &OpenModels, now: Instant) {
        let models = self.refreshed(&hold.entry, models);
        self.claims.learn(&hold.entry, &models, now);
        self.claims.restore_hold(hold, now);
        self.claims_changed(now);
    }

    pub(in crate::queue) fn restore_reservations(&mut self, kept: Vec<KeptReservation>, now: Instant) {
        for reservation in kept {
            let mut cards = self.cards.iter();
            if let Some(card) = cards.position(|card| card.description.id == reservation.card) {
                self.claims.restore_reservation(card, reservation, now);
            }
        }
        self.claims_changed(now);
    }

    /// Sends the changed claims to the workers.
    pub(super) fn claims_changed(&mut self, now: Instant) {
        for index in 0..self.cards.len() {
            self.send_claims(index, false, now);
        }
        self.replan = true;
        self.dirty = true;
    }

    /// Sends one worker the set of claims on its card. A fresh worker reloads the pinned components that the last one lost.
    pub(super) fn send_claims(&mut self, index: usize, fresh_worker: bool, now: Instant) {
        let dtype = self.cards[index].description.compute_dtype.clone();
        let lost = match fresh_worker {
            true => std::mem::take(&mut self.cards[index].lost_residents),
            false => Default::default(),
        };
        let view = self.view(now);
        let (away, beside) = view.swaps_on(index);
        let standing = self.claims.standing(index, &dtype, &away, beside);
        let back = self.claims.pinned_among(&lost, &dtype, &away); // a swap reloads its own
        let card = &mut self.cards[index];
        card.send_claims(standing, fresh_worker);
        card.restore.extend(back);
    }

    pub(in crate::queue) fn reserve(
        &mut self,
        card: &str,
        request: ReservationRequest,
        reply: Reply<Result<Reserved, Error>>,
        now: Instant,
    ) {
        let room =
            |index: usize| self.cards[index].ledger.total() - self.cards[index].ledger.accounts().foreign;
        let wanted = self.view(now).ready_cards(card).into_iter();
        let Some(index) = wanted.max_by_key(|&index| room(index)) else {
            let _ = reply.send(Err(self.view(now).not_ready(card)));
            return;
        };
        self.make_room(index, request.bytes, request, reply, now);
    }

    /// Renews a reservation. Bytes that it has in addition are made free.
    pub(in crate::queue) fn renew_reservation(
        &mut self,
        mut request: ReservationRequest,
        reply: Reply<Result<Reserved, Error>>,
        now: Instant,
    ) {
        let Some((index, had)) = self.claims.reservation(&request.renews) else {
            let _ = reply.send(Err(no_reservation(&request.renews)));
            return;
        };
        if request.bytes == Bytes::ZERO {
            request.bytes = had;
        }
        if request.bytes > had {
            // Its present bytes are kept free already.
            let more = request.bytes - had;
            return self.make_room(index, more, request, reply, now);
        }
        let card = self.cards[index].description.id.clone();
        let _ = reply.send(self.renewed(request, card, Vec::new(), now));
        self.claims_changed(now);
    }

    fn make_room(
        &mut self,
        index: usize,
        bytes: Bytes,
        request: ReservationRequest,
        reply: Reply<Result<Reserved, Error>>,
        now: Instant,
    ) {
        if !self.cards[index].is_ready() {
            // The card's next worker would never see the command, as commands to the last one are dropped.
            let card = self.cards[index].description.id.clone();
            let _ = reply.send(Err(self.view(now).not_ready(&card)));
            return;
        }
        let id = self.number();
        let pending = PendingRequest::Reserve { request, reply };
        self.cards[index].send_request(id, pending, Command::MakeRoom { id, bytes }, now);
    }

    fn renewed(
        &mut self,
        request: ReservationRequest,
        card: String,
        evicted: Vec<Freed>,
        now: Instant,
    ) -> Result<Reserved, Error> {
        let (id, bytes) = (request.renews, request.bytes);
        if !self.claims.renew_reservation(&id, bytes, now + request.ttl) {
            return Err(no_reservation(&id));
        }
        Ok(Reserved {
            id,
            bytes,
            evicted,
            card,
        })
    }

    /// The worker has made room, or as much as it could. No order was sent meanwhile that could have taken the room.
    pub(super) fn room_made(
        &mut self,
        index: usize,
        request: ReservationRequest,
        reply: Reply<Result<Reserved, Error>>,
        answer: Answer,
        now: Instant,
    ) {
        let card = self.cards[index].description.id.clone();
        let (bytes, is_new) = (request.bytes, request.renews.is_empty());
        let result = match answer {
            Answer::Unloaded { freed, short, .. } if short == Bytes::ZERO && !request.renews.is_empty() => {
                self.renewed(request, card.clone(), Freed::on(&card, freed), now)
            }
            Answer::Unloaded { freed, short, .. } if short == Bytes::ZERO => {
                let id = self.claims.reserve(index, request.by, bytes, now + request.ttl);
                let evicted = Freed::on(&card, freed);
                Ok(Reserved {
                    id,
                    bytes,
                    evicted,
                    card,
                })
            }
            Answer::Unloaded { short, .. } => {
                let ledger = &self.cards[index].ledger;
                let shortfall = Box::new(Shortfall {
                    stage: "reserve".into(),
                    needed: bytes,
                    free: bytes - short,
                    capacity: ledger.capacity(),
                    holders: ledger.holders(),
                    fallbacks: less_of(bytes - short),
                    smallest: None,
                    instead: None,
                    pinned: Bytes::ZERO,
                });
                Err(match bytes > ledger.capacity() {
                    true => Error::NeverFits(shortfall),
                    false => Error::MemoryTaken(shortfall),
                })
            }
            Answer::Trimmed(_) => Err(Error::Internal(
                "a worker trimmed when it was to make room".into(),
            )),
            Answer::Failed(problem) => Err(Error::Internal(problem)),
        };
        if let Err(Ok(unwanted)) = reply.send(result)
            && is_new
        {
            self.claims.release_reservation(&unwanted.id); // the caller has left
        }
        self.claims_changed(now);
    }
}

/// The alternative: a reservation of the bytes that are available.
fn less_of(bytes: Bytes) -> Vec<Fallback> {
    let whole = Bytes(bytes.0 >> 20 << 20);
    let fallback = Fallback {
        change: Change {
            label: whole.to_string(),
            to: ChangedTo::Bytes(whole),
        },
        peak: whole,
        fits: Fits::AfterEvictions,
        saved: Bytes::ZERO,
    };
    (whole > Bytes::ZERO).then_some(fallback).into_iter().collect()
}

fn no_reservation(id: &str) -> Error {
    Error::Invalid(vec![RequestError::new(
        "reservation_id",
        format!("is {id:?}, and there is no such reservation, or it has expired: make another"),
    )])
}
