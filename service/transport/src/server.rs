//! The listener and the transport of all protocols.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use calls::{Budget, Metrics};
use config::LimitSettings;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::service::Routes;
use tonic::transport::Server as Transport;

use crate::access::{Access, Gate};
use crate::grpc_web::WithGrpcWeb;
use crate::limits::{Limited, Limits, Tls};
use crate::protocol::Protocols;

/// HTTP/2 windows, large enough for a picture.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// Concurrent streams of one connection; others wait in the client. More than the jobs of a queue, so that a client that has
/// all of them can still cancel one.
const STREAMS_PER_CONNECTION: u32 = 512;
/// Idle time after which a connection is pinged, and time after which it is closed without an answer.
const KEEP_ALIVE: std::time::Duration = std::time::Duration::from_secs(20);

/// Settings of the transport.
pub struct TransportSettings {
    pub limits: LimitSettings,
    /// The tokens of which calls must carry one.
    pub gate: Gate,
    /// The certificates of connections; `None`: they are not encrypted.
    pub tls: Option<Tls>,
    /// Bytes of requests under way.
    pub uploads: Arc<Budget>,
    /// Bytes of the longest message.
    pub longest_message: u64,
    /// Counts calls.
    pub metrics: Arc<Metrics>,
}

/// Why the server failed.
#[derive(Debug, thiserror::Error)]
#[error("the transport failed: {0}")]
pub struct TransportError(#[from] tonic::transport::Error);

/// The methods of each protocol.
#[derive(Clone)]
pub struct Served {
    pub protocols: Protocols,
    pub grpc: Routes,
    pub http: Routes,
}

impl Service<Request<Body>> for Served {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = <Routes as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(())) // as routes always are
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        match self.protocols.is_grpc(&request) {
            true => self.grpc.call(request),
            false => self.http.call(request),
        }
    }
}

/// Serves until `stopped` becomes true; calls that run then are finished by the queue's drain.
///
/// # Errors
/// When the transport fails.
pub async fn serve(
    served: Served,
    settings: TransportSettings,
    listener: TcpListener,
    mut stopped: watch::Receiver<bool>,
) -> Result<(), TransportError> {
    let limits = Limits::new(
        &settings.limits,
        settings.gate.clone(),
        settings.uploads,
        settings.longest_message,
    );
    let incoming = limits.accept(listener, settings.tls);
    let protocols = served.protocols;
    let mut transport = Transport::builder();
    if let Some(age) = settings.limits.connection_age {
        transport = transport.max_connection_age(age);
    }
    let serving = transport
        .accept_http1(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .serve_with_incoming_shutdown(
            WithGrpcWeb::new(Access::new(
                Limited::new(served, limits.clone(), protocols),
                settings.gate,
                settings.metrics,
                protocols,
            )),
            incoming,
            async move {
                let _ = stopped.wait_for(|stopped| *stopped).await; // a dropped sender means the same
            },
        );
    tokio::select! {
        served = serving => Ok(served?),
        () = limits.watch() => Ok(()), // which never returns
    }
}
