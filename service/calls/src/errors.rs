//! Errors of calls, and their messages to clients.

use std::fmt::Display;

use engine::Error;
use hub::Reference;
use hub::catalogue::did_you_mean;
use model::RequestError;
use wording::is_obeyed;

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

/// Most characters of a name, of a whole message, and most wrong fields in an error that is kept for a client.
const LONGEST_KEPT_CHARACTERS: usize = 300;
const LONGEST_KEPT_MESSAGE_CHARACTERS: usize = 1_000;
const MOST_KEPT_FIELDS: usize = 12;

/// An error that is kept until its client reads it. Text that repeats the client's is cut.
pub(crate) fn to_keep(error: Error) -> Error {
    let cut_to = |text: &str, longest: usize| wording::cut(text, longest).into_owned();
    let cut = |text: String| cut_to(&text, LONGEST_KEPT_CHARACTERS);
    let cut_message = |text: String| cut_to(&text, LONGEST_KEPT_MESSAGE_CHARACTERS);
    match error {
        Error::Invalid(fields) => {
            let fields = fields.into_iter().take(MOST_KEPT_FIELDS);
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
        Error::CardNotReady(problem) => Error::CardNotReady(cut(problem)),
        Error::LatentNotFound(id) => Error::LatentNotFound(cut(id)),
        Error::LatentMismatch(problem) => Error::LatentMismatch(cut(problem)),
        Error::JobNotFound(id) => Error::JobNotFound(cut(id)),
        Error::KeyReused(key) => Error::KeyReused(cut(key)),
        Error::TooLargeToJoin(key) => Error::TooLargeToJoin(cut(key)),
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
        | Error::NotFinite { .. }
        | Error::LatentWithoutDecoder
        | Error::ShuttingDown) => short,
    }
}

/// Most characters of a client's name, a key or a label, as these are kept, repeated and sent to workers.
const LONGEST_NAME_CHARACTERS: usize = 256;

/// Refuses a name that is too long, or has control characters.
///
/// # Errors
/// [`Error::Invalid`] with the field.
pub(crate) fn short(field: &str, name: &str) -> Result<(), Error> {
    if name.chars().any(is_obeyed) {
        return Err(invalid(
            field,
            "has control characters, or such that turn the direction of text: leave them out",
        ));
    }
    if name.len() <= LONGEST_NAME_CHARACTERS {
        return Ok(());
    }
    let problem = too_many(name.chars().count(), "characters", LONGEST_NAME_CHARACTERS);
    Err(invalid(field, problem))
}

/// The message of an error to a client. For a missing model it suggests a pull. Paths are relative to the folders of
/// models.
pub fn words_of(error: &Error) -> String {
    let words = match error {
        Error::ModelNotFound { id } => match Reference::of_entry(id) {
            Some(model) => format!("{error}; if it is in a hub: `moored pull {model}`"),
            None => format!("{error}{}", did_you_mean(id, [])),
        },
        error => error.to_string(),
    };
    let relative = paths::relative(&words);
    if relative != words {
        tracing::info!(error = words, "an error for a client names files");
    }
    relative
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
