//! A worker scripted by a test, with a real ledger.

use std::sync::Arc;
use std::time::Duration;

use engine::admission::{Admission, choose_rung, choose_rung_low_memory};
use engine::job::{JobEvent, JobEventKind};
use engine::library::Library;
use engine::messages::{
    Answer, Command, Completed, Event, Failure, KeptBecause, Order, Outcome, Progress, Shortage, Standing,
    Ticket, Work,
};
use engine::need::Need;
use engine::queue::{CardPort, CardSignal, CardSlot, Job, Queue, Settings, Signal};
use gpu::{CardDescription, CardKind, CardSpeeds, Peers, Unloaded};
use model::{Piece, Rung, StagePlan, Values};
use pipelines::FamilyList;
use residency::{
    Bytes, Component, ComponentId, DriverTruth, HoldId, Ledger, Millis, Move, PinId, Policy, ReservationId,
};
use tokio::sync::mpsc;

use crate::fixture::{CARD, FakeFamily, latent};

pub enum Wire {
    Command(Command),
    Recycle(String),
}

struct Port(mpsc::UnboundedSender<Wire>);

impl CardPort for Port {
    fn send(&mut self, command: Command) {
        let _ = self.0.send(Wire::Command(command));
    }
    fn recycle(&mut self, reason: &str) {
        let _ = self.0.send(Wire::Recycle(reason.to_owned()));
    }
}

/// A worker scripted by a test, with a real ledger.
pub struct Worker {
    pub card: usize,
    description: CardDescription,
    pub generation: u64,
    pub commands: mpsc::UnboundedReceiver<Wire>,
    signals: mpsc::UnboundedSender<CardSignal>,
    pub ledger: Ledger,
    /// Foreign bytes.
    pub foreign: Bytes,
    /// Bytes of each worker's context.
    pub context: Bytes,
    pub standing: Standing,
    pub speeds: CardSpeeds,
    /// Milliseconds that it says its stages ran.
    pub run_ms: u64,
    /// Whether it begins the orders that it receives.
    begins: bool,
    started: tokio::time::Instant,
}

/// How long a stage ran, in milliseconds, where a test says nothing else: for longer than orders that are sent ahead.
const RUN_MS: u64 = 100;

/// Runs all tasks that are ready.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

pub fn start(settings: Settings, cards: usize) -> (Queue, Vec<Worker>) {
    start_on(settings, (0..cards).map(description).collect())
}

pub fn start_on(settings: Settings, cards: Vec<CardDescription>) -> (Queue, Vec<Worker>) {
    let (signals, received) = mpsc::unbounded_channel();
    let (mut slots, mut workers) = (Vec::new(), Vec::new());
    for (card, description) in cards.into_iter().enumerate() {
        let (port, commands) = mpsc::unbounded_channel();
        slots.push(CardSlot {
            description: description.clone(),
            port: Box::new(Port(port)),
        });
        workers.push(Worker {
            card,
            description,
            generation: 0,
            commands,
            signals: signals.clone(),
            ledger: Ledger::new(CARD, Bytes::ZERO),
            foreign: Bytes::ZERO,
            context: Bytes::ZERO,
            run_ms: RUN_MS,
            begins: true,
            standing: Standing::default(),
            speeds: CardSpeeds::default(),
            started: tokio::time::Instant::now(),
        });
    }
    let library = Arc::new(Library::new(FamilyList::new(vec![Box::new(FakeFamily)]), None));
    (Queue::start(settings, library, slots, received), workers)
}

/// A queue with one card that is ready.
pub async fn one_card() -> (Queue, Worker) {
    one_card_with(Settings::default()).await
}

pub async fn one_card_with(settings: Settings) -> (Queue, Worker) {
    one_of(description(0), settings).await
}

/// A queue with one CPU.
pub async fn one_cpu_with(settings: Settings) -> (Queue, Worker) {
    let cpu = CardDescription {
        id: "cpu".into(),
        kind: CardKind::Cpu,
        ..description(0)
    };
    one_of(cpu, settings).await
}

async fn one_of(card: CardDescription, settings: Settings) -> (Queue, Worker) {
    let settings = Settings {
        headroom: Bytes::ZERO,
        ..settings
    };
    let (queue, mut workers) = start_on(settings, vec![card]);
    let mut worker = workers.remove(0);
    worker.ready();
    settle().await;
    (queue, worker)
}

pub fn description(card: usize) -> CardDescription {
    CardDescription {
        id: format!("sim:{card}"),
        kind: CardKind::Simulated,
        name: "fake".into(),
        total: CARD,
        compute_capability: None,
        compute_dtype: "f32".into(),
        peers: Peers::All,
    }
}

impl Worker {
    pub fn now(&self) -> Millis {
        Millis(self.started.elapsed().as_millis() as u64)
    }

    pub fn signal(&self, generation: u64, signal: Signal) {
        let _ = self.signals.send(CardSignal {
            card: self.card,
            generation,
            signal,
        });
    }

    pub fn say(&self, event: Event) {
        self.signal(self.generation, Signal::Event(event));
    }

    /// Starts a new worker process.
    pub fn ready(&mut self) {
        self.generation += 1;
        self.ledger = Ledger::new(CARD, Bytes::ZERO);
        self.read_figures();
        self.say(self.announcement());
    }

    /// The event of a worker that is ready.
    pub fn announcement(&self) -> Event {
        Event::Ready {
            card: self.description.clone(),
            attention: "own kernels: for a test".to_owned(),
            speeds: self.speeds,
            ledger: Arc::new(self.ledger.clone()),
        }
    }

    /// The worker process dies.
    pub fn die(&mut self) {
        self.die_of("killed");
    }

    pub fn die_of(&mut self, reason: &str) {
        let restarts_in = Duration::from_secs(1);
        let reason = reason.to_owned();
        self.signal(self.generation, Signal::Lost { reason, restarts_in });
    }

    /// Reads the driver's figures, and publishes the ledger.
    pub fn reconcile(&mut self) {
        self.read_figures();
        self.publish();
    }

    fn read_figures(&mut self) {
        let components = self
            .ledger
            .residents()
            .map(residency::Resident::bytes)
            .sum::<Bytes>();
        let free = CARD - components - self.foreign - self.context;
        let truth = DriverTruth {
            total: CARD,
            free,
            components,
            context: self.context,
            ..DriverTruth::default()
        };
        self.ledger.reconcile(&truth);
    }

    pub fn publish(&self) {
        self.say(Event::Snapshot(Arc::new(self.ledger.clone())));
    }

    pub fn set_foreign(&mut self, bytes: Bytes) {
        self.foreign = bytes;
        self.reconcile();
    }

    /// A command as a worker takes it; `None` for claims, which are done with.
    pub fn taken(&mut self, wire: Wire) -> Option<Wire> {
        match wire {
            Wire::Command(Command::Standing(standing)) => {
                self.stand(standing);
                None
            }
            other => Some(self.begun(other)),
        }
    }

    /// The supervisor's next command, other than claims.
    pub async fn next(&mut self) -> Wire {
        loop {
            let wire = tokio::time::timeout(Duration::from_secs(60), self.commands.recv()).await;
            match wire
                .expect("the supervisor says something")
                .expect("the supervisor is there")
            {
                Wire::Command(Command::Standing(standing)) => self.stand(standing),
                other => return self.begun(other),
            }
        }
    }

    /// The commands received so far.
    pub fn try_next(&mut self) -> Option<Wire> {
        loop {
            match self.commands.try_recv().ok()? {
                Wire::Command(Command::Standing(standing)) => self.stand(standing),
                other => return Some(self.begun(other)),
            }
        }
    }

    /// Reports that it has begun an order, as a worker does first.
    fn begun(&self, wire: Wire) -> Wire {
        if let Wire::Command(Command::Run(order)) = &wire
            && self.begins
        {
            self.progress(order.ticket, Progress::Begun);
        }
        wire
    }

    fn stand(&mut self, standing: Standing) {
        for (model, _) in &self.standing.pins {
            self.ledger.unpin(&PinId::new(model.as_str()));
        }
        for (hold, _) in &self.standing.holds {
            self.ledger.release_hold(&HoldId::new(hold.as_str()));
        }
        for (reservation, _, _) in &self.standing.reservations {
            self.ledger
                .release_reservation(&ReservationId::new(reservation.as_str()));
        }
        for (model, ids) in &standing.pins {
            self.ledger.pin(PinId::new(model.as_str()), ids.clone());
        }
        for (hold, ids) in &standing.holds {
            self.ledger.hold(HoldId::new(hold.as_str()), ids.clone());
        }
        for (id, label, bytes) in &standing.reservations {
            self.ledger
                .reserve(ReservationId::new(id.as_str()), label.clone(), *bytes);
        }
        if let Some(foreign) = standing.foreign_before {
            self.ledger.reserved_beside(foreign);
        }
        self.standing = standing;
        self.publish();
    }

    /// The reason for which it is to be killed.
    pub async fn recycled(&mut self) -> String {
        match self.next().await {
            Wire::Recycle(reason) => reason,
            Wire::Command(other) => panic!("the end was expected, not {other:?}"),
        }
    }

    /// The next order, which the worker does not begin.
    pub async fn order_not_begun(&mut self) -> Order {
        self.begins = false;
        let order = self.order().await;
        self.begins = true;
        order
    }

    pub async fn order(&mut self) -> Order {
        match self.next().await {
            Wire::Command(Command::Run(order)) => *order,
            Wire::Command(other) => panic!("an order was expected, not {other:?}"),
            Wire::Recycle(reason) => panic!("an order was expected, not the end: {reason}"),
        }
    }

    /// Checks that there is no command.
    pub async fn receives_no_command(&mut self) -> bool {
        settle().await;
        self.try_next().is_none()
    }

    /// Loads the components, as a worker would; false if they do not fit.
    pub fn load(&mut self, order: &Order) -> Result<Vec<String>, Outcome> {
        let need = Need::of_order(order);
        let now = self.now();
        let here = |c: &&Component| self.ledger.is_resident(&c.id);
        let resident: Vec<String> = need
            .components
            .iter()
            .filter(here)
            .map(|c| c.name.clone())
            .collect();
        let moves = match choose_rung(&self.ledger, &need, order.policy, now) {
            Admission::Run { moves, .. } => moves,
            _ if order.allow_low_memory => {
                choose_rung_low_memory(&self.ledger, &need, order.policy, now)
                    .expect("weights fit")
                    .moves
            }
            Admission::Wait { short, cause, .. } => {
                let (usable, holders) = (self.ledger.usable(), self.ledger.holders());
                return Err(Outcome::Wait(Shortage {
                    short,
                    needed: short,
                    usable,
                    cause,
                    holders,
                }));
            }
            Admission::Never { needed, capacity } => return Err(Outcome::Never { needed, capacity }),
        };
        for step in moves {
            match step {
                Move::Evict(component) => {
                    self.progress(order.ticket, Progress::Evicting(component.clone()));
                    self.ledger.begin_evict(&component.id).unwrap();
                    self.ledger.complete_evict(&component.id, now).unwrap();
                }
                Move::Resize(component, part) => {
                    self.ledger.begin_resize(&component, part).unwrap();
                    self.ledger.complete_resize(&component.id, now).unwrap();
                }
                Move::Load(component, part) => {
                    if self.ledger.begin_load(&component, part, now).is_err() {
                        let (stage, needed, usable) = ("load".into(), component.bytes, self.ledger.usable());
                        let failure = Failure::OutOfMemory {
                            stage,
                            needed,
                            usable,
                            holders: Vec::new(),
                        };
                        return Err(Outcome::Failed(failure));
                    }
                    self.ledger.complete_load(&component.id, now).unwrap();
                    let done = component.bytes;
                    self.progress(order.ticket, Progress::Loading { component, done });
                }
                Move::Trim => {}
            }
            self.reconcile();
        }
        Ok(resident)
    }

    pub fn progress(&self, ticket: Ticket, progress: Progress) {
        self.say(Event::Progress { ticket, progress });
    }

    pub fn finish(&self, ticket: Ticket, outcome: Outcome) {
        self.say(Event::Finished { ticket, outcome });
    }

    pub fn begin(&mut self, order: &Order) -> Result<Vec<String>, Outcome> {
        let resident = self.load(order)?;
        self.progress(
            order.ticket,
            Progress::Started {
                chunking: "whole".into(),
                memory: self.ledger.summary(),
            },
        );
        Ok(resident)
    }

    /// The delivered piece of a decode.
    pub fn deliver(&self, order: &Order) {
        if let Some(piece) = piece_of(order) {
            self.progress(order.ticket, Progress::Piece(piece));
        }
    }

    /// Completes an order at once.
    pub fn complete(&mut self, order: &Order) {
        let outcome = match self.begin(order) {
            Ok(resident) => {
                self.deliver(order);
                match completed(order, resident) {
                    Outcome::Completed(completed) => Outcome::Completed(Box::new(Completed {
                        run_ms: self.run_ms,
                        ..*completed
                    })),
                    other => other,
                }
            }
            Err(outcome) => outcome,
        };
        for sharing in &order.sharing {
            let outcome = match &outcome {
                Outcome::Completed(completed) => Outcome::Completed(Box::new(Completed {
                    values: values_of_plan(&sharing.work.plan),
                    ..(**completed).clone()
                })),
                other => other.clone(),
            };
            self.finish(sharing.ticket, outcome);
        }
        self.finish(order.ticket, outcome);
    }

    /// Takes an order, works for this long, completes it. Returns its client and stage.
    pub async fn work(&mut self, ms: u64) -> (String, &'static str) {
        let order = self.order().await;
        tokio::time::sleep(Duration::from_millis(ms)).await;
        self.complete(&order);
        (order.job.clone(), stage_of(&order))
    }

    /// Completes the current order, if there is one.
    pub async fn try_work(&mut self) -> bool {
        settle().await;
        match self.try_next() {
            Some(Wire::Command(Command::Run(order))) => {
                self.complete(&order);
                true
            }
            _ => false,
        }
    }

    /// Answers an unload as a worker would.
    pub fn unload(&mut self, id: u64, components: &[ComponentId]) {
        let (mut freed, mut kept) = (Vec::new(), Vec::new());
        let now = self.now();
        for component in components {
            let resident = self.ledger.resident(component).unwrap().component.clone();
            if self.ledger.begin_evict(component).is_err() {
                kept.push((resident, KeptBecause::InUse));
                continue;
            }
            self.ledger.complete_evict(component, now).unwrap();
            let bytes = resident.bytes;
            freed.push((
                resident,
                Unloaded {
                    booked: bytes,
                    freed: bytes,
                },
            ));
        }
        self.reconcile();
        self.say(Event::Answer {
            id,
            answer: Answer::Unloaded {
                freed,
                kept,
                short: Bytes::ZERO,
            },
        });
    }
}

pub fn needs(order: &Order) -> (&[Component], &[Rung]) {
    match &order.work {
        Work::Load(components) => (components, &[]),
        Work::Stage(stage) => (&stage.components, &stage.plan.rungs),
    }
}

const STAGES: [&str; 4] = ["encode_text", "encode_image", "denoise", "decode"];

pub fn stage_of(order: &Order) -> &'static str {
    match &order.work {
        Work::Load(_) => "load",
        Work::Stage(stage) => STAGES.into_iter().find(|name| stage.plan.name == *name).unwrap(),
    }
}

/// The report of a successful stage that needed half of the prediction.
pub fn completed(order: &Order, resident_already: Vec<String>) -> Outcome {
    let (components, rungs) = needs(order);
    let predicted = rungs.first().map_or(Bytes::ZERO, |rung| rung.scratch);
    Outcome::Completed(Box::new(Completed {
        values: values_of(order),
        chunking: rungs.first().map(|rung| rung.label.clone()).unwrap_or_default(),
        approximate: false,
        passes_left_out: None,
        attention_in_fp8: false,
        resident_already,
        move_ms: 5,
        run_ms: RUN_MS,
        predicted_scratch: predicted,
        room: predicted,
        peak_scratch: Bytes(predicted.0 / 2),
        peak_bytes: predicted,
        memory: None,
        attention: "own kernels".to_owned(),
        load_seconds: components
            .iter()
            .map(|c| (c.id.clone(), c.reload_seconds))
            .collect(),
    }))
}

fn values_of(order: &Order) -> Values {
    let Work::Stage(stage) = &order.work else {
        return Values::new();
    };
    values_of_plan(&stage.plan)
}

fn values_of_plan(plan: &StagePlan) -> Values {
    let gives = plan.gives.iter().map(|name| (name.clone(), latent()));
    gives.collect()
}

/// The delivered picture of a decode, in the requested size, with few distinct bytes if it is large.
pub fn piece_of(order: &Order) -> Option<Piece> {
    let Work::Stage(stage) = &order.work else {
        return None;
    };
    let (width, height) = stage.request.medium.size()?;
    let bytes = 3 * width as usize * height as usize;
    (stage.plan.name == "decode").then(|| Piece::image(width, height, vec![7; bytes]))
}

/// All events of a job until its end.
pub async fn events(job: &mut Job) -> Vec<JobEventKind> {
    let mut all = Vec::new();
    while let Some(JobEvent { kind, .. }) = tokio::time::timeout(Duration::from_secs(600), job.next())
        .await
        .expect("the job ends")
    {
        all.push(kind);
    }
    all
}

/// Outcome of a job.
pub async fn end(job: &mut Job) -> Result<(), engine::Error> {
    match events(job).await.pop() {
        Some(JobEventKind::Done(_)) => Ok(()),
        Some(JobEventKind::Failed(error)) => Err(error),
        other => panic!("a job ended with {other:?}"),
    }
}

/// The error of a job that a client cancelled.
pub fn cancelled_by(client: &str) -> engine::Error {
    let client = client.to_owned();
    engine::Error::Cancelled(engine::CancelledBy::Call { client })
}

/// Checks that no state is left.
pub async fn at_rest(queue: &Queue) {
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(queue.jobs(false).await.is_empty());
    let census = queue.census().await;
    assert!(
        census.len() > 5 && census.iter().all(|(_, count)| *count == 0),
        "{census:?}"
    );
    let status = queue.status().borrow().clone();
    assert!(status.jobs.is_empty());
    assert!(
        status.cards.iter().all(|card| card.job.is_none()),
        "an order is left"
    );
}

pub fn exclusive() -> Settings {
    Settings {
        policy: Some(Policy::Exclusive),
        ..Settings::default()
    }
}
