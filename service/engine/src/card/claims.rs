//! Claims on the card other than running stages: pins, holds and reservations, unloads, and room for other programs.

use std::collections::BTreeSet;
use std::time::Duration;

use gpu::Unloaded;
use residency::{Bytes, Component, ComponentId, Ledger, Move, Part, Resident, Verdict, freed_by};

use super::moves::MoveError;
use super::{Card, Flow, Link, millis};
use crate::messages::{Answer, Event, KeptBecause};

/// How long an unload waits for the driver to show the freed bytes.
const FREED_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout of `make_room` for late bytes, equal to the patience after an eviction.
const LATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Outcome of an unload: freed and kept components.
#[derive(Default)]
struct UnloadOutcome {
    freed: Vec<(Component, Unloaded)>,
    /// Freed bytes that the driver did not show as free yet.
    late: Bytes,
    kept: Vec<(Component, KeptBecause)>,
}

impl Card {
    /// Unloads components, except those that are in use, pinned or held.
    pub(super) fn unload(&mut self, id: u64, components: &[ComponentId], link: &mut dyn Link) -> Flow {
        let asked: BTreeSet<&ComponentId> = components.iter().collect();
        let mut left = UnloadOutcome::default();
        let done = self.unload_all(&asked, &mut left, link);
        let done = done.and_then(|()| self.await_freed(&mut left, link));
        self.answer(id, done.map(|()| left.answer(Bytes::ZERO)), link)
    }

    fn unload_all(
        &mut self,
        asked: &BTreeSet<&ComponentId>,
        left: &mut UnloadOutcome,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        for id in asked {
            let resident = self.ledger.resident(id);
            match resident.map(|r| (r.component.clone(), reason_to_stay(r))) {
                Some((component, Some(reason))) => left.kept.push((component, reason)),
                Some((component, None)) => {
                    self.unload_one(component, left, link)?;
                    self.gpu.forget_on_host(id);
                }
                None => self.gpu.forget_on_host(id),
            }
        }
        self.reconcile_after_change()
    }

    fn unload_one(
        &mut self,
        component: Component,
        left: &mut UnloadOutcome,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        let before = self.ledger.late();
        let unloaded = self.evict(&component, None, link)?;
        left.late += self.ledger.late() - before;
        left.freed.push((component, unloaded));
        Ok(())
    }

    fn shrink_one(
        &mut self,
        component: Component,
        part: Part,
        left: &mut UnloadOutcome,
        link: &mut dyn Link,
    ) -> Result<(), MoveError> {
        let booked = freed_by(&self.ledger, &Move::Resize(component.clone(), part));
        let before = self.ledger.late();
        self.resize(&component, part, None, link)?;
        let late = self.ledger.late() - before;
        left.late += late;
        let freed = booked - late;
        left.freed.push((component, Unloaded { booked, freed }));
        Ok(())
    }

    /// Waits for a limited time until the driver shows the freed bytes.
    fn await_freed(&mut self, left: &mut UnloadOutcome, link: &mut dyn Link) -> Result<(), MoveError> {
        if left.unconfirmed().min(left.late) > Bytes::ZERO {
            let until = self.clock.now().after(millis(FREED_TIMEOUT));
            self.await_late(until, |_| false, link)?;
            left.confirm(self.ledger.late());
        }
        Ok(())
    }

    /// Returns slack to the driver.
    pub(super) fn trim(&mut self, id: u64, link: &mut dyn Link) -> Flow {
        let trimmed = self.trim_slack(link);
        self.answer(id, trimmed.map(Answer::Trimmed), link)
    }

    /// Makes room for another program, in addition to existing reservations. If less than `bytes` can be freed, frees
    /// as much as possible, unless the card is too small for the request: then evicts nothing.
    pub(super) fn make_room(&mut self, id: u64, bytes: Bytes, link: &mut dyn Link) -> Flow {
        let mut left = UnloadOutcome::default();
        let short = self.clear(bytes, &mut left, link);
        self.answer(id, short.map(|short| left.answer(short)), link)
    }

    fn clear(
        &mut self,
        bytes: Bytes,
        left: &mut UnloadOutcome,
        link: &mut dyn Link,
    ) -> Result<Bytes, MoveError> {
        let until = self.clock.now().after(millis(LATE_TIMEOUT));
        // Stop waiting when there is enough room, or when waiting cannot provide it.
        let done = |ledger: &Ledger| {
            let usable = ledger.usable();
            usable >= bytes || usable + ledger.late() < bytes
        };
        self.reconcile()?;
        // Late bytes first: nothing is evicted for memory that is about to become free.
        self.await_late(until, done, link)?;
        let moves: Vec<Move> = match residency::make_room(&self.ledger, bytes, self.clock.now()) {
            Verdict::Run { moves } => moves,
            Verdict::Wait { .. } => {
                let idle = self.ledger.residents().filter(|r| r.is_idle());
                idle.map(|r| Move::Evict(r.component.clone())).collect()
            }
            Verdict::Never { .. } => Vec::new(),
        };
        for each in moves {
            match each {
                Move::Evict(component) => self.unload_one(component, left, link)?,
                Move::Resize(component, part) => self.shrink_one(component, part, left, link)?,
                Move::Load(..) | Move::Trim => {}
            }
        }
        // Other programs can use the driver's free memory only, not our slack.
        self.trim_slack(link)?;
        self.await_late(until, done, link)?;
        left.confirm(self.ledger.late());
        let short = bytes - self.ledger.usable();
        if short > Bytes::ZERO {
            let stays = self
                .ledger
                .residents()
                .filter_map(|r| reason_to_stay(r).map(|reason| (r.component.clone(), reason)));
            left.kept.extend(stays);
        }
        Ok(short)
    }

    fn answer(&mut self, id: u64, done: Result<Answer, MoveError>, link: &mut dyn Link) -> Flow {
        let answer = match done {
            Ok(answer) => answer,
            Err(MoveError::Lost(reason)) => return Flow::Lost(reason),
            Err(MoveError::Refused(message) | MoveError::Model(message) | MoveError::Replaced(message)) => {
                Answer::Failed(message)
            }
            Err(MoveError::Cancelled) => Answer::Failed("it was cancelled".to_owned()),
            Err(MoveError::NoRoom) => Answer::Failed("memory that the plan counted on was taken".to_owned()),
        };
        self.publish(link);
        link.emit(Event::Answer { id, answer });
        Flow::Continue
    }
}

impl UnloadOutcome {
    /// Freed bytes that the driver has not shown as free.
    fn unconfirmed(&self) -> Bytes {
        self.freed.iter().map(|(_, u)| u.booked - u.freed).sum()
    }

    /// Books as freed the bytes that the driver has shown as free since. `late`: the bytes that are late now.
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

/// Why a component is not unloaded on request.
fn reason_to_stay(resident: &Resident) -> Option<KeptBecause> {
    if resident.leases > 0 {
        return Some(KeptBecause::InUse);
    }
    if resident.pinned {
        return Some(KeptBecause::Pinned);
    }
    (resident.held > 0).then_some(KeptBecause::Held(None))
}
