//! `moored models --available`: the models that have a short name, and which of them fit this card.

use std::collections::BTreeSet;

use api::v1;
use config::Config;
use gpu::CardKind;
use hub::catalogue::{self, Extent, Fit, Makes, Model, Needs, Room};
use model::Preset;
use residency::Bytes;
use serde_json::{Map, Value, json};

use crate::Program;
use crate::connection::Connection;
use crate::doctor::Finding;
use crate::{CliError, screen};

/// Dtype of cards on which weights take twice the bytes.
const F32: &str = "f32";

/// Models and card of the service that answers, else of this machine.
pub(super) struct Inventory {
    program: &'static dyn Program,
    place: Place,
    /// The card that models are compared with: see [`Room::rank`].
    pub(super) card: Option<Card>,
}

/// Where the models are.
enum Place {
    /// In a service, which lists these ids.
    Service(Vec<String>),
    /// On this machine, of this configuration.
    Here(Box<Config>),
}

/// A card, and the room for a model on it.
pub(super) struct Card {
    id: String,
    total: Bytes,
    pub(super) room: Room,
}

impl Inventory {
    /// The inventory of the service, if one answers, else of this machine.
    pub(super) async fn of(program: &'static dyn Program, config: &Config) -> Result<Inventory, CliError> {
        match Connection::open(&config.client).await {
            Ok(connection) => Inventory::of_service(program, &connection, config.cards.headroom).await,
            Err(CliError::Unreachable { .. }) => Ok(Inventory::of_this_machine(program, config)),
            Err(other) => Err(other),
        }
    }

    /// The inventory of a service. `headroom` bytes of each card stay free.
    pub(super) async fn of_service(
        program: &'static dyn Program,
        connection: &Connection,
        headroom: Bytes,
    ) -> Result<Inventory, CliError> {
        let listed = connection
            .residency()
            .list_models(v1::ListModelsRequest::default())
            .await?
            .into_inner();
        Ok(Inventory {
            program,
            place: Place::Service(listed.models.into_iter().map(|model| model.id).collect()),
            card: Card::of_service(connection, headroom).await?,
        })
    }

    /// The inventory of this machine.
    pub(super) fn of_this_machine(program: &'static dyn Program, config: &Config) -> Inventory {
        Inventory {
            program,
            place: Place::Here(Box::new(config.clone())),
            card: Card::of_this_machine(program, config),
        }
    }

    /// Ids of its models.
    pub(super) fn ids(&self) -> Vec<String> {
        match &self.place {
            Place::Service(ids) => ids.clone(),
            Place::Here(config) => self
                .program
                .models(config)
                .into_iter()
                .map(|model| model.id)
                .collect(),
        }
    }

    /// Whether it has a model that a request could name so.
    pub(super) fn has(&self, name: &str) -> bool {
        match &self.place {
            Place::Service(ids) => self.program.is_among(ids, name),
            Place::Here(config) => self.program.has_model(config, name),
        }
    }
}

impl Card {
    /// The best card of a service. `headroom` bytes of each card stay free.
    pub(super) async fn of_service(
        connection: &Connection,
        headroom: Bytes,
    ) -> Result<Option<Card>, CliError> {
        let status = connection.residency().get_status(v1::GetStatusRequest {}).await?;
        let status = status.into_inner();
        let info = connection
            .server()
            .get_server_info(v1::GetServerInfoRequest {})
            .await?;
        let taken = |id: &str| {
            let card = status.cards.iter().find(|card| card.id == id);
            let memory = card.and_then(|card| card.memory).unwrap_or_default();
            Bytes(memory.context) + Bytes(memory.workspaces)
        };
        let cards = info.into_inner().cards.into_iter().map(|card| Card {
            total: Bytes(card.total_bytes),
            room: Room {
                bytes: Bytes(card.total_bytes) - taken(&card.id) - headroom,
                is_f32: card.compute_dtype == F32,
                is_cpu: card.kind == "cpu",
            },
            id: card.id,
        });
        Ok(cards.max_by_key(|card| card.room.rank()))
    }

    /// The best card of this machine.
    fn of_this_machine(program: &dyn Program, config: &Config) -> Option<Card> {
        let headroom = config.cards.headroom;
        let cards = program.cards(config).into_iter().map(|card| Card {
            room: match card.kind {
                CardKind::Cuda => Room {
                    is_f32: card.compute_dtype == F32,
                    ..Room::expected(card.total, headroom)
                },
                CardKind::Cpu | CardKind::Simulated => Room {
                    bytes: card.total - headroom,
                    is_f32: card.compute_dtype == F32,
                    is_cpu: card.kind == CardKind::Cpu,
                },
            },
            total: card.total,
            id: card.id,
        });
        cards.max_by_key(|card| card.room.rank())
    }

    /// A command to start with, for a model that fits and needs no login: the first picture model, else the first music model.
    pub(super) fn first_command(&self) -> Option<String> {
        let fits = |model: &&Model| !model.needs_terms && model.best_in(&self.room).is_some();
        let of = |makes: Makes| {
            catalogue::all()
                .iter()
                .filter(fits)
                .find(|model| model.makes == makes)
        };
        let (model, prompt) = match (of(Makes::Image), of(Makes::Audio)) {
            (Some(picture), _) => (picture, "a cat"),
            (None, Some(music)) => (music, "a slow waltz"),
            (None, None) => return None,
        };
        let slow = match self.room.is_cpu {
            true => ", which is slow on a CPU",
            false => "",
        };
        Some(format!("`moored run {} \"{prompt}\"`{slow}", model.name))
    }

    /// How a model runs on it, in words: `8-bit`, `4-bit, streamed`, `up to 640x352`, `no`.
    fn fit_in_words(&self, model: &Model) -> String {
        let fits = match (model.best_in(&self.room), model.smaller_in(None, &self.room)) {
            (Some((preset, fit)), _) => fit.in_words(preset),
            (None, Some(size)) => format!("up to {size}"),
            (None, None) => return "no".to_owned(),
        };
        match self.room.is_cpu {
            true => format!("{fits}, slow"),
            false => fits,
        }
    }
}

/// What the words of [`Card::fit_in_words`] mean, as far as they are among `said`.
fn explained(said: &[String]) -> Vec<&'static str> {
    let words = [
        (
            "streamed",
            "streamed: larger than the card; a part of the weights is copied to it in each step, which takes time",
        ),
        (
            "up to",
            "up to: its default size needs more memory; this size or length runs",
        ),
    ];
    let is_said = |word: &str| said.iter().any(|fits| fits.contains(word));
    let explained = words.into_iter().filter(|(word, _)| is_said(word));
    explained.map(|(_, meaning)| meaning).collect()
}

/// The licences of the catalogue's models: the open ones, and who has terms of its own.
fn licences() -> String {
    // Those have names of SPDX, which are one word.
    let (open, own): (Vec<&Model>, Vec<&Model>) = catalogue::all()
        .iter()
        .partition(|model| !model.licence.contains(' '));
    let open: BTreeSet<&str> = open.iter().map(|model| model.licence.as_str()).collect();
    let open: Vec<&str> = open.into_iter().collect();
    let own: Vec<String> = own
        .iter()
        .map(|model| format!("{} ({})", model.name, model.licence))
        .collect();
    format!("licences: {}, but for {}", open.join(" or "), own.join(", "))
}

/// The short names of smaller downloads.
fn smaller_downloads() -> String {
    let forms = catalogue::all().iter().flat_map(Model::forms);
    let forms: Vec<String> = forms
        .map(|form| format!("{} ({:.0} GB)", form.name, form.download_gb))
        .collect();
    format!("smaller downloads, stored in 4 bits: {}", forms.join(", "))
}

/// Lists the models of the catalogue, and which fit the card.
pub(super) async fn list(
    program: &'static dyn Program,
    config: &Config,
    as_json: bool,
) -> Result<(), CliError> {
    let place = Inventory::of(program, config).await?;
    let ids = place.ids();
    let is_here = |model: &Model| ids.contains(&model.id);
    if as_json {
        return catalogue::all()
            .iter()
            .try_for_each(|model| screen::json(&in_json(model, place.card.as_ref(), is_here(model))));
    }
    let fits = |model: &Model| match &place.card {
        Some(card) => card.fit_in_words(model),
        None => "unknown".to_owned(),
    };
    let said: Vec<String> = catalogue::all().iter().map(fits).collect();
    let rows = catalogue::all().iter().zip(&said).map(|(model, fits)| {
        vec![
            model.name.clone(),
            fits.clone(),
            match is_here(model) {
                true => "is here".to_owned(),
                false => format!("{:.0} GB", model.download_gb),
            },
            model.makes.in_words().to_owned(),
            model.about.clone(),
        ]
    });
    screen::table(&["name", "fits", "download", "makes", "about"], rows.collect())?;
    for meaning in explained(&said) {
        screen::note(meaning);
    }
    screen::note(&licences());
    screen::note(&smaller_downloads());
    screen::note("`moored info NAME` shows licence, memory, and whether a login is needed");
    if let Some(card) = &place.card {
        screen::note(&format!("this card: {}, {}", card.id, card.total));
        if let Some(command) = card.first_command() {
            screen::note(&format!("try {command}"));
        }
    }
    Ok(())
}

/// A model of the catalogue, and how it runs on a card.
fn in_json(model: &Model, card: Option<&Card>, is_here: bool) -> Value {
    let is_f32 = card.is_some_and(|card| card.room.is_f32);
    let by_preset = |value: &dyn Fn(Preset) -> Value| -> Map<String, Value> {
        let values = Preset::ALL.into_iter();
        values
            .map(|preset| (preset.as_str().to_owned(), value(preset)))
            .collect()
    };
    let bytes = |preset: Preset, is_f32: bool, of: fn(&Needs) -> Bytes| -> Value {
        model.needs(preset, is_f32).map(|needs| of(needs).0).into()
    };
    let best = card.and_then(|card| model.best_in(&card.room));
    let forms = model.forms();
    let forms: Vec<Value> = forms
        .map(|form| json!({"name": form.name, "id": form.id, "download_gb": form.download_gb}))
        .collect();
    let smaller = card
        .filter(|_| best.is_none())
        .and_then(|card| model.smaller_in(None, &card.room));
    json!({
        "name": model.name, "id": model.id, "media": model.makes.as_str(), "licence": model.licence,
        "needs_terms": model.needs_terms, "download_gb": model.download_gb, "about": model.in_words(), "here": is_here,
        "memory_bytes": by_preset(&|preset| bytes(preset, false, Needs::weights)),
        "fits": best.map(|(preset, _)| preset.as_str()),
        "streamed_bytes_per_step": best.map(|(_, fit)| fit.streamed().0),
        "smaller": smaller,
        "forms": forms,
        "slow": card.is_some_and(|card| card.room.is_cpu),
        "precisions": by_preset(&|preset| {
            let fit = card.and_then(|card| model.fit(preset, &card.room));
            json!({
                "card_bytes": bytes(preset, is_f32, Needs::whole),
                "least_card_bytes": bytes(preset, is_f32, Needs::least),
                "streamed_bytes_per_step_at_least": bytes(preset, is_f32, Needs::streamed_at_least),
                "fits": fit.is_some(),
                "streamed_bytes_per_step": fit.map(|fit| fit.streamed().0),
            })
        }),
    })
}

/// For `moored doctor`: how the models of the catalogue run on the best card of this machine.
pub(super) fn finding(program: &dyn Program, config: &Config) -> Option<Finding> {
    let card = Card::of_this_machine(program, config)?;
    let models = catalogue::all().iter();
    let models: Vec<String> = models
        .map(|model| format!("{} {}", model.name, card.fit_in_words(model)))
        .collect();
    Some(Finding::good(
        "fits",
        format!("{}: {}", card.id, models.join("; ")),
    ))
}

/// Before a download: says how the model runs on the card. If it does not fit, asks whether to go on, or fails where nobody can be
/// asked. `preset` is the requested precision, `None` any; `asked` the requested size.
pub(super) async fn confirm_fit(
    model: &Model,
    preset: Option<Preset>,
    asked: Extent,
    card: &Card,
    as_json: bool,
) -> Result<(), CliError> {
    if preset.is_some_and(|preset| model.needs(preset, card.room.is_f32).is_none()) {
        return Ok(()); // the planner says it
    }
    let fit = match preset {
        Some(preset) => model.fit(preset, &card.room).map(|fit| (preset, fit)),
        None => model.best_in(&card.room),
    };
    if let Some((preset, fit)) = fit {
        if let Some(told) = told_of(preset, fit, card)
            && !as_json
        {
            screen::note(&told);
        }
        return Ok(());
    }
    if model.runs(asked, preset, &card.room) {
        return Ok(());
    }
    let told = refusal(model, preset, card);
    if !screen::can_ask(as_json) {
        return Err(CliError::DoesNotFit(format!(
            "{told}: nothing was downloaded; --pull goes on all the same"
        )));
    }
    screen::note(&told);
    let question = format!("Download it ({:.0} GB) all the same?", model.download_gb);
    match screen::confirm(&question).await? {
        true => Ok(()),
        false => Err(CliError::DoesNotFit("nothing was downloaded".to_owned())),
    }
}

/// What somebody should know of a model that fits; `None` if it fits without a drawback.
fn told_of(preset: Preset, fit: Fit, card: &Card) -> Option<String> {
    if card.room.is_cpu {
        return Some("it runs on the CPU, which is slow: minutes and more for a result".to_owned());
    }
    match fit {
        Fit::Whole => None,
        Fit::Streamed { each_step } => Some(format!(
            "it is larger than {}: in {} {each_step} of its weights are copied to the card in each step, which takes time",
            card.id,
            preset.as_str()
        )),
    }
}

/// Why a model does not fit a card, and what does.
fn refusal(model: &Model, preset: Option<Preset>, card: &Card) -> String {
    let room = &card.room;
    let of_preset = |preset: Preset| Some((preset, model.needs(preset, room.is_f32)?.least()));
    let least = match preset {
        Some(preset) => of_preset(preset),
        None => model.least_need(room.is_f32),
    };
    let needs = least.map_or_else(String::new, |(preset, needed)| {
        format!(" needs {needed} of a card in {}, and", preset.as_str())
    });
    let instead = match model.best_in(room) {
        Some((preset, fit)) => format!("; {} fits", fit.in_words(preset)),
        None => {
            let smaller = model.smaller_in(preset, room);
            let smaller = smaller.map(|size| format!("; {size} would fit"));
            let other = catalogue::first_that_fits(model.makes, room);
            let other =
                other.map(|(other, preset, fit)| format!("; {} fits ({})", other.name, fit.in_words(preset)));
            smaller.into_iter().chain(other).collect()
        }
    };
    format!(
        "in its default size {}{needs} {} has {} for it{instead}",
        model.name, card.id, room.bytes
    )
}
