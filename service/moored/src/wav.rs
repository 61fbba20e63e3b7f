//! WAV files: the header that is written, and 16-bit PCM that is read.

use std::ops::Range;

use pipelines::MediaFormat;

/// Bytes of the header in front of the samples.
const HEADER_BYTES: u32 = 44;

/// The header of a track of 16-bit samples: RIFF, as Microsoft's "Multimedia Programming Interface and Data Specifications
/// 1.0" has it.
///
/// # Errors
/// When the samples exceed the limit of the format, 4 GiB.
pub(crate) fn header(samples_per_second: u32, channels: u32, sample_bytes: u64) -> Result<Vec<u8>, String> {
    let too_long = || format!("{sample_bytes} bytes of samples are too many for WAV; ask for them raw");
    let data = u32::try_from(sample_bytes).map_err(|_| too_long())?;
    let riff = data.checked_add(HEADER_BYTES - 8).ok_or_else(too_long)?;
    let channels =
        u16::try_from(channels).map_err(|_| format!("{channels} channels are too many for WAV"))?;
    let bytes_per_sample = 2 * channels;
    let mut header = Vec::with_capacity(HEADER_BYTES as usize);
    header.extend(b"RIFF");
    header.extend(riff.to_le_bytes());
    header.extend(b"WAVEfmt ");
    header.extend(16_u32.to_le_bytes());
    header.extend(1_u16.to_le_bytes()); // PCM
    header.extend(channels.to_le_bytes());
    header.extend(samples_per_second.to_le_bytes());
    header.extend((samples_per_second * u32::from(bytes_per_sample)).to_le_bytes());
    header.extend(bytes_per_sample.to_le_bytes());
    header.extend(16_u16.to_le_bytes());
    header.extend(b"data");
    header.extend(data.to_le_bytes());
    Ok(header)
}

/// The format of a WAV file of 16-bit PCM, and where its samples are.
///
/// # Errors
/// When it is no such file; what is wrong, for display.
pub(crate) fn read(file: &[u8]) -> Result<(MediaFormat, Range<usize>), String> {
    let number = |at: usize, bytes: usize| -> Option<u32> {
        let of = file.get(at..at + bytes)?;
        Some(of.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
    };
    if file.get(..4) != Some(b"RIFF") || file.get(8..12) != Some(b"WAVE") {
        return Err("is no WAV file".to_owned());
    }
    let cut_off = || "is a WAV file that is cut off".to_owned();
    let (mut at, mut layout) = (12, None);
    loop {
        let name = file.get(at..at + 4).ok_or_else(cut_off)?;
        let length = number(at + 4, 4).ok_or_else(cut_off)? as usize;
        let begin = at + 8;
        match name {
            b"fmt " => {
                let part = |offset: usize, bytes: usize| number(begin + offset, bytes).ok_or_else(cut_off);
                let (kind, channels, rate, bits) = (part(0, 2)?, part(2, 2)?, part(4, 4)?, part(14, 2)?);
                // 0xFFFE names the kind further on; its first word is the same number.
                let kind = if kind == 0xFFFE { part(24, 2)? } else { kind };
                if (kind, bits) != (1, 16) || channels == 0 || rate == 0 {
                    return Err(format!(
                        "is a WAV file of kind {kind} with {bits} bits and {channels} channels; 16-bit PCM is read"
                    ));
                }
                layout = Some((rate, channels));
            }
            b"data" => {
                let (samples_per_second, channels) = layout.ok_or("is a WAV file without a format")?;
                let end = begin.checked_add(length).filter(|end| *end <= file.len());
                let end = end.ok_or_else(cut_off)?;
                let samples = (length as u64) / (2 * u64::from(channels));
                let whole = begin + (samples * 2 * u64::from(channels)) as usize;
                debug_assert!(whole <= end);
                let format = MediaFormat::Audio {
                    samples_per_second,
                    channels,
                    samples,
                };
                return Ok((format, begin..whole));
            }
            _ => {}
        }
        // Chunks are padded to whole words.
        at = begin
            .checked_add(length + length % 2)
            .filter(|next| *next <= file.len())
            .ok_or_else(cut_off)?;
    }
}
