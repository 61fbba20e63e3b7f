//! The task of a request, with its checks: the source, and the frames that change.

use model::bounds::{common_problems, decode_from_problem};
use model::{Field, Reads, decimal, first_step};

use crate::{Audio, AudioTask, Medium, Request, RequestError};

use super::prompts::TRACKS;
use super::sound;

/// Fields of a request: the track that a task changes or at which sampling starts, and the track whose timbre is taken.
const SOURCE: &str = "init_media_id";
const REFERENCE: &str = "reference_media_id";
/// Seconds of a track.
const MIN_SECONDS: f32 = 0.1;
pub(super) const MAX_SECONDS: f32 = 600.0;
/// Most points of the strengths of frames.
const MAX_POINTS: usize = 4096;
/// Most bytes of lyrics, far more than their tokens can hold.
const MAX_LYRIC_BYTES: usize = 40_000;
/// Most bytes of a key, a metre, or a language.
const MAX_WORD_BYTES: usize = 64;
/// Fastest tempo.
const MAX_TEMPO: u32 = 1000;
/// Seconds that a window may reach beyond the end of a source, since clients round times.
const ROUNDING: f64 = 0.05;

/// The optional fields of a request that the model reads.
pub(super) const READS: Reads = Reads::of(&[
    Field::InitMedia,
    Field::InitLatent,
    Field::ReferenceMedia,
    Field::Task,
    Field::Lyrics,
    Field::BeatsPerMinute,
    Field::Key,
    Field::TimeSignature,
    Field::Language,
    Field::Strengths,
    Field::DecodeFrom,
    Field::Adapters,
]);

/// The tasks and inputs that a model supports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Abilities {
    pub(super) is_turbo: bool,
    /// Whether it has the tokenizer of latents.
    pub(super) has_tokens: bool,
    /// Samples per second of the model.
    pub(super) rate: u32,
}

/// Whether a request mixes a source with its noise at the start.
pub(super) fn starts_from_source(request: &Request, audio: &Audio) -> bool {
    audio.task == AudioTask::TextToMusic && (audio.init_audio.is_some() || request.from_values)
}

/// Whether steps after the first need the source: for their context, or for frames that begin later.
pub(super) fn keeps_source(audio: &Audio) -> bool {
    let needs_in_context = matches!(
        audio.task,
        AudioTask::Repaint { .. }
            | AudioTask::Extract { .. }
            | AudioTask::Lego { .. }
            | AudioTask::Complete { .. }
    );
    needs_in_context || !audio.strengths.is_empty()
}

/// The largest strength of any frame.
fn largest_strength(request: &Request, audio: &Audio) -> f32 {
    let of_points = audio.strengths.iter().map(|point| point.strength);
    of_points.reduce(f32::max).unwrap_or(request.strength)
}

/// First step that is run, from 0.
pub(super) fn first_step_of(request: &Request, audio: &Audio) -> u32 {
    match starts_from_source(request, audio) {
        true => first_step(request.steps, largest_strength(request, audio)),
        false => 0,
    }
}

/// The window of a task, in seconds from its start to its end; `None` for the whole track.
pub(super) fn window_of(task: &AudioTask) -> Option<(f32, f32)> {
    match *task {
        AudioTask::Repaint {
            start_seconds,
            end_seconds,
        }
        | AudioTask::Lego {
            start_seconds,
            end_seconds,
            ..
        } => Some((start_seconds, end_seconds)),
        AudioTask::TextToMusic
        | AudioTask::Cover
        | AudioTask::Extract { .. }
        | AudioTask::Complete { .. } => None,
    }
}

/// The frames of a window of a track of `frames` frames, `per_second` of them a second (`_build_chunk_mask`). An end that is 0
/// or infinite is that of the track.
pub(super) fn frames_of_window((start, end): (f32, f32), frames: usize, per_second: f64) -> (usize, usize) {
    let frame = |seconds: f32| (decimal(seconds) * per_second) as usize;
    let end = match end > 0.0 && end.is_finite() {
        true => frame(end),
        false => frames,
    };
    let start = frame(start).min(frames.saturating_sub(1));
    (start, end.min(frames).max(start + 1))
}

/// All fields of a request that are out of bounds.
pub(super) fn problems(request: &Request, able: Abilities) -> Vec<RequestError> {
    let Medium::Audio(audio) = &request.medium else {
        return vec![RequestError::other_medium(&request.medium, "audio")];
    };
    let mut problems = common_problems(request);
    problems.extend(clip_problems(audio));
    problems.extend(decode_from_problem(audio));
    problems.extend(strengths_problem(request, audio));
    let mut refuse = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
    if !(MIN_SECONDS..=MAX_SECONDS).contains(&audio.seconds) {
        let found = audio.seconds;
        refuse(
            "seconds",
            format!("is {found}; {MIN_SECONDS} to {MAX_SECONDS} is expected"),
        );
    }
    if able.is_turbo && request.guidance > 1.0 {
        let problem = format!(
            "is {}; a turbo model is distilled, without guidance: set it to 0",
            request.guidance
        );
        refuse("guidance", problem);
    }
    if audio.lyrics.len() > MAX_LYRIC_BYTES {
        let found = audio.lyrics.len();
        refuse(
            "lyrics",
            format!("have {found} bytes; at most {MAX_LYRIC_BYTES} are expected"),
        );
    }
    for (field, word) in [
        ("key", &audio.key),
        ("time_signature", &audio.time_signature),
        ("language", &audio.language),
    ] {
        if word.len() > MAX_WORD_BYTES || word.contains(['\n', '\r']) {
            refuse(
                field,
                format!("is no word of at most {MAX_WORD_BYTES} bytes in one line"),
            );
        }
    }
    if let Some(tempo) = audio.beats_per_minute
        && !(1..=MAX_TEMPO).contains(&tempo)
    {
        refuse(
            "beats_per_minute",
            format!("is {tempo}; 1 to {MAX_TEMPO} is expected"),
        );
    }
    problems.extend(task_problems(request, audio, able));
    problems
}

fn clip_problems(audio: &Audio) -> impl Iterator<Item = RequestError> {
    let source = audio.init_audio.as_ref();
    let source = source.and_then(|clip| sound::problem(SOURCE, clip));
    let reference = audio.reference.as_ref();
    source
        .into_iter()
        .chain(reference.and_then(|clip| sound::problem(REFERENCE, clip)))
}

/// The refusal of strengths of frames.
fn strengths_problem(request: &Request, audio: &Audio) -> Option<RequestError> {
    let points = &audio.strengths;
    let problem = if points.is_empty() {
        return None;
    } else if audio.task != AudioTask::TextToMusic {
        let name = audio.task.name();
        format!("are given with {name}; a new track that begins at a source (text2music) takes them")
    } else if !starts_from_source(request, audio) {
        format!("are given without a source ({SOURCE}) to begin at")
    } else if points.len() > MAX_POINTS {
        format!("have {} points; {MAX_POINTS} are the most", points.len())
    } else if let Some(point) = points.iter().find(|point| !(0.0..=1.0).contains(&point.strength)) {
        format!("have {}; 0 to 1 is expected", point.strength)
    } else if let Some(point) = points.iter().find(|point| !point.seconds.is_finite()) {
        format!("have a point at {} s", point.seconds)
    } else if let Some((before, after)) = points
        .iter()
        .zip(points.iter().skip(1))
        .find(|(before, after)| after.seconds < before.seconds)
    {
        format!(
            "have a point at {} s after one at {} s; order them by time",
            after.seconds, before.seconds
        )
    } else if points.iter().all(|point| point.strength == 0.0) {
        "are 0 everywhere, which leaves the source as it is".to_owned()
    } else {
        return None;
    };
    Some(RequestError::new("strengths", problem))
}

fn task_problems(request: &Request, audio: &Audio, able: Abilities) -> Vec<RequestError> {
    let mut problems = Vec::new();
    let mut refuse = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
    let name = audio.task.name();
    let is_of_tracks = matches!(
        audio.task,
        AudioTask::Extract { .. } | AudioTask::Lego { .. } | AudioTask::Complete { .. }
    );
    if is_of_tracks && able.is_turbo {
        refuse(
            "task",
            format!("is {name}, which a turbo model does not know: take a base model"),
        );
    }
    let has_source = audio.init_audio.is_some() || request.from_values;
    if audio.task != AudioTask::TextToMusic && !has_source {
        refuse(SOURCE, format!("is missing, and {name} changes a track"));
    }
    if audio.task == AudioTask::Cover && !able.has_tokens {
        let problem = "is cover, and the checkpoint has no audio_tokenizer and audio_token_detokenizer";
        refuse("task", problem.to_owned());
    }
    if audio.task == AudioTask::Cover && request.from_values {
        refuse("task", "is cover, which takes a track, not a latent".to_owned());
    }
    let named: &[String] = match &audio.task {
        AudioTask::Extract { track } | AudioTask::Lego { track, .. } => std::slice::from_ref(track),
        AudioTask::Complete { tracks } => tracks,
        AudioTask::TextToMusic | AudioTask::Repaint { .. } | AudioTask::Cover => &[],
    };
    if is_of_tracks && named.is_empty() || named.len() > TRACKS.len() {
        let most = TRACKS.len();
        refuse("tracks", format!("are {}; 1 to {most} are expected", named.len()));
    }
    for track in named {
        if !TRACKS.contains(&track.to_lowercase().as_str()) {
            refuse(
                "tracks",
                format!("has {track:?}; {} are known", TRACKS.join(", ")),
            );
        }
    }
    if let Some((start, end)) = window_of(&audio.task) {
        let seconds = match &audio.init_audio {
            Some(clip) => sound::samples_at(clip, able.rate) as f64 / f64::from(able.rate.max(1)),
            None => f64::from(audio.seconds),
        };
        if !(start >= 0.0 && f64::from(start) < seconds) {
            let problem = format!("is {start}; 0 to less than {seconds:.2}, the track's length, is expected");
            refuse("window_start_seconds", problem);
        }
        let is_open = end == 0.0 || end == f32::INFINITY;
        let is_within = end > start && f64::from(end) <= seconds + ROUNDING;
        if !is_open && !is_within {
            let problem = format!("is {end}; more than {start} and up to {seconds:.2} is expected");
            refuse("window_end_seconds", problem);
        }
    }
    let takes_strength = audio.task == AudioTask::Cover || starts_from_source(request, audio);
    if takes_strength && !(request.strength > 0.0 && request.strength <= 1.0) {
        refuse(
            "strength",
            format!("is {}; over 0 and up to 1 is expected", request.strength),
        );
    } else if starts_from_source(request, audio)
        && request.steps > 0
        && first_step_of(request, audio) >= request.steps
    {
        let (field, verb) = match audio.strengths.is_empty() {
            true => ("strength", "is"),
            false => ("strengths", "are at most"),
        };
        let (largest, steps) = (largest_strength(request, audio), request.steps);
        refuse(
            field,
            format!("{verb} {largest}; of {steps} steps that leaves none"),
        );
    } else if !takes_strength && has_source && request.strength != 1.0 {
        let problem = format!(
            "is {}; {name} takes 1: covers and new tracks take less",
            request.strength
        );
        refuse("strength", problem);
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_in_whole_frames_within_the_track() {
        for (window, frames, expected) in [
            ((0.52, 1.3), 50, (13, 32)),
            ((0.0, 0.0), 50, (0, 50)),
            ((1.0, f32::INFINITY), 50, (25, 50)),
            ((1.99, 2.0), 50, (49, 50)),
            ((0.5, 0.5), 50, (12, 13)),
            ((9.0, 10.0), 50, (49, 50)),
        ] {
            assert_eq!(frames_of_window(window, frames, 25.0), expected, "{window:?}");
        }
    }
}
