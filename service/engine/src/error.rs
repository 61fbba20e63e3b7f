//! What can go wrong with a job, in one enum: the gRPC room turns each into a status.

use residency::{Bytes, Holder};

/// A request that would fit instead.
pub use residency::Fallback;

/// How much memory is missing, who has it, and what would fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Shortfall {
    /// The stage that is short.
    pub stage: String,
    /// Bytes needed at the peak.
    pub needed: Bytes,
    /// Bytes usable now.
    pub free: Bytes,
    /// What the card could give at the most.
    pub capacity: Bytes,
    /// Who holds memory.
    pub holders: Vec<Holder>,
    /// What would fit, closest first.
    pub fallbacks: Vec<Fallback>,
}

/// The end of a job that did not succeed. `Clone`, since a joined job ends alike for all who wait for it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// Fields that are wrong.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<pipelines::RequestError>),
    /// No such model.
    #[error("there is no model {id}; `moored models` lists those that there are")]
    ModelNotFound {
        /// As it was asked for.
        id: String,
    },
    /// Damaged files.
    #[error("{0}")]
    ModelDamaged(String),
    /// Not a pipeline, or one that is not supported.
    #[error("{0}")]
    ModelUnsupported(String),
    /// The API has it, this build has not.
    #[error("{what} is not built yet; GetServerInfo lists what is")]
    NotBuilt {
        /// What was asked for.
        what: String,
    },
    /// Larger than the card.
    #[error("{} needs {} at its peak, and the card can give {} at the most", .0.stage, .0.needed, .0.capacity)]
    NeverFits(Box<Shortfall>),
    /// Patience is over.
    #[error("{} needs {} and {} are free: memory is held by others; try again, or allow_low_memory", .0.stage, .0.needed, .0.free)]
    MemoryTaken(Box<Shortfall>),
    /// Out of memory in a stage.
    #[error("out of memory in {}, which was predicted to need {}", .0.stage, .0.needed)]
    OutOfMemory(Box<Shortfall>),
    /// Too many jobs.
    #[error("the queue is full ({limit} jobs); try again in a while")]
    QueueFull {
        /// How many it takes.
        limit: usize,
    },
    /// The deadline passed.
    #[error("the deadline passed while the job was {state}")]
    Deadline {
        /// `queued`, `waiting`, `running`.
        state: String,
    },
    /// Cancelled.
    #[error("cancelled")]
    Cancelled,
    /// Two workers died of it.
    #[error(
        "the worker of {card} died {deaths} times while it ran {stage} of this job; it is not tried again"
    )]
    WorkerDied {
        /// The card.
        card: String,
        /// The stage.
        stage: String,
        /// How often.
        deaths: u32,
    },
    /// No card.
    #[error("no card is ready: {0}")]
    CardNotReady(String),
    /// Not finite.
    #[error("{component} produced a value that is not finite at step {step}: the picture would be black")]
    NotFinite {
        /// The component.
        component: String,
        /// The step.
        step: u32,
    },
    /// No such latent.
    #[error("there is no latent {0}, or it has expired")]
    LatentNotFound(String),
    /// Another VAE's, or another shape.
    #[error("{0}")]
    LatentMismatch(String),
    /// No such job.
    #[error("there is no job {0}")]
    JobNotFound(String),
    /// Used by jobs.
    #[error("{0}")]
    InUse(String),
    /// A key for two requests.
    #[error("the idempotency key {0} was used for another request")]
    KeyReused(String),
    /// Going down.
    #[error("the service is shutting down")]
    ShuttingDown,
    /// A fault of ours.
    #[error("a fault of the service: {0}")]
    Internal(String),
}
