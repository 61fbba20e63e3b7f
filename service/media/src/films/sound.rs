//! The sound of a film: samples to AAC-LC by syom, in packets of 1024 samples.
//!
//! A packet is heard only with the one after it, so the encoder gives one more than there are samples for: what is decoded of the
//! first is left out by the file's edit list ([`EncodedSound::priming`]), and so is the silence that fills the last.

use bytes::Bytes;
use syom::{AacError, EncodeOptions, Encoder};

use super::FilmError;
use crate::tracks::TrackFormat;
use crate::tracks::in_order::InOrder;

/// Samples of each channel in a packet.
pub(super) const PACKET_SAMPLES: u32 = 1024;
/// Bits a second of each channel: where music and speech are hardly told from the original.
const MOST_BITS_PER_SECOND: u32 = 96_000;
/// Bits of a sample at low rates. AAC allows 6; near that the encoder has no choice left, and the sound gets worse.
const MOST_BITS_OF_SAMPLE: u32 = 4;

/// The sound of a film that is being encoded, from pieces in any order. It holds the encoded packets, and the samples of pieces that
/// arrived before earlier ones.
pub struct FilmSound {
    format: TrackFormat,
    encoder: Encoder,
    pieces: InOrder,
    packets: Vec<Bytes>,
    packet_bytes: u64,
}

/// The whole sound of a film.
pub(super) struct EncodedSound {
    pub(super) format: TrackFormat,
    pub(super) packets: Vec<Bytes>,
    /// The configuration that a decoder needs (AudioSpecificConfig of ISO/IEC 14496-3).
    pub(super) configuration: Vec<u8>,
    /// Decoded samples before the first sample of the film.
    pub(super) priming: u32,
    pub(super) bits_per_second: u32,
}

impl FilmSound {
    /// Begins the sound of a film.
    ///
    /// # Errors
    /// When AAC has no such rate or channels.
    pub fn new(format: TrackFormat) -> Result<FilmSound, FilmError> {
        let options = EncodeOptions::raw()
            .with_bitrate_bps(bits_per_second(&format))
            .with_lookahead(true);
        let encoder = Encoder::new(format.samples_per_second, format.channels as usize, &options);
        Ok(FilmSound {
            format,
            encoder: encoder.map_err(failed)?,
            pieces: InOrder::new(format),
            packets: Vec::new(),
            packet_bytes: 0,
        })
    }

    /// Encodes samples from number `first` on: 16 bits, little-endian, channels interleaved; once all earlier samples have been
    /// added. Samples that were added before are skipped.
    ///
    /// # Errors
    /// When these are not whole samples of the sound, or the encoder fails.
    pub fn add(&mut self, first: u64, samples: &Bytes) -> Result<(), FilmError> {
        for samples in self.pieces.add(first, samples).map_err(FilmError::Sound)? {
            self.encode(&samples)?;
        }
        Ok(())
    }

    fn encode(&mut self, samples: &[u8]) -> Result<(), FilmError> {
        let channels = self.format.channels as usize;
        let samples = samples.as_chunks::<2>().0;
        let of_channel = |channel: usize| {
            let own = samples.iter().skip(channel).step_by(channels);
            own.map(|&bytes| f32::from(i16::from_le_bytes(bytes)) / 32768.0)
                .collect()
        };
        let planes: Vec<Vec<f32>> = (0..channels).map(of_channel).collect();
        let planes: Vec<&[f32]> = planes.iter().map(Vec::as_slice).collect();
        let (packets, bytes) = (&mut self.packets, &mut self.packet_bytes);
        let encoded = self.encoder.feed(&planes, |packet| {
            packets.push(Bytes::copy_from_slice(packet.payload));
            *bytes += packet.payload.len() as u64;
            Ok(())
        });
        encoded.map(|_| ()).map_err(failed)
    }

    /// Bytes of memory that it holds.
    pub fn bytes(&self) -> u64 {
        self.packet_bytes + self.pieces.waiting_bytes()
    }

    /// Whether every sample has been added.
    pub fn is_complete(&self) -> bool {
        self.pieces.is_complete()
    }

    /// The packets of the whole sound.
    pub(super) fn finish(mut self) -> Result<EncodedSound, FilmError> {
        if !self.is_complete() {
            return Err(FilmError::Container("samples are missing".to_owned()));
        }
        let packets = &mut self.packets;
        let finished = self.encoder.finish(|packet| {
            packets.push(Bytes::copy_from_slice(packet.payload));
            Ok(())
        });
        let priming = finished.map_err(failed)?.priming;
        Ok(EncodedSound {
            format: self.format,
            configuration: self.encoder.asc().to_vec(),
            packets: self.packets,
            priming: u32::try_from(priming).unwrap_or(PACKET_SAMPLES),
            bits_per_second: bits_per_second(&self.format),
        })
    }
}

fn bits_per_second(format: &TrackFormat) -> u32 {
    let most = format.samples_per_second.saturating_mul(MOST_BITS_OF_SAMPLE);
    most.min(MOST_BITS_PER_SECOND).saturating_mul(format.channels)
}

fn failed(problem: AacError) -> FilmError {
    FilmError::SoundEncoder(problem.to_string())
}
