//! SETS. Configuration: the embedded defaults, then a file, then `MOORED_*`, then flags; read into meaningful
//! types, with all mistakes reported at once. The only crate that reads the environment.

mod address;
pub mod bounded;
#[cfg(test)]
#[path = "../../gpu/tests/edits/mod.rs"]
mod edits;
mod hub;
mod hub_settings;
mod layers;
mod log_filter;
mod reader;
mod tables;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use access::{Certificates, Fingerprint, Secret};
use figment::providers::Env;
use gpu::{CardDescription, DeviceChoice, DeviceSpec, MemoryProfile, ProfileName};
use ops::{AdapterCopies, Fp8Products, Int8Products};
use residency::{Bytes, Policy};
use serde::{Deserialize, Serialize};

pub use address::Address;
use bounded::SETTING_BYTES;
pub use hub_settings::{HubSettings, HubToken};
use layers::Layers;
pub use layers::name_and_value;
pub use log_filter::directives;
pub use reader::Mistakes;
use reader::Reader;
pub use tables::RESERVED_NAMES;

/// The commented defaults, as `moored config --defaults` prints them.
pub const DEFAULTS: &str = include_str!("default.toml");

/// The filter of the log where none is set.
pub const DEFAULT_FILTER: &str = "info";

/// The resolved configuration.
#[derive(Clone, Debug)]
pub struct Config {
    pub service: ServiceSettings,
    pub models: ModelSettings,
    pub hub: HubSettings,
    pub cards: CardSettings,
    pub queue: QueueSettings,
    pub limits: LimitSettings,
    pub quantization: QuantizationSettings,
    pub client: ClientSettings,
    pub log: LogSettings,
    /// Every setting with its value and its source, for `moored config`.
    pub sources: Vec<Setting>,
    /// The configuration file.
    pub file: FileRead,
}

/// Which configuration file was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileRead {
    /// The file that was read.
    Read(PathBuf),
    /// No file was read; the path where one would be, if there is a home folder.
    NoneAt(Option<PathBuf>),
}

/// One setting with its effective value.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Setting {
    pub name: String,
    /// The effective value. A setting that is not set has its resolved value.
    pub value: serde_json::Value,
    pub source: String,
}

/// `[service]`.
#[derive(Clone, Debug)]
pub struct ServiceSettings {
    pub listen: SocketAddr,
    pub token_file: Option<PathBuf>,
    /// The files by which it speaks TLS; `None`: it does not.
    pub certificates: Option<Certificates>,
    /// Whether they are the service's own, which it makes where they are missing.
    pub own_certificate: bool,
    /// Whether it may listen beyond loopback without TLS.
    pub allow_without_tls: bool,
    /// Whether it may listen beyond loopback without tokens.
    pub allow_without_tokens: bool,
    /// The token of the program that starts this service for itself alone, in place of all others. It is no setting.
    pub own_token: Option<Secret>,
    pub max_message: Bytes,
    /// How long it says that it is not ready, and still takes jobs, before it drains.
    pub notice: Duration,
    pub drain: Duration,
    pub state: PathBuf,
    pub confine_workers: ConfineWorkers,
}

/// Whether workers are kept from what they do not need: files of others, sockets, other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfineWorkers {
    /// As far as the kernel can, and the driver of an NVIDIA card works with it.
    Auto,
    /// Completely: a worker that cannot be does not start.
    Always,
    Never,
}

/// `[models]`.
#[derive(Clone, Debug, Default)]
pub struct ModelSettings {
    pub folders: Vec<PathBuf>,
    /// Folders of adapters.
    pub adapters: Vec<PathBuf>,
    /// Folders of ComfyUI, whose models and adapters are found too.
    pub comfyui: Vec<PathBuf>,
    pub default: Option<String>,
    pub paths: BTreeMap<String, PathBuf>,
    /// Loaded when the service starts, by name, in order.
    pub preload: Vec<String>,
    /// Loaded and pinned when the service starts.
    pub pinned: Vec<String>,
    pub settings: BTreeMap<String, SettingsOfModel>,
}

/// `[models.settings."id"]`: defaults for requests for this model.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingsOfModel {
    pub steps: Option<u32>,
    pub guidance: Option<f32>,
    pub max_sequence_length: Option<u32>,
    pub width: Option<u32>,
    pub height: Option<u32>,
    /// `queue.keep_alive` for this model: some time, or ("") none.
    #[serde(default, deserialize_with = "reader::keep_alive")]
    pub keep_alive: Option<Option<Duration>>,
}

/// `[cards]`.
#[derive(Clone, Debug)]
pub struct CardSettings {
    pub devices: Vec<DeviceChoice>,
    /// `None`: the default of the card.
    pub profile: Option<ProfileName>,
    /// `None`: that of the profile.
    pub policy: Option<Policy>,
    pub headroom: Bytes,
    /// The most of the machine's memory for streamed blocks of each card; `None`: what is available, less a share for others.
    pub host_memory: Option<Bytes>,
    /// `None`: that of the profile. So are the next three.
    pub slack_limit: Option<Bytes>,
    pub release_threshold: Option<Bytes>,
    pub staging: Option<Bytes>,
    pub staging_chunk: Option<Bytes>,
    pub fp8_products: Fp8Products,
    pub int8_products: Int8Products,
    /// Of which weights copies with the terms of adapters are kept where memory is free.
    pub adapter_copies: AdapterCopies,
}

impl CardSettings {
    /// The profile of one card: as configured, or its default.
    pub fn profile_of(&self, card: &CardDescription) -> ProfileName {
        self.profile
            .unwrap_or_else(|| ProfileName::suggested(card.kind, card.total))
    }

    /// Checks that a card has more memory than its headroom.
    ///
    /// # Errors
    /// For people, when it does not.
    pub fn check_headroom(&self, card: &CardDescription) -> Result<(), String> {
        match self.headroom < card.total {
            true => Ok(()),
            false => Err(format!(
                "cards.headroom is {}, and {} has {}: nothing would be left for models, so write less",
                self.headroom, card.id, card.total
            )),
        }
    }

    /// Memory settings of one card: its profile, with overrides.
    pub fn memory_of(&self, card: &CardDescription) -> MemoryProfile {
        let profile = MemoryProfile::of(self.profile_of(card), card.total);
        MemoryProfile {
            release_threshold: self.release_threshold.or(profile.release_threshold),
            slack_limit: self.slack_limit.unwrap_or(profile.slack_limit),
            staging_bytes: self.staging.unwrap_or(profile.staging_bytes),
            staging_chunk: self.staging_chunk.unwrap_or(profile.staging_chunk),
        }
    }

    /// Eviction policy; `None`: by the model and the card that it runs on. If the profile that is configured asks for `exclusive`,
    /// all cards use it; the profile that a small card has by itself does not, since what does not fit there is streamed.
    pub fn policy_on<'a>(&self, cards: impl IntoIterator<Item = &'a CardDescription>) -> Option<Policy> {
        let is_exclusive =
            |card| self.profile.is_some() && self.profile_of(card).policy() == Policy::Exclusive;
        self.policy
            .or_else(|| cards.into_iter().any(is_exclusive).then_some(Policy::Exclusive))
    }
}

/// `[queue]`.
#[derive(Clone, Debug)]
pub struct QueueSettings {
    pub max_jobs: usize,
    pub max_jobs_per_client: usize,
    pub overtaking_bound: u32,
    pub patience_after_eviction: Duration,
    pub patience_foreign: Duration,
    pub text_cache: Bytes,
    pub latents: Bytes,
    pub latent_ttl: Duration,
    pub results_for: Duration,
    pub results: Bytes,
    pub resumed_at_once: usize,
    pub keep_alive: Option<Duration>,
    pub unload_when_idle: UnloadWhenIdle,
    pub stall_limit: Duration,
    pub stall_floor: Duration,
    pub cancel_limit: Duration,
}

/// When unused models are unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnloadWhenIdle {
    Never,
    After(Duration),
    /// After a default time, if a card drives a display.
    OnDesktops,
}

impl UnloadWhenIdle {
    /// Time without a job after which models are unloaded.
    pub fn after(self, is_desktop: bool) -> Option<Duration> {
        const ON_DESKTOPS: Duration = Duration::from_secs(600);
        match self {
            UnloadWhenIdle::Never => None,
            UnloadWhenIdle::After(time) => Some(time),
            UnloadWhenIdle::OnDesktops => is_desktop.then_some(ON_DESKTOPS),
        }
    }
}

/// `[limits]`.
#[derive(Clone, Debug)]
pub struct LimitSettings {
    pub connections: u64,
    pub connections_per_client: u64,
    /// Time for the first bytes of a connection.
    pub handshake: Duration,
    /// After which time a client is asked to open another connection.
    pub connection_age: Option<Duration>,
    pub calls: u64,
    pub calls_per_client: u64,
    /// Bytes of requests that are being received, and of messages of sessions that are not processed yet.
    pub uploads: Bytes,
    pub uploads_per_client: Bytes,
    /// The longest pause in a request that arrives.
    pub upload_idle: Duration,
    /// Bytes of results that clients have not read.
    pub results: Bytes,
    pub results_per_client: Bytes,
    /// Time after which an answer that the client does not read is dropped.
    pub unread: Duration,
    /// Bytes of media that were uploaded for later requests, and of pictures that are decoded for requests.
    pub media: Bytes,
    pub media_per_client: Bytes,
    pub holds_per_client: usize,
    pub reservations_per_client: usize,
}

/// `[quantization]`.
#[derive(Clone, Debug)]
pub struct QuantizationSettings {
    /// `None`: no kept copies.
    pub keep_folder: Option<PathBuf>,
    pub keep_limit: Bytes,
}

/// `[client]`.
#[derive(Clone, Debug)]
pub struct ClientSettings {
    pub endpoint: String,
    /// A token before all others. It is no setting.
    pub token: Option<Secret>,
    pub token_file: Option<PathBuf>,
    /// CA certificates for `https://`; `None`: the system's.
    pub ca_file: Option<PathBuf>,
    /// SHA-256 of the service's certificate, by which alone `https://` is trusted.
    pub fingerprint: Option<Fingerprint>,
    /// A certificate of this client, and its key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// The file with tokens and fingerprints by address; `None` where there is no home.
    pub credentials: Option<PathBuf>,
    /// Whether the token may be sent to another machine over a connection that is not encrypted.
    pub insecure_token: bool,
    /// The one of several boxes behind a proxy that all calls are for.
    pub at_box: Option<String>,
    /// Client name in the job list, and for fair shares.
    pub name: String,
}

/// `[log]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogSettings {
    /// `None`: the default of the command.
    pub filter: Option<String>,
    pub json: bool,
    /// Address of a collector of traces.
    pub otlp: Option<String>,
}

/// Settings from flags: (setting, value) pairs such as (`service.listen`, "127.0.0.1:0"); `None` for one that was named without a value.
pub type Flags = Vec<(String, Option<figment::value::Value>)>;

impl Config {
    /// Reads all layers.
    ///
    /// # Errors
    /// Every mistake in every layer, each with its source.
    pub fn load(file: Option<PathBuf>, flags: Flags) -> Result<Config, Mistakes> {
        let mut layers = Layers::new();
        let mut file_read = FileRead::NoneAt(None);
        match configuration_file(file) {
            Ok((FileRead::Read(path), text)) => {
                // Returned as the only mistake: the settings of an unreadable file are not known.
                layers.add_file(&path, &text).map_err(|problem| {
                    Mistakes::one(format!("{}: {}", path.display(), problem.trim_end()))
                })?;
                file_read = FileRead::Read(path);
            }
            Ok((none, _)) => file_read = none,
            Err(mistake) => layers.mistakes.push(mistake),
        }
        layers.add_environment();
        layers.add_flags(flags);
        Config::extract(layers).map(|config| Config {
            file: file_read,
            ..config
        })
    }

    fn extract(layers: Layers) -> Result<Config, Mistakes> {
        let bound = layers.bound;
        let mut r = Reader::new(layers.figment, layers.mistakes);
        let mut config = Config {
            service: ServiceSettings::read(&mut r),
            models: ModelSettings::read(&mut r),
            hub: hub::read(&mut r),
            cards: CardSettings::read(&mut r),
            queue: QueueSettings::read(&mut r),
            limits: LimitSettings::read(&mut r),
            quantization: QuantizationSettings::read(&mut r),
            client: ClientSettings::read(&mut r),
            log: LogSettings::read(&mut r),
            sources: Vec::new(),
            file: FileRead::NoneAt(None),
        };
        config.client.forget_of_others(&bound);
        config.check(&mut r);
        config.sources = r.finish(&[
            ("service.state", config.service.state.display().to_string()),
            ("hub.cache", config.hub.cache.display().to_string()),
            ("hub.endpoint", config.hub.endpoint.clone()),
            ("client.name", config.client.name.clone()),
        ])?;
        Ok(config)
    }

    /// Finds settings that contradict each other.
    fn check(&self, r: &mut Reader) {
        for (name, bytes) in [
            ("limits.uploads", self.limits.uploads),
            ("limits.uploads_per_client", self.limits.uploads_per_client),
        ] {
            if bytes < self.service.max_message && !r.is_wrong(name) {
                r.mistake(
                    name,
                    "is less than service.max_message, which no message could have then",
                );
            }
        }
        for card in [ProfileName::Inference, ProfileName::Constrained] {
            let profile = MemoryProfile::of(self.cards.profile.unwrap_or(card), Bytes::gib(24));
            let staging = self.cards.staging.unwrap_or(profile.staging_bytes);
            let chunk = self.cards.staging_chunk.unwrap_or(profile.staging_chunk);
            let is_set = self.cards.staging.is_some() || self.cards.staging_chunk.is_some();
            let is_read = !r.is_wrong("cards.staging") && !r.is_wrong("cards.staging_chunk");
            if is_set
                && is_read
                && (chunk.0 < 1 << 16 || staging < chunk || !staging.0.is_multiple_of(chunk.0))
            {
                r.mistake(
                    "cards.staging",
                    format!("{staging} is no multiple of cards.staging_chunk, {chunk}, of 64 KiB at least: set both"),
                );
                break;
            }
        }
        if self.cards.devices.is_empty() && !r.is_wrong("cards.devices") {
            r.mistake("cards.devices", "names no card; \"auto\" always works");
        }
        for name in names_of_several(&self.cards.devices) {
            r.mistake(
                "cards.devices",
                format!(
                    "names the card {name} twice; simulated cards take a number, as in sim:24GiB,index=1"
                ),
            );
        }
    }
}

/// Cards that are named more than once. An NVIDIA card may have several names, which only the driver knows: these are
/// compared again when the service starts.
fn names_of_several(devices: &[DeviceChoice]) -> Vec<String> {
    let name = |device: &DeviceChoice| match device {
        DeviceChoice::Card(DeviceSpec::Cuda(settings)) => Some(format!("cuda:{}", settings.which)),
        DeviceChoice::Card(other) => Some(other.describe().ok()?.id),
        DeviceChoice::Auto => Some("auto".to_owned()),
    };
    let mut names: Vec<String> = devices.iter().filter_map(name).collect();
    names.sort();
    names
        .chunk_by(|a, b| a == b)
        .filter(|same| same.len() > 1)
        .map(|same| same[0].clone())
        .collect()
}

/// The configuration file with its text: the named file, or the user's if there is one.
fn configuration_file(named: Option<PathBuf>) -> Result<(FileRead, String), String> {
    let named = named.or_else(|| std::env::var_os("MOORED_CONFIG").map(PathBuf::from));
    let path = match named {
        Some(path) => path.to_str().map_or_else(|| path.clone(), reader::in_home),
        None => {
            let users = project_folders().map(|folders| folders.config_dir().join("moored.toml"));
            match users {
                Some(path) if path.exists() => path,
                users => return Ok((FileRead::NoneAt(users), String::new())),
            }
        }
    };
    match gpu::text_bounded(&path, SETTING_BYTES) {
        Ok(text) => Ok((FileRead::Read(path), text)),
        Err(problem) if problem.kind() == std::io::ErrorKind::NotFound => {
            Err(format!("there is no configuration file {}", path.display()))
        }
        Err(problem) => Err(format!(
            "the configuration file {} cannot be read: {problem}",
            path.display()
        )),
    }
}

/// The default client name, which distinguishes users behind one tunnel.
fn user_at_host() -> String {
    let variable = |name| variable(name).filter(|value| !value.is_empty());
    let user = variable("USER").or_else(|| variable("LOGNAME")).or_else(account);
    let host = host_name();
    match (user, host.as_str()) {
        (Some(user), "") => user,
        (Some(user), host) => format!("{user}@{host}"),
        (None, host) => host.to_owned(),
    }
}

/// The name of this machine; empty where it has none.
pub fn host_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    host.trim().to_owned()
}

/// A variable of the environment; `None` where it is not set, or is no text.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The name of the account of this process: services and containers have no variable with it.
fn account() -> Option<String> {
    let id = rustix::process::getuid().as_raw().to_string();
    let accounts = std::fs::read_to_string("/etc/passwd").ok()?;
    accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == id).then(|| name.to_owned())
    })
}

/// Variables that a worker gets: those that its libraries read, which are the loader, the allocator, the driver, and the libraries of
/// the card's maker. A name that ends with `_` stands for all that begin with it. Any other variable may be a secret, and a worker
/// reads files of strangers.
const OF_WORKERS: [&str; 27] = [
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_",
    "TZ",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "LD_",
    "GLIBC_TUNABLES",
    "MALLOC_",
    "RUST_",
    "RAYON_",
    "OMP_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "CUBLASLT_",
    "NVIDIA_",
    "NSYS_",
    "NVTX_",
    "CANDLE_",
    "ASAN_",
    "LSAN_",
    "UBSAN_",
    "LLVM_",
    "NO_COLOR",
];

/// Whether a worker gets a variable.
fn is_of_workers(name: &str) -> bool {
    OF_WORKERS.iter().any(|known| match known.ends_with('_') {
        true => name.starts_with(known),
        false => name == *known,
    })
}

/// The variables of this process that its workers get.
pub fn variables_of_workers() -> impl Iterator<Item = (std::ffi::OsString, std::ffi::OsString)> {
    std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_workers))
}

/// Settings with short names, which the Python client reads too.
const SHORT_NAMES: [(&str, &str); 10] = [
    ("endpoint", "client.endpoint"),
    ("token_file", "client.token_file"),
    ("ca_file", "client.ca_file"),
    ("insecure_token", "client.insecure_token"),
    ("fingerprint", "client.fingerprint"),
    ("certificate", "client.certificate"),
    ("certificate_key", "client.certificate_key"),
    ("credentials", "client.credentials"),
    ("client", "client.name"),
    ("box", "client.box"),
];

/// `MOORED_TABLE_SETTING` is `table.setting`. The client's have short names.
fn environment() -> Env {
    Env::prefixed("MOORED_").filter(|key| key != "config").map(|key| {
        let key = key.as_str().to_lowercase();
        match SHORT_NAMES.iter().find(|(short, _)| *short == key) {
            Some((_, name)) => (*name).into(),
            None => key.replacen('_', ".", 1).into(),
        }
    })
}

/// A path as people write it, with their home for `~` and variables for `$NAME` and `${NAME}`. Variables that are not set stay as they are.
pub fn expanded(path: &str) -> PathBuf {
    let home = || home_folder()?.into_os_string().into_string().ok();
    PathBuf::from(&*shellexpand::full_with_context_no_errors(path, home, variable))
}

/// The user's home.
pub fn home_folder() -> Option<PathBuf> {
    directories::BaseDirs::new().map(|folders| folders.home_dir().to_owned())
}

fn project_folders() -> Option<directories::ProjectDirs> {
    directories::ProjectDirs::from("", "", "moored")
}

fn state_folder() -> PathBuf {
    project_folders()
        .map(|folders| {
            folders
                .state_dir()
                .unwrap_or_else(|| folders.data_local_dir())
                .to_owned()
        })
        .unwrap_or_else(|| std::env::temp_dir().join("moored"))
}

#[cfg(test)]
mod tests;
