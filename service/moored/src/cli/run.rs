//! `moored run`: from a model's name to a picture. What is missing is downloaded, and a service started where none runs.
//!
//! A service that is started for this ends with it: one that stayed would keep the memory of a card, and a second start takes
//! seconds, since the model's files are in the page cache.

use std::time::Duration;

use residency::Bytes;

use super::arguments::Run;
use super::connection::Connection;
use super::generate::{Order, model_of};
use super::local::{self, LocalService};
use super::{CliError, catalogue, pull, screen};
use crate::config::Config;
use crate::hub::Reference;
use crate::models::Models;
use crate::proto::v1;
use crate::proto::v1::plan_request::Request as Asked;

/// Time that jobs of other clients have to finish when the service ends.
const DRAIN: Duration = Duration::from_secs(3600);

pub(super) async fn run(config: Config, options: Run, json: bool) -> Result<(), CliError> {
    let mut order = Order::of(
        Some(&options.model),
        options.prompt.as_deref(),
        options.prompts.file.as_deref(),
        &options.settings,
        &options.output,
        &config.client,
    )?;
    let tell = |text: &str| {
        if !json {
            screen::note(text);
        }
    };
    let (connection, own) = match Connection::open(&config.client).await {
        Ok(connection) => {
            let is_there = is_listed(&connection, &options.model).await?;
            order.set_model(&named(&options.model, is_there, tell)?);
            (connection, None)
        }
        Err(CliError::Unreachable { endpoint, problem }) => {
            let Some(listen) = local::address_of(&config.client.endpoint) else {
                return Err(CliError::Unreachable { endpoint, problem });
            };
            let models = Models::new(config.models.clone(), config.hub.cache.clone());
            let model = named(&options.model, is_here(&models, &options.model), tell)?;
            order.set_model(&model);
            if let Some(reference) = Reference::of_entry(&model).filter(|_| !is_here(&models, &model)) {
                pull::here(config.hub.clone(), &reference, false, json).await?;
            }
            tell(&format!(
                "no service runs at {listen}: starting one, which ends with this command (`moored serve` keeps one running)"
            ));
            let mut config = config.clone();
            config.service.listen = listen;
            config.service.drain = DRAIN;
            let (service, client) = LocalService::start(config).await?;
            (Connection::open(&client).await?, Some(service))
        }
        Err(other) => return Err(other),
    };
    let is_open = options.settings.formats.is_empty() && !options.model.contains('+');
    let outcome = async {
        if is_open && let Some(preset) = best_preset(&connection, &order, json).await? {
            order.set_formats(preset);
        }
        order.carry_out(&connection, true, json).await
    }
    .await;
    drop(connection);
    match own {
        Some(service) => outcome.and(service.end().await),
        None => outcome,
    }
}

/// The id of the model: one that exists takes precedence over a short name.
fn named(typed: &str, is_there: bool, tell: impl Fn(&str)) -> Result<String, CliError> {
    if is_there {
        return Ok(typed.to_owned());
    }
    if let Some(known) = catalogue::find(typed.split('+').next().unwrap_or_default())? {
        tell(&format!("{} is {} ({})", known.name, known.id, known.licence));
    }
    catalogue::full_name(typed)
}

/// Whether the service has a model with exactly this id.
async fn is_listed(connection: &Connection, name: &str) -> Result<bool, CliError> {
    let listed = connection
        .residency()
        .list_models(v1::ListModelsRequest {})
        .await?;
    let name = name.split('+').next().unwrap_or_default();
    Ok(listed.into_inner().models.iter().any(|model| model.id == name))
}

/// Whether the model is among these models.
fn is_here(models: &Models, name: &str) -> bool {
    let named = v1::ModelRef {
        id: name.to_owned(),
        ..Default::default()
    };
    models.resolve(Some(&named)).is_ok()
}

/// The card that a request is to run on; empty: any.
fn card_of(request: &Asked) -> String {
    let options = match request {
        Asked::Generate(image) => image.options.as_ref(),
        Asked::Video(video) => video.options.as_ref(),
        Asked::Audio(audio) => audio.options.as_ref(),
    };
    options.map(|options| options.card.clone()).unwrap_or_default()
}

/// The most faithful precision that runs now on the service's card, else that could run there at all; `None`: as stored.
async fn best_preset(
    connection: &Connection,
    order: &Order,
    json: bool,
) -> Result<Option<&'static str>, CliError> {
    let Some(first) = order.first() else {
        return Ok(None);
    };
    let mut request = v1::PlanRequest {
        request: Some(first.clone()),
        card: card_of(first),
    };
    let mut possible = None;
    for preset in catalogue::PRESETS {
        let mut order = order.clone();
        order.set_formats(preset);
        request.request = order.first().cloned();
        let plan = match connection.residency().plan(request.clone()).await {
            Ok(plan) => plan.into_inner(),
            Err(status) => match CliError::from(status) {
                // The service pulls a missing model, and plans again.
                CliError::Refused(refused) if refused.reason == v1::Reason::ModelNotFound.as_str_name() => {
                    let Some(reference) = order
                        .first()
                        .and_then(model_of)
                        .and_then(|m| Reference::of_entry(&m.id))
                    else {
                        return Ok(None);
                    };
                    pull::by_service(connection, &reference, json).await?;
                    connection.residency().plan(request.clone()).await?.into_inner()
                }
                // Weights that are stored quantized take no other format, and a wrong request is reported when it is sent.
                CliError::Refused(_) => return Ok(None),
                other => return Err(other),
            },
        };
        if plan.runs_now {
            tell_choice(preset, &plan, json);
            return Ok(Some(preset));
        }
        let never = plan.stages.iter().any(|stage| stage.verdict == "never");
        if !never && possible.is_none() {
            possible = Some((preset, plan));
        }
    }
    Ok(possible.map(|(preset, plan)| {
        tell_choice(preset, &plan, json);
        preset
    }))
}

fn tell_choice(preset: &str, plan: &v1::PlanResponse, json: bool) {
    if json || preset == catalogue::PRESETS[0] {
        return;
    }
    let mut components: Vec<&v1::Component> =
        plan.stages.iter().flat_map(|stage| &stage.components).collect();
    components.sort_by_key(|component| &component.id);
    components.dedup_by_key(|component| &component.id);
    let bytes: u64 = components.iter().map(|component| component.bytes).sum();
    screen::note(&format!(
        "in {preset} ({}): more does not fit {}; --quantization overrides this",
        Bytes(bytes),
        plan.card
    ));
}
