//! Films as MP4 files: H.264, with AAC where they have sound, and their recipe, made from pieces in any order.
//!
//! A [`FilmFile`] encodes each piece on arrival and keeps the encoded frames by number: FramePack makes the end of a film
//! first. Consecutive frames are one group of pictures; any other piece begins with a key frame, so that groups
//! can be put together in any order. The whole file is written at the end, with its index first.

mod colour;
mod h264;
mod layout;
mod metadata;
mod mp4;
mod sound;

use std::collections::BTreeMap;

use bytes::Bytes;
use model::MediaFormat;

pub use metadata::recipe_of;
pub use mp4::is_mp4;
pub use sound::FilmSound;

use crate::EncodedFile;
use crate::Recipe;
use crate::tracks::TrackError;
use h264::Encoder;
use layout::Track;

/// Sides that the encoder takes: its own limits are 3840 x 2160, in either orientation, and chroma has half the resolution.
const LONGER_SIDE_PIXELS: u32 = 3840;
const SHORTER_SIDE_PIXELS: u32 = 2160;
const LEAST_SIDE_PIXELS: u32 = 16;
/// Most frames a second for which a level of H.264 is chosen.
const MOST_FRAMES_PER_SECOND: f32 = 240.0;

/// Why a film is not encoded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FilmError {
    /// Its sides are odd, too long or too short.
    #[error(
        "{width}x{height} is no size of an MP4: sides are even, at least {LEAST_SIDE_PIXELS}, and at most \
         {LONGER_SIDE_PIXELS} and {SHORTER_SIDE_PIXELS}; ask for raw frames, or another size"
    )]
    Size { width: u32, height: u32 },
    /// Frames a second that a file cannot have.
    #[error("{0} frames a second are not over 0 and at most {MOST_FRAMES_PER_SECOND}")]
    Rate(f32),
    /// Bytes that are not frames of the film.
    #[error("{bytes} bytes from frame {first} on are not whole frames of {frames}")]
    NotFrames { first: u64, bytes: usize, frames: u32 },
    /// The encoder failed.
    #[error("the H.264 encoder failed: {0}")]
    Encoder(String),
    /// Samples that are not of the film's sound.
    #[error(transparent)]
    Sound(TrackError),
    /// The encoder of sound failed.
    #[error("the AAC encoder failed: {0}")]
    SoundEncoder(String),
    /// The file cannot be written.
    #[error("the MP4 file cannot be written: {0}")]
    Container(String),
}

/// The format of a film, known before its first frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FilmFormat {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Frames in all.
    pub frames: u32,
    pub frames_per_second: f32,
}

impl FilmFormat {
    /// The format of a film; `None` for another medium.
    pub fn of(format: &MediaFormat) -> Option<FilmFormat> {
        match *format {
            MediaFormat::Video {
                width,
                height,
                frames,
                frames_per_second,
                sound: _,
            } => Some(FilmFormat {
                width,
                height,
                frames,
                frames_per_second,
            }),
            MediaFormat::Image { .. } | MediaFormat::Audio { .. } => None,
        }
    }

    /// Whether a file can hold such a film.
    ///
    /// # Errors
    /// For people, when its size or its rate is not one of H.264.
    pub fn check(&self) -> Result<(), FilmError> {
        let (width, height) = (self.width, self.height);
        let fits = |side: u32| side >= LEAST_SIDE_PIXELS && side.is_multiple_of(2);
        let is_small_enough =
            width.max(height) <= LONGER_SIDE_PIXELS && width.min(height) <= SHORTER_SIDE_PIXELS;
        if !fits(width) || !fits(height) || !is_small_enough {
            return Err(FilmError::Size { width, height });
        }
        if !(self.frames_per_second > 0.0 && self.frames_per_second <= MOST_FRAMES_PER_SECOND) {
            return Err(FilmError::Rate(self.frames_per_second));
        }
        Ok(())
    }

    /// Bytes of one frame: RGB, 8 bits each.
    fn frame_bytes(&self) -> usize {
        3 * self.width as usize * self.height as usize
    }
}

/// One encoded frame, as a file has it.
#[derive(Clone, Debug, PartialEq)]
struct Sample {
    /// NAL units, each after its length in 4 bytes.
    data: Bytes,
    /// Decoding can begin here.
    is_key: bool,
}

/// A film that is being encoded. It holds the encoded frames and the encoder's few pictures, never the film's pixels.
pub struct FilmFile {
    format: FilmFormat,
    encoder: Encoder,
    /// By number.
    samples: BTreeMap<u32, Sample>,
    /// Bytes of these.
    bytes: u64,
    /// The number of the frame that would continue the open group of pictures.
    next: Option<u32>,
}

impl FilmFile {
    /// Begins a film.
    ///
    /// # Errors
    /// As [`FilmFormat::check`]; and when the encoder does not start.
    pub fn new(format: FilmFormat) -> Result<FilmFile, FilmError> {
        format.check()?;
        Ok(FilmFile {
            encoder: Encoder::new(&format)?,
            format,
            samples: BTreeMap::new(),
            bytes: 0,
            next: None,
        })
    }

    /// Encodes frames from number `first` on: RGB, 8 bits each, row-major, frame after frame. Frames that were added before
    /// are skipped. Returns the bytes of the new encoded frames.
    ///
    /// # Errors
    /// When these are not whole frames of the film, or the encoder fails.
    pub fn add(&mut self, first: u64, rgb: &[u8]) -> Result<u64, FilmError> {
        let (frames, size) = (self.format.frames, self.format.frame_bytes());
        let wrong = || FilmError::NotFrames {
            first,
            bytes: rgb.len(),
            frames,
        };
        let count = (rgb.len() / size) as u64;
        if !rgb.len().is_multiple_of(size) || first.saturating_add(count) > u64::from(frames) {
            return Err(wrong());
        }
        let first = u32::try_from(first).map_err(|_| wrong())?;
        let mut bytes = 0;
        for (number, frame) in (first..).zip(rgb.chunks_exact(size)) {
            if self.samples.contains_key(&number) {
                continue;
            }
            let sample = self.encoder.encode(frame, self.next != Some(number))?;
            self.next = Some(number + 1);
            bytes += sample.data.len() as u64;
            self.samples.insert(number, sample);
        }
        self.bytes += bytes;
        Ok(bytes)
    }

    /// Bytes of the encoded frames.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether every frame has been added.
    pub fn is_complete(&self) -> bool {
        self.samples.len() == self.format.frames as usize
    }

    /// The whole file, with its sound, if it has any, and the recipe, if there is one, in its metadata.
    ///
    /// # Errors
    /// When frames or samples are missing.
    pub fn finish(self, sound: Option<FilmSound>, recipe: Option<&Recipe>) -> Result<EncodedFile, FilmError> {
        if !self.is_complete() {
            let missing = self.format.frames as usize - self.samples.len();
            return Err(FilmError::Container(format!("{missing} frames are missing")));
        }
        let sets = self.encoder.parameter_sets()?;
        let samples: Vec<Sample> = self.samples.into_values().collect();
        let sound = sound.map(FilmSound::finish).transpose()?;
        let contents = mp4::Contents {
            format: &self.format,
            sets: &sets,
            samples: &samples,
            sound: sound.as_ref(),
        };
        let chunks = contents.chunks();
        let mut parts = vec![Bytes::from(mp4::head(&contents, &chunks, recipe)?)];
        for chunk in chunks {
            match (chunk.track, &sound) {
                (Track::Frames, _) => {
                    parts.extend(samples[chunk.samples].iter().map(|sample| sample.data.clone()))
                }
                (Track::Sound, sound) => {
                    let packets = sound
                        .iter()
                        .flat_map(|sound| &sound.packets[chunk.samples.clone()]);
                    parts.extend(packets.cloned());
                }
            }
        }
        Ok(EncodedFile::of(parts))
    }
}

#[cfg(test)]
mod tests;
