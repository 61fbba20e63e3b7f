//! Decides about jobs that do not run: one pass over the fair order, one decision at a time. The core carries out each decision
//! before it asks for the next, as a start leaves less memory for the jobs after it.

use residency::{Bytes, Wait, WaitCause};

use super::placing::{Companion, Placement};
use super::record::{JobRecord, Patience, State};
use super::shares::AFFINITY_WINDOW_MS;
use super::view::View;
use crate::error::{Error, Shortfall};
use crate::job::JobId;
use crate::messages::Shortage;

/// How many jobs after the first are searched for a warm one: one whose model is on the card already.
const AFFINITY_DEPTH: usize = 64;

/// A decision about a job.
pub(super) enum Decision {
    /// Its next step is sent to a card.
    Start {
        job: JobId,
        card: usize,
        low_memory: bool,
        /// The card that runs the second part of it, where two run it together.
        companion: Option<Companion>,
        /// Jobs that could have used the card and were before it.
        overtaken: Vec<JobId>,
    },
    /// It stays queued after other jobs of this service.
    Queue { job: JobId },
    /// It waits for memory that is late or that other programs hold.
    Wait { job: JobId, patience: Patience },
    /// Its patience is over, or no memory is expected to be freed: it runs although memory is short, which its options allow.
    RunShort { job: JobId, patience: Patience },
    /// It is about to be refused: alternatives that would fit are determined first.
    FindOffers { job: JobId, patience: Option<Patience> },
    /// It ends with this error.
    Refuse { job: JobId, error: Error },
}

/// One pass over the jobs that do not run.
pub(super) struct Pass {
    order: Vec<JobId>,
    next: usize,
    /// Seconds of work that each card has before it; infinite where a job holds the card that waits for a second one.
    ahead: Vec<f64>,
    /// Jobs that wait although later ones may start.
    passed: Vec<JobId>,
    /// A second decision that follows from the last one.
    then: Option<Decision>,
}

impl Pass {
    pub(super) fn new(view: &View<'_>) -> Pass {
        Pass {
            order: view.fair_order(),
            next: 0,
            ahead: view.seconds_ahead(),
            passed: Vec::new(),
            then: None,
        }
    }

    /// The fair order of the pass.
    pub(super) fn order(&self) -> &[JobId] {
        &self.order
    }

    /// The next decision, by the current state; `None`: the pass is over.
    pub(super) fn next(&mut self, view: &View<'_>) -> Option<Decision> {
        if let Some(then) = self.then.take() {
            return Some(then);
        }
        while let Some(id) = self.order.get(self.next).cloned() {
            self.next += 1;
            let job = view.jobs.get(&id).filter(|job| !job.is_running());
            if let Some(decision) = job.and_then(|job| self.decide(view, job)) {
                return Some(decision);
            }
        }
        None
    }

    fn decide(&mut self, view: &View<'_>, job: &JobRecord) -> Option<Decision> {
        let id = job.id.clone();
        match &job.state {
            State::OutOfMemory(shortfall) => return Some(view.out_of_memory(job, shortfall)),
            State::Reopening => return None,
            State::Queued { .. } | State::Waiting { .. } | State::Running { .. } => {}
        }
        // Once no card is free, only jobs that wait for memory or that are new are decided.
        let is_printed = matches!(
            job.state,
            State::Queued {
                position: Some(_),
                ..
            }
        );
        let any_free = view.cards.iter().any(|card| card.is_free());
        if !any_free && is_printed && !job.is_near_refusal() {
            return None;
        }
        if view.waits_for_unload(job) {
            return Some(Decision::Queue { job: id });
        }
        if let Some(error) = view.refusal_after_deaths(job) {
            return Some(Decision::Refuse { job: id, error });
        }
        Some(match view.place(job, &self.ahead) {
            Placement::Start {
                card,
                low_memory,
                companion,
            } => self.start_by_turn(view, job, (card, low_memory), companion),
            Placement::Alone { card } => {
                self.hold(view, card);
                Decision::Queue { job: id }
            }
            Placement::Behind { card } => {
                self.ahead[card] += view.expected_ms(job).0 / 1000.0;
                Decision::Queue { job: id }
            }
            Placement::Held | Placement::Nowhere => Decision::Queue { job: id },
            Placement::Short { shortage } => {
                let decision = view.wait(job, shortage);
                if matches!(decision, Decision::Wait { .. }) {
                    self.passed.push(id);
                }
                decision
            }
            Placement::Never { .. } if !job.knows_reductions() => Decision::FindOffers {
                job: id,
                patience: None,
            },
            Placement::Never {
                card,
                index,
                needed,
                capacity,
            } => Decision::Refuse {
                job: id,
                error: view.exceeds_every_card(job, card, index, needed, capacity),
            },
        })
    }

    /// Keeps a card for a job that waits for a second one: no later job of the pass starts there. Of cards that can compute
    /// together only one is held, by the first such job: two jobs that hold a card each would wait for each other.
    fn hold(&mut self, view: &View<'_>, card: usize) {
        let mut held = (0..self.ahead.len()).filter(|held| self.ahead[*held].is_infinite());
        if !held.any(|held| view.can_compute_together(held, card)) {
            self.ahead[card] = f64::INFINITY;
        }
    }

    /// Starts the job whose turn it is on a card that `job` could take. A job of two cards takes both itself: it may have held one.
    fn start_by_turn(
        &mut self,
        view: &View<'_>,
        job: &JobRecord,
        (card, low_memory): (usize, bool),
        companion: Option<Companion>,
    ) -> Decision {
        let rest = match companion {
            Some(_) => &[],
            None => &self.order[self.next..],
        };
        let queue = Decision::Queue { job: job.id.clone() };
        let cards = || std::iter::once(card).chain(companion.map(|companion| companion.card));
        let is_kept = |other: usize| view.is_kept_for_others(other, &self.passed);
        let starter = view.job_to_start(job, card, rest, &self.passed);
        let starter = starter.filter(|_| !companion.is_some_and(|other| is_kept(other.card)));
        let Some(starter) = starter else {
            self.passed.push(job.id.clone());
            return queue;
        };
        let is_first = starter == job.id;
        let mut before = self.passed.clone();
        if !is_first {
            self.passed.push(job.id.clone());
            before.push(job.id.clone());
            self.then = Some(queue);
        }
        let could_use = |id: &JobId| {
            let job = view.jobs.get(id);
            job.is_some_and(|job| cards().any(|card| view.may_use(job, card)))
        };
        before.retain(could_use);
        Decision::Start {
            job: starter,
            card,
            low_memory: low_memory && is_first,
            companion,
            overtaken: before,
        }
    }
}

impl View<'_> {
    /// Which job takes a card that `first` could take: a warm job instead of a cold one, none if a job that would be
    /// overtaken has been overtaken often enough.
    fn job_to_start(
        &self,
        first: &JobRecord,
        card: usize,
        rest: &[JobId],
        passed: &[JobId],
    ) -> Option<JobId> {
        if self.is_kept_for_others(card, passed) {
            return None;
        }
        let missing = self.missing_bytes(first, card);
        if missing == Bytes::ZERO || first.begun || self.is_overtaken_enough(first, card) {
            return Some(first.id.clone());
        }
        let is_warm = |job: &&JobRecord| {
            matches!(job.state, State::Queued { .. })
                && self.lead_ms(job, first) <= AFFINITY_WINDOW_MS
                && self.missing_bytes(job, card).0.saturating_mul(2) < missing.0
                && !self.waits_for_unload(job)
                && !self.is_next_on_two_cards(job, card)
                && self.starts_on(job, card) == Some(false)
        };
        let rest = rest.iter().take(AFFINITY_DEPTH);
        let warm = rest.filter_map(|id| self.jobs.get(id)).find(is_warm);
        Some(warm.unwrap_or(first).id.clone())
    }

    /// Whether a job must not be overtaken any more on a card.
    fn is_overtaken_enough(&self, job: &JobRecord, card: usize) -> bool {
        job.overtaken >= self.settings.overtaking_bound && self.may_use(job, card)
    }

    /// Whether one of these jobs, that wait, must not be overtaken any more on a card.
    fn is_kept_for_others(&self, card: usize, waiting: &[JobId]) -> bool {
        let mut waiting = waiting.iter().filter_map(|id| self.jobs.get(id));
        waiting.any(|job| self.is_overtaken_enough(job, card))
    }

    /// Whether a job would start on this card now, and if so whether memory would be short.
    pub(super) fn starts_on(&self, job: &JobRecord, card: usize) -> Option<bool> {
        let mut only_here = vec![f64::INFINITY; self.cards.len()];
        only_here[card] = 0.0;
        match self.place(job, &only_here) {
            Placement::Start {
                card: there,
                low_memory,
                ..
            } => (there == card).then_some(low_memory),
            _ => None,
        }
    }

    /// Lets a job wait for memory of other programs, or ends that wait.
    fn wait(&self, job: &JobRecord, shortage: Shortage) -> Decision {
        let patience = self.patience(job, shortage);
        let id = job.id.clone();
        let (over, low) = (patience.wait.is_over(self.time), job.options.allow_low_memory);
        // Nothing indicates that memory of other programs is about to be freed.
        let expects_nothing = patience.shortage.cause == WaitCause::Foreign;
        if low && !job.attempt.low_memory && (over || expects_nothing) {
            return Decision::RunShort { job: id, patience };
        }
        if job.attempt.low_memory || !over {
            return Decision::Wait { job: id, patience };
        }
        if !job.knows_reductions() {
            let patience = Some(patience);
            return Decision::FindOffers { job: id, patience };
        }
        let error = Error::MemoryTaken(Box::new(self.shortfall_after_waiting(job, &patience.shortage)));
        Decision::Refuse { job: id, error }
    }

    /// A job's patience, updated by this shortage.
    fn patience(&self, job: &JobRecord, shortage: Shortage) -> Patience {
        let longest = self.settings.longest_patience;
        let own = job
            .options
            .patience
            .map(|own| own.min(longest).as_millis() as u64);
        let budget = own.map_or(self.settings.patience, |ms| residency::Patience {
            after_eviction_ms: ms,
            foreign_ms: ms,
        });
        let mut wait = match &job.attempt.patience {
            Some(patience) => patience.wait,
            None => Wait::new(self.time, shortage.cause, &budget),
        };
        wait.update(self.time, shortage.cause);
        Patience {
            wait,
            next_tick: job.attempt.patience.as_ref().map_or(self.now, |p| p.next_tick),
            shortage,
        }
    }

    /// A job ran out of memory in a stage: it ends as soon as the alternatives are known.
    fn out_of_memory(&self, job: &JobRecord, shortfall: &Shortfall) -> Decision {
        let id = job.id.clone();
        if !job.knows_reductions() {
            return Decision::FindOffers {
                job: id,
                patience: None,
            };
        }
        let shortfall = Shortfall {
            fallbacks: self.fallbacks(job, &self.usable_cards(job)),
            ..shortfall.clone()
        };
        let error = Error::OutOfMemory(Box::new(shortfall));
        Decision::Refuse { job: id, error }
    }
}
