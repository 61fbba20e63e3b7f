//! What an error is to clients, in whatever protocol: its kind, its stable reason, and after how long to try again.

use std::time::Duration;

use engine::Error;

/// Times after which to try again.
const FULL_QUEUE: Duration = Duration::from_secs(2);
const MEMORY: Duration = Duration::from_secs(5);
const CARD: Duration = Duration::from_secs(1);
const DISK: Duration = Duration::from_secs(10);

/// What kind of failure it is. Each protocol has a code for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong, and stays so.
    Invalid,
    NotFound,
    /// There is already something in its place.
    Exists,
    /// What is asked for cannot be done as things are.
    Precondition,
    /// A limit, or memory, is used up for now.
    Exhausted,
    /// Something changed or was lost meanwhile: it may be asked for again.
    Aborted,
    /// For a moment.
    Unavailable,
    Deadline,
    Cancelled,
    Internal,
}

/// An error as a client is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    pub kind: Kind,
    /// As `Reason` of errors.proto spells it.
    pub reason: &'static str,
    pub retry_after: Option<Duration>,
}

impl Told {
    const fn of(kind: Kind, reason: &'static str) -> Told {
        Told {
            kind,
            reason,
            retry_after: None,
        }
    }

    const fn after(kind: Kind, reason: &'static str, retry_after: Duration) -> Told {
        Told {
            retry_after: Some(retry_after),
            ..Told::of(kind, reason)
        }
    }
}

/// What clients are told of an error.
pub fn told(error: &Error) -> Told {
    match error {
        Error::Invalid(_) | Error::Adapter { .. } | Error::LatentWithoutDecoder => {
            Told::of(Kind::Invalid, "INVALID_REQUEST")
        }
        Error::ClientLimit(_) | Error::TooManyJobs(_) => {
            Told::after(Kind::Exhausted, "CLIENT_LIMIT", FULL_QUEUE)
        }
        Error::TokenLimit { retry_after, .. } => Told {
            retry_after: *retry_after,
            ..Told::of(Kind::Exhausted, "TOKEN_LIMIT")
        },
        Error::ModelNotFound { .. } => Told::of(Kind::NotFound, "MODEL_NOT_FOUND"),
        Error::ModelDamaged(_) => Told::of(Kind::Precondition, "MODEL_DAMAGED"),
        Error::ModelChanged(_) => Told::of(Kind::Aborted, "MODEL_CHANGED"),
        Error::ModelUnsupported(_) => Told::of(Kind::Precondition, "MODEL_UNSUPPORTED"),
        Error::NeverFits(_) => Told::of(Kind::Precondition, "NEVER_FITS"),
        Error::MemoryTaken(_) => Told::after(Kind::Exhausted, "MEMORY_TAKEN", MEMORY),
        Error::OutOfMemory(_) => Told::after(Kind::Exhausted, "OUT_OF_MEMORY", MEMORY),
        Error::QueueFull { .. } | Error::InputsFull { .. } => {
            Told::after(Kind::Exhausted, "QUEUE_FULL", FULL_QUEUE)
        }
        Error::SlowReader { .. } => Told::after(Kind::Exhausted, "SLOW_READER", FULL_QUEUE),
        Error::Deadline { .. } => Told::of(Kind::Deadline, "DEADLINE"),
        Error::Cancelled(_) => Told::of(Kind::Cancelled, "CANCELLED"),
        Error::WorkerDied { .. } | Error::WorkerSilent { .. } | Error::LostTooOften { .. } => {
            Told::of(Kind::Aborted, "WORKER_DIED")
        }
        Error::NotKept(_) => Told::after(Kind::Unavailable, "NOT_KEPT", DISK),
        Error::CardNotReady(_) => Told::after(Kind::Unavailable, "CARD_NOT_READY", CARD),
        Error::NotOpened(_) => Told::after(Kind::Unavailable, "DISK_NOT_READY", DISK),
        Error::NotFinite { .. } => Told::of(Kind::Internal, "NOT_FINITE"),
        Error::LatentNotFound(_) => Told::of(Kind::NotFound, "LATENT_NOT_FOUND"),
        Error::LatentMismatch(_) => Told::of(Kind::Precondition, "LATENT_MISMATCH"),
        Error::JobNotFound(_) => Told::of(Kind::NotFound, "JOB_NOT_FOUND"),
        Error::KeyReused(_) | Error::TooLargeToJoin(_) => Told::of(Kind::Exists, "KEY_REUSED"),
        Error::ShuttingDown => Told::after(Kind::Unavailable, "SHUTTING_DOWN", FULL_QUEUE),
        Error::Internal(_) => Told::of(Kind::Internal, "INTERNAL"),
    }
}
