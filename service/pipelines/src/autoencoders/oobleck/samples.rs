//! Samples as numbers and as 16-bit integers.

use candle_core::{Device, Tensor};
use model::StageError;
use rayon::prelude::*;

use crate::autoencoders::source::finite;

/// Samples `[n, channels]` of -1 to 1, f32, as 16-bit little-endian integers, channels interleaved
/// ([`crate::MediaFormat::Audio`]): clipped, times 32767, rounded to the nearest.
///
/// # Errors
/// [`StageError::NotFinite`]; errors of the device.
pub fn pcm16_from_samples(samples: &Tensor) -> Result<Vec<u8>, StageError> {
    let (bytes, is_finite) = ops::pcm16(samples)?;
    finite(is_finite)?;
    Ok(bytes)
}

/// 16-bit little-endian samples with interleaved channels as `[n, channels]`, f32 in host memory: divided by 32768.
///
/// # Errors
/// [`StageError::BadInput`] for bytes that are no whole samples of all channels.
pub fn samples_from_pcm16(bytes: &[u8], channels: usize) -> Result<Tensor, StageError> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    if channels == 0 || !rest.is_empty() || !pairs.len().is_multiple_of(channels) {
        let problem = format!("{} bytes of 16-bit samples of {channels} channels", bytes.len());
        return Err(StageError::BadInput(problem));
    }
    let number = |pair: &[u8; 2]| f32::from(i16::from_le_bytes(*pair)) / 32768.0;
    let numbers: Vec<f32> = pairs.par_iter().map(number).collect();
    Ok(Tensor::from_vec(
        numbers,
        (pairs.len() / channels, channels),
        &Device::Cpu,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_clipped_and_rounded() -> Result<(), StageError> {
        let samples = Tensor::new(
            &[[0f32, 1.0], [-1.5, 0.5], [1.0 / 32767.0, 0.6 / 32767.0]],
            &Device::Cpu,
        )?;
        let levels: Vec<i16> = pcm16_from_samples(&samples)?
            .as_chunks::<2>()
            .0
            .iter()
            .map(|pair| i16::from_le_bytes(*pair))
            .collect();
        assert_eq!(levels, [0, 32767, -32767, 16384, 1, 1]);
        let broken = Tensor::new(&[[f32::NAN, 0.0]], &Device::Cpu)?;
        assert!(matches!(
            pcm16_from_samples(&broken),
            Err(StageError::NotFinite { .. })
        ));
        Ok(())
    }

    #[test]
    fn bytes_are_whole_samples_of_all_channels() -> Result<(), StageError> {
        let bytes: Vec<u8> = [-32768i16, 16384, 1, 0]
            .iter()
            .flat_map(|level| level.to_le_bytes())
            .collect();
        let samples = samples_from_pcm16(&bytes, 2)?;
        assert_eq!(samples.to_vec2::<f32>()?, [[-1.0, 0.5], [1.0 / 32768.0, 0.0]]);
        for (length, channels) in [(7, 1), (6, 2), (8, 0)] {
            let refused = samples_from_pcm16(&bytes[..length], channels);
            assert!(matches!(refused, Err(StageError::BadInput(_))));
        }
        Ok(())
    }
}
