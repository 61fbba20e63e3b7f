//! The keeper of a job: it reads the job's events as a client would, and writes its results.

use std::sync::Arc;
use std::time::Duration;

use engine::Error;
use engine::job::{JobEventKind, JobId, JobReport};
use engine::queue::Job;
use futures::StreamExt as _;
use journal::Changes;
use tokio::sync::OwnedSemaphorePermit;

use super::records::{JOBS, KeptJob, KeptLatent, KeptResult};
use super::results::Folder;
use super::{Kept, end_of, storage};
use crate::budget::Client;
use crate::chunks::{AsFile, Chunk, Output};
use crate::results::{Event, EventKind, ResultEncoder, started};

/// Times between attempts to write the end of a job.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// What a job has made, as far as it could be written.
struct Made {
    folder: Option<Folder>,
    /// The first thing that could not be written.
    problem: Option<Error>,
}

impl Kept {
    /// Keeps the results of a job until its end, beside who asked for it. `place` is given up then.
    pub(super) fn keep(
        &self,
        job: Job,
        (output, as_file): (Output, AsFile),
        client: Client,
        instead: impl Fn() -> Option<String> + Send + 'static,
        place: Option<OwnedSemaphorePermit>,
    ) {
        let (kept, id) = (self.clone(), job.id.clone());
        let encoder = ResultEncoder {
            encodings: self.0.encodings.clone(),
            client,
        };
        let model = self.index().open.get(&id).map(|open| open.model.clone());
        let events = started(job, model.unwrap_or_default(), output, as_file, encoder, instead).events;
        tokio::spawn(async move {
            kept.follow(&id, events).await;
            drop(place);
        });
    }

    async fn follow(&self, id: &JobId, mut events: crate::results::Events) {
        let mut made = Made {
            folder: None,
            problem: None,
        };
        let mut is_begun = false;
        let outcome = loop {
            match events.next().await {
                Some(Ok(Event { kind, .. })) => match kind {
                    EventKind::Job(JobEventKind::Done(report)) => break Ok(Arc::unwrap_or_clone(report)),
                    EventKind::Job(JobEventKind::Stage { cached: false, .. }) if !is_begun => {
                        is_begun = true;
                        self.note_begun(id).await;
                    }
                    EventKind::Job(JobEventKind::Latent { info, item }) => {
                        self.latent(id, &mut made, item, &info.id).await
                    }
                    EventKind::Chunk(chunk) => self.chunk(id, &mut made, chunk).await,
                    EventKind::Job(_) | EventKind::Preview { .. } => {}
                },
                // The service ends: the job stays in the journal, and runs again.
                Some(Err(Error::ShuttingDown)) | None => return,
                Some(Err(error)) => break Err(error),
            }
        };
        let (results, latents, problem) = self.finish(made).await;
        let outcome = match problem {
            Some(problem) if outcome.is_ok() => Err(problem),
            _ => outcome,
        };
        self.end(id, outcome, results, latents).await;
    }

    /// Records that a job was begun: one that ends the service each time is not begun for ever.
    async fn note_begun(&self, id: &JobId) {
        let key = id.clone();
        let written = self.on_disk(move |kept| {
            let Some(mut job) = kept.journal.get::<KeptJob>(JOBS, &key)? else {
                return Ok(());
            };
            job.begun += 1;
            kept.journal.write(Changes::default().put(JOBS, &key, &job)?)
        });
        if let Err(error) = written.await {
            tracing::warn!(job = %id, %error, "the begin of the job is not written");
        }
    }

    async fn chunk(&self, id: &JobId, made: &mut Made, chunk: Chunk) {
        self.add(id, made, move |folder| folder.add(&chunk)).await;
    }

    async fn latent(&self, id: &JobId, made: &mut Made, item: u32, latent: &str) {
        // It is there: the job leases it until its end, and clients know of it since this event.
        match self.0.queue.latent(latent).await {
            Ok(latent) => {
                self.add(id, made, move |folder| folder.add_latent(item, &latent))
                    .await
            }
            Err(error) => tracing::debug!(job = %id, %error, "a latent was released before it was kept"),
        }
    }

    /// Adds to the folder of the job, which is made at the first time. After an error nothing more is added.
    async fn add(
        &self,
        id: &JobId,
        made: &mut Made,
        add: impl FnOnce(&mut Folder) -> std::io::Result<()> + Send + 'static,
    ) {
        if made.problem.is_some() {
            return;
        }
        let (path, folder) = (self.folder(id), made.folder.take());
        let added = self.on_disk(move |_| {
            let mut folder = match folder {
                Some(folder) => folder,
                None => Folder::create(path).map_err(storage)?,
            };
            add(&mut folder).map_err(storage)?;
            Ok(folder)
        });
        match added.await {
            Ok(folder) => made.folder = Some(folder),
            Err(error) => {
                tracing::warn!(job = %id, %error, "a result is not kept");
                made.problem = Some(error);
            }
        }
    }

    async fn finish(&self, made: Made) -> (Vec<KeptResult>, Vec<KeptLatent>, Option<Error>) {
        let Made { folder, problem } = made;
        let (Some(folder), None) = (folder, &problem) else {
            return (Vec::new(), Vec::new(), problem);
        };
        match self.on_disk(move |_| folder.finish().map_err(storage)).await {
            Ok((results, latents)) => (results, latents, None),
            Err(error) => (Vec::new(), Vec::new(), Some(error)),
        }
    }

    /// Writes the end of a job, and tries until the journal takes it.
    async fn end(
        &self,
        id: &JobId,
        outcome: Result<JobReport, Error>,
        results: Vec<KeptResult>,
        latents: Vec<KeptLatent>,
    ) {
        let listed = self.0.queue.jobs(true).await;
        let Some(open) = self.index().open.get(id).cloned() else {
            return; // it was refused: the journal did not take it
        };
        let info = listed.into_iter().find(|info| info.id == *id);
        let mut info = info.unwrap_or_else(|| open.info.clone());
        if let Err(error) = &outcome {
            info.error = Some(error.clone());
        }
        let end = end_of(&open, info, outcome, results, latents);
        let mut pause = FIRST_RETRY;
        while let Err(error) = self.write_end(id, end.clone()).await {
            tracing::warn!(job = %id, %error, "the end of a job is not written: it is tried again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_RETRY);
        }
    }
}
