//! FLAC (RFC 9639): files that are read, and a file that is made of pieces of samples.

use std::io::{self, Cursor, Read as _, Seek, SeekFrom, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use flac_codec::decode::FlacSampleReader;
use flac_codec::encode::{FlacSampleWriter, Options};
use flac_codec::metadata::VorbisComment;
use model::Clip;

use super::containers::{refusal, without_id3};
use super::in_order::InOrder;
use super::{SAMPLE_BYTES, Tags, TrackError, TrackFormat, to_16_bits};
use crate::CancelToken;
use crate::EncodedFile;
use crate::Recipe;
use crate::panics::caught;

/// The first bytes of a file.
pub(super) const MARKER: &[u8; 4] = b"fLaC";
/// Bytes of the block that describes the stream, and its type (section 8.2).
const STREAMINFO_BYTES: usize = 34;
const STREAMINFO: u8 = 0;
/// Set in the type of the last block before the frames.
const LAST_BLOCK: u8 = 0x80;
/// Supported bits per sample: recorders and editors write at most 24.
const BITS: std::ops::RangeInclusive<u32> = 8..=24;
/// Names of comments: the recipe as JSON, and the program that wrote it.
const COMMENT: &str = "COMMENT";
const ENCODER: &str = "ENCODER";

fn damaged(problem: flac_codec::Error) -> TrackError {
    match problem {
        flac_codec::Error::Io(problem) if problem.kind() == io::ErrorKind::UnexpectedEof => {
            TrackError::CutOff("FLAC")
        }
        other => unreadable(other),
    }
}

fn unreadable(problem: impl ToString) -> TrackError {
    TrackError::Unreadable {
        what: "FLAC",
        problem: problem.to_string(),
    }
}

pub(super) fn read<E: From<TrackError>>(
    file: &[u8],
    cancel: &CancelToken,
    mut room: impl FnMut(u64) -> Result<(), E>,
) -> Result<Clip, E> {
    let (head, frames) = stream_of(file)?;
    let mut reader = FlacSampleReader::new(head.chain(frames)).map_err(damaged)?;
    let info = reader.metadata().streaminfo();
    let (bits, declared) = (u32::from(info.bits_per_sample), info.total_samples);
    let mut format = TrackFormat {
        samples_per_second: info.sample_rate,
        channels: u8::from(info.channels).into(),
        samples: declared.map_or(1, u64::from),
    };
    format.check()?;
    if !BITS.contains(&bits) {
        let (least, most) = BITS.into_inner();
        return Err(unreadable(format!("{bits} bits a sample; {least} to {most} are read")).into());
    }
    // Room for all samples before anything is decoded, if the file announces their number. A file with another number is refused.
    let mut data = match declared {
        Some(_) => {
            let bytes = format.samples * format.unit_bytes();
            room(bytes)?;
            in_one_piece(bytes)?
        }
        None => Vec::new(),
    };
    format.samples = 0;
    loop {
        cancel.check().map_err(TrackError::from)?;
        // The decoder may panic on a damaged frame. That is safe: it has no state that is shared.
        let decoded = caught(|| reader.fill_buf().map(|_| ()));
        decoded
            .map_err(|_| unreadable("a frame is damaged"))?
            .map_err(damaged)?;
        let frame = reader.fill_buf().map_err(damaged)?; // the same, once it is decoded
        if frame.is_empty() {
            break;
        }
        if declared.is_none() {
            room(frame.len() as u64 * SAMPLE_BYTES)?;
        }
        let more = frame.len() * SAMPLE_BYTES as usize;
        if data.capacity() - data.len() < more {
            // If the file does not announce its length, the memory grows by an eighth, so that it hardly exceeds the granted room.
            data.reserve_exact(more.max(data.len() / 8));
        }
        data.extend(
            frame
                .iter()
                .flat_map(|&sample| to_16_bits(sample, bits).to_le_bytes()),
        );
        let samples = frame.len();
        reader.consume(samples);
        format.samples += samples as u64 / u64::from(format.channels);
        if declared.is_some_and(|declared| format.samples > declared.get()) {
            return Err(unreadable("it has more samples than it says").into());
        }
        if format.samples > format.most_samples() {
            return Err(TrackError::TooLong.into());
        }
    }
    format.check()?;
    data.shrink_to_fit(); // so that the memory equals the granted room
    Ok(format.clip(data.into()))
}

/// Memory for so many bytes in one piece, since a growing vector takes up to twice as much meanwhile. The system assigns pages only
/// when they are written, so a file that announces too many samples takes no more memory than it has.
fn in_one_piece(bytes: u64) -> Result<Vec<u8>, TrackError> {
    let mut data = Vec::new();
    let reserved = usize::try_from(bytes).map(|bytes| data.try_reserve_exact(bytes));
    match reserved {
        Ok(Ok(())) => Ok(data),
        Ok(Err(_)) | Err(_) => Err(TrackError::NoMemory(bytes)),
    }
}

/// Bytes before the frames, as the decoder gets them.
type Head = [u8; MARKER.len() + 4 + STREAMINFO_BYTES];

/// The parts of a file for the decoder: the marker with the description of the stream, and the frames. Other blocks, which are tags
/// and pictures, are skipped: they have no sound, and their lengths are not trusted.
fn stream_of(file: &[u8]) -> Result<(Cursor<Head>, &[u8]), TrackError> {
    let file = without_id3(file);
    let mut rest = file.strip_prefix(MARKER).ok_or_else(|| refusal(file))?;
    let mut head = None;
    loop {
        let cut_off = || TrackError::CutOff("FLAC");
        let (&[kind, length @ ..], after) = rest.split_first_chunk::<4>().ok_or_else(cut_off)?;
        let length = length.iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
        let (block, after) = after.split_at_checked(length).ok_or_else(cut_off)?;
        if kind & !LAST_BLOCK == STREAMINFO && block.len() == STREAMINFO_BYTES {
            let length = [0, 0, STREAMINFO_BYTES as u8];
            let whole = [&MARKER[..], &[STREAMINFO | LAST_BLOCK], &length, block].concat();
            head = head.or(Head::try_from(whole).ok());
        }
        rest = after;
        if kind & LAST_BLOCK != 0 {
            let head = head.ok_or_else(|| unreadable("it does not say what it is"))?;
            return Ok((Cursor::new(head), rest));
        }
    }
}

pub(super) fn recipe_of(file: &[u8]) -> Option<String> {
    let comments = flac_codec::metadata::read_block::<_, VorbisComment>(without_id3(file));
    comments.ok().flatten()?.get(COMMENT).map(str::to_owned)
}

/// A track that is being encoded, from pieces in any order. It holds the encoded frames, and the samples of pieces that arrived
/// before earlier ones.
pub struct TrackFile {
    writer: FlacSampleWriter<SharedWriter>,
    output: SharedWriter,
    /// Pieces that begin later than the next sample to encode.
    pieces: InOrder,
}

impl TrackFile {
    /// Begins a track, with the recipe, if there is one, in its comments.
    ///
    /// # Errors
    /// When FLAC has no such format: its limits are 8 channels and 1,048,575 samples a second.
    pub fn new(format: TrackFormat, recipe: Option<&Recipe>) -> Result<TrackFile, TrackError> {
        let failed = |problem: String| TrackError::Encoder(problem);
        // Trying every way to join two channels takes twice the time, and saves a hundredth of the bytes.
        let mut options = Options::default().no_padding().fast_channel_correlation(true);
        if let Some(recipe) = recipe {
            let Tags { comment, software } = Tags::of(recipe).map_err(failed)?;
            options = options.tag(COMMENT, comment).tag(ENCODER, software);
        }
        let output = SharedWriter::default();
        let channels = u8::try_from(format.channels).map_err(|_| failed("too many channels".to_owned()))?;
        let writer = FlacSampleWriter::new(
            output.clone(),
            options,
            format.samples_per_second,
            8 * SAMPLE_BYTES as u32,
            channels,
            Some(format.samples.saturating_mul(u64::from(channels))),
        );
        Ok(TrackFile {
            writer: writer.map_err(|problem| failed(problem.to_string()))?,
            output,
            pieces: InOrder::new(format),
        })
    }

    /// Encodes samples from number `first` on: 16 bits, little-endian, channels interleaved; once all earlier samples have been
    /// added. Samples that were added before are skipped.
    ///
    /// # Errors
    /// When these are not whole samples of the track, or the encoder fails.
    pub fn add(&mut self, first: u64, samples: &Bytes) -> Result<(), TrackError> {
        for samples in self.pieces.add(first, samples)? {
            self.encode(&samples)?;
        }
        Ok(())
    }

    fn encode(&mut self, samples: &[u8]) -> Result<(), TrackError> {
        let numbers = samples.as_chunks::<2>().0;
        let numbers = numbers.iter().map(|&bytes| i16::from_le_bytes(bytes).into());
        let written = self.writer.write(&numbers.collect::<Vec<i32>>());
        written.map_err(|problem| TrackError::Encoder(problem.to_string()))
    }

    /// Bytes of memory that it holds.
    pub fn bytes(&self) -> u64 {
        self.output.lock().get_ref().len() as u64 + self.pieces.waiting_bytes()
    }

    /// Whether every sample has been added.
    pub fn is_complete(&self) -> bool {
        self.pieces.is_complete()
    }

    /// The whole file. Its beginning has data that is known only at the end: the checksum of the samples, and the seek points.
    ///
    /// # Errors
    /// When samples are missing.
    pub fn finish(self) -> Result<EncodedFile, TrackError> {
        let finished = self.writer.finalize();
        finished.map_err(|problem| TrackError::Encoder(problem.to_string()))?;
        let file = std::mem::take(&mut *self.output.lock()).into_inner();
        Ok(EncodedFile::of(vec![file.into()]))
    }
}

/// The writer of the encoder. It is shared because the encoder does not return its writer, and the file is read from here.
#[derive(Clone, Default)]
struct SharedWriter(Arc<Mutex<Cursor<Vec<u8>>>>);

impl SharedWriter {
    /// A panic while it is locked leaves the bytes as they are.
    fn lock(&self) -> MutexGuard<'_, Cursor<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for SharedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for SharedWriter {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.lock().seek(to)
    }
}
