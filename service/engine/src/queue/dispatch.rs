//! Which job starts where, now.

use pipelines::Values;
use tokio::time::Instant;

use super::actor::{Actor, TICK};
use super::cards::InFlight;
use super::placing::{Placement, memo_key};
use super::record::{JobRecord, Need, Patience, Phase};
use super::shares::AFFINITY_WINDOW_MS;
use super::steps::{Step, StepKind};
use super::watchdog::Pace;
use crate::error::{Error, Shortfall};
use crate::job::{JobEventKind, JobId, StageReport};
use crate::messages::{Order, Shortage, StageWork, Work};
use residency::{Bytes, WaitCause};

/// How far behind the first job a warm one is looked for.
const AFFINITY_DEPTH: usize = 64;

impl Actor {
    /// Starts all that can start, and tells the others why they cannot.
    pub(super) fn dispatch(&mut self, now: Instant) {
        self.bring_back(now);
        self.go_on(now);
        let order = self.fair_order();
        let mut ahead = self.seconds_ahead(now);
        let mut passed: Vec<JobId> = Vec::new();
        for (place_in_order, id) in order.iter().enumerate() {
            let any_free = self.cards.iter().any(|card| card.is_free());
            let Some(job) = self.jobs.get(id).filter(|job| job.phase != Phase::Running) else {
                continue;
            };
            if let Some(shortfall) = job.out_of_memory.clone() {
                self.end_out_of_memory(id, shortfall, now);
                continue;
            }
            // Once no card is free only those are asked who wait for memory, or were not asked before.
            let must_ask = job.phase == Phase::Waiting || job.position.is_none() || job.is_near_refusal();
            if !any_free && !must_ask {
                continue;
            }
            if self.is_behind_an_unload(job) {
                self.queue_up(id, now);
                continue;
            }
            if let Err(refused) = self.refuse_deadly(job) {
                self.refuse(id, refused, now);
                continue;
            }
            match self.place(job, &ahead, now) {
                Placement::Start { card, low_memory } => {
                    let rest = &order[place_in_order + 1..];
                    if !self.start_by_turn(id, card, low_memory, rest, &passed, now) {
                        passed.push(id.clone());
                    }
                }
                Placement::Behind { card } => {
                    ahead[card] += self.expected_ms(job).0 / 1000.0;
                    self.queue_up(id, now);
                }
                Placement::Held | Placement::Nowhere => self.queue_up(id, now),
                Placement::Short { shortage } => {
                    if self.wait(id, shortage, now) {
                        passed.push(id.clone());
                    }
                }
                Placement::Never {
                    card,
                    index,
                    needed,
                    capacity,
                } => {
                    if self.knows_reductions(id) {
                        self.never_fits(id, card, index, needed, capacity, now);
                    } else {
                        self.queue_up(id, now);
                    }
                }
            }
        }
        self.tell_positions(&order, now);
    }

    fn refuse(&mut self, id: &JobId, why: Error, now: Instant) {
        if let Some(job) = self.jobs.remove(id) {
            self.end(job, Err(why), now);
        }
    }

    /// Starts whoever's turn it is on a card that `id` could take. False: that was not `id`.
    fn start_by_turn(
        &mut self,
        id: &JobId,
        card: usize,
        low_memory: bool,
        rest: &[JobId],
        passed: &[JobId],
        now: Instant,
    ) -> bool {
        let starter = self.who_starts(id, card, rest, passed, now);
        if starter.is_some() {
            self.count_overtaken(passed, card);
        }
        match starter {
            Some(starter) if starter == *id => {
                self.start(id, card, low_memory, now);
                return true;
            }
            Some(starter) => {
                self.count_overtaken(std::slice::from_ref(id), card);
                self.start(&starter, card, false, now);
            }
            None => {}
        }
        self.queue_up(id, now);
        false
    }

    /// Pinned components come back to a fresh worker before anything runs on it.
    fn bring_back(&mut self, now: Instant) {
        for index in 0..self.cards.len() {
            if !self.cards[index].is_free() {
                continue;
            }
            let Some((entry, components)) = self.cards[index].restore.pop_front() else {
                continue;
            };
            let ticket = self.ticket();
            let need = Need {
                name: "load".into(),
                components: components.clone(),
                plan: None,
            };
            let in_flight = InFlight {
                ticket,
                job: None,
                pace: Pace::of(&entry.key, &need),
                need,
                sent: now,
                heard: now,
                expected_ms: 1000.0,
                cancelled: None,
            };
            let order = Order {
                ticket,
                job: format!("restore {}", entry.key),
                model: self
                    .library
                    .location(&entry, &self.cards[index].description.compute_dtype),
                work: Work::Load(components),
                policy: self.settings.policy,
                allow_low_memory: false,
            };
            self.cards[index].order(order, in_flight);
        }
    }

    /// A job that runs keeps its card for its next stage, unless that has to wait.
    fn go_on(&mut self, now: Instant) {
        for index in 0..self.cards.len() {
            let keeper = self
                .jobs
                .values()
                .find(|job| job.keeps == Some(index))
                .map(|job| job.id.clone());
            let Some(id) = keeper else { continue };
            let Some(job) = self.jobs.get_mut(&id) else {
                continue;
            };
            job.keeps = None;
            if !self.cards[index].is_free() {
                continue;
            }
            let mut only_here = vec![f64::INFINITY; self.cards.len()];
            only_here[index] = 0.0;
            let Some(job) = self.jobs.get(&id) else { continue };
            if let Placement::Start { card, low_memory } = self.place(job, &only_here, now)
                && card == index
            {
                self.start(&id, card, low_memory, now);
            }
        }
    }

    /// Who takes a card that `first` could take: a warm job instead of a cold one, nobody if somebody whom they would
    /// overtake has been overtaken often enough.
    fn who_starts(
        &self,
        first: &JobId,
        card: usize,
        rest: &[JobId],
        passed: &[JobId],
        now: Instant,
    ) -> Option<JobId> {
        let bound = self.settings.overtaking_bound;
        let is_overtaken_enough = |id: &JobId| {
            self.jobs
                .get(id)
                .is_some_and(|job| job.overtaken >= bound && self.may_use(job, card))
        };
        if passed.iter().any(is_overtaken_enough) {
            return None;
        }
        let cold = self.jobs.get(first)?;
        let missing = self.missing_bytes(cold, card);
        if missing == Bytes::ZERO || cold.begun || is_overtaken_enough(first) {
            return Some(first.clone());
        }
        let latest = self.virtual_ms(&cold.options.client) + AFFINITY_WINDOW_MS;
        let only_here: Vec<f64> = (0..self.cards.len())
            .map(|index| if index == card { 0.0 } else { f64::INFINITY })
            .collect();
        let is_warm = |id: &&JobId| {
            let Some(job) = self.jobs.get(*id) else {
                return false;
            };
            job.phase == Phase::Queued
                && job.out_of_memory.is_none()
                && self.virtual_ms(&job.options.client) <= latest
                && self.missing_bytes(job, card).0.saturating_mul(2) < missing.0
                && !self.is_behind_an_unload(job)
                && matches!(self.place(job, &only_here, now), Placement::Start { card: there, low_memory: false } if there == card)
        };
        let warm = rest.iter().take(AFFINITY_DEPTH).find(is_warm);
        Some(warm.unwrap_or(first).clone())
    }

    fn count_overtaken(&mut self, passed: &[JobId], card: usize) {
        for id in passed {
            if self.jobs.get(id).is_some_and(|job| self.may_use(job, card))
                && let Some(job) = self.jobs.get_mut(id)
            {
                job.overtaken += 1;
            }
        }
    }

    fn queue_up(&mut self, id: &JobId, now: Instant) {
        let time = self.millis(now);
        if let Some(job) = self.jobs.get_mut(id) {
            if let Some(patience) = &mut job.patience {
                patience.wait.update(time, WaitCause::Leases); // our own jobs cost no patience
            }
            job.enter(Phase::Queued, now);
        }
    }

    /// Waits for memory of others, or ends that. True while it waits.
    fn wait(&mut self, id: &JobId, shortage: Shortage, now: Instant) -> bool {
        let time = self.millis(now);
        let (budget, longest) = (self.settings.patience, self.settings.longest_patience);
        let Some(job) = self.jobs.get_mut(id) else {
            return false;
        };
        let own = job
            .options
            .patience
            .map(|own| own.min(longest).as_millis() as u64);
        let budget = own.map_or(budget, |ms| residency::Patience {
            after_eviction_ms: ms,
            foreign_ms: ms,
        });
        let patience = job.patience.get_or_insert_with(|| Patience {
            wait: residency::Wait::new(time, shortage.cause, &budget),
            next_tick: now,
            shortage: shortage.clone(),
        });
        patience.wait.update(time, shortage.cause);
        patience.shortage = shortage;
        if patience.wait.is_over(time) && !job.low_memory {
            self.end_of_patience(id, now);
            return false;
        }
        let left = patience.wait.left(time);
        if job.phase != Phase::Waiting || patience.next_tick <= now {
            let shortage = patience.shortage.clone();
            let over = now + std::time::Duration::from_millis(left);
            let at_the_end = (over > now).then_some(over); // a worker may say wait to one who risks it
            patience.next_tick = at_the_end.map_or(now + TICK, |over| over.min(now + TICK));
            let event = JobEventKind::Waiting {
                stage: job.stage_name(),
                needed: shortage.needed,
                free: shortage.usable,
                holders: shortage.holders,
                patience_left: std::time::Duration::from_millis(left),
                cause: cause_name(shortage.cause),
            };
            job.enter(Phase::Waiting, now);
            job.emit(now, event);
        }
        true
    }

    fn end_of_patience(&mut self, id: &JobId, now: Instant) {
        let Some(job) = self.jobs.get_mut(id) else { return };
        if job.options.allow_low_memory {
            tracing::warn!(job = %id, "patience is over: it runs although memory is short, as it allows");
            job.low_memory = true;
            job.enter(Phase::Queued, now);
            self.replan = true;
            return;
        }
        if !self.knows_reductions(id) {
            self.look_again_later(id, now);
            return;
        }
        let Some(job) = self.jobs.remove(id) else { return };
        let shortfall = self.shortfall_after_waiting(&job, now);
        self.end(job, Err(Error::MemoryTaken(Box::new(shortfall))), now);
    }

    /// Ends a job that ran out of memory in a step, once it is known what would fit instead.
    fn end_out_of_memory(&mut self, id: &JobId, mut shortfall: Box<Shortfall>, now: Instant) {
        if !self.knows_reductions(id) {
            return self.queue_up(id, now);
        }
        let Some(job) = self.jobs.remove(id) else { return };
        shortfall.fallbacks = self.fallbacks(&job, &self.usable_cards(&job), now);
        self.end(job, Err(Error::OutOfMemory(shortfall)), now);
    }

    /// A job whose patience is over goes on waiting for what its refusal is to say.
    fn look_again_later(&mut self, id: &JobId, now: Instant) {
        if let Some(job) = self.jobs.get_mut(id) {
            if let Some(patience) = &mut job.patience {
                patience.next_tick = now + TICK;
            }
            job.enter(Phase::Waiting, now);
        }
    }

    /// Sends a job's next step to a card.
    fn start(&mut self, id: &JobId, index: usize, low_memory: bool, now: Instant) {
        let Some(job) = self.jobs.remove(id) else {
            return;
        };
        let Some(mut job) = self.make_way(job, index, now) else {
            return;
        };
        self.take_cached_values(&mut job, index, now);
        let (Some(step), Some(need)) = (job.step(), self.need_on(&job, job.cursor, index)) else {
            self.end(
                job,
                Err(Error::Internal("a job was started that has nothing to do".into())),
                now,
            );
            return;
        };
        let work = match self.work_of(&job, step, &need) {
            Ok(work) => work,
            Err(error) => return self.end(job, Err(error), now),
        };
        let dtype = self.cards[index].description.compute_dtype.clone();
        let expected_ms = self.expected_step_ms(&job, job.cursor, &dtype).0;
        let ticket = self.ticket();
        let order = Order {
            ticket,
            job: id.to_string(),
            model: match (step.kind, &job.swap) {
                (StepKind::Restore, Some(swap)) => self.library.location(&swap.old, &dtype),
                _ => self.library.location(&job.entry, &dtype),
            },
            work,
            policy: self.settings.policy,
            allow_low_memory: low_memory,
        };
        let in_flight = InFlight {
            ticket,
            job: Some(id.clone()),
            pace: Pace::of(&job.entry.key, &need),
            need,
            sent: now,
            heard: now,
            expected_ms,
            cancelled: None,
        };
        job.enter(Phase::Running, now);
        job.last_card = Some(index);
        job.keeps = None;
        (job.step_done, job.steps_of_stage) = (0, 0);
        self.jobs.insert(id.clone(), job);
        self.cards[index].order(order, in_flight);
    }

    /// A stage whose values are known already is not run, and needs no component.
    fn take_cached_values(&mut self, job: &mut JobRecord, index: usize, now: Instant) {
        let card = &self.cards[index].description;
        let Some(step) = job.step() else { return };
        let StepKind::Stage(stage) = step.kind else {
            return;
        };
        if !self.may_take_known_values(job) {
            return;
        }
        let cached = memo_key(job, stage, &card.compute_dtype).and_then(|key| self.memos.get(&key));
        let Some(values) = cached else { return };
        job.values.extend(values);
        let (name, card) = (job.name_of(step), card.id.clone());
        let event = JobEventKind::Stage {
            name: name.clone(),
            index: job.cursor as u32 + 1,
            of: job.steps.len() as u32,
            chunking: String::new(),
            cached: true,
            card: card.clone(),
            item: step.item,
        };
        job.emit(now, event);
        job.report.stages.push(StageReport {
            cached: true,
            card,
            name,
            ..StageReport::default()
        });
        job.cursor += 1;
    }

    fn work_of(&self, job: &JobRecord, step: Step, need: &Need) -> Result<Work, Error> {
        let (Some(plan), Some(run)) = (need.plan.clone(), job.run()) else {
            return Ok(Work::Load(need.components.clone()));
        };
        let kept = match job.latents.get(&step.item) {
            Some(id) => self.latents.leased_values(id)?,
            None => Values::new(),
        };
        let behind = job
            .steps
            .iter()
            .skip(job.cursor + 1)
            .filter_map(|step| job.stage(*step));
        let mut behind: Vec<String> = behind.map(|stage| stage.name.clone()).collect();
        behind.sort_unstable();
        behind.dedup();
        Ok(Work::Stage(Box::new(StageWork {
            plan,
            components: need.components.clone(),
            behind,
            request: run.request.of_item(step.item),
            values: job.input(step, &kept),
            preview_interval_ms: run.preview_interval_ms,
        })))
    }
}

/// As the public API names it.
pub(super) fn cause_name(cause: WaitCause) -> &'static str {
    match cause {
        WaitCause::LateEviction => "late_eviction",
        WaitCause::Leases => "leases",
        WaitCause::Foreign => "foreign",
        WaitCause::Reservation => "reservation",
    }
}
