//! The worker's half: one thread that owns one card.
//!
//! [`Card`] is synchronous: a [`Command`] goes in, [`Event`]s come out through a [`Link`], and when
//! [`Card::handle`] returns nothing is under way. [`spawn`] puts it on a thread of its own.
//!
//! Every change to the card's memory is bracketed by entries in the ledger, and after each the driver is asked
//! what became of it: plans are made on what is true, never on what was meant.

mod attempt;
mod canary;
mod claims;
mod link;
mod models;
mod moves;
mod stage;
mod thread;

use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;
use gpu::{CardDescription, Gpu, GpuError, Timeline};
use pipelines::Catalogue;
use residency::{Bytes, IdlePolicy, Ledger, Millis};

use crate::messages::{Command, Event, Standing};

pub use link::{Clock, Faults, Link, ProcessFaults, SystemClock};
pub use thread::{CardCommands, CardThread, End, spawn};

use models::Models;
use moves::MoveError;

/// How a card behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Never planned into.
    pub headroom: Bytes,
    /// An idle card hands slack above this back to the driver.
    pub slack_limit: Bytes,
    /// An idle card unloads what nobody has used for so long; `None` keeps it until its memory is wanted.
    pub unload_after: Option<Duration>,
    /// How long nothing must have run before the janitor looks, and how often it looks then.
    pub idle_tick: Duration,
    /// How often an idle card asks the driver for its figures, to publish what others changed.
    pub poll: Duration,
    /// The same while freed bytes are not shown as free yet, since somebody may be waiting for them.
    pub poll_while_late: Duration,
    /// Least time between two reports on one load.
    pub progress_interval: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            headroom: Bytes::mib(512),
            slack_limit: Bytes::mib(512),
            unload_after: None,
            idle_tick: Duration::from_secs(2),
            poll: Duration::from_millis(250),
            poll_while_late: Duration::from_millis(25),
            progress_interval: Duration::from_millis(50),
        }
    }
}

/// What happens to the card's thread after a command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Flow {
    /// The next command.
    Continue,
    /// It was told to end.
    Shutdown,
    /// The card is lost. Nothing that lives on it may be touched again, not even to drop it; the order that was under
    /// way gets no answer, since the worker's death is one.
    Lost(String),
}

/// Why a card could not be taken into service.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    /// It does not answer.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// It answers, and computes wrongly.
    #[error("the card failed its first computation: {0}")]
    Canary(String),
}

/// A computation whose result is known, and beside it what operations need on a card beside its memory is loaded, as a
/// stage of its own: the card then counts what both took of it to its context.
fn prove_and_prepare(gpu: &mut dyn Gpu, timeline: &mut Timeline) -> Result<(), CardError> {
    let compute = |device: &Device, dtype| canary::compute(device, dtype).map_err(CardError::Canary);
    if !gpu.device().is_cuda() {
        compute(gpu.device(), gpu.compute_dtype())?;
        timeline.part("first computation");
        return Ok(());
    }
    gpu.begin_stage();
    let (device, dtype) = (gpu.device(), gpu.compute_dtype());
    let (computed, prepared) = std::thread::scope(|scope| {
        let prepared = scope.spawn(|| pipelines::prepare(device));
        let computed = compute(device, dtype);
        timeline.part("first computation, beside the libraries");
        (computed, prepared.join())
    });
    computed?;
    let lost = |why: String| CardError::Gpu(GpuError::Lost(why));
    prepared
        .map_err(|_| lost("preparing its libraries panicked".to_owned()))?
        .map_err(|error| lost(error.to_string()))?;
    gpu.stage_peak();
    timeline.part("the rest of the libraries");
    Ok(())
}

/// One card with all that is on it.
#[derive(Debug)]
pub struct Card {
    gpu: Box<dyn Gpu>,
    ledger: Ledger,
    models: Models,
    settings: Settings,
    clock: Box<dyn Clock>,
    faults: Box<dyn Faults>,
    standing: Standing,
    /// What whoever listens knows: the next snapshot is sent only if it differs.
    published: Option<Arc<Ledger>>,
    /// When the last command was done.
    last_busy: Millis,
    last_poll: Millis,
    last_janitor: Millis,
    /// Slack that the janitor's last trim could not bring back: no use to try again before there is more.
    stubborn_slack: Bytes,
}

impl Card {
    /// Takes a card into service: asks the driver for its figures and runs a computation whose result is known.
    ///
    /// # Errors
    /// [`CardError`]; the card is then of no use.
    pub fn new(
        mut gpu: Box<dyn Gpu>,
        catalogue: Catalogue,
        settings: Settings,
        clock: Box<dyn Clock>,
    ) -> Result<Card, CardError> {
        let mut timeline = Timeline::begin("take the card into service");
        prove_and_prepare(&mut *gpu, &mut timeline)?;
        let truth = gpu.memory()?;
        timeline.part("ask the driver");
        let mut ledger = Ledger::new(gpu.describe().total, settings.headroom);
        ledger.reconcile(&truth);
        let dtype = gpu.compute_dtype();
        let now = clock.now();
        Ok(Card {
            gpu,
            ledger,
            models: Models::new(catalogue, dtype),
            settings,
            clock,
            faults: Box::new(ProcessFaults),
            standing: Standing::default(),
            published: None,
            last_busy: now,
            last_poll: now,
            last_janitor: now,
            stubborn_slack: Bytes::ZERO,
        })
    }

    /// Lets somebody else carry out the faults of a simulated card than this process.
    #[must_use]
    pub fn with_faults(mut self, faults: Box<dyn Faults>) -> Card {
        self.faults = faults;
        self
    }

    /// Who it is.
    pub fn describe(&self) -> &CardDescription {
        self.gpu.describe()
    }

    /// Its memory.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Tells whoever listens that the card is ready, and what its memory looks like.
    pub fn announce(&mut self, link: &mut dyn Link) {
        link.emit(Event::Ready {
            card: self.gpu.describe().clone(),
            attention: pipelines::attention_by(self.gpu.device()),
        });
        self.publish(link);
    }

    /// Carries out one command. When it returns, nothing is under way.
    pub fn handle(&mut self, command: Command, link: &mut dyn Link) -> Flow {
        let flow = match command {
            Command::Run(order) => self.run(&order, link),
            // Whoever holds the link sees it at once; here it would come too late.
            Command::Cancel(_) => Flow::Continue,
            Command::Standing(standing) => {
                self.stand(standing);
                Flow::Continue
            }
            Command::Unload { id, components } => self.unload(id, &components, link),
            Command::Trim { id } => self.trim(id, link),
            Command::MakeRoom { id, bytes } => self.make_room(id, bytes, link),
            Command::Shutdown => Flow::Shutdown,
        };
        self.publish(link);
        self.last_busy = self.clock.now();
        flow
    }

    /// What there is to do while no command comes: others' memory changes, times run out, slack is handed back.
    pub fn tick(&mut self, link: &mut dyn Link) -> Flow {
        let now = self.clock.now();
        if now.since(self.last_poll) >= self.poll_interval() {
            self.last_poll = now;
            if let Err(MoveError::Lost(reason)) = self.look_again() {
                return Flow::Lost(reason);
            }
            for expired in self.ledger.expire(now) {
                tracing::info!(?expired, "time is over");
            }
        }
        let idle = now.since(self.last_busy) >= millis(self.settings.idle_tick);
        if idle && now.since(self.last_janitor) >= millis(self.settings.idle_tick) {
            self.last_janitor = now;
            match self.tidy(link) {
                Ok(()) => {}
                Err(MoveError::Lost(reason)) => return Flow::Lost(reason),
                Err(error) => tracing::error!(?error, "the janitor could not do its work"),
            }
        }
        self.publish(link);
        Flow::Continue
    }

    /// How long a thread may sleep until [`Card::tick`] has something to do.
    pub fn rest(&self) -> Duration {
        let now = self.clock.now();
        let poll_in = self.poll_interval().saturating_sub(now.since(self.last_poll));
        let last_look = self.last_busy.max(self.last_janitor);
        let janitor_in = millis(self.settings.idle_tick).saturating_sub(now.since(last_look));
        Duration::from_millis(poll_in.min(janitor_in).max(1))
    }

    /// Sends the ledger, if it differs from what was sent last.
    fn publish(&mut self, link: &mut dyn Link) {
        if self.published.as_deref() == Some(&self.ledger) {
            return;
        }
        let snapshot = Arc::new(self.ledger.clone());
        self.published = Some(Arc::clone(&snapshot));
        link.emit(Event::Snapshot(snapshot));
    }

    fn poll_interval(&self) -> u64 {
        let late = self.ledger.late() > Bytes::ZERO;
        millis(if late {
            self.settings.poll_while_late
        } else {
            self.settings.poll
        })
    }

    fn idle_policy(&self) -> IdlePolicy {
        IdlePolicy {
            slack_limit: self.settings.slack_limit,
            unload_all_after_ms: self.settings.unload_after.map(millis),
        }
    }
}

/// A duration in the unit of the ledger's clock.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
