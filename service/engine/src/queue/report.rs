//! Reports of the queue: jobs, plans, unloads, cards.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gpu::CardDescription;
use residency::{Bytes, Component, ComponentId, Ledger, Millis, Move, Part, StageSeconds, WaitCause};
use serde::{Deserialize, Serialize};

use super::claims::Reserver;
use crate::error::{Error, Fallback, Shortfall};
use crate::job::{Call, JobId, MadeSize, Priority, StageName};
use crate::job_state::JobState;
use crate::moved::{Freed, Kept};

/// A job as lists show it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobInfo {
    /// Id of the job.
    pub id: JobId,
    /// Name of the client that submitted it.
    pub client: String,
    /// Its account: clients do not see it.
    pub account: String,
    /// Priority of the job.
    pub priority: Priority,
    /// Its state, or how it ended.
    pub state: JobState,
    /// The call that submitted it.
    pub call: Call,
    /// Key of its entry.
    pub model_key: String,
    /// Where it runs or ran last; empty: nowhere yet.
    pub card: String,
    /// Its stage; empty: none yet.
    pub stage: StageName,
    /// Step within the stage, from 1; 0: none yet.
    pub step: u32,
    /// Steps of the stage.
    pub steps: u32,
    /// Jobs ahead, while it is queued.
    pub position: u32,
    /// Time since it was accepted; for a job that has ended, its duration.
    pub age: Duration,
    /// Why it failed.
    pub error: Option<Error>,
    /// The size of each thing that it makes; `None`: it makes nothing.
    #[serde(default)]
    pub makes: Option<MadeSize>,
}

/// The plan of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanReport {
    /// The card that it was planned on.
    pub card: String,
    /// Whether that card multiplies in fp8.
    pub has_fp8_products: bool,
    /// Stages in order.
    pub stages: Vec<PlannedStage>,
    /// Whether each of them would run now.
    pub runs_now: bool,
    /// Whether each would run now or once the card's other jobs have ended: pins, reservations and memory of other programs
    /// stay.
    pub fits: bool,
    /// Seconds of moves before the first step.
    pub predicted_move_seconds: f64,
    /// The model's formats that lose less and would fit as well, the closest to the original first.
    pub upgrades: Vec<Fallback>,
}

/// Whether a stage of a plan would run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageVerdict {
    /// Now, after its moves.
    Run,
    /// Once memory becomes free for this cause.
    Wait(WaitCause),
    /// Never on this card.
    Never,
}

impl StageVerdict {
    /// Its name in the public API.
    pub fn as_str(self) -> &'static str {
        match self {
            StageVerdict::Run => "run",
            StageVerdict::Wait(_) => "wait",
            StageVerdict::Never => "never",
        }
    }
}

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStage {
    /// `encode_text`, ..., `load`.
    pub name: StageName,
    /// Components that must be resident.
    pub components: Vec<Component>,
    /// Names of those that are.
    pub resident_already: Vec<String>,
    /// Bytes of all of them.
    pub component_bytes: Bytes,
    /// Activation bytes of the rung that was chosen.
    pub scratch: Bytes,
    /// Whether that figure was measured by earlier jobs.
    pub scratch_learned: bool,
    /// The moves before it.
    pub moves: Vec<Move>,
    /// Its components of which a part would be on the card.
    pub streamed: Vec<Streamed>,
    /// Its predicted time, where the speeds of the card are known and how much it computes.
    pub seconds: Option<StageSeconds>,
    /// How often it goes over the blocks of its components.
    pub passes: u32,
    /// Whether it would run.
    pub verdict: StageVerdict,
    /// Set unless it would run.
    pub shortfall: Option<Shortfall>,
    /// Label of the rung.
    pub chunking: String,
    /// Whether the result of that rung differs from the first rung's by more than rounding.
    pub approximate: bool,
    /// Whether nothing would run, as the result is cached.
    pub cached: bool,
}

/// A component of which a part is on a card, while the rest of its blocks is streamed. Displayed as
/// `14.2 of 23.8 GB resident, 9.6 streamed at 24 GB/s: 0.21 s more a step than resident`, as far as that is known.
#[derive(Clone, Debug, PartialEq)]
pub struct Streamed {
    pub component: Component,
    pub part: Part,
    /// Bytes a second at which blocks reach the card.
    pub link: Option<Bytes>,
    /// Predicted seconds that a step takes longer than with all of it on the card; `None` where that is unknown, or where a stage
    /// goes over its blocks once.
    pub more_seconds: Option<f64>,
}

impl fmt::Display for Streamed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, whole) = (self.component.size_of(self.part), self.component.bytes);
        let units = [("GB", 1e9), ("MB", 1e6), ("kB", 1e3)];
        let fits = |(_, scale): &(&str, f64)| whole.0 as f64 >= *scale;
        let (unit, scale) = units.into_iter().find(fits).unwrap_or(("B", 1.0));
        let number = |bytes: Bytes| format!("{:.1}", bytes.0 as f64 / scale);
        let (stays, whole) = (number(size.bytes), number(whole));
        write!(f, "{stays} of {whole} {unit} resident, ")?;
        match (size.streamed, size.streamed_once) {
            (each, Bytes::ZERO) => write!(f, "{} streamed", number(each))?,
            (Bytes::ZERO, once) => write!(f, "{} streamed once", number(once))?,
            (each, once) => write!(f, "{} streamed and {} once", number(each), number(once))?,
        }
        if let Some(link) = self.link {
            let speed = link.0 as f64 / 1e9;
            match speed < 10.0 {
                true => write!(f, " at {speed:.1} GB/s")?,
                false => write!(f, " at {speed:.0} GB/s")?,
            }
        }
        match self.more_seconds {
            Some(more) if more < 0.005 => f.write_str(": a step takes no longer than resident"),
            Some(more) => write!(f, ": {more:.2} s more a step than resident"),
            None => Ok(()),
        }
    }
}

impl PlanReport {
    /// The predicted time of the request, with and without what is streamed; `None` where that of a stage which streams in several
    /// passes is unknown. Of other stages what is unknown does not count.
    pub fn seconds(&self) -> Option<StageSeconds> {
        let mut all = StageSeconds::default();
        for stage in &self.stages {
            let Some(seconds) = stage.seconds else {
                if stage.streamed_again() > Bytes::ZERO {
                    return None;
                }
                continue;
            };
            all.resident += seconds.resident;
            all.streamed += seconds.streamed;
        }
        Some(all)
    }
}

impl PlannedStage {
    /// Bytes that would cross the link in each of several passes, and so be waited for again and again.
    pub fn streamed_again(&self) -> Bytes {
        let streamed = self.streamed.iter();
        let each_pass = streamed.map(|each| each.component.size_of(each.part).streamed);
        match self.passes > 1 {
            true => each_pass.sum(),
            false => Bytes::ZERO,
        }
    }
}

/// The result of an unload.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnloadReport {
    /// Components that were unloaded.
    pub freed: Vec<Freed>,
    /// Components that stayed, with the reasons.
    pub kept: Vec<Kept>,
    /// Jobs that `force` cancelled.
    pub cancelled_jobs: Vec<JobId>,
}

/// Snapshot of the cards, jobs and caches of the queue.
#[derive(Clone, Debug, Default)]
pub struct StatusReport {
    /// In the order of configuration.
    pub cards: Vec<CardStatus>,
    /// Jobs that have not ended.
    pub jobs: Vec<JobInfo>,
    /// Latents in the store.
    pub latents: usize,
    /// Their bytes.
    pub latent_bytes: Bytes,
    /// Values of stages that are cached for other jobs: encoded prompts.
    pub texts: usize,
    /// Their bytes.
    pub text_bytes: Bytes,
    /// Keys of entries that are pinned.
    pub pinned: Vec<String>,
    /// Keys of entries that are known to use a component.
    pub users: Arc<BTreeMap<ComponentId, Vec<String>>>,
}

/// The state of a card's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CardState {
    Starting,
    /// It has nothing to do.
    Ready,
    /// It has an order.
    Busy,
    /// It was lost, and another is started.
    Restarting,
}

impl CardState {
    /// Its name in the public API.
    pub fn as_str(self) -> &'static str {
        match self {
            CardState::Starting => "starting",
            CardState::Ready => "ready",
            CardState::Busy => "busy",
            CardState::Restarting => "restarting",
        }
    }

    /// Whether there is a worker that takes orders.
    pub fn is_ready(self) -> bool {
        matches!(self, CardState::Ready | CardState::Busy)
    }
}

/// A card and its worker.
#[derive(Clone, Debug)]
pub struct CardStatus {
    /// Description of the card.
    pub description: CardDescription,
    /// Implementation of attention on it: `cudnn 9.19.0`, `own kernels: ` with the reason why cuDNN does not, `cpu loops`; empty
    /// while no worker is ready.
    pub attention: String,
    /// The state of its worker.
    pub state: CardState,
    /// Number of its worker process; 0 before the first is ready.
    pub generation: u64,
    /// Workers that were lost.
    pub restarts: u32,
    /// Why no worker serves it; empty while one does.
    pub problem: String,
    /// Its ledger as last published. Without a worker: a ledger with the memory that the start of a worker takes.
    pub ledger: Arc<Ledger>,
    /// The time by the ledger's clock.
    pub ledger_now: Millis,
    /// The job that runs.
    pub job: Option<JobId>,
    /// Components of which a part is on it.
    pub streamed: Vec<Streamed>,
    /// Reservations of memory for other programs.
    pub reservations: Vec<ReservationStatus>,
}

/// A reservation of memory for another program.
#[derive(Clone, Debug, PartialEq)]
pub struct ReservationStatus {
    /// Id of the reservation.
    pub id: String,
    /// Program that reserved the memory.
    pub by: Reserver,
    /// Bytes that are reserved.
    pub bytes: Bytes,
    /// Time until it expires.
    pub expires_in: Duration,
}
