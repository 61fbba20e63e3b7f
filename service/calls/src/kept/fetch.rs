//! The results of a kept job for a client that asks for them later, as the client that submitted it would have got them.

use std::sync::Arc;

use engine::Error;
use engine::job::{JobEvent, JobEventKind, JobId, Reach};

use super::records::KeptEnd;
use super::{Kept, results, storage};
use crate::results::{Event, EventKind, Events, Started};

/// Where a job is that somebody asks for.
enum Found {
    Held { position: u32 },
    InQueue,
    Ended(Arc<KeptEnd>),
    Nowhere,
}

impl Kept {
    /// The events of a kept job: its progress from now on, and once it has ended its results. Dropping the stream leaves the job alone.
    ///
    /// # Errors
    /// [`Error::JobNotFound`].
    pub(crate) fn fetch(&self, id: &str, reach: &Reach) -> Result<Started, Error> {
        let unknown = || Error::JobNotFound(id.to_owned());
        let (job, model, left_out) = {
            let index = self.index();
            let open = index.open.get_key_value(id);
            let open = open.filter(|(_, open)| reach.has(&open.info.account));
            let ended = index.ended.get_key_value(id);
            let ended = ended.filter(|(_, end)| reach.has(&end.info.account));
            match (open, ended) {
                (Some((id, open)), _) => (id.clone(), open.model.clone(), open.left_out.clone()),
                (None, Some((id, end))) => (id.clone(), end.model.clone(), end.left_out.clone()),
                (None, None) => return Err(unknown()),
            }
        };
        Ok(Started {
            job: job.clone(),
            model,
            left_out,
            events: self.clone().events(job),
        })
    }

    fn events(self, id: JobId) -> Events {
        let events = async_stream::try_stream! {
            let mut changes = self.0.changes.subscribe();
            yield of_job(0, JobEventKind::Accepted { joined: true });
            let end = loop {
                changes.borrow_and_update();
                match self.found(&id) {
                    Found::Ended(end) => break end,
                    Found::Nowhere => Err(Error::JobNotFound(id.to_string()))?,
                    Found::Held { position } => yield of_job(0, JobEventKind::Queued { position, estimate: None }),
                    Found::InQueue => match self.0.queue.listen(&id).await {
                        Ok(mut job) => while let Some(JobEvent { at_ms, kind }) = job.next().await {
                            match kind {
                                JobEventKind::Failed(Error::ShuttingDown) => Err(Error::ShuttingDown)?,
                                kind if is_progress(&kind) => yield of_job(at_ms, kind),
                                _ => {}
                            }
                        },
                        // It has ended, and its keeper is about to say so; or it is about to be in the queue.
                        Err(Error::JobNotFound(_)) => {}
                        Err(error) => Err(error)?,
                    },
                }
                if !matches!(self.found(&id), Found::Ended(_)) && changes.changed().await.is_err() {
                    Err(Error::ShuttingDown)?;
                }
            };
            for result in &end.results {
                let mut offset = 0;
                while let Some(chunk) = self.read(&id, result, offset).await? {
                    offset += chunk.data.len() as u64;
                    let is_last = chunk.is_last;
                    yield Event { at_ms: 0, kind: EventKind::Chunk(chunk) };
                    if is_last {
                        break;
                    }
                }
            }
            for latent in &end.latents {
                let (info, item) = (latent.info.clone(), latent.item);
                yield of_job(0, JobEventKind::Latent { info, item });
            }
            match &end.outcome {
                Ok(report) => yield of_job(0, JobEventKind::Done(Arc::new(report.clone()))),
                Err(error) => Err(error.clone())?,
            }
        };
        Box::pin(events)
    }

    fn found(&self, id: &JobId) -> Found {
        let index = self.index();
        if let Some(end) = index.ended.get(id) {
            return Found::Ended(end.clone());
        }
        match index.open.get(id) {
            None => Found::Nowhere,
            Some(open) if open.is_held => {
                let before = index
                    .open
                    .values()
                    .filter(|other| other.is_held && other.number < open.number);
                let position = u32::try_from(before.count()).unwrap_or(u32::MAX);
                Found::Held { position }
            }
            Some(_) => Found::InQueue,
        }
    }

    async fn read(
        &self,
        id: &JobId,
        result: &super::records::KeptResult,
        offset: u64,
    ) -> Result<Option<crate::chunks::Chunk>, Error> {
        let (folder, result) = (self.folder(id), result.clone());
        self.on_disk(move |_| results::chunk_at(&folder, &result, offset).map_err(storage))
            .await
    }
}

fn of_job(at_ms: u64, kind: JobEventKind) -> Event {
    Event {
        at_ms,
        kind: EventKind::Job(kind),
    }
}

/// Whether an event tells how far a job is: the rest comes from the disk once it has ended.
fn is_progress(kind: &JobEventKind) -> bool {
    match kind {
        JobEventKind::Queued { .. }
        | JobEventKind::Waiting { .. }
        | JobEventKind::Evicting { .. }
        | JobEventKind::Loading { .. }
        | JobEventKind::Retrying { .. }
        | JobEventKind::Stage { .. }
        | JobEventKind::Step { .. } => true,
        JobEventKind::Accepted { .. }
        | JobEventKind::Preview { .. }
        | JobEventKind::Piece { .. }
        | JobEventKind::Latent { .. }
        | JobEventKind::Done(_)
        | JobEventKind::Failed(_) => false,
    }
}
