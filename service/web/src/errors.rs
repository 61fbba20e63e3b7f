//! Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`.

use std::time::Duration;

use axum::Json;
use axum::extract::multipart::MultipartError;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::response::{IntoResponse, Response};
use calls::{Kind, invalid, told, words_of};
use engine::Error;
use http::StatusCode;
use http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use serde::Serialize;
use transport::Refusal;
use utoipa::ToSchema;

/// The body of an error.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorWords,
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
    pub(crate) words: ErrorWords,
    retry_after: Option<Duration>,
}

impl Failure {
    /// A wrong field of a request.
    pub(crate) fn field(field: &str, problem: impl Into<String>) -> Failure {
        invalid(field, problem).into()
    }

    fn of(status: StatusCode, code: &str, message: String) -> Failure {
        let r#type = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Failure {
            status,
            words: ErrorWords {
                message,
                r#type,
                param: None,
                code: code.to_ascii_lowercase(),
            },
            retry_after: None,
        }
    }

    /// A request that another site may have had a browser send.
    pub(crate) fn other_site(why: &str) -> Failure {
        Failure::of(StatusCode::FORBIDDEN, "OTHER_SITE", why.to_owned())
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
            Refusal::RoleRequired(_) => StatusCode::FORBIDDEN,
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
fn unread(status: StatusCode, message: String) -> Failure {
    let code = match status {
        StatusCode::PAYLOAD_TOO_LARGE => "CLIENT_LIMIT",
        _ => "INVALID_REQUEST",
    };
    Failure::of(status, code, message)
}

impl From<JsonRejection> for Failure {
    fn from(rejection: JsonRejection) -> Failure {
        // 422 of a field of another type: clients of this API expect 400.
        let status = match rejection.status() {
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        unread(status, rejection.body_text())
    }
}

impl From<QueryRejection> for Failure {
    fn from(rejection: QueryRejection) -> Failure {
        unread(rejection.status(), rejection.body_text())
    }
}

impl From<MultipartError> for Failure {
    fn from(error: MultipartError) -> Failure {
        unread(error.status(), error.body_text())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(ErrorBody { error: self.words })).into_response();
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
