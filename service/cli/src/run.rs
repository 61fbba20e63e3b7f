//! `moored run`: from a model's name to a picture. A missing model is downloaded, and a service is started if none runs.
//!
//! A service that is started for this ends with it: one that stayed would keep the memory of a card, and a second start takes
//! seconds, since the model's files are in the page cache.

use std::time::Duration;

use api::v1;
use config::Config;
use hub::Reference;
use hub::catalogue::{self, Extent};
use model::Preset;

use crate::Program;
use crate::arguments::Run;
use crate::available::{self, Inventory};
use crate::connection::{Connection, listen_address};
use crate::generate::Order;
use crate::local::LocalService;
use crate::pull::{self, WhenMissing};
use crate::{CliError, interrupt, screen};

/// The preset that leaves the formats to the service.
const AUTO: &str = "auto";

/// Time that jobs of other clients have to finish when the service ends.
const DRAIN: Duration = Duration::from_secs(3600);

pub(super) async fn run(
    program: &'static dyn Program,
    config: Config,
    mut options: Run,
    json: bool,
) -> Result<(), CliError> {
    let known = catalogue::find_entry(&options.model);
    if options.settings.medium.is_none() {
        options.settings.medium = known.map(|model| model.makes.into());
    }
    options.settings.formats.settle_here(program, &config).await?;
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
            let found = Inventory::of_service(program, &connection, config.cards.headroom);
            let place = interrupt::or(found).await?;
            if !place.has(&options.model) {
                check_name(&options.model, &place, tell)?;
                confirm_fit(&options, &place, json).await?;
            }
            (connection, None)
        }
        Err(CliError::Unreachable { endpoint, problem }) => {
            let Some(listen) = listen_address(&config.client) else {
                return Err(CliError::Unreachable { endpoint, problem });
            };
            let place = Inventory::of_this_machine(program, &config);
            if !place.has(&options.model) {
                let reference = check_name(&options.model, &place, tell)?;
                confirm_fit(&options, &place, json).await?;
                interrupt::or(pull::here(program, config.hub.clone(), &reference, false, json)).await?;
            }
            tell(&format!(
                "no service runs at {listen}: starting one, which ends with this command (`moored serve` keeps one running)"
            ));
            let mut config = config.clone();
            config.service.listen = listen;
            config.service.drain = DRAIN;
            let (service, connection) = LocalService::start(program, config).await?;
            (connection, Some(service))
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
        Some(service) => service.end_with(outcome).await,
        None => outcome,
    }
}

/// The repository of a model that is not in the model folders. `tell` gets its licence where it has a short name.
///
/// # Errors
/// When it could not be on a hub.
fn check_name(typed: &str, place: &Inventory, tell: impl Fn(&str)) -> Result<Reference, CliError> {
    if let Some(known) = catalogue::find_entry(typed) {
        tell(&format!("{} is {} ({})", known.name, known.id, known.licence));
    }
    Reference::of_entry(typed).ok_or_else(|| {
        let ids = place.ids();
        let meant = catalogue::did_you_mean(typed, ids.iter().map(String::as_str));
        CliError::NoModel(format!(
            "there is no model {typed}: `moored models` lists those that are here, `moored models --available` those with a short \
             name, and OWNER/NAME is one of the hub{meant}"
        ))
    })
}

/// Before a model of the catalogue is downloaded: whether it fits the card.
async fn confirm_fit(options: &Run, place: &Inventory, json: bool) -> Result<(), CliError> {
    let (Some(model), Some(card)) = (catalogue::find_entry(&options.model), &place.card) else {
        return Ok(());
    };
    if options.pull {
        return Ok(());
    }
    let preset = match (options.settings.formats.preset(), options.model.split_once('+')) {
        (Some(AUTO), _) | (None, None | Some((_, AUTO))) => None,
        (Some(preset), _) | (None, Some((_, preset))) => match Preset::named(preset) {
            Some(preset) => Some(preset),
            None => return Ok(()), // formats by component: the planner says
        },
    };
    let settings = &options.settings;
    let asked = Extent {
        pixels: settings
            .width
            .zip(settings.height)
            .map(|(width, height)| u64::from(width) * u64::from(height)),
        frames: settings.frames,
        seconds: settings.seconds,
    };
    available::confirm_fit(model, preset, asked, card, json).await
}

/// Has the service pull the model where it is missing, and prints the formats that the service chooses. A refusal of the plan for
/// another reason is reported when the request is sent.
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
    let connection = &connection.about(first.model());
    let attempt = async || match connection.residency().plan(request.clone()).await {
        Ok(plan) => Ok(Some(plan.into_inner())),
        Err(status) => match CliError::from(status) {
            CliError::Refused(refused) if !refused.is_of_missing_model() => Ok(None),
            other => Err(other),
        },
    };
    let when_missing = WhenMissing { pull: true, json };
    let Some(plan) = when_missing.retry(connection, first.model(), attempt).await? else {
        return Ok(());
    };
    let choice = plan.model.map(|model| model.choice).unwrap_or_default();
    if !json && !choice.is_empty() && !choice.starts_with(model::FULL) {
        screen::note(&format!("{choice} (--quantization overrides this)"));
    }
    Ok(())
}
