//! Calls: how many there are, what of a request is counted, and a span for each.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::transport::server::TcpConnectInfo;
use tracing::Instrument as _;

use super::Limits;
use super::budget::{Client, Exceeded, Taken};
use super::uploads::Upload;
use crate::grpc::status::client_limit;

/// Methods whose requests carry media or latents.
const LARGE: [&str; 6] = [
    "GenerateImage",
    "GenerateVideo",
    "EncodeImage",
    "PutLatent",
    "PutMedia",
    "Plan",
];
/// The method whose handler counts the bytes as they come, and keeps them.
const SELF_COUNTED: &str = "PutMedia";
/// Most bytes of a request of another method. A prompt is 40 KB at the most.
const SMALL_REQUEST_BYTES: u64 = 1 << 20;
/// The method whose request lasts as long as a session: it has its own limit of silence, and its messages are short.
const SESSION: &str = "StreamAudio";
/// Longest silence of a session's client; the session itself ends earlier.
const SESSION_IDLE: Duration = Duration::from_secs(2 * 3600);
/// Methods that show health, status and jobs, or cancel: they may use the spare calls.
const SPARE: [&str; 4] = ["Check", "GetStatus", "List", "Cancel"];

/// A service whose calls are counted.
#[derive(Clone)]
pub(in crate::grpc) struct Limited<S> {
    inner: S,
    limits: Arc<Limits>,
}

impl<S> Limited<S> {
    pub(in crate::grpc) fn new(inner: S, limits: Arc<Limits>) -> Limited<S> {
        Limited { inner, limits }
    }
}

impl Limits {
    /// Counts a call until the result is dropped.
    fn call(&self, client: Client, method: &str) -> Result<Taken, Status> {
        self.calls.take(client, 1).or_else(|exceeded| {
            if SPARE.contains(&method)
                && let Ok(spare) = self.spare_calls.take(client, 1)
            {
                return Ok(spare);
            }
            Err(client_limit(match exceeded {
                Exceeded::Client(bound) => {
                    format!("this client has {bound} calls open, which are the most: end some, or raise limits.calls_per_client")
                }
                Exceeded::All(bound) => {
                    format!("{bound} calls are open, which are the most: try again, or raise limits.calls")
                }
            }))
        })
    }

    /// Drops answers that are not read, for as long as this is polled.
    pub(in crate::grpc) async fn watch(&self) {
        self.readers.watch().await;
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

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let address = request.extensions().get::<TcpConnectInfo>();
        let client: Client = address
            .and_then(|info| info.remote_addr)
            .map(|address| address.ip());
        let path = request.uri().path().trim_start_matches('/').to_owned();
        let method = path.rsplit('/').next().unwrap_or_default();
        let limits = self.limits.clone();
        let call = match limits.call(client, method) {
            Ok(call) => call,
            Err(refusal) => return Box::pin(std::future::ready(Ok(refusal.into_http()))),
        };
        let uploaded = Arc::new(Mutex::new(limits.uploads.nothing(client)));
        let is_session = method == SESSION;
        let longest = match LARGE.contains(&method) {
            true => u64::MAX,
            false if is_session => u64::MAX, // it bounds each message
            false => SMALL_REQUEST_BYTES,
        };
        let span = match client {
            Some(address) => {
                tracing::info_span!("call", method = path, %address, client = tracing::field::Empty)
            }
            None => tracing::info_span!("call", method = path, client = tracing::field::Empty),
        };
        let idle = match is_session {
            true => SESSION_IDLE,
            false => limits.upload_idle,
        };
        // A session takes its messages one by one, and keeps none.
        let counted = (method != SELF_COUNTED && !is_session).then(|| uploaded.clone());
        let request = request.map(|body| Body::new(Upload::new(body, counted, longest, idle)));
        let answer = span.in_scope(|| self.inner.call(request));
        let of_answer = span.clone();
        let answered = async move {
            let began = Instant::now();
            let response = answer.await?;
            tracing::debug!(after = ?began.elapsed(), "answered");
            drop(uploaded); // the handler has taken the bytes or dropped them
            Ok(response.map(|body| Body::new(limits.readers.follow(body, call, of_answer))))
        };
        Box::pin(answered.instrument(span))
    }
}
