//! `moored models`, `info` and `rm`: list, describe and remove models.

use std::collections::BTreeMap;

use api::v1;
use config::{ClientSettings, Config};
use hub::Reference;
use hub::catalogue::{self, Needs};
use model::{FULL, Preset};
use residency::Bytes;
use serde_json::json;

use crate::Program;
use crate::connection::{Connection, listen_address};
use crate::names::short_revision;
use crate::pull::decimal;
use crate::{CliError, screen, total_of};

/// Lists the models of the service; where none answers, those of the folders and the hub cache of this machine.
pub(super) async fn list(program: &dyn Program, config: &Config, json: bool) -> Result<(), CliError> {
    let mut residency = match Connection::open(&config.client).await {
        Ok(connection) => connection.residency(),
        // A service elsewhere has other models.
        Err(CliError::Unreachable { endpoint, .. }) if listen_address(&config.client).is_some() => {
            return list_here(program, config, &endpoint, json);
        }
        Err(other) => return Err(other),
    };
    let status = residency.get_status(v1::GetStatusRequest {}).await?.into_inner();
    let v1::ListModelsResponse {
        models: listed,
        adapters,
        others,
    } = residency
        .list_models(v1::ListModelsRequest::default())
        .await?
        .into_inner();
    if json {
        listed.iter().try_for_each(screen::message)?;
        return Ok(());
    }
    if listed.is_empty() {
        return screen::text(
            "no models: download one with `moored pull` (`moored models --available` names some), or add a folder with \
             `moored serve --models FOLDER`",
        );
    }
    let rows = listed.into_iter().map(|model| {
        let bytes = total_of(model.components.iter().map(|c| c.bytes));
        let formats = formats(&model);
        let smaller = model.choices.iter().filter(|choice| choice.bytes < bytes);
        let choices: Vec<String> = smaller
            .map(|choice| format!("{} {}", choice.preset, Bytes(choice.bytes)))
            .collect();
        let mut notes = Vec::new();
        if model.is_default {
            notes.push("default".to_owned());
        }
        notes.extend(in_memory(&model, &status));
        notes.extend(Some(model.problem).filter(|problem| !problem.is_empty()));
        vec![
            model.id,
            short_revision(&model.revision).to_owned(),
            model.family,
            model.media,
            Bytes(bytes).to_string(),
            formats,
            choices.join(", "),
            notes.join("; "),
        ]
    });
    screen::table(
        &[
            "model",
            "revision",
            "family",
            "generates",
            "on the card",
            "formats",
            "quantized",
            "",
        ],
        rows.collect(),
    )?;
    if !adapters.is_empty() {
        let adapters = match adapters.len() {
            1 => "1 adapter is".to_owned(),
            more => format!("{more} adapters are"),
        };
        screen::note(&format!("{adapters} there too: `moored models --adapters`"));
    }
    if !others.is_empty() {
        screen::note(&others_in_words(&others));
    }
    Ok(())
}

/// The files that do not run here in one line, counted by kind.
fn others_in_words(others: &[v1::OtherFile]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for other in others {
        *counts.entry(other.what.as_str()).or_default() += 1;
    }
    let counted: Vec<String> = counts
        .iter()
        .map(|(what, count)| match count {
            1 => (*what).to_owned(),
            several => format!("{what} ({several} files)"),
        })
        .collect();
    format!("in ComfyUI's folders and not run here: {}", counted.join("; "))
}

/// Lists the models that a service of this configuration would have.
fn list_here(program: &dyn Program, config: &Config, endpoint: &str, json: bool) -> Result<(), CliError> {
    let found = program.models(config);
    if json {
        return found.iter().try_for_each(|model| {
            screen::json(&json!({"id": model.id, "revision": model.revision, "path": model.path.display().to_string()}))
        });
    }
    let rows = found.iter().map(|model| {
        vec![
            model.id.clone(),
            short_revision(&model.revision).to_owned(),
            model.path.display().to_string(),
        ]
    });
    screen::table(&["model", "revision", "folder or file"], rows.collect())?;
    screen::note(&format!(
        "no service answers at {endpoint}: these are the models of this machine's folders and hub cache"
    ));
    Ok(())
}

/// Lists the adapters of the service.
pub(super) async fn list_adapters(client: &ClientSettings, json: bool) -> Result<(), CliError> {
    let mut residency = Connection::open(client).await?.residency();
    let listed = residency.list_models(v1::ListModelsRequest::default()).await?;
    let adapters = listed.into_inner().adapters;
    if json {
        return adapters.iter().try_for_each(screen::message);
    }
    if adapters.is_empty() {
        return screen::text(
            "no adapters: download one with `moored pull OWNER/NAME`, or set models.adapters to the folders that they are in",
        );
    }
    let rows = adapters
        .into_iter()
        .map(|adapter| vec![adapter.id, adapter.kind, Bytes(adapter.bytes).to_string()]);
    screen::table(&["adapter", "kind", "size"], rows.collect())
}

/// The components of a model that are in memory, by entry.
fn in_memory(model: &v1::ModelInfo, status: &v1::Status) -> Vec<String> {
    let mut forms: BTreeMap<String, (Vec<String>, bool)> = BTreeMap::new();
    for resident in status.cards.iter().flat_map(|card| &card.residents) {
        let name = resident.component.clone().unwrap_or_default().name;
        for key in &resident.entries {
            let (id, form) = key.rsplit_once('+').unwrap_or((key, FULL));
            let revision = id.strip_prefix(&model.id).and_then(|rest| rest.strip_prefix('@'));
            if id != model.id && revision != Some(&model.revision) {
                continue;
            }
            let form = forms.entry(form.to_owned()).or_default();
            form.0.push(name.clone());
            form.1 |= resident.pinned;
        }
    }
    let mut notes: Vec<String> = forms
        .iter()
        .map(|(form, (components, pinned))| {
            let pinned = if *pinned { ", pinned" } else { "" };
            format!("in memory ({form}{pinned}): {}", components.join(", "))
        })
        .collect();
    if model.pinned && !forms.values().any(|(_, pinned)| *pinned) {
        notes.insert(0, "pinned".to_owned());
    }
    notes
}

/// The formats of a model's files: `full`, or the formats of its quantized components.
fn formats(model: &v1::ModelInfo) -> String {
    let quantized = model.quantization.iter().filter(|(_, format)| *format != FULL);
    let mut words: Vec<String> = quantized
        .map(|(component, format)| format!("{component} {format}"))
        .collect();
    words.sort();
    match (&words[..], model.quantization.is_empty()) {
        ([], true) => String::new(),
        ([], false) => FULL.to_owned(),
        (words, _) => words.join(", "),
    }
}

/// Prints one model's data from the service and the catalogue.
pub(super) async fn info(config: &Config, name: &str, json: bool) -> Result<(), CliError> {
    let known = catalogue::find(name);
    let id = known.map_or(name, |model| &model.id);
    let listed = match Connection::open(&config.client).await {
        Ok(connection) => {
            let listed = connection
                .residency()
                .list_models(v1::ListModelsRequest::default())
                .await?;
            let models = listed.into_inner().models;
            // As where a model is named for a job: by its last word, if only one has it.
            let is_called = |model: &&v1::ModelInfo| model.id.rsplit('/').next() == Some(name);
            let mut called = models.iter().filter(is_called);
            let called = called.next().filter(|_| called.next().is_none());
            let named = models.iter().find(|model| model.id == name || model.id == id);
            named.or(called).cloned()
        }
        Err(CliError::Unreachable { .. }) => None,
        Err(other) => return Err(other),
    };
    let cached = id.parse::<Reference>().ok();
    let cached = cached.and_then(|reference| hub::size_in_cache(&config.hub.cache, &reference));
    if listed.is_none() && known.is_none() && cached.is_none() {
        return Err(CliError::NoModel(format!(
            "nothing is known of {name}: the service does not list it, it has no short name, and it is not in {}{}",
            config.hub.cache.display(),
            catalogue::did_you_mean(name, [])
        )));
    }
    let mut facts: Vec<(&str, String)> = vec![("model", id.to_owned())];
    if let Some(known) = known {
        facts.push(("short name", known.name.clone()));
        facts.push(("about", known.in_words()));
        facts.push(("licence", known.licence.clone()));
        if known.needs_terms {
            facts.push((
                "access",
                format!(
                    "log in at {}/{id} and accept the terms, if it asks",
                    config.hub.endpoint
                ),
            ));
        }
        facts.push(("download", format!("{:.1} GB", known.download_gb)));
        let forms: Vec<String> = known
            .forms()
            .map(|form| format!("{} ({:.1} GB)", form.name, form.download_gb))
            .collect();
        if !forms.is_empty() {
            facts.push(("smaller", forms.join(", ")));
        }
        if !known.with.is_empty() {
            facts.push(("pulled with", known.with.join(", ")));
        }
        let sizes = |size: &dyn Fn(&Needs) -> String| {
            let sizes = Preset::ALL.into_iter().filter_map(|preset| {
                let needs = known.needs(preset, false)?;
                Some(format!("{} {}", preset.as_str(), size(needs)))
            });
            sizes.collect::<Vec<_>>().join(", ")
        };
        // The catalogue is used only for a model that the service lacks, as the service's own figures are exact.
        if listed.is_none() {
            facts.push(("memory", sizes(&|needs| needs.weights().to_string())));
        }
        let whole = sizes(&|needs| needs.whole().to_string());
        facts.push(("card", format!("without streaming: {whole}")));
        let least = sizes(&|needs| format!("{} ({} in each step)", needs.least(), needs.streamed_at_least()));
        facts.push(("streamed", format!("at the least: {least}")));
    }
    if let Some(bytes) = cached {
        let state = format!("{} in {}", decimal(bytes), config.hub.cache.display());
        facts.push(("downloaded", state));
    }
    match &listed {
        Some(model) => facts.extend(facts_of(model)),
        None => facts.push(("service", "none that answers lists it".to_owned())),
    }
    if json {
        let object: serde_json::Map<String, serde_json::Value> = facts
            .into_iter()
            .map(|(name, value)| (name.replace(' ', "_"), value.into()))
            .collect();
        return screen::json(&object.into());
    }
    facts
        .iter()
        .try_for_each(|(name, value)| screen::text(&format!("{name:<12} {value}")))
}

fn facts_of(model: &v1::ModelInfo) -> Vec<(&'static str, String)> {
    if !model.problem.is_empty() {
        return vec![("problem", model.problem.clone())];
    }
    let components: Vec<String> = model
        .components
        .iter()
        .map(|component| format!("{} {}", component.name, Bytes(component.bytes)))
        .collect();
    let choices: Vec<String> = model
        .choices
        .iter()
        .map(|choice| format!("{} {}", choice.preset, Bytes(choice.bytes)))
        .collect();
    let defaults = model.defaults.unwrap_or_default();
    let mut facts = vec![
        ("family", model.family.clone()),
        ("generates", model.media.clone()),
        ("components", components.join(", ")),
        ("memory", choices.join(", ")),
        ("stored as", formats(model)),
        ("defaults", defaults_of(&defaults)),
    ];
    if !model.revision.is_empty() {
        facts.insert(0, ("revision", model.revision.clone()));
    }
    if model.is_default {
        facts.push(("default", "of requests that name no model".to_owned()));
    }
    facts
}

/// What a request has that does not say otherwise: a size where the model has one, and a length where its results have.
fn defaults_of(defaults: &v1::ModelDefaults) -> String {
    let size = (defaults.width > 0).then(|| format!("{}x{}", defaults.width, defaults.height));
    let frames = (defaults.frames > 0).then(|| {
        format!(
            "{} frames, {} a second",
            defaults.frames, defaults.frames_per_second
        )
    });
    let seconds = (defaults.seconds > 0.0).then(|| format!("{} s", defaults.seconds));
    let sampling = format!("{} steps, guidance {}", defaults.steps, defaults.guidance);
    let all = [size, frames, seconds, Some(sampling)];
    all.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Removes a model from the hub cache of this machine, all of its revisions.
pub(super) async fn remove(config: &Config, name: &str, yes: bool, json: bool) -> Result<(), CliError> {
    let reference: Reference = name.parse()?;
    let cache = &config.hub.cache;
    let Some(bytes) = hub::size_in_cache(cache, &reference) else {
        return Err(CliError::NoModel(format!(
            "{} is not in {}; models in other folders are yours to remove",
            reference.listed_id(),
            cache.display()
        )));
    };
    if !yes {
        if !screen::can_ask(json) {
            return Err(CliError::Usage(format!(
                "{} in {} would be removed: --yes does it without asking",
                decimal(bytes),
                cache.display()
            )));
        }
        let question = format!(
            "Remove {} ({}) from {}?",
            reference.listed_id(),
            decimal(bytes),
            cache.display()
        );
        if !screen::confirm(&question).await? {
            return screen::text("nothing was removed");
        }
    }
    hub::remove_from_cache(cache, &reference)?;
    if json {
        return screen::json(&json!({"event": "removed", "id": reference.listed_id(), "bytes": bytes}));
    }
    screen::text(&format!(
        "removed {}: {} freed on the disk",
        reference.listed_id(),
        decimal(bytes)
    ))?;
    screen::note("a service that has it in memory keeps it until it is unloaded");
    Ok(())
}
