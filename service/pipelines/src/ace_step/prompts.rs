//! The input of the text encoder, in the formats of diffusers' `AceStepPipeline._format_prompt`, with which the model was
//! trained.

use model::decimal;

use crate::{Audio, AudioTask};

/// Most tokens of lyrics, as in the reference.
pub(super) const MAX_LYRIC_TOKENS: usize = 2048;
/// Most tokens of a caption within its template, as in the reference.
pub(super) const MAX_TEXT_TOKENS: u32 = 256;

/// Written for a tempo, key or metre that the request does not name.
const UNKNOWN: &str = "N/A";
/// Language of lyrics if the request names none.
const LANGUAGE: &str = "en";

/// The names of tracks that the model was trained on.
pub(super) const TRACKS: [&str; 12] = [
    "woodwinds",
    "brass",
    "fx",
    "synth",
    "strings",
    "percussion",
    "keyboard",
    "guitar",
    "bass",
    "drums",
    "backing_vocals",
    "vocals",
];

/// The instruction of a task.
pub(super) fn instruction(task: &AudioTask) -> String {
    match task {
        AudioTask::TextToMusic => "Fill the audio semantic mask based on the given conditions:".to_owned(),
        AudioTask::Repaint { .. } => "Repaint the mask area based on the given conditions:".to_owned(),
        AudioTask::Cover => "Generate audio semantic tokens based on the given conditions:".to_owned(),
        AudioTask::Extract { track } => {
            format!("Extract the {} track from the audio:", track.to_uppercase())
        }
        AudioTask::Lego { track, .. } => format!(
            "Generate the {} track based on the audio context:",
            track.to_uppercase()
        ),
        AudioTask::Complete { tracks } => {
            let tracks: Vec<String> = tracks.iter().map(|track| track.to_uppercase()).collect();
            format!("Complete the input track with {}:", tracks.join(" | "))
        }
    }
}

/// The text of a caption for a task, and for a track of `seconds` seconds.
pub(super) fn caption(prompt: &str, audio: &Audio, task: &AudioTask, seconds: f64) -> String {
    let given = |text: &str| match text.trim().is_empty() {
        true => UNKNOWN.to_owned(),
        false => text.to_owned(),
    };
    let tempo = audio.beats_per_minute.filter(|tempo| *tempo > 0);
    let tempo = tempo.map_or(UNKNOWN.to_owned(), |tempo| tempo.to_string());
    format!(
        "# Instruction\n{}\n\n# Caption\n{prompt}\n\n# Metas\n- bpm: {tempo}\n- timesignature: {}\n- keyscale: {}\n\
         - duration: {} seconds\n<|endoftext|>\n",
        instruction(task),
        given(&audio.time_signature),
        given(&audio.key),
        seconds as u64,
    )
}

/// The text of lyrics.
pub(super) fn lyrics(audio: &Audio) -> String {
    let language = match audio.language.trim().is_empty() {
        true => LANGUAGE,
        false => &audio.language,
    };
    format!(
        "# Languages\n{language}\n\n# Lyric\n{}<|endoftext|>",
        audio.lyrics
    )
}

/// Seconds of a request, as the decimal number that the client wrote.
pub(super) fn seconds_of(audio: &Audio) -> f64 {
    decimal(audio.seconds)
}
