//! Calls: bounds on their number, on the bytes of their requests, and a log span for each.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use access::Holder;
use calls::{Client, Exceeded, Taken, Who, client_with};
use http_body::Body as _;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tracing::Instrument as _;

use super::accept::ConnectionInfo;
use super::entrance::PublicCall;
use super::uploads::{Upload, too_large};
use super::{Limits, PUBLIC_CALL};
use crate::methods::{Admitted, Method, Needs};
use crate::protocol::Protocols;
use crate::refusal::Refusal;

/// Bytes before a message of gRPC.
const MESSAGE_HEAD_BYTES: u64 = 5;

/// A service whose calls are counted.
#[derive(Clone)]
pub(crate) struct Limited<S> {
    inner: S,
    limits: Arc<Limits>,
    protocols: Protocols,
}

impl<S> Limited<S> {
    pub(crate) fn new(inner: S, limits: Arc<Limits>, protocols: Protocols) -> Limited<S> {
        Limited {
            inner,
            limits,
            protocols,
        }
    }
}

/// A call that is counted, until this is dropped.
pub(super) struct OpenCall {
    _taken: Taken,
    /// Its place among the endless calls, if it is one.
    _endless: Option<Taken>,
    _public: Option<PublicCall>,
}

impl OpenCall {
    pub(super) fn counted(taken: Taken) -> OpenCall {
        OpenCall {
            _taken: taken,
            _endless: None,
            _public: None,
        }
    }
}

impl Limits {
    /// Assigns a place to a call: with the token among its client's places, without it among the few for methods that need none.
    fn admit(&self, connection: Option<&ConnectionInfo>, call: &Admitted) -> Result<OpenCall, Refusal> {
        let client = client_of_call(connection, call.holder.as_deref());
        if call.is_known {
            let known = connection.map_or(Ok(()), |connection| connection.place.admit(client));
            known.map_err(|exceeded| {
                let refused = refusal(exceeded, "connections", "close some", "limits.connections");
                Refusal::ClientLimit(refused)
            })?;
            return self.call(client, call.method).map(OpenCall::counted);
        }
        if call.method.needs != Needs::Nothing {
            let problem = "the token of this call was not checked: this is a fault of the service, report it";
            return Err(Refusal::Unauthenticated(problem.to_owned())); // the layer of access is missing
        }
        let taken = self.public_calls.take(client, 1);
        let endless = call.method.is_endless;
        let endless = endless.then(|| self.endless_public_calls.take(client, 1));
        Ok(OpenCall {
            _taken: taken.map_err(|exceeded| refusal_of_public(exceeded, "calls"))?,
            _endless: endless
                .transpose()
                .map_err(|exceeded| refusal_of_public(exceeded, "calls of Health/Watch"))?,
            _public: connection.map(|connection| connection.place.public_call()),
        })
    }

    /// Counts a call until the result is dropped.
    fn call(&self, client: Client, method: &Method) -> Result<Taken, Refusal> {
        self.calls.take(client, 1).or_else(|exceeded| {
            if method.is_spare
                && let Ok(spare) = self.spare_calls.take(client, 1)
            {
                return Ok(spare);
            }
            Err(Refusal::ClientLimit(refusal(
                exceeded,
                "calls",
                "end some",
                "limits.calls",
            )))
        })
    }

    /// Drops answers that are not read, for as long as this is polled.
    pub(crate) async fn watch(&self) {
        tokio::join!(self.readers.watch(), self.public_readers.watch());
    }
}

/// The client whose limits a call counts against: its token, without one its address.
fn client_of_call(connection: Option<&ConnectionInfo>, holder: Option<&Holder>) -> Client {
    match holder {
        Some(holder) => client_with(holder),
        None => connection.and_then(|connection| connection.place.client()),
    }
}

/// The address of a request.
pub(crate) fn client_of<B>(request: &http::Request<B>) -> Client {
    let connection = request.extensions().get::<ConnectionInfo>();
    connection.and_then(|connection| connection.place.client())
}

fn refusal_of_public(exceeded: Exceeded, what: &str) -> Refusal {
    Refusal::ClientLimit(match exceeded {
        Exceeded::Client(most) => format!(
            "this client has {most} {what} without the token open, which are the most: end some, or send the token"
        ),
        Exceeded::All(most) => format!(
            "{most} {what} without the token may be open, and the last are kept for clients that have none: send the token, or \
             try again later"
        ),
    })
}

/// The error text for a call or connection beyond a bound, for people.
fn refusal(exceeded: Exceeded, what: &str, remedy: &str, setting: &str) -> String {
    match exceeded {
        Exceeded::Client(bound) => format!(
            "this client has {bound} {what} open, which are the most: {remedy}, or raise {setting}_per_client"
        ),
        Exceeded::All(bound) => format!(
            "{bound} {what} may be open, and the last are kept for clients that have none: try again, or raise {setting}"
        ),
    }
}

impl<S> Service<http::Request<Body>> for Limited<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let connection = request.extensions().get::<ConnectionInfo>().cloned();
        let address = client_of(&request);
        if let Some(connection) = &connection {
            request.extensions_mut().insert(connection.tcp.clone()); // where tonic looks for the address
        }
        let path = request.uri().path().trim_start_matches('/').to_owned();
        let limits = self.limits.clone();
        // The access layer sets this. Without that layer no caller counts as known.
        let admitted = request.extensions().get().cloned();
        let admitted: Admitted = admitted.unwrap_or_else(|| {
            let protocol = self.protocols.of(&request);
            Admitted {
                protocol,
                method: protocol.method(&request),
                is_known: false,
                holder: None,
                trace: None,
            }
        });
        let protocol = admitted.protocol;
        let call = match limits.admit(connection.as_ref(), &admitted) {
            Ok(call) => call,
            Err(refusal) => return Box::pin(std::future::ready(Ok((protocol.answer)(refusal)))),
        };
        let (requests, is_public) = (admitted.method.requests, !admitted.is_known);
        let longest = requests.longest_bytes(is_public);
        let whole = is_public.then_some(PUBLIC_CALL);
        let idle = requests.idle(limits.upload_idle);
        let span = match address {
            Some(Who::Address(address)) => {
                tracing::info_span!("call", method = path, %address, client = tracing::field::Empty)
            }
            Some(Who::Token(_)) | None => {
                tracing::info_span!("call", method = path, client = tracing::field::Empty)
            }
        };
        let client = client_of_call(connection.as_ref(), admitted.holder.as_deref());
        let uploaded = Arc::new(Mutex::new(limits.uploads.nothing(client)));
        // The few bytes of a spare call are not counted: they hinder no other call, and other calls must not hinder it.
        let counted = (!is_public && !admitted.method.is_spare).then(|| uploaded.clone());
        let at_most = longest.min(limits.longest_message.saturating_add(MESSAGE_HEAD_BYTES));
        if request.body().size_hint().lower() > at_most && requests.longest_message_bytes().is_none() {
            return Box::pin(std::future::ready(Ok((protocol.answer)(too_large(at_most)))));
        }
        let by_message = requests.longest_message_bytes();
        let request = request.map(|body| {
            let upload = Upload::new(body, counted, longest, idle);
            let upload = match whole {
                Some(whole) => upload.within(whole),
                None => upload,
            };
            Body::new(match by_message {
                Some(longest) => upload.by_message(longest),
                None => upload,
            })
        });
        let answer = span.in_scope(|| self.inner.call(request));
        let of_answer = span.clone();
        let answered = async move {
            let began = Instant::now();
            let response = answer.await?;
            tracing::debug!(after = ?began.elapsed(), "answered");
            drop(uploaded); // the handler has taken the bytes or dropped them
            let readers = match is_public {
                true => &limits.public_readers,
                false => &limits.readers,
            };
            Ok(response.map(|body| Body::new(readers.follow(body, call, of_answer, protocol))))
        };
        Box::pin(answered.instrument(span))
    }
}
