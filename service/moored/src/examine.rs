//! Checks of this machine for `moored doctor`: the cards, the state folder, the folder of downloads, the models.

use std::sync::Arc;

use calls::{ModelRef, policy_name};
use cli::Finding;
use config::{CardSettings, Config, ConfineWorkers};
use engine::Error;
use engine::library::Library;
use gpu::{CardDescription, CardKind, DeviceChoice, DeviceSpec, Peers};
use hub::{Hub, Login, PullError};
use residency::Bytes;

use crate::examine_access::access;
use crate::process::confinement::Places;
use crate::process::confinement::tries::{Outcome, Tried};
use crate::process::trial;
use crate::program::{cards_of, models_of};
use crate::serve::{self, ServeError};

/// All findings, in the order in which they are shown.
pub(crate) async fn examine(config: Config) -> Vec<Finding> {
    let mut findings = cards(&config).await;
    findings.push(libraries());
    findings.push(state_folder(&config));
    findings.extend(access(&config));
    findings.extend(workers(&config).await);
    findings.push(cache_folder(&config));
    findings.push(hub(&config).await);
    findings.extend(models(&config).await);
    findings
}

/// Checks the configured cards; where `auto` found none, says why.
async fn cards(config: &Config) -> Vec<Finding> {
    let cards = config.cards.clone();
    let look = move || {
        let mut findings = Vec::new();
        let mut ids: Vec<String> = Vec::new();
        for choice in &cards.devices {
            match DeviceChoice::resolve(std::slice::from_ref(choice)) {
                Ok(discovered) => {
                    let fallback = discovered.fallback;
                    findings.extend(
                        fallback.map(|why| Finding::good("cards", format!("auto selects cpu: {why}"))),
                    );
                    for device in discovered.devices {
                        findings.push(match device.describe() {
                            Ok(description) => {
                                ids.push(description.id.clone());
                                card(&cards, &device, &description)
                            }
                            Err(error) => Finding::bad("card", error),
                        });
                    }
                }
                Err(error) => findings.push(Finding::bad("card", error)),
            }
        }
        ids.sort();
        for same in ids.chunk_by(|a, b| a == b).filter(|same| same.len() > 1) {
            findings.push(Finding::bad("cards", ServeError::Twice(same[0].clone())));
        }
        findings
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_default()
}

/// Libraries that are loaded at run time. Without cuDNN our own kernels compute, and are slower.
fn libraries() -> Finding {
    let found = match pipelines::libraries().cudnn {
        Ok(version) => format!("cuDNN {version} computes attention on NVIDIA cards"),
        Err(reason) => format!("no cuDNN, so own kernels compute attention: {reason}"),
    };
    Finding::good("libraries", found)
}

/// Describes a card, and the management of its memory.
fn card(cards: &CardSettings, device: &DeviceSpec, description: &CardDescription) -> Finding {
    if let Err(problem) = cards.check_headroom(description) {
        return Finding::bad("card", problem);
    }
    let suits = if cards.profile.is_some() { "set" } else { "auto" };
    let policy = policy_name(cards.policy_on([description]));
    let mut found = vec![
        format!("{} ({})", description.id, description.name),
        description.total.to_string(),
    ];
    found.extend(driver_facts(device));
    found.push(format!("computes in {}", description.compute_dtype));
    if let Peers::Only(others) = &description.peers
        && !others.is_empty()
    {
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        found.push(format!("reaches the memory of {}", others.join(" and ")));
    }
    let memory = cards.memory_of(description);
    let memory = match description.kind {
        CardKind::Cuda => memory.to_string(),
        // The rest of a profile is about a driver's pools and pinned memory.
        CardKind::Cpu | CardKind::Simulated => format!("trims above {} of slack", memory.slack_limit),
    };
    found.push(format!(
        "profile {} ({suits}): {policy}, {memory}",
        cards.profile_of(description)
    ));
    Finding::good("card", found.join(", "))
}

/// Findings that only the driver of an NVIDIA card can provide.
#[cfg(feature = "cuda")]
fn driver_facts(device: &DeviceSpec) -> Vec<String> {
    use gpu::nvml::{Mig, NvmlCard, driver_version};

    let DeviceSpec::Cuda(settings) = device else {
        return Vec::new();
    };
    let Ok(card) = NvmlCard::open(&settings.which) else {
        return Vec::new(); // `describe` has reported why
    };
    let mut facts = Vec::new();
    facts.push(match card.memory() {
        Ok(memory) => format!("{} free", memory.free),
        Err(problem) => problem.to_string(),
    });
    let (major, minor) = card.compute_capability;
    facts.push(format!("compute capability {major}.{minor}"));
    if let Ok(version) = driver_version() {
        facts.push(format!("driver {version}"));
    }
    facts.push(match card.link {
        Some(link) if link.current == link.max => format!("PCIe {}.0 x{}", link.max.0, link.max.1),
        Some(link) => format!(
            "PCIe {}.0 x{} of {}.0 x{} (an idle card may slow its link down)",
            link.current.0, link.current.1, link.max.0, link.max.1
        ),
        None => "PCIe link unknown".to_owned(),
    });
    facts.push(
        match card.mig {
            Mig::Unsupported => "MIG not supported",
            Mig::Off => "MIG off",
            Mig::Slice => "a MIG slice",
        }
        .to_owned(),
    );
    facts
}

#[cfg(not(feature = "cuda"))]
fn driver_facts(_device: &DeviceSpec) -> Vec<String> {
    Vec::new()
}

fn state_folder(config: &Config) -> Finding {
    let folder = &config.service.state;
    let probe = folder.join(".probe");
    let tried = gpu::create_private_folder(folder)
        .and_then(|()| std::fs::write(&probe, b"x"))
        .and_then(|()| std::fs::remove_file(&probe));
    let shown = folder.display();
    let found = tried.map(|()| shown.to_string());
    Finding::of(
        "state",
        found.map_err(|problem| format!("{shown}: {problem}; service.state names another folder")),
    )
}

/// How workers are confined: one that opens no card tries to do what they may not.
async fn workers(config: &Config) -> Option<Finding> {
    const WHAT: &str = "workers";
    let (device, card) = first_card(config)?;
    let mut settings = serve::worker_settings(config, &device, &card, config.service.listen);
    let mut places = Places::new(
        Arc::new(models_of(config)),
        serve::beside_models(config, &device),
        serve::secrets(config),
    );
    settings.confinement.read = places.grant().await;
    let (held, tried) = match trial::run(settings, &serve::caches_of(&config.service)).await {
        Ok(told) => told,
        Err(problem) => return Some(Finding::bad(WHAT, problem)),
    };
    if config.service.confine_workers == ConfineWorkers::Never {
        let found = "not confined, as service.confine_workers says: a model that took one over could read tokens and open sockets";
        return Some(with_tries(Finding::good(WHAT, found), &tried));
    }
    let succeeded: Vec<&str> = tried
        .iter()
        .filter(|tried| tried.outcome == Outcome::Succeeded)
        .map(|tried| tried.what.as_str())
        .collect();
    let refused = tried
        .iter()
        .filter(|tried| tried.outcome == Outcome::Refused)
        .count();
    // What the kernel lacks is no fault of this machine's configuration, and the finding names it.
    let is_well = succeeded.is_empty() || !held.lacks.is_empty();
    let found = match succeeded.is_empty() {
        true => format!("{held}; of what a hostile one would do, all {refused} tries were refused"),
        false => format!("{held}; a hostile one could: {}", succeeded.join(", ")),
    };
    let finding = match is_well {
        true => Finding::good(WHAT, found),
        false => Finding::bad(WHAT, found),
    };
    Some(with_tries(finding, &tried))
}

fn with_tries(finding: Finding, tried: &[Tried]) -> Finding {
    let tried = tried
        .iter()
        .map(|tried| (tried.what.clone(), tried.outcome.to_string()))
        .collect();
    Finding { tried, ..finding }
}

/// The first of the configured cards that answers.
fn first_card(config: &Config) -> Option<(DeviceSpec, CardDescription)> {
    let found = DeviceChoice::resolve(&config.cards.devices).ok()?.devices;
    found
        .into_iter()
        .find_map(|device| Some((device.clone(), device.describe().ok()?)))
}

/// The free space for downloads, on the disk of the folder or of its nearest existing parent.
fn cache_folder(config: &Config) -> Finding {
    let folder = &config.hub.cache;
    let there = folder.ancestors().find(|folder| folder.exists());
    let free = fs4::available_space(there.unwrap_or(folder));
    let shown = folder.display();
    let found = free.map(|bytes| {
        format!(
            "{shown}, {} free for downloads",
            bytesize::ByteSize(bytes).display().si()
        )
    });
    Finding::of(
        "cache",
        found.map_err(|problem| format!("{shown}: {problem}; hub.cache names another folder")),
    )
}

/// Whether the hub answers. Only downloads need it, so a machine without a network has no problem.
async fn hub(config: &Config) -> Finding {
    const WHAT: &str = "hub";
    let endpoint = &config.hub.endpoint;
    if config.hub.offline {
        return Finding::good(WHAT, format!("{endpoint} is not asked: HF_HUB_OFFLINE is set"));
    }
    let hub = Hub::new(config.hub.clone(), Arc::new(pipelines::families()));
    match hub.check().await {
        Ok(Login::Token) => Finding::good(WHAT, format!("{endpoint} answers and accepts the token")),
        Ok(Login::Anonymous) => Finding::good(
            WHAT,
            format!("{endpoint} answers; gated models need HF_TOKEN, or `hf auth login`"),
        ),
        Err(refused @ PullError::TokenRefused { .. }) => Finding::bad(WHAT, refused),
        Err(problem) => Finding::good(WHAT, format!("{problem} (only downloads need it)")),
    }
}

async fn models(config: &Config) -> Vec<Finding> {
    let models = models_of(config);
    let library = Arc::new(Library::new(pipelines::families(), None));
    let config = config.clone();
    let look = move || {
        let Some(card) = cards_of(&config).into_iter().next() else {
            return Vec::new(); // the cards have their own findings
        };
        let mut findings = Vec::new();
        for folder in models.folders() {
            if !folder.is_dir() {
                let problem = format!(
                    "{} is no folder: create it, or take it out of models.folders",
                    folder.display()
                );
                findings.push(Finding::bad("models", problem));
            }
        }
        if let Some(id) = serve::missing_default(&config, &models) {
            let problem = format!(
                "models.default names {id}, which is not there: get it with `moored pull`, or name another"
            );
            findings.push(Finding::bad("models", problem));
        }
        for model in models.list().iter() {
            let reference = ModelRef {
                revision: model.revision.clone(),
                ..ModelRef::named(&model.id)
            };
            let opened = models
                .resolve(&reference)
                .and_then(|resolved| library.open(&resolved.entry, &card));
            findings.push(match opened {
                Ok(open) => {
                    let bytes: Bytes = open.components.iter().map(|c| c.bytes).sum();
                    let found = format!("{} ({}, {bytes} on the card)", model.id, open.model.family());
                    Finding::good("model", found)
                }
                Err(error) => Finding {
                    // The hub cache has models of other programs too, which are no problem.
                    well: matches!(error, Error::ModelUnsupported(_)) && models.is_of_hub(model),
                    what: "model",
                    found: format!("{}: {error}", model.id),
                    tried: Vec::new(),
                },
            });
        }
        if findings.is_empty() {
            let problem = "none found: set models.folders, or download one with `moored pull`";
            findings.push(Finding::bad("models", problem));
        }
        findings
    };
    tokio::task::spawn_blocking(look).await.unwrap_or_default()
}
