//! What holds where memory is not remapped, checked on copies of the card.

use residency::{Bytes, Component, Layout, Move, NoHole, Owner, Part, StageNeed, Verdict, WaitCause, plan};

use crate::defect::{Defect, Invariant, Violation};
use crate::jobs::Job;
use crate::world::World;

/// Carries moves and a stage's activations out on a layout.
fn carry_out(layout: &mut Layout, moves: &[Move], scratch: Bytes) -> Result<(), NoHole> {
    for each in moves {
        match each {
            Move::Evict(component) => drop(layout.free_component(&component.id)),
            Move::Trim => drop(layout.free(|range| range.owner == Owner::Slack)),
            Move::Load(component, part) | Move::Resize(component, part) => layout.hold(component, *part)?,
        }
    }
    layout.take_scratch(scratch).map(|_| ())
}

impl World {
    /// Each allocation of a plan finds a hole, the stage's activations among them.
    pub(crate) fn check_holes(&self, job: &Job, moves: &[Move]) -> Result<(), Violation> {
        let Some(mut layout) = self.card.layout.clone() else {
            return Ok(());
        };
        let scratch = self.kinds[job.kind].stages[job.stage].need.scratch;
        carry_out(&mut layout, moves, scratch).map_err(|no_hole| {
            let what = format!("{no_hole}, after {moves:?}");
            self.violation(Invariant::PlansSuffice, what)
        })
    }

    /// A stage that was admitted gets what was booked for it.
    pub(crate) fn check_taken(
        &self,
        job: &Job,
        (peak, taken): (Bytes, Bytes),
        booked: Bytes,
        fits: bool,
    ) -> Result<(), Violation> {
        let is_owed = self.card.layout.is_some() && fits && !job.low_memory && peak <= booked;
        if is_owed && taken < peak {
            let what = format!("{peak} of {booked} were not there in one piece");
            return Err(self.violation(Invariant::AdmittedStagesFit, what));
        }
        Ok(())
    }

    /// A stage for which bytes suffice waits only if no holes are there after all evictions, and is refused only if pins alone are in
    /// the way.
    pub(crate) fn check_apart(
        &self,
        need: &StageNeed,
        verdict: &Verdict,
        fits: bool,
    ) -> Result<(), Violation> {
        let is_late = matches!(
            verdict,
            Verdict::Wait {
                cause: WaitCause::LateEviction,
                ..
            }
        );
        let overdrawn = self.ledger.usable() == Bytes::ZERO;
        let is_needed = |c: &Component| need.components.iter().any(|needed| needed.id == c.id);
        if fits && !is_late && !overdrawn {
            let idle: Vec<&Component> = self
                .ledger
                .residents()
                .filter(|r| r.is_idle())
                .map(|r| &r.component)
                .collect();
            let others = idle.iter().copied().filter(|c| !is_needed(c)).collect();
            for gone in [others, idle] {
                let stays = |c: &Component| !gone.iter().any(|gone| gone.id == c.id);
                let shrinks = |m: &Move| match m {
                    Move::Load(c, part) => self
                        .ledger
                        .resident(&c.id)
                        .is_some_and(|r| stays(c) && c.bytes_of(*part) < r.bytes()),
                    Move::Evict(_) | Move::Resize(..) | Move::Trim => false,
                };
                let (shrinks, loads): (Vec<Move>, Vec<Move>) = self.loads(need).partition(shrinks);
                let evictions = gone.iter().map(|&c| Move::Evict(c.clone()));
                let moves: Vec<Move> = evictions
                    .chain(shrinks)
                    .chain([Move::Trim])
                    .chain(loads)
                    .collect();
                if self.would_fit(|_| false, &moves, need.scratch) {
                    let what = format!("after all evictions there are holes, but {verdict:?}");
                    return Err(self.violation(Invariant::WhatFitsIsPlanned, what));
                }
            }
        }
        if let Verdict::Never { needed, capacity } = verdict {
            let pinned = self
                .ledger
                .residents()
                .filter(|r| r.pinned && !is_needed(&r.component));
            let room = self.ledger.capacity() - pinned.map(|r| r.bytes()).sum();
            let stays = |owner: &Owner| match owner {
                Owner::Fixed => true,
                Owner::Component { id, .. } => self.pins.contains(id),
                Owner::Foreign | Owner::Late | Owner::Scratch | Owner::Slack => false,
            };
            let loads: Vec<Move> = self.loads(need).collect();
            let mut seen: Vec<&Component> = Vec::new();
            let least = loads.iter().map(|m| match m {
                Move::Load(c, part) if !seen.contains(&c) => {
                    seen.push(c);
                    c.bytes_of(*part)
                }
                Move::Load(..) | Move::Evict(_) | Move::Resize(..) | Move::Trim => Bytes::ZERO,
            });
            let has_bytes = least.sum::<Bytes>() + need.scratch <= room;
            if has_bytes && self.would_fit(|owner| !stays(owner), &loads, need.scratch) {
                let what = format!("{needed} of {capacity}, but pins leave holes that are large enough");
                return Err(self.violation(Invariant::RefusalsAreForGood, what));
            }
        }
        Ok(())
    }

    /// The stage's components in the smallest parts that it may be given.
    fn loads<'a>(&'a self, need: &'a StageNeed) -> impl Iterator<Item = Move> + 'a {
        let least = |c: &Component| -> Part {
            let claimed = self
                .ledger
                .resident(&c.id)
                .filter(|r| r.leases > 0 || r.pinned || r.held > 0);
            claimed.map_or(c.least(), |r| r.part.min(c.least()))
        };
        need.components
            .iter()
            .map(move |c| Move::Load(c.clone(), least(c)))
    }

    fn would_fit(&self, is_gone: impl Fn(&Owner) -> bool, moves: &[Move], scratch: Bytes) -> bool {
        let Some(mut layout) = self.card.layout.clone() else {
            return false;
        };
        layout.free(|range| is_gone(&range.owner));
        carry_out(&mut layout, moves, scratch).is_ok()
    }

    /// The verdict of a planner that knows of bytes alone.
    fn verdict_by_bytes(&self, need: &StageNeed) -> Verdict {
        let mut blind = self.ledger.clone();
        blind.reconcile(&self.card.figures());
        plan(&blind, need, self.policy, self.now)
    }

    /// The verdict that a planner with the current defect would give.
    pub(crate) fn spoil_holes(&self, need: &StageNeed, verdict: Verdict) -> Verdict {
        match (self.defect, &verdict) {
            (Defect::PlannerForgetsHoles, _) => self.verdict_by_bytes(need),
            (Defect::PlannerJoinsNothing, Verdict::Run { moves }) if self.joins(need, moves) => {
                Verdict::Wait {
                    short: Bytes(1),
                    cause: WaitCause::Foreign,
                }
            }
            (
                Defect::PlannerRefusesForLeases,
                Verdict::Wait {
                    short,
                    cause: WaitCause::Leases,
                },
            ) if *short > Bytes::ZERO => {
                let (needed, capacity) = (*short, Bytes::ZERO);
                Verdict::Never { needed, capacity }
            }
            _ => verdict,
        }
    }

    /// Whether a plan evicts for a hole alone.
    pub(crate) fn joins(&self, need: &StageNeed, moves: &[Move]) -> bool {
        let evicts = |moves: &[Move]| moves.iter().any(|m| matches!(m, Move::Evict(_)));
        let by_bytes = || matches!(self.verdict_by_bytes(need), Verdict::Run { moves } if !evicts(&moves));
        self.card.layout.is_some() && evicts(moves) && by_bytes()
    }

    /// Whether bytes suffice for a stage that waits.
    pub(crate) fn is_apart(&self, need: &StageNeed) -> bool {
        self.card.layout.is_some() && matches!(self.verdict_by_bytes(need), Verdict::Run { .. })
    }
}
