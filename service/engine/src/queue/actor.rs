//! The one task that owns the queue: it takes what has come in, then lets time pass, starts what can start, and
//! publishes what has changed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use residency::Millis;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::cards::Card;
use super::ending::Ended;
use super::latents::Latents;
use super::learned::Learned;
use super::memos::Memos;
use super::record::{JobRecord, Phase};
use super::report::StatusReport;
use super::request::{Reply, Request};
use super::shares::Shares;
use super::standing::Claims;
use super::unload::{PendingTrim, PendingUnload};
use super::{CardSignal, CardSlot, Settings};
use crate::error::Error;
use crate::job::JobId;
use crate::library::Library;
use crate::messages::Ticket;

/// Whoever waits for memory hears of it this often.
pub(super) const TICK: Duration = Duration::from_millis(500);
/// The status is published this often at the most.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);
/// What comes in between two turns.
const BATCH: usize = 256;

pub(super) struct Actor {
    pub(super) settings: Settings,
    pub(super) library: Arc<Library>,
    pub(super) cards: Vec<Card>,
    pub(super) jobs: BTreeMap<JobId, JobRecord>,
    pub(super) ended: Ended,
    pub(super) shares: Shares,
    pub(super) learned: Learned,
    pub(super) latents: Latents,
    pub(super) memos: Memos,
    pub(super) claims: Claims,
    pub(super) unloads: Vec<PendingUnload>,
    pub(super) trims: BTreeMap<u64, PendingTrim>,
    pub(super) drain: Option<Drain>,
    pub(super) own_requests: mpsc::WeakUnboundedSender<Request>,
    /// Source of tickets, arrivals, listeners and errands: no two are equal.
    next_number: u64,
    /// Whether something has changed that may let a job start.
    pub(super) replan: bool,
    /// Whether the status has changed.
    pub(super) dirty: bool,
    published_at: Instant,
    epoch: Instant,
    status: watch::Sender<Arc<StatusReport>>,
}

/// The end of all jobs is waited for.
pub(super) struct Drain {
    deadline: Instant,
    replies: Vec<Reply<()>>,
    cancelled: bool,
}

impl Actor {
    pub(super) fn new(
        settings: Settings,
        library: Arc<Library>,
        cards: Vec<CardSlot>,
        status: watch::Sender<Arc<StatusReport>>,
        own_requests: mpsc::WeakUnboundedSender<Request>,
    ) -> Actor {
        let now = Instant::now();
        let cards = cards
            .into_iter()
            .map(|slot| Card::new(slot, settings.headroom, now))
            .collect();
        let mut actor = Actor {
            latents: Latents::new(settings.latents, settings.latent_ttl),
            memos: Memos::new(settings.text_cache),
            settings,
            library,
            cards,
            jobs: BTreeMap::new(),
            ended: Ended::default(),
            shares: Shares::default(),
            learned: Learned::default(),
            claims: Claims::default(),
            unloads: Vec::new(),
            trims: BTreeMap::new(),
            drain: None,
            own_requests,
            next_number: 0,
            replan: false,
            dirty: true,
            published_at: now,
            epoch: now,
            status,
        };
        actor.publish(now);
        actor
    }

    pub(super) async fn run(
        mut self,
        mut requests: mpsc::UnboundedReceiver<Request>,
        mut signals: mpsc::UnboundedReceiver<CardSignal>,
    ) {
        let (mut asked, mut signalled) = (Vec::new(), Vec::new());
        let mut workers_can_speak = true;
        loop {
            let wake = self.next_wake();
            tokio::select! {
                biased;
                count = signals.recv_many(&mut signalled, BATCH), if workers_can_speak => {
                    workers_can_speak = count > 0;
                }
                count = requests.recv_many(&mut asked, BATCH) => if count == 0 { break },
                () = tokio::time::sleep_until(wake.unwrap_or_else(far_away)), if wake.is_some() => {}
            }
            let now = Instant::now();
            for signal in signalled.drain(..) {
                self.on_signal(signal, now);
            }
            for request in asked.drain(..) {
                self.on_request(request, now);
            }
            self.turn(now);
        }
        self.end_all(Instant::now());
    }

    /// A number that was never used before.
    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(super) fn ticket(&mut self) -> Ticket {
        Ticket(self.number())
    }

    /// What time it is for patience.
    pub(super) fn millis(&self, now: Instant) -> Millis {
        Millis(now.duration_since(self.epoch).as_millis() as u64)
    }

    pub(super) fn is_draining(&self) -> bool {
        self.drain.is_some()
    }

    fn turn(&mut self, now: Instant) {
        self.pass_time(now);
        self.unload_what_can_be(now);
        if self.replan {
            self.replan = false;
            self.dispatch(now);
            self.unload_what_can_be(now);
            self.dirty = true;
        }
        self.finish_drain(now);
        if self.dirty && now >= self.published_at + PUBLISH_EVERY {
            self.publish(now);
        }
    }

    fn publish(&mut self, now: Instant) {
        self.dirty = false;
        self.published_at = now;
        let report = Arc::new(self.status_report(now));
        self.status.send_replace(report);
    }

    /// Carries out what a point in time asks for.
    fn pass_time(&mut self, now: Instant) {
        self.dirty |= self.latents.expire(now);
        self.learned.expire(now);
        self.ended.expire(now);
        if self.claims.expire(now) {
            self.claims_changed(now);
        }
        self.watch_workers(now);
        self.unload_idle_entries(now);
        self.stop_what_nobody_reads(now);
        let late: Vec<JobId> = self
            .jobs
            .values()
            .filter(|job| job.ending.is_none() && job.deadline().is_some_and(|at| at <= now))
            .map(|job| job.id.clone())
            .collect();
        for id in late {
            let state = self
                .jobs
                .get(&id)
                .map_or("queued", |job| job.phase.name())
                .to_owned();
            self.stop(&id, Error::Deadline { state }, now);
        }
        for job in self.jobs.values_mut().filter(|job| job.phase != Phase::Running) {
            self.replan |= next_look(job).is_some_and(|at| at <= now);
            job.refusals.retain(|_, refusal| now < refusal.until);
        }
    }

    /// A job whose last listener was dropped because it does not read ends as if that one had left.
    fn stop_what_nobody_reads(&mut self, now: Instant) {
        let jobs = self.jobs.values();
        let unread = jobs.filter(|job| job.ending.is_none() && !job.detached && job.listeners.is_empty());
        let unread: Vec<JobId> = unread.map(|job| job.id.clone()).collect();
        for id in unread {
            self.stop(&id, Error::Cancelled, now);
        }
    }

    /// The next moment at which time alone changes something.
    fn next_wake(&self) -> Option<Instant> {
        let now = Instant::now();
        let deadlines = self
            .jobs
            .values()
            .filter(|job| job.ending.is_none())
            .filter_map(JobRecord::deadline);
        let looks = self
            .jobs
            .values()
            .filter(|job| job.phase != Phase::Running)
            .filter_map(next_look);
        let workers = self.cards.iter().filter_map(|card| self.next_worry(card));
        let expiries = [
            self.latents.next_expiry(),
            self.learned.next_expiry(),
            self.ended.next_expiry(),
            self.claims.next_expiry(),
            self.next_idle_unload(),
            self.dirty.then(|| self.published_at + PUBLISH_EVERY),
            self.replan.then_some(now),
            self.drain
                .as_ref()
                .filter(|drain| !drain.cancelled)
                .map(|drain| drain.deadline),
            self.unloads
                .iter()
                .any(PendingUnload::is_asked_for)
                .then(|| now + TICK),
        ];
        deadlines
            .chain(looks)
            .chain(workers)
            .chain(expiries.into_iter().flatten())
            .min()
    }

    pub(super) fn drain(&mut self, deadline: Instant, reply: Reply<()>) {
        match &mut self.drain {
            Some(drain) => {
                drain.deadline = drain.deadline.min(deadline);
                drain.replies.push(reply);
            }
            None => {
                self.drain = Some(Drain {
                    deadline,
                    replies: vec![reply],
                    cancelled: false,
                })
            }
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
                let _ = reply.send(()); // whoever asked may have left
            }
        }
    }

    fn end_all(&mut self, now: Instant) {
        let all: BTreeSet<JobId> = self.jobs.keys().cloned().collect();
        for id in all {
            if let Some(job) = self.jobs.remove(&id) {
                self.end(job, Err(Error::ShuttingDown), now);
            }
        }
    }
}

/// When a job that does not run wants to be looked at again, should nothing else happen.
fn next_look(job: &JobRecord) -> Option<Instant> {
    let refusal = job.refusals.values().map(|refusal| refusal.until).min();
    let patience = job.patience.as_ref().filter(|_| job.phase == Phase::Waiting);
    patience
        .map(|patience| patience.next_tick)
        .into_iter()
        .chain(refusal)
        .min()
}

fn far_away() -> Instant {
    Instant::now() + Duration::from_secs(86_400)
}
