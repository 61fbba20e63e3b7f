//! Conversion of an instant model's request to media formats, latents, and bytes.

use model::{Audio, Image, Medium, Video};
use model::{MediaFormat, Sound};

use super::colour::CHANNELS;

/// Pixels per latent element along each axis.
const PIXELS_PER_LATENT: usize = 8;

/// Latent elements per second of a track.
const LATENTS_PER_SECOND: f32 = 10.0;

/// Samples per latent element of a track.
const SAMPLES_PER_LATENT: u64 = 4_800;

/// Samples per second of a track, and of the sound of a video.
const SAMPLES_PER_SECOND: u32 = 48_000;

/// Shape of the latent of a request: `[1, channels, height / 8, width / 8]`, with frames before the height for a
/// video, or tenths of a second for a track.
pub(super) fn latent_shape(medium: &Medium) -> Vec<usize> {
    let numbers = |pixels: u32| pixels as usize / PIXELS_PER_LATENT;
    match medium {
        Medium::Image(image) => vec![1, CHANNELS, numbers(image.height), numbers(image.width)],
        Medium::Video(video) => {
            let frames = video.frames as usize;
            vec![1, CHANNELS, frames, numbers(video.height), numbers(video.width)]
        }
        Medium::Audio(audio) => vec![1, CHANNELS, tenths(audio)],
    }
}

fn tenths(audio: &Audio) -> usize {
    (audio.seconds * LATENTS_PER_SECOND).round() as usize
}

/// The medium of a latent of this shape, with the other fields of `defaults`; `None` if there is none.
pub(super) fn medium_of(shape: &[usize], defaults: &Medium) -> Option<Medium> {
    let pixels = |numbers: usize| u32::try_from(numbers.checked_mul(PIXELS_PER_LATENT)?).ok();
    match (defaults, shape) {
        (Medium::Image(_), &[1, CHANNELS, height, width]) => {
            Some(Medium::Image(Image::of(pixels(width)?, pixels(height)?)))
        }
        (Medium::Video(video), &[1, CHANNELS, frames, height, width]) => Some(Medium::Video(Video {
            width: pixels(width)?,
            height: pixels(height)?,
            frames: u32::try_from(frames).ok()?,
            init_image: None,
            init_video: None,
            ..video.clone()
        })),
        (Medium::Audio(audio), &[1, CHANNELS, tenths]) => Some(Medium::Audio(Audio {
            seconds: tenths as f32 / LATENTS_PER_SECOND,
            init_audio: None,
            ..audio.clone()
        })),
        _ => None,
    }
}

/// The sound of a video: as long as its frames, to the nearest sample.
pub(super) fn sound_of(video: &Video) -> Sound {
    let samples_per_second = SAMPLES_PER_SECOND;
    let seconds = f64::from(video.frames) / f64::from(video.frames_per_second);
    Sound {
        samples_per_second,
        channels: 2,
        samples: (seconds * f64::from(samples_per_second)).round() as u64,
    }
}

/// The format of the result, of a video without its sound.
pub(super) fn format_of(medium: &Medium) -> MediaFormat {
    match medium {
        Medium::Image(image) => MediaFormat::Image {
            width: image.width,
            height: image.height,
        },
        Medium::Video(video) => video.format(None),
        Medium::Audio(audio) => MediaFormat::Audio {
            samples_per_second: SAMPLES_PER_SECOND,
            channels: 2,
            samples: tenths(audio) as u64 * SAMPLES_PER_LATENT,
        },
    }
}

/// The size of the result in words: `64x64`, `64x64 25 frames`, `12.5 s`.
pub(super) fn content_of(medium: &Medium) -> String {
    match medium {
        Medium::Image(image) => format!("{}x{}", image.width, image.height),
        Medium::Video(video) => format!("{}x{} {} frames", video.width, video.height, video.frames),
        Medium::Audio(audio) => format!("{} s", audio.seconds),
    }
}

/// The unit count that scratch is proportional to: pixels, or samples.
pub(super) fn units_of(medium: &Medium) -> u64 {
    match format_of(medium) {
        MediaFormat::Audio { samples, .. } => samples,
        format => format.bytes().unwrap_or(u64::MAX) / 3,
    }
}
