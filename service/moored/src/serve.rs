//! The service from configuration to the last drained job.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use access::{CertificatesError, TokenError};
use calls::{
    Bounds, Host, KeepSettings, Metrics, ModelRef, Models, Parts, Service, WorkerPids, first_card_of, millis,
};
use config::{CardSettings, Config, ConfineWorkers, FileRead, ServiceSettings};
use engine::library::Library;
use engine::queue::{CardSignal, CardSlot, Observer, Observers, Queue, Settings};
use gpu::{CardDescription, DeviceChoice, DeviceSpec, KeepError, KeptFolder, Timeline};
use grpc::GrpcSettings;
use hub::{Hub, Pulls};
use journal::{Journal, JournalError};
use model::Families;
use residency::{Patience, Policy};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use transport::{Gate, Protocols, Served, TransportError, TransportSettings};

use crate::credentials::{Lacks, check_exposure, end_withdrawn, tls_of, tokens_of};
use crate::locks::{LockError, Locks, worker_lock};
use crate::memory;
use crate::preload;
use crate::process::WorkerSettings;
use crate::process::confinement::{Confinement, Places, Strictness};
use crate::process::frames::MOST_INPUT_BYTES;
use crate::process::supervisor::{self, Caches, EarlyWorker};
use crate::service_unit;
use crate::shutdown::{End, shut_down};
use crate::telemetry::Traces;

/// How long shutdown waits for a copy of quantized weights that is being written.
const COPY_LIMIT: Duration = Duration::from_secs(2);

/// Why the service could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    /// The tokens cannot be read.
    #[error(transparent)]
    Tokens(#[from] TokenError),
    /// The certificates cannot be used.
    #[error(transparent)]
    Certificates(#[from] CertificatesError),
    /// Other machines could use it, or read what is sent.
    #[error(
        "service.listen is {address}, which other machines reach, and {}\n  `moored serve --init` makes a certificate and a token for them; \
         {}", lacks.problem(), lacks.remedy()
    )]
    Exposed { address: SocketAddr, lacks: Lacks },
    /// The address cannot be bound.
    #[error(
        "cannot listen on {address}: {problem}; is another service there? (`--listen` takes another address)"
    )]
    Listen {
        address: SocketAddr,
        problem: std::io::Error,
    },
    /// The state folder cannot be used.
    #[error("the state folder {} cannot be used: {problem} (service.state names another)", folder.display())]
    State {
        folder: PathBuf,
        problem: std::io::Error,
    },
    /// The journal of jobs cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The jobs of the journal cannot be read.
    #[error(transparent)]
    Jobs(#[from] engine::Error),
    /// The folder of kept copies cannot be used.
    #[error("copies cannot be kept (quantization.keep_folder): {0}")]
    Copies(#[from] KeepError),
    /// A card is in use.
    #[error(transparent)]
    Locked(#[from] LockError),
    /// A card cannot be described.
    #[error("{0}")]
    Card(#[from] gpu::OpenError),
    /// A card is configured twice.
    #[error("cards.devices names the card {0} twice: leave one of them out")]
    Twice(String),
    /// A card has no more memory than is to stay free of it.
    #[error("{0}")]
    Headroom(String),
    /// Device discovery failed.
    #[error("the cards cannot be discovered: {0}")]
    Discovery(String),
    /// Signal handlers cannot be installed.
    #[error("signals cannot be handled: {0}")]
    Signals(std::io::Error),
    /// The queue's task ended before the service, which is a bug.
    #[error(
        "the queue has ended, which is a fault of moored: the log says why; start the service again and report it"
    )]
    QueueEnded,
    /// Traces cannot be sent.
    #[error("log.otlp cannot be used: {0}")]
    Traces(opentelemetry_otlp::ExporterBuildError),
    /// The gRPC transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Runs the service until a signal or `stop` ends it. `ready` receives the address.
pub(crate) async fn run(
    config: Config,
    ready: Option<oneshot::Sender<SocketAddr>>,
    stop: Option<oneshot::Receiver<()>>,
) -> Result<(), ServeError> {
    // A limit of file sizes (`ulimit -f`) is an error of a write then, and not the end of the service.
    let xfsz = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    let _file_size = signal(xfsz).map_err(ServeError::Signals)?;
    let mut timeline = Timeline::begin("start the service");
    memory::start_trimming();
    make_state_folder(&config.service.state)?;
    let tokens = tokens_of(&config.service)?;
    let needs_token = tokens.borrow().are_needed;
    check_exposure(&config.service, needs_token)?;
    let tls = tls_of(&config.service)?;
    timeline.part("token and folders");
    let caches = caches_of(&config.service);
    let early = EarlyWorker::start(&caches);
    let cards = find_cards(&config.cards).await?;
    timeline.part("find the cards");
    let descriptions: Vec<CardDescription> = cards.iter().map(|(_, card)| card.clone()).collect();
    let _locks = Locks::take(&config.service.state, &descriptions).await?;
    let policy = config.cards.policy_on(&descriptions);
    let (listener, address) = listen(config.service.listen).await?;
    timeline.part("lock the cards, listen");
    let journal = open_journal(&config.service.state).await?;
    timeline.part("open the journal");
    pipelines::set_fp8_products(config.cards.fp8_products);
    pipelines::set_int8_products(config.cards.int8_products);
    pipelines::set_adapter_copies(config.cards.adapter_copies);
    let library = Arc::new(open_library(&config)?);
    let workers = WorkerPids::new(cards.len());
    let (leaving, leaving_seen) = watch::channel(false);
    let (stopping, stopping_seen) = watch::channel(false);
    let (stopped, stopped_seen) = watch::channel(false);
    calls::paths::set_folders(folders_of_models(&config));
    let families: Arc<dyn Families> = Arc::new(pipelines::families());
    let models = Models::new(config.models.clone(), config.hub.cache.clone(), families.clone());
    let models = Arc::new(models);
    let common = CommonToCards {
        models: models.clone(),
        caches,
        address,
        workers: workers.clone(),
        stopped: stopped_seen.clone(),
    };
    let card_tasks = start_card_tasks(&config, &cards, early, &common);
    let is_desktop = cards.iter().any(|(device, _)| device.drives_display());
    let metrics = Arc::new(Metrics::new());
    let traces = match &config.log.otlp {
        Some(address) => Some(Arc::new(Traces::to(address).map_err(ServeError::Traces)?)),
        None => None,
    };
    let traced = traces.clone().map(|traces| traces as Arc<dyn Observer>);
    let queue = start_queue(
        &config,
        Observers(
            [metrics.clone() as Arc<dyn Observer>]
                .into_iter()
                .chain(traced)
                .collect(),
        ),
        policy,
        config.queue.unload_when_idle.after(is_desktop),
        library.clone(),
        card_tasks.slots,
        card_tasks.signals,
    );
    timeline.part("library, queue");
    let host = Arc::new(Host::new());
    tokio::spawn(calls::watch_host(host.clone(), workers.clone()));
    let parts = Parts {
        queue: queue.clone(),
        library: library.clone(),
        models: models.clone(),
        pulls: Pulls::new(Hub::new(config.hub.clone(), families.clone())),
        bounds: Bounds::new(&config.limits),
        host,
        workers,
        policy,
        latents: config.queue.latents,
        media_ttl: config.queue.latent_ttl,
        journal,
        keep: KeepSettings {
            folder: config.service.state.join("results"),
            results_for: config.queue.results_for,
            most_bytes: config.queue.results,
            resumed_at_once: config.queue.resumed_at_once,
        },
        metrics: metrics.clone(),
        leaving: leaving_seen,
        stopping: stopping_seen,
    };
    // It reads the journal.
    let service = tokio::task::spawn_blocking(move || Service::new(parts));
    let service = service
        .await
        .map_err(|panic| engine::Error::Internal(panic.to_string()))??;
    let at_the_end = service.clone();
    tokio::spawn(end_withdrawn(tokens.clone(), service.clone()));
    let of_grpc = GrpcSettings {
        max_message: config.service.max_message,
        families: families.names().into_iter().map(str::to_owned).collect(),
    };
    let settings = TransportSettings {
        limits: config.limits.clone(),
        gate: Gate::new(tokens),
        tls,
        uploads: service.uploads.clone(),
        longest_message: config.service.max_message.0,
        metrics: metrics.clone(),
    };
    let served = Served {
        protocols: Protocols {
            grpc: &grpc::PROTOCOL,
            http: &web::PROTOCOL,
        },
        http: web::routes(service.clone(), config.service.max_message),
        grpc: grpc::routes(service, of_grpc).await,
    };
    tokio::spawn(preload::run(
        config.models.clone(),
        models.clone(),
        library.clone(),
        queue.clone(),
        first_card_of(&queue),
    ));
    let reports = queue.status();
    let end = End {
        notice: config.service.notice,
        drain: config.service.drain,
        leaving,
        stopping,
        stopped,
    };
    let shutdown = shut_down(queue, end, stop).map_err(ServeError::Signals)?;
    let names: Vec<String> = cards.iter().map(|(device, _)| device.to_string()).collect();
    tracing::info!(%address, cards = names.join(" "), "moored is listening");
    log_access(&config, address, needs_token);
    // Not awaited: a folder that does not answer must not delay the start.
    drop(tokio::task::spawn_blocking(move || log_models(&config, &models)));
    if let Some(ready) = ready {
        let _ = ready.send(address);
    }
    let serving = tokio::spawn(transport::serve(served, settings, listener, stopped_seen));
    service_unit::tell_ready(address);
    let ended = tokio::select! {
        () = shutdown => Ok(()),
        () = end_of(reports) => Err(ServeError::QueueEnded),
    };
    at_the_end.save().await;
    drop(at_the_end);
    ended?; // workers end with the queue, and connections with the process
    close(card_tasks.tasks, library, serving).await?;
    if let Some(traces) = traces {
        let _ = tokio::task::spawn_blocking(move || traces.end()).await; // a panic of it has been logged already
    }
    tracing::info!("stopped");
    Ok(())
}

async fn open_journal(folder: &Path) -> Result<Journal, ServeError> {
    let folder = folder.to_owned();
    let opened = tokio::task::spawn_blocking(move || Journal::open(&folder));
    let opened = opened
        .await
        .map_err(|panic| JournalError::Storage(panic.to_string()))??;
    Ok(opened.journal)
}

fn make_state_folder(folder: &Path) -> Result<(), ServeError> {
    gpu::create_private_folder(folder).map_err(|problem| ServeError::State {
        folder: folder.to_owned(),
        problem,
    })
}

/// A listener and its address: port 0 means any free port.
async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServeError> {
    let failed = |problem| ServeError::Listen { address, problem };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Ends the tasks beside the queue, which has ended.
async fn close(
    card_tasks: Vec<JoinHandle<()>>,
    library: Arc<Library>,
    serving: JoinHandle<Result<(), TransportError>>,
) -> Result<(), ServeError> {
    // The cards are free when this process has ended.
    futures::future::join_all(card_tasks).await;
    let stop_keeping = tokio::task::spawn_blocking(move || library.stop_keeping()); // a panic of it has been logged already
    if tokio::time::timeout(COPY_LIMIT, stop_keeping).await.is_err() {
        tracing::warn!("a copy that is being written is given up: its files do not answer");
    }
    // Streams of cancelled jobs end by themselves; a client that does not read must not delay the end.
    if let Ok(Ok(served)) = tokio::time::timeout(Duration::from_secs(2), serving).await {
        served?;
    }
    Ok(())
}

/// Logs who may use the service, and a command to try.
fn log_access(config: &Config, address: SocketAddr, token: bool) {
    let is_encrypted = config.service.certificates.is_some();
    if address.ip().is_loopback() {
        let who = if token {
            "programs of this machine that have a token"
        } else {
            "every program of this machine"
        };
        tracing::info!(token, "{who} may use it");
    } else if is_encrypted && token {
        tracing::info!("other machines may use it with a token");
    } else {
        let without = match (is_encrypted, token) {
            (true, _) => "everybody who reaches it may use it, as service.allow_without_tokens says",
            (false, true) => {
                "other machines may use it with a token, and connections are not encrypted, as service.allow_without_tls says: \
                 put a proxy with TLS or a tunnel in front of it"
            }
            (false, false) => {
                "everybody who reaches it may use it, and read what others send, as the configuration says"
            }
        };
        tracing::warn!(token, "{without}");
    }
    let scheme = match is_encrypted {
        true => "https",
        false => "http",
    };
    let endpoint = match address.port() {
        50051 if address.ip().is_loopback() && !is_encrypted => String::new(),
        port if address.ip().is_unspecified() => format!(" --endpoint {scheme}://127.0.0.1:{port}"),
        _ => format!(" --endpoint {scheme}://{address}"),
    };
    tracing::info!("try: moored generate \"a red circle on a white background\"{endpoint}");
}

/// Logs the models, and the settings that name missing ones.
fn log_models(config: &Config, models: &Models) {
    for folder in missing_folders(config) {
        tracing::warn!(folder = %folder.display(), "models.folders names a folder that is not there");
    }
    for folder in models
        .comfyui()
        .iter()
        .filter(|folder| !folder.join("models").is_dir())
    {
        tracing::warn!(folder = %folder.display(), "models.comfyui names a folder that has no folder `models`");
    }
    for problem in models.problems_of_comfyui() {
        tracing::warn!("models.comfyui: {problem}");
    }
    let listing = models.known();
    for other in models.others() {
        tracing::info!(
            file = other.name,
            what = other.what,
            "a file of ComfyUI that does not run here"
        );
    }
    let mut ids: Vec<&str> = listing.iter().map(|model| model.id.as_str()).collect();
    ids.dedup();
    match missing_default(config, models) {
        Some(id) => tracing::warn!(
            default = id,
            "models.default names a model that is not there: get it with `moored pull`, or name another"
        ),
        None => tracing::info!(count = ids.len(), models = ids.join(", "), "models"),
    }
    for id in config.models.settings.keys() {
        if !ids.contains(&id.as_str()) {
            tracing::warn!(id, "models.settings has settings of a model that is not there");
        }
    }
    if ids.is_empty() {
        tracing::warn!("there are no models: get one with `moored pull`, or set models.folders");
    }
}

/// Configured folders of models that do not exist.
pub(crate) fn missing_folders(config: &Config) -> impl Iterator<Item = &PathBuf> {
    config.models.folders.iter().filter(|folder| !folder.is_dir())
}

/// The configured default model, if it does not exist.
pub(crate) fn missing_default<'a>(config: &'a Config, models: &Models) -> Option<&'a str> {
    let id = config.models.default.as_deref()?;
    matches!(
        models.resolve(&ModelRef::named(id)),
        Err(engine::Error::ModelNotFound { .. })
    )
    .then_some(id)
}

/// Resolves when the sender of the reports is dropped.
async fn end_of<T>(mut reports: watch::Receiver<T>) {
    while reports.changed().await.is_ok() {
        reports.mark_unchanged();
    }
}

/// Opens the library, with kept copies if these are configured.
fn open_library(config: &Config) -> Result<Library, ServeError> {
    let hashes = config.service.state.join("identities.json");
    let library = Library::new(pipelines::families(), Some(hashes));
    let Some(folder) = &config.quantization.keep_folder else {
        return Ok(library);
    };
    let folder = KeptFolder::open(folder, config.quantization.keep_limit)?;
    Ok(library.with_copies(folder))
}

/// The configured cards, by names that do not change: an NVIDIA card by its UUID.
async fn find_cards(cards: &CardSettings) -> Result<Vec<(DeviceSpec, CardDescription)>, ServeError> {
    let cards = cards.clone();
    let look = move || {
        let discovered = DeviceChoice::resolve(&cards.devices)?;
        if let Some(why) = discovered.fallback {
            tracing::info!("no NVIDIA card is used, models run on the CPU: {why}");
        }
        let mut found: Vec<(DeviceSpec, CardDescription)> = Vec::new();
        for device in discovered.devices {
            let card = device.describe()?;
            if found.iter().any(|(_, known)| known.id == card.id) {
                return Err(ServeError::Twice(card.id));
            }
            cards.check_headroom(&card).map_err(ServeError::Headroom)?;
            found.push((device, card));
        }
        Ok(found)
    };
    // A driver that nobody has used for a while takes seconds to answer.
    tokio::task::spawn_blocking(look)
        .await
        .map_err(|panic| ServeError::Discovery(panic.to_string()))?
}

/// The tasks of all cards, and the channels to them.
struct CardTasks {
    slots: Vec<CardSlot>,
    signals: mpsc::UnboundedReceiver<CardSignal>,
    /// Each task ends once its worker has.
    tasks: Vec<JoinHandle<()>>,
}

/// What the tasks of all cards get.
struct CommonToCards {
    models: Arc<Models>,
    caches: Caches,
    /// Where the service listens.
    address: SocketAddr,
    workers: WorkerPids,
    stopped: watch::Receiver<bool>,
}

fn start_card_tasks(
    config: &Config,
    cards: &[(DeviceSpec, CardDescription)],
    mut early: EarlyWorker,
    common: &CommonToCards,
) -> CardTasks {
    let (signals, received) = mpsc::unbounded_channel();
    let mut card_tasks = CardTasks {
        slots: Vec::with_capacity(cards.len()),
        signals: received,
        tasks: Vec::with_capacity(cards.len()),
    };
    for (index, (device, card)) in cards.iter().enumerate() {
        let memory = config.cards.memory_of(card);
        if matches!(device, DeviceSpec::Cuda(_)) && config.service.confine_workers != ConfineWorkers::Never {
            make_device_files();
        }
        tracing::info!(card = card.id, name = card.name, total = %card.total, profile = %config.cards.profile_of(card),
            %memory, "using card");
        let (slot, task) = supervisor::start_card(
            index,
            card.clone(),
            supervisor::Workers {
                settings: worker_settings(config, device, card, common.address),
                places: Places::new(
                    common.models.clone(),
                    beside_models(config, device),
                    secrets(config),
                ),
                caches: common.caches.clone(),
                early: early.take(),
            },
            signals.clone(),
            common.workers.clone(),
            common.stopped.clone(),
        );
        card_tasks.slots.push(slot);
        card_tasks.tasks.push(task);
    }
    card_tasks
}

/// The settings of a card's workers. The places of models are added when one is started.
pub(crate) fn worker_settings(
    config: &Config,
    device: &DeviceSpec,
    card: &CardDescription,
    address: SocketAddr,
) -> WorkerSettings {
    let state = absolute(&config.service.state);
    let plans_folder = state.join("plans");
    let strictness = match config.service.confine_workers {
        ConfineWorkers::Auto | ConfineWorkers::Always => Strictness::All,
        ConfineWorkers::Never => Strictness::None,
    };
    let caches = caches_of(&config.service).0;
    let drives_nvidia = matches!(device, DeviceSpec::Cuda(_));
    let confinement = Confinement {
        strictness,
        is_required: config.service.confine_workers == ConfineWorkers::Always,
        drives_nvidia,
        read: Vec::new(),
        write: match drives_nvidia {
            true => std::iter::once(plans_folder.clone()).chain(caches).collect(),
            false => Vec::new(),
        },
        never: match world_of(device) {
            // Tests exchange the file of a simulated world, which may be beside the state folder: that cannot be cut out then.
            Some(_) => Vec::new(),
            None => secrets(config),
        },
        service: address,
    };
    WorkerSettings {
        device: device.clone(),
        headroom: config.cards.headroom,
        host_memory: config.cards.host_memory,
        memory: config.cards.memory_of(card),
        log: config.log.clone(),
        lock_file: worker_lock(&config.service.state, card),
        plans_folder,
        fp8_products: config.cards.fp8_products,
        int8_products: config.cards.int8_products,
        confinement,
    }
}

/// Where the libraries of workers keep what they have compiled: in the state folder, unless a variable names another place.
pub(crate) fn caches_of(service: &ServiceSettings) -> Caches {
    if service.confine_workers == ConfineWorkers::Never {
        return Caches::default();
    }
    let own = || absolute(&service.state).join("compiled");
    Caches(Some(
        config::variable("CUDA_CACHE_PATH").map_or_else(own, PathBuf::from),
    ))
}

/// What a worker reads beside models.
pub(crate) fn beside_models(config: &Config, device: &DeviceSpec) -> Vec<PathBuf> {
    let kept = config.quantization.keep_folder.iter().cloned();
    let world = world_of(device).and_then(|file| file.parent().map(absolute));
    kept.map(|folder| absolute(&folder)).chain(world).collect()
}

/// The file of a simulated world.
fn world_of(device: &DeviceSpec) -> Option<&Path> {
    match device {
        DeviceSpec::Simulated(settings) => settings.world.as_deref(),
        DeviceSpec::Cpu { .. } | DeviceSpec::Cuda(_) => None,
    }
}

/// What no worker may read: the state of the service, its configuration, tokens, keys.
pub(crate) fn secrets(config: &Config) -> Vec<PathBuf> {
    let file = match &config.file {
        FileRead::Read(file) => Some(file.clone()),
        FileRead::NoneAt(_) => None,
    };
    let certificates = config.service.certificates.iter();
    let of_client = &config.client;
    let secrets = std::iter::once(config.service.state.clone())
        .chain(file)
        .chain(config.service.token_file.clone())
        .chain(certificates.map(|certificates| certificates.key.clone()))
        .chain(of_client.token_file.clone())
        .chain(of_client.credentials.clone())
        .chain(of_client.certificate.iter().map(|(_, key)| key.clone()))
        .chain(config.hub.token.file().map(Path::to_owned));
    let secrets = secrets.map(|secret| absolute(&secret));
    secrets
        .map(|secret| secret.canonicalize().unwrap_or(secret))
        .collect()
}

fn absolute(path: impl AsRef<Path>) -> PathBuf {
    let path = path.as_ref();
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Has the driver's own program load its module of unified memory and make the files of its devices, where they are missing: usually
/// the first process that opens a card has that done, and a confined worker cannot run a program.
fn make_device_files() {
    if Path::new("/dev/nvidia-uvm").exists() {
        return;
    }
    let made = std::process::Command::new("nvidia-modprobe")
        .args(["-u", "-c=0"])
        .status();
    tracing::info!(
        ?made,
        "the files of NVIDIA's devices were missing: nvidia-modprobe was asked to make them"
    );
}

fn start_queue(
    config: &Config,
    observers: Observers,
    policy: Option<Policy>,
    unload_when_idle: Option<Duration>,
    library: Arc<Library>,
    slots: Vec<CardSlot>,
    received: mpsc::UnboundedReceiver<CardSignal>,
) -> Queue {
    let settings = Settings {
        max_jobs: config.queue.max_jobs,
        job_input_bytes: MOST_INPUT_BYTES,
        max_jobs_per_client: config.queue.max_jobs_per_client,
        overtaking_bound: config.queue.overtaking_bound,
        patience: Patience {
            after_eviction_ms: millis(config.queue.patience_after_eviction),
            foreign_ms: millis(config.queue.patience_foreign),
        },
        policy,
        headroom: config.cards.headroom,
        text_cache: config.queue.text_cache,
        latents: config.queue.latents,
        latent_ttl: config.queue.latent_ttl,
        keep_alive: config.queue.keep_alive,
        keep_alive_of: keep_alive_of_models(config),
        unload_when_idle,
        stall_limit: config.queue.stall_limit,
        stall_floor: config.queue.stall_floor,
        cancel_limit: config.queue.cancel_limit,
        observers,
        ..Settings::default()
    };
    Queue::start(settings, library, slots, received)
}

/// Folders that models lie in: `models.folders`, `models.comfyui`, the hub cache, and the parent folder of each of `models.paths`.
fn folders_of_models(config: &Config) -> Vec<PathBuf> {
    let around = |path: &PathBuf| path.parent().map(PathBuf::from);
    let apart = config.models.paths.values().filter_map(around);
    let folders = config
        .models
        .folders
        .iter()
        .chain(&config.models.comfyui)
        .cloned()
        .chain([config.hub.cache.clone()]);
    folders.chain(apart).map(absolute).collect()
}

/// The models that have a keep-alive of their own.
fn keep_alive_of_models(config: &Config) -> BTreeMap<String, Option<Duration>> {
    let settings = config.models.settings.iter();
    settings
        .filter_map(|(id, own)| Some((id.clone(), own.keep_alive?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_the_queue_is_noticed() {
        let (reports, reported) = watch::channel(0);
        let mut end = Box::pin(end_of(reported));
        reports.send_replace(1);
        let pending = futures::poll!(end.as_mut());
        assert!(pending.is_pending(), "a report is not the end");
        drop(reports);
        end.await;
    }
}
