//! What others ask of the card beside running something: that components stay, leave, or make room.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gpu::Unloaded;
use residency::{
    Bytes, Component, ComponentId, HoldId, Ledger, Millis, Move, ReservationId, Resident, Verdict,
};

use super::moves::MoveError;
use super::{Card, Flow, Link, millis};
use crate::messages::{Answer, Event, Standing};

/// The supervisor keeps the times to live: here a claim stands until it is no longer said.
const UNTIL_SAID_OTHERWISE: Millis = Millis(u64::MAX);

/// How long an unload waits for the driver to show what left, so that it can say so.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(2);

/// How long room that is made waits for bytes that were given back: as long as patience after an eviction.
const LATE_WITHIN: Duration = Duration::from_secs(5);

/// What left, what stayed and why.
#[derive(Default)]
struct Departures {
    freed: Vec<(Component, Unloaded)>,
    /// Bytes of it that the driver did not show when they left.
    late: Bytes,
    kept: Vec<(Component, String)>,
}

impl Card {
    /// Makes pins, holds and reservations what they are said to be. What is said again is left as it is: a reservation
    /// remembers what its program has taken of it.
    pub(super) fn stand(&mut self, standing: Standing) {
        let old = std::mem::replace(&mut self.standing, standing);
        let pins: BTreeSet<&ComponentId> = self.standing.pins.iter().collect();
        for gone in old.pins.iter().filter(|id| !pins.contains(id)) {
            self.ledger.unpin(gone);
        }
        for id in pins {
            self.ledger.pin(id.clone());
        }

        let was: BTreeMap<&str, &[ComponentId]> = old.holds.iter().map(|(n, c)| (&**n, &**c)).collect();
        let is: BTreeMap<&str, &[ComponentId]> =
            self.standing.holds.iter().map(|(n, c)| (&**n, &**c)).collect();
        for &gone in was.keys().filter(|name| !is.contains_key(*name)) {
            self.ledger.release_hold(&HoldId::new(gone));
        }
        for (name, components) in is.iter().filter(|(name, held)| was.get(*name) != Some(held)) {
            self.ledger
                .hold(HoldId::new(*name), components.to_vec(), UNTIL_SAID_OTHERWISE);
        }

        let was: BTreeMap<&str, (&str, Bytes)> = old
            .reservations
            .iter()
            .map(|(n, l, b)| (&**n, (&**l, *b)))
            .collect();
        let is: BTreeMap<&str, (&str, Bytes)> = self
            .standing
            .reservations
            .iter()
            .map(|(n, l, b)| (&**n, (&**l, *b)))
            .collect();
        for &gone in was.keys().filter(|name| !is.contains_key(*name)) {
            self.ledger.release_reservation(&ReservationId::new(gone));
        }
        for (&name, &(label, bytes)) in is.iter().filter(|(name, booked)| was.get(*name) != Some(booked)) {
            let id = ReservationId::new(name);
            self.ledger
                .reserve(id, label.to_owned(), bytes, UNTIL_SAID_OTHERWISE);
        }
    }

    /// Takes components out, those that must stay excepted.
    pub(super) fn unload(&mut self, id: u64, components: &[ComponentId], link: &mut dyn Link) -> Flow {
        let asked: BTreeSet<&ComponentId> = components.iter().collect();
        let mut left = Departures::default();
        let done = self.take_out(&asked, &mut left, link);
        let done = done.and_then(|()| self.await_departed(&mut left, link));
        self.answer(id, done.map(|()| left.answer(Bytes::ZERO)), link)
    }

    fn take_out(
        &mut self,
        asked: &BTreeSet<&ComponentId>,
        left: &mut Departures,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        for id in asked {
            let Some(resident) = self.ledger.resident(id) else {
                continue;
            };
            let component = resident.component.clone();
            match reason_to_stay(resident) {
                Some(reason) => left.kept.push((component, reason.to_owned())),
                None => self.depart(component, left, link)?,
            }
        }
        Ok(())
    }

    fn depart(
        &mut self,
        component: Component,
        left: &mut Departures,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        let before = self.ledger.late();
        let unloaded = self.evict(&component, None, link)?;
        left.late += self.ledger.late() - before;
        left.freed.push((component, unloaded));
        Ok(())
    }

    /// Waits a little for the driver to show what left, if it did not at once.
    fn await_departed(&mut self, left: &mut Departures, link: &mut dyn Link) -> Result<(), MoveError> {
        if left.unconfirmed().min(left.late) > Bytes::ZERO {
            let until = self.clock.now().after(millis(CONFIRMED_WITHIN));
            self.await_late(until, |_| false, link)?;
            left.confirm(self.ledger.late());
        }
        Ok(())
    }

    /// Hands slack back to the driver.
    pub(super) fn trim(&mut self, id: u64, link: &mut dyn Link) -> Flow {
        let trimmed = self.hand_back_slack(link);
        self.answer(id, trimmed.map(Answer::Trimmed), link)
    }

    /// Makes room for another program, on top of what is reserved already. Where it cannot be had in full, what can be
    /// had is made free all the same, unless the card is too small for it: then nothing leaves for nothing.
    pub(super) fn make_room(&mut self, id: u64, bytes: Bytes, link: &mut dyn Link) -> Flow {
        let mut left = Departures::default();
        let short = self.clear(bytes, &mut left, link);
        self.answer(id, short.map(|short| left.answer(short)), link)
    }

    fn clear(
        &mut self,
        bytes: Bytes,
        left: &mut Departures,
        link: &mut dyn Link,
    ) -> Result<Bytes, MoveError> {
        let until = self.clock.now().after(millis(LATE_WITHIN));
        // Waiting ends with the room, or once it would not be enough.
        let done = |ledger: &Ledger| {
            let usable = ledger.usable();
            usable >= bytes || usable + ledger.late() < bytes
        };
        self.reconcile()?;
        // Nothing leaves for room that is on its way.
        self.await_late(until, done, link)?;
        let victims: Vec<Component> = match residency::make_room(&self.ledger, bytes, self.clock.now()) {
            Verdict::Run { moves } => moves.into_iter().filter_map(evicted).collect(),
            Verdict::Wait { .. } => {
                let idle = self.ledger.residents().filter(|r| r.is_idle());
                idle.map(|r| r.component.clone()).collect()
            }
            Verdict::Never { .. } => Vec::new(),
        };
        for component in victims {
            self.depart(component, left, link)?;
        }
        // Other programs see what the driver calls free, and nothing of our slack.
        self.hand_back_slack(link)?;
        self.await_late(until, done, link)?;
        left.confirm(self.ledger.late());
        let short = bytes - self.ledger.usable();
        if short > Bytes::ZERO {
            let stays = self
                .ledger
                .residents()
                .filter_map(|r| reason_to_stay(r).map(|reason| (r.component.clone(), reason.to_owned())));
            left.kept.extend(stays);
        }
        Ok(short)
    }

    fn answer(&mut self, id: u64, done: Result<Answer, MoveError>, link: &mut dyn Link) -> Flow {
        let answer = match done {
            Ok(answer) => answer,
            Err(MoveError::Lost(reason)) => return Flow::Lost(reason),
            Err(MoveError::Refused(message) | MoveError::Model(message)) => Answer::Failed(message),
            Err(MoveError::Cancelled) => Answer::Failed("it was cancelled".to_owned()),
            Err(MoveError::NoRoom) => Answer::Failed("memory that was planned with is gone".to_owned()),
        };
        self.publish(link);
        link.emit(Event::Answer { id, answer });
        Flow::Continue
    }
}

impl Departures {
    /// Bytes that left and that nobody has seen to be free.
    fn unconfirmed(&self) -> Bytes {
        self.freed.iter().map(|(_, u)| u.booked - u.freed).sum()
    }

    /// Books as freed what the driver has shown since, when so much is late now.
    fn confirm(&mut self, late: Bytes) {
        let mut shown = self.late - late;
        for (_, unloaded) in &mut self.freed {
            let more = shown.min(unloaded.booked - unloaded.freed);
            unloaded.freed += more;
            shown -= more;
        }
    }

    fn answer(self, short: Bytes) -> Answer {
        Answer::Unloaded {
            freed: self.freed,
            kept: self.kept,
            short,
        }
    }
}

fn evicted(each: Move) -> Option<Component> {
    match each {
        Move::Evict(component) => Some(component),
        Move::Load(_) | Move::Trim => None,
    }
}

/// Why a component does not leave when it is asked to.
fn reason_to_stay(resident: &Resident) -> Option<&'static str> {
    if resident.leases > 0 {
        return Some("in use");
    }
    if resident.pinned {
        return Some("pinned");
    }
    (resident.held > 0).then_some("held")
}
