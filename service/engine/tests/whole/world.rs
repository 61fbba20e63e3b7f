//! One episode: cards with their faults, clients with their requests, time, and an end without faults.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::library::Library;
use engine::queue::{CardSlot, CardState, Queue, Settings};
use gpu::{SimulatedCard, SimulatedSettings};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use residency::{Bytes, Policy};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::clients::{SharedClientResults, listen, random_job};
use crate::defect::{Defect, Invariant, Violation};
use crate::models::{Models, NAMES, families};
use crate::slot::{Broken, HeldPart, Port, Records, START_LIMIT_MS, Slot, State};

/// Number of events in an episode.
const ACTIONS: usize = 24;

/// Deadline for all jobs to end, after the last fault.
const PATIENCE_MS: u64 = 1_200_000;

/// Event counts over all episodes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) episodes: u64,
    pub(crate) happened: BTreeMap<String, u64>,
    pub(crate) ends: BTreeMap<String, u64>,
}

impl Stats {
    pub(crate) fn add(&mut self, other: Stats) {
        self.episodes += other.episodes;
        for (mine, theirs) in [(&mut self.happened, other.happened), (&mut self.ends, other.ends)] {
            for (name, count) in theirs {
                *mine.entry(name).or_default() += count;
            }
        }
    }

    /// Schedules that cover too little prove nothing.
    pub(crate) fn assert_everything_happened(&self) {
        for what in [
            "died while starting",
            "died while idle",
            "died while beginning",
            "died while loading",
            "died while evicting",
            "died while encode_text",
            "died while encode_image",
            "died while denoise",
            "died while decode",
            "died while answering a request",
            "died as its settings say",
            "died of the first command",
            "hung as its settings say",
            "hung while denoise",
            "hung while loading",
            "hung while evicting",
            "ignored all commands",
            "was never ready",
            "recycled",
            "the card was lost",
            "stale answers were sent",
            "a worker said wait",
            "an order was completed, of one that shares a pass",
            "an order was completed, of a part",
            "a worker let go, of a part",
            "an order failed, of a part",
        ] {
            assert!(
                self.happened.get(what).copied().unwrap_or_default() >= 3,
                "{what}: {self:#?}"
            );
        }
        for end in [
            "Done",
            "Cancelled",
            "Deadline",
            "MemoryTaken",
            "NeverFits",
            "OutOfMemory",
            "WorkerDied",
            "NotFinite",
            "ModelDamaged",
            "Internal",
        ] {
            assert!(self.ends.contains_key(end), "{end}: {self:#?}");
        }
    }
}

struct World<'a> {
    models: &'a Models,
    queue: Queue,
    slots: Vec<Slot>,
    random: ChaCha8Rng,
    defect: Defect,
    records: Arc<Mutex<Records>>,
    ears: SharedClientResults,
    tasks: JoinSet<()>,
    jobs: Vec<Arc<str>>,
    painted: BTreeMap<String, bytes::Bytes>,
    now: Arc<AtomicU64>,
    began: Instant,
    /// Whether there are no more faults.
    calm: bool,
    schedule: Vec<String>,
}

pub(crate) async fn episode(models: &Models, seed: u64, defect: Defect) -> Result<Stats, Box<Violation>> {
    let mut world = World::new(models, seed, defect);
    let outcome = world.play().await;
    let heard = std::mem::take(&mut *world.ears.lock().unwrap());
    let records = std::mem::take(&mut *world.records.lock().unwrap());
    for slot in &mut world.slots {
        slot.die("the episode is over", 0, &mut Records::default());
    }
    match outcome {
        Ok(()) => Ok(Stats {
            episodes: 1,
            happened: records.happened,
            ends: heard.ends,
        }),
        Err((invariant, what)) => Err(Box::new(Violation {
            invariant,
            seed,
            what,
            schedule: world.schedule,
        })),
    }
}

fn random_card(random: &mut ChaCha8Rng, index: usize) -> SimulatedSettings {
    let mut card = format!("{}MiB,context=5MiB,index={index}", random.random_range(130..420));
    if random.random() {
        card += ",slack=keep";
    }
    if random.random_ratio(1, 3) {
        card += &format!(",lag={}ms", random.random_range(1..900));
    }
    if random.random_ratio(2, 3) {
        card += &format!(",speed={}MiB/s", [200, 800, 4000].choose(random).unwrap());
    }
    if random.random_ratio(1, 3) {
        card += &format!(",release={}ms", random.random_range(1..200));
    }
    for how in ["oom", "io", "damaged"] {
        if random.random_ratio(1, 5) {
            card += &format!(",fail-load={}:{how}", random.random_range(1..10));
        }
    }
    for (how, odds) in [("die-at", 3), ("hang-at", 10), ("lose-at", 6)] {
        if random.random_ratio(1, odds) {
            let place = ["load", "encode_text", "encode_image", "denoise", "decode"]
                .choose(random)
                .unwrap();
            card += &format!(",{how}={place}:{}", random.random_range(1..4));
        }
    }
    card += &format!(",die-generations={}", random.random_range(1..4));
    card.parse().unwrap()
}

impl<'a> World<'a> {
    fn new(models: &'a Models, seed: u64, defect: Defect) -> World<'a> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let now = Arc::new(AtomicU64::new(0));
        let (signals, received) = mpsc::unbounded_channel();
        let (mut slots, mut ports, mut schedule) = (Vec::new(), Vec::new(), Vec::new());
        for card in 0..random.random_range(1..4_usize).min(2) {
            let settings = random_card(&mut random, card);
            schedule.push(format!("card {card}: {settings}"));
            let (port, said) = mpsc::unbounded_channel();
            ports.push(CardSlot {
                description: SimulatedCard::describe_unopened(&settings),
                port: Box::new(Port(port)),
            });
            let (signals, now) = (signals.clone(), now.clone());
            slots.push(Slot::new(card, settings, said, signals, now, seed, defect));
        }
        let settings = Settings {
            headroom: Bytes::ZERO,
            policy: [None, Some(Policy::Shared), Some(Policy::Exclusive)][random.random_range(0..3)],
            max_jobs: 40,
            keep_alive: random.random_ratio(1, 4).then(|| Duration::from_secs(8)),
            ..Settings::default()
        };
        let library = Arc::new(Library::new(families(), None));
        World {
            models,
            queue: Queue::start(settings, library, ports, received),
            slots,
            random,
            defect,
            records: Arc::default(),
            ears: SharedClientResults::default(),
            tasks: JoinSet::new(),
            jobs: Vec::new(),
            painted: BTreeMap::new(),
            now,
            began: Instant::now(),
            calm: false,
            schedule,
        }
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Advances time, in which everything due happens.
    async fn pass(&mut self, ms: u64) -> Result<(), Broken> {
        let until = self.now_ms() + ms;
        // Messages are delivered before anything else happens.
        let mut has_sent = true;
        loop {
            let now = self.now_ms();
            let next = self.slots.iter().filter_map(Slot::due).min().unwrap_or(until);
            let wake = if has_sent {
                now + 1
            } else {
                next.clamp(now + 1, until)
            };
            tokio::time::sleep(Duration::from_millis(wake - now)).await;
            let now = self.now_ms();
            self.now.store(now, SeqCst);
            has_sent = false;
            let mut records = self.records.lock().unwrap();
            for slot in &mut self.slots {
                slot.listen(now, &mut records)?;
                if slot.due().is_some_and(|due| due <= now) {
                    has_sent |= slot.step(now, self.calm, &mut self.random, &mut records)?;
                }
            }
            drop(records);
            let parts: Vec<HeldPart> = self.slots.iter().flat_map(Slot::parts).collect();
            for slot in &mut self.slots {
                slot.check_part(&parts, now)?;
            }
            if let Some(broken) = self.ears.lock().unwrap().broken.take() {
                return Err(broken);
            }
            if now >= until {
                return Ok(());
            }
        }
    }

    async fn play(&mut self) -> Result<(), Broken> {
        self.pass(5).await?;
        for _ in 0..ACTIONS {
            self.act().await?;
            let ms = match self.random.random_range(0..10) {
                0 => self.random.random_range(1000..8000),
                1..4 => self.random.random_range(100..1500),
                _ => self.random.random_range(1..150),
            };
            self.pass(ms).await?;
        }
        self.wind_down().await
    }

    fn tell(&mut self, what: impl AsRef<str>) {
        let line = format!("{:>7} ms: {}", self.now_ms(), what.as_ref());
        self.schedule.push(line);
    }

    fn any_slot(&mut self) -> usize {
        self.random.random_range(0..self.slots.len())
    }

    async fn act(&mut self) -> Result<(), Broken> {
        let slot = self.any_slot();
        match self.random.random_range(0..40) {
            0..18 => self.wish().await,
            18 => {
                if let Some(id) = self.jobs.choose(&mut self.random).cloned() {
                    self.tell("a job is cancelled");
                    let _ = self.queue.cancel(&id, "ann".to_owned()).await; // it may have ended
                }
            }
            19..24 => {
                // A card is idle most of the time, which would cover little.
                for _ in 0..self.random.random_range(0..30) {
                    if self.slots[slot].doing() == "idle" {
                        self.pass(10).await?;
                    }
                }
                let now = self.now_ms();
                let doing = self.slots[slot].doing();
                self.tell(format!("card {slot}'s worker is killed while {doing}"));
                let mut records = self.records.lock().unwrap();
                self.slots[slot].die("it was killed", now, &mut records);
            }
            24 => {
                let doing = self.slots[slot].doing();
                self.tell(format!("card {slot}'s worker hangs while {doing}"));
                self.slots[slot].hang(&mut self.records.lock().unwrap());
            }
            25..28 => {
                self.tell(format!("a lost worker of card {slot} answers"));
                self.slots[slot].send_stale_answers(&mut self.records.lock().unwrap());
            }
            28..32 => {
                let mib = self.random.random_range(0..300);
                let bytes = if self.random.random() {
                    Bytes::mib(mib)
                } else {
                    Bytes::ZERO
                };
                self.tell(format!("others want {bytes} of card {slot}"));
                self.slots[slot].world.hold("blender", Some(41), bytes);
            }
            _ => self.disturb(),
        }
        Ok(())
    }

    async fn wish(&mut self) {
        let wish = random_job(
            self.models,
            &self.ears.lock().unwrap(),
            &mut self.random,
            &mut self.painted,
        );
        let leaves = self.random.random_ratio(1, 10);
        let for_events = if leaves {
            self.random.random_range(0..6)
        } else {
            usize::MAX
        };
        let what = format!(
            "{} of {} by {}",
            match &wish.spec.work {
                engine::job::JobWork::Run(run) => run.call.as_str(),
                engine::job::JobWork::Load { .. } => "a load",
            },
            wish.spec.entry.key,
            wish.spec.options.client
        );
        match self.queue.submit(wish.spec).await {
            Ok(job) => {
                self.tell(what);
                self.jobs.push(job.id.clone());
                let (records, ears) = (self.records.clone(), self.ears.clone());
                self.tasks
                    .spawn(listen(job, wish.pictures, for_events, records, ears, self.defect));
            }
            Err(error) => self.tell(format!("{what}: {error}")),
        }
    }

    fn disturb(&mut self) {
        let name = *NAMES.choose(&mut self.random).unwrap();
        let (queue, entry) = (self.queue.clone(), self.models.entry(name));
        let (force, unpin) = (self.random.random_ratio(1, 3), self.random.random_ratio(1, 3));
        let mib = self.random.random_range(1..200);
        let ttl = Duration::from_secs(5);
        let what = self.random.random_range(0..8);
        let names = [
            "unload",
            "unload of all",
            "pin",
            "pin",
            "hold",
            "reservation",
            "trim",
            "drop of a hold",
        ];
        self.tell(format!("{} ({name})", names[what]));
        let forced_by = force.then(|| "ann".to_owned());
        self.tasks.spawn(async move {
            // The outcome is random; that they end is checked.
            match what {
                0 => drop(queue.unload(Some(entry), forced_by).await),
                1 => drop(queue.unload(None, forced_by).await),
                2 | 3 if unpin => drop(queue.unpin(&entry.key).await),
                2 | 3 => drop(queue.pin(entry).await),
                4 => drop(queue.hold(entry, "x".into(), ttl).await),
                5 => drop(queue.reserve("", Bytes::mib(mib), ttl, "other".into()).await),
                6 => drop(queue.trim("").await),
                _ => {
                    if let Ok(hold) = queue.hold(entry, "y".into(), ttl).await {
                        queue.release_hold(&hold).await;
                    }
                }
            }
        });
    }

    /// From here on there are no faults, until no job is left; then the state must equal the initial one.
    async fn wind_down(&mut self) -> Result<(), Broken> {
        self.tell("from here on nothing fails");
        self.calm = true;
        for slot in &self.slots {
            slot.world.hold("blender", None, Bytes::ZERO);
        }
        for name in NAMES {
            let _ = self.queue.unpin(&self.models.entry(name).key).await; // it may not have been pinned
        }
        self.pass_until_all_have_ended().await?;
        self.tell("everything is unloaded");
        // A worker that hangs while idle is detected at the next command, and one that never becomes ready is killed
        // after a timeout.
        for _ in 0..2 {
            if self
                .slots
                .iter()
                .any(|slot| matches!(slot.state, State::Silent { .. }))
            {
                self.pass(START_LIMIT_MS).await?;
            }
            let queue = self.queue.clone();
            self.tasks.spawn(async move {
                let _ = queue.unload(None, Some("ann".to_owned())).await;
                let _ = queue.trim("").await;
            });
            self.pass_until_all_have_ended().await?;
            self.pass_until_settled().await?;
        }
        if self.defect == Defect::LeavesAJobBehind {
            self.leave_a_job_behind().await;
        }
        self.check_settled().await
    }

    /// Time for restarts, late bytes and claims that expire: as long as they take, and at most half a minute. An idle card
    /// costs a switch of threads for every tick.
    async fn pass_until_settled(&mut self) -> Result<(), Broken> {
        let mut settled = 0;
        for _ in 0..60 {
            self.pass(500).await?;
            let is_settled = self.check_settled().await.is_ok();
            settled = if is_settled { settled + 1 } else { 0 };
            if settled == 2 {
                break;
            }
        }
        Ok(())
    }

    async fn check_settled(&self) -> Result<(), Broken> {
        for slot in &self.slots {
            slot.check_ready()?;
            slot.check_empty()?;
        }
        self.check_queue().await
    }

    async fn pass_until_all_have_ended(&mut self) -> Result<(), Broken> {
        let limit = self.now_ms() + PATIENCE_MS;
        loop {
            while let Some(task) = self.tasks.try_join_next() {
                task.unwrap();
            }
            let jobs = self.queue.jobs(false).await;
            if jobs.is_empty() && self.tasks.is_empty() {
                return Ok(());
            }
            if self.now_ms() > limit {
                let states: Vec<_> = self.slots.iter().map(|slot| slot.state).collect();
                let what = format!(
                    "{} calls have no answer from cards that are {states:?}; there are {jobs:#?} and {:?}",
                    self.tasks.len(),
                    self.queue.census().await
                );
                if self.defect == Defect::NeverComesBack {
                    return Err((Invariant::CardsBecomeReadyAgain, what));
                }
                return Err((Invariant::EveryJobEndsOnce, what));
            }
            self.pass(500).await?;
        }
    }

    async fn leave_a_job_behind(&mut self) {
        self.wish().await;
        self.wish().await;
    }

    async fn check_queue(&self) -> Result<(), Broken> {
        let census = self.queue.census().await;
        if census.len() < 6 || census.iter().any(|(_, count)| *count > 0) {
            return Err((Invariant::IdleQueueHoldsNoState, format!("{census:?}")));
        }
        let status = self.queue.status_now().await;
        for (card, slot) in status.cards.iter().zip(&self.slots) {
            let same = slot
                .ledger
                .as_ref()
                .is_some_and(|ledger| **ledger == *card.ledger);
            if card.state != CardState::Ready || card.generation != slot.generation || !same {
                let what = format!("the queue's card is {card:#?}");
                return Err((Invariant::IdleQueueHoldsNoState, what));
            }
        }
        Ok(())
    }
}
