//! Tracks supplied by clients, in the rate and channels of the model.

use candle_core::{Device, Tensor};
use rubato::audioadapter_buffers::direct::InterleavedSlice;
use rubato::{Fft, FixedSync, Resampler as _};

use crate::autoencoders::oobleck::samples_from_pcm16;
use crate::{Clip, MediaFormat, RequestError, StageError};

/// Rates of tracks, in samples per second. Below, little of the music remains; above, no recording has such a rate.
const RATES: std::ops::RangeInclusive<u32> = 8_000..=384_000;
/// Most seconds of a supplied track: as long as the longest track that is generated.
const MAX_SECONDS: u64 = super::tasks::MAX_SECONDS as u64;
/// Samples that are resampled in one call.
const CHUNK: usize = 1024;
/// Seconds of a reference whose timbre is taken, and of each of its three parts.
const TIMBRE_SECONDS: usize = 30;
const PART_SECONDS: usize = 10;

/// Why a clip supplied as `field` is refused; `None` if it can be used.
pub(super) fn problem(field: &str, clip: &Clip) -> Option<RequestError> {
    let refused = |problem: String| Some(RequestError::new(field, problem));
    let MediaFormat::Audio {
        samples_per_second,
        channels,
        samples,
    } = clip.format
    else {
        return refused("is media of another kind: name the id of an uploaded track".to_owned());
    };
    if !(1..=2).contains(&channels) {
        return refused(format!("has {channels} channels; 1 or 2 are expected"));
    }
    if !RATES.contains(&samples_per_second) {
        let (least, most) = (RATES.start(), RATES.end());
        return refused(format!(
            "has {samples_per_second} samples per second; {least} to {most} are expected"
        ));
    }
    if samples == 0 {
        return refused("has no samples: upload a track with sound".to_owned());
    }
    if samples > MAX_SECONDS * u64::from(samples_per_second) {
        let seconds = samples / u64::from(samples_per_second);
        return refused(format!(
            "is {seconds} s long; {MAX_SECONDS} s are the most: cut out the part that matters"
        ));
    }
    if !clip.is_whole() {
        return refused(format!(
            "has {} bytes for {samples} samples of {channels} channels",
            clip.data.len()
        ));
    }
    None
}

/// Samples per channel of a clip at this rate.
pub(super) fn samples_at(clip: &Clip, rate: u32) -> usize {
    match clip.format {
        MediaFormat::Audio {
            samples_per_second,
            samples,
            ..
        } => {
            let at_rate = u128::from(samples) * u128::from(rate);
            usize::try_from(at_rate.div_ceil(u128::from(samples_per_second.max(1)))).unwrap_or(usize::MAX)
        }
        _ => 0,
    }
}

/// The samples of a clip at this rate, `[samples, channels]` of -1 to 1, f32 in host memory. Mono is repeated for two channels;
/// for one channel the mean of two is used.
///
/// # Errors
/// [`StageError::BadInput`] for a clip that is not audio.
pub(super) fn at_rate(clip: &Clip, rate: u32, channels: usize) -> Result<Tensor, StageError> {
    let MediaFormat::Audio {
        samples_per_second,
        channels: of_clip,
        ..
    } = clip.format
    else {
        return Err(StageError::BadInput("a clip that is no track".to_owned()));
    };
    let of_clip = of_clip as usize;
    let samples = samples_from_pcm16(&clip.data, of_clip)?;
    let samples = match samples_per_second == rate {
        true => samples,
        false => resampled(&samples, (samples_per_second, rate), samples_at(clip, rate))?,
    };
    Ok(match (of_clip, channels) {
        (found, wanted) if found == wanted => samples,
        (_, 1) => samples.mean_keepdim(1)?,
        (_, wanted) => samples.narrow(1, 0, 1)?.repeat((1, wanted))?,
    })
}

/// Samples `[n, channels]` in another rate: `length` samples per channel.
fn resampled(samples: &Tensor, (from, to): (u32, u32), length: usize) -> Result<Tensor, StageError> {
    let (count, channels) = samples.dims2()?;
    let broken = |error: &dyn std::fmt::Display| {
        StageError::BadInput(format!(
            "a track of {from} samples per second cannot be resampled: {error}"
        ))
    };
    let numbers = samples.flatten_all()?.to_vec1::<f32>()?;
    let (from, to) = (from as usize, to as usize);
    let mut resampler =
        Fft::<f32>::new(from, to, CHUNK, channels, FixedSync::Both).map_err(|error| broken(&error))?;
    let input = InterleavedSlice::new(&numbers, channels, count).map_err(|error| broken(&error))?;
    let output = resampler
        .process_all(&input, count, None)
        .map_err(|error| broken(&error))?;
    let mut numbers = output.take_data();
    numbers.resize(length * channels, 0.0);
    Ok(Tensor::from_vec(numbers, (length, channels), &Device::Cpu)?)
}

/// Samples `[n, channels]` with silence after them up to whole latent frames of `hop` samples.
///
/// # Errors
/// Errors of tensors.
pub(super) fn in_whole_frames(samples: &Tensor, hop: usize) -> Result<Tensor, StageError> {
    let count = samples.dim(0)?;
    match count.next_multiple_of(hop) - count {
        0 => Ok(samples.clone()),
        missing => Ok(samples.pad_with_zeros(0, 0, missing)?),
    }
}

/// The three parts of a reference from which its timbre is taken: from its beginning, from a third on, and its end. A reference
/// that is shorter than the three parts together is repeated (`prepare_reference_audio_latents`).
///
/// # Errors
/// Errors of tensors.
pub(super) fn parts_of_timbre(samples: &Tensor, rate: u32) -> Result<Tensor, StageError> {
    let rate = rate as usize;
    let (all, part) = (TIMBRE_SECONDS * rate, PART_SECONDS * rate);
    let count = samples.dim(0)?;
    let samples = match count < all {
        true => samples.repeat((all.div_ceil(count.max(1)), 1))?,
        false => samples.clone(),
    };
    let count = samples.dim(0)?;
    let parts = [0, count / 3, count - part].map(|first| samples.narrow(0, first, part));
    let parts = parts.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&parts, 0)?)
}

/// Samples of a reference from which its timbre is taken.
pub(super) fn samples_of_timbre(rate: u32) -> usize {
    3 * PART_SECONDS * rate as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clip(rate: u32, channels: u32, levels: &[i16]) -> Clip {
        let data: Vec<u8> = levels.iter().flat_map(|level| level.to_le_bytes()).collect();
        Clip {
            format: MediaFormat::Audio {
                samples_per_second: rate,
                channels,
                samples: levels.len() as u64 / u64::from(channels),
            },
            data: data.into(),
        }
    }

    #[test]
    fn clips_that_cannot_be_used_are_refused() {
        let whole = clip(8_000, 2, &[1, 2]);
        assert_eq!(problem("init_media_id", &whole), None);
        let data = Vec::new().into();
        assert_eq!(
            problem("init_media_id", &Clip { data, ..whole }),
            None,
            "to be planned"
        );
        let long = Clip {
            format: MediaFormat::Audio {
                samples_per_second: 8_000,
                channels: 1,
                samples: 8_000 * 10_800,
            },
            data: Vec::new().into(),
        };
        let mut cut = clip(8_000, 1, &[1, 2]);
        cut.data = cut.data.slice(..3);
        for (clip, word) in [
            (clip(7_500, 1, &[1]), "7500 samples per second"),
            (clip(48_000, 8, &[0; 8]), "8 channels"),
            (clip(48_000, 2, &[]), "no samples"),
            (long, "10800 s"),
            (cut, "3 bytes"),
        ] {
            let refused = problem("init_media_id", &clip).expect("a refusal");
            assert!(refused.problem.contains(word), "{refused}");
        }
    }

    #[test]
    fn resampling_preserves_a_sine_tone() -> Result<(), StageError> {
        let tone =
            |rate: u32, at: usize| (std::f64::consts::TAU * 440.0 * at as f64 / f64::from(rate)).sin() * 0.5;
        let levels: Vec<i16> = (0..22_050)
            .map(|at| (tone(44_100, at) * 32768.0) as i16)
            .collect();
        let found = at_rate(&clip(44_100, 1, &levels), 48_000, 2)?;
        assert_eq!(found.dims(), [24_000, 2]);
        let found = found.to_vec2::<f32>()?;
        // Away from the edges, where the filter has all samples. The delay is no whole number of samples: about half a sample
        // remains, in which this tone changes by less than 0.015.
        let worst = (2_000..22_000).map(|at| {
            let expected = tone(48_000, at) as f32;
            (found[at][0] - expected)
                .abs()
                .max((found[at][1] - expected).abs())
        });
        let worst = worst.fold(0.0, f32::max);
        assert!(worst < 0.02, "{worst}");
        Ok(())
    }
}
