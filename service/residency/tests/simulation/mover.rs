//! The card's thread: carries out moves one by one, runs stages under leases, cleans up after failures.

use std::collections::VecDeque;

use residency::{
    Bytes, Component, ComponentId, LeaseId, LedgerError, Millis, Move, Part, Resident, RunOutcome, Verdict,
};

use crate::defect::{Defect, Invariant, Violation};
use crate::jobs::Job;
use crate::world::World;

/// Moves under way for a job.
pub(crate) struct Mover {
    pub(crate) job: Job,
    moves: VecDeque<Move>,
    loading: Option<Loading>,
}

/// A component that is being loaded, or grows.
struct Loading {
    component: Component,
    /// Bytes that are still to come.
    to_come: Bytes,
    /// Bytes that were on the card before.
    before: Bytes,
}

/// A stage that runs.
pub(crate) struct Running {
    pub(crate) job: Job,
    pub(crate) lease: LeaseId,
    pub(crate) needs: Vec<ComponentId>,
    pub(crate) booked: Bytes,
    /// Bytes allocated so far.
    pub(crate) taken: Bytes,
    peak: Bytes,
    room: Bytes,
    ends: Millis,
}

impl Mover {
    pub(crate) fn new(job: Job, moves: Vec<Move>) -> Mover {
        Mover {
            job,
            moves: moves.into(),
            loading: None,
        }
    }
}

impl World {
    /// One step of the moves under way; starts the stage after the last of them.
    pub(crate) fn carry_on(&mut self) -> Result<(), Violation> {
        let Some(mut mover) = self.mover.take() else {
            return Ok(());
        };
        if let Some(loading) = mover.loading.take() {
            return self.load_on(mover, loading);
        }
        match mover.moves.pop_front() {
            None => return self.start(mover.job),
            Some(Move::Trim) => self.trim(),
            Some(Move::Evict(component)) => {
                if !self.evict(&component, Some(&self.model_of(&mover.job)))? {
                    self.wait_again(mover.job);
                    return Ok(());
                }
            }
            Some(Move::Resize(component, part)) => {
                let before = self
                    .ledger
                    .resident(&component.id)
                    .map_or(Bytes::ZERO, Resident::bytes);
                let then = component.bytes_of(part);
                if then < before {
                    if !self.shrink(&component, part, &self.model_of(&mover.job))? {
                        self.wait_again(mover.job);
                        return Ok(());
                    }
                } else {
                    match self.ledger.begin_resize(&component, part) {
                        Ok(()) => {
                            mover.loading = Some(Loading {
                                component,
                                to_come: then - before,
                                before,
                            });
                        }
                        Err(_) => {
                            self.stats.no_room += 1;
                            self.wait_again(mover.job);
                            return Ok(());
                        }
                    }
                }
            }
            Some(Move::Load(component, part)) => {
                let mut booked = component.clone();
                if self.defect == Defect::LedgerForgetsAByte && part == Part::WHOLE {
                    booked.bytes -= Bytes(1);
                }
                match self.ledger.begin_load(&booked, part, self.now) {
                    Ok(()) => {
                        mover.loading = Some(Loading {
                            to_come: component.bytes_of(part),
                            component,
                            before: Bytes::ZERO,
                        });
                    }
                    Err(LedgerError::NoRoom { .. }) => {
                        self.stats.no_room += 1;
                        self.wait_again(mover.job);
                        return Ok(());
                    }
                    Err(error) => panic!("a planned load was refused: {error}"),
                }
            }
        }
        self.ledger.reconcile(&self.card.truth());
        self.mover = Some(mover);
        Ok(())
    }

    fn load_on(&mut self, mut mover: Mover, loading: Loading) -> Result<(), Violation> {
        let Loading {
            component,
            to_come,
            before,
        } = loading;
        let id = component.id.clone();
        let grows = before > Bytes::ZERO;
        let chunk = to_come.min(Bytes(component.bytes.0 / 2 + 1));
        let fails = self.chance(0.01);
        if fails || !self.card.allocate(&id, chunk) {
            self.stats.failed_loads += 1;
            let shown_at = self.late_or_not();
            if grows {
                self.card.shrink(&id, before, shown_at);
                self.ledger.abort_resize(&id).unwrap();
            } else {
                self.card.release(&id, shown_at);
                self.ledger.abort_load(&id).unwrap();
            }
            self.ledger.reconcile(&self.card.truth());
            if !fails && !mover.job.low_memory {
                self.wait_again(mover.job); // another job was faster
            }
            return Ok(());
        }
        match to_come - chunk {
            Bytes::ZERO if grows => self.ledger.complete_resize(&id, self.now).unwrap(),
            Bytes::ZERO => self.ledger.complete_load(&id, self.now).unwrap(),
            to_come => {
                mover.loading = Some(Loading {
                    component,
                    to_come,
                    before,
                });
            }
        }
        self.ledger.reconcile(&self.card.truth());
        self.mover = Some(mover);
        Ok(())
    }

    /// The components of a job's model.
    pub(crate) fn model_of(&self, job: &Job) -> Vec<ComponentId> {
        self.kinds[job.kind].stages[job.stage].need.model.clone()
    }

    /// Evicts for a stage of a model with these components, or on request, if it may leave still. False if it may not any more.
    pub(crate) fn evict(
        &mut self,
        component: &Component,
        planned_for: Option<&[ComponentId]>,
    ) -> Result<bool, Violation> {
        let id = &component.id;
        let resident = self.ledger.resident(id);
        let is_wrong = |model| resident.is_some_and(|r| self.is_wrong_victim(r, model));
        let forced = planned_for.is_some_and(is_wrong);
        let is_idle = resident.is_some_and(|r| match planned_for {
            Some(model) => r.leases == 0 && self.is_unclaimed(id, model),
            None => !r.pinned && r.held == 0,
        });
        if !forced && (!is_idle || self.ledger.begin_evict(id).is_err()) {
            self.stats.refused_evictions += 1;
            return Ok(false);
        }
        self.check_departure(id, planned_for)?;
        let shown_at = self.late_or_not();
        self.card.release(id, shown_at);
        self.stats.evictions += 1;
        if self.defect == Defect::LedgerForgetsAnEviction && self.chance(0.1) {
            self.ledger.abort_evict(id).unwrap();
            return Ok(true);
        }
        assert!(!forced, "a wrong victim left unnoticed");
        self.ledger.complete_evict(id, self.now).unwrap();
        if self.chance(0.5) {
            self.ledger.reconcile(&self.card.truth());
        }
        Ok(true)
    }

    /// Makes a part smaller for a stage of a model with these components, if it may still. False if it may not any more.
    pub(crate) fn shrink(
        &mut self,
        component: &Component,
        part: Part,
        model: &[ComponentId],
    ) -> Result<bool, Violation> {
        let id = &component.id;
        let is_unclaimed = self.is_unclaimed(id, model);
        let may_shrink = self
            .ledger
            .resident(id)
            .is_some_and(|r| is_unclaimed || r.part != Part::WHOLE);
        if !may_shrink || self.ledger.begin_resize(component, part).is_err() {
            self.stats.refused_evictions += 1;
            return Ok(false);
        }
        if is_unclaimed {
            self.check_departure(id, Some(model))?;
        }
        let shown_at = self.late_or_not();
        self.card.shrink(id, component.bytes_of(part), shown_at);
        self.stats.shrinks += 1;
        self.ledger.complete_resize(id, self.now).unwrap();
        Ok(true)
    }

    /// Returns slack to the driver, which may show it late.
    pub(crate) fn trim(&mut self) {
        let (slack, shown_at) = (self.card.slack, self.late_or_not());
        self.card.trim(shown_at);
        self.ledger.complete_trim(slack, self.now);
    }

    /// After all moves: memory may have changed, so the stage is planned again, and then runs under a lease.
    fn start(&mut self, mut job: Job) -> Result<(), Violation> {
        self.ledger.reconcile(&self.card.truth());
        let mut need = self.kinds[job.kind].stages[job.stage].need.clone();
        let fits = match self.verdict(&job)? {
            Verdict::Run { moves } if moves.is_empty() => true,
            Verdict::Run { moves } if !self.starts_without(&moves) => {
                job.attempts += 1;
                if job.attempts < 20 {
                    self.mover = Some(Mover::new(job, moves));
                }
                return Ok(());
            }
            Verdict::Run { .. } => {
                need.components.retain(|c| self.ledger.is_resident(&c.id));
                false
            }
            Verdict::Wait { .. } | Verdict::Never { .. } => {
                self.wait_again(job);
                return Ok(());
            }
        };
        let booked = need.scratch;
        self.check_start(&job, booked, fits)?;
        if self.defect == Defect::LeaseBooksNoScratch {
            need.scratch = Bytes::ZERO;
        }
        let room = self.ledger.usable();
        let lease = self.ledger.lease(&need, self.now).unwrap();
        let needs = self.kinds[job.kind].stages[job.stage]
            .need
            .components
            .iter()
            .map(|c| c.id.clone())
            .collect();
        let peak = self.kinds[job.kind].stages[job.stage].peak;
        let peak = Bytes((peak.0 as f64 * self.share(0.9, 1.0)) as u64);
        let ends = self.now.after(self.up_to(600));
        job.attempts = 0;
        self.stats.starts += 1;
        self.running.push(Running {
            job,
            lease,
            needs,
            booked,
            taken: Bytes::ZERO,
            peak,
            room,
            ends,
        });
        Ok(())
    }

    /// Running stages allocate, end, fail or are cancelled.
    pub(crate) fn run_stages(&mut self) -> Result<(), Violation> {
        let mut at = 0;
        while at < self.running.len() {
            let missing = self.running[at].peak - self.running[at].taken;
            let step = if self.chance(0.5) {
                missing
            } else {
                Bytes(missing.0 / 2)
            };
            if !self.card.take_scratch(step) {
                let room = self.running[at].room;
                self.stats.out_of_memory += 1;
                self.end(at, RunOutcome::OutOfMemory { room });
                continue;
            }
            self.running[at].taken += step;
            if self.running[at].ends > self.now {
                at += 1;
            } else if self.chance(0.02) {
                self.end(
                    at,
                    if self.chance_now {
                        RunOutcome::Failed
                    } else {
                        RunOutcome::Cancelled
                    },
                );
            } else if !self
                .card
                .take_scratch(self.running[at].peak - self.running[at].taken)
            {
                let room = self.running[at].room;
                self.end(at, RunOutcome::OutOfMemory { room });
            } else {
                self.running[at].taken = self.running[at].peak;
                let room = self.running[at].room;
                self.end(at, RunOutcome::Succeeded { room });
            }
        }
        Ok(())
    }

    fn end(&mut self, at: usize, outcome: RunOutcome) {
        let Running {
            mut job,
            lease,
            taken,
            peak,
            ..
        } = self.running.remove(at);
        self.card.give_scratch_back(taken);
        if self.defect != Defect::LosesALease || !self.chance(0.01) {
            self.ledger.release(lease, self.now).unwrap();
        }
        self.ledger.reconcile(&self.card.truth());
        let stage = &mut self.kinds[job.kind].stages[job.stage];
        self.book.learn(&stage.key, peak, outcome);
        match outcome {
            RunOutcome::Succeeded { room } if room == Bytes::ZERO => stage.successes += 1, // overdrawn
            RunOutcome::Succeeded { room } => {
                stage.successes += 1;
                stage.ran_in = Some(stage.ran_in.map_or(room, |least| least.min(room)));
            }
            RunOutcome::OutOfMemory { room } => stage.ran_in = stage.ran_in.filter(|&least| least > room),
            RunOutcome::Failed | RunOutcome::Cancelled => {}
        }
        stage.need.scratch = self.book.estimate(&stage.key, stage.predicted);
        if self.defect == Defect::EstimatesOnlyGrow {
            stage.need.scratch = Bytes(stage.predicted.0 / 10 * (10 + stage.successes));
        }
        let is_last = job.stage + 1 == self.kinds[job.kind].stages.len();
        if matches!(outcome, RunOutcome::Succeeded { .. }) && !is_last {
            job.stage += 1;
            self.wait_again(job);
        }
    }

    /// Puts a job back into the queue at its position.
    fn wait_again(&mut self, mut job: Job) {
        job.attempts += 1;
        if job.attempts < 20 {
            let at = self.queue.partition_point(|other| other.id < job.id);
            self.queue.insert(at, job);
        }
    }

    fn late_or_not(&mut self) -> Option<Millis> {
        self.chance(0.3).then(|| self.now.after(self.up_to(3_000)))
    }

    fn starts_without(&mut self, moves: &[Move]) -> bool {
        self.defect == Defect::StartsWithoutAComponent && moves.iter().all(|m| matches!(m, Move::Load(..)))
    }

    /// A violation, here and now.
    pub(crate) fn violation(&self, invariant: Invariant, what: String) -> Violation {
        Violation {
            invariant,
            seed: self.seed,
            turn: self.stats.turns,
            what,
        }
    }
}
