//! A card as the queue sees it: its worker's generation, its last ledger, the order in flight, and the one that was sent ahead.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gpu::{CardDescription, CardKind, CardSpeeds};
use residency::{Bytes, Component, ComponentId, DriverTruth, Ledger, Millis};
use tokio::time::Instant;

use super::claims::Reserver;
use super::report::CardState;
use super::request::Reply;
use super::watchdog::Pace;
use crate::admission::not_resident_yet;
use crate::error::{Error, Shortfall};
use crate::job::JobId;
use crate::library::Entry;
use crate::messages::{Command, Order, Standing, Ticket, are_worth_a_command};
use crate::moved::Reserved;
use crate::need::Need;

/// Assumed seconds until a starting worker is ready, before any start was measured.
const STARTING_SECONDS: f64 = 3.0;

/// Time between two looks at jobs that wait for a worker that is not there.
const ABSENCE_LOOK: Duration = Duration::from_secs(5);

/// The time in which a card has no worker that is ready.
#[derive(Clone, Copy, Debug)]
struct Absence {
    since: Instant,
    next_look: Instant,
}

impl Absence {
    fn since(now: Instant) -> Absence {
        Absence {
            since: now,
            next_look: now + ABSENCE_LOOK,
        }
    }
}

/// The state of a card's worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Health {
    Starting,
    Ready,
    Restarting { until: Instant },
}

/// The order that a worker has.
pub(super) struct InFlight {
    pub(super) ticket: Ticket,
    /// None: the order reloads pinned components.
    pub(super) job: Option<JobId>,
    /// Jobs whose stages share its passes and have not ended.
    pub(super) sharing: BTreeMap<Ticket, JobId>,
    /// How many jobs it was sent for.
    pub(super) jobs: u32,
    pub(super) need: Need,
    /// When it was sent, or, if it was sent ahead, when the order before it ended.
    pub(super) sent: Instant,
    /// Whether the worker has reported on it.
    pub(super) has_begun: bool,
    /// When the worker last reported on it.
    pub(super) last_report: Instant,
    /// Bytes of the pieces that it has delivered, and those of them of which the worker knows that they are taken.
    pub(super) delivered: Bytes,
    pub(super) taken: Bytes,
    /// Pace of the order, by the reports of the worker.
    pub(super) pace: Pace,
    pub(super) expected_ms: f64,
    /// When the last of its jobs was cancelled.
    pub(super) cancelled: Option<Instant>,
    /// How long its worker was silent, if it was considered hung for that reason.
    pub(super) silent: Option<Duration>,
    /// Its part, where another card runs the stage with it.
    pub(super) joint: Option<Joint>,
}

/// What an order that runs a stage together with another card's knows of that one.
#[derive(Debug)]
pub(super) struct Joint {
    /// Whether its own part is the first: the job goes on by the end of that one alone.
    pub(super) leads: bool,
    /// Card and ticket of the other order.
    pub(super) other: (usize, Ticket),
    /// How often it has offered the other something, and the other it.
    pub(super) offered: u32,
    pub(super) met: u32,
    /// Why the other, which was needed, has ended.
    pub(super) fault: Option<Fault>,
    /// Whether its card time is charged already.
    pub(super) is_charged: bool,
}

impl Joint {
    pub(super) fn new(leads: bool, other: (usize, Ticket)) -> Joint {
        Joint {
            leads,
            other,
            offered: 0,
            met: 0,
            fault: None,
            is_charged: false,
        }
    }
}

/// Why a stage on two cards is to be run again: its second part has ended without having completed.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// Its worker died.
    Died(Death),
    /// It failed on this card.
    Failed { card: String, error: Error },
    /// Files of its model were replaced.
    Replaced { message: String },
    /// It could not begin: what its card answered is known to the job.
    NotBegun,
}

/// The death of a worker that had an order.
#[derive(Clone, Debug)]
pub(super) struct Death {
    pub(super) card: String,
    pub(super) kind: CardKind,
    pub(super) reason: String,
    /// Whether a client asked to end the worker.
    pub(super) is_asked_for: bool,
    /// Whether the worker had begun the order.
    pub(super) has_begun: bool,
    /// How long it was silent, if it was considered hung for that reason.
    pub(super) silent: Option<Duration>,
}

impl InFlight {
    /// An order that is sent now, for a job or to reload pinned components of this entry.
    pub(super) fn new(
        ticket: Ticket,
        job: Option<JobId>,
        entry_key: &str,
        need: Need,
        expected_ms: f64,
        now: Instant,
    ) -> InFlight {
        InFlight {
            ticket,
            jobs: 1,
            sharing: BTreeMap::new(),
            job,
            pace: Pace::of(entry_key, &need),
            need,
            sent: now,
            has_begun: false,
            last_report: now,
            delivered: Bytes::ZERO,
            taken: Bytes::ZERO,
            expected_ms,
            cancelled: None,
            silent: None,
            joint: None,
        }
    }
}

impl InFlight {
    /// The same order, as one part of a stage on two cards.
    pub(super) fn joint_with(mut self, joint: Joint) -> InFlight {
        self.joint = Some(joint);
        self
    }

    /// Whether it is the second part of a stage whose job goes on by the end of the first.
    pub(super) fn assists(&self) -> bool {
        self.joint.as_ref().is_some_and(|joint| !joint.leads)
    }

    /// The card and the ticket of the second part, if this is the first.
    pub(super) fn second_part(&self) -> Option<(usize, Ticket)> {
        let joint = self.joint.as_ref().filter(|joint| joint.leads)?;
        Some(joint.other)
    }

    /// The same order, with these jobs that share its passes.
    pub(super) fn shared_with(mut self, sharing: BTreeMap<Ticket, JobId>) -> InFlight {
        self.jobs = 1 + sharing.len() as u32;
        self.sharing = sharing;
        self
    }

    /// Whether stages of several jobs were sent with it.
    pub(super) fn was_shared(&self) -> bool {
        self.jobs > 1
    }

    /// The job of a ticket.
    pub(super) fn job_of(&self, ticket: Ticket) -> Option<&JobId> {
        match self.ticket == ticket {
            true => self.job.as_ref(),
            false => self.sharing.get(&ticket),
        }
    }

    /// The ticket of a job.
    fn ticket_of(&self, job: &JobId) -> Option<Ticket> {
        if self.job.as_ref() == Some(job) {
            return Some(self.ticket);
        }
        let shared = self.sharing.iter().find(|(_, sharing)| *sharing == job);
        shared.map(|(ticket, _)| *ticket)
    }

    /// All jobs for which it has not ended.
    pub(super) fn all_jobs(&self) -> impl Iterator<Item = &JobId> {
        self.job.iter().chain(self.sharing.values())
    }

    /// Removes the share of a stage that has ended before the order, and returns it as an order of its own.
    pub(super) fn share_of(&mut self, ticket: Ticket) -> Option<InFlight> {
        let job = self.sharing.remove(&ticket)?;
        Some(InFlight {
            ticket,
            job: Some(job),
            sharing: BTreeMap::new(),
            jobs: self.jobs,
            need: self.need.clone(),
            sent: self.sent,
            has_begun: self.has_begun,
            last_report: self.last_report,
            delivered: Bytes::ZERO,
            taken: Bytes::ZERO,
            pace: Pace::default(),
            expected_ms: self.expected_ms,
            cancelled: None,
            silent: self.silent,
            joint: None,
        })
    }
}

/// A request that a worker has not answered.
pub(super) enum PendingRequest {
    Unload {
        unload: u64,
        components: Vec<ComponentId>,
    },
    Trim {
        trim: u64,
    },
    Reserve {
        request: ReservationRequest,
        reply: Reply<Result<Reserved, Error>>,
    },
    /// Unloads for a swap: to make room for the new model, or to remove either model at the end.
    Swap {
        job: JobId,
        components: Vec<ComponentId>,
    },
    KeepAlive,
}

/// A request to reserve memory for another program.
pub(super) struct ReservationRequest {
    pub(super) by: Reserver,
    pub(super) bytes: Bytes,
    pub(super) ttl: Duration,
    /// Id of the reservation that it renews; empty: a new one.
    pub(super) renews: String,
}

/// A command for a worker, or its end.
#[derive(Debug)]
pub(super) enum ToWorker {
    Command(Command),
    /// End the worker, for this reason.
    Recycle(String),
}

/// The queue's record of a card.
pub(super) struct CardRecord {
    pub(super) description: CardDescription,
    /// Implementation of attention on it; empty until a worker has reported it.
    pub(super) attention: String,
    /// How fast it is, as its worker has reported.
    pub(super) speeds: CardSpeeds,
    /// Messages that are sent at the end of the core's turn.
    pub(super) outbox: Vec<ToWorker>,
    pub(super) health: Health,
    /// While no worker is ready.
    absence: Option<Absence>,
    pub(super) generation: u64,
    /// Events of generations up to this one are ignored: their workers are lost.
    dead_generation: Option<u64>,
    pub(super) restarts: u32,
    /// Why no worker serves it; empty while one does.
    pub(super) problem: String,
    /// The ledger as its worker published it last. Without a worker: the memory that the start of the next one takes.
    pub(super) ledger: Arc<Ledger>,
    /// Context and workspaces of the last worker when it was ready.
    taken_at_start: (Bytes, Bytes),
    ledger_at: Instant,
    ledger_latest: Millis,
    /// How many ledgers it has published.
    pub(super) snapshots: u64,
    pub(super) in_flight: Option<InFlight>,
    /// The order that waits in the worker until the one in flight has ended. There is none without that one.
    pub(super) ahead: Option<InFlight>,
    pub(super) pending_requests: BTreeMap<u64, PendingRequest>,
    pub(super) request_pending_since: Option<Instant>,
    recycled: bool,
    /// Why its worker is to be replaced as soon as it has nothing left to do; `None`: it is not to be replaced.
    retiring: Option<String>,
    standing: Standing,
    /// Bytes of other programs before the reservations were made, for the successor of a lost worker.
    foreign_before: Option<Bytes>,
    /// Components that were on the card when its worker was lost.
    pub(super) lost_residents: BTreeSet<ComponentId>,
    /// Pinned components to reload.
    pub(super) restore: VecDeque<(Arc<Entry>, Vec<Component>)>,
}

impl CardRecord {
    pub(super) fn new(description: CardDescription, headroom: Bytes, now: Instant) -> CardRecord {
        CardRecord {
            ledger: Arc::new(Ledger::new(description.total, headroom)),
            description,
            attention: String::new(),
            speeds: CardSpeeds::default(),
            outbox: Vec::new(),
            health: Health::Starting,
            absence: Some(Absence::since(now)),
            generation: 0,
            dead_generation: None,
            restarts: 0,
            problem: String::new(),
            ledger_at: now,
            ledger_latest: Millis(0),
            taken_at_start: (Bytes::ZERO, Bytes::ZERO),
            snapshots: 0,
            in_flight: None,
            ahead: None,
            pending_requests: BTreeMap::new(),
            request_pending_since: None,
            recycled: false,
            retiring: None,
            standing: Standing::default(),
            foreign_before: None,
            lost_residents: BTreeSet::new(),
            restore: VecDeque::new(),
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.health == Health::Ready
    }

    /// The job that goes on with the card after its order.
    pub(super) fn job(&self) -> Option<&JobId> {
        self.in_flight
            .as_ref()
            .filter(|running| !running.assists())?
            .job
            .as_ref()
    }

    /// The order in flight, if its own stage has this ticket.
    pub(super) fn running(&mut self, ticket: Ticket) -> Option<&mut InFlight> {
        self.in_flight.as_mut().filter(|running| running.ticket == ticket)
    }

    /// Asks the worker to stop one part of a stage on two cards, whose job goes on: once, and within the time limit of a cancel.
    pub(super) fn cancel_part(&mut self, ticket: Ticket, now: Instant) {
        let running = self.running(ticket).filter(|running| running.cancelled.is_none());
        if let Some(running) = running {
            running.cancelled = Some(now);
            self.send(Command::Cancel(ticket));
        }
    }

    /// Passes an offer of the other card on to the part that it is for, which may have waited for it.
    pub(super) fn pass_offer(&mut self, ticket: Ticket, offer: bytes::Bytes, now: Instant) {
        if let Some(running) = self.running(ticket) {
            running.meets(now);
            self.send(Command::Offer { ticket, offer });
        }
    }

    /// The shortage of a stage on the card now, without alternatives.
    pub(super) fn shortfall(&self, need: &Need, needed: Bytes) -> Shortfall {
        let not_there = not_resident_yet(&self.ledger, &need.components, Bytes::ZERO);
        Shortfall {
            stage: need.name.to_string(),
            needed: needed.max(not_there),
            free: self.ledger.usable(),
            capacity: self.ledger.total(),
            pinned: self.ledger.pinned_for_others(&need.model),
            holders: self.ledger.holders(),
            fallbacks: Vec::new(),
            smallest: None,
            instead: None,
        }
    }

    /// Whether its worker would start an order at once. While room is made for another program or for a
    /// swap, no order is sent: it could take that room.
    pub(super) fn is_free(&self) -> bool {
        let mut pending_requests = self.pending_requests.values();
        let making_room = pending_requests
            .any(|e| matches!(e, PendingRequest::Reserve { .. } | PendingRequest::Swap { .. }));
        self.is_ready()
            && self.in_flight.is_none()
            && !self.recycled
            && self.retiring.is_none()
            && !making_room
    }

    /// Whether events of a worker of this generation are accepted.
    pub(super) fn accepts_events_of(&self, generation: u64) -> bool {
        let current = !self.is_ready() || generation == self.generation;
        self.dead_generation.is_none_or(|dead| generation > dead) && current
    }

    /// Whether a new worker announces itself although the old one's loss was not reported.
    pub(super) fn is_replaced_by(&self, generation: u64) -> bool {
        self.is_ready() && generation > self.generation
    }

    /// A worker is ready; `ledger` is its own account of the card's memory.
    pub(super) fn ready(
        &mut self,
        generation: u64,
        description: CardDescription,
        (attention, speeds): (String, CardSpeeds),
        ledger: Arc<Ledger>,
        now: Instant,
    ) {
        let accounts = ledger.accounts();
        self.taken_at_start = (accounts.context, accounts.workspaces);
        self.snapshot(ledger, now);
        self.health = Health::Ready;
        self.absence = None;
        self.generation = generation;
        self.description = description;
        self.attention = attention;
        self.speeds = speeds;
        self.recycled = false;
        self.retiring = None;
        self.problem.clear();
    }

    /// The worker has ended, and with it everything that it had on the card.
    pub(super) fn lost(
        &mut self,
        generation: u64,
        reason: &str,
        restarts_in: Duration,
        headroom: Bytes,
        now: Instant,
    ) {
        reason.clone_into(&mut self.problem);
        self.dead_generation = self.dead_generation.max(Some(generation.max(self.generation)));
        self.health = Health::Restarting {
            until: now + restarts_in,
        };
        self.absence.get_or_insert_with(|| Absence::since(now));
        self.restarts += 1;
        self.lost_residents
            .extend(self.ledger.residents().map(|r| r.component.id.clone()));
        // Components that were to be reloaded and were not loaded yet are lost as well.
        let restoring = self.in_flight.iter().filter(|order| order.job.is_none());
        let coming = restoring.flat_map(|order| &order.need.components);
        let to_come = self.restore.iter().flat_map(|(_, components)| components);
        self.lost_residents
            .extend(coming.chain(to_come).map(|c| c.id.clone()));
        let foreign_before = self.ledger.foreign_before_reservations();
        self.foreign_before = foreign_before.or(self.foreign_before);
        self.standing = Standing::default();
        self.ledger = Arc::new(self.ledger_of_a_start(headroom));
        self.attention.clear();
        self.snapshots += 1;
        self.recycled = false;
        self.request_pending_since = None;
        self.restore.clear();
    }

    /// A worker takes memory long before it can report it: the bytes that the last one had at that time stay booked until the
    /// new one publishes its own ledger.
    fn ledger_of_a_start(&self, headroom: Bytes) -> Ledger {
        let total = self.description.total;
        let (context, workspaces) = self.taken_at_start;
        let mut ledger = Ledger::new(total, headroom);
        ledger.reconcile(&DriverTruth {
            total,
            free: total - context - workspaces,
            context,
            workspaces,
            ..DriverTruth::default()
        });
        ledger
    }

    pub(super) fn snapshot(&mut self, ledger: Arc<Ledger>, now: Instant) {
        self.ledger_latest = ledger.residents().map(|r| r.last_used).max().unwrap_or(Millis(0));
        self.ledger = ledger;
        self.ledger_at = now;
        self.snapshots += 1;
        self.apply_claims();
    }

    /// Applies the claims of the queue to the ledger. A ledger from before the worker received a change must neither
    /// refuse a job for a claim that is over, nor let it plan into memory that has just been reserved. A worker that
    /// hangs publishes no ledger.
    fn apply_claims(&mut self) {
        if !self.standing.is_applied_to(&self.ledger) {
            self.standing.apply_to(Arc::make_mut(&mut self.ledger));
        }
    }

    /// The time by the worker's clock. It is not earlier than the latest use of a component in the ledger.
    pub(super) fn ledger_now(&self, now: Instant) -> Millis {
        self.ledger_latest
            .after(now.duration_since(self.ledger_at).as_millis() as u64)
    }

    /// Sends an order to the worker: behind the order in flight where there is one.
    pub(super) fn order(&mut self, mut order: Order, in_flight: InFlight) {
        order.is_ahead = self.in_flight.is_some();
        match order.is_ahead {
            true => self.ahead = Some(in_flight),
            false => self.in_flight = Some(in_flight),
        }
        self.send(Command::Run(Box::new(order)));
    }

    /// The order behind which its worker may be sent another, where it may: it has nothing else to do.
    pub(super) fn takes_ahead(&self) -> Option<&InFlight> {
        let has_more = self.ahead.is_some() || !self.pending_requests.is_empty() || !self.restore.is_empty();
        let ends = self.recycled || self.is_retiring() || !self.is_ready();
        let running = self.in_flight.as_ref().filter(|_| !has_more && !ends);
        running.filter(|running| running.cancelled.is_none())
    }

    /// The orders of its worker, the one in flight first.
    pub(super) fn orders(&self) -> impl Iterator<Item = &InFlight> {
        self.in_flight.iter().chain(&self.ahead)
    }

    /// The order in flight, if its own stage has this ticket, as it has ended: the one that was sent ahead is in flight from now on.
    pub(super) fn take_ended(&mut self, ticket: Ticket, now: Instant) -> Option<InFlight> {
        let ended = self.in_flight.take_if(|running| running.ticket == ticket)?;
        self.in_flight = self.ahead.take().map(|ahead| InFlight {
            sent: now,
            last_report: now,
            ..ahead
        });
        Some(ended)
    }

    /// Takes the pieces that the running stage has delivered, where they are so many that it may wait for that.
    pub(super) fn take_pieces(&mut self, now: Instant) {
        let running = self.in_flight.as_mut();
        let Some(running) = running.filter(|running| are_worth_a_command(running.delivered, running.taken))
        else {
            return;
        };
        running.take_pieces(now);
        let (ticket, bytes) = (running.ticket, running.taken);
        self.send(Command::Taken { ticket, bytes });
    }

    fn send(&mut self, command: Command) {
        self.outbox.push(ToWorker::Command(command));
    }

    /// Asks the worker to stop the stage of a job. If several jobs share its passes, the worker continues with the
    /// others.
    pub(super) fn cancel(&mut self, job: &JobId) {
        let mut tickets = self
            .orders()
            .filter(|order| order.cancelled.is_none())
            .filter_map(|order| order.ticket_of(job));
        let ticket = tickets.next();
        drop(tickets);
        if let Some(ticket) = ticket {
            self.send(Command::Cancel(ticket));
        }
    }

    pub(super) fn send_request(&mut self, id: u64, pending: PendingRequest, command: Command, now: Instant) {
        // A further request must not extend the time limit of a worker that does not answer.
        if self.pending_requests.is_empty() {
            self.request_pending_since = Some(now);
        }
        self.pending_requests.insert(id, pending);
        self.send(command);
    }

    /// The worker has ended an order, or answered a request: the time limit of its next request begins now.
    pub(super) fn restart_request_clock(&mut self, now: Instant) {
        self.request_pending_since = Some(now);
    }

    /// Kills the worker, once.
    pub(super) fn recycle(&mut self, reason: &str) {
        if !self.recycled && self.is_ready() {
            self.recycled = true;
            tracing::warn!(card = %self.description.id, reason, "the worker is recycled");
            self.outbox.push(ToWorker::Recycle(reason.to_owned()));
        }
    }

    /// Marks the worker to be replaced for a client: it gets no new order.
    pub(super) fn retire(&mut self, client: &str) {
        let reason = || format!("{client} asked for a new one");
        self.retiring.get_or_insert_with(reason);
    }

    /// Ends the worker that is marked to be replaced.
    pub(super) fn recycle_retiring(&mut self) {
        if let Some(reason) = self.retiring.clone() {
            self.recycle(&reason);
        }
    }

    /// Whether a client has asked to replace the worker.
    pub(super) fn is_retiring(&self) -> bool {
        self.retiring.is_some()
    }

    /// Whether the worker is to be replaced, and has nothing left to do.
    pub(super) fn is_retired(&self) -> bool {
        self.is_retiring() && self.in_flight.is_none() && self.pending_requests.is_empty()
    }

    pub(super) fn is_recycled(&self) -> bool {
        self.recycled
    }

    /// Sends the worker its set of claims, if the set has changed.
    pub(super) fn send_claims(&mut self, mut standing: Standing, fresh_worker: bool) {
        if fresh_worker {
            standing.foreign_before = self.foreign_before.take();
        }
        if self.is_ready() && (fresh_worker || standing != self.standing) {
            self.standing = standing.clone();
            self.apply_claims();
            self.send(Command::Standing(standing));
        }
    }

    pub(super) fn state(&self) -> CardState {
        match self.health {
            Health::Starting => CardState::Starting,
            Health::Restarting { .. } => CardState::Restarting,
            Health::Ready if self.in_flight.is_some() => CardState::Busy,
            Health::Ready => CardState::Ready,
        }
    }

    /// When jobs that wait for its worker are to be decided again, even if nothing else happens: the longer they wait, the sooner another
    /// card would have done them.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.absence.map(|absence| absence.next_look)
    }

    /// Whether it is time for that look; the next one is later.
    pub(super) fn takes_look(&mut self, now: Instant) -> bool {
        let Some(absence) = self.absence.as_mut().filter(|absence| absence.next_look <= now) else {
            return false;
        };
        absence.next_look = now + ABSENCE_LOOK;
        true
    }

    /// Predicted seconds until it could start something. A worker that has been absent for long is expected to stay away for as long
    /// again: it may never come back.
    pub(super) fn busy_seconds(&self, now: Instant) -> f64 {
        let absent = self
            .absence
            .map_or(Duration::ZERO, |absence| now.duration_since(absence.since));
        let starting = STARTING_SECONDS.max(absent.as_secs_f64());
        match self.health {
            Health::Starting => starting,
            Health::Restarting { until } => starting + until.saturating_duration_since(now).as_secs_f64(),
            Health::Ready => {
                let left = self.in_flight.as_ref().map_or(0.0, |running| {
                    let gone = now.duration_since(running.sent).as_secs_f64();
                    (running.expected_ms / 1000.0 - gone).max(0.0)
                });
                left + self
                    .ahead
                    .as_ref()
                    .map_or(0.0, |ahead| ahead.expected_ms / 1000.0)
            }
        }
    }
}
