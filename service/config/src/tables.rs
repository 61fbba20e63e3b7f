//! The tables of the configuration, setting by setting.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::time::Duration;

use access::{Certificates, Fingerprint, OWN_CERTIFICATE, OWN_KEY};
use gpu::ProfileName;
use model::{Image, Medium, PIXELS_PER_TOKEN, Request, RequestError};
use ops::{AdapterCopies, Fp8Products, Int8Products};
use residency::{Bytes, Policy};

use super::layers::Bound;
use super::reader::{MOST_MEMORY, Reader};
use super::{
    Address, CardSettings, ClientSettings, ConfineWorkers, LimitSettings, LogSettings, ModelSettings,
    QuantizationSettings, QueueSettings, ServiceSettings, SettingsOfModel, project_folders, state_folder,
    user_at_host,
};
use crate::log_filter::check_filter;

/// A smaller message has no room for a prompt and a small picture.
const LEAST_MESSAGE: Bytes = Bytes(64 << 10);
/// The length of a message of gRPC is written in four bytes.
const MOST_MESSAGE: Bytes = Bytes(u32::MAX as u64);
/// With a lower bound no picture could be sent.
const LEAST_RESULTS: Bytes = Bytes(1 << 20);
/// A healthy worker reports within this time.
const LEAST_OF_WORKERS: Duration = Duration::from_secs(1);
/// Even a distant client sends something within this time.
const LEAST_OF_CLIENTS: Duration = Duration::from_millis(100);
/// Least time to live: with less, a stored object would be gone before the next request.
const LEAST_KEPT: Duration = Duration::from_secs(1);

impl ServiceSettings {
    pub(super) fn read(r: &mut Reader) -> ServiceSettings {
        let state = r.optional_path("service.state").unwrap_or_else(state_folder);
        ServiceSettings {
            listen: r.parsed("service.listen", "an address such as 127.0.0.1:50051"),
            token_file: r.optional_path("service.token_file"),
            certificates: certificates(r, &state),
            own_certificate: r.switch("service.own_certificate"),
            allow_without_tls: r.switch("service.allow_without_tls"),
            allow_without_tokens: r.switch("service.allow_without_tokens"),
            own_token: None,
            max_message: r.size_within("service.max_message", LEAST_MESSAGE, MOST_MESSAGE),
            notice: r.duration("service.notice"),
            drain: r.duration("service.drain"),
            state,
            confine_workers: r.choice(
                "service.confine_workers",
                &[
                    ("auto", ConfineWorkers::Auto),
                    ("always", ConfineWorkers::Always),
                    ("never", ConfineWorkers::Never),
                ],
            ),
        }
    }
}

/// The certificates of the service: its own, or those that are named.
fn certificates(r: &mut Reader, state: &Path) -> Option<Certificates> {
    let is_own = r.switch("service.own_certificate");
    let named = pair(r, "service.certificate", "service.certificate_key");
    let client_authorities = r.optional_path("service.client_authorities");
    let (certificate, key) = match (is_own, named) {
        (true, Some(_)) => {
            r.mistake(
                "service.own_certificate",
                "is true, and service.certificate names another one: set one of the two",
            );
            return None;
        }
        (true, None) => (state.join(OWN_CERTIFICATE), state.join(OWN_KEY)),
        (false, Some(named)) => named,
        (false, None) => {
            if client_authorities.is_some() {
                let problem = "is for TLS, and the service has no certificate: set service.certificate, or service.own_certificate";
                r.mistake("service.client_authorities", problem);
            }
            return None;
        }
    };
    Some(Certificates {
        certificate,
        key,
        client_authorities,
    })
}

/// A certificate and its key, of which neither is of use alone.
fn pair(r: &mut Reader, certificate: &'static str, key: &'static str) -> Option<(PathBuf, PathBuf)> {
    match (r.optional_path(certificate), r.optional_path(key)) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (Some(_), None) => {
            r.mistake(certificate, format!("needs its key: set {key}"));
            None
        }
        (None, Some(_)) => {
            r.mistake(
                key,
                format!("is a key without its certificate: set {certificate}"),
            );
            None
        }
    }
}

impl ModelSettings {
    pub(super) fn read(r: &mut Reader) -> ModelSettings {
        ModelSettings {
            folders: r.paths("models.folders"),
            adapters: r.paths("models.adapters"),
            comfyui: r.paths("models.comfyui"),
            default: r.optional_text("models.default"),
            paths: r
                .table::<String>("models.paths")
                .into_iter()
                .map(|(id, path)| (id, r.path_of("models.paths", &path)))
                .collect(),
            preload: r.words("models.preload"),
            pinned: r.words("models.pinned"),
            settings: settings_of_models(r),
        }
    }
}

impl CardSettings {
    pub(super) fn read(r: &mut Reader) -> CardSettings {
        CardSettings {
            devices: r.parsed_list("cards.devices"),
            profile: r.choice("cards.profile", &profiles()),
            policy: r.choice(
                "cards.policy",
                &[
                    ("", None),
                    ("shared", Some(Policy::Shared)),
                    ("exclusive", Some(Policy::Exclusive)),
                ],
            ),
            headroom: r.size("cards.headroom"),
            host_memory: r.optional_size("cards.host_memory"),
            slack_limit: r.optional_size("cards.slack_limit"),
            release_threshold: r.optional_size("cards.release_threshold"),
            staging: r.optional_size("cards.staging"),
            staging_chunk: r.optional_size("cards.staging_chunk"),
            fp8_products: r.choice(
                "cards.fp8_products",
                &[
                    ("auto", Fp8Products::Auto),
                    ("never", Fp8Products::Never),
                    ("always", Fp8Products::Always),
                ],
            ),
            int8_products: r.choice(
                "cards.int8_products",
                &[("auto", Int8Products::Auto), ("never", Int8Products::Never)],
            ),
            adapter_copies: r.choice(
                "cards.adapter_copies",
                &[
                    ("exact", AdapterCopies::Exact),
                    ("never", AdapterCopies::Never),
                    ("always", AdapterCopies::Always),
                ],
            ),
        }
    }
}

impl QueueSettings {
    pub(super) fn read(r: &mut Reader) -> QueueSettings {
        QueueSettings {
            max_jobs: r.at_least("queue.max_jobs", 1),
            max_jobs_per_client: r.at_least("queue.max_jobs_per_client", 1),
            overtaking_bound: r.at_least("queue.overtaking_bound", 0),
            patience_after_eviction: r.duration("queue.patience_after_eviction"),
            patience_foreign: r.duration("queue.patience_foreign"),
            text_cache: r.size("queue.text_cache"),
            latents: r.size("queue.latents"),
            latent_ttl: r.time_from("queue.latent_ttl", LEAST_KEPT),
            results_for: r.time_from("queue.results_for", LEAST_KEPT),
            results: r.size("queue.results"),
            resumed_at_once: r.at_least("queue.resumed_at_once", 1),
            keep_alive: r.optional_duration("queue.keep_alive"),
            unload_when_idle: r.unload_when_idle("queue.unload_when_idle"),
            stall_limit: r.time_from("queue.stall_limit", LEAST_OF_WORKERS),
            stall_floor: r.time_from("queue.stall_floor", LEAST_OF_WORKERS),
            cancel_limit: r.time_from("queue.cancel_limit", LEAST_OF_WORKERS),
        }
    }
}

impl LimitSettings {
    pub(super) fn read(r: &mut Reader) -> LimitSettings {
        LimitSettings {
            connections: r.at_least("limits.connections", 1),
            connections_per_client: r.at_least("limits.connections_per_client", 1),
            handshake: r.time_from("limits.handshake", LEAST_OF_CLIENTS),
            connection_age: r.optional_time_from("limits.connection_age", LEAST_OF_CLIENTS),
            calls: r.at_least("limits.calls", 1),
            calls_per_client: r.at_least("limits.calls_per_client", 1),
            uploads: r.size("limits.uploads"),
            uploads_per_client: r.size("limits.uploads_per_client"),
            upload_idle: r.time_from("limits.upload_idle", LEAST_OF_CLIENTS),
            results: r.size_within("limits.results", LEAST_RESULTS, MOST_MEMORY),
            results_per_client: r.size("limits.results_per_client"),
            unread: r.time_from("limits.unread", LEAST_OF_CLIENTS),
            media: r.size("limits.media"),
            media_per_client: r.size("limits.media_per_client"),
            holds_per_client: r.at_least("limits.holds_per_client", 1),
            reservations_per_client: r.at_least("limits.reservations_per_client", 1),
        }
    }
}

impl QuantizationSettings {
    pub(super) fn read(r: &mut Reader) -> QuantizationSettings {
        QuantizationSettings {
            keep_folder: r.optional_path("quantization.keep_folder"),
            keep_limit: r.size_of_files("quantization.keep_limit"),
        }
    }
}

impl ClientSettings {
    pub(super) fn read(r: &mut Reader) -> ClientSettings {
        ClientSettings {
            endpoint: r.checked_text("client.endpoint", |text| Address::of(text).map(drop)),
            token: None,
            token_file: r.optional_path("client.token_file"),
            ca_file: r.optional_path("client.ca_file"),
            fingerprint: fingerprint(r),
            certificate: pair(r, "client.certificate", "client.certificate_key"),
            credentials: r
                .optional_path("client.credentials")
                .or_else(|| Some(project_folders()?.config_dir().join("credentials.json"))),
            insecure_token: r.switch("client.insecure_token"),
            at_box: Some(r.checked_text("client.box", name_of_box)).filter(|name| !name.is_empty()),
            name: Some(r.checked_text("client.name", name_of_client))
                .filter(|name| !name.is_empty())
                .unwrap_or_else(user_at_host),
        }
    }
}

fn fingerprint(r: &mut Reader) -> Option<Fingerprint> {
    let check = |text: &str| match text.is_empty() {
        true => Ok(()),
        false => Fingerprint::from_str(text).map(drop),
    };
    r.checked_text("client.fingerprint", check).parse().ok()
}

impl ClientSettings {
    /// Leaves out what was set beside another endpoint than the one in force: a token in a file is not sent where a flag points.
    pub(super) fn forget_of_others(&mut self, bound: &Bound) {
        let is_of_another = |name: &str| {
            bound
                .endpoint_of(name)
                .is_some_and(|endpoint| !same(endpoint, &self.endpoint))
        };
        let (token, fingerprint, certificate) = (
            is_of_another("token_file"),
            is_of_another("fingerprint"),
            is_of_another("certificate"),
        );
        if token {
            self.token_file = None;
        }
        if fingerprint {
            self.fingerprint = None;
        }
        if certificate {
            self.certificate = None;
        }
    }
}

/// Whether two endpoints are one. What is no address is none's.
fn same(one: &str, other: &str) -> bool {
    match (Address::of(one), Address::of(other)) {
        (Ok(one), Ok(other)) => one.url == other.url,
        _ => false,
    }
}

impl LogSettings {
    pub(super) fn read(r: &mut Reader) -> LogSettings {
        LogSettings {
            filter: Some(r.checked_text("log.filter", check_filter)).filter(|filter| !filter.is_empty()),
            json: r.choice("log.format", &[("text", false), ("json", true)]),
            otlp: Some(r.checked_text("log.otlp", check_collector)).filter(|address| !address.is_empty()),
        }
    }
}

/// An address of a collector, or none.
fn check_collector(address: &str) -> Result<(), String> {
    match address.is_empty() {
        true => Ok(()),
        false => Address::of(address).map(|_| ()),
    }
}

/// `[models.settings]`.
fn settings_of_models(r: &mut Reader) -> BTreeMap<String, SettingsOfModel> {
    let settings: BTreeMap<String, SettingsOfModel> = r.table("models.settings");
    for (id, own) in &settings {
        for RequestError { field, problem } in own.problems() {
            r.mistake("models.settings", format!("{field} of {id:?} {problem}"));
        }
    }
    settings
}

impl SettingsOfModel {
    /// The settings that no request may have, whatever its model.
    fn problems(&self) -> Vec<RequestError> {
        let picture = Image::of(
            self.width.unwrap_or(PIXELS_PER_TOKEN),
            self.height.unwrap_or(PIXELS_PER_TOKEN),
        );
        let (steps, guidance) = (self.steps.unwrap_or(1), self.guidance.unwrap_or(0.0));
        let tokens = self.max_sequence_length.unwrap_or(1);
        model::bounds::problems(&Request::of(Medium::Image(picture), steps, guidance, tokens))
    }
}

/// Prefix of the names by which sessions hold their models. No client's name begins with it.
pub const RESERVED_NAMES: &str = "session-";

/// Checks the name of a client, which the service shows to others. The service refuses the same ones.
fn name_of_client(name: &str) -> Result<(), String> {
    if let Some(problem) = wording::name_problem(name) {
        return Err(format!("{name:?} {problem}"));
    }
    match name.starts_with(RESERVED_NAMES) {
        true => Err(format!(
            "{name:?} begins with {RESERVED_NAMES:?}, as the holders of sessions do: write another name"
        )),
        false => Ok(()),
    }
}

/// A box as a proxy calls it: a header has it.
fn name_of_box(name: &str) -> Result<(), String> {
    let is_name = name.len() <= 256 && name.bytes().all(|byte| byte.is_ascii_graphic());
    match is_name {
        true => Ok(()),
        false => Err(format!(
            "{name:?} is no name of a box: plain letters, digits and signs are wanted"
        )),
    }
}

/// The values of `cards.profile`.
fn profiles() -> Vec<(&'static str, Option<ProfileName>)> {
    let named = ProfileName::ALL.map(|name| (name.as_str(), Some(name)));
    std::iter::once(("auto", None)).chain(named).collect()
}
