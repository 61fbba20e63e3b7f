//! Why a model could not be pulled: one plain sentence each, with what to do.

use std::time::Duration;

use residency::Bytes;
use wording::one_line;

use crate::catalogue::did_you_mean;

/// `Clone`, since all clients that joined a pull get its error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PullError {
    /// Not a valid `owner/name`.
    #[error(
        "{name:?} names no model of a hub: write OWNER/NAME, OWNER/NAME@REVISION, or a short name that `moored models --available` lists{}",
        did_you_mean(name, [])
    )]
    Name {
        /// As requested.
        name: String,
    },
    /// Clients may not pull models: `hub.pull` is off.
    #[error("this service pulls no models for its clients (hub.pull): run `moored pull {id}` on its machine")]
    NotAllowed {
        /// The requested model.
        id: String,
    },
    /// Offline, and only commits of it are known, not the branch.
    #[error(
        "HF_HUB_OFFLINE is set, and {cache} does not say which commit {revision} of {id} is; there: {}. `moored pull {id}@{}` takes \
         that, `moored models` lists it, or unset HF_HUB_OFFLINE",
        .commits.join(", "), .commits[0]
    )]
    OfflineWithoutBranch {
        id: String,
        /// Cache folder.
        cache: String,
        revision: String,
        /// The commits that are there: at least one.
        commits: Vec<String>,
    },
    /// Offline, and files are missing.
    #[error("HF_HUB_OFFLINE is set, and {id} is not complete in {cache}: {} missing; unset it to fetch that", list(.missing))]
    Offline {
        id: String,
        /// Cache folder.
        cache: String,
        /// Names of the missing files.
        missing: Vec<String>,
    },
    /// The hub cannot be reached.
    #[error("{endpoint} cannot be reached: {problem}; try again, or name another hub by HF_ENDPOINT")]
    Unreachable { endpoint: String, problem: String },
    /// The hub does not know the model, or hides it: it does not distinguish these.
    #[error(
        "{endpoint} has no model {id} that it shows {}",
        if *.anonymous { "without a token: check the name, and if it is private set HF_TOKEN" }
        else { "with this token: check the name, and that the token may read it" }
    )]
    NoSuchModel {
        endpoint: String,
        id: String,
        /// Whether the request had no token.
        anonymous: bool,
    },
    /// No such branch, tag or commit.
    #[error("{id} has no revision {revision}: name a branch, a tag or a whole commit")]
    NoSuchRevision {
        id: String,
        /// The requested branch, tag or commit.
        revision: String,
    },
    /// The model is gated: its license has to be accepted first.
    #[error(
        "{id} is gated: accept its terms at {endpoint}/{id}, then {}",
        if *.anonymous { "log in with `hf auth login`, or set HF_TOKEN" }
        else { "pull again; the token in use must be of the account that accepted them" }
    )]
    Gated {
        endpoint: String,
        id: String,
        /// Whether the request had no token.
        anonymous: bool,
    },
    /// The token is wrong or expired.
    #[error(
        "{endpoint} refuses the token: set HF_TOKEN to another, or log in anew with `hf auth login`; a public model \
         needs none"
    )]
    TokenRefused { endpoint: String },
    /// Not a pipeline that is supported.
    #[error("{0}")]
    NotAPipeline(String),
    /// An unexpected response of the hub.
    #[error("{endpoint} answered {problem}; try again in a while")]
    Answer { endpoint: String, problem: String },
    /// A downloaded file has another checksum than announced, twice.
    #[error(
        "the checksum of {file} was not the one that the hub announces, twice: the download was discarded; try again"
    )]
    Checksum { file: String },
    /// The connection broke repeatedly.
    #[error("the download of {file} stopped: {problem}; the same pull resumes where this one ended")]
    Cut { file: String, problem: String },
    /// Not enough disk space.
    #[error(
        "{needed} are needed in {folder}, and {free} are free: make room, or name another folder by hub.cache or \
         HF_HUB_CACHE"
    )]
    DiskFull {
        /// Missing bytes of the model, and a margin.
        needed: Bytes,
        /// Free bytes on the disk.
        free: Bytes,
        folder: String,
    },
    /// The cache cannot be written.
    #[error("{path}: {problem}; hub.cache or HF_HUB_CACHE names another folder")]
    Disk { path: String, problem: String },
    /// A thread waits for a file of the cache, and gets no answer.
    #[error(
        "{folder}: the disk has not answered for {} s; see whether the disk or the network share is there, and try again",
        .limit.as_secs()
    )]
    DiskSilent {
        folder: String,
        /// How long there was no answer.
        limit: Duration,
    },
    /// No thread was free to look at the cache.
    #[error(
        "{folder}: for {} s all threads that may use it were in use, for other pulls; try again in a while, and if it stays so see \
         whether the disk or the network share answers",
        .limit.as_secs()
    )]
    DiskBusy {
        folder: String,
        /// How long no thread was free.
        limit: Duration,
    },
    /// The service is shutting down.
    #[error("the service is shutting down; the same pull resumes where this one ended")]
    ShuttingDown,
}

/// Most characters of a hub's message that are shown.
const MOST_SHOWN: usize = 200;

/// A hub's message, safe for a terminal and a log: escaped, and cut to a length.
pub(crate) fn shown(said: &str) -> String {
    one_line(&wording::cut(said, MOST_SHOWN)).into_owned()
}

/// How many names a sentence lists.
const MOST_LISTED: usize = 5;

/// How many files of a repository a sentence lists.
const MOST_FILES: usize = 40;

/// The names of files, safe for a terminal.
pub(crate) fn list_all(names: &[&str]) -> String {
    let more = names.len().saturating_sub(MOST_FILES);
    let listed = names.iter().take(MOST_FILES).map(|name| shown(name));
    let listed = listed.collect::<Vec<_>>().join(", ");
    match more {
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}

pub(crate) fn list(names: &[String]) -> String {
    let more = names.len().saturating_sub(MOST_LISTED);
    let listed = names[..names.len() - more].join(", ");
    let is = if names.len() == 1 { "is" } else { "are" };
    match more {
        0 => format!("{listed} {is}"),
        more => format!("{listed} and {more} more are"),
    }
}

/// Kinds of failed pulls, by what a person or a program can do about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullFailure {
    /// The name is none of a model.
    WrongName,
    /// The repository has no model that runs here.
    NotSupported,
    DiskFull,
    /// The disk of the cache does not answer.
    DiskSilent,
    /// Too many pulls wait for the disk of the cache.
    DiskBusy,
    ShuttingDown,
    /// Any other failure, described by its message.
    Failed,
}

impl PullError {
    /// Its kind.
    pub fn kind(&self) -> PullFailure {
        match self {
            PullError::Name { .. } => PullFailure::WrongName,
            PullError::NotAPipeline(_) => PullFailure::NotSupported,
            PullError::DiskFull { .. } => PullFailure::DiskFull,
            PullError::DiskSilent { .. } => PullFailure::DiskSilent,
            PullError::DiskBusy { .. } => PullFailure::DiskBusy,
            PullError::ShuttingDown => PullFailure::ShuttingDown,
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
            | PullError::Disk { .. } => PullFailure::Failed,
        }
    }
}
