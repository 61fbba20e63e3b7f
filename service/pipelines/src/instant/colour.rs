//! The result of an instant model: one colour, derived from all fields of a request.

use model::MediaFormat;
use model::StageError;
use model::{HostTensor, HostType};
use model::{Medium, Request};
use model::{ValueShape, Values};

/// Channels of a latent: red, green, blue, and one that is zero.
pub(super) const CHANNELS: usize = 4;

/// Elements of a prompt's encoding.
const POOLED: usize = 4;

pub(super) type Colour = [u8; 3];

/// Names and shapes of a prompt's encodings.
pub(super) fn encoded_shapes(request: &Request) -> [ValueShape; 2] {
    let rows = request.max_sequence_length as usize;
    [
        ValueShape::new("pooled", vec![1, POOLED]),
        ValueShape::new("sequence", vec![1, rows, POOLED]),
    ]
}

/// The encodings of a prompt: some elements of its hash.
pub(super) fn encode(request: &Request) -> Values {
    let hash = blake3::hash(request.prompt.as_bytes());
    let pooled: Vec<f32> = hash
        .as_bytes()
        .iter()
        .take(POOLED)
        .map(|&byte| unit(byte))
        .collect();
    let rows = request.max_sequence_length as usize;
    let sequence: Vec<f32> = pooled.iter().copied().cycle().take(rows * POOLED).collect();
    let numbers = [pooled, sequence];
    let named = encoded_shapes(request).into_iter().zip(&numbers);
    named
        .map(|(value, numbers)| (value.name, host(value.shape, numbers)))
        .collect()
}

/// The colour derived from text, seed, steps and guidance; blended with `init`'s colour by `strength`.
pub(super) fn colour_of(text: &[(&str, &HostTensor)], request: &Request, init: Option<Colour>) -> Colour {
    let mut hasher = blake3::Hasher::new();
    for (name, tensor) in text {
        hasher.update(name.as_bytes()).update(&tensor.data);
    }
    hasher.update(&request.seed.to_le_bytes());
    hasher.update(&request.steps.to_le_bytes());
    hasher.update(&request.guidance.to_le_bytes());
    let hash = hasher.finalize();
    let drawn = hash.as_bytes();
    std::array::from_fn(|channel| match init {
        None => drawn[channel],
        Some(init) => {
            let (from, to) = (f32::from(init[channel]), f32::from(drawn[channel]));
            (from + (to - from) * request.strength.clamp(0.0, 1.0)).round() as u8
        }
    })
}

/// The mean colour of a request's source: of a picture, of all frames of a film; of a track, the colour whose channels sound as
/// loud.
pub(super) fn mean_of_start(medium: &Medium) -> Option<Colour> {
    if let Some(image) = medium.init_image() {
        return Some(mean_of_pixels(&image.rgb));
    }
    let clip = medium.init_clip()?;
    Some(match clip.format {
        MediaFormat::Audio { channels, .. } => mean_of_samples(&clip.data, channels.max(1) as usize),
        MediaFormat::Image { .. } | MediaFormat::Video { .. } => mean_of_pixels(&clip.data),
    })
}

fn mean_of_pixels(rgb: &[u8]) -> Colour {
    let pixels = (rgb.len() / 3).max(1) as u64;
    std::array::from_fn(|channel| {
        let channel = rgb.iter().skip(channel).step_by(3);
        let sum: u64 = channel.map(|&byte| u64::from(byte)).sum();
        (sum / pixels) as u8
    })
}

fn mean_of_samples(data: &[u8], channels: usize) -> Colour {
    let samples = data.as_chunks::<2>().0;
    std::array::from_fn(|channel| {
        let of_channel = samples.iter().skip(channel % channels).step_by(channels);
        let (sum, count) = of_channel.fold((0_i64, 0_i64), |(sum, count), &sample| {
            (sum + i64::from(i16::from_le_bytes(sample)), count + 1)
        });
        (sum / count.max(1) / 100 + 128).clamp(0, 255) as u8
    })
}

/// The sample that a channel of a colour sounds as.
pub(super) fn loudness_of(channel: u8) -> i16 {
    (i16::from(channel) - 128) * 100
}

/// A latent that decodes to this colour.
pub(super) fn latent_of(colour: Colour, shape: Vec<usize>) -> HostTensor {
    let in_channel = shape[2..].iter().product::<usize>();
    let channels = [unit(colour[0]), unit(colour[1]), unit(colour[2]), 0.0];
    let numbers: Vec<f32> = channels
        .iter()
        .flat_map(|&value| std::iter::repeat_n(value, in_channel))
        .collect();
    host(shape, &numbers)
}

/// The colour of a latent.
///
/// # Errors
/// [`StageError::BadInput`] if it is not of this family.
pub(super) fn read_latent(latent: &HostTensor) -> Result<Colour, StageError> {
    let in_channel: usize = latent.shape.iter().skip(2).product();
    if latent.dtype != HostType::F32 || latent.data.len() != CHANNELS * in_channel * 4 || in_channel == 0 {
        return Err(StageError::BadInput(
            "a latent whose bytes do not fit its shape and dtype".to_owned(),
        ));
    }
    let first_of = |channel: usize| {
        let at = channel * in_channel * 4;
        let bytes: [u8; 4] = std::array::from_fn(|i| latent.data[at + i]);
        (f32::from_le_bytes(bytes) * 255.0).round() as u8
    };
    Ok([first_of(0), first_of(1), first_of(2)])
}

/// A byte scaled to 0..1.
fn unit(byte: u8) -> f32 {
    f32::from(byte) / 255.0
}

fn host(shape: Vec<usize>, numbers: &[f32]) -> HostTensor {
    let data = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    HostTensor {
        dtype: HostType::F32,
        shape,
        data,
    }
}
