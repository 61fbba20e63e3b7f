//! Converts errors to statuses, in one exhaustive match: code, stable reason, and details on which a client can act.

use std::time::Duration;

use api::v1::Reason;
use calls::{Kind, MOST_LISTED, invalid, paths, told, words_of};
use engine::library::NotOpened;
use engine::{CancelledBy, Error, Shortfall};
use hub::{PullError, PullFailure};
use prost_types::Any;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::{Code, Status};
use transport::Refusal;
use transport::status::{self, any, retry, shown, with_details};

use crate::convert::shortfall_out;

/// Retry delay of pulls.
const RETRY_DISK: Duration = Duration::from_secs(10);

/// The gRPC status of an error.
pub(crate) fn status_of(error: &Error) -> Status {
    if matches!(error, Error::LatentWithoutDecoder) {
        return status_of(&invalid(
            "info.vae_id",
            "is empty: set the identity of the VAE that decodes the latent",
        ));
    }
    let (code, reason) = code_of(error);
    let mut details = vec![match error {
        // The id is metadata too, so that no client parses the message.
        Error::ModelNotFound { id } => info_with(reason, [("model", id.clone())]),
        Error::Cancelled(by) => {
            let (how, client) = cancellation(by);
            match client {
                Some(client) => info_with(reason, [("how", how.to_owned()), ("by", client.to_owned())]),
                None => info_with(reason, [("how", how.to_owned())]),
            }
        }
        Error::TokenLimit { limit, .. } => info_with(reason, [("limit", limit.clone().into_owned())]),
        Error::NotOpened(NotOpened::Silent { .. }) => disk_info(SILENT),
        Error::NotOpened(NotOpened::Busy { .. }) => disk_info(BUSY),
        _ => error_info(reason),
    }];
    match error {
        Error::Invalid(fields) => details.push(bad_request(fields)),
        Error::Adapter { name, problem } => {
            let field = paths::relative(&format!("model.adapters[{name}]"));
            details.push(bad_request(&[model::RequestError::new(field, problem)]));
        }
        Error::NeverFits(shortfall) | Error::MemoryTaken(shortfall) | Error::OutOfMemory(shortfall) => {
            details.push(memory(shortfall));
        }
        _ => {}
    }
    details.extend(told(error).retry_after.map(retry));
    with_details(code, &words_of(error), details)
}

/// The gRPC status of a failed pull. Only who administers the service pulls, and is told which folder it is about.
pub(crate) fn status_of_pull(error: &PullError) -> Status {
    status_of_hub(error, &error.to_string())
}

/// The gRPC status of a pull that cannot be planned. Who only generates may ask for a plan.
pub(crate) fn status_of_pull_plan(error: &PullError) -> Status {
    status_of_hub(error, &paths::relative(&error.to_string()))
}

fn status_of_hub(error: &PullError, words: &str) -> Status {
    let with_disk = |how| {
        let details = vec![disk_info(how), retry(RETRY_DISK)];
        with_details(Code::Unavailable, words, details)
    };
    let (code, reason) = match error.kind() {
        PullFailure::WrongName => return status_of(&invalid("id", words)),
        PullFailure::ShuttingDown => return status_of(&Error::ShuttingDown),
        PullFailure::DiskSilent => return with_disk(SILENT),
        PullFailure::DiskBusy => return with_disk(BUSY),
        PullFailure::DiskFull => (Code::ResourceExhausted, Reason::DiskFull),
        PullFailure::NotSupported => (Code::FailedPrecondition, Reason::ModelUnsupported),
        PullFailure::Failed => (Code::FailedPrecondition, Reason::PullFailed),
    };
    let mut details = vec![error_info(reason)];
    if code == Code::ResourceExhausted {
        details.push(retry(RETRY_DISK));
    }
    with_details(code, words, details)
}

/// The response to a call that the transport refuses.
pub(crate) fn answer_of(refusal: Refusal) -> http::Response<Body> {
    Status::from(refusal).into_http()
}

/// How a job was cancelled, in the words of errors.proto, and by which client.
fn cancellation(by: &CancelledBy) -> (&'static str, Option<&str>) {
    match by {
        CancelledBy::Call { client } => ("cancel", Some(client)),
        CancelledBy::Unload { client, .. } => ("unload", Some(client)),
        CancelledBy::Left => ("left", None),
        CancelledBy::Unread => ("unread", None),
        CancelledBy::Withdrawn => ("withdrawn", None),
    }
}

/// The stable reason of an error.
pub(crate) fn reason_of(error: &Error) -> Reason {
    code_of(error).1
}

fn code_of(error: &Error) -> (Code, Reason) {
    let told = told(error);
    let code = match told.kind {
        Kind::Invalid => Code::InvalidArgument,
        Kind::NotFound => Code::NotFound,
        Kind::Exists => Code::AlreadyExists,
        Kind::Precondition => Code::FailedPrecondition,
        Kind::Exhausted => Code::ResourceExhausted,
        Kind::Aborted => Code::Aborted,
        Kind::Unavailable => Code::Unavailable,
        Kind::Deadline => Code::DeadlineExceeded,
        Kind::Cancelled => Code::Cancelled,
        Kind::Internal => Code::Internal,
    };
    // A test holds all of them to errors.proto.
    (
        code,
        Reason::from_str_name(told.reason).unwrap_or(Reason::Internal),
    )
}

/// How a disk is not ready, in the words of errors.proto.
const SILENT: &str = "silent";
const BUSY: &str = "busy";

fn disk_info(how: &str) -> Any {
    info_with(Reason::DiskNotReady, [("how", how.to_owned())])
}

fn error_info(reason: Reason) -> Any {
    info_with(reason, [])
}

fn info_with<const N: usize>(reason: Reason, metadata: [(&str, String); N]) -> Any {
    status::error_info(reason.as_str_name(), metadata)
}

/// The wrong fields that are named to a client, each with its problem. Both may repeat text of the client.
pub(crate) fn listed(fields: &[model::RequestError]) -> impl Iterator<Item = (String, String)> {
    let listed = fields.iter().take(MOST_LISTED);
    listed.map(|wrong| (shown(&wrong.field), shown(&paths::relative(&wrong.problem))))
}

fn bad_request(fields: &[model::RequestError]) -> Any {
    status::bad_request(listed(fields))
}

fn memory(shortfall: &Shortfall) -> Any {
    any("moored.v1.MemoryShortfall", &shortfall_out(shortfall))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use tonic_types::pb;

    use super::*;

    fn details(status: &Status) -> Vec<String> {
        let decoded = pb::Status::decode(status.details()).unwrap();
        assert_eq!(decoded.message, status.message());
        decoded.details.into_iter().map(|any| any.type_url).collect()
    }

    #[test]
    fn the_status_of_a_wrong_field_names_it() {
        let status = status_of(&invalid("width", "17 is no multiple of 16; 16 or 32 would do"));
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("width"));
        assert_eq!(
            details(&status),
            [
                "type.googleapis.com/google.rpc.ErrorInfo",
                "type.googleapis.com/google.rpc.BadRequest"
            ]
        );
    }

    #[test]
    fn the_status_of_a_latent_without_a_decoder_names_the_field() {
        let status = status_of(&Error::LatentWithoutDecoder);
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().starts_with("info.vae_id: is empty"), "{status}");
        assert_eq!(details(&status).len(), 2);
    }

    #[test]
    fn a_disk_that_does_not_answer_is_unavailable_and_says_when_to_try_again() {
        let (path, folder, limit) = (
            "/models/mine".to_owned(),
            "/cache".to_owned(),
            Duration::from_secs(60),
        );
        let silent = NotOpened::Silent {
            path: path.clone(),
            limit,
        };
        let busy = NotOpened::Busy { path, limit };
        let silent_cache = PullError::DiskSilent {
            folder: folder.clone(),
            limit,
        };
        let busy_cache = PullError::DiskBusy { folder, limit };
        for (status, how) in [
            (status_of(&silent.into()), "silent"),
            (status_of(&busy.into()), "busy"),
            (status_of_pull(&silent_cache), "silent"),
            (status_of_pull(&busy_cache), "busy"),
        ] {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            assert_eq!(
                details(&status),
                [
                    "type.googleapis.com/google.rpc.ErrorInfo",
                    "type.googleapis.com/google.rpc.RetryInfo"
                ]
            );
            let first = pb::Status::decode(status.details()).unwrap().details.remove(0);
            let info = pb::ErrorInfo::decode(&first.value[..]).unwrap();
            assert_eq!(
                (info.reason.as_str(), info.metadata["how"].as_str()),
                ("DISK_NOT_READY", how)
            );
        }
    }

    #[test]
    fn whatever_is_exhausted_says_when_to_try_again_unless_waiting_changes_nothing() {
        const RETRY: &str = "type.googleapis.com/google.rpc.RetryInfo";
        let bytes = residency::Bytes::gib(1);
        let shortfall = || {
            Box::new(Shortfall {
                stage: "denoise".to_owned(),
                needed: bytes,
                free: bytes,
                capacity: bytes,
                holders: Vec::new(),
                fallbacks: Vec::new(),
                smallest: None,
                instead: None,
                pinned: bytes,
            })
        };
        let token_limit = |retry_after| Error::TokenLimit {
            limit: "pixels_per_minute".into(),
            problem: "too many".to_owned(),
            retry_after,
        };
        let client = "greedy".to_owned();
        for error in [
            Error::QueueFull { limit: 256 },
            Error::TooManyJobs(engine::JobBound::Client { client, limit: 192 }),
            Error::ClientLimit("too many".to_owned()),
            Error::SlowReader {
                unread: bytes,
                limit: bytes,
            },
            Error::MemoryTaken(shortfall()),
            Error::OutOfMemory(shortfall()),
            token_limit(Some(RETRY_DISK)),
        ] {
            let status = status_of(&error);
            assert_eq!(status.code(), Code::ResourceExhausted, "{error}");
            assert!(details(&status).contains(&RETRY.to_owned()), "{error}");
        }
        let limit = Status::from(Refusal::ClientLimit("too many calls".to_owned()));
        assert!(details(&limit).contains(&RETRY.to_owned()));
        for status in [
            status_of(&token_limit(None)),
            Status::from(Refusal::TooLarge("as large next time".to_owned())),
        ] {
            assert_eq!(status.code(), Code::ResourceExhausted);
            assert!(!details(&status).contains(&RETRY.to_owned()), "{status}");
        }
    }

    #[test]
    fn every_reason_is_one_of_the_protocol() {
        let told = include_str!("../../calls/src/told.rs");
        let words = told.split('"').skip(1).step_by(2);
        let reasons: Vec<&str> = words
            .filter(|word| word.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
            .collect();
        assert!(reasons.len() > 20, "{reasons:?}");
        for reason in reasons {
            assert!(Reason::from_str_name(reason).is_some(), "{reason}");
        }
    }

    #[test]
    fn text_of_the_caller_is_escaped_in_every_part_of_an_error() {
        let red = "\x1b[31mred\u{202e}\na line";
        for error in [
            invalid(red, red),
            Error::ModelNotFound { id: red.to_owned() },
            Error::LatentNotFound(red.to_owned()),
            Error::Adapter {
                name: red.to_owned(),
                problem: red.to_owned(),
            },
            Error::Cancelled(CancelledBy::Call {
                client: red.to_owned(),
            }),
        ] {
            let status = status_of(&error);
            let told = String::from_utf8_lossy(status.details()).into_owned() + status.message();
            let shown = ["\x1b[31m", "\u{202e}", "\na line"].map(|part| told.contains(part));
            assert_eq!(shown, [false; 3], "{told:?}");
        }
    }

    #[test]
    fn long_messages_are_cut_to_fit_into_headers() {
        let status = status_of(&invalid("model.id", "ü".repeat(100_000)));
        assert!(status.message().len() + status.details().len() * 4 / 3 < 8 << 10);
        let status = status_of(&Error::ModelNotFound {
            id: "x".repeat(100_000),
        });
        assert!(status.message().len() + status.details().len() * 4 / 3 < 8 << 10);
    }

    #[test]
    fn the_status_of_taken_memory_has_the_shortfall_and_a_retry_delay() {
        let shortfall = Shortfall {
            stage: "denoise".to_owned(),
            needed: residency::Bytes::gib(24),
            free: residency::Bytes::gib(3),
            capacity: residency::Bytes::gib(80),
            holders: Vec::new(),
            fallbacks: Vec::new(),
            smallest: None,
            instead: None,
            pinned: residency::Bytes::ZERO,
        };
        let status = status_of(&Error::MemoryTaken(Box::new(shortfall)));
        assert_eq!(status.code(), Code::ResourceExhausted);
        let urls = details(&status);
        assert!(
            urls.contains(&"type.googleapis.com/moored.v1.MemoryShortfall".to_owned()),
            "{urls:?}"
        );
        assert!(
            urls.contains(&"type.googleapis.com/google.rpc.RetryInfo".to_owned()),
            "{urls:?}"
        );
    }

    /// A path of the machine, as errors of files have them.
    const SECRET: &str = "/srv/secret-folder/box/model.safetensors";

    /// An error of each kind. Its texts name a path, but for those that a client has sent. A new kind of error does not compile here until
    /// it is added.
    fn errors_with_paths() -> Vec<Error> {
        let path = || SECRET.to_owned();
        let words = || format!("{SECRET}: cannot be read");
        let shortfall = || {
            Box::new(Shortfall {
                stage: "denoise".to_owned(),
                needed: residency::Bytes::gib(24),
                free: residency::Bytes::gib(3),
                capacity: residency::Bytes::gib(80),
                holders: vec![residency::Holder {
                    name: words(),
                    pid: None,
                    bytes: residency::Bytes::gib(1),
                }],
                fallbacks: Vec::new(),
                smallest: Some((words(), residency::Bytes::gib(1))),
                instead: Some(words()),
                pinned: residency::Bytes::ZERO,
            })
        };
        let limit = Duration::from_secs(60);
        let all = vec![
            invalid("model.id", words()),
            Error::Adapter {
                name: path(),
                problem: words(),
            },
            Error::ModelNotFound {
                id: "mine".to_owned(),
            },
            Error::ModelDamaged(words()),
            NotOpened::Silent { path: path(), limit }.into(),
            NotOpened::Busy { path: path(), limit }.into(),
            Error::ModelChanged(words()),
            Error::ModelUnsupported(words()),
            Error::NeverFits(shortfall()),
            Error::MemoryTaken(shortfall()),
            Error::OutOfMemory(shortfall()),
            Error::QueueFull { limit: 1 },
            Error::TooManyJobs(engine::JobBound::Client {
                client: path(),
                limit: 1,
            }),
            Error::TooManyJobs(engine::JobBound::Address {
                address: path(),
                limit: 1,
            }),
            Error::TooManyJobs(engine::JobBound::Kept { places: 1 }),
            Error::InputsFull {
                kept: residency::Bytes::ZERO,
                limit: residency::Bytes::ZERO,
            },
            Error::ClientLimit(words()),
            Error::TokenLimit {
                limit: "models".into(),
                problem: words(),
                retry_after: None,
            },
            Error::SlowReader {
                unread: residency::Bytes::ZERO,
                limit: residency::Bytes::ZERO,
            },
            Error::Deadline {
                state: engine::JobState::Queued,
            },
            Error::Cancelled(CancelledBy::Call {
                client: "ann".to_owned(),
            }),
            Error::Cancelled(CancelledBy::Unload {
                entry: Some("mine".to_owned()),
                client: "ann".to_owned(),
            }),
            Error::Cancelled(CancelledBy::Left),
            Error::Cancelled(CancelledBy::Unread),
            Error::Cancelled(CancelledBy::Withdrawn),
            Error::WorkerDied {
                card: path(),
                stage: words(),
                deaths: 2,
            },
            Error::WorkerSilent {
                card: path(),
                stage: words(),
                limit,
            },
            Error::LostTooOften { times: 3 },
            Error::NotKept(words()),
            Error::CardNotReady(words()),
            Error::NotFinite {
                component: path(),
                step: 1,
            },
            Error::LatentNotFound("latent-1".to_owned()),
            Error::LatentWithoutDecoder,
            Error::LatentMismatch(words()),
            Error::JobNotFound("job-1".to_owned()),
            Error::KeyReused("key".to_owned()),
            Error::TooLargeToJoin("key".to_owned()),
            Error::ShuttingDown,
            Error::Internal(words()),
        ];
        for error in &all {
            match error {
                Error::Invalid(_)
                | Error::Adapter { .. }
                | Error::ModelNotFound { .. }
                | Error::ModelDamaged(_)
                | Error::NotOpened(_)
                | Error::ModelChanged(_)
                | Error::ModelUnsupported(_)
                | Error::NeverFits(_)
                | Error::MemoryTaken(_)
                | Error::OutOfMemory(_)
                | Error::QueueFull { .. }
                | Error::TooManyJobs(_)
                | Error::InputsFull { .. }
                | Error::ClientLimit(_)
                | Error::TokenLimit { .. }
                | Error::SlowReader { .. }
                | Error::Deadline { .. }
                | Error::Cancelled(_)
                | Error::WorkerDied { .. }
                | Error::WorkerSilent { .. }
                | Error::LostTooOften { .. }
                | Error::NotKept(_)
                | Error::CardNotReady(_)
                | Error::NotFinite { .. }
                | Error::LatentNotFound(_)
                | Error::LatentWithoutDecoder
                | Error::LatentMismatch(_)
                | Error::JobNotFound(_)
                | Error::KeyReused(_)
                | Error::TooLargeToJoin(_)
                | Error::ShuttingDown
                | Error::Internal(_) => {}
            }
        }
        let kinds: std::collections::HashSet<_> = all.iter().map(std::mem::discriminant).collect();
        assert_eq!(kinds.len(), 32, "one of each kind above");
        all
    }

    fn shows_a_folder(status: &Status) -> bool {
        let details = String::from_utf8_lossy(status.details());
        [status.message(), &details]
            .iter()
            .any(|text| text.contains("secret-folder"))
    }

    #[test]
    fn no_error_shows_a_path_of_the_machine() {
        for error in errors_with_paths() {
            let status = status_of(&error);
            assert!(!shows_a_folder(&status), "{status:?}");
        }
        let path = || SECRET.to_owned();
        let limit = Duration::from_secs(60);
        for error in [
            PullError::Offline {
                id: "owner/name".to_owned(),
                cache: path(),
                missing: vec!["a".to_owned()],
            },
            PullError::DiskFull {
                needed: residency::Bytes::ZERO,
                free: residency::Bytes::ZERO,
                folder: path(),
            },
            PullError::Disk {
                path: path(),
                problem: "full".to_owned(),
            },
            PullError::DiskSilent {
                folder: path(),
                limit,
            },
            PullError::DiskBusy {
                folder: path(),
                limit,
            },
        ] {
            let status = status_of_pull_plan(&error);
            assert!(!shows_a_folder(&status), "{status:?}");
            assert!(shows_a_folder(&status_of_pull(&error)), "who pulls is told where");
        }
    }
}
