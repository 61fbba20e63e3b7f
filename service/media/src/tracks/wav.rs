//! WAV files, as programs write them: to a pipe, with tags before and after the samples, with 64-bit lengths. The crates that
//! read WAV trust the header, and refuse such files.

use std::ops::Range;

use bytes::Bytes;
use model::Clip;

use super::{SAMPLE_BYTES, Tags, TrackError, TrackFormat, to_16_bits};
use crate::CancelToken;
use crate::Recipe;

/// Bytes of a chunk's head: its identifier and its length.
const CHUNK_HEAD_BYTES: usize = 8;
/// Identifiers of the list of texts about a file, of its comment, and of the program that wrote the file.
const INFO: &[u8; 4] = b"INFO";
const COMMENT: &[u8; 4] = b"ICMT";
const SOFTWARE: &[u8; 4] = b"ISFT";

/// The header of a track of 16-bit samples, with its recipe if there is one: RIFF, as Microsoft's "Multimedia Programming
/// Interface and Data Specifications 1.0" has it. The recipe is the comment, as JSON in UTF-8.
///
/// # Errors
/// When the file exceeds the limit of the format, 4 GiB.
pub fn header(format: TrackFormat, recipe: Option<&Recipe>) -> Result<Vec<u8>, String> {
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
    let after = b"WAVE".len() as u32 + chunks.len() as u32;
    let riff = data.checked_add(after).ok_or_else(too_long)?;
    Ok([b"RIFF", &riff.to_le_bytes()[..], b"WAVE", &chunks].concat())
}

/// A chunk; one of odd length is followed by a byte that is not counted.
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

/// The description of a file's samples, and their place.
struct Found {
    format: TrackFormat,
    kind: SampleKind,
    /// Bytes of a sample of one channel.
    sample_bytes: usize,
    data: Range<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SampleKind {
    Integer,
    Float,
}

/// Whether a file begins as a WAV: as one of 32-bit lengths, or of 64-bit ones (EBU Tech 3306, ITU-R BS.2088).
pub(super) fn is_wav(file: &[u8]) -> bool {
    let starts = [b"RIFF", b"RF64", b"BW64"];
    starts.iter().any(|&start| file.starts_with(start)) && file.get(8..12) == Some(b"WAVE")
}

pub(super) fn read<E: From<TrackError>>(
    file: &Bytes,
    cancel: &CancelToken,
    mut room: impl FnMut(u64) -> Result<(), E>,
) -> Result<Clip, E> {
    let found = find_samples(file)?;
    if (found.kind, found.sample_bytes) == (SampleKind::Integer, SAMPLE_BYTES as usize) {
        return Ok(found.format.clip(file.slice(found.data)));
    }
    let samples = found.data.len() / found.sample_bytes;
    room(samples as u64 * SAMPLE_BYTES)?;
    let mut data = Vec::with_capacity(samples * SAMPLE_BYTES as usize);
    for (number, sample) in (0_u64..).zip(file[found.data.clone()].chunks_exact(found.sample_bytes)) {
        if number % UNLOOKED == 0 {
            cancel.check().map_err(TrackError::from)?;
        }
        let sample = decoded(sample, found.kind).map_err(|NotANumber| {
            let channels = u64::from(found.format.channels);
            TrackError::NotFinite {
                sample: number / channels,
                channel: number % channels,
            }
        })?;
        data.extend(sample.to_le_bytes());
    }
    Ok(found.format.clip(data.into()))
}

/// Samples that are decoded between two checks whether it is cancelled.
const UNLOOKED: u64 = 1 << 16;

struct NotANumber;

fn decoded(sample: &[u8], kind: SampleKind) -> Result<i16, NotANumber> {
    let float = match (kind, sample) {
        (SampleKind::Float, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (SampleKind::Float, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
        (SampleKind::Integer, &[a]) => return Ok(to_16_bits(i32::from(a) - 128, 8)), // the only samples without a sign
        (SampleKind::Integer, &[a, b, c]) => {
            return Ok(to_16_bits(i32::from_le_bytes([0, a, b, c]) >> 8, 24));
        }
        (SampleKind::Integer, &[a, b, c, d]) => return Ok(to_16_bits(i32::from_le_bytes([a, b, c, d]), 32)),
        _ => return Err(NotANumber), // `find_samples` refuses other lengths
    };
    match float.is_finite() {
        // Saturates: samples above full scale are clipped.
        true => Ok((float * 32_768.0).round() as i16),
        false => Err(NotANumber),
    }
}

/// Programs that write to a pipe do not know the length yet, and write 0xFFFFFFFF, 0x7FFFFFFF and the like, less the bytes of a
/// header. So lengths from here on count as unknown; no track of such a length would be read.
const LEAST_UNKNOWN_LENGTH: u64 = 0x7fff_0000;

/// Reads the chunks up to the samples. Lengths are limited to the bytes of the file.
fn find_samples(file: &[u8]) -> Result<Found, TrackError> {
    if !is_wav(file) {
        return Err(super::containers::refusal(file));
    }
    let whole_length = u64::from(number(file, 4).unwrap_or(0));
    let (mut fmt, mut data_length_64, mut at) = (None, None, 12);
    loop {
        let (Some(name), Some(length)) = (file.get(at..at + 4), number(file, at + 4)) else {
            return Err(TrackError::CutOff("WAV"));
        };
        at += CHUNK_HEAD_BYTES;
        if name == b"data" {
            let fmt = fmt.ok_or_else(|| unreadable("it does not say what its samples are"))?;
            let is_unfinished = whole_length + 8 <= at as u64 || whole_length >= LEAST_UNKNOWN_LENGTH;
            let stated = match (u64::from(length), data_length_64) {
                (0xffff_ffff, Some(length)) => length,
                (length, _) => length,
            };
            let is_known = stated < LEAST_UNKNOWN_LENGTH && !(stated == 0 && is_unfinished)
                || stated > 0xffff_ffff && stated < u64::MAX;
            return samples_of(fmt, file.len() - at, is_known.then_some(stated), at);
        }
        let length = length as usize;
        let content = file.get(at..).and_then(|rest| rest.get(..length));
        let content = content.ok_or(TrackError::CutOff("WAV"))?;
        match name {
            b"fmt " => fmt = Some(content),
            // Lengths of the file, of the samples, and their number.
            b"ds64" => {
                data_length_64 = content
                    .get(8..16)
                    .and_then(|bytes| Some(u64::from_le_bytes(bytes.try_into().ok()?)))
            }
            _ => {}
        }
        at += length;
        // A chunk of odd length is followed by a zero, which some programs leave out.
        if length % 2 == 1 && file.get(at) == Some(&0) {
            at += 1;
        }
    }
}

/// The samples from `begin` on. `there` is the number of bytes in the file, `stated` the announced number; `None`: not known.
fn samples_of(fmt: &[u8], there: usize, stated: Option<u64>, begin: usize) -> Result<Found, TrackError> {
    let short = |place: usize| Some(u16::from_le_bytes(fmt.get(place..place + 2)?.try_into().ok()?));
    let (Some(mut tag), Some(channels), Some(rate), Some(unit_bytes), Some(bits)) =
        (short(0), short(2), number(fmt, 4), short(12), short(14))
    else {
        return Err(unreadable("it does not say what its samples are"));
    };
    if tag == EXTENSIBLE {
        tag = short(24).unwrap_or(tag);
    }
    let (unit_bytes, of_each) = (usize::from(unit_bytes), usize::from(channels).max(1));
    // If samples have fewer bits than their bytes, the upper bits are used.
    let sample_bytes = match unit_bytes / of_each {
        0 => usize::from(bits).div_ceil(8),
        bytes => bytes,
    };
    let kind = match (tag, sample_bytes) {
        (PCM, 1..=4) => SampleKind::Integer,
        (FLOAT, 4 | 8) => SampleKind::Float,
        (PCM | FLOAT, _) => return Err(unreadable(READ_SAMPLES)),
        (tag, _) => {
            return Err(unreadable(format!(
                "its samples are {}; {READ_SAMPLES}",
                coding(tag)
            )));
        }
    };
    let unit_bytes = (sample_bytes * of_each) as u64;
    let bytes = stated.unwrap_or(there as u64);
    let format = TrackFormat {
        samples_per_second: rate,
        channels: channels.into(),
        samples: bytes / unit_bytes,
    };
    format.check()?;
    if bytes > there as u64 {
        let bytes = bytes - there as u64;
        return Err(TrackError::Missing { what: "WAV", bytes });
    }
    let end = begin + (format.samples * unit_bytes) as usize;
    Ok(Found {
        format,
        kind,
        sample_bytes,
        data: begin..end,
    })
}

/// Codes of sample formats (Microsoft's "Multiple channel audio data and WAVE files"); the last has the format in a later field.
const PCM: u16 = 1;
const FLOAT: u16 = 3;
const EXTENSIBLE: u16 = 0xfffe;
const READ_SAMPLES: &str = "PCM of 8, 16, 24 or 32 bits, and numbers of 32 or 64 bits with a point, are read";

fn coding(tag: u16) -> String {
    match tag {
        2 | 0x11 => "ADPCM".to_owned(),
        6 => "A-law".to_owned(),
        7 => "mu-law".to_owned(),
        0x50 | 0x55 => "MP3".to_owned(),
        0xff | 0x1600..=0x1602 => "AAC".to_owned(),
        other => format!("of code {other:#x}"),
    }
}

/// The 32-bit number at an offset.
fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn recipe_of(file: &[u8]) -> Option<String> {
    let list = find(file.get(12..)?, |name, content| {
        name == b"LIST" && content.starts_with(INFO)
    })?;
    let comment = find(list.get(INFO.len()..)?, |name, _| name == COMMENT)?;
    let text = comment.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

/// The content of the first of these chunks for which `is_wanted` is true.
fn find(mut chunks: &[u8], is_wanted: impl Fn(&[u8], &[u8]) -> bool) -> Option<&[u8]> {
    loop {
        let (head, after) = chunks.split_at_checked(CHUNK_HEAD_BYTES)?;
        let (name, length) = head.split_at(4);
        let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
        let content = after.get(..length)?;
        if is_wanted(name, content) {
            return Some(content);
        }
        chunks = after.get(length + length % 2..)?;
    }
}
