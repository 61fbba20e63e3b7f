//! Results of a decode, in pieces: a picture, frames of a video, samples of a track.

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Name of the track ([`Piece::track`]) that has the sound of a film.
pub const SOUND_OF_FILM: &str = "sound";

/// Format of a whole result, known before it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum MediaFormat {
    /// One picture: RGB, 8 bits each, row-major.
    Image { width: u32, height: u32 },
    /// Frames of one video, each in the format of a picture.
    Video {
        width: u32,
        height: u32,
        frames: u32,
        frames_per_second: f32,
        /// The sound that is delivered with the frames, as pieces of the track [`SOUND_OF_FILM`]; `None`: the film is silent.
        sound: Option<Sound>,
    },
    /// Samples of one track: 16-bit little-endian integers, channels interleaved.
    Audio {
        /// Sample rate per channel.
        samples_per_second: u32,
        channels: u32,
        /// Total samples per channel.
        samples: u64,
    },
}

impl MediaFormat {
    /// Number of units of a whole result: 1 picture, frames, or samples per channel.
    pub fn units(&self) -> u64 {
        match *self {
            MediaFormat::Image { .. } => 1,
            MediaFormat::Video { frames, .. } => u64::from(frames),
            MediaFormat::Audio { samples, .. } => samples,
        }
    }

    /// Bytes of one unit.
    pub fn unit_bytes(&self) -> u64 {
        match *self {
            MediaFormat::Image { width, height } | MediaFormat::Video { width, height, .. } => {
                3 * u64::from(width) * u64::from(height)
            }
            MediaFormat::Audio { channels, .. } => 2 * u64::from(channels),
        }
    }

    /// Bytes of a whole result, of a film those of its frames; `None` on overflow.
    pub fn bytes(&self) -> Option<u64> {
        self.units().checked_mul(self.unit_bytes())
    }

    /// The sound of a film, where it has any.
    pub fn sound(&self) -> Option<Sound> {
        match *self {
            MediaFormat::Video { sound, .. } => sound,
            MediaFormat::Image { .. } | MediaFormat::Audio { .. } => None,
        }
    }
}

/// The sound of a film, at least one sample: it begins with the first frame, and has its own length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sound {
    /// Sample rate per channel.
    pub samples_per_second: u32,
    pub channels: u32,
    /// Total samples per channel.
    pub samples: u64,
}

impl Sound {
    /// The format of the track that has this sound.
    pub fn track(self) -> MediaFormat {
        let Sound {
            samples_per_second,
            channels,
            samples,
        } = self;
        MediaFormat::Audio {
            samples_per_second,
            channels,
            samples,
        }
    }
}

/// How a model's tracks are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleFormat {
    /// Sample rate per channel.
    pub samples_per_second: u32,
    pub channels: u32,
}

/// Consecutive units of a result. The pieces of a track cover it once. They are delivered in order. A result that is made
/// section by section is delivered in the order in which its sections are made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Name of the track, if a request has several (a stem of a song, [`SOUND_OF_FILM`]); empty for a single one, and for frames.
    pub track: String,
    /// Format of the whole result.
    pub format: MediaFormat,
    /// Index of the first unit of the piece.
    pub first: u64,
    /// Whole units, in the format of [`MediaFormat`].
    pub data: Bytes,
}

impl Piece {
    /// A whole picture as the only track.
    pub fn image(width: u32, height: u32, rgb: impl Into<Bytes>) -> Piece {
        Piece {
            track: String::new(),
            format: MediaFormat::Image { width, height },
            first: 0,
            data: rgb.into(),
        }
    }

    /// Number of units; `None` if the bytes are not whole units within the format.
    pub fn units(&self) -> Option<u64> {
        let (unit, bytes) = (self.format.unit_bytes(), self.data.len() as u64);
        let units = bytes.checked_div(unit).filter(|units| units * unit == bytes)?;
        (self.first.checked_add(units)? <= self.format.units()).then_some(units)
    }

    /// The units `units` of the piece, in shared memory; `None` if the piece lacks some of them, or the range is empty.
    pub fn of_units(&self, units: Range<u64>) -> Option<Piece> {
        let end = self.first.checked_add(self.units()?)?;
        if units.is_empty() || units.start < self.first || units.end > end {
            return None;
        }
        let byte = |unit: u64| usize::try_from((unit - self.first) * self.format.unit_bytes()).ok();
        Some(Piece {
            track: self.track.clone(),
            format: self.format,
            first: units.start,
            data: self.data.slice(byte(units.start)?..byte(units.end)?),
        })
    }

    /// Splits it into pieces of at most `most_bytes` bytes, and of at least one unit each.
    pub fn cut(self, most_bytes: usize) -> impl Iterator<Item = Piece> {
        let unit = usize::try_from(self.format.unit_bytes())
            .unwrap_or(usize::MAX)
            .max(1);
        let at_once = (most_bytes / unit).max(1);
        let bytes = at_once.saturating_mul(unit);
        (0..self.data.len())
            .step_by(bytes)
            .zip(0_u64..)
            .map(move |(start, number)| Piece {
                track: self.track.clone(),
                format: self.format,
                first: self.first + number * at_once as u64,
                data: self
                    .data
                    .slice(start..start.saturating_add(bytes).min(self.data.len())),
            })
    }

    /// Whether it is the last piece of its track.
    pub fn is_last(&self) -> bool {
        self.units()
            .is_some_and(|units| self.first + units == self.format.units())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Audio, Medium, Video};

    fn frames(first: u64, count: usize) -> Piece {
        let format = MediaFormat::Video {
            width: 2,
            height: 1,
            frames: 5,
            frames_per_second: 24.0,
            sound: None,
        };
        let data: Vec<u8> = (0..count * 6).map(|byte| byte as u8).collect();
        Piece {
            track: String::new(),
            format,
            first,
            data: data.into(),
        }
    }

    #[test]
    fn a_piece_has_whole_units_within_its_format() {
        assert_eq!(frames(0, 5).units(), Some(5));
        assert!(frames(3, 2).is_last() && !frames(3, 1).is_last());
        assert_eq!(frames(4, 2).units(), None, "beyond the end");
        let mut cut = frames(0, 2);
        cut.data = cut.data.slice(1..);
        assert_eq!(cut.units(), None, "half a frame");
        assert_eq!(Piece::image(0, 0, Vec::new()).units(), None, "no pixels");
    }

    #[test]
    fn a_large_piece_is_split_into_consecutive_whole_units() {
        let cut: Vec<Piece> = frames(0, 5).cut(15).collect();
        let seen: Vec<_> = cut.iter().map(|piece| (piece.first, piece.units())).collect();
        assert_eq!(seen, [(0, Some(2)), (2, Some(2)), (4, Some(1))]);
        assert!(cut[2].is_last() && !cut[1].is_last());
        let joined: Vec<u8> = cut.iter().flat_map(|piece| piece.data.to_vec()).collect();
        assert_eq!(joined, frames(0, 5).data);
        assert_eq!(frames(1, 2).cut(1).count(), 2, "a unit is never cut");
    }

    #[test]
    fn a_film_is_made_with_the_sound_that_it_says_it_has() {
        let asked = Medium::Video(Video {
            width: 2,
            height: 1,
            frames: 5,
            frames_per_second: 24.0,
            ..Video::default()
        });
        let Medium::Video(video) = &asked else {
            unreachable!()
        };
        let sound = |samples| Sound {
            samples_per_second: 48_000,
            channels: 2,
            samples,
        };
        let (silent, loud) = (video.format(None), video.format(Some(sound(10_000))));
        assert_eq!(loud.bytes(), silent.bytes(), "frames and sound are counted apart");
        let made = |tracks: &[(&'static str, MediaFormat)]| asked.is_made_of(tracks.iter().copied());
        assert!(made(&[("", silent)]));
        assert!(made(&[("", loud), ("sound", sound(10_000).track())]));
        assert!(!made(&[]), "nothing");
        assert!(!made(&[("", loud)]), "its sound is missing");
        assert!(
            !made(&[("sound", sound(10_000).track())]),
            "its frames are missing"
        );
        assert!(
            !made(&[("", loud), ("sound", sound(9_999).track())]),
            "another length"
        );
        assert!(
            !made(&[("", silent), ("sound", sound(10_000).track())]),
            "sound of a silent film"
        );
        assert!(
            !made(&[("", loud), ("drums", sound(10_000).track())]),
            "another track"
        );
        let song = Medium::Audio(Audio::default());
        let stems = [("drums", sound(5).track()), ("vocals", sound(5).track())];
        assert!(song.is_made_of(stems.into_iter()));
    }

    #[test]
    fn units_of_a_piece_are_whole_and_its_own() {
        let rest = frames(1, 3).of_units(3..4).unwrap();
        assert_eq!((rest.first, rest.units(), rest.data[0]), (3, Some(1), 12));
        assert_eq!(frames(1, 3).of_units(1..4), Some(frames(1, 3)));
        assert_eq!(frames(1, 3).of_units(0..2), None, "units before it");
        assert_eq!(frames(1, 3).of_units(3..5), None, "units behind it");
        assert_eq!(frames(1, 3).of_units(2..2), None, "no units");
    }
}
