//! The server, and `moored.v1.Server`.

use access::Role;
use api::v1;
use api::v1::generation_server::GenerationServer;
use api::v1::hub_server::HubServer;
use api::v1::jobs_server::JobsServer;
use api::v1::residency_server::ResidencyServer;
use api::v1::server_server::{Server, ServerServer};
use calls::Service;
use gpu::CardDescription;
use residency::Bytes;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use transport::{Admitted, Method, Needs, Protocol};

use crate::convert::card_kind_out;
use crate::generation::GenerationService;
use crate::health;
use crate::hub::HubService;
use crate::jobs::JobsService;
use crate::methods::{METHODS, capabilities};
use crate::residency::ResidencyService;
use crate::status::{answer_of, status_of};

/// Capability that `hub.pull` may switch off.
const PULL: &str = "pull";
/// Settings of the calls of `moored.v1.Server`, and of all messages.
pub struct GrpcSettings {
    /// The longest message, in both directions.
    pub max_message: Bytes,
    /// Names of the families of models that the service runs.
    pub families: Vec<String>,
}

/// gRPC, as the transport knows it.
pub static PROTOCOL: Protocol = Protocol {
    name: "grpc",
    methods: METHODS,
    // Only to whom all else is allowed it is said that a method does not exist.
    unknown: Method::new("", Needs::Role(Role::Administer)),
    answer: answer_of,
    has_trailers: true,
};

/// The gRPC services.
pub async fn routes(service: Service, settings: GrpcSettings) -> Routes {
    let limit = usize::try_from(settings.max_message.0).unwrap_or(usize::MAX);
    let (reporter, health_service) = tonic_health::server::health_reporter();
    health::report(reporter, service.card_memory.reports(), service.leaving.clone()).await;
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
    routes.routes().prepare()
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
        request: Request<v1::GetServerInfoRequest>,
    ) -> Result<Response<v1::ServerInfo>, Status> {
        let admitted = request.extensions().get::<Admitted>();
        let holder = admitted.and_then(|admitted| admitted.holder.as_deref());
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
            account: holder.map_or_else(String::new, |holder| holder.name.clone()),
            role: holder.map_or(Role::Administer, |holder| holder.role).to_string(),
        }))
    }
}
