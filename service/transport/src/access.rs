//! Access control: a layer that checks the token of a call before any other layer sees the call.

use std::borrow::Cow;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use access::{Holder, Role, TokenHash, Tokens};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use calls::{Client, LogInterval, Metrics, Who};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Either};
use tokio::sync::watch;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response, StatusCode};

use crate::browsers::refuse_other_sites;
use crate::counted::{Counted, count};
use crate::limits::{client_of, lock};
use crate::methods::{Admitted, Method, Needs};
use crate::protocol::{Protocol, Protocols};
use crate::refusal::Refusal;
use crate::withdrawn::{self, Guarded, Withdrawn};

/// The tokens of which calls must carry one, as they are now.
#[derive(Clone)]
pub struct Gate {
    tokens: watch::Receiver<Tokens>,
    /// Time of the last refusal in the log.
    last_refusal_log: Arc<Mutex<LogInterval>>,
}

/// A token that was shown with a call, and counts.
struct Shown {
    hash: TokenHash,
    holder: Arc<Holder>,
}

/// How often it is looked whether the token of a call that is being answered has expired.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(10);
/// Least time between two refusals in the log.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(1);

impl Gate {
    /// The gate of a service with these tokens, which may change.
    pub fn new(tokens: watch::Receiver<Tokens>) -> Gate {
        Gate {
            tokens,
            last_refusal_log: Arc::default(),
        }
    }

    /// One that asks for no token.
    #[cfg(test)]
    pub(crate) fn open() -> Gate {
        Gate::new(watch::channel(Tokens::default()).1)
    }

    /// Whether calls need a token.
    pub(crate) fn needs_token(&self) -> bool {
        self.tokens.borrow().are_needed
    }

    /// Looks for a token in the headers of a call: its holder, or `None` where none is needed.
    ///
    /// # Errors
    /// When the token is missing or wrong: the reason, for people.
    fn check(&self, headers: &HeaderMap) -> Result<Option<Shown>, &'static str> {
        let tokens = self.tokens.borrow();
        if !tokens.are_needed {
            return Ok(None);
        }
        let sent = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        match sent.and_then(token_of).map(|token| TokenHash::of(&token)) {
            Some(hash) => {
                let holder = tokens.holder_by(&hash, SystemTime::now())?;
                Ok(Some(Shown { hash, holder }))
            }
            None => Err("this service requires a token: send `authorization: Bearer TOKEN`"),
        }
    }

    /// Resolves when the token with this hash no longer counts.
    fn withdrawn(&self, hash: TokenHash) -> Withdrawn {
        let mut tokens = self.tokens.clone();
        Box::pin(async move {
            let counts = |tokens: &Tokens| tokens.holder_by(&hash, SystemTime::now()).is_ok();
            while counts(&tokens.borrow_and_update()) {
                match tokio::time::timeout(EXPIRY_INTERVAL, tokens.changed()).await {
                    // They have changed, or one may have expired.
                    Ok(Ok(())) | Err(_) => {}
                    // They never change.
                    Ok(Err(_)) => std::future::pending().await,
                }
            }
        })
    }

    /// Logs a refusal; one a second at the most, so that an attack cannot fill the disk.
    fn log_refusal(&self, client: Client, why: &str) {
        if !lock(&self.last_refusal_log).allow(REFUSAL_LOG_INTERVAL) {
            return;
        }
        let client = match client {
            Some(Who::Address(address)) => address.to_string(),
            Some(Who::Token(_)) | None => "unknown".to_owned(),
        };
        tracing::warn!(client, why, "a call was refused");
    }
}

/// Refuses a call, or what a field of it asks for, to a holder with a smaller role.
pub fn check_role(what: &str, needed: Role, holder: &Holder) -> Result<(), Refusal> {
    if holder.role >= needed {
        return Ok(());
    }
    Err(Refusal::RoleRequired(format!(
        "{what} needs a token with the role {needed}, and that of {:?} has the role {}: ask who runs the service for another one",
        holder.name, holder.role
    )))
}

/// Refuses a call to a holder with a smaller role than its method needs.
fn check_method(method: &Method, holder: &Holder) -> Result<(), Refusal> {
    match method.needs {
        Needs::Nothing => Ok(()),
        Needs::Role(needed) => check_role(method.words(), needed, holder),
    }
}

/// A service whose callers have shown the token, or call a method that needs none. Each call is counted.
#[derive(Clone)]
pub(crate) struct Access<S> {
    inner: S,
    gate: Gate,
    metrics: Arc<Metrics>,
    protocols: Protocols,
}

impl<S> Access<S> {
    pub(crate) fn new(inner: S, gate: Gate, metrics: Arc<Metrics>, protocols: Protocols) -> Access<S> {
        Access {
            inner,
            gate,
            metrics,
            protocols,
        }
    }
}

impl<S> Service<Request<Body>> for Access<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + Unpin + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<Ready<Result<Response<Body>, Infallible>>, Counted<Answered<S::Future>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let protocol = self.protocols.of(&request);
        let method = protocol.method(&request);
        let checked = self.gate.check(request.headers());
        let refused = match &checked {
            Err(why) if method.needs != Needs::Nothing => Some(Refusal::Unauthenticated((*why).to_owned())),
            Ok(Some(shown)) => check_method(method, &shown.holder).err(),
            _ => None,
        };
        // What is public says nothing of anybody, and starts nothing.
        let has_token = matches!(checked, Ok(Some(_))) || method.needs == Needs::Nothing;
        let is_grpc = self.protocols.is_grpc(&request);
        let refused = refused.or_else(|| refuse_other_sites(&request, is_grpc, has_token).err());
        if let Some(refusal) = refused {
            self.gate.log_refusal(client_of(&request), &refusal.to_string());
            count(&self.metrics, protocol, method, Some(refusal.reason().to_owned()));
            let mut response = (protocol.answer)(refusal);
            if method.asks_basic && response.status() == StatusCode::UNAUTHORIZED {
                let basic = HeaderValue::from_static("Basic realm=\"moored\"");
                response.headers_mut().append(WWW_AUTHENTICATE, basic);
            }
            return Either::Left(ready(Ok(response)));
        }
        let (is_known, shown) = (checked.is_ok(), checked.ok().flatten());
        let admitted = Admitted {
            protocol,
            method,
            is_known,
            holder: shown.as_ref().map(|shown| shown.holder.clone()),
            trace: trace_of(request.headers()),
        };
        request.extensions_mut().insert(admitted);
        let answered = self.inner.call(request);
        let answered = match shown {
            None => Either::Left(answered),
            Some(shown) => {
                Either::Right(guarded(answered, self.gate.withdrawn(shown.hash), protocol).boxed())
            }
        };
        Either::Right(Counted {
            answered,
            protocol,
            method,
            metrics: self.metrics.clone(),
        })
    }
}

/// An answer to a call, which ends with its token where it has one.
type Answered<F> = Either<F, BoxFuture<'static, Result<Response<Body>, Infallible>>>;

/// Answers a call for as long as its token counts.
async fn guarded(
    answered: impl Future<Output = Result<Response<Body>, Infallible>>,
    mut withdrawn: Withdrawn,
    protocol: &'static Protocol,
) -> Result<Response<Body>, Infallible> {
    tokio::select! {
        biased;
        response = answered => {
            Ok(response?.map(|body| Body::new(Guarded::new(body, withdrawn, protocol))))
        }
        () = &mut withdrawn => Ok((protocol.answer)(withdrawn::refusal())),
    }
}

/// The trace of a call: 55 characters of the first version of `traceparent` (W3C Trace Context, 3.2).
fn trace_of(headers: &HeaderMap) -> Option<String> {
    let given = headers.get("traceparent")?.to_str().ok()?;
    let is_one = given.len() == 55
        && given.starts_with("00-")
        && given.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f' | '-'));
    is_one.then(|| given.to_owned())
}

/// The token of a header: after `Bearer`, or as the password of `Basic`, which is all that some clients of pictures can send. The scheme
/// is case-insensitive (RFC 9110, 11.1).
fn token_of(header: &str) -> Option<Cow<'_, str>> {
    let (scheme, rest) = header.split_once(' ')?;
    let rest = rest.trim_matches(' ');
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.into());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = String::from_utf8(BASE64_STANDARD.decode(rest).ok()?).ok()?;
    Some(pair.split_once(':')?.1.to_owned().into())
}

#[cfg(test)]
mod tests {
    use access::{Allowance, TokenStore};

    use super::*;

    fn gate(token: Option<&str>) -> Gate {
        let folder = tempfile::tempdir().unwrap();
        let tokens = Tokens::read(&TokenStore::of(folder.path()), token).unwrap();
        Gate::new(watch::channel(tokens).1)
    }

    fn passes(gate: &Gate, header: Option<&'static str>) -> bool {
        let headers = header.map(|header| (AUTHORIZATION, header.parse().unwrap()));
        gate.check(&headers.into_iter().collect()).is_ok()
    }

    #[test]
    fn only_the_right_token_passes() {
        let set = gate(Some("0123456789abcdef"));
        assert!(passes(&set, Some("Bearer 0123456789abcdef")));
        assert!(passes(&set, Some("bearer 0123456789abcdef")));
        assert!(passes(&set, Some("BEARER  0123456789abcdef")));
        assert!(passes(&set, Some("Basic YW55Ym9keTowMTIzNDU2Nzg5YWJjZGVm")));
        for wrong in [
            None,
            Some("Basic 0123456789abcdef"),
            Some("Basic MDEyMzQ1Njc4OWFiY2RlZg=="), // without a colon
            Some("Basic MDEyMzQ1Njc4OWFiY2RlZjo="), // as the name
            Some("Bearer0123456789abcdef"),
            Some("Bearer 0123456789abcdeX"),
            Some("Bearer "),
            Some("0123456789abcdef"),
        ] {
            assert!(!passes(&set, wrong), "{wrong:?}");
        }
        assert!(passes(&gate(None), None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_withdrawn_or_expires_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let store = TokenStore::of(folder.path());
        let make = |name: &str| {
            let made = store.make(name, Role::Observe, Allowance::default(), None, SystemTime::now());
            made.unwrap().0
        };
        let (alice, _bob) = (make("alice"), make("bob"));
        let (change, tokens) = watch::channel(Tokens::read(&store, None).unwrap());
        let gate = Gate::new(tokens);
        let mut withdrawn = gate.withdrawn(TokenHash::of(alice.reveal()));
        assert!(futures::poll!(withdrawn.as_mut()).is_pending());
        store.withdraw("bob").unwrap();
        change.send_replace(Tokens::read(&store, None).unwrap());
        assert!(
            futures::poll!(withdrawn.as_mut()).is_pending(),
            "it was another one"
        );
        store.withdraw("alice").unwrap();
        change.send_replace(Tokens::read(&store, None).unwrap());
        withdrawn.await;
        let lasts = Some(Duration::from_secs(1));
        let ago = SystemTime::now() - Duration::from_secs(60);
        let (expired, _) = store
            .make("carol", Role::Observe, Allowance::default(), lasts, ago)
            .unwrap();
        change.send_replace(Tokens::read(&store, None).unwrap());
        gate.withdrawn(TokenHash::of(expired.reveal())).await;
    }

    #[test]
    fn a_role_may_call_what_needs_it_or_a_smaller_one() {
        let holder = |role| Holder {
            name: "alice".to_owned(),
            role,
            allowance: Allowance::default(),
        };
        let roles = [Role::Observe, Role::Generate, Role::Administer];
        for needed in roles {
            let method = Method::new("moored.v1.Residency/Unload", Needs::Role(needed));
            for role in roles {
                assert_eq!(check_method(&method, &holder(role)).is_ok(), role >= needed);
            }
        }
        let method = Method::new("moored.v1.Residency/Unload", Needs::Role(Role::Administer));
        let told = check_method(&method, &holder(Role::Generate));
        let Err(Refusal::RoleRequired(told)) = told else {
            panic!("{told:?}");
        };
        for word in ["Unload", "administer", "alice", "generate"] {
            assert!(told.contains(word), "{told}");
        }
    }
}
