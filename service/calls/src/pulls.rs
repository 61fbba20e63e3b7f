//! Models from a hub, for clients.

use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use hub::{Progress, PullError, PullPlan, PullUpdate, Pulled, Pulls, Reference};
use tokio::sync::watch;

use crate::caller::Caller;
use crate::models::Models;
use crate::threads::FILES;

/// Least time between two reports of progress to one listener.
const INTERVAL: Duration = Duration::from_millis(100);

/// Answers requests to pull models. Cheap to clone.
#[derive(Clone)]
pub struct Pulling {
    pulls: Pulls,
    models: Arc<Models>,
    /// True once the service is shutting down: pulls end then.
    stopping: watch::Receiver<bool>,
}

/// An event of a pull.
#[derive(Debug)]
pub enum PullEvent {
    Progress(Progress),
    /// The model is complete, and listed.
    Pulled(Pulled),
}

impl Pulling {
    pub(crate) fn new(pulls: Pulls, models: Arc<Models>, stopping: watch::Receiver<bool>) -> Pulling {
        Pulling {
            pulls,
            models,
            stopping,
        }
    }

    /// Whether clients may pull.
    pub fn is_open(&self) -> bool {
        self.pulls.hub().is_open()
    }

    /// The plan of a pull: the id by which the model will be listed, and the files.
    ///
    /// # Errors
    /// When clients may not pull, or the hub does not have the model.
    pub async fn plan(
        &self,
        id: &str,
        revision: &str,
        caller: &Caller,
    ) -> Result<(String, PullPlan), PullError> {
        let model = self.pullable(id, revision)?;
        let plan = self.pulls.plan(&model, caller.network()).await?;
        Ok((model.listed_id(), plan))
    }

    /// Pulls a model, or joins its pull. Its first event is sent at once, before the sizes are known.
    ///
    /// # Errors
    /// When clients may not pull, or the name is wrong.
    pub fn pull(
        &self,
        id: &str,
        revision: &str,
        caller: &Caller,
    ) -> Result<impl Stream<Item = Result<PullEvent, PullError>> + Send + 'static, PullError> {
        let mut pull = self.pulls.join(self.pullable(id, revision)?, caller.network());
        let (models, mut stopping) = (self.models.clone(), self.stopping.clone());
        Ok(async_stream::try_stream! {
            yield PullEvent::Progress(Progress::default());
            loop {
                let news = tokio::select! {
                    news = pull.next() => news,
                    _ = stopping.wait_for(|stopping| *stopping) => PullUpdate::End(Err(PullError::ShuttingDown)),
                };
                match news {
                    PullUpdate::Progress(progress) => yield PullEvent::Progress(progress),
                    PullUpdate::End(ended) => {
                        let pulled = ended?;
                        // The listing is renewed before the client gets the last event, so that the client can name the model at once.
                        let look = move || drop((models.rescan(), models.rescan_adapters()));
                        let looked = FILES.run(look).await;
                        if let Err(problem) = looked {
                            tracing::warn!(%problem, "models could not be looked for");
                        }
                        yield PullEvent::Pulled(pulled);
                        return;
                    }
                }
                tokio::time::sleep(INTERVAL).await;
            }
        })
    }

    /// The requested model, if clients may pull.
    fn pullable(&self, id: &str, revision: &str) -> Result<Reference, PullError> {
        let model = Reference::asked(id, revision)?;
        match self.is_open() {
            true => Ok(model),
            false => Err(PullError::NotAllowed {
                id: model.to_string(),
            }),
        }
    }
}
