//! `moored.v1.Hub`.

use std::pin::Pin;

use api::v1;
use api::v1::hub_server::Hub;
use api::v1::pull_event::Event;
use calls::{PullEvent, Pulling};
use futures::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};

use crate::requests::{asked, caller_of};
use crate::status::{status_of_pull, status_of_pull_plan};

/// The calls of `moored.v1.Hub`.
pub(crate) struct HubService(pub(crate) Pulling);

#[tonic::async_trait]
impl Hub for HubService {
    async fn plan_pull(
        &self,
        request: Request<v1::PullModelRequest>,
    ) -> Result<Response<v1::PullPlan>, Status> {
        let caller = caller_of(&request);
        let v1::PullModelRequest { id, revision } = asked(request)?;
        let planned = self.0.plan(&id, &revision, &caller).await;
        let (id, plan) = planned.map_err(|problem| status_of_pull_plan(&problem))?;
        Ok(Response::new(v1::PullPlan {
            id,
            revision: plan.revision,
            bytes_total: plan.bytes_total,
            bytes_missing: plan.bytes_missing,
            files_total: plan.files_total,
        }))
    }

    type PullModelStream = Pin<Box<dyn Stream<Item = Result<v1::PullEvent, Status>> + Send>>;

    async fn pull_model(
        &self,
        request: Request<v1::PullModelRequest>,
    ) -> Result<Response<Self::PullModelStream>, Status> {
        let caller = caller_of(&request);
        let v1::PullModelRequest { id, revision } = asked(request)?;
        let events = self.0.pull(&id, &revision, &caller);
        let events = events.map_err(|problem| status_of_pull(&problem))?;
        let events = events.map(|event| match event {
            Ok(event) => Ok(v1::PullEvent {
                event: Some(event_out(event)),
            }),
            Err(problem) => Err(status_of_pull(&problem)),
        });
        Ok(Response::new(Box::pin(events)))
    }
}

fn event_out(event: PullEvent) -> Event {
    match event {
        PullEvent::Progress(progress) => Event::Progress(v1::PullProgress {
            bytes_done: progress.bytes_done,
            bytes_total: progress.bytes_total,
            files_done: progress.files_done,
            files_total: progress.files_total,
            file: progress.file,
        }),
        PullEvent::Pulled(pulled) => Event::Pulled(v1::PulledModel {
            id: pulled.id,
            revision: pulled.revision,
            bytes_total: pulled.bytes_total,
            bytes_fetched: pulled.bytes_fetched,
        }),
    }
}
