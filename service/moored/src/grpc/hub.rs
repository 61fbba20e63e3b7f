//! `moored.v1.Hub`.

use std::pin::Pin;
use std::time::Duration;

use api::v1;
use api::v1::hub_server::Hub;
use api::v1::pull_event::Event;
use futures::Stream;
use hub::{Progress, PullError, PullUpdate, Reference};
use tonic::{Request, Response, Status};

use super::server::Service;
use super::status::status_of_pull;
use crate::pull_messages::{progress_of, pulled_of};
use crate::threads::FILES;

/// Least time between two progress events of one listener.
const INTERVAL: Duration = Duration::from_millis(100);

#[tonic::async_trait]
impl Hub for Service {
    async fn plan_pull(
        &self,
        request: Request<v1::PullModelRequest>,
    ) -> Result<Response<v1::PullPlan>, Status> {
        let model = self.pullable(&request.into_inner())?;
        let prepared = self.pulls.hub().prepare(&model).await;
        let plan = prepared.map_err(|problem| status_of_pull(&problem))?.plan();
        Ok(Response::new(v1::PullPlan {
            id: model.listed_id(),
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
        let model = self.pullable(&request.into_inner())?;
        let mut pull = self.pulls.join(model);
        let (models, mut stopping) = (self.models.clone(), self.stopping.clone());
        Ok(Response::new(Box::pin(async_stream::try_stream! {
            // The first event comes at once, before there is anything to count.
            yield event(Event::Progress(progress_of(Progress::default())));
            loop {
                let news = tokio::select! {
                    news = pull.next() => news,
                    _ = stopping.wait_for(|stopping| *stopping) => PullUpdate::End(Err(PullError::ShuttingDown)),
                };
                match news {
                    PullUpdate::Progress(progress) => yield event(Event::Progress(progress_of(progress))),
                    PullUpdate::End(Ok(pulled)) => {
                        // The listing has the model before the client is told.
                        let look = move || drop((models.rescan(), models.rescan_adapters()));
                        let looked = FILES.run(look).await;
                        if let Err(problem) = looked {
                            tracing::warn!(%problem, "models could not be looked for");
                        }
                        yield event(Event::Pulled(pulled_of(pulled)));
                        return;
                    }
                    PullUpdate::End(Err(problem)) => Err(status_of_pull(&problem))?,
                }
                tokio::time::sleep(INTERVAL).await;
            }
        })))
    }
}

impl Service {
    /// The requested model, if clients may pull.
    fn pullable(&self, request: &v1::PullModelRequest) -> Result<Reference, Status> {
        let model = Reference::asked(&request.id, &request.revision);
        let allowed = model.and_then(|model| match self.pulls.hub().is_open() {
            true => Ok(model),
            false => Err(PullError::NotAllowed {
                id: model.to_string(),
            }),
        });
        allowed.map_err(|problem| status_of_pull(&problem))
    }
}

fn event(event: Event) -> v1::PullEvent {
    v1::PullEvent { event: Some(event) }
}
