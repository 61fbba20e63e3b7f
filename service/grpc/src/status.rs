//! Converts errors to statuses, in one exhaustive match: code, stable reason, and details on which a client can act.

use std::time::Duration;

use api::v1::Reason;
use calls::{LONGEST_MESSAGE_CHARACTERS, LONGEST_TEXT_CHARACTERS, MOST_LISTED, invalid, paths, words_of};
use engine::library::NotOpened;
use engine::{CancelledBy, Error, Shortfall};
use hub::{PullError, PullFailure};
use prost::Message as _;
use prost_types::Any;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::{Code, Status};
use tonic_types::pb;
use wording::{cut, one_line};

use crate::convert::shortfall_out;
use crate::refusal::Refusal;

/// Domain of our `ErrorInfo`.
const DOMAIN: &str = "moored";

/// Retry delays that are sent to clients.
const RETRY_FULL_QUEUE: Duration = Duration::from_secs(2);
const RETRY_MEMORY: Duration = Duration::from_secs(5);
const RETRY_CARD: Duration = Duration::from_secs(1);
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
        Error::NeverFits(shortfall) => details.push(memory(shortfall)),
        Error::MemoryTaken(shortfall) | Error::OutOfMemory(shortfall) => {
            details.push(memory(shortfall));
            details.push(retry(RETRY_MEMORY));
        }
        Error::QueueFull { .. }
        | Error::TooManyJobs(_)
        | Error::InputsFull { .. }
        | Error::ClientLimit(_)
        | Error::SlowReader { .. }
        | Error::ShuttingDown => details.push(retry(RETRY_FULL_QUEUE)),
        Error::TokenLimit { retry_after, .. } => details.extend(retry_after.map(retry)),
        Error::CardNotReady(_) => details.push(retry(RETRY_CARD)),
        Error::NotOpened(_) | Error::NotKept(_) => details.push(retry(RETRY_DISK)),
        Error::ModelNotFound { .. }
        | Error::ModelDamaged(_)
        | Error::ModelChanged(_)
        | Error::ModelUnsupported(_)
        | Error::Deadline { .. }
        | Error::Cancelled(_)
        | Error::WorkerDied { .. }
        | Error::WorkerSilent { .. }
        | Error::LostTooOften { .. }
        | Error::NotFinite { .. }
        | Error::LatentNotFound(_)
        | Error::LatentWithoutDecoder
        | Error::LatentMismatch(_)
        | Error::JobNotFound(_)
        | Error::KeyReused(_)
        | Error::TooLargeToJoin(_)
        | Error::Internal(_) => {}
    }
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

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        match refusal {
            Refusal::Unauthenticated(problem) => {
                let details = vec![error_info(Reason::Unauthenticated)];
                with_details(Code::Unauthenticated, &problem, details)
            }
            Refusal::RoleRequired(problem) => {
                let details = vec![error_info(Reason::RoleRequired)];
                with_details(Code::PermissionDenied, &problem, details)
            }
            Refusal::ClientLimit(problem) => {
                let details = vec![error_info(Reason::ClientLimit), retry(RETRY_FULL_QUEUE)];
                with_details(Code::ResourceExhausted, &problem, details)
            }
            // Without a time after which to try again: the same request is as large then.
            Refusal::TooLarge(problem) => {
                let details = vec![error_info(Reason::ClientLimit)];
                with_details(Code::ResourceExhausted, &problem, details)
            }
            long @ Refusal::TooLongMessage { .. } => status_of(&invalid("message", long.to_string())),
        }
    }
}

/// The response to a call that a layer refuses.
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
    match error {
        Error::Invalid(_) | Error::Adapter { .. } | Error::LatentWithoutDecoder => {
            (Code::InvalidArgument, Reason::InvalidRequest)
        }
        Error::ClientLimit(_) | Error::TooManyJobs(_) => (Code::ResourceExhausted, Reason::ClientLimit),
        Error::TokenLimit { .. } => (Code::ResourceExhausted, Reason::TokenLimit),
        Error::ModelNotFound { .. } => (Code::NotFound, Reason::ModelNotFound),
        Error::ModelDamaged(_) => (Code::FailedPrecondition, Reason::ModelDamaged),
        Error::ModelChanged(_) => (Code::Aborted, Reason::ModelChanged),
        Error::ModelUnsupported(_) => (Code::FailedPrecondition, Reason::ModelUnsupported),
        Error::NeverFits(_) => (Code::FailedPrecondition, Reason::NeverFits),
        Error::MemoryTaken(_) => (Code::ResourceExhausted, Reason::MemoryTaken),
        Error::OutOfMemory(_) => (Code::ResourceExhausted, Reason::OutOfMemory),
        Error::QueueFull { .. } | Error::InputsFull { .. } => (Code::ResourceExhausted, Reason::QueueFull),
        Error::SlowReader { .. } => (Code::ResourceExhausted, Reason::SlowReader),
        Error::Deadline { .. } => (Code::DeadlineExceeded, Reason::Deadline),
        Error::Cancelled(_) => (Code::Cancelled, Reason::Cancelled),
        Error::WorkerDied { .. } | Error::WorkerSilent { .. } | Error::LostTooOften { .. } => {
            (Code::Aborted, Reason::WorkerDied)
        }
        Error::NotKept(_) => (Code::Unavailable, Reason::NotKept),
        Error::CardNotReady(_) => (Code::Unavailable, Reason::CardNotReady),
        Error::NotOpened(_) => (Code::Unavailable, Reason::DiskNotReady),
        Error::NotFinite { .. } => (Code::Internal, Reason::NotFinite),
        Error::LatentNotFound(_) => (Code::NotFound, Reason::LatentNotFound),
        Error::LatentMismatch(_) => (Code::FailedPrecondition, Reason::LatentMismatch),
        Error::JobNotFound(_) => (Code::NotFound, Reason::JobNotFound),
        Error::KeyReused(_) | Error::TooLargeToJoin(_) => (Code::AlreadyExists, Reason::KeyReused),
        Error::ShuttingDown => (Code::Unavailable, Reason::ShuttingDown),
        Error::Internal(_) => (Code::Internal, Reason::Internal),
    }
}

/// Foreign text in an error: escaped, and cut.
fn shown(text: &str) -> String {
    cut(&one_line(text), LONGEST_TEXT_CHARACTERS).into_owned()
}

fn with_details(code: Code, message: &str, details: Vec<Any>) -> Status {
    let message = cut(&one_line(message), LONGEST_MESSAGE_CHARACTERS).into_owned();
    let status = pb::Status {
        code: code as i32,
        message: message.clone(),
        details,
    };
    Status::with_details(code, message, status.encode_to_vec().into())
}

fn any(name: &str, message: &impl prost::Message) -> Any {
    Any {
        type_url: format!("type.googleapis.com/{name}"),
        value: message.encode_to_vec(),
    }
}

fn error_info(reason: Reason) -> Any {
    info_with(reason, [])
}

/// How a disk is not ready, in the words of errors.proto.
const SILENT: &str = "silent";
const BUSY: &str = "busy";

fn disk_info(how: &str) -> Any {
    info_with(Reason::DiskNotReady, [("how", how.to_owned())])
}

fn info_with<const N: usize>(reason: Reason, metadata: [(&str, String); N]) -> Any {
    let metadata = metadata
        .into_iter()
        .map(|(name, value)| (name.to_owned(), shown(&value)));
    let info = pb::ErrorInfo {
        reason: reason.as_str_name().to_owned(),
        domain: DOMAIN.to_owned(),
        metadata: metadata.collect(),
    };
    any("google.rpc.ErrorInfo", &info)
}

/// The wrong fields that are named to a client, each with its problem. Both may repeat text of the client.
pub(crate) fn listed(fields: &[model::RequestError]) -> impl Iterator<Item = (String, String)> {
    let listed = fields.iter().take(MOST_LISTED);
    listed.map(|wrong| (shown(&wrong.field), shown(&paths::relative(&wrong.problem))))
}

fn bad_request(fields: &[model::RequestError]) -> Any {
    let field_violations = listed(fields)
        .map(|(field, description)| pb::bad_request::FieldViolation {
            field,
            description,
            ..Default::default()
        })
        .collect();
    any("google.rpc.BadRequest", &pb::BadRequest { field_violations })
}

fn retry(after: Duration) -> Any {
    let retry_delay = prost_types::Duration::try_from(after).ok();
    any("google.rpc.RetryInfo", &pb::RetryInfo { retry_delay })
}

fn memory(shortfall: &Shortfall) -> Any {
    any("moored.v1.MemoryShortfall", &shortfall_out(shortfall))
}

#[cfg(test)]
mod tests {
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
