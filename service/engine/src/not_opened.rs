//! Why a model was not opened, where its files may be whole.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a model was not opened. Its files may be whole: the same may succeed later.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum NotOpened {
    /// A thread reads its files, and gets no answer.
    #[error(
        "{path} cannot be read now: the file system has not answered for {} s; see whether the disk or the network share is \
         there, and try again",
        .limit.as_secs()
    )]
    Silent {
        /// Where the model is.
        path: String,
        /// How long there was no answer.
        limit: Duration,
    },
    /// No thread was free to read its files.
    #[error(
        "{path} was not read: for {} s all threads that may read it were in use, for other requests; try again in a while, \
         and if it stays so see whether a disk or a network share does not answer",
        .limit.as_secs()
    )]
    Busy {
        /// Where the model is.
        path: String,
        /// How long no thread was free.
        limit: Duration,
    },
}
