//! Samples of sound as 16-bit integers.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use crate::rows::with_numbers;

/// Numbers of a task.
const GRAIN: usize = 1 << 15;

/// Numbers of -1 to 1, f32 of any shape, as 16-bit little-endian integers in their order, and whether all are finite:
/// clipped, times 32767, halves rounded to even. Synchronizes on a card.
///
/// # Errors
/// For another dtype; errors of the device.
pub fn pcm16(samples: &Tensor) -> Result<(Vec<u8>, bool)> {
    if samples.dtype() != DType::F32 {
        candle_core::bail!("samples of {:?}", samples.dtype());
    }
    let samples = samples.contiguous()?;
    if samples.elem_count() == 0 {
        return Ok((Vec::new(), true));
    }
    #[cfg(feature = "cuda")]
    if samples.device().is_cuda() {
        return crate::cuda::pcm16(&samples);
    }
    with_numbers(&samples, |numbers| {
        let mut bytes = vec![0; 2 * numbers.len()];
        let is_finite = bytes
            .par_chunks_mut(2 * GRAIN)
            .zip(numbers.par_chunks(GRAIN))
            .map(|(bytes, numbers)| {
                for (pair, number) in bytes.chunks_exact_mut(2).zip(numbers) {
                    let level = (number.clamp(-1.0, 1.0) * 32767.0).round_ties_even() as i16;
                    pair.copy_from_slice(&level.to_le_bytes());
                }
                numbers.iter().all(|number| number.is_finite())
            })
            .reduce(|| true, |a, b| a && b);
        Ok((bytes, is_finite))
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{here, random};

    #[test]
    fn samples_are_clipped_and_rounded_and_seen_to_be_finite() -> Result<()> {
        let levels = |numbers: &[f32]| -> Result<(Vec<i16>, bool)> {
            let samples = here(&Tensor::new(numbers, &Device::Cpu)?);
            let (bytes, is_finite) = pcm16(&samples)?;
            let level = |pair: &[u8; 2]| i16::from_le_bytes(*pair);
            Ok((bytes.as_chunks::<2>().0.iter().map(level).collect(), is_finite))
        };
        let (found, is_finite) = levels(&[0.0, 1.0, -1.5, 0.5, 1.0 / 32767.0, 0.6 / 32767.0, f32::MAX])?;
        assert_eq!(found, [0, 32767, -32767, 16384, 1, 1, 32767]);
        assert!(is_finite);
        for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!levels(&[0.0, 0.5, strange, 0.1])?.1);
        }
        // Every number of a long track, as the definition has it.
        let numbers = random(&[100_003], 1)?;
        let expected = numbers.to_vec1::<f32>()?;
        let expected: Vec<i16> = expected
            .iter()
            .map(|n| (n * 32767.0).round_ties_even() as i16)
            .collect();
        assert_eq!(levels(&numbers.to_vec1::<f32>()?)?, (expected, true));
        assert!(pcm16(&here(&numbers).to_dtype(DType::BF16)?).is_err());
        Ok(())
    }
}
