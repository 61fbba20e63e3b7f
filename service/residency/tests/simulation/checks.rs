//! The invariants, each checked against the model of the card and never by the code under test.

use residency::{
    Bytes, Component, ComponentId, Move, Part, Resident, ResidentState, StageNeed, Verdict, WaitCause,
};

use crate::defect::{Defect, Invariant, Violation};
use crate::jobs::Job;
use crate::queue::OVERTAKEN_AT_MOST;
use crate::world::World;

impl World {
    /// Checks the invariants that hold after every turn.
    pub(crate) fn check(&mut self) -> Result<(), Violation> {
        self.check_bytes()?;
        if self.ledger.leases() != self.running.len() {
            let what = format!(
                "{} leases, {} stages run",
                self.ledger.leases(),
                self.running.len()
            );
            return Err(self.violation(Invariant::NoOrphanLease, what));
        }
        self.check_work_conservation()
    }

    fn check_bytes(&mut self) -> Result<(), Violation> {
        let lost = |what: String| self.violation(Invariant::BytesAreConserved, what);
        let books = self.ledger.accounts();
        if books.sum() != self.card.total {
            return Err(lost(format!(
                "a card of {:?}, and the books say {books:?}",
                self.card.total
            )));
        }
        let mut known = 0;
        for resident in self.ledger.residents() {
            let there = self.card.components.get(&resident.component.id).copied();
            known += usize::from(there.is_some());
            let booked = resident.bytes();
            let agree = match resident.state {
                ResidentState::Resident => there == Some(booked),
                ResidentState::Loading | ResidentState::Resizing => there.is_none_or(|bytes| bytes <= booked),
                ResidentState::Evicting => true,
            };
            if !agree {
                return Err(lost(format!("{there:?} there, {booked:?} booked: {resident:?}")));
            }
        }
        if known != self.card.components.len() {
            return Err(lost(format!("not booked: {:?}", self.card.components)));
        }
        self.ledger.reconcile(&self.card.truth());
        let books = self.ledger.accounts();
        let ours = books.components + books.scratch + books.slack + books.free;
        let card = self.card.in_components() + self.card.scratch + self.card.slack + self.card.free();
        let others = books.foreign + books.unexplained;
        let theirs = self.card.foreign + self.card.late();
        let fixed = (books.context, books.workspaces) == (self.card.context, self.card.workspaces);
        if books.sum() != self.card.total || ours != card || others != theirs || !fixed {
            let what = format!("{ours:?} for {card:?}, {others:?} for {theirs:?}: {books:?}");
            return Err(self.violation(Invariant::BytesAreConserved, what));
        }
        Ok(())
    }

    /// Work conservation: if a lane is free and no move is under way, the job that may start next would have to wait.
    fn check_work_conservation(&self) -> Result<(), Violation> {
        if self.mover.is_some() || self.running.len() >= self.lanes {
            return Ok(());
        }
        let mut asked: Vec<(usize, usize, bool)> = Vec::with_capacity(self.queue.len());
        for job in &self.queue {
            let same = (job.kind, job.stage, job.low_memory);
            if !asked.contains(&same) {
                asked.push(same);
                if let Verdict::Run { moves } = self.verdict(job)? {
                    let what = format!("job {} waits, and would run after {} moves", job.id, moves.len());
                    return Err(self.violation(Invariant::NoCardIdles, what));
                }
            }
            if self.overtaken.get(&job.id).copied().unwrap_or(0) >= OVERTAKEN_AT_MOST {
                return Ok(());
            }
        }
        Ok(())
    }

    /// A plan is made if and only if the usable and the idle bytes are enough: for whole components or, where those would wait for
    /// more than late bytes, for the smallest parts.
    pub(crate) fn check_verdict(&self, need: &StageNeed, verdict: &Verdict) -> Result<(), Violation> {
        let (mut wanted, mut whole, mut given_back) = (need.scratch, need.scratch, Bytes::ZERO);
        let mut idle = Bytes::ZERO;
        let mut seen: Vec<&ComponentId> = Vec::with_capacity(4);
        for component in &need.components {
            if !seen.contains(&&component.id) {
                seen.push(&component.id);
                let least = component.bytes_of(component.least());
                match self.ledger.resident(&component.id) {
                    None => {
                        wanted += least;
                        whole += component.bytes;
                    }
                    Some(r) if r.state != ResidentState::Resident => return Ok(()),
                    Some(r) => {
                        given_back += (r.bytes() - least) - self.kept_for_others(r, &need.model);
                        let grows = component.bytes - r.bytes();
                        whole += if r.leases > 0 { Bytes::ZERO } else { grows };
                    }
                }
            }
        }
        for r in self
            .ledger
            .residents()
            .filter(|r| !seen.contains(&&r.component.id))
        {
            idle += r.bytes() - self.kept_for_others(r, &need.model);
        }
        let usable = self.ledger.usable();
        let is_late = matches!(
            verdict,
            Verdict::Wait {
                cause: WaitCause::LateEviction,
                ..
            }
        );
        if is_late && usable + idle < whole {
            return Ok(());
        }
        let fits = usable + idle + given_back >= wanted;
        let overdrawn = usable == Bytes::ZERO; // by how much cannot be seen from outside
        if fits != matches!(verdict, Verdict::Run { .. }) && !overdrawn {
            let what = format!("usable {usable}, idle {idle}, wanted {wanted}: {verdict:?}");
            return Err(self.violation(Invariant::WhatFitsIsPlanned, what));
        }
        Ok(())
    }

    /// A plan, carried out in order, leaves the driver enough for each load: component pools cannot use slack.
    pub(crate) fn check_plan(&self, job: &Job, moves: &[Move]) -> Result<(), Violation> {
        let mut free = self.card.free();
        let booked = |c: &Component| self.ledger.resident(&c.id).map_or(Bytes::ZERO, Resident::bytes);
        for each in moves {
            match each {
                Move::Evict(component) => free += booked(component),
                Move::Trim => free += self.card.slack,
                Move::Load(component, part) | Move::Resize(component, part) => {
                    let (here, then) = (booked(component), component.bytes_of(*part));
                    free += here - then;
                    if then - here > free && !job.low_memory {
                        let what = format!("{free} at the driver for {} of {moves:?}", component.id);
                        return Err(self.violation(Invariant::PlansSuffice, what));
                    }
                    free -= then - here;
                }
            }
        }
        Ok(())
    }

    /// Whether pins and holds of a component are of this model alone, or there are none.
    pub(crate) fn is_unclaimed(&self, id: &ComponentId, model: &[ComponentId]) -> bool {
        let is_pinned = self.pins.contains(id) && !model.contains(id);
        let mut holds = self
            .holds
            .values()
            .filter(|(ids, until)| *until > self.now && ids.contains(id));
        !is_pinned && holds.all(|(ids, _)| ids.iter().all(|id| model.contains(id)))
    }

    /// Bytes that a component does not give up for a stage of this model: all that is in use or moves, all of what is claimed and
    /// whole, the smallest part of what is claimed and streamed already.
    fn kept_for_others(&self, r: &Resident, model: &[ComponentId]) -> Bytes {
        let id = &r.component.id;
        if r.leases > 0 || r.state != ResidentState::Resident {
            return r.bytes();
        }
        match (self.is_unclaimed(id, model), r.part) {
            (true, _) => Bytes::ZERO,
            (false, Part::WHOLE) => r.bytes(),
            (false, _) => r.component.bytes_of(r.component.least()),
        }
    }

    /// Checks that a component was allowed to leave, or to shrink, for a stage of a model with these components; `None`: on request.
    pub(crate) fn check_departure(
        &self,
        id: &ComponentId,
        planned_for: Option<&[ComponentId]>,
    ) -> Result<(), Violation> {
        if self.running.iter().any(|stage| stage.needs.contains(id)) {
            return Err(self.violation(Invariant::NothingLeasedIsEvicted, format!("a stage runs on {id}")));
        }
        let model = planned_for.unwrap_or_default();
        if self.pins.contains(id) && !model.contains(id) {
            return Err(self.violation(Invariant::NothingPinnedIsEvicted, format!("{id} is pinned")));
        }
        if planned_for.is_some() && !self.is_unclaimed(id, model) {
            return Err(self.violation(Invariant::NothingHeldIsPlannedAway, format!("{id} is held")));
        }
        Ok(())
    }

    /// Checks that a starting stage has its components on the card and the scratch that was booked for it.
    pub(crate) fn check_start(&self, job: &Job, booked: Bytes, fits: bool) -> Result<(), Violation> {
        for component in &self.kinds[job.kind].stages[job.stage].need.components {
            let booked = self.ledger.resident(&component.id).map(Resident::bytes);
            if booked.is_none() || self.card.components.get(&component.id).copied() != booked {
                let what = format!("job {} starts without {}", job.id, component.id);
                return Err(self.violation(Invariant::StagesHaveTheirComponents, what));
            }
        }
        // In one sum, as the driver shows it: which stage allocated how much cannot be observed.
        let booked_before: Bytes = self.running.iter().map(|stage| stage.booked).sum();
        let promised = booked_before - self.card.scratch;
        let there = self.card.free() + self.card.slack;
        if fits && !job.low_memory && promised + booked > there {
            let what = format!("{there} there, {promised} promised, {booked} asked for");
            return Err(self.violation(Invariant::AdmittedStagesFit, what));
        }
        Ok(())
    }

    /// After all jobs ended and all components were evicted.
    pub(crate) fn check_rest(&self) -> Result<(), Violation> {
        let books = self.ledger.accounts();
        let held = books.components + books.scratch + books.foreign + books.unexplained + self.ledger.late();
        let empty = self.ledger.residents().next().is_none() && self.ledger.leases() == 0;
        let fixed = self.card.context + self.card.workspaces + self.ledger.headroom();
        if held > Bytes::ZERO || !empty || self.ledger.usable() != self.card.total - fixed {
            return Err(self.violation(Invariant::RestIsEmpty, format!("{books:?}")));
        }
        Ok(())
    }

    /// The plan that a planner with the current defect would make.
    pub(crate) fn spoil(&mut self, job: &Job, mut moves: Vec<Move>) -> Vec<Move> {
        let model = self.model_of(job);
        let mut residents = self.ledger.residents();
        if let Some(victim) = residents.find(|r| self.is_wrong_victim(r, &model)) {
            moves.insert(0, Move::Evict(victim.component.clone()));
        }
        if self.defect == Defect::PlannerForgetsToTrim {
            moves.retain(|m| *m != Move::Trim);
        }
        if self.defect == Defect::StartsWithoutAComponent {
            let load = moves.iter().position(|m| matches!(m, Move::Load(..)));
            load.map(|at| moves.remove(at));
        }
        moves
    }

    /// Whether a planner with the current defect evicts it where a correct one never would.
    pub(crate) fn is_wrong_victim(&self, r: &Resident, model: &[ComponentId]) -> bool {
        let is_there = r.state == ResidentState::Resident;
        let is_claimed = !self.is_unclaimed(&r.component.id, model);
        match self.defect {
            Defect::PlannerEvictsLeased => is_there && r.leases > 0,
            Defect::PlannerEvictsPinned => is_there && is_claimed && r.pinned && r.leases == 0,
            Defect::PlannerEvictsHeld => is_there && is_claimed && r.leases == 0 && !r.pinned,
            _ => false,
        }
    }
}
