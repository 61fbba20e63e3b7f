//! Messages of the session protocol.

use std::time::Duration;

use api::v1;
use api::v1::stream_audio_response::Message as SessionMessage;
use engine::Error;
use tonic::Status;

use crate::grpc::caller::SESSION;
use crate::grpc::convert::event;
use crate::grpc::status::{all_valid, invalid, reason_of, status_of, told_of};
use crate::sessions::{Gap, PlaybackSettings, Rendered, SegmentStart};

const DEFAULT_LEAD_MS: u32 = 2_000;
const LEAST_LEAD_MS: u32 = 100;
const MOST_LEAD_MS: u32 = 60_000;
const DEFAULT_CROSSFADE_MS: u32 = 25;
const MOST_CROSSFADE_MS: u32 = 5_000;
const MOST_SLOTS: u32 = 8;
const DEFAULT_IDLE_SECONDS: u32 = 60;
const MOST_IDLE_SECONDS: u32 = 3_600;

/// A session that is open, with everything that it was opened with.
#[derive(Clone, Debug)]
pub(super) struct Opened {
    pub(super) session_id: String,
    pub(super) model: v1::ResolvedModel,
    pub(super) samples_per_second: u32,
    pub(super) channels: u32,
    pub(super) lead_ms: u32,
    pub(super) crossfade_ms: u32,
    pub(super) slots: u32,
    pub(super) idle_seconds: u32,
    pub(super) paced_by_client: bool,
    pub(super) repeats: bool,
}

impl Opened {
    /// From the first message, with its defaults filled in.
    pub(super) fn of(
        open: &v1::OpenAudioSession,
        model: v1::ResolvedModel,
        (samples_per_second, channels): (u32, u32),
    ) -> Opened {
        let set = |value: u32, default: u32| if value == 0 { default } else { value };
        Opened {
            session_id: format!("{SESSION}{}", uuid::Uuid::new_v4().simple()),
            model,
            samples_per_second,
            channels,
            lead_ms: set(open.lead_ms, DEFAULT_LEAD_MS),
            crossfade_ms: open.crossfade_ms.unwrap_or(DEFAULT_CROSSFADE_MS),
            slots: set(open.slots, 1),
            idle_seconds: set(open.idle_seconds, DEFAULT_IDLE_SECONDS),
            paced_by_client: open.paced_by_client,
            repeats: !open.once,
        }
    }

    pub(super) fn told(&self) -> v1::AudioSessionOpened {
        v1::AudioSessionOpened {
            session_id: self.session_id.clone(),
            model: Some(self.model.clone()),
            samples_per_second: self.samples_per_second,
            channels: self.channels,
            lead_ms: self.lead_ms,
            crossfade_ms: self.crossfade_ms,
            slots: self.slots,
            idle_seconds: self.idle_seconds,
        }
    }
}

/// Checks what a session is opened with, and reports all wrong fields at once.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn check_open(open: &v1::OpenAudioSession) -> Result<(), Error> {
    let mut problems = Vec::new();
    let mut within = |field: &str, value: u32, least: u32, most: u32| {
        if value != 0 && !(least..=most).contains(&value) {
            let problem = format!("{value} is not from {least} to {most}");
            problems.push(pipelines::RequestError::new(field, problem));
        }
    };
    within("lead_ms", open.lead_ms, LEAST_LEAD_MS, MOST_LEAD_MS);
    within(
        "crossfade_ms",
        open.crossfade_ms.unwrap_or(0),
        0,
        MOST_CROSSFADE_MS,
    );
    within("slots", open.slots, 1, MOST_SLOTS);
    within("idle_seconds", open.idle_seconds, 1, MOST_IDLE_SECONDS);
    if let Some(options) = &open.options {
        if !options.idempotency_key.is_empty() {
            let problem = "is of calls that make one result; a session has many";
            problems.push(pipelines::RequestError::new("options.idempotency_key", problem));
        }
        if options.detach {
            let problem = "is of calls that make one result; a session ends with its stream";
            problems.push(pipelines::RequestError::new("options.detach", problem));
        }
    }
    all_valid(problems)
}

/// Silence of the client after which a session ends.
pub(super) fn idle(open: &v1::OpenAudioSession) -> Duration {
    let seconds = match open.idle_seconds {
        0 => DEFAULT_IDLE_SECONDS,
        seconds => seconds.min(MOST_IDLE_SECONDS),
    };
    Duration::from_secs(u64::from(seconds))
}

/// How a session plays.
pub(super) fn settings_of(opened: &Opened) -> PlaybackSettings {
    let samples = |ms: u32| u64::from(ms) * u64::from(opened.samples_per_second) / 1000;
    PlaybackSettings {
        samples_per_second: opened.samples_per_second,
        channels: opened.channels,
        lead: samples(opened.lead_ms),
        crossfade: samples(opened.crossfade_ms),
        repeats: opened.repeats,
    }
}

/// Checks that a segment leaves to the session what is the session's.
///
/// # Errors
/// [`Error::Invalid`] with the fields that it names.
pub(super) fn check_segment(track: &v1::GenerateAudioRequest) -> Result<(), Error> {
    let model = track.model.as_ref();
    let named = [
        (
            "model.id",
            model.is_some_and(|model| !model.id.is_empty() || !model.revision.is_empty()),
        ),
        (
            "model.quantization",
            model.is_some_and(|model| model.quantization.is_some()),
        ),
        ("init_media_id", !track.init_media_id.is_empty()),
        ("init_latent_id", !track.init_latent_id.is_empty()),
        ("count", track.count > 1),
        ("keep_latent", track.keep_latent),
        ("latent_only", track.latent_only),
        ("output", track.output != 0),
        ("options", track.options.is_some()),
    ];
    let problems: Vec<_> = named
        .into_iter()
        .filter(|(_, is_named)| *is_named)
        .map(|(field, _)| pipelines::RequestError::new(field, "is the session's: leave it out of a segment"))
        .collect();
    all_valid(problems)
}

pub(super) fn start_in(start: i32) -> SegmentStart {
    match v1::SegmentStart::try_from(start) {
        Ok(v1::SegmentStart::AtOnce) => SegmentStart::AtOnce,
        Ok(v1::SegmentStart::AtOnceFromStart) => SegmentStart::AtOnceFromStart,
        Ok(v1::SegmentStart::WhenOver | v1::SegmentStart::Unspecified) | Err(_) => SegmentStart::WhenOver,
    }
}

pub(super) fn progress(segment: u32, job_id: &str, at_ms: u64, kind: v1::event::Event) -> SessionMessage {
    SessionMessage::Progress(v1::SegmentProgress {
        segment,
        event: Some(event(job_id, at_ms, kind)),
    })
}

/// A segment whose job failed, or could not be queued.
pub(super) fn failed(segment: u32, error: &Error) -> SessionMessage {
    let status = status_of(error);
    let problems = match error {
        Error::Invalid(fields) => told_of(fields)
            .map(|(field, description)| v1::SegmentProblem { field, description })
            .collect(),
        _ => Vec::new(),
    };
    failed_with(segment, &status, reason_of(error), problems)
}

/// A segment that a limit of the client refused.
pub(super) fn refused(segment: u32, status: &Status) -> SessionMessage {
    failed_with(segment, status, v1::Reason::ClientLimit, Vec::new())
}

fn failed_with(
    segment: u32,
    status: &Status,
    reason: v1::Reason,
    problems: Vec<v1::SegmentProblem>,
) -> SessionMessage {
    SessionMessage::Failed(v1::SegmentFailed {
        segment,
        code: status.code() as i32,
        reason: reason.as_str_name().to_owned(),
        message: status.message().to_owned(),
        problems,
    })
}

/// A segment that will not sound, since a later one did.
pub(super) fn superseded(segment: u32) -> SessionMessage {
    SessionMessage::Failed(v1::SegmentFailed {
        segment,
        code: tonic::Code::Aborted as i32,
        reason: "SUPERSEDED".to_owned(),
        message: "a later segment sounded before it".to_owned(),
        problems: Vec::new(),
    })
}

pub(super) fn gap(gap: &Gap) -> v1::SoundGap {
    v1::SoundGap {
        at_sample: gap.at_sample,
        milliseconds: u32::try_from(gap.length.as_millis()).unwrap_or(u32::MAX),
    }
}

pub(super) fn sound(rendered: Rendered) -> SessionMessage {
    SessionMessage::Sound(v1::SoundChunk {
        first_sample: rendered.first,
        samples: rendered.samples.into(),
        segment: rendered.segment,
        first_sample_of_segment: rendered.first_of_segment,
    })
}

/// The error of a model that makes no sound.
pub(super) fn no_sound(key: &str) -> Error {
    invalid(
        "model",
        format!("{key} makes no sound: name a model that does; `moored models` lists what each generates"),
    )
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::grpc::sessions::{MOST_KEPT, response};

    #[test]
    fn failures_that_a_client_does_not_read_take_a_few_mib_whatever_it_asked_for() {
        let text = "🟥".repeat(50_000);
        let wrong = || pipelines::RequestError::new(text.clone(), text.clone());
        let errors = [
            Error::Invalid((0..100).map(|_| wrong()).collect()),
            Error::ModelNotFound { id: text.clone() },
            Error::Internal(text.clone()),
        ];
        for error in errors {
            let told = response(failed(1, &error));
            let bytes = MOST_KEPT * told.encoded_len();
            assert!(bytes < 20 << 20, "{bytes} B of {} B each", told.encoded_len());
        }
    }
}
