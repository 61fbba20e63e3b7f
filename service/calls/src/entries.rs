//! Resolves references of requests to models, with their formats, adapters and ControlNets, and opens the models.

use std::sync::Arc;

use engine::Error;
use engine::job::JobOptions;
use engine::library::{Entry, Library, OpenModel};
use engine::queue::Queue;
use gpu::CardDescription;
use hub::catalogue;
use residency::Bytes;

use crate::choose::{Chosen, left_open};
use crate::errors::{invalid, short, too_many};
use crate::models::{Meant, Models, Resolved};
use crate::references::{AskedAdapter, AskedControl, ModelRef};
use crate::threads::FILES;

/// Most components that formats can be named for.
const MOST_FORMATS: usize = 64;

/// Finds and opens the models that requests name. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Entries {
    pub(crate) queue: Queue,
    pub(crate) library: Arc<Library>,
    pub(crate) models: Arc<Models>,
}

impl Entries {
    /// The cards of the service.
    pub(crate) fn cards(&self) -> Vec<CardDescription> {
        cards_of(&self.queue)
    }

    /// The card whose dtype a model is opened for where any dtype is acceptable.
    pub(crate) fn first_card(&self) -> CardDescription {
        first_card_of(&self.queue)
    }

    /// Opens a model on a blocking thread, since headers are read.
    pub(crate) async fn open(&self, entry: &Arc<Entry>) -> Result<OpenModel, Error> {
        let (library, card, entry) = (self.library.clone(), self.first_card(), entry.clone());
        let path = entry.path.clone();
        let id = entry.id.clone();
        let opened = self.library.aside(&path, move || library.open(&entry, &card));
        opened.await.map_err(|error| with_its_pull(error, &id))
    }

    /// The entry that a reference names. This may scan folders and choose formats.
    pub(crate) async fn entry(&self, model: ModelRef) -> Result<Arc<Entry>, Error> {
        Ok(self.chosen(model, &[], &JobOptions::default()).await?.entry)
    }

    /// As [`Entries::entry`], with these ControlNets, and the reason for the formats where the service chose them, for a job with
    /// these options.
    pub(crate) async fn chosen(
        &self,
        model: ModelRef,
        controls: &[AskedControl],
        options: &JobOptions,
    ) -> Result<Chosen, Error> {
        let (resolved, is_open) = self.resolved(model).await?;
        self.in_formats(resolved.entry, is_open, controls, options).await
    }

    /// As [`Entries::chosen`], with the open model and its adapters. An error of an adapter has the field of the request that
    /// names the adapter.
    pub(crate) async fn opened(
        &self,
        model: ModelRef,
        controls: &[AskedControl],
        options: &JobOptions,
    ) -> Result<(Chosen, OpenModel, Vec<AskedAdapter>), Error> {
        let (Resolved { entry, adapters }, is_open) = self.resolved(model).await?;
        let opened = async {
            let chosen = self.in_formats(entry, is_open, controls, options).await?;
            let open = self.open(&chosen.entry).await?;
            Ok((chosen, open))
        };
        match opened.await {
            Ok((chosen, open)) => Ok((chosen, open, adapters)),
            Err(error) => Err(self.named_by_field(error, &adapters, controls)),
        }
    }

    /// Resolves a reference; the flag says whether it leaves the formats to the service.
    async fn resolved(&self, model: ModelRef) -> Result<(Resolved, bool), Error> {
        check_reference(&model)?;
        match left_open(&model)? {
            Some(open) => Ok((self.models.entry(open).await?, true)),
            None => Ok((self.models.entry(model).await?, false)),
        }
    }

    /// An entry with these ControlNets. Where the reference leaves the formats open, they are chosen here.
    async fn in_formats(
        &self,
        entry: Arc<Entry>,
        is_open: bool,
        controls: &[AskedControl],
        options: &JobOptions,
    ) -> Result<Chosen, Error> {
        if is_open {
            let stored = self.with_control_nets(entry, controls).await?;
            return self.choose(stored, controls, options.clone()).await;
        }
        let entry = self.library.canonical(entry, self.first_card()).await?;
        Ok(Chosen {
            entry: self.with_control_nets(entry, controls).await?,
            reason: String::new(),
        })
    }

    /// As [`Entries::entry`], for requests that end a use of a model, such as unload and unpin: the one entry in use that
    /// matches a reference. The files of the entry are not read, as they may be gone or may not answer. Where several entries
    /// match, the files decide.
    pub(crate) async fn entry_in_use(&self, model: &ModelRef) -> Result<Arc<Entry>, Error> {
        check_reference(model)?;
        let meant = match left_open(model)? {
            Some(open) => Meant::AnyFormats(open),
            None => Meant::AsNamed(model.clone()),
        };
        let mut in_use = self.queue.known_entries().await;
        in_use.retain(|entry| meant.is(entry));
        if let [only] = &in_use[..] {
            return Ok(only.clone());
        }
        match (self.entry(model.clone()).await, in_use.into_iter().next()) {
            (Err(Error::ModelNotFound { .. } | Error::Invalid(_)), Some(first)) => Ok(first),
            (resolved, _) => resolved,
        }
    }

    /// Turns an error of an adapter into one of the request's field that names the adapter; other errors stay as they are.
    fn named_by_field(&self, error: Error, adapters: &[AskedAdapter], controls: &[AskedControl]) -> Error {
        let Error::Adapter { name, problem } = &error else {
            return error;
        };
        let is_it = |id: &str| self.models.adapter_name(id).is_some_and(|known| known == *name);
        let control = controls.iter().position(|control| is_it(&control.id));
        let adapter = adapters.iter().position(|adapter| is_it(&adapter.id));
        let field = match (control, adapter) {
            (Some(index), _) => format!("controls[{index}].id"),
            (None, Some(index)) => format!("model.adapters[{index}].id"),
            (None, None) => return error,
        };
        invalid(&field, format!("{name:?} cannot be attached: {problem}"))
    }

    /// The entry with the ControlNets that a request names.
    async fn with_control_nets(
        &self,
        entry: Arc<Entry>,
        controls: &[AskedControl],
    ) -> Result<Arc<Entry>, Error> {
        if controls.is_empty() {
            return Ok(entry);
        }
        let ids: Vec<String> = controls.iter().map(|control| control.id.clone()).collect();
        let models = self.models.clone();
        let with = FILES.run(move || models.with_control_nets(&entry, &ids)).await?;
        with.map(Arc::new)
    }
}

/// An error of opening a model of the catalogue that has parts in other repositories, with the `moored pull` that downloads
/// them.
fn with_its_pull(error: Error, id: &str) -> Error {
    let known = catalogue::find(id).filter(|known| !known.with.is_empty());
    match (error, known) {
        (Error::ModelUnsupported(problem), Some(known)) => Error::ModelUnsupported(format!(
            "{problem}; `moored pull {}` brings its other parts",
            known.name
        )),
        (error, _) => error,
    }
}

/// Bounds the formats of a reference, as they are kept with jobs, holds and pins. The id and the revision need no bound: only
/// those of existing models are kept.
fn check_reference(model: &ModelRef) -> Result<(), Error> {
    let formats = &model.formats;
    short("model.quantization.preset", &formats.preset)?;
    if formats.components.len() > MOST_FORMATS {
        let problem = too_many(formats.components.len(), "components", MOST_FORMATS);
        return Err(invalid("model.quantization.components", problem));
    }
    let mut words = formats
        .components
        .iter()
        .flat_map(|(name, format)| [name, format]);
    words.try_for_each(|word| short("model.quantization.components", word))
}

/// The cards of a queue.
pub(crate) fn cards_of(queue: &Queue) -> Vec<CardDescription> {
    let report = queue.status();
    let report = report.borrow();
    report.cards.iter().map(|card| card.description.clone()).collect()
}

/// The first card of a queue; a processor where there is none.
pub fn first_card_of(queue: &Queue) -> CardDescription {
    cards_of(queue)
        .into_iter()
        .next()
        .unwrap_or_else(|| CardDescription {
            id: "cpu".to_owned(),
            kind: gpu::CardKind::Cpu,
            name: String::new(),
            total: Bytes::ZERO,
            compute_capability: None,
            compute_dtype: "f32".to_owned(),
            peers: gpu::Peers::none(),
        })
}
