//! Statuses of gRPC with details, by which also the bodies of requests fail: a message of tonic's fails by a [`Status`].

use std::sync::Arc;
use std::time::Duration;

use calls::{LONGEST_MESSAGE_CHARACTERS, LONGEST_TEXT_CHARACTERS};
use prost::Message as _;
use prost_types::Any;
use tonic::{Code, Status};
use tonic_types::pb;
use wording::{cut, one_line};

use crate::refusal::Refusal;

/// Domain of our `ErrorInfo`.
const DOMAIN: &str = "moored";
/// After how long to try again where a client has all that it may.
pub const RETRY_LIMIT: Duration = Duration::from_secs(2);

/// A status with details.
pub fn with_details(code: Code, message: &str, details: Vec<Any>) -> Status {
    let message = in_short(message);
    let status = pb::Status {
        code: code as i32,
        message: message.clone(),
        details,
    };
    Status::with_details(code, message, status.encode_to_vec().into())
}

/// A message as a detail, by its full name.
pub fn any(name: &str, message: &impl prost::Message) -> Any {
    Any {
        type_url: format!("type.googleapis.com/{name}"),
        value: message.encode_to_vec(),
    }
}

/// The reason of an error, with metadata. `reason` is a name of errors.proto.
pub fn error_info<const N: usize>(reason: &str, metadata: [(&str, String); N]) -> Any {
    let metadata = metadata
        .into_iter()
        .map(|(name, value)| (name.to_owned(), shown(&value)));
    let info = pb::ErrorInfo {
        reason: reason.to_owned(),
        domain: DOMAIN.to_owned(),
        metadata: metadata.collect(),
    };
    any("google.rpc.ErrorInfo", &info)
}

/// Wrong fields of a request, each with its problem.
pub fn bad_request(fields: impl Iterator<Item = (String, String)>) -> Any {
    let field_violations = fields
        .map(|(field, description)| pb::bad_request::FieldViolation {
            field,
            description,
            ..Default::default()
        })
        .collect();
    any("google.rpc.BadRequest", &pb::BadRequest { field_violations })
}

/// After how long to try again.
pub fn retry(after: Duration) -> Any {
    let retry_delay = prost_types::Duration::try_from(after).ok();
    any("google.rpc.RetryInfo", &pb::RetryInfo { retry_delay })
}

/// An error's text for people, on a line of its own, and not longer than such a text may be.
pub fn in_short(message: &str) -> String {
    cut(&one_line(message), LONGEST_MESSAGE_CHARACTERS).into_owned()
}

/// Foreign text in an error: escaped, and cut.
pub fn shown(text: &str) -> String {
    cut(&one_line(text), LONGEST_TEXT_CHARACTERS).into_owned()
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Status {
        let words = refusal.to_string();
        let info = error_info(refusal.reason(), []);
        let mut status = match &refusal {
            Refusal::Unauthenticated(_) => with_details(Code::Unauthenticated, &words, vec![info]),
            Refusal::RoleRequired(_) | Refusal::OtherSite(_) => {
                with_details(Code::PermissionDenied, &words, vec![info])
            }
            Refusal::ClientLimit(_) => {
                with_details(Code::ResourceExhausted, &words, vec![info, retry(RETRY_LIMIT)])
            }
            // Without a time after which to try again: the same request is as large then.
            Refusal::TooLarge(_) => with_details(Code::ResourceExhausted, &words, vec![info]),
            Refusal::TooLongMessage { .. } => {
                let fields = bad_request(std::iter::once(("message".to_owned(), shown(&words))));
                with_details(
                    Code::InvalidArgument,
                    &format!("message: {words}"),
                    vec![info, fields],
                )
            }
        };
        // A body that fails by it is read by other protocols too.
        status.set_source(Arc::new(refusal));
        status
    }
}
