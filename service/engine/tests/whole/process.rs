//! A worker process: a card on a thread that runs only while it has the baton. At every point where it could be
//! interrupted it returns the baton to the world, which decides whether it continues, hangs, or has died there.
//!
//! A dead process continues to the end of its current work, on a card that is no longer observed: its messages from
//! then on are recorded, for schedules in which messages of stale workers arrive late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use engine::card::{Card, CardSettings, Clock, Faults, Flow, Link};
use engine::messages::{Command, Event, Progress, Ticket};
use gpu::{
    Gpu as _, GpuError, LoadError, LoadPlan, LoadProgress, SimulatedAccounts, SimulatedCard, SimulatedClock,
    SimulatedSettings, SimulatedWorld, Unloaded,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use residency::{Bytes, Component, ComponentId, Millis, Part};

use crate::defect::Defect;
use crate::models::families;
use crate::watched::{Watch, Watched};

/// How often a process that waits for the other card's offer looks for it.
const OFFER_POLL_MS: u64 = 20;

/// Where a process returned the baton.
pub(crate) enum Stop {
    /// It is idle, with its next tick in this many milliseconds.
    Idle(u64),
    /// It continues in this many milliseconds.
    Busy(u64),
    /// It does not continue by itself.
    Hung,
    /// It crashed.
    Died,
    /// It ended by itself.
    Ended(String),
}

/// Answer to a process when it gets the baton.
pub(crate) enum Go {
    On,
    Tick,
    Do(Command),
}

pub(crate) struct Process {
    go: Option<Sender<Go>>,
    stopped: Receiver<Stop>,
    pub(crate) shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by a process and the world. Only the holder of the baton reads it.
pub(crate) struct Shared {
    /// Milliseconds of the world.
    now: Arc<AtomicU64>,
    /// Additional milliseconds that a dead process has lived.
    extra_ms: AtomicU64,
    dead: AtomicBool,
    pub(crate) cancelled: Mutex<BTreeSet<Ticket>>,
    /// Offers of other cards that no stage has taken yet.
    pub(crate) offers: Mutex<BTreeMap<Ticket, VecDeque<bytes::Bytes>>>,
    said: Mutex<Vec<Event>>,
    /// The real accounts of the card.
    pub(crate) accounts: Mutex<SimulatedAccounts>,
}

impl Process {
    pub(crate) fn start(
        settings: &SimulatedSettings,
        generation: u64,
        world: &SimulatedWorld,
        now: &Arc<AtomicU64>,
        seed: u64,
        defect: Defect,
    ) -> Process {
        let (go, told) = channel();
        let (stops, stopped) = channel();
        let shared = Arc::new(Shared {
            now: Arc::clone(now),
            extra_ms: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            cancelled: Mutex::default(),
            offers: Mutex::default(),
            said: Mutex::default(),
            accounts: Mutex::default(),
        });
        let baton = Baton {
            shared: Arc::clone(&shared),
            told: Arc::new(Mutex::new(told)),
            stops,
        };
        let (settings, world) = (settings.clone(), world.clone());
        let life = move || {
            let why = live(settings, generation, world, &baton, seed, defect);
            let _ = baton.stops.send(Stop::Ended(why)); // nobody waits for one that was let go
        };
        let thread = std::thread::spawn(life);
        Process {
            go: Some(go),
            stopped,
            shared,
            thread: Some(thread),
        }
    }

    /// Gives it the baton, and waits until it returns it.
    pub(crate) fn give(&self, go: Go) -> Stop {
        let gone = || Stop::Ended("its thread panicked".to_owned());
        let Some(baton) = &self.go else { return gone() };
        if baton.send(go).is_err() {
            return gone();
        }
        self.wait()
    }

    /// Waits for the first stop.
    pub(crate) fn wait(&self) -> Stop {
        let panicked = || Stop::Ended("its thread panicked".to_owned());
        self.stopped.recv().unwrap_or_else(|_| panicked())
    }

    /// Messages since the last call.
    pub(crate) fn said(&self) -> Vec<Event> {
        std::mem::take(&mut *self.shared.said.lock().unwrap())
    }

    /// Marks it as dead. Returns its later messages too.
    pub(crate) fn die(mut self) -> Vec<Event> {
        self.shared.dead.store(true, SeqCst);
        self.go = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        self.said()
    }
}

/// The body of a process, and why it ended.
fn live(
    settings: SimulatedSettings,
    generation: u64,
    world: SimulatedWorld,
    baton: &Baton,
    seed: u64,
    defect: Defect,
) -> String {
    let gpu = Watched {
        card: SimulatedCard::new(settings, generation, world, Arc::new(baton.clone())),
        watch: Look {
            shared: Arc::clone(&baton.shared),
            defect,
        },
    };
    let settings = CardSettings {
        headroom: Bytes::ZERO,
        // Each tick of an idle card is a switch of threads, most of the time that an episode takes.
        poll: Duration::from_secs(1),
        ..CardSettings::default()
    };
    let card = match Card::new(Box::new(gpu), families(), settings, Box::new(baton.clone())) {
        Ok(card) => card,
        Err(error) => return error.to_string(),
    };
    let mut card = card.with_faults(Box::new(baton.clone()));
    let mut wire = Wire {
        baton,
        random: ChaCha8Rng::seed_from_u64(seed),
    };
    card.announce(&mut wire);
    loop {
        let rest = u64::try_from(card.time_until_tick().as_millis()).unwrap_or(u64::MAX);
        let flow = match baton.hand_back(Stop::Idle(rest)) {
            None => return "it is dead".to_owned(),
            Some(Go::Do(command)) => card.handle(command, &mut wire),
            Some(Go::Tick | Go::On) => card.tick(&mut wire),
        };
        match flow {
            Flow::Continue => {}
            Flow::Shutdown => return "it was told to".to_owned(),
            Flow::Lost(why) => return why,
        }
    }
}

/// The process's end of the baton.
#[derive(Clone)]
struct Baton {
    shared: Arc<Shared>,
    told: Arc<Mutex<Receiver<Go>>>,
    stops: Sender<Stop>,
}

impl Baton {
    /// Gives the baton to the world. `None`: the process is dead.
    fn hand_back(&self, stop: Stop) -> Option<Go> {
        if self.shared.dead.load(SeqCst) {
            return None;
        }
        let _ = self.stops.send(stop);
        self.told.lock().unwrap().recv().ok()
    }
}

impl SimulatedClock for Baton {
    fn now_ms(&self) -> u64 {
        self.shared.now.load(SeqCst) + self.shared.extra_ms.load(SeqCst)
    }

    fn sleep_ms(&self, milliseconds: u64) {
        if self.hand_back(Stop::Busy(milliseconds)).is_none() {
            self.shared.extra_ms.fetch_add(milliseconds, SeqCst);
        }
    }
}

impl Clock for Baton {
    fn now(&self) -> Millis {
        Millis(self.now_ms())
    }

    fn sleep(&self, duration: Duration) {
        self.sleep_ms(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    }
}

impl Faults for Baton {
    fn die(&self, _place: &str) {
        self.hand_back(Stop::Died);
    }

    fn hang(&self, _place: &str) {
        self.hand_back(Stop::Hung);
    }
}

/// Messages of a process, and simulated durations of operations that take no time on a simulated card.
struct Wire<'a> {
    baton: &'a Baton,
    random: ChaCha8Rng,
}

impl Link for Wire<'_> {
    fn emit(&mut self, event: Event) {
        let takes_ms = match &event {
            Event::Progress { progress, .. } => match progress {
                Progress::Step { .. } => Some(self.random.random_range(1..400)),
                Progress::Started { .. } | Progress::Evicting(_) => Some(self.random.random_range(1..60)),
                _ => self
                    .random
                    .random_ratio(1, 2)
                    .then(|| self.random.random_range(1..120)),
            },
            Event::Snapshot(_) => self
                .random
                .random_ratio(1, 3)
                .then(|| self.random.random_range(1..30)),
            Event::Ready { .. } | Event::Offer { .. } | Event::Finished { .. } | Event::Answer { .. } => None,
        };
        self.baton.shared.said.lock().unwrap().push(event);
        if let Some(ms) = takes_ms {
            self.baton.sleep_ms(ms);
        }
    }

    fn cancelled(&self, ticket: Ticket) -> bool {
        self.baton.shared.cancelled.lock().unwrap().contains(&ticket)
    }

    fn next_offer(&mut self, ticket: Ticket) -> Option<bytes::Bytes> {
        while !self.cancelled(ticket) {
            let mut offers = self.baton.shared.offers.lock().unwrap();
            let offer = offers.get_mut(&ticket).and_then(VecDeque::pop_front);
            drop(offers);
            if offer.is_some() {
                return offer;
            }
            self.baton.hand_back(Stop::Busy(OFFER_POLL_MS))?;
        }
        None
    }
}

/// Observes the simulated card, independent of the ledger.
struct Look {
    shared: Arc<Shared>,
    defect: Defect,
}

impl Watch<SimulatedCard> for Look {
    fn load(
        &mut self,
        card: &mut SimulatedCard,
        component: &Component,
        plan: &LoadPlan,
        part: Part,
        progress: &mut dyn FnMut(LoadProgress) -> ControlFlow<()>,
    ) -> Result<(), LoadError> {
        let result = card.load(component, plan, part, progress);
        if self.defect == Defect::KeepsAFailedLoad && matches!(result, Err(LoadError::Cancelled)) {
            let _ = card.load(component, plan, Part::WHOLE, &mut |_| ControlFlow::Continue(()));
        }
        result
    }

    fn unload(&mut self, card: &mut SimulatedCard, id: &ComponentId) -> Result<Unloaded, GpuError> {
        match self.defect {
            Defect::KeepsWhatItUnloads => Ok(Unloaded::default()),
            _ => card.unload(id),
        }
    }

    fn after(&mut self, card: &SimulatedCard, _call: String) {
        self.after_reading(card);
    }

    fn after_reading(&mut self, card: &SimulatedCard) {
        *self.shared.accounts.lock().unwrap() = card.accounts();
    }
}
