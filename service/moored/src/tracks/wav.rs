//! WAV files. What is read is left to `hound`; the header that is written has a recipe in it, and goes before the samples,
//! which `hound` would write with it.

use std::io::Cursor;

use bytes::Bytes;
use hound::{SampleFormat, WavReader, WavSpec};
use pipelines::Clip;

use super::{SAMPLE_BYTES, Tags, TrackError, TrackFormat, to_16_bits};
use crate::pictures::Recipe;
use crate::threads::Caller;

/// Chunks of a file with their identifiers and lengths.
const CHUNK_HEAD_BYTES: usize = 8;
/// What a list of texts about a file begins with, the comment in it, and the program that wrote the file.
const INFO: &[u8; 4] = b"INFO";
const COMMENT: &[u8; 4] = b"ICMT";
const SOFTWARE: &[u8; 4] = b"ISFT";

/// The header of a track of 16-bit samples, with its recipe if one is given: RIFF, as Microsoft's "Multimedia Programming
/// Interface and Data Specifications 1.0" has it. The recipe is the comment, as JSON in UTF-8.
///
/// # Errors
/// When the file exceeds the limit of the format, 4 GiB.
pub(crate) fn header(format: TrackFormat, recipe: Option<&Recipe>) -> Result<Vec<u8>, String> {
    let data = format.samples.saturating_mul(format.unit_bytes());
    let too_long = || TrackError::TooLongForWav(data).to_string();
    let data = u32::try_from(data).map_err(|_| too_long())?;
    let channels = u16::try_from(format.channels).map_err(|_| "too many channels for WAV".to_owned())?;
    let unit_bytes = format.unit_bytes() as u32;
    let fmt = [
        &1_u16.to_le_bytes()[..], // PCM
        &channels.to_le_bytes(),
        &format.samples_per_second.to_le_bytes(),
        &format.samples_per_second.saturating_mul(unit_bytes).to_le_bytes(),
        &(unit_bytes as u16).to_le_bytes(),
        &(8 * SAMPLE_BYTES as u16).to_le_bytes(),
    ];
    let mut chunks = chunk(b"fmt ", &fmt.concat());
    if let Some(recipe) = recipe {
        let Tags { comment, software } = Tags::of(recipe)?;
        let text = |text: String| [text.as_bytes(), b"\0"].concat();
        let list = [
            INFO.to_vec(),
            chunk(COMMENT, &text(comment)),
            chunk(SOFTWARE, &text(software)),
        ];
        chunks.extend(chunk(b"LIST", &list.concat()));
    }
    chunks.extend(b"data");
    chunks.extend(data.to_le_bytes());
    let behind = b"WAVE".len() as u32 + chunks.len() as u32;
    let riff = data.checked_add(behind).ok_or_else(too_long)?;
    Ok([b"RIFF", &riff.to_le_bytes()[..], b"WAVE", &chunks].concat())
}

/// A chunk; one of odd length has a byte behind it that is not counted.
fn chunk(name: &[u8; 4], content: &[u8]) -> Vec<u8> {
    let length = content.len() as u32;
    let padding = &b"\0"[..content.len() % 2];
    [name, &length.to_le_bytes()[..], content, padding].concat()
}

fn unreadable(problem: impl ToString) -> TrackError {
    TrackError::Unreadable {
        what: "WAV",
        problem: problem.to_string(),
    }
}

fn damaged(problem: hound::Error) -> TrackError {
    match problem {
        hound::Error::IoError(_) => TrackError::CutOff("WAV"),
        hound::Error::Unsupported | hound::Error::TooWide | hound::Error::InvalidSampleFormat => {
            unreadable("PCM of 8, 16, 24 or 32 bits, and of 32 bits with a point, are read")
        }
        hound::Error::FormatError(problem) => unreadable(problem),
        other => unreadable(other),
    }
}

type WavFile<'a> = WavReader<Cursor<&'a [u8]>>;

pub(super) fn read<E: From<TrackError>>(
    file: &Bytes,
    caller: &Caller,
    mut room: impl FnMut(u64) -> Result<(), E>,
) -> Result<Clip, E> {
    let mut reader = WavReader::new(Cursor::new(&file[..])).map_err(damaged)?;
    let spec = reader.spec();
    let format = TrackFormat {
        samples_per_second: spec.sample_rate,
        channels: spec.channels.into(),
        samples: reader.duration().into(),
    };
    format.check()?;
    // The file says how long it is; a sample of it takes these bytes at least.
    let samples = u64::from(reader.len());
    if samples * u64::from(spec.bits_per_sample / 8) > file.len() as u64 {
        return Err(TrackError::CutOff("WAV").into());
    }
    if (spec.sample_format, spec.bits_per_sample) == (SampleFormat::Int, 16) {
        return Ok(format.clip(shared(file, reader, samples * SAMPLE_BYTES)?));
    }
    room(samples * SAMPLE_BYTES)?;
    let mut data = Vec::with_capacity((samples * SAMPLE_BYTES) as usize);
    decode(&mut reader, spec, caller, &mut data)?;
    Ok(format.clip(data.into()))
}

/// 16-bit samples as they are in the file.
fn shared(file: &Bytes, mut reader: WavFile<'_>, bytes: u64) -> Result<Bytes, TrackError> {
    // The first is read so that samples which only fill a part of their bytes are refused.
    reader.samples::<i16>().next().transpose().map_err(damaged)?;
    let begin = (reader.into_inner().position() - SAMPLE_BYTES) as usize;
    let end = begin + bytes as usize;
    match end <= file.len() {
        true => Ok(file.slice(begin..end)),
        false => Err(TrackError::CutOff("WAV")),
    }
}

/// Samples that are decoded between two looks at whether the client is there.
const UNLOOKED: u64 = 1 << 16;

fn decode(
    reader: &mut WavFile<'_>,
    spec: WavSpec,
    caller: &Caller,
    data: &mut Vec<u8>,
) -> Result<(), TrackError> {
    let look = |number: u64| match number % UNLOOKED {
        0 => caller.check(),
        _ => Ok(()),
    };
    let bits = u32::from(spec.bits_per_sample);
    match spec.sample_format {
        SampleFormat::Int => {
            for (number, sample) in (0..).zip(reader.samples::<i32>()) {
                look(number)?;
                data.extend(to_16_bits(sample.map_err(damaged)?, bits).to_le_bytes());
            }
        }
        SampleFormat::Float => {
            let channels = u64::from(spec.channels);
            for (number, sample) in (0_u64..).zip(reader.samples::<f32>()) {
                look(number)?;
                let sample = sample.map_err(damaged)?;
                if !sample.is_finite() {
                    return Err(TrackError::NotFinite {
                        sample: number / channels,
                        channel: number % channels,
                    });
                }
                // Saturates: what is louder than full scale is cut.
                data.extend(((sample * 32_768.0).round() as i16).to_le_bytes());
            }
        }
    }
    Ok(())
}

pub(super) fn recipe_of(file: &[u8]) -> Option<String> {
    let list = find(file.get(12..)?, |name, content| {
        name == b"LIST" && content.starts_with(INFO)
    })?;
    let comment = find(list.get(INFO.len()..)?, |name, _| name == COMMENT)?;
    let text = comment.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

/// The content of the first of these chunks that is wanted.
fn find(mut chunks: &[u8], is_wanted: impl Fn(&[u8], &[u8]) -> bool) -> Option<&[u8]> {
    loop {
        let (head, behind) = chunks.split_at_checked(CHUNK_HEAD_BYTES)?;
        let (name, length) = head.split_at(4);
        let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
        let content = behind.get(..length)?;
        if is_wanted(name, content) {
            return Some(content);
        }
        chunks = behind.get(length + length % 2..)?;
    }
}
