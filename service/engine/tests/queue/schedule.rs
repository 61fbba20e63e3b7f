//! Thousands of random steps: jobs of several clients, worker deaths, cancellations, foreign memory, answers of stale
//! workers. Each job ends once, messages of stale workers have no effect, and no state is left at rest.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::job::{JobEventKind, JobSpec, JobWork, Priority};
use engine::messages::{Answer, Command, Event, Failure, Order, Outcome, Progress, Ticket};
use engine::queue::{Job, Queue, Settings};
use model::{Image, Medium};
use rand::rngs::StdRng;
use rand::seq::{IndexedMutRandom, IndexedRandom};
use rand::{Rng, SeedableRng};
use residency::{Bytes, ComponentId, Policy};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::fixture::{entry, load, picture, swap};
use crate::worker::{Wire, Worker, at_rest, completed, piece_of, settle, start};

/// Every byte of a picture from a stale worker.
const STALE_BYTE: u8 = 0xde;

/// A worker that does one thing at a time, and loses its state when it dies.
struct ScriptedWorker {
    worker: Worker,
    alive: bool,
    /// Commands of its current generation that are not answered.
    order: Option<Order>,
    begun: bool,
    unloads: Vec<(u64, Vec<ComponentId>)>,
    others: Vec<(u64, bool)>,
    /// Commands of earlier generations.
    past: Vec<(u64, Order)>,
    tickets: BTreeSet<Ticket>,
}

impl ScriptedWorker {
    fn listen(&mut self) {
        while let Some(wire) = self.worker.try_next() {
            match wire {
                Wire::Command(Command::Run(order)) => {
                    assert!(self.tickets.insert(order.ticket), "a ticket is used once");
                    if self.alive {
                        assert!(self.order.is_none(), "one order at a time");
                        (self.order, self.begun) = (Some(*order), false);
                    }
                }
                Wire::Command(Command::Cancel(ticket)) => {
                    if self.order.as_ref().is_some_and(|order| order.ticket == ticket) {
                        self.order = None;
                        self.worker.finish(ticket, Outcome::Cancelled);
                    }
                }
                Wire::Command(Command::Unload { id, components }) if self.alive => {
                    self.unloads.push((id, components));
                }
                Wire::Command(Command::Trim { id }) if self.alive => self.others.push((id, true)),
                Wire::Command(Command::MakeRoom { id, .. }) if self.alive => self.others.push((id, false)),
                Wire::Command(_) => {}
                Wire::Recycle(_) => self.die(),
            }
        }
    }

    fn die(&mut self) {
        if self.alive {
            self.alive = false;
            self.worker.die();
            self.past
                .extend(self.order.take().map(|order| (self.worker.generation, order)));
            self.unloads.clear();
            self.others.clear();
        }
    }

    fn live(&mut self) {
        if !self.alive {
            self.alive = true;
            self.worker.ready();
        }
    }

    /// A lost worker reports success.
    fn send_stale_answers(&mut self) {
        for (generation, order) in &self.past {
            let Outcome::Completed(done) = completed(order, Vec::new()) else {
                continue;
            };
            let ticket = order.ticket;
            if let Some(mut piece) = piece_of(order) {
                piece.data = vec![STALE_BYTE; piece.data.len()].into();
                let progress = Progress::Piece(piece);
                let event = Event::Progress { ticket, progress };
                self.worker
                    .signal(*generation, engine::queue::Signal::Event(event));
            }
            let (ticket, outcome) = (order.ticket, Outcome::Completed(done));
            let event = Event::Finished { ticket, outcome };
            self.worker
                .signal(*generation, engine::queue::Signal::Event(event));
        }
    }

    fn answer(&mut self) {
        for (id, components) in std::mem::take(&mut self.unloads) {
            let here = |id: &ComponentId| self.worker.ledger.resident(id).is_some();
            let components: Vec<ComponentId> = components.into_iter().filter(here).collect();
            self.worker.unload(id, &components);
        }
        for (id, trims) in std::mem::take(&mut self.others) {
            let room = Answer::Unloaded {
                freed: Vec::new(),
                kept: Vec::new(),
                short: Bytes::ZERO,
            };
            let answer = if trims { Answer::Trimmed(Bytes::ZERO) } else { room };
            self.worker.say(Event::Answer { id, answer });
        }
    }

    /// One step of its work: begin, then succeed or fail.
    fn step(&mut self, random: &mut StdRng) {
        self.answer();
        let Some(order) = self.order.clone() else { return };
        if !self.begun {
            match self.worker.begin(&order) {
                Ok(_) => self.begun = true,
                Err(outcome) => self.finish(&order, outcome),
            }
            return;
        }
        match random.random_range(0..20) {
            0 => self.finish(&order, Outcome::Failed(Failure::Internal("chance".into()))),
            1 => {
                let (stage, needed) = ("decode".to_owned(), Bytes::gib(3));
                let failure = Failure::OutOfMemory {
                    stage,
                    needed,
                    usable: Bytes::ZERO,
                    holders: Vec::new(),
                };
                self.finish(&order, Outcome::Failed(failure));
            }
            2..8 => self.worker.progress(order.ticket, Progress::Step { n: 1, of: 4 }),
            _ => self.finish(&order, completed(&order, Vec::new())),
        }
    }

    fn finish(&mut self, order: &Order, outcome: Outcome) {
        self.order = None;
        self.worker.finish(order.ticket, outcome);
    }
}

fn random_job(random: &mut StdRng, number: u64) -> JobSpec {
    let model = *["a", "b", "c"].choose(random).unwrap();
    let client = *["x", "y", "z"].choose(random).unwrap();
    let (swap_in, swap_out) = (
        *["a", "b", "small"].choose(random).unwrap(),
        *["a", "b", "small"].choose(random).unwrap(),
    );
    let mut spec = match random.random_range(0..5) {
        4 => swap(swap_in, swap_out, client),
        0 => load(model, client, &["vae"]),
        1 => load(model, client, &[]),
        _ => picture(model, client, &format!("prompt {}", number % 7)),
    };
    if let JobWork::Run(generate) = &mut spec.work {
        generate.count = random.random_range(1..3);
        generate.keep_latent = random.random_bool(0.2);
        if random.random_bool(0.2) {
            generate.request.cards = 2;
        }
        if random.random_bool(0.05) {
            generate.request.medium = Medium::Image(Image::of(8192, 1024));
        }
    }
    spec.options.priority = *[Priority::Low, Priority::Normal, Priority::High]
        .choose(random)
        .unwrap();
    spec.options.allow_low_memory = random.random_bool(0.1);
    spec.options.detach = random.random_bool(0.1);
    if random.random_bool(0.2) {
        spec.options.deadline = Some(Instant::now() + Duration::from_millis(random.random_range(0..20_000)));
    }
    if random.random_bool(0.2) {
        spec.options.idempotency_key = format!("key {}", number % 5);
    }
    if random.random_bool(0.1) {
        spec.options.card_hint = "sim:1".into();
    }
    spec
}

/// Listens to a job, and checks that it ends once and that no stale worker's picture is among its events.
async fn listen(mut job: Job, for_events: usize, ends: Ends) {
    let (mut terminals, mut end) = (0, String::new());
    for _ in 0..for_events {
        let Some(event) = job.next().await else { break };
        assert_eq!(terminals, 0, "nothing comes after the end");
        match event.kind {
            JobEventKind::Done(_) => {
                terminals += 1;
                end = "Done".to_owned();
            }
            JobEventKind::Failed(error) => {
                terminals += 1;
                end = format!("{error:?}")
                    .split(['(', ' '])
                    .next()
                    .unwrap_or_default()
                    .to_owned();
            }
            JobEventKind::Piece { piece, .. } => {
                assert_ne!(piece.data[0], STALE_BYTE, "a stale piece is ignored")
            }
            _ => {}
        }
    }
    if for_events == usize::MAX {
        assert_eq!(terminals, 1, "each job ends once");
        ends.lock().unwrap().push(end);
    }
}

/// How jobs ended.
type Ends = Arc<Mutex<Vec<String>>>;

fn disturb(queue: &Queue, random: &mut StdRng, tasks: &mut JoinSet<()>) {
    let (queue, model) = (queue.clone(), entry(["a", "b", "c"].choose(random).unwrap()));
    let (force, unpin, what) = (
        random.random_bool(0.3),
        random.random_bool(0.7),
        random.random_range(0..6),
    );
    let forced_by = force.then(|| "ann".to_owned());
    let ttl = Duration::from_secs(5);
    tasks.spawn(async move {
        // The outcome is random; that they end is checked.
        match what {
            0 => drop(queue.unload(Some(model), forced_by).await),
            1 => drop(queue.unload(None, forced_by).await),
            2 if unpin => drop(queue.unpin(&model.key).await),
            2 => drop(queue.pin(model).await),
            3 => drop(queue.hold(model, "x".into(), ttl).await),
            4 => drop(queue.reserve("", Bytes::gib(2), ttl, "other".into()).await),
            _ => drop(queue.trim("").await),
        }
    });
}

/// From here on there are no faults, until no job is left.
async fn wind_down(
    queue: &Queue,
    workers: &mut [ScriptedWorker],
    tasks: &mut JoinSet<()>,
    random: &mut StdRng,
) {
    for model in ["a", "b", "c", "small"] {
        queue.unpin(model).await.unwrap();
    }
    for _ in 0..20_000 {
        if queue.jobs(false).await.is_empty() && tasks.is_empty() {
            break;
        }
        for worker in &mut *workers {
            worker.live();
            worker.worker.set_foreign(Bytes::ZERO);
            worker.step(random);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        workers.iter_mut().for_each(ScriptedWorker::listen);
        while let Some(task) = tasks.try_join_next() {
            task.unwrap();
        }
    }
}

async fn run(seed: u64, steps: u64) -> Vec<String> {
    let random = &mut StdRng::seed_from_u64(seed);
    let policy = if seed.is_multiple_of(2) {
        Policy::Shared
    } else {
        Policy::Exclusive
    };
    let settings = Settings {
        policy: Some(policy),
        headroom: Bytes::ZERO,
        max_jobs: 40,
        ..Settings::default()
    };
    let (queue, workers) = start(settings, 2);
    let played = |worker| ScriptedWorker {
        worker,
        alive: false,
        order: None,
        begun: false,
        unloads: Vec::new(),
        others: Vec::new(),
        past: Vec::new(),
        tickets: BTreeSet::new(),
    };
    let mut workers: Vec<ScriptedWorker> = workers.into_iter().map(played).collect();
    let (mut tasks, mut ids) = (JoinSet::new(), Vec::new());
    let (ends, mut listened) = (Ends::default(), 0);
    for number in 0..steps {
        let worker = workers.choose_mut(random).unwrap();
        match random.random_range(0..40) {
            0..6 => {
                if let Ok(job) = queue.submit(random_job(random, number)).await {
                    let leaves = random.random_bool(0.1);
                    let for_events = if leaves {
                        random.random_range(0..6)
                    } else {
                        usize::MAX
                    };
                    listened += usize::from(!leaves);
                    ids.push(job.id.clone());
                    tasks.spawn(listen(job, for_events, ends.clone()));
                }
            }
            6 => {
                if let Some(id) = ids.choose(random) {
                    let _ = queue.cancel(id, "ann".to_owned()).await;
                }
            }
            7 => worker.die(),
            8..11 => worker.live(),
            11 if worker.alive => worker.worker.set_foreign(Bytes::gib(random.random_range(0..22))),
            12 => worker.send_stale_answers(),
            13 => disturb(&queue, random, &mut tasks),
            14..17 => tokio::time::sleep(Duration::from_millis(random.random_range(0..3000))).await,
            _ if worker.alive => worker.step(random),
            _ => {}
        }
        settle().await;
        workers.iter_mut().for_each(ScriptedWorker::listen);
    }
    wind_down(&queue, &mut workers, &mut tasks, random).await;
    assert!(tasks.is_empty(), "seed {seed}: {:?}", queue.jobs(false).await);
    let ends = std::mem::take(&mut *ends.lock().unwrap());
    assert_eq!(ends.len(), listened);
    for worker in &mut workers {
        worker.step(random);
    }
    at_rest(&queue).await;
    for worker in &mut workers {
        worker.listen();
        let holds = &worker.worker.standing.holds;
        assert!(
            holds.iter().all(|(id, _)| !id.contains("swap")),
            "a swap left {holds:?}"
        );
    }
    ends
}

#[tokio::test(start_paused = true)]
async fn random_events_end_each_job_once_and_leave_no_state() {
    let mut seen = BTreeSet::new();
    for seed in 0..8 {
        seen.extend(run(seed, 2000).await);
    }
    let ways = [
        "Done",
        "Cancelled",
        "Deadline",
        "MemoryTaken",
        "NeverFits",
        "OutOfMemory",
        "WorkerDied",
    ];
    assert!(ways.iter().all(|way| seen.contains(*way)), "too tame: {seen:?}");
}
