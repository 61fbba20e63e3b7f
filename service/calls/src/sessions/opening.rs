//! The settings with which a session is opened, and those that its segments must not set.

use std::time::Duration;

use config::RESERVED_NAMES;
use engine::Error;
use model::RequestError;

use crate::asked::{Asked, named};
use crate::caller::AskedOptions;
use crate::errors::{all_valid, invalid, outside};
use crate::playback::PlaybackSettings;
use crate::references::ModelRef;
use crate::resolved::ResolvedModel;

const DEFAULT_LEAD_MS: u32 = 2_000;
const LEAST_LEAD_MS: u32 = 100;
const MOST_LEAD_MS: u32 = 60_000;
const DEFAULT_CROSSFADE_MS: u32 = 25;
const MOST_CROSSFADE_MS: u32 = 5_000;
const MOST_SLOTS: u32 = 8;
const DEFAULT_IDLE_SECONDS: u32 = 60;
const MOST_IDLE_SECONDS: u32 = 3_600;

/// A client's settings of a session. Fields that it does not set are zero, empty or `None`.
#[derive(Clone, Debug, Default)]
pub struct AskedSession {
    pub model: ModelRef,
    pub options: Option<AskedOptions>,
    /// Id of an uploaded track, from which segments start.
    pub source_media_id: String,
    /// How far ahead of the play head sound is rendered.
    pub lead_ms: u32,
    /// How long a segment fades into the next.
    pub crossfade_ms: Option<u32>,
    /// Number of segments that are generated concurrently.
    pub slots: u32,
    /// Time without a message of the client after which the session ends.
    pub idle_seconds: u32,
    /// The client reports how far it has played; otherwise the clock decides.
    pub paced_by_client: bool,
    /// A segment is not repeated when it is over and no other is ready.
    pub once: bool,
}

/// An open session, with all its settings.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenedSession {
    pub session_id: String,
    pub model: ResolvedModel,
    pub samples_per_second: u32,
    pub channels: u32,
    pub lead_ms: u32,
    pub crossfade_ms: u32,
    pub slots: u32,
    pub idle_seconds: u32,
    pub(super) paced_by_client: bool,
    pub(super) repeats: bool,
}

impl OpenedSession {
    /// The client's settings, with defaults filled in.
    pub(super) fn of(
        open: &AskedSession,
        model: ResolvedModel,
        (samples_per_second, channels): (u32, u32),
    ) -> OpenedSession {
        OpenedSession {
            session_id: format!("{RESERVED_NAMES}{}", uuid::Uuid::new_v4().simple()),
            model,
            samples_per_second,
            channels,
            lead_ms: named(open.lead_ms, DEFAULT_LEAD_MS),
            crossfade_ms: open.crossfade_ms.unwrap_or(DEFAULT_CROSSFADE_MS),
            slots: named(open.slots, 1),
            idle_seconds: named(open.idle_seconds, DEFAULT_IDLE_SECONDS),
            paced_by_client: open.paced_by_client,
            repeats: !open.once,
        }
    }

    /// How it plays.
    pub(super) fn settings(&self) -> PlaybackSettings {
        let samples = |ms: u32| u64::from(ms) * u64::from(self.samples_per_second) / 1000;
        PlaybackSettings {
            samples_per_second: self.samples_per_second,
            channels: self.channels,
            lead: samples(self.lead_ms),
            crossfade: samples(self.crossfade_ms),
            repeats: self.repeats,
        }
    }

    /// Time without a message of the client after which it ends.
    pub(super) fn idle(&self) -> Duration {
        Duration::from_secs(u64::from(self.idle_seconds))
    }
}

/// Checks the settings of a session, and reports all wrong fields at once.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn check_open(open: &AskedSession) -> Result<(), Error> {
    let mut problems = Vec::new();
    let mut within = |field: &str, value: u32, least: u32, most: u32| {
        if value != 0 && !(least..=most).contains(&value) {
            problems.push(RequestError::new(field, outside(value, least, most)));
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
            let problem = "cannot be used for a session, which has many results: leave it out";
            problems.push(RequestError::new("options.idempotency_key", problem));
        }
        if options.detach {
            let problem = "cannot be used for a session, which ends with its stream: leave it out";
            problems.push(RequestError::new("options.detach", problem));
        }
    }
    all_valid(problems)
}

/// Checks that a segment sets no field that belongs to the session.
///
/// # Errors
/// [`Error::Invalid`] with the fields that it sets.
pub(super) fn check_segment(track: &Asked) -> Result<(), Error> {
    let model = &track.model;
    let named = [
        ("model.id", !model.id.is_empty() || !model.revision.is_empty()),
        ("model.quantization", !model.formats.is_open()),
        ("init_media_id", track.init_media.is_some()),
        ("init_latent_id", track.init_latent.is_some()),
        ("count", track.count > 1),
        ("keep_latent", track.keep_latent),
        ("latent_only", track.latent_only),
        ("output", track.encoding.is_some()),
        ("options", track.options.is_some()),
    ];
    let problems: Vec<_> = named
        .into_iter()
        .filter(|(_, is_named)| *is_named)
        .map(|(field, _)| RequestError::new(field, "is the session's: leave it out of a segment"))
        .collect();
    all_valid(problems)
}

/// The error of a model that makes no sound.
pub(super) fn no_sound(key: &str) -> Error {
    invalid(
        "model",
        format!("{key} makes no sound: name a model that does; `moored models` lists what each generates"),
    )
}
