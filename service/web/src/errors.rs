//! Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

use std::error::Error as StdError;
use std::time::Duration;

use axum::Json;
use axum::extract::multipart::{MultipartError, MultipartRejection};
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::response::{IntoResponse, Response};
use calls::{Kind, invalid, told, words_of};
use engine::Error;
use http::StatusCode;
use http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use serde::Serialize;
use transport::{Refusal, RefusedFor, status};
use utoipa::ToSchema;

/// The body of an error.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorWords,
    /// The message once more, where clients of AUTOMATIC1111's API look for it.
    pub(crate) detail: String,
}

/// What went wrong.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorWords {
    /// For people: what to do next.
    pub(crate) message: String,
    /// `invalid_request_error`, `rate_limit_error`, `server_error`.
    pub(crate) r#type: &'static str,
    /// The wrong field, where it is one.
    pub(crate) param: Option<String>,
    /// The stable reason: `model_not_found`.
    pub(crate) code: String,
}

/// Why a request is refused, or a job failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    pub(crate) words: Box<ErrorWords>,
    /// As errors.proto spells it.
    reason: &'static str,
    retry_after: Option<Duration>,
}

impl Failure {
    /// A wrong field of a request.
    pub(crate) fn field(field: &str, problem: impl Into<String>) -> Failure {
        invalid(field, problem).into()
    }

    /// With the names of fields as this path has them, instead of those of the service's own requests.
    pub(crate) fn with_fields_named(mut self, names: &[(&str, &str)]) -> Failure {
        if let Some(field) = &self.words.param
            && let Some((inner, sent)) = names.iter().find(|(inner, _)| field.starts_with(inner))
        {
            self.words.message = self.words.message.replace(inner, sent);
            self.words.param = Some((*sent).to_owned());
        }
        self
    }

    fn of(status: StatusCode, reason: &'static str, message: String) -> Failure {
        let r#type = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Failure {
            status,
            words: Box::new(ErrorWords {
                message: status::in_short(&message),
                r#type,
                param: None,
                code: reason.to_ascii_lowercase(),
            }),
            reason,
            retry_after: None,
        }
    }

    /// Nothing is at this path.
    pub(crate) fn no_path(path: &str) -> Failure {
        let message = format!("there is nothing at {path:?}: /openapi.json lists what there is");
        Failure::of(StatusCode::NOT_FOUND, "NOT_FOUND", message)
    }

    /// The path does not take this verb.
    pub(crate) fn no_verb() -> Failure {
        let message = "this path does not take this method: /openapi.json says which it takes".to_owned();
        Failure::of(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let told = told(&error);
        let status = match told.kind {
            Kind::Invalid => StatusCode::BAD_REQUEST,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Exists => StatusCode::CONFLICT,
            Kind::Precondition => StatusCode::UNPROCESSABLE_ENTITY,
            Kind::Exhausted => StatusCode::TOO_MANY_REQUESTS,
            Kind::Aborted | Kind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Deadline => StatusCode::GATEWAY_TIMEOUT,
            // Somebody else ended the job: the client waits no longer for it.
            Kind::Cancelled => StatusCode::GONE,
            Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let mut failure = Failure::of(status, told.reason, words_of(&error));
        failure.retry_after = told.retry_after;
        if let Error::Invalid(fields) = &error {
            failure.words.param = fields.first().map(|wrong| wrong.field.clone());
        }
        failure
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        let status = match &refusal {
            Refusal::Unauthenticated(_) => StatusCode::UNAUTHORIZED,
            Refusal::RoleRequired(_) | Refusal::OtherSite(_) => StatusCode::FORBIDDEN,
            Refusal::ClientLimit(_) => StatusCode::TOO_MANY_REQUESTS,
            Refusal::TooLarge(_) | Refusal::TooLongMessage { .. } => StatusCode::PAYLOAD_TOO_LARGE,
        };
        let mut failure = Failure::of(status, refusal.reason(), refusal.to_string());
        if matches!(refusal, Refusal::ClientLimit(_)) {
            failure.retry_after = Some(transport::status::RETRY_LIMIT);
        }
        failure
    }
}

/// A body that could not be read: too large, broken off, or not of the form that is asked for.
pub(crate) fn unread(status: StatusCode, message: String) -> Failure {
    let reason = match status {
        StatusCode::PAYLOAD_TOO_LARGE => "CLIENT_LIMIT",
        _ => "INVALID_REQUEST",
    };
    Failure::of(status, reason, message)
}

/// A body that broke off.
fn broken_off() -> Failure {
    let problem = "the request broke off: send it again".to_owned();
    unread(StatusCode::BAD_REQUEST, problem)
}

/// Why the transport refused the rest of a body: that is among the sources of the error.
fn refusal_of(problem: &(dyn StdError + 'static)) -> Option<Failure> {
    let refusal = problem.downcast_ref::<Refusal>().cloned().map(Failure::from);
    refusal.or_else(|| refusal_of(problem.source()?))
}

impl From<BytesRejection> for Failure {
    fn from(rejection: BytesRejection) -> Failure {
        refusal_of(&rejection).unwrap_or_else(|| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => unread(StatusCode::PAYLOAD_TOO_LARGE, rejection.body_text()),
            _ => broken_off(),
        })
    }
}

impl From<MultipartError> for Failure {
    fn from(error: MultipartError) -> Failure {
        refusal_of(&error).unwrap_or_else(|| match error.status() {
            status if status.is_server_error() => broken_off(),
            status => unread(status, error.body_text()),
        })
    }
}

impl From<MultipartRejection> for Failure {
    fn from(_: MultipartRejection) -> Failure {
        let problem = "send a form, with the header Content-Type: multipart/form-data and its boundary";
        unread(StatusCode::UNSUPPORTED_MEDIA_TYPE, problem.to_owned())
    }
}

impl From<QueryRejection> for Failure {
    fn from(rejection: QueryRejection) -> Failure {
        unread(rejection.status(), rejection.body_text())
    }
}

impl From<PathRejection> for Failure {
    fn from(rejection: PathRejection) -> Failure {
        unread(rejection.status(), rejection.body_text())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let body = ErrorBody {
            detail: self.words.message.clone(),
            error: *self.words,
        };
        let mut response = (self.status, Json(body)).into_response();
        response.extensions_mut().insert(RefusedFor(self.reason));
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            headers.insert(RETRY_AFTER, after.as_secs().max(1).into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, http::HeaderValue::from_static("Bearer"));
        }
        response
    }
}
