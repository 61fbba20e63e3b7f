//! The fields of a request that only tracks have.

use engine::Error;
use media::tracks::LONGEST_TRACK_SECONDS;
use model::{Audio, AudioTask, Clip, MediaFormat, RequestError, StrengthPoint};

use crate::errors::{invalid, outside, too_many};

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
const TRACKS: &str = "tracks";
const WINDOW_START: &str = "window_start_seconds";
const WINDOW_END: &str = "window_end_seconds";

/// A client's settings of a track. Fields that the client does not set are zero, empty or `None`.
#[derive(Clone, Debug, Default)]
pub struct AskedTrack {
    pub lyrics: String,
    pub seconds: f32,
    pub task: AskedTask,
    pub tracks: Vec<String>,
    pub window_start_seconds: Option<f32>,
    pub window_end_seconds: Option<f32>,
    /// Id of uploaded media.
    pub reference_media: Option<String>,
    pub beats_per_minute: Option<u32>,
    pub key: String,
    pub time_signature: String,
    pub language: String,
    pub strengths: Vec<StrengthPoint>,
}

/// The task: what to do with the source track.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AskedTask {
    /// Music from text, without a source.
    #[default]
    TextToMusic,
    Repaint,
    Cover,
    Extract,
    Lego,
    Complete,
}

impl AskedTask {
    /// Its name, as clients write it.
    fn word(self) -> &'static str {
        match self {
            AskedTask::TextToMusic => "text to music",
            AskedTask::Repaint => "repaint",
            AskedTask::Cover => "cover",
            AskedTask::Extract => "extract",
            AskedTask::Lego => "lego",
            AskedTask::Complete => "complete",
        }
    }
}

impl AskedTrack {
    /// Checks all that depends neither on the model nor on the contents of the source.
    pub(crate) fn check(&self, has_source: bool, problems: &mut Vec<RequestError>) {
        let mut problem = |field: &str, problem: String| problems.push(RequestError::new(field, problem));
        let longest = LONGEST_TRACK_SECONDS as f32;
        if !(0.0..=longest).contains(&self.seconds) {
            problem("seconds", outside(self.seconds, 0, LONGEST_TRACK_SECONDS));
        }
        let task = self.task;
        match task {
            AskedTask::TextToMusic => {}
            task if !has_source => problem(
                INIT_MEDIA,
                format!(
                    "is missing: {} is made of a track, so upload one and name its id",
                    task.word()
                ),
            ),
            _ => {}
        }
        if let Some(wrong) = self.wrong_tracks(task) {
            problem(TRACKS, wrong);
        }
        let has_window = matches!(task, AskedTask::Repaint | AskedTask::Lego);
        for (field, second) in self.window() {
            match second {
                Some(_) if !has_window => {
                    problem(
                        field,
                        "is read by the tasks repaint and lego alone: leave it out".to_owned(),
                    );
                }
                Some(second) if !(0.0..=longest).contains(&second) => {
                    problem(field, outside(second, 0, LONGEST_TRACK_SECONDS));
                }
                Some(_) | None => {}
            }
        }
        if let (Some(start), Some(end)) = (self.window_start_seconds, self.window_end_seconds)
            && end <= start
        {
            problem(
                WINDOW_END,
                format!("{end} is not after the start, {start}: set a later end"),
            );
        }
        if let Some(beats) = self.beats_per_minute
            && !(1..=MOST_BEATS_PER_MINUTE).contains(&beats)
        {
            problem("beats_per_minute", outside(beats, 1, MOST_BEATS_PER_MINUTE));
        }
        if self.strengths.len() > MOST_STRENGTHS {
            problem(
                "strengths",
                too_many(self.strengths.len(), "points", MOST_STRENGTHS),
            );
        }
        let words = [
            ("key", &self.key),
            ("time_signature", &self.time_signature),
            ("language", &self.language),
        ];
        for (field, word) in words {
            if let Some(wrong) = wrong_word(word) {
                problem(field, wrong);
            }
        }
    }

    fn window(&self) -> [(&'static str, Option<f32>); 2] {
        [
            (WINDOW_START, self.window_start_seconds),
            (WINDOW_END, self.window_end_seconds),
        ]
    }

    /// The problem of the names of tracks for a task, if there is one.
    fn wrong_tracks(&self, task: AskedTask) -> Option<String> {
        let count = self.tracks.len();
        if let Some(wrong) = self.tracks.iter().find_map(|track| wrong_word(track)) {
            return Some(wrong);
        }
        if self.tracks.iter().any(String::is_empty) {
            return Some("has an empty name: leave it out, or write the name of a track".to_owned());
        }
        match task {
            AskedTask::Extract | AskedTask::Lego if count != 1 => {
                Some(format!("has {count} names: {} needs one", task.word()))
            }
            AskedTask::Complete if !(1..=MOST_TRACKS).contains(&count) => Some(format!(
                "has {count} names: complete needs one, and takes {MOST_TRACKS} at most"
            )),
            AskedTask::TextToMusic | AskedTask::Repaint | AskedTask::Cover if count > 0 => {
                Some("is read by the tasks extract, lego and complete alone: leave it out".to_owned())
            }
            _ => None,
        }
    }

    /// Overwrites the defaults with the fields that the client sets.
    ///
    /// # Errors
    /// When the window is not in the source.
    pub(crate) fn fill(&self, audio: &mut Audio, source: Option<Clip>) -> Result<(), Error> {
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
        audio.strengths.clone_from(&self.strengths);
        Ok(())
    }

    fn task(&self, source: Option<&Clip>) -> Result<AudioTask, Error> {
        let track = || self.tracks.first().cloned().unwrap_or_default();
        Ok(match self.task {
            AskedTask::TextToMusic => AudioTask::TextToMusic,
            AskedTask::Repaint => {
                let (start_seconds, end_seconds) = self.window_in(source)?;
                AudioTask::Repaint {
                    start_seconds,
                    end_seconds,
                }
            }
            AskedTask::Cover => AudioTask::Cover,
            AskedTask::Extract => AudioTask::Extract { track: track() },
            AskedTask::Lego => {
                let (start_seconds, end_seconds) = self.window_in(source)?;
                AudioTask::Lego {
                    track: track(),
                    start_seconds,
                    end_seconds,
                }
            }
            AskedTask::Complete => AudioTask::Complete {
                tracks: self.tracks.clone(),
            },
        })
    }

    /// The window in a source, in seconds. A bound that is not set is the start or the end of the source. The end is infinite then,
    /// since a model may make a little more than the source has: with a number, the last frame would not be made anew.
    fn window_in(&self, source: Option<&Clip>) -> Result<(f32, f32), Error> {
        let seconds = source.map_or(0.0, |source| seconds_of(&source.format));
        let start = self.window_start_seconds.unwrap_or(0.0);
        for (field, second) in self.window() {
            if let Some(second) = second.filter(|second| *second > seconds + WINDOW_SLACK_SECONDS) {
                let problem = format!("{second} is after the end of the source, which lasts {seconds} s");
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
pub(crate) fn seconds_of(format: &MediaFormat) -> f32 {
    match *format {
        MediaFormat::Audio {
            samples_per_second,
            samples,
            ..
        } => (samples as f64 / f64::from(samples_per_second.max(1))) as f32,
        MediaFormat::Image { .. } | MediaFormat::Video { .. } => 0.0,
    }
}

/// The problem of a word that is put into a model's prompt, if there is one. A line break in it would begin another setting.
fn wrong_word(word: &str) -> Option<String> {
    let characters = word.chars().count();
    if characters > LONGEST_WORD_CHARACTERS {
        return Some(too_many(characters, "characters", LONGEST_WORD_CHARACTERS));
    }
    word.chars()
        .any(char::is_control)
        .then(|| "has control characters, such as a line break: leave them out".to_owned())
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

    fn fields(request: AskedTrack, has_source: bool) -> Vec<String> {
        let mut problems = Vec::new();
        request.check(has_source, &mut problems);
        problems.into_iter().map(|problem| problem.field).collect()
    }

    #[test]
    fn missing_and_excluded_fields_of_a_task_are_named() {
        let of = |task: AskedTask| AskedTrack {
            task,
            ..Default::default()
        };
        let with = |task, tracks: &[&str]| AskedTrack {
            tracks: tracks.iter().map(|track| (*track).to_owned()).collect(),
            ..of(task)
        };
        use AskedTask::{Complete, Cover, Extract, Lego, Repaint, TextToMusic};
        for (request, has_source, wrong) in [
            (of(TextToMusic), false, vec![]),
            (of(TextToMusic), true, vec![]),
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
            let shown = format!("{request:?}");
            assert_eq!(fields(request, has_source), wrong, "{shown}");
        }
    }

    #[test]
    fn track_fields_out_of_range_are_refused() {
        let request = AskedTrack {
            seconds: f32::NAN,
            window_start_seconds: Some(f32::INFINITY),
            window_end_seconds: Some(-1.0),
            beats_per_minute: Some(0),
            key: "x".repeat(65),
            time_signature: "4\n".to_owned(),
            task: AskedTask::Repaint,
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
        let window = AskedTrack {
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
            let request = AskedTrack {
                task: AskedTask::Repaint,
                window_start_seconds: start,
                window_end_seconds: end,
                ..Default::default()
            };
            let mut audio = Audio::default();
            request
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
