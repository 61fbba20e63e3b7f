//! What a client asks for, in types that no protocol is part of.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::media::MediaFormat;

/// A picture that a client brings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitImage {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// RGB, 8 bits each, row-major.
    pub rgb: Bytes,
}

/// One result to generate. Everything is resolved: defaults are filled in before this exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The prompt.
    pub prompt: String,
    /// Denoising steps.
    pub steps: u32,
    /// Guidance scale; ignored by models without it.
    pub guidance: f32,
    /// Seed of the starting noise.
    pub seed: u64,
    /// Tokens of the prompt; a family may pad to this length.
    pub max_sequence_length: u32,
    /// How much of the schedule to run from what is brought to start from, over 0 to 1.
    pub strength: f32,
    /// Whether previews are wanted while denoising.
    pub preview: bool,
    /// Whether it starts from values that are brought to its sampling, as an earlier job gave them, instead of from noise.
    pub from_values: bool,
    /// What is generated.
    pub medium: Medium,
}

/// What is generated: a family takes the kind that is its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Medium {
    /// A picture.
    Image(Image),
    /// A film.
    Video(Video),
    /// A track.
    Audio(Audio),
}

/// A picture to generate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Image to image: where to start from; already of `width` x `height`.
    pub init_image: Option<InitImage>,
}

/// A film to generate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Video {
    /// Pixels across.
    pub width: u32,
    /// Pixels down.
    pub height: u32,
    /// Frames in all.
    pub frames: u32,
    /// Frames a second.
    pub frames_per_second: f32,
    /// Image to video: the first frame; already of `width` x `height`.
    pub init_image: Option<InitImage>,
}

/// A track to generate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Audio {
    /// Length in seconds.
    pub seconds: f32,
    /// What is sung; empty: nothing.
    pub lyrics: String,
}

impl Medium {
    /// `image`, `video`, `audio`.
    pub fn name(&self) -> &'static str {
        match self {
            Medium::Image(_) => "image",
            Medium::Video(_) => "video",
            Medium::Audio(_) => "audio",
        }
    }

    /// Pixels across and down; `None` for a track.
    pub fn size(&self) -> Option<(u32, u32)> {
        match self {
            Medium::Image(image) => Some((image.width, image.height)),
            Medium::Video(video) => Some((video.width, video.height)),
            Medium::Audio(_) => None,
        }
    }

    /// Whether a whole result of this format is what is asked for. The length of a track need not be exact.
    pub fn is_made_as(&self, format: &MediaFormat) -> bool {
        match (self, format) {
            (Medium::Image(image), MediaFormat::Image { width, height }) => {
                (image.width, image.height) == (*width, *height)
            }
            (
                Medium::Video(video),
                MediaFormat::Video {
                    width,
                    height,
                    frames,
                    ..
                },
            ) => (video.width, video.height, video.frames) == (*width, *height, *frames),
            (
                Medium::Audio(_) | Medium::Video(_),
                MediaFormat::Audio {
                    samples_per_second, ..
                },
            ) => *samples_per_second > 0,
            _ => false,
        }
    }

    /// The picture to start from.
    pub fn init_image(&self) -> Option<&InitImage> {
        match self {
            Medium::Image(image) => image.init_image.as_ref(),
            Medium::Video(video) => video.init_image.as_ref(),
            Medium::Audio(_) => None,
        }
    }
}

impl Request {
    /// A request of defaults: no prompt, seed 0, nothing to start from, no previews.
    pub fn of(medium: Medium, steps: u32, guidance: f32, max_sequence_length: u32) -> Request {
        Request {
            prompt: String::new(),
            steps,
            guidance,
            seed: 0,
            max_sequence_length,
            strength: 1.0,
            preview: false,
            from_values: false,
            medium,
        }
    }

    /// The same with the seed of item `item` of several.
    #[must_use]
    pub fn of_item(&self, item: u32) -> Request {
        let seed = self.seed.wrapping_add(u64::from(item));
        Request { seed, ..self.clone() }
    }

    /// The picture that is asked for.
    ///
    /// # Errors
    /// When it is a request for another medium.
    pub fn image(&self) -> Result<&Image, RequestError> {
        match &self.medium {
            Medium::Image(image) => Ok(image),
            other => Err(RequestError::other_medium(other, "image")),
        }
    }

    /// Bytes of the pictures that it brings along.
    pub fn input_bytes(&self) -> u64 {
        let image = self.medium.init_image();
        image.map_or(0, |image| image.rgb.len() as u64)
    }
}

impl Image {
    /// A picture of this size, from nothing.
    pub fn of(width: u32, height: u32) -> Image {
        Image {
            width,
            height,
            init_image: None,
        }
    }
}

impl InitImage {
    /// The nearest pixels at another size: what a smaller request can be planned with.
    pub(crate) fn resampled(&self, width: u32, height: u32) -> InitImage {
        let from = |to: u32, to_side: u32, side: u32| {
            (u64::from(to) * u64::from(side) / u64::from(to_side.max(1))) as usize
        };
        let row_bytes = self.width as usize * 3;
        let pixels = (0..height).flat_map(|y| {
            let row = from(y, height, self.height) * row_bytes;
            (0..width).flat_map(move |x| {
                let at = row + from(x, width, self.width) * 3;
                (at..at + 3).map(|byte| self.rgb.get(byte).copied().unwrap_or_default())
            })
        });
        InitImage {
            width,
            height,
            rgb: pixels.collect(),
        }
    }
}

/// A field of a request that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct RequestError {
    /// The field, as the public API names it.
    pub field: String,
    /// What is wrong with it and what would be right.
    pub problem: String,
}

impl RequestError {
    /// Of a field and its problem.
    pub fn new(field: impl Into<String>, problem: impl Into<String>) -> RequestError {
        RequestError {
            field: field.into(),
            problem: problem.into(),
        }
    }

    /// A request of one medium to a model of another.
    pub fn other_medium(asked: &Medium, made: &str) -> RequestError {
        let problem = format!(
            "generates {made}, and {} was asked for; `moored models` lists what each generates",
            asked.name()
        );
        RequestError::new("model", problem)
    }
}
