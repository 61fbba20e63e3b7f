//! `moored.v1.Residency`.

use std::pin::Pin;
use std::time::Duration;

use access::Role;
use api::v1;
use api::v1::residency_server;
use calls::{CardMemory, invalid};
use futures::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};

use crate::convert::{freed_out, kept_out, listed_out, plan_out, status_out};
use crate::events::{EventStream, events_of};
use crate::requests::{asked, caller_of, load_in, model_in, planned_in, reservation_in, ttl_in};
use crate::status::status_of;
use transport::{Admitted, check_role};

/// The calls of `moored.v1.Residency`.
pub(crate) struct ResidencyService(pub(crate) CardMemory);

#[tonic::async_trait]
impl residency_server::Residency for ResidencyService {
    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let caller = caller_of(&request);
        let listing = self.0.list_models(asked(request)?.rescan, &caller).await;
        let listing = listing.map_err(|e| status_of(&e))?;
        let adapters = listing.adapters.iter().map(|adapter| v1::AdapterInfo {
            bytes: adapter.bytes,
            kind: adapter.kind_name().to_owned(),
            id: adapter.id.clone(),
        });
        let others = listing.others.into_iter().map(|other| v1::OtherFile {
            name: other.name,
            what: other.what,
        });
        Ok(Response::new(v1::ListModelsResponse {
            models: listing.models.iter().map(listed_out).collect(),
            adapters: adapters.collect(),
            others: others.collect(),
        }))
    }

    type LoadStream = EventStream;

    async fn load(&self, request: Request<v1::LoadRequest>) -> Result<Response<EventStream>, Status> {
        let caller = caller_of(&request);
        let admitted = request.extensions().get::<Admitted>().cloned();
        let request = asked(request)?;
        if request.replace.is_some()
            && let Some(holder) = admitted.and_then(|admitted| admitted.holder)
        {
            // It unloads another model, and takes over its pins.
            check_role("Load with `replace`", Role::Administer, &holder)?;
        }
        let started = self.0.load(load_in(request), &caller).await;
        events_of(started)
    }

    async fn unload(
        &self,
        request: Request<v1::UnloadRequest>,
    ) -> Result<Response<v1::UnloadResponse>, Status> {
        let caller = caller_of(&request);
        let request = asked(request)?;
        let named = request.model.as_ref();
        if named.is_some_and(|model| model.id.is_empty() && model.quantization.is_some()) {
            return Err(status_of(&invalid(
                "model.id",
                "is empty, and formats are named: name their model, or leave all of it out to unload every model",
            )));
        }
        let (model, force) = (model_in(request.model), request.force);
        let report = self.0.unload(model, request.client_id, force, &caller).await;
        let report = report.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::UnloadResponse {
            freed: report.freed.iter().map(freed_out).collect(),
            kept: report.kept.iter().map(kept_out).collect(),
            cancelled_jobs: report.cancelled_jobs.iter().map(ToString::to_string).collect(),
        }))
    }

    async fn pin(&self, request: Request<v1::PinRequest>) -> Result<Response<v1::PinResponse>, Status> {
        let request = asked(request)?;
        let pinned = self.0.pin(model_in(request.model), request.unpin).await;
        let pinned = pinned.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::PinResponse { pinned }))
    }

    async fn hold(&self, request: Request<v1::HoldRequest>) -> Result<Response<v1::HoldResponse>, Status> {
        let caller = caller_of(&request);
        let request = asked(request)?;
        let held = async {
            let ttl = ttl_in(request.ttl)?;
            let model = model_in(request.model);
            self.0.hold(model, request.client_id, ttl, &caller).await
        };
        let (hold_id, ttl) = held.await.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::HoldResponse {
            hold_id,
            ttl: prost_types::Duration::try_from(ttl).ok(),
        }))
    }

    async fn release_hold(
        &self,
        request: Request<v1::ReleaseHoldRequest>,
    ) -> Result<Response<v1::ReleaseHoldResponse>, Status> {
        let caller = caller_of(&request);
        let released = self.0.release_hold(&asked(request)?.hold_id, &caller).await;
        Ok(Response::new(v1::ReleaseHoldResponse { released }))
    }

    async fn plan(&self, request: Request<v1::PlanRequest>) -> Result<Response<v1::PlanResponse>, Status> {
        let caller = caller_of(&request);
        let request = asked(request)?;
        let planned = planned_in(request.request);
        let plan = self.0.plan(planned, &request.card, &caller).await;
        let plan = plan.map_err(|e| status_of(&e))?;
        Ok(Response::new(plan_out(&plan)))
    }

    async fn get_status(
        &self,
        _request: Request<v1::GetStatusRequest>,
    ) -> Result<Response<v1::Status>, Status> {
        Ok(Response::new(status_out(&self.0.status().await)))
    }

    type WatchStatusStream = Pin<Box<dyn Stream<Item = Result<v1::Status, Status>> + Send>>;

    async fn watch_status(
        &self,
        request: Request<v1::WatchStatusRequest>,
    ) -> Result<Response<Self::WatchStatusStream>, Status> {
        let interval = Duration::from_millis(asked(request)?.interval_ms.into());
        let statuses = self.0.watch_status(interval).map_err(|e| status_of(&e))?;
        Ok(Response::new(Box::pin(
            statuses.map(|status| Ok(status_out(&status))),
        )))
    }

    async fn trim(&self, request: Request<v1::TrimRequest>) -> Result<Response<v1::TrimResponse>, Status> {
        let freed = self.0.trim(&asked(request)?.card).await;
        let freed = freed.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::TrimResponse { freed_bytes: freed.0 }))
    }

    async fn reserve(
        &self,
        request: Request<v1::ReserveRequest>,
    ) -> Result<Response<v1::ReserveResponse>, Status> {
        let caller = caller_of(&request);
        let wanted = reservation_in(asked(request)?).map_err(|e| status_of(&e))?;
        let reserved = self.0.reserve(wanted, &caller).await;
        let reserved = reserved.map_err(|e| status_of(&e))?;
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
        let id = asked(request)?.reservation_id;
        let released = self.0.release_reservation(&id).await;
        Ok(Response::new(v1::ReleaseReservationResponse { released }))
    }

    async fn recycle(
        &self,
        request: Request<v1::RecycleRequest>,
    ) -> Result<Response<v1::RecycleResponse>, Status> {
        let caller = caller_of(&request);
        let v1::RecycleRequest {
            card,
            client_id,
            force,
            ..
        } = asked(request)?;
        let cards = self.0.recycle(&card, client_id, force, &caller).await;
        let cards = cards.map_err(|e| status_of(&e))?;
        Ok(Response::new(v1::RecycleResponse { cards }))
    }
}
