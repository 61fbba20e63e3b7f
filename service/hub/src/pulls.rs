//! Pulls in a service: a request for a model that is being pulled joins that pull, and a pull without listeners is aborted.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::watch;
use tokio::task::AbortHandle;
use turns::Turns;

use crate::{Hub, Progress, PullError, PullPlan, Pulled, Reference};

/// Models that are pulled at the same time; others wait. One owner has at most half of the places.
const AT_ONCE: usize = 4;
/// The same for plans of pulls, each of which asks the hub for the list of a model's files.
const PLANS_AT_ONCE: usize = 8;

/// Whose share of the places a pull takes: a client by its address.
type Owner = Option<IpAddr>;

/// The running pulls.
#[derive(Clone)]
pub struct Pulls {
    hub: Hub,
    turns: Turns<Owner>,
    plans: Turns<Owner>,
    running: Arc<Mutex<HashMap<Reference, Weak<Running>>>>,
}

/// A running pull; dropping the last reference aborts it.
struct Running {
    progress: watch::Receiver<Progress>,
    result: watch::Receiver<Option<Result<Pulled, PullError>>>,
    task: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One listener of a pull.
pub struct Pull {
    /// Refcount of the pull: dropping the last one aborts it.
    _running: Arc<Running>,
    progress: watch::Receiver<Progress>,
    result: watch::Receiver<Option<Result<Pulled, PullError>>>,
}

/// An event of a pull.
pub enum PullUpdate {
    Progress(Progress),
    End(Result<Pulled, PullError>),
}

impl Pulls {
    pub fn new(hub: Hub) -> Pulls {
        Pulls {
            hub,
            turns: Turns::new(AT_ONCE, AT_ONCE / 2),
            plans: Turns::new(PLANS_AT_ONCE, PLANS_AT_ONCE / 2),
            running: Arc::default(),
        }
    }

    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    /// The plan of a pull.
    ///
    /// # Errors
    /// When the hub does not have the model, or cannot be asked.
    pub async fn plan(&self, model: &Reference, owner: Owner) -> Result<PullPlan, PullError> {
        let _turn = self.plans.next_of(owner).await;
        Ok(self.hub.prepare(model).await?.plan())
    }

    /// Joins the pull of this model, or starts it in the share of this owner.
    pub fn join(&self, model: Reference, owner: Owner) -> Pull {
        let mut all = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, running| running.strong_count() > 0);
        let under_way = all.get(&model).and_then(Weak::upgrade);
        let running = match under_way.filter(|running| running.result.borrow().is_none()) {
            Some(running) => running,
            None => {
                let running = self.start(model.clone(), owner);
                all.insert(model, Arc::downgrade(&running));
                running
            }
        };
        Pull {
            progress: running.progress.clone(),
            result: running.result.clone(),
            _running: running,
        }
    }

    fn start(&self, model: Reference, owner: Owner) -> Arc<Running> {
        let (progress, progress_seen) = watch::channel(Progress::default());
        let (result, result_seen) = watch::channel(None);
        let (hub, turns) = (self.hub.clone(), self.turns.clone());
        let task = tokio::spawn(async move {
            let _turn = turns.next_of(owner).await;
            tracing::info!(%model, "a pull begins");
            let ended = hub.pull(&model, progress).await;
            match &ended {
                Ok(pulled) => tracing::info!(%model, fetched = pulled.bytes_fetched, "a pull is done"),
                Err(problem) => tracing::warn!(%model, %problem, "a pull failed"),
            }
            result.send_replace(Some(ended));
        });
        Arc::new(Running {
            progress: progress_seen,
            result: result_seen,
            task: task.abort_handle(),
        })
    }
}

impl Pull {
    /// The next event: the latest progress, or the end.
    pub async fn next(&mut self) -> PullUpdate {
        tokio::select! {
            biased;
            ended = self.result.wait_for(Option::is_some) => {
                let ended = ended.ok().and_then(|ended| ended.clone());
                PullUpdate::End(ended.unwrap_or(Err(PullError::ShuttingDown)))
            }
            // The channel closes with the pull: then only its result is waited for.
            Ok(()) = self.progress.changed() => PullUpdate::Progress(self.progress.borrow_and_update().clone()),
        }
    }
}
