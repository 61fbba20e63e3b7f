//! `moored.v1.Residency`.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use api::v1;
use api::v1::plan_request::Request as Planned;
use api::v1::residency_server::Residency;
use engine::Error;
use engine::job::{JobSpec, JobWork};
use engine::library::{Entry, OpenModel};
use engine::queue::{CardStatus, PlannedStage, Reserver, StatusReport};
use engine::{Freed, Kept};
use futures::{Stream, StreamExt as _};
use gpu::CardKind;
use pipelines::{Preset, Quantization};
use residency::{Bytes, Component, Move, Resident, ResidentState};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::asked::Asked;
use super::caller::{Caller, card_named};
use super::choose::Chosen;
use super::convert::{
    component_out, defaults_out, fallback_out, formats_out, holder_out, job_out, memory_out, resolved,
};
use super::server::{Service, policy_name};
use super::status::{invalid, short, shortfall_out, status_of, words_of};
use super::stream::{Encoding, EventStream, Output};
use crate::durations::millis;
use crate::models::Found;
use crate::process::other::OtherProcess;
use crate::threads::FILES;

const DEFAULT_HOLD: Duration = Duration::from_secs(60);
const LONGEST_HOLD: Duration = Duration::from_secs(3600);
const DEFAULT_RESERVATION: Duration = Duration::from_secs(600);
/// How often it is checked whether the process of a reservation has ended.
const PROCESS_CHECK_INTERVAL: Duration = Duration::from_secs(1);
const LONGEST_RESERVATION: Duration = Duration::from_secs(86_400);
/// Models that are opened at once to be listed.
const LISTED_AT_ONCE: usize = 8;
/// Timeout of opening one model; after it the model is listed without its details.
const LIST_LIMIT: Duration = Duration::from_secs(10);
/// Least time between two statuses of a watcher that names none.
const WATCH_INTERVAL: Duration = Duration::from_millis(250);
/// The longest interval that a watcher may name.
const LONGEST_WATCH_INTERVAL: Duration = Duration::from_secs(3600);

#[tonic::async_trait]
impl Residency for Service {
    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let models = self.models.clone();
        let rescan = request.into_inner().rescan;
        let listing = move || match rescan {
            true => (models.rescan(), models.rescan_adapters()),
            false => (models.list(), models.adapters()),
        };
        let (found, adapters) = FILES.run(listing).await.map_err(|e| status_of(&e))?;
        let others = self.models.others().into_iter();
        let default = self.models.default_id(&found).unwrap_or_default();
        let report = self.queue.status_now().await;
        let mut models = Vec::with_capacity(found.len());
        for some in found.chunks(LISTED_AT_ONCE) {
            let listed = some.iter().map(|model| self.model_info(model, &default, &report));
            models.extend(futures::future::join_all(listed).await);
        }
        let adapters = adapters.iter().map(|adapter| v1::AdapterInfo {
            bytes: adapter.bytes,
            kind: adapter.kind_name().to_owned(),
            id: adapter.id.clone(),
        });
        Ok(Response::new(v1::ListModelsResponse {
            models,
            adapters: adapters.collect(),
            others: others
                .map(|other| v1::OtherFile {
                    name: other.name,
                    what: other.what,
                })
                .collect(),
        }))
    }

    type LoadStream = EventStream;

    async fn load(&self, request: Request<v1::LoadRequest>) -> Result<Response<EventStream>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        let start = async {
            let options = caller.options(request.options.clone(), &self.cards())?;
            let Chosen { entry, reason } = self.chosen(request.model.clone(), &[], &options).await?;
            let open = self.open(&entry).await?;
            if request.components.len() > open.components.len() {
                let problem = format!(
                    "names {} components of {}",
                    request.components.len(),
                    open.components.len()
                );
                return Err(invalid("components", problem));
            }
            for name in &request.components {
                if !open.components.iter().any(|component| component.name == *name) {
                    let there: Vec<&str> = open.components.iter().map(|c| c.name.as_str()).collect();
                    return Err(invalid(
                        "components",
                        format!("{name:?} is none of {}", there.join(", ")),
                    ));
                }
            }
            let model = v1::ResolvedModel {
                choice: reason,
                ..resolved(&entry, &open)
            };
            let replace = match request.replace {
                Some(old) if old.id.is_empty() => {
                    return Err(invalid(
                        "replace.id",
                        "is empty: name the model whose place it takes",
                    ));
                }
                Some(old) => Some(self.entry(Some(old)).await?),
                None => None,
            };
            let work = JobWork::Load {
                components: request.components,
                prove: request.prove || replace.is_some(),
                replace,
            };
            let spec = JobSpec { options, entry, work };
            let output = Output::without_recipe(Encoding::Raw);
            self.start(spec, model, output, &caller).await
        };
        start.await.map(Response::new).map_err(|e: Error| status_of(&e))
    }

    async fn unload(
        &self,
        request: Request<v1::UnloadRequest>,
    ) -> Result<Response<v1::UnloadResponse>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        let client = caller.name(request.client_id).map_err(|e| status_of(&e))?;
        let entry = match request.model.unwrap_or_default() {
            all if all == v1::ModelRef::default() => None,
            model if model.id.is_empty() => {
                let problem = "is empty, and formats, a revision or adapters are named: name their model, or leave all of it out \
                               to unload every model";
                return Err(status_of(&invalid("model.id", problem)));
            }
            model => Some(self.entry_in_use(&model).await.map_err(|e| status_of(&e))?),
        };
        let report = self
            .queue
            .unload(entry, request.force.then_some(client))
            .await
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::UnloadResponse {
            freed: report.freed.iter().map(freed_out).collect(),
            kept: report.kept.iter().map(kept_out).collect(),
            cancelled_jobs: report.cancelled_jobs.iter().map(ToString::to_string).collect(),
        }))
    }

    async fn pin(&self, request: Request<v1::PinRequest>) -> Result<Response<v1::PinResponse>, Status> {
        let request = request.into_inner();
        let model = request.model.unwrap_or_default();
        let pinned = if request.unpin {
            let entry = self.entry_in_use(&model).await.map_err(|e| status_of(&e))?;
            self.queue.unpin(&entry.key).await
        } else {
            let entry = self.entry(Some(model)).await.map_err(|e| status_of(&e))?;
            self.queue.pin(entry).await
        };
        let pinned = pinned.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::PinResponse { pinned }))
    }

    async fn hold(&self, request: Request<v1::HoldRequest>) -> Result<Response<v1::HoldResponse>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        let client = caller.name(request.client_id).map_err(|e| status_of(&e))?;
        let ttl = time_to_live(request.ttl, DEFAULT_HOLD, LONGEST_HOLD).map_err(|e| status_of(&e))?;
        let entry = self
            .entry(request.model.clone())
            .await
            .map_err(|e| status_of(&e))?;
        let claim = self
            .limits
            .holds
            .begin(caller.client(), format!("{client}\n{}", entry.key), ttl)?;
        let held = self.queue.hold(entry, client, ttl).await;
        let hold_id = held.map_err(|e| status_of(&e))?;
        claim.granted(&hold_id);
        Ok(Response::new(v1::HoldResponse {
            hold_id,
            ttl: prost_types::Duration::try_from(ttl).ok(),
        }))
    }

    async fn release_hold(
        &self,
        request: Request<v1::ReleaseHoldRequest>,
    ) -> Result<Response<v1::ReleaseHoldResponse>, Status> {
        let hold_id = request.into_inner().hold_id;
        let released = self.queue.release_hold(&hold_id).await;
        self.limits.holds.end(&hold_id);
        Ok(Response::new(v1::ReleaseHoldResponse { released }))
    }

    async fn plan(&self, request: Request<v1::PlanRequest>) -> Result<Response<v1::PlanResponse>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        let plan = async {
            let prepared = match request
                .request
                .unwrap_or(Planned::Generate(v1::GenerateImageRequest::default()))
            {
                Planned::Generate(image) => self.prepare(Asked::image(image), &caller).await?,
                Planned::Video(video) => self.prepare(Asked::video(video), &caller).await?,
                Planned::Audio(audio) => self.prepare(Asked::audio(audio), &caller).await?,
                Planned::Model(model) => self.prepare_default(model).await?,
            };
            let _decoded = prepared.decoded;
            let report = self
                .queue
                .plan(prepared.spec, &self.card_id(&request.card)?)
                .await?;
            Ok(v1::PlanResponse {
                model: Some(prepared.model),
                card: report.card,
                stages: report.stages.iter().map(planned_out).collect(),
                runs_now: report.runs_now,
                predicted_move_seconds: report.predicted_move_seconds,
                upgrades: report.upgrades.iter().map(fallback_out).collect(),
            })
        };
        plan.await.map(Response::new).map_err(|e: Error| status_of(&e))
    }

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::Status>, Status> {
        let report = self.queue.status_now().await;
        Ok(Response::new(self.status_out(&report)))
    }

    type WatchStatusStream = Pin<Box<dyn Stream<Item = Result<v1::Status, Status>> + Send>>;

    async fn watch_status(
        &self,
        request: Request<v1::WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, Status> {
        let asked = Duration::from_millis(request.into_inner().interval_ms.into());
        if asked > LONGEST_WATCH_INTERVAL {
            let most = LONGEST_WATCH_INTERVAL.as_millis();
            let problem = format!("{} is more than {most}", asked.as_millis());
            return Err(status_of(&invalid("interval_ms", problem)));
        }
        let interval = if asked.is_zero() { WATCH_INTERVAL } else { asked };
        let service = self.clone();
        let reports = watched(self.queue.status(), self.stopping.clone(), interval);
        Ok(Response::new(Box::pin(
            reports.map(move |report| Ok(service.status_out(&report))),
        )))
    }

    async fn trim(&self, request: Request<v1::TrimRequest>) -> Result<Response<v1::TrimResponse>, Status> {
        let freed = self
            .queue
            .trim(
                &self
                    .card_id(&request.into_inner().card)
                    .map_err(|e| status_of(&e))?,
            )
            .await
            .map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::TrimResponse { freed_bytes: freed.0 }))
    }

    async fn reserve(
        &self,
        request: Request<v1::ReserveRequest>,
    ) -> Result<Response<v1::ReserveResponse>, Status> {
        let caller = Caller::of(&request);
        let client = caller.client();
        let request = request.into_inner();
        let checked = || {
            let ttl = time_to_live(request.ttl, DEFAULT_RESERVATION, LONGEST_RESERVATION)?;
            short("label", &request.label)?;
            short("reservation_id", &request.reservation_id)?;
            if request.bytes == 0 && request.reservation_id.is_empty() {
                return Err(invalid("bytes", "is 0: nothing to make room for"));
            }
            if request.process_id > 0 && !request.reservation_id.is_empty() {
                return Err(invalid(
                    "process_id",
                    "cannot be changed when a reservation is renewed: leave it out",
                ));
            }
            let process = (request.process_id > 0).then(|| process_for(&caller, request.process_id));
            Ok((ttl, process.transpose()?))
        };
        let (ttl, process) = checked().map_err(|e| status_of(&e))?;
        let (bytes, id) = (Bytes(request.bytes), request.reservation_id);
        let key = match id.as_str() {
            "" => uuid::Uuid::new_v4().to_string(), // each call makes a new one
            renewed => self.limits.reservations.key_of(renewed),
        };
        let claim = self.limits.reservations.begin(client, key, ttl)?;
        let reserved = match id.as_str() {
            "" => {
                let card = self.card_id(&request.card).map_err(|e| status_of(&e))?;
                let by = Reserver {
                    label: request.label,
                    process: process.as_ref().map(OtherProcess::id),
                };
                self.queue.reserve(&card, bytes, ttl, by).await
            }
            renewed => self.queue.renew_reservation(renewed, bytes, ttl).await,
        };
        let reserved = reserved.map_err(|e| status_of(&e))?;
        claim.granted(&reserved.id);
        if let Some(process) = process {
            self.release_with(process, reserved.id.clone());
        }
        Ok(Response::new(v1::ReserveResponse {
            reservation_id: reserved.id,
            bytes: reserved.bytes.0,
            evicted: reserved.evicted.iter().map(freed_out).collect(),
            card: reserved.card,
        }))
    }

    async fn release_reservation(
        &self,
        request: Request<v1::ReleaseReservationRequest>,
    ) -> Result<Response<v1::ReleaseReservationResponse>, Status> {
        let id = request.into_inner().reservation_id;
        let released = self.queue.release_reservation(&id).await;
        self.limits.reservations.end(&id);
        Ok(Response::new(v1::ReleaseReservationResponse { released }))
    }

    async fn recycle(
        &self,
        request: Request<v1::RecycleRequest>,
    ) -> Result<Response<v1::RecycleResponse>, Status> {
        let caller = Caller::of(&request);
        let request = request.into_inner();
        let client = caller.name(request.client_id).map_err(|e| status_of(&e))?;
        let card = self.card_id(&request.card).map_err(|e| status_of(&e))?;
        let cards = self.queue.recycle(&card, client, request.force).await;
        let cards = cards.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::RecycleResponse { cards }))
    }
}

/// The process that a caller names for its reservation.
///
/// # Errors
/// When there is none. A caller on another machine is not told which there are: whatever it names is refused.
fn process_for(caller: &Caller, id: u32) -> Result<OtherProcess, Error> {
    if !caller.is_on_this_machine() {
        let problem = "is of the machine of the service, and you call from another: leave it out, and renew the reservation by its \
                       id for as long as it is needed";
        return Err(invalid("process_id", problem));
    }
    OtherProcess::open(id).map_err(|problem| invalid("process_id", problem.to_string()))
}

impl Service {
    /// Releases a reservation when a process ends.
    fn release_with(&self, process: OtherProcess, id: String) {
        let (queue, limits) = (self.queue.clone(), self.limits.clone());
        tokio::spawn(async move {
            while !process.has_ended() {
                tokio::time::sleep(PROCESS_CHECK_INTERVAL).await;
                let status = queue.status_now().await;
                let mut there = status.cards.iter().flat_map(|card| &card.reservations);
                if !there.any(|reservation| reservation.id == id) {
                    return; // it was released, or has expired
                }
            }
            queue.release_reservation(&id).await;
            limits.reservations.end(&id);
        });
    }

    async fn model_info(&self, model: &Found, default: &str, report: &StatusReport) -> v1::ModelInfo {
        let mut info = v1::ModelInfo {
            id: model.id.clone(),
            revision: model.revision.clone(),
            is_default: model.id == default,
            ..Default::default()
        };
        let reference = v1::ModelRef {
            id: model.id.clone(),
            revision: model.revision.clone(),
            ..Default::default()
        };
        let opened = async {
            let entry = self.entry(Some(reference)).await?;
            let open = self.open(&entry).await?;
            let choices = self.choices(&entry, &open).await;
            Ok::<_, Error>((entry, open, choices))
        };
        let (entry, open, choices) = match tokio::time::timeout(LIST_LIMIT, opened).await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) => {
                info.problem = words_of(&error);
                return info;
            }
            Err(_) => {
                info.problem = format!(
                    "its files have not answered for {} s: is the disk or the network share there?",
                    LIST_LIMIT.as_secs()
                );
                return info;
            }
        };
        let defaults = self.models.defaults(&model.id, open.model.defaults());
        info.family = open.model.family().to_owned();
        defaults.medium.name().clone_into(&mut info.media);
        info.defaults = Some(defaults_out(&defaults));
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
        info.resident = names.into_iter().collect();
        info.components = open.components.iter().map(component_out).collect();
        info.pinned = report.pinned.iter().any(is_of_it);
        info.quantization = formats_out(&open);
        info.choices = choices;
        info
    }

    /// The id of the card that a request names.
    fn card_id(&self, name: &str) -> Result<String, Error> {
        card_named("card", name, &self.cards())
    }

    /// The presets that a model can be loaded with: those that make it smaller, beside `full`.
    async fn choices(&self, entry: &Entry, open: &OpenModel) -> Vec<v1::QuantizationChoice> {
        let full: u64 = open.components.iter().map(|c| c.bytes.0).sum();
        let (library, card, entry) = (self.library.clone(), self.first_card(), entry.clone());
        let path = entry.path.clone();
        let measured = self.library.aside(&path, move || {
            let smaller = Preset::ALL.into_iter().filter_map(|preset| {
                let quantization = Quantization::of(preset, []).ok()?;
                let bytes = library.bytes(&entry.quantized(quantization), &card).ok()?.0;
                (preset == Preset::Full || bytes < full).then(|| v1::QuantizationChoice {
                    preset: preset.as_str().to_owned(),
                    bytes,
                })
            });
            Ok(smaller.collect())
        });
        measured.await.unwrap_or_default()
    }

    fn status_out(&self, report: &Arc<StatusReport>) -> v1::Status {
        v1::Status {
            cards: report
                .cards
                .iter()
                .zip(self.workers.pids())
                .map(|(card, worker_pid)| v1::CardStatus {
                    worker_pid,
                    policy: policy_name(self.policy).to_owned(),
                    ..card_out(card, report)
                })
                .collect(),
            jobs: report.jobs.iter().map(job_out).collect(),
            latents: u32::try_from(report.latents).unwrap_or(u32::MAX),
            latent_bytes: report.latent_bytes.0,
            text_encodings: u32::try_from(report.texts).unwrap_or(u32::MAX),
            text_encoding_bytes: report.text_bytes.0,
            uptime_ms: millis(self.started.elapsed()),
            host: Some(self.host.read(&self.workers)),
        }
    }
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

/// Name of a kind of card: `cpu`, `simulated` or `cuda`.
pub(super) fn kind_out(kind: CardKind) -> String {
    match kind {
        CardKind::Cpu => "cpu",
        CardKind::Simulated => "simulated",
        CardKind::Cuda => "cuda",
    }
    .to_owned()
}

fn card_out(card: &CardStatus, report: &StatusReport) -> v1::CardStatus {
    v1::CardStatus {
        id: card.description.id.clone(),
        name: card.description.name.clone(),
        kind: kind_out(card.description.kind),
        attention: card.attention.clone(),
        state: card.state.as_str().to_owned(),
        memory: Some(memory_out(&card.ledger.summary())),
        residents: card
            .ledger
            .residents()
            .map(|resident| resident_out(resident, card, report))
            .collect(),
        holders: card.ledger.holders().iter().map(holder_out).collect(),
        reservations: card
            .reservations
            .iter()
            .map(|reservation| v1::Reservation {
                id: reservation.id.clone(),
                label: reservation.by.label.clone(),
                bytes: reservation.bytes.0,
                expires_in_ms: millis(reservation.expires_in),
                process_id: reservation.by.process.unwrap_or(0),
            })
            .collect(),
        worker_restarts: card.restarts,
        problem: card.problem.clone(),
        job_id: card.job.as_ref().map(ToString::to_string).unwrap_or_default(),
        ..Default::default()
    }
}

fn resident_out(resident: &Resident, card: &CardStatus, report: &StatusReport) -> v1::ResidentComponent {
    let state = match resident.state {
        ResidentState::Loading => "loading",
        ResidentState::Resident => "resident",
        ResidentState::Evicting => "evicting",
    };
    v1::ResidentComponent {
        component: Some(component_out(&resident.component)),
        state: state.to_owned(),
        leases: resident.leases,
        pinned: resident.pinned,
        held: resident.held > 0,
        idle_ms: card.ledger_now.since(resident.last_used),
        entries: report
            .users
            .get(&resident.component.id)
            .cloned()
            .unwrap_or_default(),
    }
}

pub(super) fn freed_out(freed: &Freed) -> v1::FreedComponent {
    v1::FreedComponent {
        component: Some(component_out(&freed.component)),
        card: freed.card.clone(),
        booked_bytes: freed.booked.0,
        freed_bytes: freed.freed.0,
    }
}

pub(super) fn kept_out(kept: &Kept) -> v1::KeptComponent {
    v1::KeptComponent {
        component: Some(component_out(&kept.component)),
        card: kept.card.clone(),
        reason: kept.reason.to_string(),
        cause: kept.reason.as_str().to_owned(),
        by: kept.reason.by().to_owned(),
    }
}

fn planned_out(stage: &PlannedStage) -> v1::PlannedStage {
    v1::PlannedStage {
        name: stage.name.to_string(),
        components: stage.components.iter().map(component_out).collect(),
        resident_already: stage.resident_already.clone(),
        component_bytes: stage.component_bytes.0,
        scratch_bytes: stage.scratch.0,
        scratch_learned: stage.scratch_learned,
        moves: stage.moves.iter().map(move_out).collect(),
        verdict: stage.verdict.as_str().to_owned(),
        shortfall: stage.shortfall.as_ref().map(shortfall_out),
        chunking: stage.chunking.clone(),
        approximate: stage.approximate,
    }
}

fn move_out(planned: &Move) -> String {
    match planned {
        Move::Evict(component) => format!("evict {} ({})", component.name, component.bytes),
        Move::Load(component) => format!("load {} ({})", component.name, component.bytes),
        Move::Trim => "trim".to_owned(),
    }
}

fn time_to_live(
    asked: Option<prost_types::Duration>,
    default: Duration,
    longest: Duration,
) -> Result<Duration, Error> {
    let Some(asked) = asked else { return Ok(default) };
    // The conversion negates what is negative, and the least number of all has no positive one.
    let ttl = match asked.seconds < 0 || asked.nanos < 0 {
        true => return Err(invalid("ttl", "is negative")),
        false => Duration::try_from(asked).map_err(|_| invalid("ttl", "is no duration"))?,
    };
    if ttl.is_zero() || ttl > longest {
        return Err(invalid(
            "ttl",
            format!(
                "is to be over 0 and up to {}",
                humantime::format_duration(longest)
            ),
        ));
    }
    Ok(ttl)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_caller_on_another_machine_is_not_told_which_processes_there_are() {
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
