//! The way to a running service, and what its refusals mean to a person.

use std::fmt;
use std::time::Duration;

use prost::Message as _;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_types::pb;

use super::CliError;
use crate::config::Client;
use crate::proto::v1;
use crate::proto::v1::generation_client::GenerationClient;
use crate::proto::v1::hub_client::HubClient;
use crate::proto::v1::jobs_client::JobsClient;
use crate::proto::v1::residency_client::ResidencyClient;
use crate::proto::v1::server_client::ServerClient;

/// Messages that this client takes: an uncompressed 4096 x 4096 picture and more.
const MAX_MESSAGE_BYTES: usize = 256 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) type Wire = InterceptedService<Channel, Credentials>;

/// A connection with its stubs.
#[derive(Clone)]
pub(super) struct Connection {
    wire: Wire,
}

/// Adds the token to every call.
#[derive(Clone)]
pub(super) struct Credentials {
    header: Option<MetadataValue<Ascii>>,
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(header) = &self.header {
            request.metadata_mut().insert("authorization", header.clone());
        }
        Ok(request)
    }
}

impl Connection {
    /// Connects, so that a service that is not there is told at once.
    pub(super) async fn open(client: &Client) -> Result<Connection, CliError> {
        let endpoint = match client.endpoint.split_once("://") {
            Some(_) => client.endpoint.clone(),
            None => format!("http://{}", client.endpoint),
        };
        let unreachable = |problem: String| CliError::Unreachable {
            endpoint: endpoint.clone(),
            problem,
        };
        let channel = Endpoint::from_shared(endpoint.clone())
            .map_err(|problem| unreachable(problem.to_string()))?
            .connect_timeout(CONNECT_TIMEOUT)
            .initial_stream_window_size(8 << 20)
            .initial_connection_window_size(32 << 20)
            .tcp_nodelay(true)
            .connect()
            .await
            .map_err(|problem| unreachable(root_cause(&problem)))?;
        let header = client.token_file.as_deref().map(|file| {
            let failed = |problem: String| CliError::File {
                path: file.display().to_string(),
                problem,
            };
            let token = std::fs::read_to_string(file).map_err(|e| failed(e.to_string()))?;
            format!("Bearer {}", token.trim())
                .parse()
                .map_err(|_| failed("holds no token".to_owned()))
        });
        Ok(Connection {
            wire: InterceptedService::new(
                channel,
                Credentials {
                    header: header.transpose()?,
                },
            ),
        })
    }

    pub(super) fn generation(&self) -> GenerationClient<Wire> {
        GenerationClient::new(self.wire.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    pub(super) fn residency(&self) -> ResidencyClient<Wire> {
        ResidencyClient::new(self.wire.clone())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    pub(super) fn hub(&self) -> HubClient<Wire> {
        HubClient::new(self.wire.clone())
    }

    pub(super) fn jobs(&self) -> JobsClient<Wire> {
        JobsClient::new(self.wire.clone())
    }

    pub(super) fn server(&self) -> ServerClient<Wire> {
        ServerClient::new(self.wire.clone())
    }
}

/// The innermost reason: `Connection refused` rather than `transport error`.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// What the service said, with its details read.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(super) message: String,
    /// The stable reason, or the gRPC code where there is none.
    pub(super) reason: String,
    /// The model that is not there, where that is it.
    pub(super) model: String,
    shortfall: Option<v1::MemoryShortfall>,
}

impl Refusal {
    pub(super) fn of(status: &Status) -> Refusal {
        let mut refusal = Refusal {
            message: status.message().to_owned(),
            reason: format!("{:?}", status.code()).to_uppercase(),
            model: String::new(),
            shortfall: None,
        };
        let details = pb::Status::decode(status.details()).unwrap_or_default().details;
        for any in details {
            if any.type_url.ends_with("/google.rpc.ErrorInfo") {
                if let Ok(info) = pb::ErrorInfo::decode(&any.value[..]) {
                    refusal.reason = info.reason;
                    refusal.model = info.metadata.get("model").cloned().unwrap_or_default();
                }
            } else if any.type_url.ends_with("/moored.v1.MemoryShortfall") {
                refusal.shortfall = v1::MemoryShortfall::decode(&any.value[..]).ok();
            }
        }
        refusal
    }

    /// What a person can do about it.
    fn remedy(&self) -> Option<&'static str> {
        Some(match v1::Reason::from_str_name(&self.reason)? {
            v1::Reason::ModelNotFound => {
                "models.folders (`moored serve --models FOLDER`) adds folders to look in"
            }
            v1::Reason::Unauthenticated => "name the token's file with --token-file or MOORED_TOKEN_FILE",
            v1::Reason::QueueFull
            | v1::Reason::ClientLimit
            | v1::Reason::CardNotReady
            | v1::Reason::ShuttingDown => "try again in a while",
            v1::Reason::MemoryTaken => "`moored status` shows who holds memory; --patience waits longer",
            v1::Reason::LatentNotFound => "latents expire; queue.latent_ttl keeps them longer",
            v1::Reason::WorkerDied => "the service's log has the worker's last words",
            v1::Reason::SlowReader => "write results to a faster place, or ask for fewer in one call",
            v1::Reason::DiskFull => "hub.cache, or HF_HUB_CACHE, names a folder on another disk",
            v1::Reason::Unspecified
            | v1::Reason::PullFailed
            | v1::Reason::InvalidRequest
            | v1::Reason::ModelDamaged
            | v1::Reason::ModelUnsupported
            | v1::Reason::NotBuilt
            | v1::Reason::NeverFits
            | v1::Reason::OutOfMemory
            | v1::Reason::Deadline
            | v1::Reason::Cancelled
            | v1::Reason::NotFinite
            | v1::Reason::LatentMismatch
            | v1::Reason::JobNotFound
            | v1::Reason::InUse
            | v1::Reason::KeyReused
            | v1::Reason::Internal => return None,
        })
    }
}

/// When a fallback would fit, in words.
pub(super) fn when_of(fallback: &v1::Fallback) -> &'static str {
    if fallback.fits_now {
        "now"
    } else {
        "after evicting what is idle"
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(shortfall) = &self.shortfall {
            for holder in &shortfall.holders {
                write!(f, "\n  {} holds {}", holder.name, residency::Bytes(holder.bytes))?;
            }
            for fallback in &shortfall.fallbacks {
                let when = when_of(fallback);
                write!(
                    f,
                    "\n  {} would fit {when} ({})",
                    fallback.label,
                    residency::Bytes(fallback.peak_bytes)
                )?;
            }
        }
        match self.remedy() {
            Some(remedy) => write!(f, "\n  {remedy}"),
            None => Ok(()),
        }
    }
}
