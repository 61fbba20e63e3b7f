//! `StreamAudio`: a session of sound. `segments` makes the segments that the client asks for, one job each; `messages` has the
//! protocol's messages; this file sends sound ahead of the play head, and ends the session.
//!
//! Sound is kept in host memory until it has been sent, so playback needs no card: jobs may wait, fail and be run
//! again, and models may be replaced, while it continues.

mod messages;
mod segments;
mod versions;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use api::v1;
use api::v1::stream_audio_request::Message as Asked;
use api::v1::stream_audio_response::Message as SessionMessage;
use engine::Error;
use engine::job::{JobEvent, JobEventKind};
use futures::{Stream, StreamExt as _};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

use self::messages::{Opened, failed, progress, settings_of};
use self::segments::{Maker, Report, Work};
use super::caller::Caller;
use super::convert::{Converted, convert};
use super::limits::{Budget, Client, Exceeded, SESSION_MESSAGE_BYTES, Taken, too_long_message};
use super::server::Service;
use super::status::{client_limit, cut, invalid, status_of};
use crate::durations::millis;
use crate::sessions::{Gap, PlayHead, SegmentStart, Timeline};

pub(super) type SessionStream =
    std::pin::Pin<Box<dyn Stream<Item = Result<v1::StreamAudioResponse, Status>> + Send>>;

/// Time for the first message of a session.
const OPENING: Duration = Duration::from_secs(20);
/// Segments that are asked for and have not come.
const MOST_UNDER_WAY: usize = 32;
/// Messages that wait for the transport. Sound is made only while fewer do, progress is told only then.
const MOST_UNSENT: usize = 8;
/// Messages that must not be lost and wait for the transport: beyond, the client is one that does not read.
const MOST_KEPT: usize = 512;
/// What a message counts at least while it is kept: what is made of it takes memory too.
const LEAST_MESSAGE_BYTES: u64 = 1 << 10;
/// Of the message of an error in the log.
const LONGEST_LOGGED_CHARACTERS: usize = 300;
/// The shortest silence of the transport that is told as a gap: less is the clock's.
const SHORTEST_GAP: Duration = Duration::from_millis(20);
/// The shortest chunk that sound is made in while it is ahead, in parts of a second.
const CHUNKS_PER_SECOND: u64 = 20;
/// The longest, in parts of a second.
const LONGEST_CHUNK_PARTS: u64 = 4;

impl Service {
    /// Opens a session by its first message, and returns what it says until its end.
    ///
    /// # Errors
    /// When the first message does not come, is another, or cannot be granted.
    pub(super) async fn open_session(
        &self,
        mut asked: Streaming<v1::StreamAudioRequest>,
        caller: Caller,
    ) -> Result<SessionStream, Status> {
        let first = tokio::time::timeout(OPENING, asked.next()).await;
        let first =
            first.map_err(|_| status_of(&invalid("open", "did not come: send it as the first message")))?;
        let Some(Asked::Open(open)) = first.transpose()?.and_then(|request| request.message) else {
            return Err(status_of(&invalid(
                "open",
                "is missing: send it as the first message",
            )));
        };
        let idle = messages::idle(&open);
        let caller = caller.without_deadline(); // of the call, not of each job
        let bytes = self
            .limits
            .message_bytes()
            .take(caller.client(), counted_bytes(open.encoded_len())?);
        let bytes = bytes.map_err(|exceeded| client_limit(too_many(exceeded)))?;
        let (maker, opened) = self
            .open_maker(open, bytes, caller)
            .await
            .map_err(|error| status_of(&error))?;
        let (send, mut told) = mpsc::channel(1);
        let session = Session::new(self, maker, opened, idle);
        tokio::spawn(session.run(asked, send));
        Ok(Box::pin(async_stream::stream! {
            while let Some(message) = told.recv().await {
                yield message;
            }
        }))
    }
}

/// Why a session ends well.
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

/// A segment that is asked for and has not come whole.
struct UnderWay {
    model: v1::ResolvedModel,
    job: Option<tokio::task::AbortHandle>,
    done: Option<v1::Done>,
}

/// How a session ended, for the log: of an error its code and message, and not its details.
fn words_of_end(ended: &Result<Option<Ending>, Status>) -> String {
    match ended {
        Ok(Some(ending)) => ending.name().to_owned(),
        Ok(None) => "client_gone".to_owned(),
        Err(status) => format!(
            "{:?}: {}",
            status.code(),
            cut(status.message(), LONGEST_LOGGED_CHARACTERS)
        ),
    }
}

struct Session {
    maker: Maker,
    opened: Opened,
    timeline: Timeline,
    head: PlayHead,
    idle: Duration,
    heard: Instant,
    /// Number of the last segment.
    segments: u32,
    under_way: BTreeMap<u32, UnderWay>,
    /// Bytes of the segments' sound, counted against the client.
    taken: BTreeMap<u32, Taken>,
    sound_bytes: std::sync::Arc<Budget>,
    message_bytes: std::sync::Arc<Budget>,
    client: Client,
    unsent: VecDeque<SessionMessage>,
    gaps: u32,
    gap: Duration,
    stopping: tokio::sync::watch::Receiver<bool>,
}

impl Session {
    fn new(service: &Service, maker: Maker, opened: Opened, idle: Duration) -> Session {
        let settings = settings_of(&opened);
        Session {
            timeline: Timeline::new(settings),
            head: PlayHead::new(settings.samples_per_second, opened.paced_by_client),
            idle,
            heard: Instant::now(),
            segments: 0,
            under_way: BTreeMap::new(),
            taken: BTreeMap::new(),
            sound_bytes: service.limits.sound_bytes(),
            message_bytes: service.limits.message_bytes(),
            client: maker.client(),
            unsent: VecDeque::from([SessionMessage::Opened(opened.told())]),
            gaps: 0,
            gap: Duration::ZERO,
            stopping: service.stopping.clone(),
            maker,
            opened,
        }
    }

    /// Runs until its end. When it returns everything is given back.
    async fn run(
        mut self,
        asked: Streaming<v1::StreamAudioRequest>,
        send: mpsc::Sender<Result<v1::StreamAudioResponse, Status>>,
    ) {
        let ended = self.go_on(asked, &send).await;
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
            Ok(Some(ending)) => Ok(self.closed(ending)),
            Ok(None) => return, // the client is gone
            Err(status) => Err(status),
        };
        let unsent = std::mem::take(&mut self.unsent);
        drop(self); // its jobs are cancelled and its model is let go, whether the client reads on or not
        let rest = unsent
            .into_iter()
            .map(|told| Ok(response(told)))
            .chain([last.map(response)]);
        for message in rest {
            // A client that does not read is dropped with the call.
            if send.send(message).await.is_err() {
                return;
            }
        }
    }

    fn closed(&self, ending: Ending) -> SessionMessage {
        SessionMessage::Closed(v1::AudioSessionClosed {
            reason: ending.name().to_owned(),
            samples: self.timeline.made(),
            segments: self.segments,
            gaps: self.gaps,
            gap_ms: millis(self.gap),
        })
    }

    /// `None`: the client has gone.
    async fn go_on(
        &mut self,
        mut asked: Streaming<v1::StreamAudioRequest>,
        send: &mpsc::Sender<Result<v1::StreamAudioResponse, Status>>,
    ) -> Result<Option<Ending>, Status> {
        let mut stopping = self.stopping.clone();
        loop {
            self.make_sound();
            let silent_at = self.heard + self.idle;
            let due = self.next_sound_at().unwrap_or(silent_at);
            tokio::select! {
                biased;
                _ = stopping.wait_for(|stopping| *stopping) => return Ok(Some(Ending::ShuttingDown)),
                permit = send.reserve(), if !self.unsent.is_empty() => {
                    let Ok(permit) = permit else { return Ok(None) };
                    if let Some(told) = self.unsent.pop_front() {
                        permit.send(Ok(response(told)));
                    }
                }
                message = asked.next() => {
                    let Some(message) = message else { return Ok(Some(Ending::Closed)) };
                    let message = match message {
                        Ok(message) => message,
                        Err(status) => return gone_or(status),
                    };
                    self.heard = Instant::now();
                    if let Some(ending) = self.receive(message)? {
                        return Ok(Some(ending));
                    }
                }
                report = self.maker.report() => self.take(report)?,
                () = send.closed() => return Ok(None),
                () = tokio::time::sleep_until(due.min(silent_at)) => {
                    if Instant::now() >= silent_at {
                        return Ok(Some(Ending::Idle));
                    }
                }
            }
        }
    }

    /// A message of the client. The session ends with an error where it is none of this protocol.
    fn receive(&mut self, request: v1::StreamAudioRequest) -> Result<Option<Ending>, Status> {
        let bytes = counted_bytes(request.encoded_len())?;
        match request.message {
            Some(Asked::Segment(segment)) => {
                let start = messages::start_in(segment.start);
                let track = segment.track.unwrap_or_default();
                if let Err(error) = messages::check_segment(&track) {
                    self.segments += 1;
                    self.keep(failed(self.segments, &error))?;
                    return Ok(None);
                }
                self.ask(bytes, start, |number, place_seconds| Work::Segment {
                    number,
                    track: Box::new(track),
                    place_seconds,
                })?;
            }
            Some(Asked::ReplaceSource(source)) => {
                self.ask(bytes, SegmentStart::AtOnceFromStart, |number, _| {
                    Work::ReplaceSource {
                        number,
                        media_id: source.media_id,
                    }
                })?;
            }
            Some(Asked::ReplaceModel(model)) => {
                self.ask(bytes, SegmentStart::AtOnce, |number, place_seconds| {
                    Work::ReplaceModel {
                        number,
                        model: model.model,
                        place_seconds,
                    }
                })?;
            }
            Some(Asked::Played(head)) => self.head.set_by_client(head.sample, self.timeline.made()),
            Some(Asked::Close(_)) => return Ok(Some(Ending::Closed)),
            Some(Asked::Open(_)) => {
                return Err(status_of(&invalid(
                    "open",
                    "came twice: open another session in a call of its own",
                )));
            }
            None => {} // of a newer client
        }
        Ok(None)
    }

    /// Gives a segment its number, and has it made.
    fn ask(
        &mut self,
        bytes: u64,
        start: SegmentStart,
        work: impl FnOnce(u32, f32) -> Work,
    ) -> Result<(), Status> {
        self.segments += 1;
        let number = self.segments;
        if self.under_way.len() >= MOST_UNDER_WAY {
            let problem =
                format!("{MOST_UNDER_WAY} segments are under way, which are the most: wait for one");
            return self.keep(messages::refused(number, &client_limit(problem)));
        }
        let bytes = match self.message_bytes.take(self.client, bytes) {
            Ok(bytes) => bytes,
            Err(exceeded) => return self.keep(messages::refused(number, &client_limit(too_many(exceeded)))),
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

    /// What became of a segment.
    fn take(&mut self, report: Report) -> Result<(), Status> {
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
                self.keep(SessionMessage::Accepted(v1::SegmentAccepted {
                    segment: number,
                    job_id,
                    seed,
                }))
            }
            Report::Happened {
                number,
                job_id,
                event,
            } => self.happened(number, &job_id, event),
            Report::Failed { number, error } => self.fail(number, &error),
            Report::SourceReplaced { number } => {
                self.keep(SessionMessage::SourceReplaced(v1::SourceReplaced {
                    segment: number,
                }))
            }
            Report::ModelReplaced { number, model } => {
                self.opened.model.clone_from(&model);
                self.keep(SessionMessage::ModelReplaced(v1::ModelReplaced {
                    segment: number,
                    model: Some(*model),
                }))
            }
            Report::NothingToMake { number } => {
                self.forget(number);
                Ok(())
            }
        }
    }

    /// An event of a segment's job.
    fn happened(&mut self, number: u32, job_id: &str, event: JobEvent) -> Result<(), Status> {
        let Some(under_way) = self.under_way.get_mut(&number) else {
            return Ok(()); // superseded
        };
        if let JobEventKind::Piece { piece, .. } = &event.kind {
            if let Some(bytes) = piece.format.bytes()
                && !self.taken.contains_key(&number)
            {
                match self.sound_bytes.take(self.client, bytes) {
                    Ok(taken) => self.taken.insert(number, taken),
                    Err(exceeded) => {
                        return self.fail_with(number, messages::refused(number, &too_much(exceeded)));
                    }
                };
            }
            return match self.timeline.add(number, piece) {
                Ok(()) => self.ready(number),
                Err(problem) => self.fail(number, &Error::Internal(problem)),
            };
        }
        match convert(&event, &under_way.model) {
            Converted::Failed(error) => self.fail(number, &error),
            Converted::Media => Ok(()),
            Converted::Event(kind) => match *kind {
                v1::event::Event::Done(done) => {
                    under_way.done = Some(done);
                    self.ready(number)
                }
                v1::event::Event::Accepted(_) => Ok(()), // told by the session itself
                kind => {
                    // Steps that are not read are of no use later.
                    if self.unsent.len() < MOST_UNSENT {
                        self.unsent.push_back(progress(number, job_id, event.at_ms, kind));
                    }
                    Ok(())
                }
            },
        }
    }

    /// Tells that a segment is there, once it is and its job has ended.
    fn ready(&mut self, number: u32) -> Result<(), Status> {
        let (Some(samples), Some(under_way)) =
            (self.timeline.whole_length(number), self.under_way.get(&number))
        else {
            return Ok(());
        };
        let Some(done) = under_way.done.clone() else {
            return Ok(());
        };
        self.under_way.remove(&number);
        self.maker.make(Work::Came { number });
        self.keep(SessionMessage::Ready(v1::SegmentReady {
            segment: number,
            samples,
            done: Some(done),
        }))
    }

    fn fail(&mut self, number: u32, error: &Error) -> Result<(), Status> {
        self.fail_with(number, failed(number, error))
    }

    fn fail_with(&mut self, number: u32, told: SessionMessage) -> Result<(), Status> {
        if !self.under_way.contains_key(&number) {
            return Ok(());
        }
        self.forget(number);
        self.maker.make(Work::Failed { number });
        self.keep(told)
    }

    fn forget(&mut self, number: u32) {
        self.timeline.fail(number);
        self.taken.remove(&number);
        if let Some(job) = self.under_way.remove(&number).and_then(|under_way| under_way.job) {
            job.abort();
        }
    }

    /// Makes sound up to the lead, while the transport takes it.
    fn make_sound(&mut self) {
        let rate = u64::from(settings_of(&self.opened).samples_per_second);
        let made = self.timeline.made();
        let stood = self.head.stop_at(Instant::now(), made);
        if stood >= SHORTEST_GAP {
            self.tell_gap(Gap {
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
                self.tell_gap(gap);
            }
            self.unsent.push_back(messages::sound(rendered));
        }
    }

    /// One that goes on while its client does not read is the same gap.
    fn tell_gap(&mut self, gap: Gap) {
        self.gap += gap.length;
        let told = messages::gap(&gap);
        match self.unsent.back_mut() {
            Some(SessionMessage::Gap(last)) if last.at_sample == gap.at_sample => {
                last.milliseconds = last.milliseconds.saturating_add(told.milliseconds);
            }
            _ => {
                self.gaps += 1;
                self.unsent.push_back(SessionMessage::Gap(told));
            }
        }
    }

    fn supersede(&mut self, number: u32) {
        if self.under_way.contains_key(&number) {
            self.forget(number);
            self.maker.make(Work::Superseded { number });
        }
        self.taken.remove(&number);
        self.unsent.push_back(messages::superseded(number));
    }

    /// Samples that are to be made now.
    fn due(&self, now: Instant) -> u64 {
        let made = self.timeline.made();
        let until = self.head.place(now, made) + settings_of(&self.opened).lead;
        until.saturating_sub(made)
    }

    /// When the next sound is to be made by the clock alone; `None`: something else has to happen first.
    fn next_sound_at(&self) -> Option<Instant> {
        let now = Instant::now();
        if self.unsent.len() >= MOST_UNSENT || !self.head.is_moving() {
            return None;
        }
        let rate = u64::from(settings_of(&self.opened).samples_per_second.max(1));
        let chunk = rate / CHUNKS_PER_SECOND;
        let missing = chunk.saturating_sub(self.due(now)).max(chunk / 4).max(1);
        Some(now + Duration::from_nanos(missing.saturating_mul(1_000_000_000) / rate))
    }

    /// Keeps a message that must not be lost until it is sent.
    ///
    /// # Errors
    /// When the client does not read.
    fn keep(&mut self, told: SessionMessage) -> Result<(), Status> {
        if self.unsent.len() >= MOST_KEPT {
            let problem =
                format!("{MOST_KEPT} messages of this session are not read: read them as they come");
            return Err(client_limit(problem));
        }
        self.unsent.push_back(told);
        Ok(())
    }
}

/// How a session ends when its client's messages do: quietly where the client or its connection has gone, and with the error where
/// a message is wrong.
fn gone_or(status: Status) -> Result<Option<Ending>, Status> {
    match status.code() {
        Code::Cancelled | Code::Unknown | Code::Unavailable => Ok(None),
        _ => Err(status),
    }
}

/// What a message of so many bytes counts.
///
/// # Errors
/// When it is too long.
fn counted_bytes(bytes: usize) -> Result<u64, Status> {
    let bytes = bytes as u64;
    if bytes > SESSION_MESSAGE_BYTES {
        return Err(too_long_message(bytes, SESSION_MESSAGE_BYTES));
    }
    Ok(bytes.max(LEAST_MESSAGE_BYTES))
}

fn too_many(exceeded: Exceeded) -> String {
    exceeded.words(
        "requests under way and of sessions",
        "wait for some, or close a session",
        "limits.uploads",
    )
}

fn too_much(exceeded: Exceeded) -> Status {
    client_limit(exceeded.words(
        "sound of sessions and unread results",
        "ask for shorter segments",
        "limits.results",
    ))
}

fn response(told: SessionMessage) -> v1::StreamAudioResponse {
    v1::StreamAudioResponse { message: Some(told) }
}
