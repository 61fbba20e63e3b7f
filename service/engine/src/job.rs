//! What a job is to whoever submits it: its specification, and the events of its life.

use std::sync::Arc;
use std::time::Duration;

use pipelines::{Piece, Request, Role, ValueShape, Values};
use residency::{Bytes, Component, Holder};
use tokio::time::Instant;

use crate::error::Error;
use crate::library::Entry;
use crate::queue::{Freed, Kept};

/// Name of a job, for people and for cancelling.
pub type JobId = Arc<str>;

/// Name of a stage, as its family has it; or `load`, `restore`, `unload`.
pub type StageName = Arc<str>;

/// Order among the jobs of all clients: the share of a client's next job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A quarter of a share.
    Low,
    /// One share.
    #[default]
    Normal,
    /// Four shares.
    High,
}

/// Everything about a job that does not depend on what it makes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobOptions {
    /// Who asks, for fair shares.
    pub client: String,
    /// Its share.
    pub priority: Priority,
    /// For late or foreign memory; none: the service's setting.
    pub patience: Option<Duration>,
    /// Admit a stage that is short of memory.
    pub allow_low_memory: bool,
    /// A card to prefer; empty: any.
    pub card_hint: String,
    /// Jobs with the same key are one job; empty: none.
    pub idempotency_key: String,
    /// Go on when nobody listens any more, and past the deadline.
    pub detach: bool,
    /// When it must be done; of several who join it, the latest counts.
    pub deadline: Option<Instant>,
}

/// A job.
#[derive(Clone, Debug)]
pub struct JobSpec {
    /// How it is queued.
    pub options: JobOptions,
    /// The model.
    pub entry: Arc<Entry>,
    /// What it makes.
    pub work: JobWork,
}

/// What a job makes.
#[derive(Clone, Debug, PartialEq)]
pub enum JobWork {
    /// Stages of a request are run.
    Run(Run),
    /// Nothing: components come in.
    Load {
        /// Names; empty: all. All it must be if anything follows.
        components: Vec<String>,
        /// The entry whose place it takes once it is proven, or that is brought back.
        replace: Option<Arc<Entry>>,
        /// Run the smallest request with it, as a proof; whatever replaces does so anyway.
        prove: bool,
    },
}

/// Stages of a request to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The call, for lists: `GenerateImage`.
    pub call: &'static str,
    /// The request of the first item; item i uses seed + i.
    pub request: Request,
    /// How many items.
    pub count: u32,
    /// What it starts from instead of nothing.
    pub start: Option<Start>,
    /// The last role that is run: up to [`Role::Sample`] it ends with values in the store, up to [`Role::Encode`] with
    /// those of what the client brings.
    pub until: Role,
    /// Keep the values that each item's decode takes.
    pub keep_latent: bool,
    /// Least milliseconds between previews; 0: none.
    pub preview_interval_ms: u32,
}

/// Values in the store that a run starts from.
#[derive(Clone, Debug, PartialEq)]
pub struct Start {
    /// Their handle.
    pub latent: String,
    /// The first role that finds them.
    pub role: Role,
}

/// What happens to a job, in order. Exactly one of `Done` and `Failed` comes, last.
#[derive(Clone, Debug, PartialEq)]
pub struct JobEvent {
    /// Milliseconds since the job was accepted.
    pub at_ms: u64,
    /// What.
    pub kind: JobEventKind,
}

/// Kinds of events. Queue, waiting, loading, step and preview are coalesced for a slow reader (the latest
/// wins); the others are never lost to whoever reads: a listener that leaves too many pictures unread is closed.
#[derive(Clone, Debug, PartialEq)]
pub enum JobEventKind {
    /// Recorded.
    Accepted {
        /// Whether an idempotency key joined it to a job that was there.
        joined: bool,
    },
    /// Behind our own jobs.
    Queued {
        /// Jobs ahead.
        position: u32,
        /// Until it starts.
        estimate: Option<Duration>,
    },
    /// For late or foreign memory.
    Waiting {
        /// The stage.
        stage: StageName,
        /// Bytes needed that are not resident.
        needed: Bytes,
        /// Bytes usable.
        free: Bytes,
        /// Who has it.
        holders: Vec<Holder>,
        /// How long it will still wait.
        patience_left: Duration,
        /// `late_eviction`, `foreign`, `leases`, `reservation`.
        cause: &'static str,
    },
    /// A component leaves.
    Evicting {
        /// Which.
        component: Component,
        /// From where.
        card: String,
    },
    /// A component comes in.
    Loading {
        /// Which.
        component: Component,
        /// So far.
        done: Bytes,
        /// To where.
        card: String,
    },
    /// Tried again.
    Retrying {
        /// Stable.
        reason: String,
        /// For people.
        message: String,
        /// The stage.
        stage: StageName,
    },
    /// A stage begins.
    Stage {
        /// Its name.
        name: StageName,
        /// From 1.
        index: u32,
        /// In all.
        of: u32,
        /// How it runs.
        chunking: String,
        /// Taken from a cache.
        cached: bool,
        /// Where.
        card: String,
        /// Which item.
        item: u32,
    },
    /// A step is done.
    Step {
        /// From 1.
        n: u32,
        /// In all.
        of: u32,
        /// Which item.
        item: u32,
    },
    /// So far.
    Preview {
        /// The step.
        step: u32,
        /// Which item.
        item: u32,
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
        /// RGB.
        rgb: bytes::Bytes,
    },
    /// A piece of a result, as pixels or samples: whoever serves it encodes it.
    Piece {
        /// Which item.
        item: u32,
        /// Its seed.
        seed: u64,
        /// The next of its track.
        piece: Piece,
    },
    /// A latent is in the store.
    Latent {
        /// Its description.
        info: LatentInfo,
        /// Which item.
        item: u32,
    },
    /// The end.
    Done(Arc<JobReport>),
    /// The other end.
    Failed(Error),
}

/// What a finished job took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobReport {
    /// Seed of the first item.
    pub seed: u64,
    /// Stages in order.
    pub stages: Vec<StageReport>,
    /// Components that were there already.
    pub resident_already: Vec<String>,
    /// Approximations that memory forced.
    pub approximations: Vec<String>,
    /// From acceptance to the end.
    pub total: Duration,
    /// What left of the model that was replaced.
    pub freed: Vec<Freed>,
    /// What stayed of it.
    pub kept: Vec<Kept>,
}

/// What one stage took.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageReport {
    /// Its name.
    pub name: StageName,
    /// Computing.
    pub run: Duration,
    /// Loading and evicting.
    pub moves: Duration,
    /// Waiting for memory.
    pub wait: Duration,
    /// Highest activation bytes.
    pub peak_scratch: Bytes,
    /// Highest bytes of ours.
    pub peak_bytes: Bytes,
    /// Predicted activation bytes.
    pub predicted_scratch: Bytes,
    /// How it ran.
    pub chunking: String,
    /// What computed attention: `cudnn 9.19.0`, `own kernels`, `cpu loops`, several with commas between; empty where none was
    /// computed.
    pub attention: String,
    /// Taken from a cache.
    pub cached: bool,
    /// Which item.
    pub item: u32,
    /// Where.
    pub card: String,
}

/// A latent in the store: values that can be decoded, or started from.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentInfo {
    /// Handle.
    pub id: String,
    /// Names and shapes of its tensors.
    pub values: Vec<ValueShape>,
    /// Identity of what decodes it.
    pub decoder_id: String,
    /// Until it is dropped.
    pub expires_in: Duration,
    /// Its bytes.
    pub bytes: Bytes,
}

/// A latent with its numbers.
#[derive(Clone, Debug, PartialEq)]
pub struct Latent {
    /// Its description.
    pub info: LatentInfo,
    /// Its tensors.
    pub values: Values,
}
