//! Messages between supervisor and worker. They contain no tensors, only serializable data: the binary writes these
//! types into frames.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use gpu::{CardDescription, CardSpeeds, Unloaded};
use model::{AdapterFile, PassesLeftOut, Piece, Quantization, Request, StagePlan, Values};
use residency::{Bytes, Component, ComponentId, Holder, Ledger, MemorySummary, Policy, WaitCause};
use serde::{Deserialize, Serialize};

/// Id of one attempt at an order. Never reused, so that a stale answer cannot be mistaken for that of a newer
/// attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ticket(pub u64);

/// Location of a model, for the worker to open it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ModelLocation {
    /// Cache key of the entry, for logs.
    pub key: String,
    /// Folder or file.
    pub path: PathBuf,
    /// Formats of its components.
    pub quantization: Quantization,
    /// Adapters that are attached to it, in order.
    pub adapters: Vec<AdapterFile>,
    /// Kept copies of quantized components, by name: read instead of the checkpoint if possible.
    pub kept: Vec<(String, PathBuf)>,
    /// For components that are identified by their content: that identity, and the provisional one by path and versions of files.
    pub identities: Vec<(ComponentId, ComponentId)>,
}

impl ModelLocation {
    /// The same base with the adapters of another location too, for stages of both in one pass. Adapters of one name are the same in both.
    /// They are in the order of their names, so that equal unions are one model.
    #[must_use]
    pub(crate) fn with_adapters_of(mut self, other: ModelLocation) -> ModelLocation {
        let new = |adapter: &AdapterFile| !self.adapters.contains(adapter);
        let new: Vec<AdapterFile> = other.adapters.into_iter().filter(new).collect();
        if new.is_empty() {
            return self;
        }
        self.key = format!("{}, with the adapters of {}", self.key, other.key);
        self.adapters.extend(new);
        self.adapters.sort_by(|one, other| one.name.cmp(&other.name));
        for identity in other.identities {
            if !self.identities.contains(&identity) {
                self.identities.push(identity);
            }
        }
        for (name, path) in other.kept {
            if !self.kept.iter().any(|(own, _)| *own == name) {
                self.kept.push((name, path));
            }
        }
        self
    }
}

/// An order for the card: load the components, then run the stage (if there is one).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    pub ticket: Ticket,
    /// Id of the job, for logs.
    pub job: String,
    pub model: ModelLocation,
    pub work: Work,
    /// Eviction policy.
    pub policy: Policy,
    /// Run even if memory may be short.
    pub allow_low_memory: bool,
    /// Bytes of the card that stay free while it runs, if that is more than the card's own headroom.
    pub headroom: Bytes,
    /// All components of the model, sorted: see [`StageNeed::model`](residency::StageNeed::model).
    pub components: Vec<ComponentId>,
    /// Stages of other jobs that are run in the same passes of the model, in the memory of the order's own: its model has the adapters
    /// of all of them, and its own work the components. Each has its own progress and its own end, before that of the order.
    pub sharing: Vec<Sharing>,
    /// The part of its stage that this card has, where another card runs the stage with it; `None`: it runs alone.
    pub together: Option<Together>,
    /// It was sent while the worker still had another order, and begins when that has ended.
    pub is_ahead: bool,
}

impl Order {
    /// Its ticket, and those of the stages that share its passes.
    pub fn tickets(&self) -> impl Iterator<Item = Ticket> + '_ {
        let sharing = self.sharing.iter().map(|sharing| sharing.ticket);
        std::iter::once(self.ticket).chain(sharing)
    }
}

/// The part of one card in a stage that several cards run together: each has an order for the same stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Together {
    /// From 0. The values and pieces of part 0 count; it alone makes previews.
    pub part: u32,
    /// How many parts there are.
    pub of: u32,
}

/// A stage that shares the passes of an order's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sharing {
    pub ticket: Ticket,
    /// Id of its job, for logs.
    pub job: String,
    pub work: StageWork,
}

/// The work of an order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Work {
    /// Load these components.
    Load(Vec<Component>),
    Stage(Box<StageWork>),
}

/// A stage to run, with all its inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageWork {
    /// The stage, with learned peaks in its rungs.
    pub plan: StagePlan,
    /// Its components, with their identities.
    pub components: Vec<Component>,
    /// Names of the later stages of the job.
    pub later_stages: Vec<String>,
    /// What those read of the request, without the data of media: fields too that `request` leaves out. `None` where there are none.
    pub later_request: Option<Request>,
    /// Components that those need.
    pub later: Vec<ComponentId>,
    /// The request, with the item's seed.
    pub request: Request,
    /// Input values of the stage.
    pub values: Values,
    /// Minimum milliseconds between previews; 0 for none.
    pub preview_interval_ms: u32,
}

/// Commands to the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Run an attempt once: its outcome is sent as `Finished`.
    Run(Box<Order>),
    /// Cancel an attempt as soon as possible. Handled outside of the card thread, which may be busy with it.
    Cancel(Ticket),
    /// So many bytes of pieces of an attempt are taken, of all that it has delivered so far: see [`must_wait`]. Handled outside of the
    /// card thread, which may wait for it.
    Taken { ticket: Ticket, bytes: Bytes },
    /// What the other card that runs an attempt's stage offers this one ([`model::Observer::meet`]). Handled outside of the card thread,
    /// which may wait for it.
    Offer { ticket: Ticket, offer: bytes::Bytes },
    /// The complete set of claims; replaces the previous one. The supervisor keeps the times to live.
    Standing(Standing),
    /// Unload components, except those that are in use or claimed.
    Unload { id: u64, components: Vec<ComponentId> },
    /// Give slack back to the driver.
    Trim { id: u64 },
    /// Make room for another program: evict idle components until `bytes` are free.
    MakeRoom { id: u64, bytes: Bytes },
    /// Finish the current order, then exit.
    Shutdown,
}

impl Command {
    /// Data of the values that its stages take, always in one order.
    pub fn inputs_mut(&mut self) -> impl Iterator<Item = &mut bytes::Bytes> {
        let order = match self {
            Command::Run(order) => Some(&mut **order),
            Command::Cancel(_)
            | Command::Taken { .. }
            | Command::Offer { .. }
            | Command::Standing(_)
            | Command::Unload { .. }
            | Command::Trim { .. }
            | Command::MakeRoom { .. }
            | Command::Shutdown => None,
        };
        let stages = order.into_iter().flat_map(|order| {
            let own = match &mut order.work {
                Work::Stage(work) => Some(&mut **work),
                Work::Load(_) => None,
            };
            let sharing = order.sharing.iter_mut().map(|sharing| &mut sharing.work);
            own.into_iter().chain(sharing)
        });
        stages.flat_map(|work| work.values.values_mut().map(|value| &mut value.data))
    }
}

/// Bytes of pieces that an attempt may deliver before the supervisor says that it has taken them: some twenty frames of 960x960.
const PIECES_AHEAD: Bytes = Bytes::mib(64);

/// Whether an attempt that has delivered pieces of so many bytes, of which so many are taken, has to wait before it delivers more.
pub fn must_wait(delivered: Bytes, taken: Bytes) -> bool {
    delivered - taken > PIECES_AHEAD
}

/// Whether so many bytes were delivered since the last were taken that this is worth a command: an attempt that delivers little
/// never waits.
pub fn are_worth_a_command(delivered: Bytes, taken: Bytes) -> bool {
    delivered - taken > Bytes(PIECES_AHEAD.0 / 2)
}

/// Claims on a card: what must stay resident, and what must stay free.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// Pinned: (entry, components).
    pub pins: Vec<(String, Vec<ComponentId>)>,
    /// Held for clients: (hold, components).
    pub holds: Vec<(String, Vec<ComponentId>)>,
    /// Kept free for other programs: (reservation, label, bytes).
    pub reservations: Vec<(String, String, Bytes)>,
    /// For a new worker: the bytes of other programs on the card before the reservations were made. A part of the reserved bytes
    /// may be in use already.
    pub foreign_before: Option<Bytes>,
}

/// Why a component is not unloaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeptBecause {
    /// A stage runs with it.
    InUse,
    Pinned,
    /// Held by this client, where it is known.
    Held(Option<String>),
    /// Shared with this entry, which is in use, pinned, held or completely resident.
    Shared(String),
}

impl KeptBecause {
    /// Public name: `in_use`, `pinned`, `held`, `shared`.
    pub fn as_str(&self) -> &'static str {
        match self {
            KeptBecause::InUse => "in_use",
            KeptBecause::Pinned => "pinned",
            KeptBecause::Held(_) => "held",
            KeptBecause::Shared(_) => "shared",
        }
    }

    /// The client that holds it, or the entry that shares it; empty for none.
    pub fn by(&self) -> &str {
        match self {
            KeptBecause::InUse | KeptBecause::Pinned | KeptBecause::Held(None) => "",
            KeptBecause::Held(Some(by)) | KeptBecause::Shared(by) => by,
        }
    }
}

impl fmt::Display for KeptBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeptBecause::InUse => f.write_str("in use"),
            KeptBecause::Pinned => f.write_str("pinned"),
            KeptBecause::Held(None) => f.write_str("held"),
            KeptBecause::Held(Some(client)) => write!(f, "held by {client}"),
            KeptBecause::Shared(entry) => write!(f, "shared with {entry}"),
        }
    }
}

/// Events from the worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// The card is in service: its canary has passed.
    Ready {
        card: CardDescription,
        /// Implementation of attention on it ([`ops::attention_by`]).
        attention: String,
        /// What the time of stages on it is predicted from.
        speeds: CardSpeeds,
        /// Its ledger, with the memory that the start of the worker took.
        ledger: Arc<Ledger>,
    },
    /// The ledger after a change.
    Snapshot(Arc<Ledger>),
    /// Progress of an attempt.
    Progress { ticket: Ticket, progress: Progress },
    /// What an attempt offers the other card that runs its stage; it waits for the same of that one.
    Offer { ticket: Ticket, offer: bytes::Bytes },
    /// The end of an attempt. Exactly one per order, and one for each stage that shares its passes.
    Finished { ticket: Ticket, outcome: Outcome },
    /// Answer to `Unload`, `Trim` and `MakeRoom`.
    Answer {
        /// Id of the command.
        id: u64,
        answer: Answer,
    },
}

/// Progress of an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Progress {
    /// The worker has begun the order, and has done nothing for it yet.
    Begun,
    /// A component is being evicted.
    Evicting(Component),
    /// A component is being loaded.
    Loading {
        component: Component,
        /// Bytes loaded so far.
        done: Bytes,
    },
    /// The stage starts.
    Started {
        /// Label of the rung.
        chunking: String,
        /// The card's memory now.
        memory: MemorySummary,
    },
    /// A step is done.
    Step {
        /// Index of the step, from 1.
        n: u32,
        /// Number of steps.
        of: u32,
    },
    /// A preview of the current state.
    Preview {
        step: u32,
        width: u32,
        height: u32,
        /// RGB, 8 bits each, row-major.
        rgb: bytes::Bytes,
    },
    Piece(Piece),
    /// A retry within the stage: out of memory, then a smaller rung.
    Retrying {
        /// Stable identifier of the reason.
        reason: String,
        /// For display.
        message: String,
    },
}

/// Outcome of an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// It completed.
    Completed(Box<Completed>),
    /// It cannot run now: nothing was started, and all moves made are booked.
    Wait(Shortage),
    /// It never fits on this card.
    Never {
        /// Peak bytes of the smallest rung.
        needed: Bytes,
        /// The most that the card can provide.
        capacity: Bytes,
    },
    Cancelled,
    /// It failed; the card is healthy.
    Failed(Failure),
}

/// Why a stage cannot run now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shortage {
    /// Bytes missing.
    pub short: Bytes,
    /// Bytes of the peak that are not resident yet.
    pub needed: Bytes,
    pub usable: Bytes,
    /// The claim to wait for.
    pub cause: WaitCause,
    /// Holders of memory.
    pub holders: Vec<Holder>,
}

/// Report of a completed attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Completed {
    /// Values that the stage has computed; empty for a load.
    pub values: Values,
    /// Label of the rung.
    pub chunking: String,
    /// Whether the result differs from the first rung's by more than rounding.
    pub approximate: bool,
    /// Passes that the stage left out; `None`: it was not asked to.
    pub passes_left_out: Option<PassesLeftOut>,
    /// Whether attention was computed in fp8.
    pub attention_in_fp8: bool,
    /// Components that did not have to be loaded.
    pub resident_already: Vec<String>,
    /// Milliseconds of moves.
    pub move_ms: u64,
    /// Milliseconds of computation.
    pub run_ms: u64,
    /// Usable bytes just before the stage's lease, for `RunOutcome::Succeeded`.
    pub room: Bytes,
    pub predicted_scratch: Bytes,
    /// Peak of activation bytes.
    pub peak_scratch: Bytes,
    /// Peak of our bytes on the card.
    pub peak_bytes: Bytes,
    /// The card's memory around the stage; `None` for a load.
    pub memory: Option<StageMemory>,
    /// Implementation of attention in the stage: `cudnn 9.19.0`, `own kernels`, `cpu loops`, separated by commas;
    /// empty if none was computed.
    pub attention: String,
    /// Seconds that each load took, by identity: the cost of a reload.
    pub load_seconds: Vec<(ComponentId, f64)>,
}

/// A card's memory around a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageMemory {
    /// Before its activations were booked.
    pub before: MemorySummary,
    /// After they were freed.
    pub after: MemorySummary,
    /// The largest block that the driver could have allocated for the stage, as far as the stage needed one; `None` if free
    /// memory was more than enough.
    pub largest_block: Option<Bytes>,
}

/// Why an attempt failed on a healthy card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// Out of memory despite admission, down to the last rung.
    OutOfMemory {
        stage: String,
        /// Bytes predicted for the last rung's peak.
        needed: Bytes,
        /// Bytes usable at that time.
        usable: Bytes,
        /// Holders of memory at that time.
        holders: Vec<Holder>,
    },
    /// A result is NaN or infinite.
    NotFinite {
        component: String,
        /// The denoising step, from 1; 0 outside denoising.
        step: u32,
    },
    /// The checkpoint is damaged.
    Model {
        /// For display: the file and the problem.
        message: String,
    },
    /// Files of the checkpoint are not the versions that the order names, and those versions are not resident.
    Replaced {
        /// For display: whose files, and what differs.
        message: String,
    },
    /// The checkpoint is of no supported kind.
    Unsupported {
        /// For display.
        message: String,
    },
    /// An input of the stage does not match the model.
    BadInput(String),
    /// Any other failure, described in words.
    Internal(String),
}

/// Answer to a command with an id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// To `Unload` and `MakeRoom`.
    Unloaded {
        /// Unloaded components.
        freed: Vec<(Component, Unloaded)>,
        /// Components that stayed, and why: `in use`, `pinned`, `held`.
        kept: Vec<(Component, KeptBecause)>,
        /// For `MakeRoom`: bytes still missing.
        short: Bytes,
    },
    /// To `Trim`: bytes returned to the driver.
    Trimmed(Bytes),
    /// The command failed.
    Failed(String),
}
