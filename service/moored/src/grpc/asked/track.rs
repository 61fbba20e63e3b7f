//! The part of a request that is of tracks alone.

use api::v1;
use engine::Error;
use media::tracks::LONGEST_TRACK_SECONDS;
use pipelines::{Audio, AudioTask, Clip, MediaFormat, RequestError, StrengthPoint};

use crate::grpc::status::invalid;

/// Names of tracks in one request: no model knows as many.
const MOST_TRACKS: usize = 32;
/// Longest name of a track, a key, a time signature or a language.
const LONGEST_WORD_CHARACTERS: usize = 64;
/// Points of the strength of one track.
const MOST_STRENGTHS: usize = 4096;
const MOST_BEATS_PER_MINUTE: u32 = 999;
/// How far a window may go over the end of the source: seconds are written rounded.
const WINDOW_SLACK_SECONDS: f32 = 0.01;

const INIT_MEDIA: &str = "init_media_id";
const TASK: &str = "task";
const TRACKS: &str = "tracks";
const WINDOW_START: &str = "window_start_seconds";
const WINDOW_END: &str = "window_end_seconds";

/// What a client asks of a track. Fields that it leaves open are zero, empty or `None`.
#[derive(Debug, Default)]
pub(in crate::grpc) struct AskedTrack {
    pub(super) lyrics: String,
    seconds: f32,
    task: i32,
    tracks: Vec<String>,
    window_start_seconds: Option<f32>,
    window_end_seconds: Option<f32>,
    /// Id of uploaded media.
    pub(in crate::grpc) reference_media: Option<String>,
    beats_per_minute: Option<u32>,
    key: String,
    time_signature: String,
    language: String,
    strengths: Vec<v1::StrengthAt>,
}

impl AskedTrack {
    /// Takes what is of tracks out of a request.
    pub(super) fn take_of(request: &mut v1::GenerateAudioRequest) -> AskedTrack {
        let v1::GenerateAudioRequest {
            lyrics,
            tracks,
            reference_media_id,
            key,
            time_signature,
            language,
            strengths,
            ..
        } = request;
        AskedTrack {
            lyrics: std::mem::take(lyrics),
            seconds: request.seconds,
            task: request.task,
            tracks: std::mem::take(tracks),
            window_start_seconds: request.window_start_seconds,
            window_end_seconds: request.window_end_seconds,
            reference_media: Some(std::mem::take(reference_media_id)).filter(|id| !id.is_empty()),
            beats_per_minute: request.beats_per_minute,
            key: std::mem::take(key),
            time_signature: std::mem::take(time_signature),
            language: std::mem::take(language),
            strengths: std::mem::take(strengths),
        }
    }

    /// Checks what depends neither on the model nor on what is in the source.
    pub(super) fn check(&self, has_source: bool, problems: &mut Vec<RequestError>) {
        let mut problem = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
        let longest = LONGEST_TRACK_SECONDS as f32;
        if !(0.0..=longest).contains(&self.seconds) {
            problem(
                "seconds",
                format!("{} is not from 0 to {LONGEST_TRACK_SECONDS}", self.seconds),
            );
        }
        let task = v1::AudioTask::try_from(self.task);
        match task {
            Err(_) => problem(TASK, format!("{} is none that this version knows", self.task)),
            Ok(v1::AudioTask::Unspecified) => {}
            Ok(task) if !has_source => problem(
                INIT_MEDIA,
                format!("is missing: {} is made of a track", word_of(task)),
            ),
            Ok(_) => {}
        }
        if let Ok(task) = task {
            if let Some(told) = self.wrong_tracks(task) {
                problem(TRACKS, told);
            }
            let has_window = matches!(task, v1::AudioTask::Repaint | v1::AudioTask::Lego);
            for (field, second) in self.window() {
                match second {
                    Some(_) if !has_window => {
                        problem(field, "is of the tasks repaint and lego alone".to_owned());
                    }
                    Some(second) if !(0.0..=longest).contains(&second) => {
                        problem(
                            field,
                            format!("{second} is not from 0 to {LONGEST_TRACK_SECONDS}"),
                        );
                    }
                    Some(_) | None => {}
                }
            }
        }
        if let (Some(start), Some(end)) = (self.window_start_seconds, self.window_end_seconds)
            && end <= start
        {
            problem(WINDOW_END, format!("{end} is not behind the start, {start}"));
        }
        if let Some(beats) = self.beats_per_minute
            && !(1..=MOST_BEATS_PER_MINUTE).contains(&beats)
        {
            problem(
                "beats_per_minute",
                format!("{beats} is not from 1 to {MOST_BEATS_PER_MINUTE}"),
            );
        }
        if self.strengths.len() > MOST_STRENGTHS {
            let count = self.strengths.len();
            problem("strengths", format!("are {count}; {MOST_STRENGTHS} are the most"));
        }
        let words = [
            ("key", &self.key),
            ("time_signature", &self.time_signature),
            ("language", &self.language),
        ];
        for (field, word) in words {
            if let Some(told) = wrong_word(word) {
                problem(field, told);
            }
        }
    }

    fn window(&self) -> [(&'static str, Option<f32>); 2] {
        [
            (WINDOW_START, self.window_start_seconds),
            (WINDOW_END, self.window_end_seconds),
        ]
    }

    /// What is wrong with the names of tracks for a task.
    fn wrong_tracks(&self, task: v1::AudioTask) -> Option<String> {
        let count = self.tracks.len();
        if let Some(told) = self.tracks.iter().find_map(|track| wrong_word(track)) {
            return Some(told);
        }
        if self.tracks.iter().any(String::is_empty) {
            return Some("has an empty name".to_owned());
        }
        match task {
            v1::AudioTask::Extract | v1::AudioTask::Lego if count != 1 => {
                Some(format!("has {count} names: {} needs one", word_of(task)))
            }
            v1::AudioTask::Complete if !(1..=MOST_TRACKS).contains(&count) => Some(format!(
                "has {count} names: complete needs one, and takes {MOST_TRACKS} at most"
            )),
            v1::AudioTask::Unspecified | v1::AudioTask::Repaint | v1::AudioTask::Cover if count > 0 => {
                Some("is of the tasks extract, lego and complete alone".to_owned())
            }
            _ => None,
        }
    }

    /// Writes what is asked for over the defaults.
    ///
    /// # Errors
    /// When the source is no track, or the window is not in it.
    pub(super) fn fill(&self, audio: &mut Audio, source: Option<Clip>) -> Result<(), Error> {
        if source
            .as_ref()
            .is_some_and(|clip| !matches!(clip.format, MediaFormat::Audio { .. }))
        {
            return Err(invalid(
                INIT_MEDIA,
                "is not a track, from which alone music can start",
            ));
        }
        audio.task = self.task(source.as_ref())?;
        audio.init_audio = source;
        if self.seconds > 0.0 {
            audio.seconds = self.seconds;
        }
        audio.lyrics.clone_from(&self.lyrics);
        audio.beats_per_minute = self.beats_per_minute;
        audio.key.clone_from(&self.key);
        audio.time_signature.clone_from(&self.time_signature);
        audio.language.clone_from(&self.language);
        let points = self.strengths.iter().map(|point| StrengthPoint {
            seconds: point.seconds,
            strength: point.strength,
        });
        audio.strengths = points.collect();
        Ok(())
    }

    fn task(&self, source: Option<&Clip>) -> Result<AudioTask, Error> {
        let track = || self.tracks.first().cloned().unwrap_or_default();
        let task =
            v1::AudioTask::try_from(self.task).map_err(|unknown| invalid(TASK, unknown.to_string()))?;
        Ok(match task {
            v1::AudioTask::Unspecified => AudioTask::TextToMusic,
            v1::AudioTask::Repaint => {
                let (start_seconds, end_seconds) = self.window_in(source)?;
                AudioTask::Repaint {
                    start_seconds,
                    end_seconds,
                }
            }
            v1::AudioTask::Cover => AudioTask::Cover,
            v1::AudioTask::Extract => AudioTask::Extract { track: track() },
            v1::AudioTask::Lego => {
                let (start_seconds, end_seconds) = self.window_in(source)?;
                AudioTask::Lego {
                    track: track(),
                    start_seconds,
                    end_seconds,
                }
            }
            v1::AudioTask::Complete => AudioTask::Complete {
                tracks: self.tracks.clone(),
            },
        })
    }

    /// The window, in a source: what is left open goes to its start and its end. An open end is infinite, since a model may
    /// make a little more than the source has: a number would leave its last frame as it was.
    fn window_in(&self, source: Option<&Clip>) -> Result<(f32, f32), Error> {
        let seconds = source.map_or(0.0, |source| seconds_of(&source.format));
        let start = self.window_start_seconds.unwrap_or(0.0);
        for (field, second) in self.window() {
            if let Some(second) = second.filter(|second| *second > seconds + WINDOW_SLACK_SECONDS) {
                let problem = format!("{second} is behind the end of the source, which lasts {seconds} s");
                return Err(invalid(field, problem));
            }
        }
        let end = self.window_end_seconds.map(|end| end.min(seconds));
        match start < end.unwrap_or(seconds) {
            true => Ok((start, end.unwrap_or(f32::INFINITY))),
            false => Err(invalid(
                WINDOW_START,
                format!("{start} leaves nothing of the source, which lasts {seconds} s"),
            )),
        }
    }
}

/// Seconds of a track; 0 for another medium.
pub(super) fn seconds_of(format: &MediaFormat) -> f32 {
    match *format {
        MediaFormat::Audio {
            samples_per_second,
            samples,
            ..
        } => (samples as f64 / f64::from(samples_per_second.max(1))) as f32,
        MediaFormat::Image { .. } | MediaFormat::Video { .. } => 0.0,
    }
}

/// The name of a task, as clients write it.
fn word_of(task: v1::AudioTask) -> String {
    task.as_str_name().to_lowercase()
}

/// What is wrong with a word that is put into a model's prompt. A line of its own would be read as another setting.
fn wrong_word(word: &str) -> Option<String> {
    let characters = word.chars().count();
    if characters > LONGEST_WORD_CHARACTERS {
        return Some(format!(
            "has {characters} characters; {LONGEST_WORD_CHARACTERS} are the most"
        ));
    }
    word.chars()
        .any(char::is_control)
        .then(|| "has control characters, such as a line break".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(samples: u64) -> Clip {
        let format = MediaFormat::Audio {
            samples_per_second: 8000,
            channels: 1,
            samples,
        };
        Clip {
            format,
            data: bytes::Bytes::new(),
        }
    }

    fn asked(mut request: v1::GenerateAudioRequest) -> AskedTrack {
        AskedTrack::take_of(&mut request)
    }

    fn fields(request: v1::GenerateAudioRequest, has_source: bool) -> Vec<String> {
        let mut problems = Vec::new();
        asked(request).check(has_source, &mut problems);
        problems.into_iter().map(|problem| problem.field).collect()
    }

    #[test]
    fn missing_and_excluded_fields_of_a_task_are_named() {
        let of = |task: v1::AudioTask| v1::GenerateAudioRequest {
            task: task.into(),
            ..Default::default()
        };
        let with = |task, tracks: &[&str]| v1::GenerateAudioRequest {
            tracks: tracks.iter().map(|track| (*track).to_owned()).collect(),
            ..of(task)
        };
        use v1::AudioTask::{Complete, Cover, Extract, Lego, Repaint, Unspecified};
        for (request, has_source, wrong) in [
            (of(Unspecified), false, vec![]),
            (of(Unspecified), true, vec![]),
            (of(Repaint), true, vec![]),
            (of(Repaint), false, vec!["init_media_id"]),
            (with(Cover, &["drums"]), true, vec!["tracks"]),
            (of(Extract), true, vec!["tracks"]),
            (with(Extract, &["drums"]), true, vec![]),
            (with(Lego, &["drums", "bass"]), true, vec!["tracks"]),
            (of(Complete), true, vec!["tracks"]),
            (with(Complete, &["drums", "bass"]), true, vec![]),
            (with(Complete, &["a"; 33]), true, vec!["tracks"]),
            (with(Complete, &["drums\n- bpm: 9"]), true, vec!["tracks"]),
            (with(Complete, &[""]), true, vec!["tracks"]),
        ] {
            let told = format!("{request:?}");
            assert_eq!(fields(request, has_source), wrong, "{told}");
        }
        let unknown = v1::GenerateAudioRequest {
            task: 99,
            ..Default::default()
        };
        assert_eq!(fields(unknown, true), ["task"]);
    }

    #[test]
    fn track_fields_out_of_range_are_refused() {
        let request = v1::GenerateAudioRequest {
            seconds: f32::NAN,
            window_start_seconds: Some(f32::INFINITY),
            window_end_seconds: Some(-1.0),
            beats_per_minute: Some(0),
            key: "x".repeat(65),
            time_signature: "4\n".to_owned(),
            task: v1::AudioTask::Repaint.into(),
            ..Default::default()
        };
        let expected = [
            "seconds",
            "window_start_seconds",
            "window_end_seconds",
            "window_end_seconds",
            "beats_per_minute",
            "key",
            "time_signature",
        ];
        assert_eq!(fields(request, true), expected);
        let window = v1::GenerateAudioRequest {
            window_start_seconds: Some(1.0),
            window_end_seconds: Some(2.0),
            ..Default::default()
        };
        assert_eq!(
            fields(window, false),
            ["window_start_seconds", "window_end_seconds"]
        );
    }

    #[test]
    fn a_window_that_is_left_open_is_that_of_the_source() {
        let task = |start, end| {
            let request = v1::GenerateAudioRequest {
                task: v1::AudioTask::Repaint.into(),
                window_start_seconds: start,
                window_end_seconds: end,
                ..Default::default()
            };
            let mut audio = Audio::default();
            asked(request)
                .fill(&mut audio, Some(source(16_000)))
                .map(|()| audio.task)
        };
        let repaint = |start_seconds, end_seconds| AudioTask::Repaint {
            start_seconds,
            end_seconds,
        };
        assert_eq!(task(None, None).unwrap(), repaint(0.0, f32::INFINITY));
        assert_eq!(task(Some(0.5), None).unwrap(), repaint(0.5, f32::INFINITY));
        assert_eq!(task(None, Some(2.005)).unwrap(), repaint(0.0, 2.0));
        for (start, end, field) in [
            (None, Some(2.5), "window_end_seconds"),
            (Some(3.0), None, "window_start_seconds"),
            (Some(2.0), None, "window_start_seconds"),
        ] {
            let refused = task(start, end).unwrap_err().to_string();
            assert!(refused.contains(field), "{refused}");
        }
    }
}
