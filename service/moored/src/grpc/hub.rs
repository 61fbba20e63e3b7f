//! `moored.v1.Hub`.

use std::pin::Pin;
use std::time::Duration;

use futures::Stream;
use tonic::{Request, Response, Status};

use super::server::Service;
use super::status::status_of_pull;
use crate::hub::{Progress, PullError, PullUpdate, Pulled, Reference};
use crate::threads::FILES;
use api::v1;
use api::v1::hub_server::Hub;
use api::v1::pull_event::Event;

/// Least time between two progress events of one listener.
const INTERVAL: Duration = Duration::from_millis(100);

#[tonic::async_trait]
impl Hub for Service {
    async fn plan_pull(
        &self,
        request: Request<v1::PullModelRequest>,
    ) -> Result<Response<v1::PullPlan>, Status> {
        let model = self.pullable(&request.into_inner())?;
        let plan = self.pulls.hub().plan(&model).await;
        let plan = plan.map_err(|problem| status_of_pull(&problem))?;
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
            yield event(Event::Progress(Progress::default().into()));
            loop {
                let news = tokio::select! {
                    news = pull.next() => news,
                    _ = stopping.wait_for(|stopping| *stopping) => PullUpdate::End(Err(PullError::ShuttingDown)),
                };
                match news {
                    PullUpdate::Progress(progress) => yield event(Event::Progress(progress.into())),
                    PullUpdate::End(Ok(pulled)) => {
                        // The listing has the model before the client is told.
                        let look = move || drop((models.rescan(), models.rescan_adapters()));
                        let looked = FILES.run(look).await;
                        if let Err(problem) = looked {
                            tracing::warn!(%problem, "models could not be looked for");
                        }
                        yield event(Event::Pulled(pulled.into()));
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

impl From<Progress> for v1::PullProgress {
    fn from(progress: Progress) -> v1::PullProgress {
        v1::PullProgress {
            bytes_done: progress.bytes_done,
            bytes_total: progress.bytes_total,
            files_done: progress.files_done,
            files_total: progress.files_total,
            file: progress.file,
        }
    }
}

impl From<Pulled> for v1::PulledModel {
    fn from(pulled: Pulled) -> v1::PulledModel {
        v1::PulledModel {
            id: pulled.id,
            revision: pulled.revision,
            bytes_total: pulled.bytes_total,
            bytes_fetched: pulled.bytes_fetched,
        }
    }
}
