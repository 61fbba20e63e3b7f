//! A minimal queue: the oldest job that can run goes first, and no job is overtaken more often than the bound allows.

use residency::{Alternative, Bytes, Ledger};
use residency::{Move, Patience, Verdict, Wait, WaitCause, fallbacks, plan, plan_low_memory};

use crate::defect::{Defect, Invariant, Violation};
use crate::jobs::Job;
use crate::mover::Mover;
use crate::world::World;

pub(crate) const OVERTAKEN_AT_MOST: u32 = 3;

impl World {
    /// The planner's verdict on a job's next stage, with the learned scratch.
    pub(crate) fn verdict(&self, job: &Job) -> Result<Verdict, Violation> {
        let stage = &self.kinds[job.kind].stages[job.stage];
        let need = &stage.need;
        let mut verdict = plan(&self.ledger, need, self.policy, self.now);
        if self.defect == Defect::PlannerWaitsForNothing
            && matches!(&verdict, Verdict::Run { moves } if moves.len() > 2)
        {
            verdict = Verdict::Wait {
                short: Bytes(1),
                cause: WaitCause::Foreign,
            };
        }
        self.check_verdict(need, &verdict)?;
        let is_there = |l: &Ledger| need.components.iter().all(|c| l.is_resident(&c.id));
        let ran_here = stage.ran_in.is_some_and(|room| room <= self.ledger.usable());
        if ran_here && !matches!(verdict, Verdict::Run { .. }) && is_there(&self.ledger) {
            let what = format!(
                "usable {}, asked {}: {verdict:?}",
                self.ledger.usable(),
                need.scratch
            );
            return Err(self.violation(Invariant::RanOnceRunsAgain, what));
        }
        match verdict {
            Verdict::Wait { .. } if job.low_memory => {
                let low = plan_low_memory(&self.ledger, need, self.policy, self.now);
                assert!(low.short > Bytes::ZERO, "short by nothing, and yet it waits");
                Ok(Verdict::Run { moves: low.moves })
            }
            verdict => Ok(verdict),
        }
    }

    /// Starts jobs while the mover and a lane are free.
    pub(crate) fn run_queue(&mut self) -> Result<(), Violation> {
        while self.mover.is_none() && self.running.len() < self.lanes {
            self.ledger.reconcile(&self.card.truth());
            if self.defect == Defect::QueueIdles && self.chance(0.02) {
                return Ok(());
            }
            let Some((job, moves)) = self.pick()? else {
                return Ok(());
            };
            self.count_overtaking(&job)?;
            let moves = self.spoil(&job, moves);
            self.check_plan(&job, &moves)?;
            self.mover = Some(Mover::new(job, moves));
            self.carry_on()?;
        }
        Ok(())
    }

    fn pick(&mut self) -> Result<Option<(Job, Vec<Move>)>, Violation> {
        let mut at = 0;
        while at < self.queue.len() {
            match self.verdict(&self.queue[at])? {
                Verdict::Run { moves } => {
                    let mut job = self.queue.remove(at);
                    job.wait = None;
                    self.queue[..at].iter_mut().for_each(|older| older.overtaken += 1);
                    self.stats.overtakings += at as u64;
                    return Ok(Some((job, moves)));
                }
                Verdict::Never { needed, capacity } => {
                    assert!(needed > capacity);
                    let job = self.queue.remove(at);
                    self.offer_instead(&job);
                    self.stats.never += 1;
                    continue;
                }
                Verdict::Wait { cause, short } => {
                    assert!(short > Bytes::ZERO || cause == WaitCause::Leases);
                    self.stats.waits[cause as usize] += 1;
                    let now = self.now;
                    let job = &mut self.queue[at];
                    match &mut job.wait {
                        Some(wait) => wait.update(now, cause),
                        None => job.wait = Some(Wait::new(now, cause, &Patience::default())),
                    }
                    if job.is_out_of_patience(now) {
                        self.stats.out_of_patience += 1;
                        self.queue.remove(at);
                        continue;
                    }
                }
            }
            if self.defect == Defect::QueueStopsAtTheFirst {
                return Ok(None);
            }
            let is_bound = self.queue[at].overtaken >= OVERTAKEN_AT_MOST;
            if is_bound && self.defect != Defect::QueueIgnoresTheBound {
                return Ok(None);
            }
            at += 1;
        }
        Ok(None)
    }

    /// Counts overtaking independently: every older job that still waits was overtaken.
    fn count_overtaking(&mut self, started: &Job) -> Result<(), Violation> {
        let older = self
            .queue
            .iter()
            .filter(|job| job.id < started.id)
            .map(|job| job.id);
        for id in older {
            let times = self.overtaken.entry(id).or_insert(0);
            *times += 1;
            if *times > OVERTAKEN_AT_MOST {
                let what = format!("job {id} was overtaken {times} times");
                return Err(self.violation(Invariant::OvertakingIsBounded, what));
            }
        }
        Ok(())
    }

    /// Every alternative offered after a refusal would be planned, when asked for itself.
    fn offer_instead(&self, refused: &Job) {
        let stages = self.kinds[refused.kind].stages.iter().map(|s| s.need.clone());
        let mut smaller: Vec<_> = stages.collect();
        smaller
            .iter_mut()
            .for_each(|need| need.scratch = Bytes(need.scratch.0 / 4));
        let alternatives = [Alternative {
            change: "a quarter",
            fidelity: 1,
            stages: smaller,
        }];
        for offered in fallbacks(&self.ledger, &alternatives, self.policy, self.now) {
            let capacity = self.ledger.total() - self.ledger.headroom();
            assert!(
                offered.peak <= capacity,
                "{offered:?} cannot run on a card of {capacity}"
            );
        }
    }
}
