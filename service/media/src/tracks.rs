//! Tracks as files: the WAV and FLAC files that clients upload, and those of results, with their recipe.
//!
//! Tracks of clients become 16-bit samples, whatever their format. Sizes in a file's header are not trusted: no more memory is
//! reserved than was granted, at most that of the longest track, and it is written only as samples are decoded.

mod containers;
mod flac;
pub(crate) mod in_order;
mod wav;

use model::{Clip, MediaFormat};

pub use flac::TrackFile;
pub use wav::header as wav_header;

use crate::Recipe;
use crate::{CancelToken, Cancelled};

/// Rates of uploaded tracks: from telephones to the best of sound cards. A model resamples, and may take fewer.
const LEAST_SAMPLES_PER_SECOND: u32 = 8_000;
const MOST_SAMPLES_PER_SECOND: u32 = 192_000;
/// Mono and stereo: more channels have an order that no model here knows.
const MOST_CHANNELS: u32 = 2;
/// Longest track that may be uploaded or requested; a model may take less.
pub const LONGEST_TRACK_SECONDS: u32 = 3600;
/// Bytes of a sample of one channel: 16 bits, little-endian.
const SAMPLE_BYTES: u64 = 2;

/// Why a track is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrackError {
    /// The file is of another type, damaged, or of a kind that is not read.
    #[error("cannot be read as {what}: {problem}")]
    Unreadable { what: &'static str, problem: String },
    /// It ends before its samples do.
    #[error("is a {0} file that is cut off")]
    CutOff(&'static str),
    /// The file ends before the samples that its header announces.
    #[error("is a {what} file that is cut off: {bytes} bytes of samples are missing at its end")]
    Missing { what: &'static str, bytes: u64 },
    /// It is a track in a format that is not read.
    #[error("is {0}, which is not read: convert it, for example by `ffmpeg -i FILE OUT.flac`")]
    Foreign(&'static str),
    /// It is of an unknown type.
    #[error("is neither WAV nor FLAC: convert it, for example by `ffmpeg -i FILE OUT.flac`")]
    Unknown,
    /// A failed download or copy.
    #[error("is empty: it has 0 bytes")]
    NoBytes,
    /// It has no samples.
    #[error("has no samples")]
    Empty,
    /// A sample is not a number.
    #[error("has samples that are no numbers: the first is sample {sample} of channel {channel}")]
    NotFinite { sample: u64, channel: u64 },
    /// Its rate is out of range.
    #[error(
        "has {0} samples a second; {LEAST_SAMPLES_PER_SECOND} to {MOST_SAMPLES_PER_SECOND} are read: resample it"
    )]
    Rate(u32),
    /// It has too many channels.
    #[error("has {0} channels; 1 and {MOST_CHANNELS} are read: mix it down")]
    Channels(u32),
    /// It is too long.
    #[error("is longer than {LONGEST_TRACK_SECONDS} seconds: cut out the part that matters")]
    TooLong,
    /// The machine lacks memory.
    #[error(
        "needs {0} bytes of memory when it is decoded, which the service's machine does not have now: try again later"
    )]
    NoMemory(u64),
    /// It is too long for its format.
    #[error("{0} bytes of samples are too many for WAV; ask for FLAC, or for the samples alone")]
    TooLongForWav(u64),
    /// Its caller no longer waits for it.
    #[error("is no longer asked for: its client has gone")]
    Cancelled,
    /// Bytes that are not samples of the track.
    #[error("{bytes} bytes from sample {first} on are not whole samples of the track")]
    NotSamples { first: u64, bytes: u64 },
    /// It cannot be written.
    #[error("the FLAC encoder failed: {0}")]
    Encoder(String),
}

impl From<Cancelled> for TrackError {
    fn from(Cancelled: Cancelled) -> TrackError {
        TrackError::Cancelled
    }
}

/// The format of a track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackFormat {
    pub samples_per_second: u32,
    pub channels: u32,
    /// Samples of each channel.
    pub samples: u64,
}

impl TrackFormat {
    /// The format of a track; `None` for another medium.
    pub fn of(format: &MediaFormat) -> Option<TrackFormat> {
        match *format {
            MediaFormat::Audio {
                samples_per_second,
                channels,
                samples,
            } => Some(TrackFormat {
                samples_per_second,
                channels,
                samples,
            }),
            MediaFormat::Image { .. } | MediaFormat::Video { .. } => None,
        }
    }

    /// Checks the format and the length of an uploaded track.
    ///
    /// # Errors
    /// For people: no samples, too many, a rate or channels that no model takes.
    pub fn check(&self) -> Result<(), TrackError> {
        if self.samples == 0 {
            return Err(TrackError::Empty);
        }
        if !(1..=MOST_CHANNELS).contains(&self.channels) {
            return Err(TrackError::Channels(self.channels));
        }
        if !(LEAST_SAMPLES_PER_SECOND..=MOST_SAMPLES_PER_SECOND).contains(&self.samples_per_second) {
            return Err(TrackError::Rate(self.samples_per_second));
        }
        if self.samples > self.most_samples() {
            return Err(TrackError::TooLong);
        }
        Ok(())
    }

    /// Samples of the longest track of this rate.
    fn most_samples(&self) -> u64 {
        u64::from(LONGEST_TRACK_SECONDS) * u64::from(self.samples_per_second)
    }

    /// Bytes of one sample of all channels.
    fn unit_bytes(&self) -> u64 {
        SAMPLE_BYTES * u64::from(self.channels)
    }

    /// The clip of these samples.
    fn clip(self, data: bytes::Bytes) -> Clip {
        let format = MediaFormat::Audio {
            samples_per_second: self.samples_per_second,
            channels: self.channels,
            samples: self.samples,
        };
        Clip { format, data }
    }
}

/// The samples of a WAV file: PCM of 8, 16, 24 or 32 bits, or numbers of 32 or 64 bits with a point, of which 1 is full scale.
/// 16-bit samples are shared with the file. `room` must grant the bytes of other samples before they are decoded.
/// Decoding ends when it is cancelled.
///
/// # Errors
/// When it is no WAV file, or a track that no model takes; the error of `room`; and when it is cancelled.
pub fn read_wav<E: From<TrackError>>(
    file: &bytes::Bytes,
    cancel: &CancelToken,
    room: impl FnMut(u64) -> Result<(), E>,
) -> Result<Clip, E> {
    wav::read(file, cancel, room)
}

/// The samples of a FLAC file of 8 to 24 bits. `room` must grant the bytes of all samples before they are decoded.
/// If the file does not announce their number, `room` is asked for each frame.
///
/// # Errors
/// As [`read_wav`].
pub fn read_flac<E: From<TrackError>>(
    file: &[u8],
    cancel: &CancelToken,
    room: impl FnMut(u64) -> Result<(), E>,
) -> Result<Clip, E> {
    flac::read(file, cancel, room)
}

/// Whether this is the start of a WAV or FLAC file.
pub fn is_track(file: &[u8]) -> bool {
    media_type(file).is_ok()
}

/// The media type of a track's file, by its first bytes.
///
/// # Errors
/// When the file is of no type that is read: a text for people, with its type.
pub fn media_type(file: &[u8]) -> Result<&'static str, TrackError> {
    if containers::without_id3(file).starts_with(flac::MARKER) {
        return Ok("audio/flac");
    }
    if wav::is_wav(file) {
        return Ok("audio/wav");
    }
    Err(containers::refusal(file))
}

/// The recipe in a track's file, as JSON.
pub fn recipe_of(file: &[u8]) -> Option<String> {
    match media_type(file).ok()? {
        "audio/flac" => flac::recipe_of(file),
        _ => wav::recipe_of(file),
    }
}

/// The tags of a file: the recipe as JSON, and the program that wrote it.
struct Tags {
    comment: String,
    software: String,
}

impl Tags {
    fn of(recipe: &Recipe) -> Result<Tags, String> {
        Ok(Tags {
            comment: serde_json::to_string(recipe).map_err(|problem| problem.to_string())?,
            software: format!("moored {}", recipe.version),
        })
    }
}

/// Converts a signed sample of this many bits (8 to 32) to 16 bits, rounded to the nearest.
fn to_16_bits(sample: i32, bits: u32) -> i16 {
    let sample = i64::from(sample);
    let scaled = match bits.checked_sub(16) {
        None => sample << (16 - bits),
        Some(0) => sample,
        Some(less) => (sample + (1 << (less - 1))) >> less,
    };
    scaled.clamp(i16::MIN.into(), i16::MAX.into()) as i16
}

#[cfg(test)]
mod tests;
