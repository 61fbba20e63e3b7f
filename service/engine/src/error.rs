//! Errors of jobs, in one enum: a protocol server converts each for its clients.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use model::{Quantization, Request};
use residency::{Bytes, Holder};
use serde::{Deserialize, Serialize};

use crate::job_state::JobState;
use crate::not_opened::NotOpened;

/// An alternative that would fit, for a request that does not.
pub type Fallback = residency::Fallback<Change>;

/// The difference between a request that would fit and the original one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// For people: `quantization 8-bit (int8-convrot)`, `512x512`, `components transformer, vae`.
    pub label: String,
    pub to: ChangedTo,
}

/// The changed field and its new value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ChangedTo {
    /// The formats of the model's weights.
    Quantization(Quantization),
    /// The size of the result.
    Request(Box<Request>),
    /// The components of a load.
    Components(Vec<String>),
    /// The models of these keys are not pinned.
    Unpinned(Vec<String>),
    /// The bytes of a reservation.
    Bytes(Bytes),
}

/// A shortage of memory, its holders, and alternatives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shortfall {
    pub stage: String,
    pub needed: Bytes,
    pub free: Bytes,
    /// The most that the card can provide.
    pub capacity: Bytes,
    /// Bytes of the card that pins of other models keep, beyond what it can provide.
    pub pinned: Bytes,
    /// Holders of memory that is not available.
    pub holders: Vec<Holder>,
    /// Alternatives that would fit, the closest first.
    pub fallbacks: Vec<Fallback>,
    /// Where nothing would fit: the formats in which the model needs the least, and the bytes that it needs then.
    pub smallest: Option<(String, Bytes)>,
    /// Where nothing would fit: a model that does, in words. The caller of the queue sets it, as it knows the list of models.
    pub instead: Option<String>,
}

impl Shortfall {
    /// ` beside 3.2 GiB that are pinned (unpin a model to have them)`, if anything is.
    fn beside_pins(&self) -> String {
        match self.pinned {
            Bytes::ZERO => String::new(),
            pinned => format!(" beside {pinned} that are pinned (unpin a model to have them)"),
        }
    }

    /// `; quantization 4-bit (nf4), the smallest, needs 6.7 GiB; NAME fits this card`, as far as that is known.
    fn alternatives(&self) -> String {
        let smallest = self.smallest.as_ref();
        let smallest = smallest.map(|(label, needed)| format!("; {label}, the smallest, needs {needed}"));
        let instead = self.instead.as_ref().map(|instead| format!("; {instead}"));
        smallest.into_iter().chain(instead).collect()
    }
}

/// The cause of a job's cancellation. A client is identified by the name that it sends, or by its address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CancelledBy {
    /// A call to cancel it, of this client.
    Call { client: String },
    /// An unload by force, of this client.
    Unload {
        /// Key of the entry; `None` for all.
        entry: Option<String>,
        client: String,
    },
    /// All listeners of the job have left: their calls or connections ended.
    Left,
    /// The last listener was dropped, because it did not read.
    Unread,
    /// The token that it was submitted with was withdrawn.
    Withdrawn,
}

impl fmt::Display for CancelledBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CancelledBy::Call { client } => write!(f, "cancelled by {client}"),
            CancelledBy::Unload {
                entry: Some(entry),
                client,
            } => write!(f, "cancelled: {client} unloaded {entry} by force"),
            CancelledBy::Unload { entry: None, client } => {
                write!(f, "cancelled: {client} unloaded all models by force")
            }
            CancelledBy::Left => f.write_str("cancelled: its client left, or the connection to it was lost"),
            CancelledBy::Unread => f.write_str("cancelled: its client did not read the results"),
            CancelledBy::Withdrawn => {
                f.write_str("cancelled: the token that it was submitted with was withdrawn")
            }
        }
    }
}

/// The bound on jobs that a submission would exceed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobBound {
    /// The bound of one client, by the name that it sends.
    Client { client: String, limit: usize },
    /// The bound of one address, for all names that its clients send.
    Address { address: String, limit: usize },
    /// The last places are for addresses that have no job.
    Kept { places: usize },
}

impl fmt::Display for JobBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const REMEDY: &str = "wait until some have ended or cancel some, or raise";
        match self {
            JobBound::Client { client, limit } => write!(
                f,
                "{client} has {limit} jobs in the queue, which are the most of one client: {REMEDY} queue.max_jobs_per_client"
            ),
            JobBound::Address { address, limit } => write!(
                f,
                "clients of {address} have {limit} jobs in the queue, which are the most of one address or token: {REMEDY} queue.max_jobs"
            ),
            JobBound::Kept { places } => write!(
                f,
                "the last {places} places of the queue are kept for addresses that have no job in it, and yours has some: {REMEDY} queue.max_jobs"
            ),
        }
    }
}

/// Why a job failed. `Clone`, since all clients that joined a job get the same error; serialized, since it is told to those who ask
/// after a restart.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum Error {
    /// Invalid fields of the request.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Invalid(Vec<model::RequestError>),
    /// An adapter or a ControlNet that cannot be attached to the model. The field is that of the request that names it.
    #[error("{name}: {problem}")]
    Adapter {
        /// Its name in the entry.
        name: String,
        problem: String,
    },
    #[error("there is no model {id}; `moored models` lists those that there are")]
    ModelNotFound {
        /// As requested.
        id: String,
    },
    /// Damaged model files.
    #[error("{0}")]
    ModelDamaged(String),
    /// The disk that the model lies on does not answer, or too many models are being opened.
    #[error(transparent)]
    NotOpened(#[from] NotOpened),
    /// The model's files were replaced while the job was under way, and nothing is left of the versions that it began with.
    #[error("{0}: submit the request again")]
    ModelChanged(String),
    /// Not a pipeline, or an unsupported one.
    #[error("{0}")]
    ModelUnsupported(String),
    /// The job exceeds the capacity of the card.
    #[error(
        "{} needs {} at its peak, and the card can give {} at the most{}{}",
        .0.stage, .0.needed, .0.capacity, .0.beside_pins(), .0.alternatives()
    )]
    NeverFits(Box<Shortfall>),
    /// The patience for foreign or late memory is exhausted.
    #[error("{} needs {} and {} are free: others hold the rest; try again later", .0.stage, .0.needed, .0.free)]
    MemoryTaken(Box<Shortfall>),
    /// Out of memory in a stage, despite admission.
    #[error("out of memory in {}, which was predicted to need {}", .0.stage, .0.needed)]
    OutOfMemory(Box<Shortfall>),
    /// Backpressure: the queue is at its limit.
    #[error("the queue is full ({limit} jobs); try again in a while")]
    QueueFull {
        /// Maximum of queued jobs.
        limit: usize,
    },
    /// A client, or an address, has as many jobs as one may have.
    #[error("{0}")]
    TooManyJobs(JobBound),
    /// Init images of other jobs leave no room for the job's own.
    #[error(
        "init images of other jobs take {kept} of the {limit} that the queue keeps; try again in a while"
    )]
    InputsFull { kept: Bytes, limit: Bytes },
    /// A bound of one client, or of all clients together, is exceeded.
    #[error("{0}")]
    ClientLimit(String),
    /// A token may do no more of this now.
    #[error("{problem}")]
    TokenLimit {
        /// Name of the limit: `jobs`, `pixels_per_minute`.
        limit: Cow<'static, str>,
        problem: String,
        /// After which time it may work; `None`: never.
        retry_after: Option<Duration>,
    },
    /// A listener left too much of its results unread.
    #[error(
        "{unread} of results were left unread, and {limit} are the most: read the stream as it comes; the job goes on for its other readers"
    )]
    SlowReader { unread: Bytes, limit: Bytes },
    /// The job's deadline passed.
    #[error("the deadline passed while the job was {}", .state.as_str())]
    Deadline {
        /// State at that time.
        state: JobState,
    },
    #[error("{0}")]
    Cancelled(CancelledBy),
    /// The job killed a worker repeatedly: it is not retried again.
    #[error(
        "the worker of {card} died {deaths} times while it ran {stage} of this job; it is not tried again"
    )]
    WorkerDied {
        card: String,
        stage: String,
        /// Number of worker deaths.
        deaths: u32,
    },
    /// A worker was silent for longer than its limit, and was ended.
    #[error(
        "{card} gave no sign for {} s while it ran {stage} of this job (queue.stall_limit), and was started anew; it is not tried \
         again: ask for a smaller picture or film, or raise queue.stall_limit",
        .limit.as_secs()
    )]
    WorkerSilent {
        card: String,
        stage: String,
        /// How long it was silent.
        limit: Duration,
    },
    /// No card is ready.
    #[error("no card is ready: {0}")]
    CardNotReady(String),
    /// The service ended each time that the job ran.
    #[error(
        "the service ended {times} times while this job ran, and the job is not tried again: ask for a smaller picture or film, and see \
         in the service's log why it ended"
    )]
    LostTooOften {
        /// How often it was begun.
        times: u32,
    },
    /// The journal of jobs cannot be written or read.
    #[error(
        "the job cannot be kept: {0}; free some disk, see whether service.state can be written, or submit it without `detach`"
    )]
    NotKept(String),
    /// A result is NaN or infinite.
    #[error(
        "{component} produced a value that is not finite at step {step}: nothing could be seen or heard of the result"
    )]
    NotFinite {
        component: String,
        /// The denoising step, from 1; 0 outside denoising.
        step: u32,
    },
    #[error("there is no latent {0}, or it has expired")]
    LatentNotFound(String),
    /// A client uploads a latent and does not name its decoder.
    #[error("it is not said which decoder the latent is of")]
    LatentWithoutDecoder,
    /// The latent is of another decoder or another shape.
    #[error("{0}")]
    LatentMismatch(String),
    #[error("there is no job {0}")]
    JobNotFound(String),
    /// An idempotency key was reused for a different request.
    #[error("the idempotency key {0} was used for another request")]
    KeyReused(String),
    /// A job with this idempotency key is running, and has sent more of its result than is kept for a second listener.
    #[error(
        "the job with the idempotency key {0} is still running, and its result is too large to be sent to a second client: \
         submit the request with another key"
    )]
    TooLargeToJoin(String),
    /// The service is shutting down.
    #[error("the service is shutting down")]
    ShuttingDown,
    /// A bug in the service.
    #[error("a fault of the service: {0}")]
    Internal(String),
}
