//! One card with its consecutive worker processes: the commands of the supervisor, their messages, and the invariants
//! of both.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use engine::messages::{Answer, Command, Event, Order, Outcome, Progress, Standing, Ticket, Work};
use engine::queue::{CardPort, CardSignal, Signal};
use gpu::{SimulatedSettings, SimulatedWorld, Unloaded};
use model::{Piece, Role, Values};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use residency::{Bytes, ComponentId, DriverTruth, Ledger, Millis, Part, ResidentState, StageNeed};
use tokio::sync::mpsc;

use crate::defect::{Defect, Invariant};
use crate::process::{Go, Process, Stop};

/// Every byte of a picture from a stale worker.
pub(crate) const STALE_BYTE: u8 = 66;

/// A worker that is not ready by then is killed, as by the supervisor.
pub(crate) const START_LIMIT_MS: u64 = 120_000;

/// A violated invariant.
pub(crate) type Broken = (Invariant, String);

/// How long a part may be without the other one before it is stopped.
const LEFT_ALONE_MS: u64 = 50;

/// One of the two orders of a stage on two cards, as its worker has it.
#[derive(Clone, Debug)]
pub(crate) struct HeldPart {
    pub(crate) ticket: Ticket,
    job: String,
    part: u32,
    /// Whether it was cancelled.
    is_ending: bool,
}

pub(crate) enum Said {
    Command(Command),
    Recycle,
}

pub(crate) struct Port(pub(crate) mpsc::UnboundedSender<Said>);

impl CardPort for Port {
    fn send(&mut self, command: Command) {
        let _ = self.0.send(Said::Command(command));
    }
    fn recycle(&mut self, _reason: &str) {
        let _ = self.0.send(Said::Recycle);
    }
}

/// State of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// There is none until this time.
    Down { until: u64 },
    /// Started and silent; it is killed at this time.
    Silent { until: u64 },
    /// Waiting for commands; next tick at this time.
    Idle { tick: u64 },
    /// Continues at this time.
    Busy { until: u64 },
    /// Does not continue.
    Hung,
}

/// How a worker starts.
enum Fate {
    Well,
    /// It is started and never becomes ready.
    Silent,
    /// It becomes ready, and then ignores all commands.
    IgnoresCommands,
    /// It becomes ready, and dies of the first command.
    EndsAtFirstCommand,
}

/// Records of all cards.
#[derive(Debug, Default)]
pub(crate) struct Records {
    /// Orders that workers completed while they lived, by job.
    pub(crate) completed: BTreeMap<String, usize>,
    /// Event counts.
    pub(crate) happened: BTreeMap<String, u64>,
}

impl Records {
    pub(crate) fn note(&mut self, what: impl Into<String>) {
        *self.happened.entry(what.into()).or_default() += 1;
    }
}

pub(crate) struct Slot {
    card: usize,
    settings: SimulatedSettings,
    pub(crate) world: SimulatedWorld,
    said: mpsc::UnboundedReceiver<Said>,
    signals: mpsc::UnboundedSender<CardSignal>,
    now: Arc<AtomicU64>,
    seed: u64,
    defect: Defect,
    process: Option<Process>,
    pub(crate) generation: u64,
    pub(crate) state: State,
    ends_at_first_command: bool,
    back_off_ms: u64,
    inbox: VecDeque<Command>,
    /// The order that the worker has not answered.
    order: Option<Order>,
    /// The order that waits in the worker until it has answered that one.
    ahead: Option<Order>,
    tickets: BTreeSet<Ticket>,
    /// Since when its worker has one part of a stage, and no other the second.
    alone_since: Option<u64>,
    /// The last part that was completed here: the other may still be at work.
    completed_part: Option<HeldPart>,
    /// Pins that the worker knows, by entry.
    pins: Vec<(String, Vec<ComponentId>)>,
    pub(crate) ledger: Option<Arc<Ledger>>,
    /// Messages of stale workers.
    past: Vec<CardSignal>,
}

impl Slot {
    pub(crate) fn new(
        card: usize,
        settings: SimulatedSettings,
        said: mpsc::UnboundedReceiver<Said>,
        signals: mpsc::UnboundedSender<CardSignal>,
        now: Arc<AtomicU64>,
        seed: u64,
        defect: Defect,
    ) -> Slot {
        Slot {
            card,
            settings,
            world: SimulatedWorld::new(),
            said,
            signals,
            now,
            seed,
            defect,
            process: None,
            generation: 0,
            state: State::Down { until: 0 },
            ends_at_first_command: false,
            back_off_ms: 100,
            inbox: VecDeque::new(),
            order: None,
            ahead: None,
            tickets: BTreeSet::new(),
            alone_since: None,
            completed_part: None,
            pins: Vec::new(),
            ledger: None,
            past: Vec::new(),
        }
    }

    /// Time of its next action.
    pub(crate) fn due(&self) -> Option<u64> {
        match self.state {
            State::Down { until } | State::Silent { until } | State::Busy { until } => Some(until),
            State::Idle { .. } if !self.inbox.is_empty() => Some(0),
            State::Idle { tick } => Some(tick),
            State::Hung => None,
        }
    }

    /// Takes the supervisor's commands.
    pub(crate) fn listen(&mut self, now: u64, records: &mut Records) -> Result<(), Broken> {
        while let Ok(said) = self.said.try_recv() {
            let command = match said {
                Said::Recycle if self.defect == Defect::HangsForEver => continue,
                Said::Recycle => {
                    records.note("recycled");
                    self.die("recycled", now, records);
                    continue;
                }
                Said::Command(command) => command,
            };
            match command {
                // As a supervisor that leaves one part of a stage running when the other has ended.
                Command::Cancel(ticket)
                    if self.defect == Defect::LeavesAPartAlone
                        && self.part().is_some_and(|part| part.ticket == ticket) => {}
                Command::Offer { ticket, offer } => {
                    if let Some(process) = &self.process {
                        let mut offers = process.shared.offers.lock().unwrap();
                        offers.entry(ticket).or_default().push_back(offer);
                    }
                }
                Command::Cancel(ticket) => {
                    if let Some(process) = &self.process {
                        process.shared.cancelled.lock().unwrap().insert(ticket);
                    }
                }
                Command::Run(order) => {
                    if self.defect == Defect::OrdersTwice {
                        self.take(order.clone(), records)?;
                    }
                    self.take(order, records)?;
                }
                other if self.process.is_some() => self.inbox.push_back(other),
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes an order, which is lost if there is no worker.
    fn take(&mut self, order: Box<Order>, records: &mut Records) -> Result<(), Broken> {
        if let Some(used) = order.tickets().find(|ticket| !self.tickets.insert(*ticket)) {
            let what = format!("{used:?} was used before");
            return Err((Invariant::OneOrderAtATime, what));
        }
        if order.together.is_some() {
            self.completed_part = None;
        }
        if self.process.is_none() {
            return Ok(());
        }
        // A worker that is considered dead is not asked for its state.
        if let Some(other) = &self.order
            && (!order.is_ahead || self.ahead.is_some())
            && !self.defect.accepts_stale_answers()
        {
            let what = format!("{:?} while {:?} is with it", order.ticket, other.ticket);
            return Err((Invariant::OneOrderAtATime, what));
        }
        match order.is_ahead && self.order.is_some() {
            true => {
                records.note("an order was sent ahead");
                self.ahead = Some((*order).clone());
            }
            false => self.order = Some((*order).clone()),
        }
        self.inbox.push_back(Command::Run(order));
        Ok(())
    }

    /// Does what is due. True if a message may have been sent.
    pub(crate) fn step(
        &mut self,
        now: u64,
        calm: bool,
        random: &mut ChaCha8Rng,
        records: &mut Records,
    ) -> Result<bool, Broken> {
        let stop = match self.state {
            State::Hung => return Ok(false),
            State::Down { .. } => {
                if self.defect == Defect::NeverComesBack && self.generation > 0 {
                    self.state = State::Down { until: u64::MAX };
                    return Ok(false);
                }
                return self.start(now, calm, random, records).map(|()| true);
            }
            State::Silent { .. } => {
                self.die("it was not ready in time", now, records);
                return Ok(true);
            }
            State::Busy { .. } => self.give(Go::On),
            State::Idle { .. } => match self.inbox.pop_front() {
                Some(_) if self.ends_at_first_command => {
                    records.note("died of the first command");
                    self.die("it died of the first command", now, records);
                    return Ok(true);
                }
                Some(command) => {
                    let Some(command) = self.tampered(command) else {
                        return Ok(true);
                    };
                    self.give(Go::Do(command))
                }
                None => self.give(Go::Tick),
            },
        };
        let has_sent = self.forward(records)?;
        self.stopped(stop, now, records)?;
        Ok(has_sent || matches!(self.state, State::Down { .. }))
    }

    /// A command as the worker receives it.
    fn tampered(&mut self, command: Command) -> Option<Command> {
        match command {
            Command::Standing(standing) => {
                self.pins.clone_from(&standing.pins);
                let pins = if self.defect == Defect::ForgetsPins {
                    Vec::new()
                } else {
                    standing.pins
                };
                Some(Command::Standing(Standing { pins, ..standing }))
            }
            Command::Unload { id, components } if self.defect == Defect::AnswersWithoutUnloading => {
                let here = |id| self.ledger.as_ref().and_then(|ledger| ledger.resident(id));
                let freed = components.iter().filter_map(here).map(|resident| {
                    let (booked, freed) = (resident.bytes(), resident.bytes());
                    (resident.component.clone(), Unloaded { booked, freed })
                });
                let answer = Answer::Unloaded {
                    freed: freed.collect(),
                    kept: Vec::new(),
                    short: Bytes::ZERO,
                };
                self.signal(Signal::Event(Event::Answer { id, answer }));
                None
            }
            other => Some(other),
        }
    }

    fn give(&self, go: Go) -> Stop {
        let missing = || Stop::Ended("there is no process".to_owned());
        self.process
            .as_ref()
            .map_or_else(missing, |process| process.give(go))
    }

    fn stopped(&mut self, stop: Stop, now: u64, records: &mut Records) -> Result<(), Broken> {
        match stop {
            Stop::Idle(rest) => {
                self.state = State::Idle { tick: now + rest };
                self.check_at_rest()?;
            }
            Stop::Busy(ms) => self.state = State::Busy { until: now + ms },
            Stop::Hung => {
                records.note("hung as its settings say");
                self.state = State::Hung;
            }
            Stop::Died => {
                records.note("died as its settings say");
                self.die("it crashed", now, records);
            }
            Stop::Ended(why) => {
                records.note("the card was lost");
                self.die(&why, now, records);
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        now: u64,
        calm: bool,
        random: &mut ChaCha8Rng,
        records: &mut Records,
    ) -> Result<(), Broken> {
        let fate = match random.random_range(0..24) {
            _ if calm => Fate::Well,
            0 => Fate::Silent,
            1 => Fate::IgnoresCommands,
            2 | 3 => Fate::EndsAtFirstCommand,
            _ => Fate::Well,
        };
        self.generation += 1;
        self.ends_at_first_command = matches!(fate, Fate::EndsAtFirstCommand);
        self.pins.clear();
        self.ledger = None;
        if matches!(fate, Fate::Silent) {
            records.note("was never ready");
            self.state = State::Silent {
                until: now + START_LIMIT_MS,
            };
            return Ok(());
        }
        let seed = self.seed ^ (self.generation << 8) ^ self.card as u64;
        let process = Process::start(
            &self.settings,
            self.generation,
            &self.world,
            &self.now,
            seed,
            self.defect,
        );
        let stop = process.wait();
        self.process = Some(process);
        self.forward(records)?;
        self.stopped(stop, now, records)?;
        if matches!(fate, Fate::IgnoresCommands) {
            records.note("ignored all commands");
            self.state = State::Hung;
        }
        Ok(())
    }

    /// Makes its worker hang.
    pub(crate) fn hang(&mut self, records: &mut Records) {
        if self.process.is_some() {
            records.note(format!("hung while {}", self.doing()));
            self.state = State::Hung;
        }
    }

    /// The part of a stage on two cards that its worker has.
    pub(crate) fn part(&self) -> Option<HeldPart> {
        let order = self.order.as_ref()?;
        let process = self.process.as_ref()?;
        let together = order.together?;
        Some(HeldPart {
            ticket: order.ticket,
            job: order.job.clone(),
            part: together.part,
            is_ending: process.shared.cancelled.lock().unwrap().contains(&order.ticket),
        })
    }

    /// The parts that count for the other one: the one that its worker has, and the last that was completed.
    pub(crate) fn parts(&self) -> impl Iterator<Item = HeldPart> {
        self.part().into_iter().chain(self.completed_part.clone())
    }

    /// Checks that the other part of its stage is among these, or that it is ending. The supervisor has a moment to
    /// learn of an end.
    pub(crate) fn check_part(&mut self, others: &[HeldPart], now: u64) -> Result<(), Broken> {
        let alone = self.part().filter(|own| {
            let mut others = others.iter();
            !own.is_ending && !others.any(|other| other.job == own.job && other.part != own.part)
        });
        let Some(alone) = alone else {
            self.alone_since = None;
            return Ok(());
        };
        let since = *self.alone_since.get_or_insert(now);
        if now - since > LEFT_ALONE_MS && !self.defect.accepts_stale_answers() {
            return Err((Invariant::PartsRunTogether, format!("{alone:?} since {since} ms")));
        }
        Ok(())
    }

    /// State of its worker, for the records.
    pub(crate) fn doing(&self) -> &'static str {
        if self.process.is_none() {
            return "starting";
        }
        let in_state = |state: ResidentState| {
            let ledger = self.ledger.as_ref();
            ledger.is_some_and(|ledger| ledger.residents().any(|r| r.state == state))
        };
        let leased = self.ledger.as_ref().is_some_and(|ledger| ledger.leases() > 0);
        if in_state(ResidentState::Evicting) {
            return "evicting";
        }
        match &self.order {
            Some(order) => match &order.work {
                Work::Stage(stage) if leased => ["encode_text", "encode_image", "denoise", "decode"]
                    .into_iter()
                    .find(|name| stage.plan.name == *name)
                    .unwrap_or("another stage"),
                _ if in_state(ResidentState::Loading) => "loading",
                _ => "beginning",
            },
            None if self.inbox.is_empty() && matches!(self.state, State::Idle { .. }) => "idle",
            None => "answering a request",
        }
    }

    /// Ends the worker, at any point.
    pub(crate) fn die(&mut self, why: &str, now: u64, records: &mut Records) {
        let doing = self.doing();
        if let Some(process) = self.process.take() {
            records.note(format!("died while {doing}"));
            for mut event in process.die() {
                poison(&mut event);
                self.remember(event);
            }
        } else if matches!(self.state, State::Silent { .. }) {
            records.note(format!("died while {doing}"));
        } else {
            return;
        }
        self.inbox.clear();
        if self.ahead.is_some() {
            records.note("died with an order that waited");
        }
        // The answers that it would have sent to its orders.
        for order in self.order.take().into_iter().chain(self.ahead.take()) {
            if let Some(outcome) = self.invented(&order) {
                self.remember(Event::Finished {
                    ticket: order.ticket,
                    outcome,
                });
            }
        }
        self.signal(Signal::Lost {
            reason: why.to_owned(),
            restarts_in: Duration::from_millis(self.back_off_ms),
        });
        self.state = State::Down {
            until: now + self.back_off_ms,
        };
        self.back_off_ms = (self.back_off_ms * 2).min(10_000);
    }

    /// Whether a ticket belongs to a stage that shares the passes of the worker's order.
    fn shares(&self, ticket: Ticket) -> bool {
        let mut sharing = self.order.iter().flat_map(|order| &order.sharing);
        sharing.any(|sharing| sharing.ticket == ticket)
    }

    /// A success of an order that was never executed.
    fn invented(&self, order: &Order) -> Option<Outcome> {
        let ledger = Ledger::new(self.settings.capacity, Bytes::ZERO);
        let completed = |values| {
            Outcome::Completed(Box::new(engine::messages::Completed {
                values,
                chunking: "whole".into(),
                approximate: false,
                passes_left_out: None,
                attention_in_fp8: false,
                resident_already: Vec::new(),
                move_ms: 0,
                run_ms: 0,
                room: ledger.usable(),
                predicted_scratch: Bytes::ZERO,
                peak_scratch: Bytes::ZERO,
                peak_bytes: Bytes::ZERO,
                memory: None,
                attention: String::new(),
                load_seconds: Vec::new(),
            }))
        };
        match &order.work {
            Work::Load(_) => Some(completed(Values::new())),
            Work::Stage(stage) if stage.plan.role == Role::Decode => Some(completed(Values::new())),
            Work::Stage(_) => None,
        }
    }

    fn remember(&mut self, event: Event) {
        self.past.push(CardSignal {
            card: self.card,
            generation: self.generation,
            signal: Signal::Event(event),
        });
    }

    /// Delivers messages of stale workers.
    pub(crate) fn send_stale_answers(&mut self, records: &mut Records) {
        for signal in self.past.clone() {
            records.note("stale answers were sent");
            let _ = self.signals.send(signal);
        }
        let Some(order) = &self.order else { return };
        // As a supervisor that mistakes a stale worker for its successor.
        let heard = match (&order.work, self.defect) {
            (Work::Load(_), Defect::AcceptsStaleLoads) => self.invented(order),
            (Work::Stage(_), Defect::AcceptsStaleAnswers) => self.invented(order),
            _ => None,
        };
        if let Some(outcome) = heard {
            let ticket = order.ticket;
            if let Some(piece) = dead_piece_of(order) {
                let progress = Progress::Piece(piece);
                self.signal(Signal::Event(Event::Progress { ticket, progress }));
            }
            self.signal(Signal::Event(Event::Finished { ticket, outcome }));
        }
    }

    fn signal(&self, signal: Signal) {
        let _ = self.signals.send(CardSignal {
            card: self.card,
            generation: self.generation,
            signal,
        });
    }

    /// Delivers and checks the worker's messages. True if there were any.
    fn forward(&mut self, records: &mut Records) -> Result<bool, Broken> {
        let said = self.process.as_ref().map(Process::said).unwrap_or_default();
        let has_sent = !said.is_empty();
        for mut event in said {
            match &mut event {
                Event::Ready { ledger, .. } | Event::Snapshot(ledger) => {
                    if let Some(other) = self.broken_ledger(ledger) {
                        *ledger = Arc::new(other);
                    }
                    let ledger = ledger.clone();
                    self.check_ledger(&ledger)?;
                    self.ledger = Some(ledger);
                }
                Event::Finished { ticket, outcome } if self.shares(*ticket) => {
                    let sharing = self.order.as_mut().map(|order| &mut order.sharing);
                    let (ended, left) = std::mem::take(sharing.unwrap())
                        .into_iter()
                        .partition::<Vec<_>, _>(|sharing| sharing.ticket == *ticket);
                    self.order.as_mut().unwrap().sharing = left;
                    records.note(format!("{}, of one that shares a pass", name_of(outcome)));
                    if let Outcome::Completed(_) = outcome {
                        *records.completed.entry(ended[0].job.clone()).or_default() += 1;
                    }
                }
                Event::Finished { ticket, outcome } => {
                    if let Outcome::Completed(_) = outcome {
                        self.completed_part = self.part().or(self.completed_part.take());
                    }
                    let Some(order) = self.order.take_if(|order| order.ticket == *ticket) else {
                        if self.defect.accepts_stale_answers() {
                            continue;
                        }
                        let what = format!("{ticket:?} was answered, which nobody waits for");
                        return Err((Invariant::OneOrderAtATime, what));
                    };
                    self.order = self.ahead.take();
                    records.note(name_of(outcome));
                    if order.together.is_some() {
                        records.note(format!("{}, of a part", name_of(outcome)));
                    }
                    if !order.sharing.is_empty() && !self.defect.accepts_stale_answers() {
                        let what = format!("{ticket:?} was answered before those that share its passes");
                        return Err((Invariant::OneOrderAtATime, what));
                    }
                    if let Outcome::Completed(_) = outcome {
                        *records.completed.entry(order.job).or_default() += 1;
                    }
                }
                Event::Progress {
                    progress: Progress::Piece(piece),
                    ..
                } if self.defect == Defect::GeneratesAnotherPicture => {
                    let mut other = piece.data.to_vec();
                    other[0] ^= 1;
                    piece.data = other.into();
                }
                Event::Progress { .. } | Event::Offer { .. } | Event::Answer { .. } => {}
            }
            self.signal(Signal::Event(event));
        }
        Ok(has_sent)
    }

    /// A ledger as a worker with a defect would publish it.
    fn broken_ledger(&self, ledger: &Ledger) -> Option<Ledger> {
        match self.defect {
            Defect::LosesALease if ledger.residents().count() > 2 => {
                let mut leased = ledger.clone();
                let need = StageNeed {
                    name: "lost".into(),
                    components: Vec::new(),
                    scratch: Bytes::ZERO,
                    headroom: Bytes::ZERO,
                    later: Vec::new(),
                    model: Vec::new(),
                    passes: u32::MAX,
                };
                leased.lease(&need, Millis(0)).ok()?;
                Some(leased)
            }
            Defect::ForgetsAByte => {
                let total = self.settings.capacity - Bytes(1);
                let mut short = Ledger::new(total, Bytes::ZERO);
                short.reconcile(&DriverTruth {
                    total,
                    free: ledger.accounts().free,
                    ..DriverTruth::default()
                });
                Some(short)
            }
            _ => None,
        }
    }

    fn check_ledger(&self, ledger: &Ledger) -> Result<(), Broken> {
        let (sum, total) = (ledger.accounts().sum(), self.settings.capacity);
        if sum != total || ledger.total() != total {
            let what = format!("{sum} of {total} in {ledger:#?}");
            return Err((Invariant::AccountsAddUp, what));
        }
        let Some(before) = &self.ledger else { return Ok(()) };
        // An order has what its own model has, as if there were no pin.
        let order = self.order.as_ref();
        let is_of_order = |id: &ComponentId| order.is_some_and(|order| order.components.contains(id));
        let gone = before.residents().find(|r| {
            let id = &r.component.id;
            // What is whole stays whole.
            let stays = |now: &&residency::Resident| {
                matches!(now.state, ResidentState::Resident | ResidentState::Resizing)
                    && (r.part != Part::WHOLE || now.bytes() >= r.bytes())
            };
            let pins = self.pins.iter().filter(|(_, pinned)| pinned.contains(id));
            let mut of_others = pins.filter(|(_, pinned)| !pinned.iter().all(is_of_order));
            r.state == ResidentState::Resident
                && of_others.next().is_some()
                && ledger.resident(id).filter(stays).is_none()
        });
        match gone {
            Some(gone) => Err((Invariant::PinnedComponentsStay, gone.component.id.to_string())),
            None => Ok(()),
        }
    }

    fn check_at_rest(&self) -> Result<(), Broken> {
        let (Some(ledger), Some(process)) = (&self.ledger, &self.process) else {
            return Ok(());
        };
        if ledger.leases() > 0 || ledger.residents().any(|r| r.state != ResidentState::Resident) {
            let what = format!("an idle card has {ledger:#?}");
            return Err((Invariant::NoOrphanLease, what));
        }
        let held = process.shared.accounts.lock().unwrap();
        let booked: Bytes = ledger.residents().map(residency::Resident::bytes).sum();
        let accounts = ledger.accounts();
        if booked != held.components || accounts.components != booked || held.scratch > Bytes::ZERO {
            let what = format!("{booked} are booked, {accounts:#?}, and the card holds {held:#?}");
            return Err((Invariant::LedgerEqualsCard, what));
        }
        Ok(())
    }

    /// Checks that the card is as empty as before the first load.
    pub(crate) fn check_empty(&self) -> Result<(), Broken> {
        let (Some(ledger), Some(process)) = (&self.ledger, &self.process) else {
            return Ok(());
        };
        let held = process.shared.accounts.lock().unwrap();
        let free = self.settings.capacity - self.settings.context;
        let left = ledger.residents().count();
        if left > 0 || held.free != free || ledger.usable() != free || ledger.accounts().free != free {
            let what =
                format!("{left} components are left; {free} should be free in {held:#?} and {ledger:#?}");
            return Err((Invariant::UnloadFreesAllBytes, what));
        }
        Ok(())
    }

    /// Checks that its worker is ready and idle.
    pub(crate) fn check_ready(&self) -> Result<(), Broken> {
        match self.state {
            State::Idle { .. } if self.order.is_none() => Ok(()),
            state => {
                let (card, generation) = (self.card, self.generation);
                let what = format!("worker {generation} of card {card} is {state:?}");
                Err((Invariant::CardsBecomeReadyAgain, what))
            }
        }
    }
}

fn name_of(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Completed(_) => "an order was completed",
        Outcome::Wait(_) => "a worker said wait",
        Outcome::Never { .. } => "a worker said never",
        Outcome::Cancelled => "a worker let go",
        Outcome::Failed(_) => "an order failed",
    }
}

/// Marks the results of a stale worker.
fn poison(event: &mut Event) {
    let all_dead = |numbers: usize| -> bytes::Bytes {
        let dead = (f32::from(STALE_BYTE) / 255.0).to_le_bytes();
        dead.repeat(numbers / 4).into()
    };
    match event {
        Event::Progress {
            progress: Progress::Piece(piece),
            ..
        } => piece.data = vec![STALE_BYTE; piece.data.len()].into(),
        Event::Finished {
            outcome: Outcome::Completed(completed),
            ..
        } => {
            for tensor in completed.values.values_mut() {
                tensor.data = all_dead(tensor.data.len());
            }
        }
        _ => {}
    }
}

/// The pieces that a stale worker would have delivered for an order.
fn dead_piece_of(order: &Order) -> Option<Piece> {
    let Work::Stage(stage) = &order.work else {
        return None;
    };
    let (width, height) = stage.request.medium.size()?;
    let bytes = 3 * width as usize * height as usize;
    (stage.plan.role == Role::Decode).then(|| Piece::image(width, height, vec![STALE_BYTE; bytes]))
}
