//! The one task around the core: it passes the messages of handles and workers to the core, wakes it when time alone changes
//! something, carries out its effects, and publishes the status.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::core::{Core, Effect, Input};
use super::reductions::open_reductions;
use super::report::StatusReport;
use super::{CardPort, CardSignal, prepare};
use crate::library::Library;

/// Least time between two publications of the status.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);
/// Most inputs that are taken in one turn.
const BATCH: usize = 256;

pub(super) struct Shell {
    pub(super) core: Core,
    pub(super) library: Arc<Library>,
    pub(super) ports: Vec<Box<dyn CardPort>>,
    pub(super) status: watch::Sender<Arc<StatusReport>>,
    /// Channel back to this task, for work that runs beside it.
    pub(super) inputs: mpsc::WeakUnboundedSender<Input>,
}

impl Shell {
    /// Runs until the last handle is dropped.
    pub(super) async fn run(
        mut self,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        mut signals: mpsc::UnboundedReceiver<CardSignal>,
    ) {
        let (mut asked, mut signalled) = (Vec::new(), Vec::new());
        let mut workers_can_speak = true;
        let mut published_at = Instant::now();
        loop {
            let unpublished = self.core.is_dirty().then(|| published_at + PUBLISH_EVERY);
            let wake = self
                .core
                .next_wake(Instant::now())
                .into_iter()
                .chain(unpublished)
                .min();
            tokio::select! {
                biased;
                count = signals.recv_many(&mut signalled, BATCH), if workers_can_speak => {
                    workers_can_speak = count > 0;
                    // Calls are taken in too, however many messages the workers send.
                    asked.extend(std::iter::from_fn(|| inputs.try_recv().ok()).take(BATCH));
                }
                count = inputs.recv_many(&mut asked, BATCH) => if count == 0 { break },
                () = tokio::time::sleep_until(wake.unwrap_or_else(far_away)), if wake.is_some() => {}
            }
            let now = Instant::now();
            let signals = signalled.drain(..).map(Input::Signal);
            for effect in self.core.on(signals.chain(asked.drain(..)), now) {
                self.carry_out(effect);
            }
            if self.core.is_dirty() && now >= published_at + PUBLISH_EVERY {
                published_at = now;
                self.status.send_replace(Arc::new(self.core.take_status(now)));
            }
        }
        self.core.end_all(Instant::now());
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Command { card, command } => self.ports[card].send(command),
            Effect::Recycle { card, reason } => self.ports[card].recycle(&reason),
            Effect::Reopen { job, spec, cards } => {
                let (library, inputs) = (self.library.clone(), self.inputs.clone());
                tokio::spawn(async move {
                    let submission = prepare(&library, *spec, cards).await.map(Box::new);
                    if let Some(inputs) = inputs.upgrade() {
                        let _ = inputs.send(Input::Reopened { job, submission }); // a queue that has ended has no jobs
                    }
                });
            }
            Effect::KeepCopies { entry, compute_dtype } => self.library.keep_soon(&entry, &compute_dtype),
            Effect::OpenReductions {
                job,
                entry,
                models,
                cards,
            } => {
                let (library, inputs) = (self.library.clone(), self.inputs.clone());
                tokio::spawn(async move {
                    let (path, read) = (entry.path.clone(), library.clone());
                    let open = move || Ok(open_reductions(&read, &entry, &models, &cards));
                    // Even if that panicked: the refusal waits.
                    let reductions = library.aside(&path, open).await.unwrap_or_default();
                    if let Some(inputs) = inputs.upgrade() {
                        let _ = inputs.send(Input::ReductionsOpened { job, reductions }); // a queue that has ended refuses nobody
                    }
                });
            }
        }
    }
}

fn far_away() -> Instant {
    Instant::now() + Duration::from_secs(86_400)
}
