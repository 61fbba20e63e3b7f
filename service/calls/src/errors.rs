//! Errors of calls, and their messages to clients.

use std::fmt::Display;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use engine::Error;
use hub::Reference;
use hub::catalogue::did_you_mean;
use model::RequestError;
use tracing::Instrument as _;

use crate::log_interval::LogInterval;
use crate::paths;

/// The error of one wrong field.
pub fn invalid(field: &str, problem: impl Into<String>) -> Error {
    Error::Invalid(vec![RequestError::new(field, problem)])
}

/// An error with all wrong fields, where there are any.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn all_valid(problems: Vec<RequestError>) -> Result<(), Error> {
    match problems.is_empty() {
        true => Ok(()),
        false => Err(Error::Invalid(problems)),
    }
}

/// The problem of a value out of its range.
pub(crate) fn outside(value: impl Display, least: impl Display, most: impl Display) -> String {
    format!("{value} is not from {least} to {most}")
}

/// The problem of a field with too many items, or too long a text.
pub(crate) fn too_many(count: impl Display, items: &str, most: impl Display) -> String {
    format!("has {count} {items}; {most} are the most")
}

/// An internal error of the service.
pub(crate) fn internal(why: impl ToString) -> Error {
    Error::Internal(why.to_string())
}

/// Does what is done even where its caller leaves meanwhile: what the queue has granted is counted then too.
pub(crate) async fn to_its_end<T: Send + 'static>(
    granted: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    let granted = tokio::spawn(granted.in_current_span()).await;
    granted.unwrap_or_else(|panic| Err(internal(panic)))
}

/// Most characters of one foreign text (a name, a problem) in what a client or the log is told.
pub const LONGEST_TEXT_CHARACTERS: usize = 300;
/// Most characters of a whole message: errors are sent in headers, of which clients accept 8 KiB.
pub const LONGEST_MESSAGE_CHARACTERS: usize = 1_000;
/// Most holders, alternatives and wrong fields of one error.
pub const MOST_LISTED: usize = 12;

/// An error that is kept until its client reads it. Text that repeats the client's is cut.
pub(crate) fn to_keep(error: Error) -> Error {
    let cut_to = |text: &str, longest: usize| wording::cut(text, longest).into_owned();
    let cut = |text: String| cut_to(&text, LONGEST_TEXT_CHARACTERS);
    let cut_message = |text: String| cut_to(&text, LONGEST_MESSAGE_CHARACTERS);
    match error {
        Error::Invalid(fields) => {
            let fields = fields.into_iter().take(MOST_LISTED);
            let cut = |field: RequestError| RequestError::new(cut(field.field), cut(field.problem));
            Error::Invalid(fields.map(cut).collect())
        }
        Error::Adapter { name, problem } => Error::Adapter {
            name: cut(name),
            problem: cut_message(problem),
        },
        Error::ModelNotFound { id } => Error::ModelNotFound { id: cut(id) },
        Error::ModelDamaged(problem) => Error::ModelDamaged(cut(problem)),
        Error::ModelChanged(problem) => Error::ModelChanged(cut(problem)),
        Error::ModelUnsupported(problem) => Error::ModelUnsupported(cut_message(problem)),
        Error::ClientLimit(problem) => Error::ClientLimit(cut(problem)),
        Error::TokenLimit {
            limit,
            problem,
            retry_after,
        } => Error::TokenLimit {
            limit,
            problem: cut_message(problem),
            retry_after,
        },
        Error::CardNotReady(problem) => Error::CardNotReady(cut(problem)),
        Error::LatentNotFound(id) => Error::LatentNotFound(cut(id)),
        Error::LatentMismatch(problem) => Error::LatentMismatch(cut(problem)),
        Error::JobNotFound(id) => Error::JobNotFound(cut(id)),
        Error::KeyReused(key) => Error::KeyReused(cut(key)),
        Error::TooLargeToJoin(key) => Error::TooLargeToJoin(cut(key)),
        Error::NotKept(problem) => Error::NotKept(cut_message(problem)),
        Error::Internal(problem) => Error::Internal(cut_message(problem)),
        // These contain only the service's own text, and names whose length was checked.
        short @ (Error::NotOpened(_)
        | Error::NeverFits(_)
        | Error::MemoryTaken(_)
        | Error::OutOfMemory(_)
        | Error::QueueFull { .. }
        | Error::TooManyJobs(_)
        | Error::InputsFull { .. }
        | Error::SlowReader { .. }
        | Error::Deadline { .. }
        | Error::Cancelled(_)
        | Error::WorkerDied { .. }
        | Error::WorkerSilent { .. }
        | Error::LostTooOften { .. }
        | Error::NotFinite { .. }
        | Error::LatentWithoutDecoder
        | Error::ShuttingDown) => short,
    }
}

/// Refuses a name that is too long, or has control characters.
///
/// # Errors
/// [`Error::Invalid`] with the field.
pub(crate) fn short(field: &str, name: &str) -> Result<(), Error> {
    match wording::name_problem(name) {
        Some(problem) => Err(invalid(field, problem)),
        None => Ok(()),
    }
}

/// The message of an error to a client. For a missing model it suggests a pull. Paths are relative to the folders of
/// models, and of others only the last name is told. Foreign text in it is escaped.
pub fn words_of(error: &Error) -> String {
    let words = match error {
        Error::ModelNotFound { id } => match Reference::of_entry(id) {
            Some(model) => format!("{error}; if it is in a hub: `moored pull {model}`"),
            None => format!("{error}{}", did_you_mean(id, [])),
        },
        error => error.to_string(),
    };
    let relative = match error {
        // What their client has asked for itself, as it wrote it.
        Error::ModelNotFound { .. }
        | Error::LatentNotFound(_)
        | Error::JobNotFound(_)
        | Error::KeyReused(_)
        | Error::TooLargeToJoin(_) => words.clone(),
        _ => paths::relative(&words),
    };
    if relative != words && is_told() {
        tracing::info!(error = words, "an error for a client names files");
    }
    wording::one_line(&relative).into_owned()
}

/// Least time between two errors in the log: requests that fail are cheap, and must not fill the disk.
const LOG_INTERVAL: Duration = Duration::from_secs(1);

/// Whether an error is logged now.
fn is_told() -> bool {
    static LAST: Mutex<LogInterval> = Mutex::new(LogInterval::new());
    // A panic while it is locked leaves it valid.
    LAST.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .allow(LOG_INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_error_is_short_for_any_request() {
        let text = "🟥".repeat(50_000);
        let wrong = || RequestError::new(text.clone(), text.clone());
        let errors = [
            Error::Invalid((0..100).map(|_| wrong()).collect()),
            Error::ModelNotFound { id: text.clone() },
            Error::Adapter {
                name: text.clone(),
                problem: text.clone(),
            },
            Error::ModelUnsupported(text.clone()),
            Error::LatentNotFound(text.clone()),
            Error::LatentMismatch(text.clone()),
            Error::KeyReused(text.clone()),
            Error::Internal(text.clone()),
        ];
        for error in errors {
            let bytes = to_keep(error).to_string().len();
            assert!(bytes < 32 << 10, "{bytes} B");
        }
    }

    #[test]
    fn text_of_others_is_escaped_in_messages() {
        let said = words_of(&invalid("model.id", "\x1b]0;owned\x07\nis none"));
        assert_eq!(
            said,
            words_of(&invalid("model.id", "\\u{1b}]0;owned\\u{7}\\nis none"))
        );
    }

    #[test]
    fn a_pull_is_suggested_for_a_missing_model_with_a_hub_name() {
        let said = |id: &str| words_of(&Error::ModelNotFound { id: id.to_owned() });
        assert!(
            said("me/mine+4-bit").ends_with("`moored pull me/mine`"),
            "{}",
            said("me/mine+4-bit")
        );
        assert!(!said("mine").contains("pull"), "{}", said("mine"));
    }
}
