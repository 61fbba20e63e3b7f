//! Pulls in the words of the public protocol: for the service, and for the command line, which pulls by itself too.

use api::v1::{self, Reason};
use hub::{Progress, PullError, Pulled};

/// The reason of a pull that failed.
pub(crate) fn reason_of(error: &PullError) -> Reason {
    match error {
        PullError::Name { .. } => Reason::InvalidRequest,
        PullError::NotAPipeline(_) => Reason::ModelUnsupported,
        PullError::DiskFull { .. } => Reason::DiskFull,
        PullError::DiskSilent { .. } | PullError::DiskBusy { .. } => Reason::DiskNotReady,
        PullError::ShuttingDown => Reason::ShuttingDown,
        PullError::NotAllowed { .. }
        | PullError::Offline { .. }
        | PullError::OfflineWithoutBranch { .. }
        | PullError::Unreachable { .. }
        | PullError::NoSuchModel { .. }
        | PullError::NoSuchRevision { .. }
        | PullError::Gated { .. }
        | PullError::TokenRefused { .. }
        | PullError::Answer { .. }
        | PullError::Checksum { .. }
        | PullError::Cut { .. }
        | PullError::Disk { .. } => Reason::PullFailed,
    }
}

/// How far a pull is.
pub(crate) fn progress_of(progress: Progress) -> v1::PullProgress {
    v1::PullProgress {
        bytes_done: progress.bytes_done,
        bytes_total: progress.bytes_total,
        files_done: progress.files_done,
        files_total: progress.files_total,
        file: progress.file,
    }
}

/// A model that is complete in the cache.
pub(crate) fn pulled_of(pulled: Pulled) -> v1::PulledModel {
    v1::PulledModel {
        id: pulled.id,
        revision: pulled.revision,
        bytes_total: pulled.bytes_total,
        bytes_fetched: pulled.bytes_fetched,
    }
}
