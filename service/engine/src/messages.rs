//! All that passes between the two halves. No tensor, only what can be written down: a worker is another process, and the
//! binary writes these types into frames as they are.

use std::path::PathBuf;
use std::sync::Arc;

use gpu::{CardDescription, Unloaded};
use pipelines::{Piece, Quantization, Request, StagePlan, Values};
use residency::{Bytes, Component, ComponentId, Holder, Ledger, Policy, WaitCause};
use serde::{Deserialize, Serialize};

/// One attempt at a piece of work on a card. Never used twice, so that an answer to an old attempt cannot be
/// taken for the new one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ticket(pub u64);

/// Where a model is, for the worker to open it itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelLocation {
    /// Entry key, for logs.
    pub key: String,
    /// The folder or file.
    pub path: PathBuf,
    /// What its components are quantized to.
    pub quantization: Quantization,
    /// Copies of components as they are quantized, by name: to be read instead, if they can be.
    pub kept: Vec<(String, PathBuf)>,
}

/// A piece of work for the card: bring the components in, then run the stage (if there is one).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// This attempt.
    pub ticket: Ticket,
    /// The job, for logs.
    pub job: String,
    /// The model.
    pub model: ModelLocation,
    /// What to do.
    pub work: Work,
    /// How to make room.
    pub policy: Policy,
    /// Admit a plan that memory is short for.
    pub allow_low_memory: bool,
}

/// What an order is for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Only bring these in.
    Load(Vec<Component>),
    /// Run a stage.
    Stage(Box<StageWork>),
}

/// A stage with all that it needs to know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageWork {
    /// The stage, with learned peaks put into its rungs.
    pub plan: StagePlan,
    /// Its components, with their identities.
    pub components: Vec<Component>,
    /// Names of the stages of the job that come after it.
    pub behind: Vec<String>,
    /// The request, with the item's seed.
    pub request: Request,
    /// What the stage takes.
    pub values: Values,
    /// Least milliseconds between previews; none are made at 0.
    pub preview_interval_ms: u32,
}

/// To the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Try this once: it runs, or the answer says why not.
    Run(Box<Order>),
    /// End that attempt as soon as possible. Handled beside the card thread, which may be busy with it.
    Cancel(Ticket),
    /// What must stay, in full: replaces what was said before. The supervisor keeps the times to live.
    Standing(Standing),
    /// Take components out, those in use or standing excepted.
    Unload {
        /// For the answer.
        id: u64,
        /// Which.
        components: Vec<ComponentId>,
    },
    /// Hand slack back to the driver.
    Trim {
        /// For the answer.
        id: u64,
    },
    /// Make room for another program: evict idle components until `bytes` are free.
    MakeRoom {
        /// For the answer.
        id: u64,
        /// How much.
        bytes: Bytes,
    },
    /// Finish what runs, then end.
    Shutdown,
}

/// What must stay on a card, and what must stay free.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// Never evicted.
    pub pins: Vec<ComponentId>,
    /// Held for clients: (hold, components).
    pub holds: Vec<(String, Vec<ComponentId>)>,
    /// Kept free for other programs: (reservation, label, bytes).
    pub reservations: Vec<(String, String, Bytes)>,
}

/// From the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// The card answers: it has run its canary.
    Ready {
        /// The card.
        card: CardDescription,
        /// What computes attention on it ([`pipelines::attention_by`]).
        attention: String,
    },
    /// The ledger after a change.
    Snapshot(Arc<Ledger>),
    /// How an attempt goes on.
    Progress {
        /// Which.
        ticket: Ticket,
        /// What happened.
        progress: Progress,
    },
    /// How an attempt ended. Exactly one for each order.
    Finished {
        /// Which.
        ticket: Ticket,
        /// The end.
        outcome: Outcome,
    },
    /// To `Unload`, `Trim` and `MakeRoom`.
    Answer {
        /// The command's.
        id: u64,
        /// What was done.
        answer: Answer,
    },
}

/// A step on the way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Progress {
    /// A component leaves.
    Evicting(Component),
    /// A component comes in.
    Loading {
        /// Which.
        component: Component,
        /// Bytes so far.
        done: Bytes,
    },
    /// The stage begins.
    Started {
        /// Label of the rung.
        chunking: String,
    },
    /// A step is done.
    Step {
        /// From 1.
        n: u32,
        /// In all.
        of: u32,
    },
    /// What it looks like.
    Preview {
        /// The step.
        step: u32,
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
        /// RGB.
        rgb: bytes::Bytes,
    },
    /// A piece of the result.
    Piece(Piece),
    /// Something is tried again within the stage: out of memory, then a smaller rung.
    Retrying {
        /// Stable reason.
        reason: String,
        /// For people.
        message: String,
    },
}

/// The end of an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// It ran.
    Completed(Box<Completed>),
    /// Not now: nothing was started, no move was made that is not booked.
    Wait(Shortage),
    /// Not on this card.
    Never {
        /// Peak bytes of the smallest rung.
        needed: Bytes,
        /// What the card could give at the most.
        capacity: Bytes,
    },
    /// As asked.
    Cancelled,
    /// It failed; the card is well.
    Failed(Failure),
}

/// Why a stage cannot start now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shortage {
    /// Bytes missing.
    pub short: Bytes,
    /// Bytes needed at the peak that are not resident yet.
    pub needed: Bytes,
    /// Bytes usable now.
    pub usable: Bytes,
    /// What to wait for.
    pub cause: WaitCause,
    /// Who holds memory.
    pub holders: Vec<Holder>,
}

/// What a completed attempt reports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completed {
    /// What the stage gives; nothing for a load.
    pub values: Values,
    /// How it was run.
    pub chunking: String,
    /// Whether that differs from the whole by more than rounding.
    pub approximate: bool,
    /// Names of the components that were there already.
    pub resident_already: Vec<String>,
    /// Milliseconds of moves.
    pub move_ms: u64,
    /// Milliseconds of computing.
    pub run_ms: u64,
    /// Usable bytes just before the stage's lease: what `RunOutcome::Succeeded` wants to know.
    pub room: Bytes,
    /// Predicted activation bytes.
    pub predicted_scratch: Bytes,
    /// Highest activation bytes.
    pub peak_scratch: Bytes,
    /// Bytes of ours on the card at the peak.
    pub peak_bytes: Bytes,
    /// What computed attention in the stage: `cudnn 9.19.0`, `own kernels`, `cpu loops`, several with commas between; empty
    /// where none was computed.
    pub attention: String,
    /// Seconds that each component that was loaded took, by identity: what a reload costs.
    pub load_seconds: Vec<(ComponentId, f64)>,
}

/// Why an attempt failed although the card is well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// Out of memory in spite of admission, down to the last rung.
    OutOfMemory {
        /// The stage.
        stage: String,
        /// Bytes that were predicted at the last rung's peak.
        needed: Bytes,
        /// Usable bytes then.
        usable: Bytes,
        /// Who held memory.
        holders: Vec<Holder>,
    },
    /// A value that is not finite.
    NotFinite {
        /// The component.
        component: String,
        /// The step, from 1; 0 outside denoising.
        step: u32,
    },
    /// The checkpoint is damaged or not supported.
    Model {
        /// For people: the file and what is wrong.
        message: String,
    },
    /// The stage was given what does not fit.
    BadInput(String),
    /// Anything else, in words.
    Internal(String),
}

/// To a command with an id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// To `Unload` and `MakeRoom`.
    Unloaded {
        /// What left.
        freed: Vec<(Component, Unloaded)>,
        /// What stayed, and why: `in use`, `pinned`, `held`.
        kept: Vec<(Component, String)>,
        /// To `MakeRoom`: bytes that are still missing.
        short: Bytes,
    },
    /// To `Trim`.
    Trimmed(Bytes),
    /// It could not be done.
    Failed(String),
}
