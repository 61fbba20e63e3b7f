//! The worker's half: a thread that owns one card.
//!
//! [`Card`] is synchronous: a [`Command`] goes in, [`Event`]s come out through a [`Link`], and no work is under way
//! when [`Card::handle`] returns. [`spawn`] runs it on a thread.
//!
//! Every change to the card's memory is bracketed by ledger entries, and followed by a reading of the driver's
//! figures: plans are based on actual figures, never on expected ones.

mod attempt;
mod canary;
mod claims;
mod kept;
mod link;
mod listed;
mod models;
mod moves;
mod on_host;
mod stage;
mod thread;

use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;
use gpu::{CardDescription, Gpu, GpuError, Timeline};
use model::ModelOpener;
use residency::{Bytes, Ledger, Millis};

use crate::messages::{Command, Event};

pub use link::{Clock, Faults, Link, ProcessFaults, SystemClock};
pub use thread::{CardCommands, CardThread, Events, ThreadEnd, spawn};

use kept::KeptOfPass;
use listed::ListedJobs;
use models::Models;
use moves::MoveError;
use on_host::OnHost;

/// Configuration of a card.
#[derive(Clone, Debug)]
pub struct CardSettings {
    /// Bytes that are never planned into.
    pub headroom: Bytes,
    /// An idle card with more slack than this is trimmed.
    pub slack_limit: Bytes,
    /// Idle time before the janitor runs, and its interval afterwards.
    pub idle_tick: Duration,
    /// Interval at which an idle card reads the driver's figures, to publish changes by other processes.
    pub poll: Duration,
    /// The interval while freed bytes are late, since a job may be waiting for them.
    pub poll_while_late: Duration,
    /// Minimum interval of progress events of one load.
    pub progress_interval: Duration,
    /// Bytes of components that are kept in the machine's memory for the next stage that reads them from there, until the card is
    /// idle.
    pub on_host: Bytes,
    /// The most of the machine's memory that components may hold for their streamed blocks; `None`: what is available, less a
    /// share for others.
    pub host_limit: Option<Bytes>,
}

impl Default for CardSettings {
    fn default() -> CardSettings {
        CardSettings {
            headroom: Bytes::mib(512),
            slack_limit: Bytes::mib(512),
            idle_tick: Duration::from_secs(2),
            poll: Duration::from_millis(250),
            poll_while_late: Duration::from_millis(25),
            progress_interval: Duration::from_millis(50),
            on_host: Bytes::gib(2),
            host_limit: None,
        }
    }
}

/// The next action of the card's thread after a command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Flow {
    Continue,
    /// Ends the thread.
    Shutdown,
    /// The card is lost. Nothing on it may be touched again, not even dropped; the current order gets no outcome,
    /// since the worker's exit is one.
    Lost(String),
}

/// Why a card could not be taken into service.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// It computes wrong results.
    #[error("the card failed its first computation: {0}")]
    Canary(String),
}

/// Runs the canary and loads what operations need, as a stage, so that the memory of both is attributed to the card's
/// context.
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
        let prepared = scope.spawn(|| ops::prepare(device));
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

/// A card, its ledger, models and claims.
#[derive(Debug)]
pub struct Card {
    /// Dropped before the card that it is on.
    kept: Option<KeptOfPass>,
    gpu: Box<dyn Gpu>,
    ledger: Ledger,
    models: Models,
    on_host: OnHost,
    settings: CardSettings,
    clock: Box<dyn Clock>,
    faults: Box<dyn Faults>,
    /// The last published snapshot: the next one is sent only if it differs.
    published: Option<Arc<Ledger>>,
    /// End of the last command.
    last_busy: Millis,
    last_poll: Millis,
    last_janitor: Millis,
    /// Slack that the janitor's last trim could not free: no further trim until there is more.
    untrimmable_slack: Bytes,
    listed: ListedJobs,
    /// Whether the order before has just asked the driver for its figures, and this one needs not.
    has_asked: bool,
}

impl Card {
    /// Takes a card into service: reads the driver's figures and runs the canary.
    ///
    /// # Errors
    /// [`CardError`]; the card is not usable then.
    pub fn new(
        mut gpu: Box<dyn Gpu>,
        families: impl ModelOpener + 'static,
        settings: CardSettings,
        clock: Box<dyn Clock>,
    ) -> Result<Card, CardError> {
        let mut timeline = Timeline::begin("take the card into service");
        gpu.limit_on_host(settings.host_limit);
        prove_and_prepare(&mut *gpu, &mut timeline)?;
        let truth = gpu.memory()?;
        timeline.part("ask the driver");
        let mut ledger = Ledger::new(gpu.describe().total, settings.headroom);
        ledger.reconcile(&truth);
        ledger.record_host(gpu.on_host());
        let dtype = gpu.compute_dtype();
        let now = clock.now();
        Ok(Card {
            kept: None,
            gpu,
            ledger,
            models: Models::new(Box::new(families), dtype),
            on_host: OnHost::new(settings.on_host),
            settings,
            clock,
            faults: Box::new(ProcessFaults),
            published: None,
            last_busy: now,
            last_poll: now,
            last_janitor: now,
            untrimmable_slack: Bytes::ZERO,
            listed: ListedJobs::default(),
            has_asked: false,
        })
    }

    /// Replaces the implementation of injected faults.
    #[must_use]
    pub fn with_faults(mut self, faults: Box<dyn Faults>) -> Card {
        self.faults = faults;
        self
    }

    /// Description of the card.
    pub fn describe(&self) -> &CardDescription {
        self.gpu.describe()
    }

    /// The card's ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Emits that the card is ready, with its first snapshot.
    pub fn announce(&mut self, link: &mut dyn Link) {
        let ledger = Arc::new(self.ledger.clone());
        self.published = Some(Arc::clone(&ledger));
        link.emit(Event::Ready {
            card: self.gpu.describe().clone(),
            attention: ops::attention_by(self.gpu.device()),
            speeds: self.gpu.speeds(),
            ledger,
        });
    }

    /// Carries out one command. No work is under way when it returns.
    pub fn handle(&mut self, command: Command, link: &mut dyn Link) -> Flow {
        let flow = match command {
            Command::Run(order) => self.run(&order, link),
            // Handled by the owner of the link, concurrently with the order; here it would be too late.
            Command::Cancel(_) | Command::Taken { .. } | Command::Offer { .. } => Flow::Continue,
            Command::Standing(standing) => {
                standing.apply_to(&mut self.ledger);
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

    /// Periodic work while no command arrives: driver figures, late bytes, janitor.
    pub fn tick(&mut self, link: &mut dyn Link) -> Flow {
        let now = self.clock.now();
        if now.since(self.last_poll) >= self.poll_interval() {
            self.last_poll = now;
            if let Err(MoveError::Lost(reason)) = self.reconcile_after_change() {
                return Flow::Lost(reason);
            }
            let written_off = self.ledger.write_off_late(now);
            if written_off > Bytes::ZERO {
                tracing::info!(bytes = %written_off, "freed, never shown as free by the driver: counted as foreign");
            }
        }
        let idle = now.since(self.last_busy) >= millis(self.settings.idle_tick);
        if idle && now.since(self.last_janitor) >= millis(self.settings.idle_tick) {
            self.last_janitor = now;
            match self.run_janitor(link) {
                Ok(()) => {}
                Err(MoveError::Lost(reason)) => return Flow::Lost(reason),
                Err(error) => tracing::error!(?error, "the janitor could not do its work"),
            }
        }
        self.publish(link);
        Flow::Continue
    }

    /// Time until [`Card::tick`] has work to do.
    pub fn time_until_tick(&self) -> Duration {
        let now = self.clock.now();
        let poll_in = self.poll_interval().saturating_sub(now.since(self.last_poll));
        let last_look = self.last_busy.max(self.last_janitor);
        let janitor_in = millis(self.settings.idle_tick).saturating_sub(now.since(last_look));
        Duration::from_millis(poll_in.min(janitor_in).max(1))
    }

    /// Emits the ledger, if it differs from the last snapshot.
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
}

/// Converts a duration to the ledger's unit.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
