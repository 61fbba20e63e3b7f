//! `StreamAudio`: the messages of a session of sound.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::v1;
use api::v1::stream_audio_request::Message as Asked;
use api::v1::stream_audio_response::Message as SessionMessage;
use calls::{
    AskedSession, Caller, FromClient, Gap, Generation, OpenedSession, SegmentFailure, SegmentStart,
    SessionEnd, SessionEvent, SessionEvents, SessionRequest, invalid, millis,
};
use engine::Error;
use futures::{Stream, StreamExt as _};
use prost::Message as _;
use tonic::{Code, Status};

use crate::convert::{OfJob, done_out, event, job_kind_out, resolved_out};
use crate::requests::{known, model_in, options_in, track_in};
use crate::status::{listed, reason_of, status_of};

/// The messages of a session, until its end or its error.
pub(crate) type SessionStream =
    std::pin::Pin<Box<dyn Stream<Item = Result<v1::StreamAudioResponse, Status>> + Send>>;

/// Time for the first message of a session.
const OPENING: Duration = Duration::from_secs(20);

/// Opens a session with its first message, and returns its messages until its end.
///
/// # Errors
/// When the first message does not arrive in time, does not open a session, or is refused.
pub(crate) async fn open_session(
    generation: &Generation,
    mut messages: impl Stream<Item = Result<v1::StreamAudioRequest, Status>> + Send + Unpin + 'static,
    caller: Caller,
) -> Result<SessionStream, Status> {
    let first = tokio::time::timeout(OPENING, messages.next()).await;
    let first =
        first.map_err(|_| status_of(&invalid("open", "did not come: send it as the first message")))?;
    let first = first.transpose()?.unwrap_or_default();
    let bytes = first.encoded_len() as u64;
    known(&first).map_err(|error| status_of(&error))?;
    let Some(Asked::Open(open)) = first.message else {
        let problem = "is missing: send it as the first message";
        return Err(status_of(&invalid("open", problem)));
    };
    let refusal = Refusal::default();
    let from_client = requests(messages, refusal.clone());
    let opened = generation.open_session(open_in(open), bytes, from_client, caller);
    let events = opened.await.map_err(|error| status_of(&error))?;
    Ok(Box::pin(responses(events, refusal)))
}

/// The error of the transport that ended a session. It is sent as the last message.
#[derive(Clone, Default)]
struct Refusal(Arc<Mutex<Option<Status>>>);

impl Refusal {
    fn set(&self, status: Status) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
    }

    fn take(&self) -> Option<Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The requests in the messages of a client.
fn requests(
    messages: impl Stream<Item = Result<v1::StreamAudioRequest, Status>>,
    refusal: Refusal,
) -> impl Stream<Item = FromClient> {
    let came = move |message: Result<v1::StreamAudioRequest, Status>| match message {
        Ok(message) => {
            let bytes = message.encoded_len() as u64;
            match request_in(message) {
                Ok(request) => FromClient::Request { request, bytes },
                Err(error) => FromClient::Wrong(error),
            }
        }
        Err(status) => {
            // The client or its connection has gone quietly by these; any other is a wrong message.
            if matches!(status.code(), Code::Cancelled | Code::Unknown | Code::Unavailable) {
                return FromClient::Gone;
            }
            let why = format!("{:?}: {}", status.code(), status.message());
            refusal.set(status);
            FromClient::Refused(why)
        }
    };
    messages.map(came)
}

/// Converts the events of a session to messages.
fn responses(
    mut events: SessionEvents,
    refusal: Refusal,
) -> impl Stream<Item = Result<v1::StreamAudioResponse, Status>> {
    async_stream::try_stream! {
        while let Some(event) = events.next().await {
            let event = event.map_err(|error| status_of(&error))?;
            if let Some(message) = message_out(event) {
                yield v1::StreamAudioResponse { message: Some(message) };
            }
        }
        if let Some(status) = refusal.take() {
            Err(status)?;
        }
    }
}

fn open_in(open: v1::OpenAudioSession) -> AskedSession {
    AskedSession {
        model: model_in(open.model),
        options: open.options.map(options_in),
        source_media_id: open.source_media_id,
        lead_ms: open.lead_ms,
        crossfade_ms: open.crossfade_ms,
        slots: open.slots,
        idle_seconds: open.idle_seconds,
        paced_by_client: open.paced_by_client,
        once: open.once,
    }
}

/// A request to an open session.
///
/// # Errors
/// When it opens another.
fn request_in(message: v1::StreamAudioRequest) -> Result<SessionRequest, Error> {
    Ok(match message.message {
        // It fails alone, and the session goes on.
        Some(Asked::Segment(segment)) => match known(&segment) {
            Err(problem) => SessionRequest::WrongSegment(problem),
            Ok(()) => SessionRequest::Segment {
                start: start_in(segment.start),
                track: Box::new(track_in(segment.track.unwrap_or_default())),
            },
        },
        Some(Asked::ReplaceSource(source)) => SessionRequest::ReplaceSource {
            media_id: source.media_id,
        },
        Some(Asked::ReplaceModel(model)) => SessionRequest::ReplaceModel {
            model: model_in(model.model),
        },
        Some(Asked::Played(head)) => SessionRequest::Played { sample: head.sample },
        Some(Asked::Close(_)) => SessionRequest::Close,
        Some(Asked::Open(_)) => {
            let problem = "came twice: open another session in a call of its own";
            return Err(invalid("open", problem));
        }
        None => SessionRequest::Unknown, // of a newer client
    })
}

fn start_in(start: i32) -> SegmentStart {
    match v1::SegmentStart::try_from(start).unwrap_or_default() {
        v1::SegmentStart::AtOnce => SegmentStart::AtOnce,
        v1::SegmentStart::AtOnceFromStart => SegmentStart::AtOnceFromStart,
        v1::SegmentStart::WhenOver | v1::SegmentStart::Unspecified => SegmentStart::WhenOver,
    }
}

/// The message of an event; `None` if the protocol has none for it.
fn message_out(said: SessionEvent) -> Option<SessionMessage> {
    Some(match said {
        SessionEvent::Opened(opened) => SessionMessage::Opened(opened_out(&opened)),
        SessionEvent::Accepted { segment, job, seed } => SessionMessage::Accepted(v1::SegmentAccepted {
            segment,
            job_id: job.to_string(),
            seed,
        }),
        SessionEvent::Progress {
            segment,
            job,
            event: happened,
        } => {
            let of = OfJob {
                model: &v1::ResolvedModel::default(),
                left_out: &[],
            };
            let kind = job_kind_out(&happened.kind, &of)?;
            SessionMessage::Progress(v1::SegmentProgress {
                segment,
                event: Some(event(&job, happened.at_ms, kind)),
            })
        }
        SessionEvent::Ready {
            segment,
            samples,
            report,
            model,
        } => {
            let of = OfJob {
                model: &resolved_out(&model),
                left_out: &[],
            };
            SessionMessage::Ready(v1::SegmentReady {
                segment,
                samples,
                done: Some(done_out(&report, &of)),
            })
        }
        SessionEvent::Failed { segment, failure } => SessionMessage::Failed(failure_out(segment, &failure)),
        SessionEvent::SourceReplaced { segment } => {
            SessionMessage::SourceReplaced(v1::SourceReplaced { segment })
        }
        SessionEvent::ModelReplaced { segment, model } => {
            let model = Some(resolved_out(&model));
            SessionMessage::ModelReplaced(v1::ModelReplaced { segment, model })
        }
        SessionEvent::Gap(gap) => SessionMessage::Gap(gap_out(&gap)),
        SessionEvent::Sound(rendered) => SessionMessage::Sound(v1::SoundChunk {
            first_sample: rendered.first,
            samples: rendered.samples.into(),
            segment: rendered.segment,
            first_sample_of_segment: rendered.first_of_segment,
        }),
        SessionEvent::Closed(end) => SessionMessage::Closed(closed_out(&end)),
    })
}

fn opened_out(opened: &OpenedSession) -> v1::AudioSessionOpened {
    v1::AudioSessionOpened {
        session_id: opened.session_id.clone(),
        model: Some(resolved_out(&opened.model)),
        samples_per_second: opened.samples_per_second,
        channels: opened.channels,
        lead_ms: opened.lead_ms,
        crossfade_ms: opened.crossfade_ms,
        slots: opened.slots,
        idle_seconds: opened.idle_seconds,
    }
}

/// A segment that failed.
fn failure_out(segment: u32, failure: &SegmentFailure) -> v1::SegmentFailed {
    let error = match failure {
        SegmentFailure::Error(error) => error,
        SegmentFailure::Superseded => {
            return v1::SegmentFailed {
                segment,
                code: Code::Aborted as i32,
                reason: "SUPERSEDED".to_owned(),
                message: "a later segment sounded before it".to_owned(),
                problems: Vec::new(),
            };
        }
    };
    let status = status_of(error);
    let problems = match error {
        Error::Invalid(fields) => listed(fields)
            .map(|(field, description)| v1::SegmentProblem { field, description })
            .collect(),
        _ => Vec::new(),
    };
    v1::SegmentFailed {
        segment,
        code: status.code() as i32,
        reason: reason_of(error).as_str_name().to_owned(),
        message: status.message().to_owned(),
        problems,
    }
}

fn gap_out(gap: &Gap) -> v1::SoundGap {
    v1::SoundGap {
        at_sample: gap.at_sample,
        milliseconds: u32::try_from(gap.length.as_millis()).unwrap_or(u32::MAX),
    }
}

fn closed_out(end: &SessionEnd) -> v1::AudioSessionClosed {
    v1::AudioSessionClosed {
        reason: end.reason.to_owned(),
        samples: end.samples,
        segments: end.segments,
        gaps: end.gaps,
        gap_ms: millis(end.gap),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_with_a_number_that_is_not_known_fails_alone() {
        let segment = v1::AudioSegment {
            start: 99,
            ..v1::AudioSegment::default()
        };
        let request = request_in(v1::StreamAudioRequest {
            message: Some(Asked::Segment(segment)),
        });
        let Ok(SessionRequest::WrongSegment(Error::Invalid(fields))) = request else {
            panic!("{request:?}");
        };
        assert_eq!(fields[0].field, "start");
    }
}
