//! Refusals of calls by the layers before their methods, in plain types: each protocol server makes its own answer of them.

/// Why a call is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The token is missing or wrong.
    #[error("{0}")]
    Unauthenticated(String),
    /// The token has a role that may not do this.
    #[error("{0}")]
    RoleRequired(String),
    /// A page of another site may have had a browser send it.
    #[error("{0}")]
    OtherSite(&'static str),
    /// The client has as much as it may, or is too slow.
    #[error("{0}")]
    ClientLimit(String),
    /// The request is larger than its method takes.
    #[error("{0}")]
    TooLarge(String),
    /// A message of a stream is longer than its method takes.
    #[error("has {bytes} bytes; {most} are the most")]
    TooLongMessage { bytes: u64, most: u64 },
}

impl Refusal {
    /// Its stable reason, as errors.proto spells it.
    pub fn reason(&self) -> &'static str {
        match self {
            Refusal::Unauthenticated(_) => "UNAUTHENTICATED",
            Refusal::RoleRequired(_) => "ROLE_REQUIRED",
            Refusal::OtherSite(_) => "OTHER_SITE",
            Refusal::ClientLimit(_) | Refusal::TooLarge(_) => "CLIENT_LIMIT",
            Refusal::TooLongMessage { .. } => "INVALID_REQUEST",
        }
    }
}

/// Makes the response to a refused call.
pub type Answer = fn(Refusal) -> tonic::codegen::http::Response<tonic::body::Body>;
