//! The service as a whole, and `moored.v1.Server`.

use std::sync::Arc;

use api::v1;
use api::v1::generation_server::GenerationServer;
use api::v1::hub_server::HubServer;
use api::v1::jobs_server::JobsServer;
use api::v1::residency_server::ResidencyServer;
use api::v1::server_server::{Server, ServerServer};
use engine::library::Library;
use engine::queue::Queue;
use gpu::CardDescription;
use hub::Pulls;
use residency::{Bytes, Policy};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::service::Routes;
use tonic::transport::Server as Transport;
use tonic::{Request, Response, Status};

use super::caller::Caller;
use super::encodings::Encodings;
use super::health;
use super::limits::{Limited, Limits};
use super::media::MediaStore;
use super::residency::kind_out;
use super::status::status_of;
use super::stream::ResultEncoder;
use crate::host::Host;
use crate::models::Models;
use crate::process::supervisor::WorkerPids;
use crate::threads::{FILES, Turns};

/// Capabilities of this build, as `GetServerInfo` lists them.
const CAPABILITIES: [&str; 14] = [
    "text_to_image",
    "image_to_image",
    "encode_image",
    "decode_latent",
    "latents",
    "media",
    "preview",
    "reserve",
    "quantization",
    "adapters",
    "mask",
    "references",
    "controlnet",
    "audio_sessions",
];
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

/// Everything that a call needs. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) queue: Queue,
    pub(crate) library: Arc<Library>,
    pub(crate) models: Arc<Models>,
    pub(crate) pulls: Pulls,
    pub(crate) started: Instant,
    pub(crate) max_message: Bytes,
    /// Eviction policy; `None`: by the model.
    pub(crate) policy: Option<Policy>,
    pub(crate) host: Arc<Host>,
    pub(crate) workers: WorkerPids,
    pub(crate) decoding: Turns,
    /// What all latents may take, as set.
    pub(crate) latents: Bytes,
    /// Bounds on what clients have open.
    pub(crate) limits: Arc<Limits>,
    pub(crate) encodings: Arc<Encodings>,
    /// Media that clients have uploaded for later requests.
    pub(crate) media: Arc<MediaStore>,
    /// True once the service is shutting down: endless streams end then.
    pub(crate) stopping: watch::Receiver<bool>,
}

impl Service {
    /// The card whose dtype a model is opened for where any would do.
    pub(crate) fn first_card(&self) -> CardDescription {
        self.cards()
            .into_iter()
            .next()
            .unwrap_or_else(|| CardDescription {
                id: "cpu".to_owned(),
                kind: gpu::CardKind::Cpu,
                name: String::new(),
                total: Bytes::ZERO,
                compute_capability: None,
                compute_dtype: "f32".to_owned(),
            })
    }

    /// The encoder of results for a caller.
    pub(super) fn encoder(&self, caller: &Caller) -> ResultEncoder {
        ResultEncoder {
            encodings: self.encodings.clone(),
            client: caller.client(),
        }
    }

    /// The cards of the service.
    pub(super) fn cards(&self) -> Vec<CardDescription> {
        self.queue
            .status()
            .borrow()
            .cards
            .iter()
            .map(|card| card.description.clone())
            .collect()
    }
}

/// Name of an eviction policy in statuses and in `moored doctor`.
pub(crate) fn policy_name(policy: Option<Policy>) -> &'static str {
    match policy {
        Some(Policy::Shared) => "shared",
        Some(Policy::Exclusive) => "exclusive",
        None => "by model",
    }
}

/// Serves until `stopped` becomes true; calls that run then are finished by the queue's drain.
pub(crate) async fn serve(
    service: Service,
    listener: TcpListener,
    mut stopped: watch::Receiver<bool>,
) -> Result<(), tonic::transport::Error> {
    let limits = service.limits.clone();
    let incoming = limits.accept(listener);
    let limit = usize::try_from(service.max_message.0).unwrap_or(usize::MAX);
    let (reporter, health_service) = tonic_health::server::health_reporter();
    health::report(reporter, service.queue.status(), service.stopping.clone()).await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(v1::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    macro_rules! limited {
        ($server:ident) => {
            $server::new(service.clone())
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
        .add_service(limited!(GenerationServer))
        .add_service(limited!(ResidencyServer))
        .add_service(limited!(JobsServer))
        .add_service(limited!(ServerServer))
        .add_service(limited!(HubServer));
    let serving = Transport::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_PER_CONNECTION)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .serve_with_incoming_shutdown(
            Limited::new(routes.routes().prepare(), limits.clone()),
            incoming,
            async move {
                let _ = stopped.wait_for(|stopped| *stopped).await; // a sender that is gone has stopped too
            },
        );
    tokio::select! {
        served = serving => served,
        () = limits.watch() => Ok(()), // which never returns
    }
}

#[tonic::async_trait]
impl Server for Service {
    async fn get_server_info(
        &self,
        _request: Request<v1::GetServerInfoRequest>,
    ) -> Result<Response<v1::ServerInfo>, Status> {
        let capability = |card: &CardDescription| match card.compute_capability {
            Some((major, minor)) => format!("{major}.{minor}"),
            None => String::new(),
        };
        let cards = self.cards();
        let models = self.models.clone();
        let default_model = FILES.run(move || models.default_id(&models.known())).await;
        let default_model = default_model.map_err(|e| status_of(&e))?.unwrap_or_default();
        Ok(Response::new(v1::ServerInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            capabilities: CAPABILITIES
                .into_iter()
                .chain(self.pulls.hub().is_open().then_some(PULL))
                .map(str::to_owned)
                .collect(),
            not_built: Vec::new(),
            cards: cards
                .iter()
                .map(|card| v1::CardInfo {
                    id: card.id.clone(),
                    name: card.name.clone(),
                    kind: kind_out(card.kind),
                    total_bytes: card.total.0,
                    compute_capability: capability(card),
                    compute_dtype: card.compute_dtype.clone(),
                })
                .collect(),
            default_model,
            families: pipelines::catalogue().names().map(str::to_owned).collect(),
            max_message_bytes: self.max_message.0,
        }))
    }
}
