//! Exit codes, by which scripts distinguish failures. docs/OPERATING.md lists them.

use api::v1::Reason;

use crate::pull_messages;
use crate::{CliError, interrupt};

/// Kind of a failure, by what the caller can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Exit {
    /// A failure without a code of its own.
    Failed = 1,
    /// The command line, a setting or the request is wrong: the same fails again.
    WrongRequest = 2,
    /// No service answers, or the connection to it was lost.
    NoService = 3,
    /// The same command may succeed later.
    TryAgain = 4,
    /// The model is missing, damaged or not supported, or could not be downloaded.
    Model = 5,
    /// The request does not fit the card.
    DoesNotFit = 6,
    /// The token is missing, wrong, or was not sent.
    Token = 7,
    /// A file cannot be read or written, or is there already.
    File = 8,
    /// Ctrl-C, or another client cancelled the job: 128 + SIGINT, as in shells.
    Cancelled = 130,
    /// SIGTERM: 128 + its number.
    Terminated = 143,
}

impl Exit {
    pub(super) fn of(error: &CliError) -> Exit {
        match error {
            CliError::Config(_) | CliError::Usage(_) => Exit::WrongRequest,
            CliError::Unreachable { .. } | CliError::Lost { .. } => Exit::NoService,
            CliError::Refused(refusal) => Exit::of_reason(&refusal.reason),
            CliError::Pull(error) => Exit::of_reason(pull_messages::reason_of(error).as_str_name()),
            CliError::NoModel(_) => Exit::Model,
            CliError::InsecureToken { .. } => Exit::Token,
            CliError::File { .. } | CliError::Exists(_) | CliError::Output(_) => Exit::File,
            CliError::Interrupted(_) => interrupt::exit(),
            CliError::Wire(error) => error.exit(),
            CliError::DoesNotFit(_) => Exit::DoesNotFit,
            CliError::NotNow(_) => Exit::TryAgain,
            CliError::Serve(_) | CliError::Failed(_) => Exit::Failed,
        }
    }

    /// The exit code of the API's reason, or of the gRPC code where there is none.
    fn of_reason(reason: &str) -> Exit {
        let Some(reason) = Reason::from_str_name(reason) else {
            return match reason {
                "UNAVAILABLE" | "DEADLINEEXCEEDED" => Exit::TryAgain,
                "INVALIDARGUMENT" => Exit::WrongRequest,
                "UNAUTHENTICATED" => Exit::Token,
                "CANCELLED" => Exit::Cancelled,
                _ => Exit::Failed,
            };
        };
        match reason {
            Reason::InvalidRequest | Reason::NotBuilt | Reason::KeyReused | Reason::JobNotFound => {
                Exit::WrongRequest
            }
            Reason::QueueFull
            | Reason::ClientLimit
            | Reason::TokenLimit
            | Reason::CardNotReady
            | Reason::DiskNotReady
            | Reason::NotKept
            | Reason::ShuttingDown
            | Reason::MemoryTaken
            | Reason::OutOfMemory
            | Reason::InUse
            | Reason::Deadline
            | Reason::ModelChanged
            | Reason::SlowReader => Exit::TryAgain,
            Reason::ModelNotFound | Reason::ModelDamaged | Reason::ModelUnsupported | Reason::PullFailed => {
                Exit::Model
            }
            Reason::NeverFits => Exit::DoesNotFit,
            Reason::Unauthenticated | Reason::RoleRequired | Reason::OtherSite => Exit::Token,
            Reason::DiskFull => Exit::File,
            Reason::Cancelled => Exit::Cancelled,
            Reason::Unspecified
            | Reason::WorkerDied
            | Reason::NotFinite
            | Reason::LatentNotFound
            | Reason::LatentMismatch
            | Reason::Internal => Exit::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_exit_code() {
        let code = |reason: &str| Exit::of_reason(reason) as u8;
        assert_eq!(code("INVALID_REQUEST"), 2);
        assert_eq!(code("QUEUE_FULL"), 4);
        assert_eq!(code("MODEL_NOT_FOUND"), 5);
        assert_eq!(code("NEVER_FITS"), 6);
        assert_eq!(code("UNAUTHENTICATED"), 7);
        assert_eq!(code("CANCELLED"), 130);
        assert_eq!(code("WORKER_DIED"), 1);
        assert_eq!(code("something new"), 1);
    }
}
