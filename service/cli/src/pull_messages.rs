//! Pulls of the command line itself, as messages of the protocol, so that they are shown like pulls of a service.

use api::v1::{self, Reason};
use hub::{Progress, PullError, PullFailure, Pulled};

/// The reason of a pull that failed.
pub(super) fn reason_of(error: &PullError) -> Reason {
    match error.kind() {
        PullFailure::WrongName => Reason::InvalidRequest,
        PullFailure::NotSupported => Reason::ModelUnsupported,
        PullFailure::DiskFull => Reason::DiskFull,
        PullFailure::DiskSilent | PullFailure::DiskBusy => Reason::DiskNotReady,
        PullFailure::ShuttingDown => Reason::ShuttingDown,
        PullFailure::Failed => Reason::PullFailed,
    }
}

/// How far a pull is.
pub(super) fn progress_of(progress: Progress) -> v1::PullProgress {
    v1::PullProgress {
        bytes_done: progress.bytes_done,
        bytes_total: progress.bytes_total,
        files_done: progress.files_done,
        files_total: progress.files_total,
        file: progress.file,
    }
}

/// A model that is complete in the cache.
pub(super) fn pulled_of(pulled: Pulled) -> v1::PulledModel {
    v1::PulledModel {
        id: pulled.id,
        revision: pulled.revision,
        bytes_total: pulled.bytes_total,
        bytes_fetched: pulled.bytes_fetched,
    }
}
