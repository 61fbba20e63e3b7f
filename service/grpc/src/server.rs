//! The server, and `moored.v1.Server`.

use api::v1;
use api::v1::generation_server::GenerationServer;
use api::v1::hub_server::HubServer;
use api::v1::jobs_server::JobsServer;
use api::v1::residency_server::ResidencyServer;
use api::v1::server_server::{Server, ServerServer};
use calls::Service;
use config::LimitSettings;
use gpu::CardDescription;
use residency::Bytes;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic::service::Routes;
use tonic::transport::Server as Transport;
use tonic::{Request, Response, Status};

use crate::access::{Access, Gate};
use crate::convert::card_kind_out;
use crate::generation::GenerationService;
use crate::health;
use crate::hub::HubService;
use crate::jobs::JobsService;
use crate::limits::{Limited, Limits, Tls};
use crate::methods::capabilities;
use crate::residency::ResidencyService;
use crate::status::{answer_of, status_of};

/// Capability that `hub.pull` may switch off.
const PULL: &str = "pull";
/// HTTP/2 windows, large enough for a picture.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;
/// Concurrent streams of one connection; others wait in the client. More than the jobs of a queue, so that a client that has
/// all of them can still cancel one.
const STREAMS_PER_CONNECTION: u32 = 512;
/// Idle time after which a connection is pinged, and time after which it is closed without an answer.
const KEEP_ALIVE: std::time::Duration = std::time::Duration::from_secs(20);

/// Settings of the server.
pub struct GrpcSettings {
    pub limits: LimitSettings,
    /// The tokens of which calls must carry one.
    pub gate: Gate,
    /// The certificates of connections; `None`: they are not encrypted.
    pub tls: Option<Tls>,
    /// The longest message, in both directions.
    pub max_message: Bytes,
    /// Names of the families of models that the service runs.
    pub families: Vec<String>,
}

/// Why the server failed.
#[derive(Debug, thiserror::Error)]
#[error("the gRPC transport failed: {0}")]
pub struct TransportError(#[from] tonic::transport::Error);

/// Serves until `stopped` becomes true; calls that run then are finished by the queue's drain.
///
/// # Errors
/// When the transport fails.
pub async fn serve(
    service: Service,
    settings: GrpcSettings,
    listener: TcpListener,
    mut stopped: watch::Receiver<bool>,
) -> Result<(), TransportError> {
    let limits = Limits::new(&settings.limits, settings.gate.clone(), service.uploads.clone());
    let gate = settings.gate.clone();
    let incoming = limits.accept(listener, settings.tls.clone());
    let limit = usize::try_from(settings.max_message.0).unwrap_or(usize::MAX);
    let connection_age = settings.limits.connection_age;
    let (reporter, health_service) = tonic_health::server::health_reporter();
    health::report(reporter, service.card_memory.reports(), service.stopping.clone()).await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    macro_rules! limited {
        ($server:ident, $service:expr) => {
            $server::new($service)
                .max_decoding_message_size(limit)
                .max_encoding_message_size(limit)
        };
    }
    let mut routes = Routes::builder();
    routes.add_service(health_service);
    if let Ok(v1) = reflection().build_v1() {
        routes.add_service(v1);
    }
    if let Ok(v1alpha) = reflection().build_v1alpha() {
        routes.add_service(v1alpha); // which most tools still use
    }
    routes
        .add_service(limited!(
            GenerationServer,
            GenerationService(service.generation.clone())
        ))
        .add_service(limited!(
            ResidencyServer,
            ResidencyService(service.card_memory.clone())
        ))
        .add_service(limited!(JobsServer, JobsService(service.jobs.clone())))
        .add_service(limited!(HubServer, HubService(service.pulling.clone())))
        .add_service(limited!(ServerServer, ServerService { service, settings }));
    let mut transport = Transport::builder();
    if let Some(age) = connection_age {
        transport = transport.max_connection_age(age);
    }
    let serving = transport
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .serve_with_incoming_shutdown(
            Access::new(
                Limited::new(routes.routes().prepare(), limits.clone(), answer_of),
                gate,
                answer_of,
            ),
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

/// The calls of `moored.v1.Server`.
struct ServerService {
    service: Service,
    settings: GrpcSettings,
}

#[tonic::async_trait]
impl Server for ServerService {
    async fn get_server_info(
        &self,
        _request: Request<v1::GetServerInfoRequest>,
    ) -> Result<Response<v1::ServerInfo>, Status> {
        let capability = |card: &CardDescription| match card.compute_capability {
            Some((major, minor)) => format!("{major}.{minor}"),
            None => String::new(),
        };
        let cards = self.service.card_memory.cards();
        let default_model = self.service.card_memory.default_model().await;
        let default_model = default_model.map_err(|e| status_of(&e))?.unwrap_or_default();
        Ok(Response::new(v1::ServerInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            capabilities: capabilities()
                .chain(self.service.pulling.is_open().then_some(PULL))
                .map(str::to_owned)
                .collect(),
            not_built: Vec::new(),
            cards: cards
                .iter()
                .map(|card| v1::CardInfo {
                    id: card.id.clone(),
                    name: card.name.clone(),
                    kind: card_kind_out(card.kind),
                    total_bytes: card.total.0,
                    compute_capability: capability(card),
                    compute_dtype: card.compute_dtype.clone(),
                })
                .collect(),
            default_model,
            families: self.settings.families.clone(),
            max_message_bytes: self.settings.max_message.0,
        }))
    }
}
