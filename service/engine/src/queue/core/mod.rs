//! The queue without IO: it takes [`Input`]s and returns [`Effect`]s, which the shell carries out. Only the core sees two owners
//! of state: every other file owns its own, or decides over a [`View`] and changes nothing.
//!
//! Replies and mailboxes are memory. Delivering into them can neither block nor fail, so that is done here.

mod claims;
mod dispatch;
mod ending;
mod intake;
mod latents;
mod recycle;
mod signals;
mod swap;
mod together;
mod unload;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use gpu::CardDescription;
use residency::Millis;
use tokio::time::Instant;

use super::cards::{CardRecord, ToWorker};
use super::claims::Claims;
use super::encoding::Unencoded;
use super::ended::Ended;
use super::latents::Latents;
use super::learned::{KeptLearned, Learned};
use super::listener::Unread;
use super::memos::Memos;
use super::record::{JobRecord, State};
use super::recycles::PendingRecycle;
use super::reductions::Reduction;
use super::report::StatusReport;
use super::request::{OpenModels, Reply, Submission};
use super::shares::Shares;
use super::unloads::{PendingTrim, PendingUnload};
use super::view::View;
use super::{CardSignal, Settings};
use crate::error::{CancelledBy, Error};
use crate::job::{JobId, JobSpec};
use crate::job_state::JobState;
use crate::library::{Entry, Library};
use crate::messages::{Command, Ticket};

/// Interval at which a job that waits for memory emits an event of it.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// A call of a handle, which sends its own reply.
pub(super) type Call = Box<dyn FnOnce(&mut Core, Instant) + Send>;

/// An input of the core.
pub(super) enum Input {
    /// A call of a handle.
    Call(Call),
    /// An event or the loss of a worker.
    Signal(CardSignal),
    /// A listener has left its job.
    Left { job: JobId, listener: u64 },
    /// A piece has been encoded, or nobody encodes it any more.
    Encoded,
    /// The result of [`Effect::Reopen`].
    Reopened {
        job: JobId,
        submission: Result<Box<Submission>, Error>,
    },
    /// The result of [`Effect::OpenReductions`].
    ReductionsOpened { job: JobId, reductions: Vec<Reduction> },
}

/// An effect that the shell carries out.
pub(super) enum Effect {
    /// A command to a card's worker.
    Command { card: usize, command: Command },
    /// The end of a card's worker.
    Recycle { card: usize, reason: String },
    /// A job's model is to be opened as it is now; [`Input::Reopened`] follows.
    Reopen {
        job: JobId,
        spec: Box<JobSpec>,
        cards: Vec<CardDescription>,
    },
    /// A job's model is to be opened in the formats that make it smaller; [`Input::ReductionsOpened`] follows.
    OpenReductions {
        job: JobId,
        entry: Arc<Entry>,
        models: OpenModels,
        cards: Vec<CardDescription>,
    },
    /// Components of an entry have been quantized: copies of them may be kept.
    KeepCopies {
        entry: Arc<Entry>,
        compute_dtype: String,
    },
}

/// The owners of the queue's state.
pub(super) struct Core {
    settings: Settings,
    /// The core asks it only for data that it has in memory.
    library: Arc<Library>,
    cards: Vec<CardRecord>,
    jobs: BTreeMap<JobId, JobRecord>,
    ended: Ended,
    shares: Shares,
    learned: Learned,
    latents: Latents,
    memos: Memos,
    claims: Claims,
    unloads: Vec<PendingUnload>,
    trims: BTreeMap<u64, PendingTrim>,
    recycles: Vec<PendingRecycle>,
    /// Unread bytes of the accounts that have listeners, by name.
    unread: BTreeMap<String, Weak<Unread>>,
    /// Pieces of results that the service has not encoded yet.
    unencoded: Arc<Unencoded>,
    drain: Option<Drain>,
    effects: Vec<Effect>,
    /// Source of the numbers of tickets, arrivals, listeners and requests: no two are equal.
    next_number: u64,
    /// Whether something has changed that may let a job start.
    replan: bool,
    /// Whether the status has changed since it was last taken.
    dirty: bool,
    epoch: Instant,
}

/// A call that waits for the end of all jobs.
struct Drain {
    deadline: Instant,
    replies: Vec<Reply<()>>,
    cancelled: bool,
}

impl Core {
    pub(super) fn new(
        settings: Settings,
        library: Arc<Library>,
        cards: Vec<CardDescription>,
        now: Instant,
    ) -> Core {
        let cards = cards.into_iter();
        let cards = cards.map(|description| CardRecord::new(description, settings.headroom, now));
        Core {
            cards: cards.collect(),
            latents: Latents::new(settings.latents, settings.latent_ttl),
            memos: Memos::new(settings.text_cache),
            ended: Ended::new(settings.replay),
            settings,
            library,
            jobs: BTreeMap::new(),
            shares: Shares::default(),
            learned: Learned::default(),
            claims: Claims::default(),
            unloads: Vec::new(),
            trims: BTreeMap::new(),
            recycles: Vec::new(),
            unread: BTreeMap::new(),
            unencoded: Arc::default(),
            drain: None,
            effects: Vec::new(),
            next_number: 0,
            replan: false,
            dirty: true,
            epoch: now,
        }
    }

    /// One turn: takes the inputs, lets time pass, starts all jobs that can start, and returns the effects for the shell.
    pub(super) fn on(&mut self, inputs: impl IntoIterator<Item = Input>, now: Instant) -> Vec<Effect> {
        for input in inputs {
            match input {
                Input::Call(call) => call(self, now),
                Input::Signal(signal) => self.on_signal(signal, now),
                Input::Left { job, listener } => self.left(&job, listener, now),
                Input::Encoded => {} // what follows from it is looked at in each turn
                Input::Reopened { job, submission } => self.reopened(&job, submission.map(|s| *s), now),
                Input::ReductionsOpened { job, reductions } => self.reductions_opened(&job, reductions),
            }
        }
        self.pass_time(now);
        self.send_due_unloads(now);
        self.recycle_retired_workers();
        if std::mem::take(&mut self.replan) {
            self.dispatch(now);
            self.send_due_unloads(now);
            self.dirty = true;
        }
        self.finish_drain(now);
        self.take_pieces(now);
        self.take_effects()
    }

    /// Ends all jobs, as the queue ends.
    pub(super) fn end_all(&mut self, now: Instant) {
        let all: Vec<JobId> = self.jobs.keys().cloned().collect();
        for id in all {
            self.end(&id, Err(Error::ShuttingDown), now);
        }
    }

    /// The state that a decision may read.
    pub(super) fn view(&self, now: Instant) -> View<'_> {
        View {
            now,
            time: Millis(now.duration_since(self.epoch).as_millis() as u64),
            settings: &self.settings,
            cards: &self.cards,
            jobs: &self.jobs,
            claims: &self.claims,
            unloads: &self.unloads,
            learned: &self.learned,
            memos: &self.memos,
            latents: &self.latents,
            shares: &self.shares,
        }
    }

    /// Whether the status has changed since it was last taken.
    pub(super) fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// The current status. It is no longer dirty afterwards.
    pub(super) fn take_status(&mut self, now: Instant) -> StatusReport {
        self.dirty = false;
        self.view(now).status_report()
    }

    /// The next moment at which time alone changes something.
    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        let live = self.jobs.values().filter(|job| !job.is_ending());
        let deadlines = live.filter_map(JobRecord::deadline);
        let looks = self.jobs.values().filter_map(next_look);
        let hangs = self.cards.iter().filter_map(|card| card.hung_at(&self.settings));
        let absences = self.cards.iter().filter_map(CardRecord::next_look);
        let absences = absences.filter(|_| self.could_go_elsewhere());
        let drain = self.drain.as_ref().filter(|drain| !drain.cancelled);
        let watches_replies = self.unloads.iter().any(PendingUnload::is_asked_for);
        let expiries = [
            self.latents.next_expiry(),
            self.learned.next_expiry(),
            self.ended.next_expiry(),
            self.claims.next_expiry(),
            self.view(now).next_idle_unload(),
            self.replan.then_some(now),
            drain.map(|drain| drain.deadline),
            watches_replies.then(|| now + TICK),
        ];
        deadlines
            .chain(looks)
            .chain(hangs)
            .chain(absences)
            .chain(expiries.into_iter().flatten())
            .min()
    }

    /// Refuses new jobs, and answers when no job is left; jobs that are left at the deadline are cancelled.
    pub(super) fn drain(&mut self, deadline: Instant, reply: Reply<()>) {
        let drain = self.drain.get_or_insert(Drain {
            deadline,
            replies: Vec::new(),
            cancelled: false,
        });
        drain.deadline = drain.deadline.min(deadline);
        drain.replies.push(reply);
    }

    /// What was learned, to keep it over a restart.
    pub(super) fn kept_learned(&self) -> KeptLearned {
        let cards: Vec<&str> = self.cards.iter().map(|card| &*card.description.id).collect();
        self.learned.kept(&cards)
    }

    /// Takes over what was learned before a restart.
    pub(super) fn restore_learned(&mut self, kept: KeptLearned) {
        let cards: Vec<&str> = self.cards.iter().map(|card| &*card.description.id).collect();
        self.learned.restore(kept, &cards);
    }

    /// Numbers of all kept objects, by kind. For tests.
    pub(super) fn census(&self) -> Vec<(&'static str, usize)> {
        let (cards, jobs) = (|| self.cards.iter(), || self.jobs.values());
        vec![
            ("jobs", self.jobs.len()),
            ("orders", cards().map(|card| card.orders().count()).sum()),
            (
                "pending_requests",
                cards().map(|card| card.pending_requests.len()).sum(),
            ),
            ("restores", cards().map(|card| card.restore.len()).sum()),
            ("unloads", self.unloads.len()),
            ("trims", self.trims.len()),
            ("recycles", self.recycles.len()),
            ("clients", self.shares.len()),
            ("listeners", jobs().map(|job| job.listeners.len()).sum()),
            ("latent leases", self.latents.leases()),
            ("unencoded bytes", self.unencoded.bytes().0 as usize),
        ]
    }

    /// A number that was never used before.
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn ticket(&mut self) -> Ticket {
        Ticket(self.number())
    }

    fn take_effects(&mut self) -> Vec<Effect> {
        let mut effects = std::mem::take(&mut self.effects);
        for (card, outbox) in self.cards.iter_mut().map(|card| &mut card.outbox).enumerate() {
            effects.extend(outbox.drain(..).map(|sent| match sent {
                ToWorker::Command(command) => Effect::Command { card, command },
                ToWorker::Recycle(reason) => Effect::Recycle { card, reason },
            }));
        }
        effects
    }

    /// Carries out everything that is due at this time.
    fn pass_time(&mut self, now: Instant) {
        self.dirty |= self.latents.expire(now);
        self.learned.expire(now);
        self.ended.expire(now);
        if self.claims.expire(now) {
            self.claims_changed(now);
        }
        self.recycle_hung_workers(now);
        self.unload_idle_entries(now);
        self.stop_unread_jobs(now);
        self.stop_late_jobs(now);
        let mut is_time = false;
        for card in &mut self.cards {
            is_time |= card.takes_look(now);
        }
        self.replan |= is_time && self.could_go_elsewhere();
        for job in self.jobs.values_mut() {
            self.replan |= next_look(job).is_some_and(|at| at <= now);
            job.attempt.refusals.retain(|_, refusal| now < refusal.until);
        }
    }

    /// Whether a job waits, perhaps for a worker that is not there, while a card is free.
    fn could_go_elsewhere(&self) -> bool {
        self.cards.iter().any(CardRecord::is_free) && self.jobs.values().any(|job| !job.is_running())
    }

    fn stop_late_jobs(&mut self, now: Instant) {
        let live = self.jobs.values().filter(|job| !job.is_ending());
        let late = live.filter(|job| job.deadline().is_some_and(|at| at <= now));
        let late: Vec<(JobId, JobState)> = late.map(|job| (job.id.clone(), job.state.listed())).collect();
        for (id, state) in late {
            self.stop(&id, Error::Deadline { state }, now);
        }
    }

    /// Takes what stages have delivered, so that they deliver more; where it is to be encoded, only while not too much waits for that.
    fn take_pieces(&mut self, now: Instant) {
        let is_full = self.unencoded.bytes() > self.settings.unencoded;
        for card in &mut self.cards {
            let job = card.in_flight.as_ref().and_then(|running| running.job.as_ref());
            let job = job.and_then(|id| self.jobs.get(id));
            if !(is_full && job.is_some_and(JobRecord::is_encoded)) {
                card.take_pieces(now);
            }
        }
    }

    /// Ends jobs whose last listener was dropped because it did not read, as if that listener had left.
    fn stop_unread_jobs(&mut self, now: Instant) {
        let live = self.jobs.values().filter(|job| !job.is_ending());
        let unread = live.filter(|job| !job.detached && job.listeners.is_empty());
        let unread: Vec<JobId> = unread.map(|job| job.id.clone()).collect();
        for id in unread {
            self.stop(&id, Error::Cancelled(CancelledBy::Unread), now);
        }
    }

    fn recycle_hung_workers(&mut self, now: Instant) {
        for (index, card) in self.cards.iter_mut().enumerate() {
            if card.hung_at(&self.settings).is_none_or(|at| now < at) {
                continue;
            }
            let (limit, reason) = card.exceeded_limit(&self.settings, now);
            let running = card.in_flight.as_ref();
            if let Some((what, usual)) =
                running.and_then(|running| running.too_slow(index, &self.settings, now))
            {
                self.learned.raise_stage_times(index, &what, usual);
            }
            if let Some(running) = &mut card.in_flight {
                running.note_silence(&self.settings, now);
            }
            tracing::warn!(card = %card.description.id, ?limit, reason, "a worker is taken for hung");
            card.recycle(&reason);
        }
    }

    fn finish_drain(&mut self, now: Instant) {
        let Some(drain) = &mut self.drain else { return };
        if now >= drain.deadline && !drain.cancelled {
            drain.cancelled = true;
            let all: Vec<JobId> = self.jobs.keys().cloned().collect();
            for id in all {
                self.stop(&id, Error::ShuttingDown, now);
            }
        }
        if let Some(drain) = &mut self.drain
            && self.jobs.is_empty()
        {
            for reply in drain.replies.drain(..) {
                let _ = reply.send(()); // the caller may have left
            }
        }
    }
}

/// When a job that does not run must be decided again, even if nothing else happens.
fn next_look(job: &JobRecord) -> Option<Instant> {
    if job.is_running() {
        return None;
    }
    let refusals = job.attempt.refusals.values().map(|refusal| refusal.until);
    let patience = job.attempt.patience.as_ref();
    let tick = patience.filter(|_| matches!(job.state, State::Waiting { .. }));
    refusals.chain(tick.map(|patience| patience.next_tick)).min()
}
