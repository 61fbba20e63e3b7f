//! `moored models --available`: the models that have a short name, and which of them fit this card.

use api::v1;
use config::Config;
use gpu::CardKind;
use hub::catalogue::{self, Makes, Model, Room};
use model::Preset;
use residency::Bytes;
use serde_json::json;

use crate::Program;
use crate::connection::Connection;
use crate::{CliError, screen};

/// Dtype of cards on which weights take twice the bytes.
const F32: &str = "f32";

/// Models and card of the service that answers, else of this machine.
pub(super) struct Inventory {
    program: &'static dyn Program,
    place: Place,
    /// The largest card.
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
    is_cpu: bool,
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
    /// The largest card of a service. `headroom` bytes of each card stay free.
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
            },
            is_cpu: card.kind == "cpu",
            id: card.id,
        });
        Ok(cards.max_by_key(|card| card.total))
    }

    /// The largest card of this machine.
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
                },
            },
            total: card.total,
            is_cpu: card.kind == CardKind::Cpu,
            id: card.id,
        });
        cards.max_by_key(|card| card.total)
    }

    /// A command to start with, for the first model that fits and needs no login.
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
        let slow = if self.is_cpu {
            ", which is slow on a CPU"
        } else {
            ""
        };
        Some(format!("`moored run {} \"{prompt}\"`{slow}", model.name))
    }
}

/// In which precision a model fits a card, in words.
fn fit_in_words(model: &Model, card: Option<&Card>) -> String {
    let Some(card) = card else {
        return "unknown".to_owned();
    };
    match (model.best_in(&card.room), card.is_cpu) {
        (None, _) => "no".to_owned(),
        (Some(preset), false) => preset.as_str().to_owned(),
        (Some(preset), true) => format!("{}, slow", preset.as_str()),
    }
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
        return catalogue::all().iter().try_for_each(|model| {
            let card = place.card.as_ref();
            let fits = card.and_then(|card| model.best_in(&card.room)).map(Preset::as_str);
            let memory: serde_json::Map<String, serde_json::Value> = Preset::ALL
                .into_iter()
                .map(|preset| (preset.as_str().to_owned(), model.memory(preset).0.into()))
                .collect();
            screen::json(
                &json!({"name": model.name, "id": model.id, "media": model.makes.as_str(), "licence": model.licence,
                "needs_terms": model.needs_terms, "download_gb": model.download_gb, "memory_bytes": memory,
                "fits": fits, "slow": card.is_some_and(|card| card.is_cpu), "here": is_here(model),
                "about": model.about}),
            )
        });
    }
    let rows = catalogue::all().iter().map(|model| {
        vec![
            model.name.clone(),
            fit_in_words(model, place.card.as_ref()),
            match is_here(model) {
                true => "is here".to_owned(),
                false => format!("{:.0} GB", model.download_gb),
            },
            model.makes.in_words().to_owned(),
            model.about.clone(),
        ]
    });
    screen::table(&["name", "fits", "download", "makes", "about"], rows.collect())?;
    screen::note("`moored info NAME` shows licence, memory, and whether a login is needed");
    if let Some(card) = &place.card {
        screen::note(&format!("this card: {}, {}", card.id, card.total));
        if let Some(command) = card.first_command() {
            screen::note(&format!("try {command}"));
        }
    }
    Ok(())
}

/// Warns, before a download, if the model does not fit the card: asks whether to go on, or fails where nobody can be
/// asked. `preset` is the requested precision, `None` any.
pub(super) async fn confirm_fit(
    model: &Model,
    preset: Option<Preset>,
    card: &Card,
    as_json: bool,
) -> Result<(), CliError> {
    let is_f32 = card.room.is_f32;
    let (least, needed) = match preset {
        Some(preset) => (preset, model.need(preset, is_f32)),
        None => model.least_need(is_f32),
    };
    if needed <= card.room.bytes {
        if card.is_cpu {
            screen::note("it runs on the CPU, which is slow: minutes and more for a result");
        }
        return Ok(());
    }
    let instead = match catalogue::first_that_fits(model.makes, &card.room) {
        Some((other, preset)) if other.name == model.name => format!("; {} fits", preset.as_str()),
        Some((other, preset)) => format!("; {} fits ({})", other.name, preset.as_str()),
        None => String::new(),
    };
    let told = format!(
        "in its default size {} needs {needed} of a card in {}, and {} has {} for it{instead}",
        model.name,
        least.as_str(),
        card.id,
        card.room.bytes
    );
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
