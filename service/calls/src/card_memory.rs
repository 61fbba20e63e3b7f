//! Calls about the memory of the cards: models and their residency, holds, reservations, plans and status.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use engine::job::{JobSpec, JobWork};
use engine::library::{Entry, OpenModel};
use engine::queue::{PlanReport, Queue, Reserver, StatusReport, UnloadReport};
use engine::{Error, Reserved};
use futures::Stream;
use gpu::CardDescription;
use model::{Preset, Quantization, Reads, Request};
use residency::{Bytes, Component, Policy};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::watch;
use tokio::time::Instant;
use turns::Turns;

use crate::allowance::check_model;
use crate::asked::Asked;
use crate::bounds::Bounds;
use crate::budget::Client;
use crate::caller::{AskedOptions, Caller, card_named};
use crate::choose::Chosen;
use crate::chunks::{Encoding, Output};
use crate::entries::Entries;
use crate::errors::{invalid, outside, short, to_its_end, words_of};
use crate::generation::Generation;
use crate::host::{Host, HostMemory, WorkerPids};
use crate::models::{Found, FoundAdapter, OtherFile};
use crate::other_process::OtherProcess;
use crate::references::ModelRef;
use crate::resolved::{ResolvedModel, formats_of};
use crate::results::Started;
use crate::threads::FILES;

/// Number of listings that are made at a time, each for another client.
const LISTINGS_AT_ONCE: usize = 8;
const DEFAULT_HOLD: Duration = Duration::from_secs(60);
const LONGEST_HOLD: Duration = Duration::from_secs(3600);
const DEFAULT_RESERVATION: Duration = Duration::from_secs(600);
const LONGEST_RESERVATION: Duration = Duration::from_secs(86_400);
/// Number of models that a listing opens concurrently.
const LISTED_AT_ONCE: usize = 8;
/// Timeout of opening one model; after it the model is listed without its details.
const LIST_LIMIT: Duration = Duration::from_secs(10);
/// Least time between two statuses for a watcher that sets no interval.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// The longest interval that a watcher may set.
const LONGEST_WATCH_INTERVAL: Duration = Duration::from_secs(3600);

/// Answers requests about the memory of the cards. Cheap to clone.
#[derive(Clone)]
pub struct CardMemory {
    queue: Queue,
    entries: Entries,
    generation: Generation,
    bounds: Bounds,
    listings: Turns<Client>,
    /// Eviction policy; `None`: by the model.
    policy: Option<Policy>,
    host: Arc<Host>,
    workers: WorkerPids,
    started: Instant,
    /// True once the service is shutting down: endless streams end then.
    stopping: watch::Receiver<bool>,
}

/// A model to be loaded.
#[derive(Clone, Debug, Default)]
pub struct AskedLoad {
    pub model: ModelRef,
    /// Names of components; empty for all.
    pub components: Vec<String>,
    /// The model that it replaces.
    pub replace: Option<ModelRef>,
    /// Run the smallest request afterwards, as a proof.
    pub prove: bool,
    pub options: Option<AskedOptions>,
}

/// Memory of a card that is to be kept free for other programs.
#[derive(Clone, Debug, Default)]
pub struct AskedReservation {
    pub bytes: Bytes,
    /// `None`: ten minutes.
    pub ttl: Option<Duration>,
    pub card: String,
    pub label: String,
    /// Id of a reservation to renew; empty for a new one.
    pub reservation_id: String,
    /// The reservation ends when this process does; 0 for none.
    pub process_id: u32,
}

/// A request to plan.
#[derive(Clone, Debug)]
pub enum Planned {
    Request(Box<Asked>),
    /// The default request of a model.
    Model(ModelRef),
}

/// The plan of a request.
pub struct Plan {
    pub model: ResolvedModel,
    pub report: PlanReport,
}

/// The models and adapters that requests can name.
pub struct Listing {
    pub models: Vec<ListedModel>,
    pub adapters: Arc<Vec<FoundAdapter>>,
    /// Files of ComfyUI's folders that are no models that run here.
    pub others: Vec<OtherFile>,
}

/// A model that can be named.
pub struct ListedModel {
    pub id: String,
    pub revision: String,
    pub is_default: bool,
    /// Its details, or why it cannot be opened.
    pub details: Result<ModelDetails, String>,
}

/// Details of a model that can be opened.
pub struct ModelDetails {
    pub family: String,
    /// The values of fields that a request does not set.
    pub defaults: Request,
    /// The optional fields of a request that it reads.
    pub reads: Reads,
    pub components: Vec<Component>,
    /// Names of components that are resident, in any formats.
    pub resident: Vec<String>,
    pub pinned: bool,
    /// The format that each component is held in.
    pub formats: BTreeMap<String, String>,
    /// The presets that it can be loaded with, and their bytes.
    pub choices: Vec<(Preset, u64)>,
}

/// The state of the service.
pub struct ServiceStatus {
    pub report: Arc<StatusReport>,
    /// Process ids of the workers, in the order of the cards; 0 where none runs.
    pub workers: Vec<u32>,
    /// Eviction policy; `None`: by the model.
    pub policy: Option<Policy>,
    pub host: HostMemory,
    pub uptime: Duration,
}

impl CardMemory {
    pub(crate) fn new(
        generation: Generation,
        bounds: Bounds,
        policy: Option<Policy>,
        host: Arc<Host>,
        workers: WorkerPids,
        stopping: watch::Receiver<bool>,
    ) -> CardMemory {
        CardMemory {
            queue: generation.queue.clone(),
            entries: generation.entries.clone(),
            generation,
            bounds,
            listings: Turns::new(LISTINGS_AT_ONCE, 1),
            policy,
            host,
            workers,
            started: Instant::now(),
            stopping,
        }
    }

    /// The states of the cards and jobs, as they change.
    pub fn reports(&self) -> watch::Receiver<Arc<StatusReport>> {
        self.queue.status()
    }

    /// The cards of the service.
    pub fn cards(&self) -> Vec<CardDescription> {
        self.entries.cards()
    }

    /// Id of the model of requests that name none; `None` where there is none.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub async fn default_model(&self) -> Result<Option<String>, Error> {
        let models = self.entries.models.clone();
        FILES.run(move || models.default_id(&models.known())).await
    }

    /// All models and adapters that requests can name.
    ///
    /// # Errors
    /// [`Error::Internal`].
    pub async fn list_models(&self, rescan: bool, caller: &Caller) -> Result<Listing, Error> {
        let models = self.entries.models.clone();
        let listing = move || match rescan {
            true => (models.rescan(), models.rescan_adapters()),
            false => (models.list(), models.adapters()),
        };
        // Each opens every model: a client's listings are made one after another.
        let _turn = self.listings.next_of(caller.client()).await;
        let (found, adapters) = FILES.run(listing).await?;
        let default = self.entries.models.default_id(&found).unwrap_or_default();
        let report = self.queue.status_now().await;
        let mut models = Vec::with_capacity(found.len());
        for some in found.chunks(LISTED_AT_ONCE) {
            let listed = some.iter().map(|model| self.listed(model, &default, &report));
            models.extend(futures::future::join_all(listed).await);
        }
        Ok(Listing {
            models,
            adapters,
            others: self.entries.models.others(),
        })
    }

    async fn listed(&self, model: &Found, default: &str, report: &StatusReport) -> ListedModel {
        let details = match tokio::time::timeout(LIST_LIMIT, self.details(model, report)).await {
            Ok(details) => details.map_err(|error| words_of(&error)),
            Err(_) => Err(format!(
                "its files have not answered for {} s: is the disk or the network share there?",
                LIST_LIMIT.as_secs()
            )),
        };
        ListedModel {
            id: model.id.clone(),
            revision: model.revision.clone(),
            is_default: model.id == default,
            details,
        }
    }

    async fn details(&self, model: &Found, report: &StatusReport) -> Result<ModelDetails, Error> {
        let reference = ModelRef {
            revision: model.revision.clone(),
            ..ModelRef::named(&model.id)
        };
        let entry = self.entries.entry(reference).await?;
        let open = self.entries.open(&entry).await?;
        let choices = self.choices(&entry, &open).await;
        let resident = |component: &Component| {
            report
                .cards
                .iter()
                .any(|card| card.ledger.is_resident(&component.id))
        };
        let here = open.components.iter().filter(|c| resident(c));
        let mut names: BTreeSet<String> = here.map(|c| c.name.clone()).collect();
        // The same model in other formats.
        let is_of_it = |key: &String| entry.is_of_same_model(key);
        let residents = report.cards.iter().flat_map(|card| card.ledger.residents());
        let in_other_formats = residents.map(|r| &r.component).filter(|c| {
            let users = report.users.get(&c.id);
            resident(c) && users.is_some_and(|users| users.iter().any(is_of_it))
        });
        names.extend(in_other_formats.map(|c| c.name.clone()));
        Ok(ModelDetails {
            family: open.model.family().to_owned(),
            defaults: self.entries.models.defaults(&model.id, open.model.defaults()),
            reads: open.model.reads(),
            components: open.components.to_vec(),
            resident: names.into_iter().collect(),
            pinned: report.pinned.iter().any(is_of_it),
            formats: formats_of(&open),
            choices,
        })
    }

    /// The presets that a model can be loaded with: those that make it smaller, beside `full`.
    async fn choices(&self, entry: &Entry, open: &OpenModel) -> Vec<(Preset, u64)> {
        let full: u64 = open.components.iter().map(|c| c.bytes.0).sum();
        let (library, card, entry) = (
            self.entries.library.clone(),
            self.entries.first_card(),
            entry.clone(),
        );
        let path = entry.path.clone();
        let measured = self.entries.library.aside(&path, move || {
            let smaller = Preset::ALL.into_iter().filter_map(|preset| {
                let quantization = Quantization::of(preset, []).ok()?;
                let bytes = library.bytes(&entry.quantized(quantization), &card).ok()?.0;
                (preset == Preset::Full || bytes < full).then_some((preset, bytes))
            });
            Ok(smaller.collect())
        });
        measured.await.unwrap_or_default()
    }

    /// Loads a model.
    ///
    /// # Errors
    /// When the request is wrong, the model cannot be opened, or the queue has no room.
    pub async fn load(&self, request: AskedLoad, caller: &Caller) -> Result<Started, Error> {
        let options = caller.options(request.options, &self.cards())?;
        let Chosen { entry, reason } = self.entries.chosen(request.model, &[], &options).await?;
        let open = self.entries.open(&entry).await?;
        if request.components.len() > open.components.len() {
            let problem = format!(
                "names {} components, and the model has {}: name each once",
                request.components.len(),
                open.components.len()
            );
            return Err(invalid("components", problem));
        }
        for name in &request.components {
            if !open.components.iter().any(|component| component.name == *name) {
                let there: Vec<&str> = open.components.iter().map(|c| c.name.as_str()).collect();
                let problem = format!("{name:?} is none of {}", there.join(", "));
                return Err(invalid("components", problem));
            }
        }
        let model = ResolvedModel::of(&entry, &open, reason);
        let replace = match request.replace {
            Some(old) if old.id.is_empty() => {
                let problem = "is empty: name the model whose place it takes";
                return Err(invalid("replace.id", problem));
            }
            Some(old) => Some(self.entries.entry(old).await?),
            None => None,
        };
        let work = JobWork::Load {
            components: request.components,
            prove: request.prove || replace.is_some(),
            replace,
        };
        let spec = JobSpec { options, entry, work };
        let output = Output::without_recipe(Encoding::Raw);
        self.generation.start(spec, model, output, caller).await
    }

    /// Unloads a model, or all models for an empty reference. With `force`, jobs that use the models are cancelled.
    ///
    /// # Errors
    /// When the reference or the client's name is wrong, or the model is not known.
    pub async fn unload(
        &self,
        model: ModelRef,
        client_id: String,
        force: bool,
        caller: &Caller,
    ) -> Result<UnloadReport, Error> {
        let client = caller.name(client_id)?;
        let entry = if model == ModelRef::default() {
            None
        } else if model.id.is_empty() {
            let problem = "is empty, and formats, a revision or adapters are named: name their model, or leave all of it out \
                           to unload every model";
            return Err(invalid("model.id", problem));
        } else {
            Some(self.entries.entry_in_use(&model).await?)
        };
        self.queue.unload(entry, force.then_some(client)).await
    }

    /// Pins a model, or unpins it. Returns the keys of all pinned models.
    ///
    /// # Errors
    /// When the model cannot be found, or does not fit.
    pub async fn pin(&self, model: ModelRef, unpin: bool) -> Result<Vec<String>, Error> {
        let pinned = match unpin {
            true => {
                let entry = self.entries.entry_in_use(&model).await?;
                self.queue.unpin(&entry.key).await
            }
            false => {
                let entry = self.entries.entry(model).await?;
                self.queue.pin(entry).await
            }
        };
        if pinned.is_ok() {
            self.generation.kept.save_claims().await;
        }
        pinned
    }

    /// Holds a model for a client. Returns the id and the time to live of the hold.
    ///
    /// # Errors
    /// When the model cannot be found, or the client has as many holds as it may.
    pub async fn hold(
        &self,
        model: ModelRef,
        client_id: String,
        ttl: Option<Duration>,
        caller: &Caller,
    ) -> Result<(String, Duration), Error> {
        let client = caller.name(client_id)?;
        let ttl = time_to_live(ttl, DEFAULT_HOLD, LONGEST_HOLD)?;
        let entry = self.entries.entry(model).await?;
        check_model(&entry, caller.holder())?;
        let (residency, owner) = (self.clone(), caller.account());
        let queue = self.queue.within(caller.reach());
        to_its_end(async move {
            let key = format!("{client}\n{}", entry.key);
            let claim = residency.bounds.holds.begin(owner, key, ttl)?;
            let hold_id = queue.hold(entry, client, ttl).await?;
            claim.granted(&hold_id);
            residency.generation.kept.save_claims().await;
            Ok((hold_id, ttl))
        })
        .await
    }

    /// Ends a hold; false when there was none.
    pub async fn release_hold(&self, id: &str, caller: &Caller) -> bool {
        let released = self.queue.within(caller.reach()).release_hold(id).await;
        if released || caller.holder().is_none() {
            self.bounds.holds.end(id);
        }
        if released {
            self.generation.kept.save_claims().await;
        }
        released
    }

    /// How a request would run, on one card or on any that it fits.
    ///
    /// # Errors
    /// As for the request itself.
    pub async fn plan(&self, planned: Planned, card: &str, caller: &Caller) -> Result<Plan, Error> {
        let prepared = match planned {
            Planned::Request(asked) => self.generation.prepare(*asked, caller).await?,
            Planned::Model(model) => self.generation.prepare_default(model).await?,
        };
        let _decoded = prepared.decoded;
        let report = self.queue.plan(prepared.spec, &self.card_id(card)?).await?;
        Ok(Plan {
            model: prepared.model,
            report,
        })
    }

    /// The state of the service now.
    pub async fn status(&self) -> ServiceStatus {
        self.with_host(self.queue.status_now().await)
    }

    /// The state of the service now and after each change, with at least this time between two of them (zero: a quarter of a
    /// second), until the service shuts down.
    ///
    /// # Errors
    /// When the time is too long.
    pub fn watch_status(
        &self,
        interval: Duration,
    ) -> Result<impl Stream<Item = ServiceStatus> + Send + 'static, Error> {
        if interval > LONGEST_WATCH_INTERVAL {
            let most = LONGEST_WATCH_INTERVAL.as_millis();
            return Err(invalid("interval_ms", outside(interval.as_millis(), 0, most)));
        }
        let interval = if interval.is_zero() {
            WATCH_INTERVAL
        } else {
            interval
        };
        let residency = self.clone();
        let reports = watched(self.queue.status(), self.stopping.clone(), interval);
        Ok(futures::StreamExt::map(reports, move |report| {
            residency.with_host(report)
        }))
    }

    fn with_host(&self, report: Arc<StatusReport>) -> ServiceStatus {
        ServiceStatus {
            report,
            workers: self.workers.pids().collect(),
            policy: self.policy,
            host: self.host.read(&self.workers),
            uptime: self.started.elapsed(),
        }
    }

    /// Returns unused memory of a card to the system. The result is the number of bytes.
    ///
    /// # Errors
    /// When there is no such card, or it is not ready.
    pub async fn trim(&self, card: &str) -> Result<Bytes, Error> {
        self.queue.trim(&self.card_id(card)?).await
    }

    /// Keeps memory of a card free for other programs, or renews a reservation.
    ///
    /// # Errors
    /// When the request is wrong, the client has as many reservations as it may, or the memory cannot be freed.
    pub async fn reserve(&self, request: AskedReservation, caller: &Caller) -> Result<Reserved, Error> {
        let ttl = time_to_live(request.ttl, DEFAULT_RESERVATION, LONGEST_RESERVATION)?;
        short("label", &request.label)?;
        short("reservation_id", &request.reservation_id)?;
        let renewed = Some(request.reservation_id).filter(|id| !id.is_empty());
        if request.bytes == Bytes::ZERO && renewed.is_none() {
            return Err(invalid(
                "bytes",
                "is 0: set the bytes to keep free, or the id of a reservation to renew",
            ));
        }
        if request.process_id > 0 && renewed.is_some() {
            return Err(invalid(
                "process_id",
                "cannot be changed when a reservation is renewed: leave it out",
            ));
        }
        let process = (request.process_id > 0).then(|| process_for(caller, request.process_id));
        let process = process.transpose()?;
        let (residency, owner) = (self.clone(), caller.account());
        // Dropped with this call: then nobody learns of a new reservation.
        let (_here, mut left) = tokio::sync::oneshot::channel::<()>();
        to_its_end(async move {
            let reservations = &residency.bounds.reservations;
            let key = match &renewed {
                None => uuid::Uuid::new_v4().to_string(), // each call makes a new one
                Some(id) => reservations.key_of(id),
            };
            let claim = reservations.begin(owner, key, ttl)?;
            let queue = &residency.queue;
            let reserved = match &renewed {
                None => {
                    let by = Reserver {
                        label: request.label,
                        process: process.as_ref().map(OtherProcess::id),
                    };
                    let card = residency.card_id(&request.card)?;
                    queue.reserve(&card, request.bytes, ttl, by).await?
                }
                Some(id) => queue.renew_reservation(id, request.bytes, ttl).await?,
            };
            claim.granted(&reserved.id);
            if renewed.is_none() && left.try_recv() == Err(TryRecvError::Closed) {
                residency.release_reservation(&reserved.id).await;
                return Ok(reserved);
            }
            if let Some(process) = process {
                residency.release_with(process, reserved.id.clone());
            }
            residency.generation.kept.save_claims().await;
            Ok(reserved)
        })
        .await
    }

    /// Ends a reservation; false when there was none.
    pub async fn release_reservation(&self, id: &str) -> bool {
        let released = self.queue.release_reservation(id).await;
        self.bounds.reservations.end(id);
        if released {
            self.generation.kept.save_claims().await;
        }
        released
    }

    /// Replaces the worker of a card, or of all cards for an empty name. Returns the ids of the cards.
    ///
    /// # Errors
    /// When there is no such card, or jobs run on it and `force` is not set.
    pub async fn recycle(
        &self,
        card: &str,
        client_id: String,
        force: bool,
        caller: &Caller,
    ) -> Result<Vec<String>, Error> {
        let client = caller.name(client_id)?;
        self.queue.recycle(&self.card_id(card)?, client, force).await
    }

    /// The id of the card that a request names.
    fn card_id(&self, name: &str) -> Result<String, Error> {
        card_named("card", name, &self.cards())
    }

    /// Releases a reservation when a process ends.
    fn release_with(&self, process: OtherProcess, id: String) {
        let (queue, reservations) = (self.queue.clone(), self.bounds.reservations.clone());
        tokio::spawn(async move {
            process.release_at_its_end(&queue, &id).await;
            reservations.end(&id);
        });
    }
}

/// Name of an eviction policy.
pub fn policy_name(policy: Option<Policy>) -> &'static str {
    match policy {
        Some(Policy::Shared) => "shared",
        Some(Policy::Exclusive) => "exclusive",
        None => "by model",
    }
}

/// The process that a caller names for its reservation.
///
/// # Errors
/// When there is none. A caller on another machine must not learn which processes exist: any process that it names is refused.
fn process_for(caller: &Caller, id: u32) -> Result<OtherProcess, Error> {
    if !caller.is_on_this_machine() {
        let problem = "is of the machine of the service, and you call from another: leave it out, and renew the reservation by its \
                       id for as long as it is needed";
        return Err(invalid("process_id", problem));
    }
    OtherProcess::open(id).map_err(|problem| invalid("process_id", problem.to_string()))
}

/// The current report and later ones, at least `interval` apart, until the service shuts down.
fn watched<T: Clone>(
    mut reports: watch::Receiver<T>,
    mut stopping: watch::Receiver<bool>,
    interval: Duration,
) -> impl Stream<Item = T> {
    async_stream::stream! {
        loop {
            let report = reports.borrow_and_update().clone();
            yield report;
            let next = async {
                tokio::time::sleep(interval).await;
                reports.changed().await.is_ok()
            };
            let goes_on = tokio::select! {
                goes_on = next => goes_on,
                _ = stopping.wait_for(|stopping| *stopping) => false,
            };
            if !goes_on {
                return;
            }
        }
    }
}

fn time_to_live(asked: Option<Duration>, default: Duration, longest: Duration) -> Result<Duration, Error> {
    let Some(ttl) = asked else { return Ok(default) };
    if ttl.is_zero() || ttl > longest {
        let (ttl, longest) = (
            humantime::format_duration(ttl),
            humantime::format_duration(longest),
        );
        return Err(invalid(
            "ttl",
            format!("is {ttl}: set one over 0 and up to {longest}"),
        ));
    }
    Ok(ttl)
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;

    use super::*;

    #[test]
    fn a_caller_on_another_machine_does_not_learn_which_processes_exist() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let (there, gone) = (std::process::id(), ended.id());
        let refused = |address: &str, id| {
            let process = process_for(&Caller::at(Some(address)), id);
            process
                .map(|process| process.id())
                .map_err(|error| error.to_string())
        };
        assert_eq!(refused("127.0.0.1:1", there), Ok(there));
        assert!(refused("127.0.0.1:1", gone).unwrap_err().contains("no process"));
        assert!(refused("10.0.0.1:1", there).unwrap_err().contains("process_id"));
        assert_eq!(refused("10.0.0.1:1", there), refused("10.0.0.1:1", gone));
    }

    #[tokio::test]
    async fn what_is_granted_to_a_caller_that_leaves_is_counted() {
        let (grant, granted) = tokio::sync::oneshot::channel::<()>();
        let (count, counted) = tokio::sync::oneshot::channel();
        let call = tokio::spawn(to_its_end(async move {
            let _ = granted.await;
            let _ = count.send(());
            Ok(())
        }));
        tokio::task::yield_now().await;
        call.abort();
        assert!(call.await.is_err(), "the caller has left");
        grant.send(()).unwrap();
        counted.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_ends_with_the_service_however_long_its_interval_is() {
        let (reports, reported) = watch::channel(1);
        let (stop, stopping) = watch::channel(false);
        let mut watcher = Box::pin(watched(reported, stopping, LONGEST_WATCH_INTERVAL));
        let began = Instant::now();
        assert_eq!(watcher.next().await, Some(1));
        reports.send_replace(2);
        assert_eq!(
            (watcher.next().await, began.elapsed()),
            (Some(2), LONGEST_WATCH_INTERVAL)
        );
        stop.send_replace(true);
        assert_eq!(
            (watcher.next().await, began.elapsed()),
            (None, LONGEST_WATCH_INTERVAL)
        );
    }
}
