//! Generates the segments of a session, one job each, in the order of their requests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine::Error;
use engine::job::{Call, JobEvent, JobEventKind, JobId, JobOptions, JobSpec, JobWork};
use engine::library::Entry;
use engine::queue::{Job, Queue};
use hub::catalogue::Makes;
use model::{Clip, Medium};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

use super::opening::{AskedSession, OpenedSession, check_open, no_sound};
use super::versions::Versions;
use crate::allowance::check_model;
use crate::asked::Asked;
use crate::budget::{Client, Taken};
use crate::caller::{AskedOptions, Caller};
use crate::errors::invalid;
use crate::generation::Generation;
use crate::references::ModelRef;
use crate::resolved::ResolvedModel;

/// Most events of jobs that wait for the session, which takes them on arrival.
const MOST_REPORTS: usize = 64;
/// How long a hold outlives a session whose process has died.
const HOLD: Duration = Duration::from_secs(60);
const SOURCE: &str = "source_media_id";

/// A command to the task that generates segments.
#[derive(Debug)]
pub(crate) enum Work {
    Segment {
        number: u32,
        track: Box<Asked>,
        /// Position of the segment that sounds now, in seconds: decoding begins there.
        place_seconds: f32,
    },
    /// Generate the last segment again, from another source.
    ReplaceSource { number: u32, media_id: String },
    /// Generate the last segment again, with another model.
    ReplaceModel {
        number: u32,
        model: ModelRef,
        place_seconds: f32,
    },
    /// A segment is complete.
    Completed { number: u32 },
    /// A segment failed.
    Failed { number: u32 },
    /// A segment will not sound, because a later one has begun. The later one proves the source and the model of both.
    Superseded { number: u32 },
}

/// A report of the task to the session.
pub(crate) enum Report {
    Accepted {
        number: u32,
        job_id: JobId,
        seed: u64,
        model: Box<ResolvedModel>,
        /// Aborting it cancels the job.
        job: AbortHandle,
    },
    Happened {
        number: u32,
        job_id: JobId,
        event: JobEvent,
    },
    Failed {
        number: u32,
        error: Error,
    },
    SourceReplaced {
        number: u32,
    },
    ModelReplaced {
        number: u32,
        model: Box<ResolvedModel>,
    },
    /// There is no segment yet that could be generated again with the replacement.
    NothingToMake {
        number: u32,
    },
}

/// Handle to the task that makes segments. Dropping it cancels their jobs and releases the model.
pub(crate) struct SegmentTaskHandle {
    /// Commands, each with the bytes of the client's message.
    works: mpsc::UnboundedSender<(Work, Option<Taken>)>,
    reports: mpsc::Receiver<Report>,
    task: JoinHandle<()>,
    client: Client,
}

impl SegmentTaskHandle {
    /// At most as many are under way as the session allows, so the queue to it is bounded.
    pub(crate) fn make(&self, work: Work) {
        let _ = self.works.send((work, None)); // its task ends with this handle alone
    }

    /// As [`SegmentTaskHandle::make`], of a message whose bytes count against its client for as long as something of it is kept.
    pub(crate) fn make_counted(&self, work: Work, bytes: Taken) {
        let _ = self.works.send((work, Some(bytes)));
    }

    pub(crate) async fn report(&mut self) -> Report {
        match self.reports.recv().await {
            Some(report) => report,
            None => std::future::pending().await,
        }
    }

    pub(crate) fn client(&self) -> Client {
        self.client
    }
}

impl Drop for SegmentTaskHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A model that is held for a session: renewed for as long as this lives.
struct Held {
    queue: Queue,
    /// Id of the hold at its last renewal.
    id: Arc<Mutex<String>>,
    renewal: JoinHandle<()>,
}

impl Held {
    /// Holds a model under this name, which must be unique: a second hold with the same name would be the same hold.
    async fn of(queue: &Queue, entry: &Arc<Entry>, name: String) -> Result<Held, Error> {
        let id = Arc::new(Mutex::new(queue.hold(entry.clone(), name.clone(), HOLD).await?));
        let (renewing, entry, renewed) = (queue.clone(), entry.clone(), id.clone());
        let renewal = tokio::spawn(async move {
            loop {
                tokio::time::sleep(HOLD / 3).await;
                match renewing.hold(entry.clone(), name.clone(), HOLD).await {
                    Ok(id) => *renewed.lock().unwrap_or_else(PoisonError::into_inner) = id,
                    Err(error) => tracing::warn!(name, %error, "a session's model could not be held"),
                }
            }
        });
        Ok(Held {
            queue: queue.clone(),
            id,
            renewal,
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.renewal.abort();
        let id = std::mem::take(&mut *self.id.lock().unwrap_or_else(PoisonError::into_inner));
        let queue = self.queue.clone();
        tokio::spawn(async move { queue.release_hold(&id).await });
    }
}

/// A track that segments start from.
struct Source {
    clip: Clip,
    /// Its bytes, counted against the client.
    _taken: Taken,
}

/// The model that segments are generated with.
struct SessionModel {
    model: ModelRef,
    resolved: ResolvedModel,
    _held: Held,
    /// Bytes of the message that names it.
    _bytes: Option<Taken>,
}

/// A segment that was queued.
struct LastSegment {
    /// The request of the segment, with its seed filled in.
    track: Box<Asked>,
    /// Bytes of the message that requested it.
    _bytes: Option<Taken>,
}

/// The versions that a segment was made with, each by the number of the segment that introduced it.
#[derive(Clone, Copy)]
struct MadeWith {
    source: u32,
    model: u32,
}

struct SegmentTask {
    generation: Generation,
    caller: Caller,
    session_id: String,
    format: (u32, u32),
    slots: u32,
    options: Option<AskedOptions>,
    /// Bytes of the message that opened the session, which has its first model and its options.
    _bytes: Taken,
    with: Versions<SessionModel>,
    source: Versions<Option<Source>>,
    /// Number of holds so far, which makes their names unique.
    holds: u32,
    last: Option<LastSegment>,
    /// Versions of the segments that are being generated.
    made_with: BTreeMap<u32, MadeWith>,
    jobs: JoinSet<()>,
    reports: mpsc::Sender<Report>,
}

impl Generation {
    /// Starts the task that generates the segments of a session, and holds its model.
    ///
    /// # Errors
    /// When fields are wrong, the model cannot be opened or makes no sound, or the source is no track.
    pub(crate) async fn open_segment_task(
        &self,
        open: AskedSession,
        bytes: Taken,
        caller: Caller,
    ) -> Result<(SegmentTaskHandle, OpenedSession), Error> {
        check_open(&open)?;
        let options = caller.options(open.options.clone(), &self.entries.cards())?;
        let model = open.model.clone();
        let (entry, format, resolved) = self.sounding_model(&model, &options).await?;
        check_model(&entry, caller.holder())?;
        let opened = OpenedSession::of(&open, resolved.clone(), format);
        let source = self.source(&open.source_media_id, &caller)?;
        let held = Held::of(&self.queue, &entry, opened.session_id.clone()).await?;
        let (works, asked) = mpsc::unbounded_channel();
        let (send, reports) = mpsc::channel(MOST_REPORTS);
        let client = caller.client();
        let making = SegmentTask {
            generation: self.clone(),
            caller,
            session_id: opened.session_id.clone(),
            format,
            slots: opened.slots,
            options: open.options,
            with: Versions::new(SessionModel {
                model,
                resolved,
                _held: held,
                _bytes: None,
            }),
            _bytes: bytes,
            source: Versions::new(source),
            holds: 0,
            last: None,
            made_with: BTreeMap::new(),
            jobs: JoinSet::new(),
            reports: send,
        };
        let maker = SegmentTaskHandle {
            works,
            reports,
            task: tokio::spawn(making.run(asked)),
            client,
        };
        Ok((maker, opened))
    }

    /// A model by its reference, with rate and channels of its sound.
    async fn sounding_model(
        &self,
        model: &ModelRef,
        options: &JobOptions,
    ) -> Result<(Arc<Entry>, (u32, u32), ResolvedModel), Error> {
        let model = self.entries.of_medium(model.clone(), Makes::Audio).await?;
        let chosen = self.entries.chosen(model, &[], options).await?;
        let open = self.entries.open(&chosen.entry).await?;
        let format = open
            .model
            .track_format()
            .ok_or_else(|| no_sound(&chosen.entry.key))?;
        let resolved = ResolvedModel::of(&chosen.entry, &open, chosen.reason);
        Ok((
            chosen.entry,
            (format.samples_per_second, format.channels),
            resolved,
        ))
    }

    /// An uploaded track, as the source of a session; `None` for an empty id.
    fn source(&self, id: &str, caller: &Caller) -> Result<Option<Source>, Error> {
        if id.is_empty() {
            return Ok(None);
        }
        let clip = self.media.track(SOURCE, id, &caller.reach())?;
        let taken = self.bounds.results.take(caller.client(), clip.data.len() as u64);
        let taken = taken.map_err(|_| {
            invalid(SOURCE, "takes more memory than this client has left: close a session, or raise limits.results_per_client")
        })?;
        Ok(Some(Source { clip, _taken: taken }))
    }
}

impl SegmentTask {
    async fn run(mut self, mut asked: mpsc::UnboundedReceiver<(Work, Option<Taken>)>) {
        while let Some((work, bytes)) = asked.recv().await {
            match work {
                Work::Segment {
                    number,
                    track,
                    place_seconds,
                } => self.new_segment(number, track, place_seconds, bytes).await,
                Work::ReplaceSource { number, media_id } => self.replace_source(number, &media_id).await,
                Work::ReplaceModel {
                    number,
                    model,
                    place_seconds,
                } => self.replace_model(number, model, place_seconds, bytes).await,
                Work::Completed { number } => self.completed(number).await,
                Work::Failed { number } => self.failed(number),
                Work::Superseded { number } => {
                    self.made_with.remove(&number);
                }
            }
            while self.jobs.try_join_next().is_some() {}
        }
    }

    async fn send(&self, report: Report) {
        let _ = self.reports.send(report).await; // the session may have ended
    }

    /// Generates a segment that the client describes.
    async fn new_segment(
        &mut self,
        number: u32,
        mut track: Box<Asked>,
        place_seconds: f32,
        bytes: Option<Taken>,
    ) {
        if let Some(seed) = self.segment(number, (*track).clone(), place_seconds).await {
            track.sampling.seed = Some(seed);
            self.last = Some(LastSegment { track, _bytes: bytes });
        }
    }

    /// Queues the job of a segment. Returns its seed.
    async fn segment(&mut self, number: u32, track: Asked, place_seconds: f32) -> Option<u64> {
        let (mut job, seed, model) = match self.queue_up(track, place_seconds).await {
            Ok(job) => job,
            Err(error) => {
                self.send(Report::Failed { number, error }).await;
                return None;
            }
        };
        let made_with = MadeWith {
            source: self.source.number(),
            model: self.with.number(),
        };
        self.made_with.insert(number, made_with);
        let (reports, job_id) = (self.reports.clone(), job.id.clone());
        let accepted_id = job.id.clone();
        let (begin, begun) = tokio::sync::oneshot::channel::<()>();
        let handle = self.jobs.spawn(async move {
            // Events of the job are reported only after `Accepted`.
            if begun.await.is_err() {
                return;
            }
            while let Some(event) = job.next().await {
                let job_id = job_id.clone();
                if reports
                    .send(Report::Happened {
                        number,
                        job_id,
                        event,
                    })
                    .await
                    .is_err()
                {
                    return;
                }
            }
        });
        self.send(Report::Accepted {
            number,
            job_id: accepted_id,
            seed,
            model: Box::new(model),
            job: handle,
        })
        .await;
        let _ = begin.send(()); // an aborted task has nothing to report
        Some(seed)
    }

    async fn queue_up(
        &self,
        mut track: Asked,
        place_seconds: f32,
    ) -> Result<(Job, u64, ResolvedModel), Error> {
        let adapters = std::mem::take(&mut track.model.adapters);
        track.model = self.with.now().model.clone();
        if !adapters.is_empty() {
            track.model.adapters = adapters;
        }
        track.options = self.options.clone();
        track.source = self.source.now().as_ref().map(|source| source.clip.clone());
        let mut prepared = self.generation.prepare(track, &self.caller).await?;
        let mut seed = 0;
        if let JobWork::Run(run) = &mut prepared.spec.work {
            run.call = Call::StreamAudio;
            run.request.slots = self.slots;
            if let Medium::Audio(audio) = &mut run.request.medium {
                audio.decode_from_seconds = place_seconds;
            }
            seed = run.request.seed;
        }
        let job = self.generation.submit(prepared.spec, &self.caller).await?;
        Ok((job, seed, prepared.model))
    }

    async fn replace_source(&mut self, number: u32, media_id: &str) {
        let source = match self.generation.source(media_id, &self.caller) {
            Ok(source) => source,
            Err(error) => return self.send(Report::Failed { number, error }).await,
        };
        self.source.replace(number, source);
        let Some(track) = self.last.as_ref().map(|last| (*last.track).clone()) else {
            self.source.prove(number);
            self.send(Report::SourceReplaced { number }).await;
            return self.send(Report::NothingToMake { number }).await;
        };
        self.segment(number, track, 0.0).await;
    }

    async fn replace_model(
        &mut self,
        number: u32,
        model: ModelRef,
        place_seconds: f32,
        bytes: Option<Taken>,
    ) {
        let with = match self.load(&model, bytes).await {
            Ok(with) => with,
            Err(error) => return self.send(Report::Failed { number, error }).await,
        };
        let resolved = Box::new(with.resolved.clone());
        self.with.replace(number, with);
        let Some(track) = self.last.as_ref().map(|last| (*last.track).clone()) else {
            self.with.prove(number);
            self.send(Report::ModelReplaced {
                number,
                model: resolved,
            })
            .await;
            return self.send(Report::NothingToMake { number }).await;
        };
        self.segment(number, track, place_seconds).await;
    }

    /// Loads another model, proves it and holds it.
    async fn load(&mut self, model: &ModelRef, bytes: Option<Taken>) -> Result<SessionModel, Error> {
        let options = self
            .caller
            .options(self.options.clone(), &self.generation.entries.cards())?;
        let (entry, format, resolved) = self.generation.sounding_model(model, &options).await?;
        check_model(&entry, self.caller.holder())?;
        if format != self.format {
            let ((rate, channels), (own_rate, own_channels)) = (format, self.format);
            return Err(invalid(
                "model",
                format!(
                    "makes {channels} channels of {rate} samples a second, and the session plays {own_channels} of {own_rate}: name a \
                     model of the session's format, or open another session"
                ),
            ));
        }
        let work = JobWork::Load {
            components: Vec::new(),
            replace: None,
            prove: true,
        };
        let spec = JobSpec {
            options,
            entry: entry.clone(),
            work,
        };
        let mut job = self.generation.submit(spec, &self.caller).await?;
        while let Some(event) = job.next().await {
            match event.kind {
                JobEventKind::Failed(error) => return Err(error),
                JobEventKind::Done(_) => break,
                _ => {}
            }
        }
        self.holds += 1;
        let name = format!("{}-{}", self.session_id, self.holds);
        let held = Held::of(&self.generation.queue, &entry, name).await?;
        Ok(SessionModel {
            model: model.clone(),
            resolved,
            _held: held,
            _bytes: bytes,
        })
    }

    /// A segment is complete: the source and the model that it was made with are proven.
    async fn completed(&mut self, number: u32) {
        let Some(made) = self.made_with.remove(&number) else {
            return;
        };
        if self.source.prove(made.source) {
            self.send(Report::SourceReplaced { number: made.source }).await;
        }
        if self.with.prove(made.model) {
            let model = Box::new(self.with.proven().resolved.clone());
            let number = made.model;
            self.send(Report::ModelReplaced { number, model }).await;
        }
    }

    /// A segment failed. If it was to prove a replacement of the source or the model, the earlier one is restored.
    fn failed(&mut self, number: u32) {
        self.made_with.remove(&number);
        if self.source.fail(number) || self.with.fail(number) {
            tracing::info!(session = self.session_id, number, "a replacement was undone");
        }
    }
}
