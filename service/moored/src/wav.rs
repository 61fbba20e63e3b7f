//! The header of a WAV file.

/// Bytes of the header in front of the samples.
const HEADER_BYTES: u32 = 44;

/// The header of a track of 16-bit samples: RIFF, as Microsoft's "Multimedia Programming Interface and Data Specifications
/// 1.0" has it.
///
/// # Errors
/// When the samples exceed what the format can say: 4 GiB.
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
