//! What a row says of a method: the bounds of its requests, its access, the places of its calls, and the capability that it announces.

use std::sync::Arc;
use std::time::Duration;

use access::{Holder, Role};
use calls::SESSION_MESSAGE_BYTES;

use crate::protocol::Protocol;

/// Most bytes of a request without media and latents. A prompt is 40 KB at the most.
const SMALL_REQUEST_BYTES: u64 = 1 << 20;
/// The same for methods that need no token.
const PUBLIC_REQUEST_BYTES: u64 = 64 << 10;
/// Longest silence of a session's client; the session itself ends earlier.
const SESSION_IDLE: Duration = Duration::from_secs(2 * 3600);

/// The kind of a method's requests, which decides their bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// No media and no latents.
    Small,
    /// Media or latents.
    Large,
    /// The handler counts the messages as they arrive, and keeps them.
    SelfCounted,
    /// The request lasts as long as a session, which has its own limit of silence and takes short messages one by one.
    Session,
}

impl Requests {
    /// The longest request.
    pub(crate) fn longest_bytes(self, is_public: bool) -> u64 {
        match self {
            Requests::Small if is_public => PUBLIC_REQUEST_BYTES,
            Requests::Small => SMALL_REQUEST_BYTES,
            Requests::Large | Requests::SelfCounted | Requests::Session => u64::MAX,
        }
    }

    /// The longest message of a stream; `None` where a request is one message. A message counts against the client while it arrives;
    /// after that its handler counts it.
    pub(crate) fn longest_message_bytes(self) -> Option<u64> {
        match self {
            Requests::Small | Requests::Large => None,
            Requests::SelfCounted => Some(u64::MAX), // as for other messages: service.max_message
            Requests::Session => Some(SESSION_MESSAGE_BYTES),
        }
    }

    /// The longest pause in a request, where others may have pauses of `usual`.
    pub(crate) fn idle(self, usual: Duration) -> Duration {
        match self {
            Requests::Session => SESSION_IDLE,
            Requests::Small | Requests::Large | Requests::SelfCounted => usual,
        }
    }
}

/// Who may call a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Anybody.
    Nothing,
    /// Clients with a token of this role or a greater one, where tokens are asked for.
    Role(Role),
}

/// A method of a protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method {
    /// `package.Service/Method` of gRPC; `GET /v1/things/{id}` of HTTP.
    pub path: &'static str,
    pub requests: Requests,
    pub needs: Needs,
    /// It shows health, status or jobs, or cancels: its calls may take the spare places.
    pub is_spare: bool,
    /// It needs no token, and its answer has no end of its own.
    pub is_endless: bool,
    /// The capability that `GetServerInfo` lists for it.
    pub capability: Option<&'static str>,
    /// Its clients know a name and a password, and send them only where a refusal asks for them.
    pub asks_basic: bool,
}

impl Method {
    /// A method with small requests.
    pub const fn new(path: &'static str, needs: Needs) -> Method {
        Method {
            path,
            requests: Requests::Small,
            needs,
            is_spare: false,
            is_endless: false,
            capability: None,
            asks_basic: false,
        }
    }

    /// A method that needs no token.
    pub const fn public(path: &'static str) -> Method {
        Method::new(path, Needs::Nothing)
    }

    pub const fn takes(self, requests: Requests) -> Method {
        Method { requests, ..self }
    }

    pub const fn spare(self) -> Method {
        Method {
            is_spare: true,
            ..self
        }
    }

    pub const fn endless(self) -> Method {
        Method {
            is_endless: true,
            ..self
        }
    }

    pub const fn asks_basic(self) -> Method {
        Method {
            asks_basic: true,
            ..self
        }
    }

    pub const fn announces(self, capability: &'static str) -> Method {
        Method {
            capability: Some(capability),
            ..self
        }
    }
}

impl Method {
    /// Its name for people: the method of gRPC, the verb and path of HTTP.
    pub(crate) fn words(&self) -> &'static str {
        match (self.path.is_empty(), self.path.contains(" /")) {
            (true, _) => "this call",
            (false, true) => self.path,
            (false, false) => self.path.rsplit('/').next().unwrap_or_default(),
        }
    }

    /// Whether a request with this verb, at this path without its first slash, is one of this method.
    pub(crate) fn is_at(&self, verb: &str, path: &str) -> bool {
        let Some((own_verb, own_path)) = self.path.split_once(" /") else {
            return self.path == path;
        };
        // Who may read a thing may also ask for its head.
        let is_verb = own_verb == verb || (own_verb == "GET" && verb == "HEAD");
        let (mut own, mut asked) = (own_path.split('/'), path.split('/'));
        is_verb
            && loop {
                match (own.next(), asked.next()) {
                    (None, None) => break true,
                    (Some(rest), Some(given)) if rest.starts_with("{*") && !given.is_empty() => break true,
                    (Some(part), Some(given))
                        if part == given || (part.starts_with('{') && !given.is_empty()) => {}
                    _ => break false,
                }
            }
    }
}

/// A call that was let in, in the extensions of its request.
#[derive(Clone, Debug)]
pub struct Admitted {
    pub(crate) protocol: &'static Protocol,
    pub method: &'static Method,
    /// Whether its caller has shown a token, or none is needed.
    pub is_known: bool,
    /// Whose token it carries; `None` where none is needed.
    pub holder: Option<Arc<Holder>>,
    /// The client's trace: `traceparent` of W3C Trace Context.
    pub trace: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_found_by_verb_and_path() {
        const NEEDS: Needs = Needs::Nothing;
        let grpc = Method::new("a.v1.B/C", NEEDS);
        assert!(grpc.is_at("POST", "a.v1.B/C"));
        assert!(!grpc.is_at("POST", "a.v1.B/D"));
        let content = Method::new("GET /v1/videos/{id}/content", NEEDS);
        for (verb, path, is_at) in [
            ("GET", "v1/videos/one/content", true),
            ("HEAD", "v1/videos/one/content", true),
            ("POST", "v1/videos/one/content", false),
            ("GET", "v1/videos//content", false),
            ("GET", "v1/videos/one", false),
            ("GET", "v1/videos/one/content/more", false),
            ("GET", "v1/videos/one/two/content", false),
        ] {
            assert_eq!(content.is_at(verb, path), is_at, "{verb} {path}");
        }
        let model = Method::new("GET /v1/models/{*model}", NEEDS);
        for (path, is_at) in [
            ("v1/models/one", true),
            ("v1/models/owner/one", true),
            ("v1/models/", false),
            ("v1/models", false),
        ] {
            assert_eq!(model.is_at("GET", path), is_at, "{path}");
        }
    }
}
