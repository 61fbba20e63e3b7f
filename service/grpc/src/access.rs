//! Access control: a layer that checks the token of a call before any other layer sees the call.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use calls::{Client, LogInterval};
use futures::future::Either;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::header::AUTHORIZATION;
use tonic::codegen::http::{HeaderMap, Request, Response};

use crate::limits::{client_of, lock};
use crate::methods::{Admitted, Needs, method_at};
use crate::refusal::{Answer, Refusal};

/// The token that calls must carry, if there is one.
#[derive(Clone)]
pub struct Token {
    expected: Option<Arc<str>>,
    /// Time of the last refusal in the log.
    last_refusal_log: Arc<Mutex<LogInterval>>,
}

/// A shorter token could be guessed.
const LEAST_CHARACTERS: usize = 16;
/// Least time between two refusals in the log.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(1);

impl Token {
    /// The token of a service; with `None`, calls need no token.
    ///
    /// # Errors
    /// When it is too short: the reason, for people.
    pub fn new(token: Option<&str>) -> Result<Token, String> {
        if token.is_some_and(|token| token.len() < LEAST_CHARACTERS) {
            return Err(format!("is shorter than {LEAST_CHARACTERS} characters"));
        }
        Ok(Token::expecting(token))
    }

    /// Whether calls need a token.
    pub(crate) fn is_set(&self) -> bool {
        self.expected.is_some()
    }

    fn expecting(token: Option<&str>) -> Token {
        Token {
            expected: token.map(Arc::from),
            last_refusal_log: Arc::default(),
        }
    }

    /// Looks for the token in the headers of a call.
    ///
    /// # Errors
    /// When the token is missing or wrong: the reason, for people.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), &'static str> {
        let Some(expected) = &self.expected else {
            return Ok(());
        };
        let sent = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        match sent.and_then(bearer) {
            Some(token) if same(token.as_bytes(), expected.as_bytes()) => Ok(()),
            Some(_) => Err("the token is wrong"),
            None => Err("this service requires a token: send `authorization: Bearer TOKEN`"),
        }
    }

    /// Logs a refusal; one a second at the most, so that an attack cannot fill the disk.
    pub(crate) fn log_refusal(&self, client: Client, why: &str) {
        if !lock(&self.last_refusal_log).allow(REFUSAL_LOG_INTERVAL) {
            return;
        }
        let client = client.map_or_else(|| "unknown".to_owned(), |client| client.to_string());
        tracing::warn!(client, why, "a call was refused");
    }
}

/// A service whose callers have shown the token, or call a method that needs none.
#[derive(Clone)]
pub(crate) struct Access<S> {
    inner: S,
    token: Token,
    answer: Answer,
}

impl<S> Access<S> {
    pub(crate) fn new(inner: S, token: Token, answer: Answer) -> Access<S> {
        Access { inner, token, answer }
    }
}

impl<S> Service<Request<Body>> for Access<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<Ready<Result<Response<Body>, Infallible>>, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let method = method_at(request.uri().path().trim_start_matches('/'));
        let checked = self.token.check(request.headers());
        if let Err(why) = checked
            && method.needs != Needs::Nothing
        {
            self.token.log_refusal(client_of(&request), why);
            let refusal = Refusal::Unauthenticated(why.to_owned());
            return Either::Left(ready(Ok((self.answer)(refusal))));
        }
        let is_known = checked.is_ok();
        request.extensions_mut().insert(Admitted { method, is_known });
        Either::Right(self.inner.call(request))
    }
}

/// The token of a header. The scheme before it is case-insensitive (RFC 9110, 11.1).
fn bearer(header: &str) -> Option<&str> {
    let (scheme, token) = header.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then(|| token.trim_start_matches(' '))
}

/// Constant-time comparison.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (x, y)| difference | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(token: &Token, header: Option<&'static str>) -> bool {
        let headers = header.map(|header| (AUTHORIZATION, header.parse().unwrap()));
        token.check(&headers.into_iter().collect()).is_ok()
    }

    #[test]
    fn only_the_right_token_passes() {
        let token = Token::expecting(Some("0123456789abcdef"));
        assert!(call(&token, Some("Bearer 0123456789abcdef")));
        assert!(call(&token, Some("bearer 0123456789abcdef")));
        assert!(call(&token, Some("BEARER  0123456789abcdef")));
        for wrong in [
            None,
            Some("Basic 0123456789abcdef"),
            Some("Bearer0123456789abcdef"),
            Some("Bearer 0123456789abcdeX"),
            Some("Bearer "),
            Some("0123456789abcdef"),
        ] {
            assert!(!call(&token, wrong), "{wrong:?}");
        }
        assert!(call(&Token::expecting(None), None));
    }

    #[test]
    fn a_short_token_is_refused() {
        assert!(Token::new(Some("short")).is_err());
        assert!(Token::new(Some("0123456789abcdef")).is_ok());
    }
}
