//! The connection to a running service, and its errors with remedies.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use access::{Credential, Fingerprint};
use api::v1;
use api::v1::generation_client::GenerationClient;
use api::v1::hub_client::HubClient;
use api::v1::jobs_client::JobsClient;
use api::v1::residency_client::ResidencyClient;
use api::v1::server_client::ServerClient;
use config::bounded;
use config::{Address, ClientSettings};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use prost::Message as _;
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::codegen::http::header::AUTHORIZATION;
use tonic::codegen::http::{HeaderValue, Request as HttpRequest, Response};
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_types::pb;

use crate::pinned::PinnedConnector;
use crate::wire::{Answers, WireError};
use crate::{CliError, interrupt};

/// Most bytes of a message that this client receives: more than an uncompressed 4096 x 4096 picture.
const MAX_MESSAGE_BYTES: usize = 256 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Which model a call is about: a proxy before several boxes sends equal models to one of them. The Python client writes it alike.
const MODEL_HEADER: &str = "x-moored-model";
/// The box that answered, as such a proxy says; or the one that is asked.
const BOX_HEADER: &str = "x-moored-box";
/// Most bytes of a model in its header.
const MODEL_AT_MOST: usize = 256;
/// What is escaped in a model's name: all but letters, digits and these signs.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~')
    .remove(b'/')
    .remove(b':')
    .remove(b'@')
    .remove(b'!')
    .remove(b'$')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')')
    .remove(b'*')
    .remove(b',')
    .remove(b';')
    .remove(b'=')
    .remove(b'&');

pub(super) type Wire = InterceptedService<Answers, Credentials>;

/// A connection with its stubs.
#[derive(Clone)]
pub(super) struct Connection {
    wire: Wire,
    channel: Channel,
    /// Value of `authorization`.
    header: Option<HeaderValue>,
    credentials: Credentials,
}

/// Adds the token to every call, and what a proxy before several boxes has to know.
#[derive(Clone)]
pub(super) struct Credentials {
    header: Option<MetadataValue<Ascii>>,
    model: Option<MetadataValue<Ascii>>,
    /// The box that all calls are for, once there is one.
    at: Arc<Mutex<Option<MetadataValue<Ascii>>>>,
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(header) = &self.header {
            request.metadata_mut().insert("authorization", header.clone());
        }
        if let Some(model) = &self.model {
            request.metadata_mut().insert(MODEL_HEADER, model.clone());
        }
        if let Some(at) = &*self.at.lock().unwrap_or_else(PoisonError::into_inner) {
            request.metadata_mut().insert(BOX_HEADER, at.clone());
        }
        Ok(request)
    }
}

/// A model as its header has it: without formats and adapters, which follow a plus, and with what is no plain character escaped.
fn model_of_header(model: &str) -> Option<MetadataValue<Ascii>> {
    let base = model.split('+').next().unwrap_or_default();
    let mut written = utf8_percent_encode(base, ESCAPED).to_string();
    written.truncate(MODEL_AT_MOST);
    match written.is_empty() {
        true => None,
        false => written.parse().ok(),
    }
}

/// Endpoint of the last connection, for the message when it is lost.
static CONNECTED: Mutex<String> = Mutex::new(String::new());

fn endpoint() -> String {
    CONNECTED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The error of a stream that ended without its last event, for example because a proxy dropped it.
pub(super) fn cut() -> CliError {
    CliError::Lost { endpoint: endpoint() }
}

/// The error, if this status means that the connection was lost, or that another server answered.
pub(super) fn lost(status: &Status) -> Option<CliError> {
    let of_connection = matches!(
        status.code(),
        Code::Unknown | Code::Unavailable | Code::Internal | Code::Cancelled
    );
    // A status that the service sent has no source on this side.
    let is_lost = of_connection && status.details().is_empty() && std::error::Error::source(status).is_some();
    is_lost.then(|| WireError::of(status, &endpoint()).map_or_else(cut, CliError::Wire))
}

/// Where a service must listen to answer this client; `None` for a service elsewhere.
pub(super) fn listen_address(client: &ClientSettings) -> Option<SocketAddr> {
    Address::of(&client.endpoint).ok()?.listen
}

impl Connection {
    /// Connects at once, so that an unreachable service is an error here.
    pub(super) async fn open(client: &ClientSettings) -> Result<Connection, CliError> {
        let address = Address::of(&client.endpoint).map_err(CliError::Usage)?;
        let kept = kept_for(client, &address)?;
        let header = header_of(client, kept.as_ref())?;
        if header.is_some() && !address.encrypted && !address.is_here && !client.insecure_token {
            return Err(CliError::InsecureToken {
                endpoint: address.url,
            });
        }
        let unreachable = |problem: String| CliError::Unreachable {
            endpoint: address.url.clone(),
            problem,
        };
        let own = own_certificate(client)?;
        let own = own
            .as_ref()
            .map(|(certificate, key)| (&certificate[..], &key[..]));
        let fingerprint = fingerprint_of(client, kept.as_ref())?;
        check_fingerprint(&address, fingerprint)?;
        let connector = fingerprint
            .map(|fingerprint| PinnedConnector::new(fingerprint, own))
            .transpose();
        let connector = connector.map_err(|problem| unusable_certificate(client, problem))?;
        let connected = async {
            let channel = match connector {
                // tonic would ask for a TLS of its own at https://, and dials the same machine and port at http://.
                Some(connector) => {
                    let url = address.url.replacen("https://", "http://", 1);
                    let endpoint = endpoint_at(url).map_err(|problem| unreachable(root_cause(&problem)))?;
                    endpoint.connect_with_connector(connector).await
                }
                None => {
                    let mut endpoint = endpoint_at(address.url.clone());
                    if address.encrypted {
                        let tls = tls(client.ca_file.as_deref(), own)?;
                        endpoint = endpoint.and_then(|endpoint| endpoint.tls_config(tls));
                    }
                    let endpoint = endpoint.map_err(|problem| unreachable(root_cause(&problem)))?;
                    endpoint.connect().await
                }
            };
            channel.map_err(|problem| {
                let known = WireError::of(&problem, &address.url);
                known.map_or_else(|| unreachable(root_cause(&problem)), CliError::Wire)
            })
        };
        let channel = interrupt::or(connected).await?;
        address
            .url
            .clone_into(&mut CONNECTED.lock().unwrap_or_else(PoisonError::into_inner));
        let own = header
            .as_ref()
            .and_then(|header| HeaderValue::from_bytes(header.as_bytes()).ok());
        let at = client.at_box.as_deref().and_then(|name| name.parse().ok());
        let credentials = Credentials {
            header,
            model: None,
            at: Arc::new(Mutex::new(at)),
        };
        Ok(Connection {
            wire: InterceptedService::new(Answers::of(channel.clone()), credentials.clone()),
            channel,
            header: own,
            credentials,
        })
    }

    /// The same connection for calls about a model.
    pub(super) fn about(&self, model: Option<&v1::ModelRef>) -> Connection {
        let mut credentials = self.credentials.clone();
        credentials.model = model.and_then(|model| model_of_header(&model.id));
        Connection {
            wire: InterceptedService::new(Answers::of(self.channel.clone()), credentials.clone()),
            channel: self.channel.clone(),
            header: self.header.clone(),
            credentials,
        }
    }

    /// Has all further calls go to the box that has answered so: it alone has what was uploaded.
    pub(super) fn stay(&self, answered: &MetadataMap) {
        if let Some(at) = answered.get(BOX_HEADER) {
            *self.credentials.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(at.clone());
        }
    }

    /// Sends a request that is none of gRPC's, with the token.
    ///
    /// # Errors
    /// Those of the connection.
    pub(super) async fn http(&self, mut request: HttpRequest<Body>) -> Result<Response<Body>, CliError> {
        if let Some(header) = &self.header {
            request.headers_mut().insert(AUTHORIZATION, header.clone());
        }
        let mut channel = self.channel.clone();
        let failed = |problem: tonic::transport::Error| {
            WireError::of(&problem, &endpoint()).map_or_else(cut, CliError::Wire)
        };
        poll_fn(|context| channel.poll_ready(context))
            .await
            .map_err(failed)?;
        channel.call(request).await.map_err(failed)
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

    /// The health service of gRPC itself.
    pub(super) fn health(&self) -> HealthClient<Wire> {
        HealthClient::new(self.wire.clone())
    }

    pub(super) fn server(&self) -> ServerClient<Wire> {
        ServerClient::new(self.wire.clone())
    }
}

/// What connections have in common.
fn endpoint_at(url: String) -> Result<Endpoint, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(url)?
        .connect_timeout(CONNECT_TIMEOUT)
        .initial_stream_window_size(8 << 20)
        .initial_connection_window_size(32 << 20)
        .tcp_nodelay(true);
    Ok(endpoint)
}

/// Refuses a fingerprint where there is no certificate that could have it: who names one means to know who answers.
///
/// # Errors
/// [`CliError::Usage`].
pub(super) fn check_fingerprint(address: &Address, fingerprint: Option<Fingerprint>) -> Result<(), CliError> {
    match fingerprint {
        Some(_) if !address.encrypted => Err(CliError::Usage(format!(
            "a fingerprint is for TLS, and {} is reached without it: write {}, or leave the fingerprint out",
            address.url,
            address.url.replacen("http://", "https://", 1)
        ))),
        _ => Ok(()),
    }
}

/// The fingerprint of the service's certificate: as set, else as it is kept for the address.
fn fingerprint_of(
    client: &ClientSettings,
    kept: Option<&Credential>,
) -> Result<Option<Fingerprint>, CliError> {
    let kept = kept.map(|kept| kept.fingerprint.as_str()).unwrap_or_default();
    match client.fingerprint {
        None if !kept.is_empty() => Ok(Some(kept.parse().map_err(CliError::Usage)?)),
        set => Ok(set),
    }
}

/// What is kept for this address (`moored token use`).
fn kept_for(client: &ClientSettings, address: &Address) -> Result<Option<Credential>, CliError> {
    let Some(file) = &client.credentials else {
        return Ok(None);
    };
    let kept = access::Credentials::read(file).map_err(|problem| CliError::file(file, problem))?;
    Ok(kept.of(&address.url).cloned())
}

/// The `authorization` header: with the token of a file, else with that which is kept for the address.
fn header_of(
    client: &ClientSettings,
    kept: Option<&Credential>,
) -> Result<Option<MetadataValue<Ascii>>, CliError> {
    let (token, file) = match (&client.token, &client.token_file, kept) {
        (Some(token), ..) => (token.reveal().to_owned(), Path::new("")),
        (None, Some(file), _) => {
            let token = bounded::token(file).map_err(|problem| CliError::file(file, problem))?;
            (token, file.as_path())
        }
        (None, None, Some(kept)) => (
            kept.token.clone(),
            client.credentials.as_deref().unwrap_or(Path::new("")),
        ),
        (None, None, None) => return Ok(None),
    };
    let mut header: MetadataValue<Ascii> = format!("Bearer {token}").parse().map_err(|_| {
        CliError::file(
            file,
            "the token has characters that are not ASCII: write the token of the service",
        )
    })?;
    header.set_sensitive(true); // it is shown nowhere, and kept in no table of the connection
    Ok(Some(header))
}

/// A certificate and its key, in PEM.
type OwnCertificate = (Vec<u8>, Vec<u8>);

/// The certificate of this client and its key.
fn own_certificate(client: &ClientSettings) -> Result<Option<OwnCertificate>, CliError> {
    let read = |file: &Path| {
        gpu::read_bounded(file, bounded::SETTING_BYTES).map_err(|problem| CliError::file(file, problem))
    };
    let own = client.certificate.as_ref();
    own.map(|(certificate, key)| Ok((read(certificate)?, read(key)?)))
        .transpose()
}

fn unusable_certificate(client: &ClientSettings, problem: String) -> CliError {
    let file = client
        .certificate
        .as_ref()
        .map_or(Path::new(""), |(certificate, _)| certificate.as_path());
    CliError::file(file, problem)
}

/// TLS with the CA certificates of a file, or the system's; with a certificate of this client, if it has one.
fn tls(ca_file: Option<&Path>, own: Option<(&[u8], &[u8])>) -> Result<ClientTlsConfig, CliError> {
    // A server that has not agreed to HTTP/2 is recognised by its answer.
    let mut config = ClientTlsConfig::new().assume_http2(true);
    if let Some((certificate, key)) = own {
        config = config.identity(Identity::from_pem(certificate, key));
    }
    let Some(file) = ca_file else {
        return Ok(config.with_native_roots());
    };
    let pem =
        gpu::read_bounded(file, bounded::SETTING_BYTES).map_err(|problem| CliError::file(file, problem))?;
    Ok(config.ca_certificate(Certificate::from_pem(pem)))
}

/// The innermost reason: `Connection refused` rather than `transport error`.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

/// An error status of the service, with its details decoded.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(super) message: String,
    /// The stable reason, or the gRPC code where there is none.
    pub(super) reason: String,
    /// The id of the missing model; empty for other errors.
    pub(super) model: String,
    /// Options whose fields are wrong, where their names differ.
    options: Vec<&'static str>,
    shortfall: Option<v1::MemoryShortfall>,
    /// After which time the service may not refuse it any more.
    retry_after: Option<Duration>,
}

impl Refusal {
    pub(super) fn of(status: &Status) -> Refusal {
        let mut refusal = Refusal {
            message: status.message().to_owned(),
            reason: format!("{:?}", status.code()).to_uppercase(),
            model: String::new(),
            options: Vec::new(),
            shortfall: None,
            retry_after: None,
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
            } else if any.type_url.ends_with("/google.rpc.BadRequest") {
                let wrong = pb::BadRequest::decode(&any.value[..]).unwrap_or_default();
                let fields = wrong.field_violations.iter();
                let options: BTreeSet<_> = fields.filter_map(|wrong| option_of(&wrong.field)).collect();
                refusal.options = options.into_iter().collect();
            } else if any.type_url.ends_with("/google.rpc.RetryInfo")
                && let Ok(info) = pb::RetryInfo::decode(&any.value[..])
            {
                refusal.retry_after = info.retry_delay.and_then(|delay| delay.try_into().ok());
            }
        }
        refusal
    }

    /// After which time to ask again, where nothing was begun.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        use v1::Reason::{CardNotReady, ClientLimit, DiskNotReady, QueueFull, TokenLimit};
        let is_of_now = [QueueFull, ClientLimit, TokenLimit, CardNotReady, DiskNotReady]
            .iter()
            .any(|reason| self.reason == reason.as_str_name());
        self.retry_after.filter(|_| is_of_now)
    }

    /// Whether a model that the request names is missing.
    pub(super) fn is_of_missing_model(&self) -> bool {
        self.reason == v1::Reason::ModelNotFound.as_str_name()
    }

    /// A remedy for people.
    fn remedy(&self) -> Option<Cow<'static, str>> {
        if !self.options.is_empty() {
            return Some(format!("the option is {}", self.options.join(", ")).into());
        }
        self.remedy_of_reason().map(Cow::Borrowed)
    }

    fn remedy_of_reason(&self) -> Option<&'static str> {
        Some(match v1::Reason::from_str_name(&self.reason)? {
            v1::Reason::ModelNotFound => {
                "`moored pull OWNER/NAME` downloads one; models.folders (`moored serve --models FOLDER`) adds folders to look in"
            }
            v1::Reason::Unauthenticated => {
                "name the token's file with --token-file, or keep the token for this address with `moored token use`; that of \
                 MOORED_TOKEN_FILE or of a configuration file goes to the address beside it alone"
            }
            // A limit of a token says by itself when it may work again, if ever.
            v1::Reason::TokenLimit => return None,
            v1::Reason::QueueFull
            | v1::Reason::ClientLimit
            | v1::Reason::CardNotReady
            | v1::Reason::DiskNotReady
            | v1::Reason::NotKept
            | v1::Reason::ShuttingDown => "try again in a while",
            v1::Reason::MemoryTaken => {
                "`moored status` shows who holds memory; a job waits longer with --patience"
            }
            v1::Reason::LatentNotFound => "latents expire; queue.latent_ttl keeps them longer",
            v1::Reason::WorkerDied => "the service's log says how the worker ended",
            v1::Reason::SlowReader => "write results to a faster place, or ask for fewer in one call",
            v1::Reason::DiskFull => "hub.cache, or HF_HUB_CACHE, names a folder on another disk",
            v1::Reason::Unspecified
            | v1::Reason::Cancelled
            | v1::Reason::RoleRequired
            | v1::Reason::OtherSite
            | v1::Reason::PullFailed
            | v1::Reason::InvalidRequest
            | v1::Reason::ModelDamaged
            | v1::Reason::ModelChanged
            | v1::Reason::ModelUnsupported
            | v1::Reason::NotBuilt
            | v1::Reason::NeverFits
            | v1::Reason::OutOfMemory
            | v1::Reason::Deadline
            | v1::Reason::NotFinite
            | v1::Reason::LatentMismatch
            | v1::Reason::JobNotFound
            | v1::Reason::InUse
            | v1::Reason::KeyReused
            | v1::Reason::Internal => return None,
        })
    }
}

/// Fields of requests, with the lists that they are in, and the options that set them by another name.
const OPTIONS: [(&str, &str); 17] = [
    ("beats_per_minute", "--bpm"),
    ("controls.end", "--control-steps"),
    ("controls.id", "--control"),
    ("controls.image", "--control"),
    ("controls.mode", "--control-mode"),
    ("controls.scale", "--control-scale"),
    ("controls.start", "--control-steps"),
    ("controls", "--control"),
    ("end_image", "--end"),
    ("frames_per_second", "--fps"),
    ("init_image", "--init"),
    ("model.adapters", "--lora"),
    ("negative_prompt", "--negative"),
    ("references", "--reference"),
    ("tracks", "--track"),
    ("window_end_seconds", "--to"),
    ("window_start_seconds", "--from"),
];

/// The option of a field, as `references` or `controls[0].scale`, or of what the field is a part of; `None` where it has the field's name.
fn option_of(field: &str) -> Option<&'static str> {
    let parts = field.split('.');
    let parts: Vec<&str> = parts.filter_map(|part| part.split('[').next()).collect();
    (1..=parts.len()).rev().find_map(|count| {
        let path = parts.get(..count)?.join(".");
        let found = OPTIONS.iter().find(|(of, _)| *of == path);
        found.map(|(_, option)| *option)
    })
}

/// When an alternative would fit, in words.
pub(super) fn when_of(fallback: &v1::Fallback) -> &'static str {
    if fallback.fits_now {
        "now"
    } else {
        "after evicting what is idle"
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&wording::one_line(&self.message))?;
        if let Some(shortfall) = &self.shortfall {
            for holder in &shortfall.holders {
                write!(
                    f,
                    "\n  {} holds {}",
                    wording::one_line(&holder.name),
                    residency::Bytes(holder.bytes)
                )?;
            }
            for fallback in &shortfall.fallbacks {
                let when = when_of(fallback);
                write!(
                    f,
                    "\n  {} would fit {when} ({})",
                    wording::one_line(&fallback.label),
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use tonic_types::{ErrorDetails, FieldViolation, StatusExt as _};

    use super::*;
    use crate::arguments::Arguments;

    #[tokio::test]
    async fn a_fingerprint_is_refused_where_no_certificate_could_have_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("credentials.json");
        let pinned = Fingerprint::of(b"certificate");
        let kept = Credential {
            token: "secret".to_owned(),
            fingerprint: pinned.to_string(),
        };
        access::Credentials::keep(&file, "http://127.0.0.1:1", Some(kept)).unwrap();
        for (fingerprint, credentials) in [(Some(pinned), None), (None, Some(file))] {
            let client = ClientSettings {
                endpoint: "http://127.0.0.1:1".to_owned(),
                token: None,
                token_file: None,
                ca_file: None,
                fingerprint,
                certificate: None,
                credentials,
                insecure_token: false,
                at_box: None,
                name: "ann".to_owned(),
            };
            let refused = Connection::open(&client).await.err();
            let Some(CliError::Usage(told)) = refused else {
                panic!("{refused:?}");
            };
            assert!(told.contains("write https://127.0.0.1:1"), "{told}");
        }
    }

    #[test]
    fn a_refused_field_is_told_by_its_option() {
        let shown = |fields: &[&str]| {
            let wrong = fields
                .iter()
                .map(|field| FieldViolation::new(*field, "is missing"));
            let details = ErrorDetails::with_bad_request(wrong.collect::<Vec<_>>());
            let status = Status::with_error_details(Code::InvalidArgument, "it is missing", details);
            Refusal::of(&status).to_string()
        };
        assert_eq!(shown(&["init_image"]), "it is missing\n  the option is --init");
        assert_eq!(
            shown(&["references[0]", "controls[0].scale", "references[1]"]),
            "it is missing\n  the option is --control-scale, --reference"
        );
        assert_eq!(
            shown(&["model.adapters[0].strength", "controls[1].image.data"]),
            "it is missing\n  the option is --control, --lora"
        );
        assert_eq!(shown(&["width", "model.id"]), "it is missing");
    }

    #[test]
    fn options_of_other_names_are_those_of_the_command_line_and_of_requests() {
        let command = Arguments::command();
        let arguments = ["generate", "play"].map(|name| command.find_subcommand(name).unwrap());
        let arguments: Vec<_> = arguments.iter().flat_map(|of| of.get_arguments()).collect();
        let files = prost_types::FileDescriptorSet::decode(v1::DESCRIPTORS)
            .unwrap()
            .file;
        let messages = files.iter().flat_map(|file| &file.message_type);
        let fields: Vec<_> = messages.flat_map(|message| &message.field).collect();
        for (field, option) in OPTIONS {
            let is_option = |argument: &&clap::Arg| argument.get_long() == option.strip_prefix("--");
            assert!(arguments.iter().any(is_option), "{option}");
            for part in field.split('.') {
                assert!(fields.iter().any(|each| each.name() == part), "{part}");
            }
        }
    }

    #[test]
    fn a_model_is_written_as_the_python_client_writes_it() {
        let written =
            |model: &str| super::model_of_header(model).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(written("owner/name+4-bit").as_deref(), Some("owner/name"));
        assert_eq!(written("größe of/it").as_deref(), Some("gr%C3%B6%C3%9Fe%20of/it"));
        assert_eq!(written("line\nbreak").as_deref(), Some("line%0Abreak"));
        assert_eq!(written(&"a".repeat(3000)).map(|model| model.len()), Some(256));
        assert_eq!(written(""), None);
    }

    #[test]
    fn an_address_shows_loopback_and_encryption() {
        let read = |text: &str| {
            let address = Address::of(text)?;
            Ok::<_, String>((address.encrypted, address.is_here))
        };
        for here in [
            "localhost:1",
            "http://127.0.0.9:1",
            "http://[::1]:1",
            "http://LOCALHOST:1",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert_eq!(read(here), Ok((false, true)), "{here}");
        }
        for there in [
            "gpu:1",
            "http://10.0.0.1:1",
            "http://127.0.0.1.example.org:1",
            "0.0.0.0:1",
        ] {
            assert_eq!(read(there), Ok((false, false)), "{there}");
        }
        assert_eq!(read("https://gpu"), Ok((true, false)));
        assert!(read("ftp://gpu").is_err());
        assert!(read("http://").is_err());
    }
}
