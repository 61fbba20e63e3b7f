//! `moored run`: from a model's name to a picture. What is missing is downloaded, and a service started where none runs.
//!
//! A service that is started for this ends with it: one that stayed would keep the memory of a card, and a second start takes
//! seconds, since the model's files are in the page cache.

use std::time::Duration;

use super::arguments::Run;
use super::connection::Connection;
use super::generate::Order;
use super::local::{self, LocalService};
use super::{CliError, catalogue, interrupt, pull, screen};
use crate::config::Config;
use crate::hub::Reference;
use crate::models::Models;
use crate::proto::v1;

/// The preset that leaves the formats to the service.
const AUTO: &str = "auto";

/// Time that jobs of other clients have to finish when the service ends.
const DRAIN: Duration = Duration::from_secs(3600);

pub(super) async fn run(config: Config, mut options: Run, json: bool) -> Result<(), CliError> {
    if options.settings.medium.is_none() {
        let known = catalogue::find(options.model.split('+').next().unwrap_or_default())?;
        options.settings.medium = known.map(|model| model.medium);
    }
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
            let is_there = interrupt::or(is_listed(&connection, &options.model)).await?;
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
                interrupt::or(pull::here(config.hub.clone(), &reference, false, json)).await?;
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
        if is_open {
            order.set_formats(AUTO);
            interrupt::or(prepare(&connection, &order, json)).await?;
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
/// Has the service pull the model where it is missing, and tells which formats it chooses. A request that is wrong is
/// reported when it is sent.
async fn prepare(connection: &Connection, order: &Order, json: bool) -> Result<(), CliError> {
    let Some(first) = order.first() else {
        return Ok(());
    };
    let request = v1::PlanRequest {
        request: Some(first.clone().into()),
        card: first
            .options()
            .map(|options| options.card.clone())
            .unwrap_or_default(),
    };
    let plan = match connection.residency().plan(request.clone()).await {
        Ok(plan) => plan.into_inner(),
        Err(status) => match CliError::from(status) {
            CliError::Refused(refused) if refused.reason == v1::Reason::ModelNotFound.as_str_name() => {
                let Some(reference) = first.model().and_then(|model| Reference::of_entry(&model.id)) else {
                    return Ok(());
                };
                pull::by_service(connection, &reference, json).await?;
                connection.residency().plan(request).await?.into_inner()
            }
            CliError::Refused(_) => return Ok(()),
            other => return Err(other),
        },
    };
    let choice = plan.model.map(|model| model.choice).unwrap_or_default();
    if !json && !choice.is_empty() && !choice.starts_with(pipelines::FULL) {
        screen::note(&format!("{choice} (--quantization overrides this)"));
    }
    Ok(())
}
