//! A session of sound. `segments` generates the requested segments, one job each; `opening` has the settings of a session;
//! this file sends sound ahead of the play head, and ends the session.
//!
//! Sound is kept in host memory until it has been sent, so playback needs no card: jobs may wait, fail and be run
//! again, and models may be replaced, while it continues.

mod opening;
mod segments;
mod versions;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use engine::Error;
use engine::job::{JobEvent, JobEventKind, JobId, JobReport};
use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio::time::Instant;

pub use self::opening::{AskedSession, OpenedSession};
use self::segments::{Report, SegmentTaskHandle, Work};
use crate::asked::Asked;
use crate::budget::{Budget, Client, Exceeded, Taken};
use crate::caller::Caller;
use crate::errors::{LONGEST_TEXT_CHARACTERS, invalid, to_keep, too_many, words_of};
use crate::generation::Generation;
use crate::playback::{Gap, PlayHead, Rendered, SegmentStart, Timeline};
use crate::references::ModelRef;
use crate::resolved::ResolvedModel;

/// The events of a session, until its end or its error. Dropping the stream ends the session.
pub type SessionEvents = std::pin::Pin<Box<dyn Stream<Item = Result<SessionEvent, Error>> + Send>>;

/// A request to an open session.
#[derive(Debug)]
pub enum SessionRequest {
    Segment {
        track: Box<Asked>,
        start: SegmentStart,
    },
    /// A segment that is refused as it is.
    WrongSegment(Error),
    /// The last segment is made again, from another source.
    ReplaceSource {
        media_id: String,
    },
    /// The last segment is made again, with another model.
    ReplaceModel {
        model: ModelRef,
    },
    /// The client has played up to this sample.
    Played {
        sample: u64,
    },
    Close,
    /// A request that this version does not know.
    Unknown,
}

/// An input from the client of a session. The end of their stream closes the session.
#[derive(Debug)]
pub enum FromClient {
    /// A request, and the bytes of its message.
    Request { request: SessionRequest, bytes: u64 },
    /// A message is wrong, which ends the session with this error.
    Wrong(Error),
    /// The client or its connection has gone.
    Gone,
    /// The protocol server ends the session with an error of its own, which is this one in words.
    Refused(String),
}

/// An event of a session for its client.
#[derive(Debug)]
pub enum SessionEvent {
    Opened(OpenedSession),
    Accepted {
        segment: u32,
        job: JobId,
        seed: u64,
    },
    /// An event of a segment's job, other than its end and its sound.
    Progress {
        segment: u32,
        job: JobId,
        event: JobEvent,
    },
    /// A segment is complete.
    Ready {
        segment: u32,
        samples: u64,
        report: Arc<JobReport>,
        model: ResolvedModel,
    },
    /// A segment failed.
    Failed {
        segment: u32,
        failure: SegmentFailure,
    },
    SourceReplaced {
        segment: u32,
    },
    ModelReplaced {
        segment: u32,
        model: ResolvedModel,
    },
    Gap(Gap),
    Sound(Rendered),
    Closed(SessionEnd),
}

/// Why a segment failed.
#[derive(Debug)]
pub enum SegmentFailure {
    /// Its job failed, or could not be queued.
    Error(Error),
    /// A later segment sounded before it.
    Superseded,
}

/// Figures of a session that has ended.
#[derive(Debug)]
pub struct SessionEnd {
    /// `closed`, `idle` or `shutting_down`.
    pub reason: &'static str,
    pub samples: u64,
    pub segments: u32,
    pub gaps: u32,
    pub gap: Duration,
}

/// Most segments that a session may have requested and not received.
const MOST_UNDER_WAY: usize = 32;
/// Messages that wait for the transport. Sound is rendered and progress is sent only while fewer wait.
const MOST_UNSENT: usize = 8;
/// Most messages that must not be lost and wait for the transport: beyond it, the client counts as not reading.
const MOST_KEPT: usize = 512;
/// Longest message of a session's client: lyrics and curves are shorter.
pub const SESSION_MESSAGE_BYTES: u64 = 256 << 10;
/// Least bytes that a stored message counts, as its parsed form takes memory too.
const LEAST_MESSAGE_BYTES: u64 = 1 << 10;
/// The shortest silence of the transport that is reported as a gap: shorter ones are within the precision of the clock.
const SHORTEST_GAP: Duration = Duration::from_millis(20);
/// Shortest chunk of rendered sound while the session is ahead, as a part of a second.
const CHUNKS_PER_SECOND: u64 = 20;
/// Longest chunk, as a part of a second.
const LONGEST_CHUNK_PARTS: u64 = 4;

impl Generation {
    /// Opens a session with its first message, of so many bytes, and returns the session's events until its end.
    ///
    /// # Errors
    /// When fields are wrong, the model cannot be opened or makes no sound, or the client may have no more sessions.
    pub async fn open_session(
        &self,
        open: AskedSession,
        bytes: u64,
        from_client: impl Stream<Item = FromClient> + Send + Unpin + 'static,
        caller: Caller,
    ) -> Result<SessionEvents, Error> {
        let caller = caller.without_deadline(); // of the call, not of each job
        let bytes = self.bounds.uploads.take(caller.client(), counted_bytes(bytes)?);
        let bytes = bytes.map_err(too_many_bytes)?;
        let (maker, opened) = self.open_segment_task(open, bytes, caller).await?;
        let (send, mut said) = mpsc::channel(1);
        tokio::spawn(Session::new(self, maker, opened).run(from_client, send));
        Ok(Box::pin(async_stream::stream! {
            while let Some(event) = said.recv().await {
                yield event;
            }
        }))
    }
}

/// The regular reasons for which a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Closed,
    Idle,
    ShuttingDown,
}

impl Ending {
    fn name(self) -> &'static str {
        match self {
            Ending::Closed => "closed",
            Ending::Idle => "idle",
            Ending::ShuttingDown => "shutting_down",
        }
    }
}

/// A segment that was requested and is not complete.
struct UnderWay {
    model: ResolvedModel,
    job: Option<tokio::task::AbortHandle>,
    done: Option<Arc<JobReport>>,
}

/// How a session ended.
enum Ended {
    Well(Ending),
    ClientGone,
    /// By the protocol server, which reports the reason itself.
    Refused(String),
}

/// The end of a session in words, for the log.
fn words_of_end(ended: &Result<Ended, Error>) -> String {
    let words = match ended {
        Ok(Ended::Well(ending)) => ending.name().to_owned(),
        Ok(Ended::ClientGone) => "client_gone".to_owned(),
        Ok(Ended::Refused(why)) => why.clone(),
        Err(error) => words_of(error),
    };
    wording::cut(&words, LONGEST_TEXT_CHARACTERS).into_owned()
}

struct Session {
    maker: SegmentTaskHandle,
    opened: OpenedSession,
    timeline: Timeline,
    head: PlayHead,
    heard: Instant,
    /// Number of the last segment.
    segments: u32,
    under_way: BTreeMap<u32, UnderWay>,
    /// Bytes of the segments' sound, counted against the client.
    taken: BTreeMap<u32, Taken>,
    sound_bytes: Arc<Budget>,
    message_bytes: Arc<Budget>,
    client: Client,
    unsent: VecDeque<SessionEvent>,
    gaps: u32,
    gap: Duration,
    stopping: tokio::sync::watch::Receiver<bool>,
}

impl Session {
    fn new(generation: &Generation, maker: SegmentTaskHandle, opened: OpenedSession) -> Session {
        let settings = opened.settings();
        Session {
            timeline: Timeline::new(settings),
            head: PlayHead::new(settings.samples_per_second, opened.paced_by_client),
            heard: Instant::now(),
            segments: 0,
            under_way: BTreeMap::new(),
            taken: BTreeMap::new(),
            sound_bytes: generation.bounds.results.clone(),
            message_bytes: generation.bounds.uploads.clone(),
            client: maker.client(),
            unsent: VecDeque::from([SessionEvent::Opened(opened.clone())]),
            gaps: 0,
            gap: Duration::ZERO,
            stopping: generation.stopping.clone(),
            maker,
            opened,
        }
    }

    /// Runs the session until its end. When it returns, all that the session held is released.
    async fn run(
        mut self,
        from_client: impl Stream<Item = FromClient> + Unpin,
        send: mpsc::Sender<Result<SessionEvent, Error>>,
    ) {
        let ended = self.go_on(from_client, &send).await;
        let (samples, id) = (self.timeline.made(), self.opened.session_id.clone());
        tracing::info!(
            session = id,
            segments = self.segments,
            samples,
            gaps = self.gaps,
            ended = words_of_end(&ended),
            "a session ended"
        );
        let last = match ended {
            Ok(Ended::Well(ending)) => Some(Ok(self.closed(ending))),
            Ok(Ended::ClientGone) => return,
            Ok(Ended::Refused(_)) => None,
            Err(error) => Some(Err(error)),
        };
        let unsent = std::mem::take(&mut self.unsent);
        drop(self); // cancels its jobs and releases its model, whether the client reads on or not
        for event in unsent.into_iter().map(Ok).chain(last) {
            // A client that does not read is dropped with the call.
            if send.send(event).await.is_err() {
                return;
            }
        }
    }

    fn closed(&self, ending: Ending) -> SessionEvent {
        SessionEvent::Closed(SessionEnd {
            reason: ending.name(),
            samples: self.timeline.made(),
            segments: self.segments,
            gaps: self.gaps,
            gap: self.gap,
        })
    }

    /// Goes on until the session ends.
    async fn go_on(
        &mut self,
        mut from_client: impl Stream<Item = FromClient> + Unpin,
        send: &mpsc::Sender<Result<SessionEvent, Error>>,
    ) -> Result<Ended, Error> {
        let mut stopping = self.stopping.clone();
        loop {
            self.make_sound();
            let silent_at = self.heard + self.opened.idle();
            let due = self.next_sound_at().unwrap_or(silent_at);
            tokio::select! {
                biased;
                _ = stopping.wait_for(|stopping| *stopping) => return Ok(Ended::Well(Ending::ShuttingDown)),
                permit = send.reserve(), if !self.unsent.is_empty() => {
                    let Ok(permit) = permit else { return Ok(Ended::ClientGone) };
                    if let Some(event) = self.unsent.pop_front() {
                        permit.send(Ok(event));
                    }
                }
                input = from_client.next() => {
                    let (request, bytes) = match input {
                        Some(FromClient::Request { request, bytes }) => (request, bytes),
                        Some(FromClient::Wrong(error)) => return Err(error),
                        Some(FromClient::Gone) => return Ok(Ended::ClientGone),
                        Some(FromClient::Refused(why)) => return Ok(Ended::Refused(why)),
                        None => return Ok(Ended::Well(Ending::Closed)),
                    };
                    self.heard = Instant::now();
                    if let Some(ending) = self.receive(request, bytes)? {
                        return Ok(Ended::Well(ending));
                    }
                }
                report = self.maker.report() => self.take(report)?,
                () = send.closed() => return Ok(Ended::ClientGone),
                () = tokio::time::sleep_until(due.min(silent_at)) => {
                    if Instant::now() >= silent_at {
                        return Ok(Ended::Well(Ending::Idle));
                    }
                }
            }
        }
    }

    /// Tells the client that a segment cannot be made.
    fn refuse_segment(&mut self, error: Error) -> Result<(), Error> {
        self.segments += 1;
        self.keep(failed(self.segments, error))
    }

    /// A request of the client, in a message of so many bytes.
    fn receive(&mut self, request: SessionRequest, bytes: u64) -> Result<Option<Ending>, Error> {
        let bytes = counted_bytes(bytes)?;
        match request {
            SessionRequest::Segment { track, start } => {
                if let Err(error) = opening::check_segment(&track) {
                    self.refuse_segment(error)?;
                    return Ok(None);
                }
                self.ask(bytes, start, |number, place_seconds| Work::Segment {
                    number,
                    track,
                    place_seconds,
                })?;
            }
            SessionRequest::WrongSegment(error) => self.refuse_segment(error)?,
            SessionRequest::ReplaceSource { media_id } => {
                let start = SegmentStart::AtOnceFromStart;
                self.ask(bytes, start, |number, _| Work::ReplaceSource { number, media_id })?;
            }
            SessionRequest::ReplaceModel { model } => {
                self.ask(bytes, SegmentStart::AtOnce, |number, place_seconds| {
                    Work::ReplaceModel {
                        number,
                        model,
                        place_seconds,
                    }
                })?;
            }
            SessionRequest::Played { sample } => self.head.set_by_client(sample, self.timeline.made()),
            SessionRequest::Close => return Ok(Some(Ending::Closed)),
            SessionRequest::Unknown => {}
        }
        Ok(None)
    }

    /// Numbers a segment, and starts its generation.
    fn ask(
        &mut self,
        bytes: u64,
        start: SegmentStart,
        work: impl FnOnce(u32, f32) -> Work,
    ) -> Result<(), Error> {
        self.segments += 1;
        let number = self.segments;
        if self.under_way.len() >= MOST_UNDER_WAY {
            let problem =
                format!("{MOST_UNDER_WAY} segments are under way, which are the most: wait for one");
            return self.keep(failed(number, Error::ClientLimit(problem)));
        }
        let bytes = match self.message_bytes.take(self.client, bytes) {
            Ok(bytes) => bytes,
            Err(exceeded) => return self.keep(failed(number, too_many_bytes(exceeded))),
        };
        self.timeline.expect(number, start);
        let under_way = UnderWay {
            model: self.opened.model.clone(),
            job: None,
            done: None,
        };
        self.under_way.insert(number, under_way);
        let place = match start {
            SegmentStart::AtOnce => self.timeline.place_seconds(),
            SegmentStart::AtOnceFromStart | SegmentStart::WhenOver => 0.0,
        };
        self.maker.make_counted(work(number, place), bytes);
        Ok(())
    }

    /// Handles a report on a segment.
    fn take(&mut self, report: Report) -> Result<(), Error> {
        match report {
            Report::Accepted {
                number,
                job_id,
                seed,
                model,
                job,
            } => {
                let Some(under_way) = self.under_way.get_mut(&number) else {
                    job.abort(); // superseded before it began
                    return Ok(());
                };
                (under_way.model, under_way.job) = (*model, Some(job));
                self.keep(SessionEvent::Accepted {
                    segment: number,
                    job: job_id,
                    seed,
                })
            }
            Report::Happened {
                number,
                job_id,
                event,
            } => self.happened(number, job_id, event),
            Report::Failed { number, error } => self.fail(number, error),
            Report::SourceReplaced { number } => self.keep(SessionEvent::SourceReplaced { segment: number }),
            Report::ModelReplaced { number, model } => {
                self.opened.model.clone_from(&model);
                self.keep(SessionEvent::ModelReplaced {
                    segment: number,
                    model: *model,
                })
            }
            Report::NothingToMake { number } => {
                self.forget(number);
                Ok(())
            }
        }
    }

    /// An event of a segment's job.
    fn happened(&mut self, number: u32, job: JobId, event: JobEvent) -> Result<(), Error> {
        let Some(under_way) = self.under_way.get_mut(&number) else {
            return Ok(()); // superseded
        };
        match event.kind {
            JobEventKind::Piece { piece, .. } => {
                if let Some(bytes) = piece.format.bytes()
                    && !self.taken.contains_key(&number)
                {
                    match self.sound_bytes.take(self.client, bytes) {
                        Ok(taken) => self.taken.insert(number, taken),
                        Err(exceeded) => return self.fail(number, too_much(exceeded)),
                    };
                }
                match self.timeline.add(number, &piece) {
                    Ok(()) => self.ready(number),
                    Err(problem) => self.fail(number, Error::Internal(problem)),
                }
            }
            JobEventKind::Failed(error) => self.fail(number, error),
            JobEventKind::Done(report) => {
                under_way.done = Some(report);
                self.ready(number)
            }
            // The session itself says so.
            JobEventKind::Accepted { .. } | JobEventKind::Preview { .. } => Ok(()),
            // Steps that are not read are of no use later.
            kind => {
                if self.unsent.len() < MOST_UNSENT {
                    let event = JobEvent { kind, ..event };
                    self.unsent.push_back(SessionEvent::Progress {
                        segment: number,
                        job,
                        event,
                    });
                }
                Ok(())
            }
        }
    }

    /// Reports a segment as ready, once it is complete and its job has ended.
    fn ready(&mut self, number: u32) -> Result<(), Error> {
        let (Some(samples), Some(under_way)) =
            (self.timeline.whole_length(number), self.under_way.get(&number))
        else {
            return Ok(());
        };
        let Some(report) = under_way.done.clone() else {
            return Ok(());
        };
        let model = under_way.model.clone();
        self.under_way.remove(&number);
        self.maker.make(Work::Completed { number });
        self.keep(SessionEvent::Ready {
            segment: number,
            samples,
            report,
            model,
        })
    }

    fn fail(&mut self, number: u32, error: Error) -> Result<(), Error> {
        if !self.under_way.contains_key(&number) {
            return Ok(());
        }
        self.forget(number);
        self.maker.make(Work::Failed { number });
        self.keep(failed(number, error))
    }

    fn forget(&mut self, number: u32) {
        self.timeline.fail(number);
        self.taken.remove(&number);
        if let Some(job) = self.under_way.remove(&number).and_then(|under_way| under_way.job) {
            job.abort();
        }
    }

    /// Renders sound up to the lead, while the transport accepts it.
    fn make_sound(&mut self) {
        let rate = u64::from(self.opened.samples_per_second);
        let made = self.timeline.made();
        let stood = self.head.stop_at(Instant::now(), made);
        if stood >= SHORTEST_GAP {
            self.report_gap(Gap {
                at_sample: made,
                length: stood,
            });
        }
        while self.unsent.len() < MOST_UNSENT {
            let due = self.due(Instant::now());
            // In whole chunks, so that a play head that moves on does not make it one sample at a time.
            if due < rate / CHUNKS_PER_SECOND {
                return;
            }
            let (rendered, change) = self.timeline.render(due.min(rate / LONGEST_CHUNK_PARTS));
            for number in change.superseded {
                self.supersede(number);
            }
            let now = Instant::now();
            let Some(rendered) = rendered else {
                let is_gap = self.timeline.is_within_segment();
                self.head.stop_if_exhausted(now, self.timeline.made(), is_gap);
                return;
            };
            self.taken.retain(|&number, _| self.timeline.has(number));
            if let Some(gap) = self.head.sent(now) {
                self.report_gap(gap);
            }
            self.unsent.push_back(SessionEvent::Sound(rendered));
        }
    }

    /// Reports a gap. A gap that lasts while the client does not read is reported as one.
    fn report_gap(&mut self, gap: Gap) {
        self.gap += gap.length;
        match self.unsent.back_mut() {
            Some(SessionEvent::Gap(last)) if last.at_sample == gap.at_sample => last.length += gap.length,
            _ => {
                self.gaps += 1;
                self.unsent.push_back(SessionEvent::Gap(gap));
            }
        }
    }

    fn supersede(&mut self, number: u32) {
        if self.under_way.contains_key(&number) {
            self.forget(number);
            self.maker.make(Work::Superseded { number });
        }
        self.taken.remove(&number);
        self.unsent.push_back(SessionEvent::Failed {
            segment: number,
            failure: SegmentFailure::Superseded,
        });
    }

    /// Number of samples to render now.
    fn due(&self, now: Instant) -> u64 {
        let made = self.timeline.made();
        let until = self.head.place(now, made) + self.opened.settings().lead;
        until.saturating_sub(made)
    }

    /// When the next sound is due by the clock alone; `None`: another event has to happen first.
    fn next_sound_at(&self) -> Option<Instant> {
        let now = Instant::now();
        if self.unsent.len() >= MOST_UNSENT || !self.head.is_moving() {
            return None;
        }
        let rate = u64::from(self.opened.samples_per_second.max(1));
        let chunk = rate / CHUNKS_PER_SECOND;
        let missing = chunk.saturating_sub(self.due(now)).max(chunk / 4).max(1);
        Some(now + Duration::from_nanos(missing.saturating_mul(1_000_000_000) / rate))
    }

    /// Keeps a message that must not be lost until it is sent.
    ///
    /// # Errors
    /// When the client does not read.
    fn keep(&mut self, event: SessionEvent) -> Result<(), Error> {
        if self.unsent.len() >= MOST_KEPT {
            let problem =
                format!("{MOST_KEPT} messages of this session are not read: read them as they come");
            return Err(Error::ClientLimit(problem));
        }
        self.unsent.push_back(event);
        Ok(())
    }
}

/// The event of a failed segment.
fn failed(segment: u32, error: Error) -> SessionEvent {
    let failure = SegmentFailure::Error(to_keep(error));
    SessionEvent::Failed { segment, failure }
}

/// The bytes that a message of this length counts.
///
/// # Errors
/// When it is too long.
fn counted_bytes(bytes: u64) -> Result<u64, Error> {
    if bytes > SESSION_MESSAGE_BYTES {
        return Err(invalid(
            "message",
            too_many(bytes, "bytes", SESSION_MESSAGE_BYTES),
        ));
    }
    Ok(bytes.max(LEAST_MESSAGE_BYTES))
}

fn too_many_bytes(exceeded: Exceeded) -> Error {
    Error::ClientLimit(exceeded.words(
        "requests under way and of sessions",
        "wait for some, or close a session",
        "limits.uploads",
    ))
}

fn too_much(exceeded: Exceeded) -> Error {
    Error::ClientLimit(exceeded.words(
        "sound of sessions and unread results",
        "ask for shorter segments",
        "limits.results",
    ))
}
