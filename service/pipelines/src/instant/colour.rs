//! What an instant model generates: one colour, which follows from all that a request says.

use crate::family::{EncodedText, StageError};
use crate::host::{HostTensor, HostType};
use crate::request::{ImageRequest, InitImage};

/// Channels of a latent: red, green, blue, and one that stays zero.
pub(super) const CHANNELS: usize = 4;

/// Pixels of a picture for each number of a latent, across and down.
pub(super) const PIXELS_PER_LATENT: usize = 8;

/// Numbers that a prompt becomes.
const POOLED: usize = 4;

pub(super) type Colour = [u8; 3];

/// The encodings of a prompt: a few numbers of its hash.
pub(super) fn encode(request: &ImageRequest) -> EncodedText {
    let hash = blake3::hash(request.prompt.as_bytes());
    let pooled: Vec<f32> = hash
        .as_bytes()
        .iter()
        .take(POOLED)
        .map(|&byte| unit(byte))
        .collect();
    let rows = request.max_sequence_length as usize;
    let sequence: Vec<f32> = pooled.iter().copied().cycle().take(rows * POOLED).collect();
    EncodedText {
        tensors: vec![
            ("pooled".to_owned(), host(vec![1, POOLED], &pooled)),
            ("sequence".to_owned(), host(vec![1, rows, POOLED], &sequence)),
        ],
    }
}

/// The colour that text, seed, steps and guidance lead to; from `init`'s colour on as far as `strength` says.
pub(super) fn colour_of(text: &EncodedText, request: &ImageRequest, init: Option<Colour>) -> Colour {
    let mut hasher = blake3::Hasher::new();
    for (name, tensor) in &text.tensors {
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

/// The mean colour of a picture.
pub(super) fn mean_of(image: &InitImage) -> Colour {
    let pixels = (image.rgb.len() / 3).max(1) as u64;
    std::array::from_fn(|channel| {
        let sum: u64 = image
            .rgb
            .iter()
            .skip(channel)
            .step_by(3)
            .map(|&byte| u64::from(byte))
            .sum();
        (sum / pixels) as u8
    })
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

/// The colour of a latent, and the size of its picture.
///
/// # Errors
/// [`StageError::BadInput`] if it is not of this family's making.
pub(super) fn read_latent(latent: &HostTensor) -> Result<(Colour, u32, u32), StageError> {
    let [1, CHANNELS, rows, columns] = latent.shape[..] else {
        return Err(StageError::BadInput(format!(
            "a latent of shape {:?} where [1, {CHANNELS}, height / 8, width / 8] is expected",
            latent.shape
        )));
    };
    let in_channel = rows * columns;
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
    let size = |numbers: usize| (numbers * PIXELS_PER_LATENT) as u32;
    Ok(([first_of(0), first_of(1), first_of(2)], size(columns), size(rows)))
}

/// A picture of one colour: RGB, 8 bits each.
pub(super) fn fill(colour: Colour, width: u32, height: u32) -> Vec<u8> {
    colour.repeat(width as usize * height as usize)
}

/// A byte as a number between 0 and 1.
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
