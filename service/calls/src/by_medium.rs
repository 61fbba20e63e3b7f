//! Models by the medium that they generate: the default model of a request that names none, and the model to suggest where the
//! requested one generates another medium.

use std::sync::Arc;

use engine::Error;
use engine::library::Entry;
use engine::queue::StatusReport;
use gpu::CardKind;
use hub::catalogue::{self, Makes, Room};
use model::{Medium, Quantization};

use crate::entries::Entries;
use crate::errors::invalid;
use crate::models::Found;
use crate::references::ModelRef;
use crate::threads::FILES;

impl Entries {
    /// The reference of a request for this medium, with a model where it names none: the configured default or the shipped
    /// one, if it makes this medium, else the only model that does.
    ///
    /// # Errors
    /// When no model makes this medium, or several do.
    pub(crate) async fn of_medium(&self, model: ModelRef, makes: Makes) -> Result<ModelRef, Error> {
        if !model.id.is_empty() {
            return Ok(model);
        }
        match self.default_of(makes).await? {
            Some(id) => Ok(ModelRef { id, ..model }),
            None => Err(invalid(
                "model.id",
                format!(
                    "is empty, and there is no default model that makes {}: {}",
                    makes.in_words(),
                    self.command_to_get(makes)
                ),
            )),
        }
    }

    /// The model of requests for this medium that name none.
    async fn default_of(&self, makes: Makes) -> Result<Option<String>, Error> {
        let models = self.models.clone();
        let listing = FILES.run(move || models.list()).await?;
        for id in self.models.defaults_of(makes, &listing) {
            // If the default cannot be opened, the request fails with that error.
            match listing.iter().find(|found| found.id == id) {
                Some(found) if self.makes(found).await.is_some_and(|made| made != makes) => {}
                Some(_) | None => return Ok(Some(id)),
            }
        }
        let mut only = None;
        for found in listing.iter() {
            if self.makes(found).await != Some(makes) {
                continue;
            }
            match only.replace(found.id.clone()) {
                Some(other) if other != found.id => return Ok(None),
                _ => {}
            }
        }
        Ok(only)
    }

    /// The medium that a model generates; `None` if it cannot be opened.
    async fn makes(&self, found: &Found) -> Option<Makes> {
        let (id, revision, path) = (found.id.clone(), found.revision.clone(), found.path.clone());
        let entry = Arc::new(Entry::new(id, revision, path, Quantization::NONE));
        let open = self.open(&entry).await.ok()?;
        Some(Makes::of(&open.model.defaults().medium))
    }

    /// The error of a request for one medium to a model of another, with a model to name instead.
    pub(crate) async fn other_medium(&self, id: &str, made: &Medium, asked: Makes) -> Error {
        let made = Makes::of(made).in_words();
        let instead = match self.default_of(asked).await {
            Ok(Some(other)) => format!("name {other}, or get another: {}", self.command_to_get(asked)),
            Ok(None) | Err(_) => self.command_to_get(asked),
        };
        invalid(
            "model",
            format!("{id} makes {made}; for {} {instead}", asked.in_words()),
        )
    }

    /// A model of this medium that fits the best card, where this one may not.
    pub(crate) fn fitting_instead(&self, makes: Makes, id: &str) -> Option<String> {
        let room = room_of(&self.queue.status().borrow())?;
        catalogue::fitting_instead(makes, &room, id)
    }

    /// The command that downloads a model of this medium: the first that fits the best card.
    fn command_to_get(&self, makes: Makes) -> String {
        let report = self.queue.status();
        let fitting = room_of(&report.borrow()).and_then(|room| catalogue::first_that_fits(makes, &room));
        match fitting {
            Some((model, ..)) => format!("`moored pull {}`", model.name),
            None => "`moored models --available` lists some".to_owned(),
        }
    }
}

/// The room for a model on the best card.
fn room_of(report: &StatusReport) -> Option<Room> {
    let rooms = report.cards.iter().map(|card| {
        let accounts = card.ledger.accounts();
        Room {
            bytes: card.ledger.total() - accounts.context - accounts.workspaces - card.ledger.headroom(),
            is_f32: card.description.compute_dtype == "f32",
            is_cpu: card.description.kind == CardKind::Cpu,
        }
    });
    rooms.max_by_key(Room::rank)
}
