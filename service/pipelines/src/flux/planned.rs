//! What the stages of a request ask of cuDNN, known from the configurations.

use ops::Planned;

use super::buffers::Buffers;
use super::model::FluxModel;
use super::stages::{DECODE, DENOISE, ENCODE_IMAGE, ENCODE_TEXT};
use crate::Request;
use crate::bounds::PIXELS_PER_TOKEN;

impl FluxModel {
    /// Shapes that a stage asks for on a card, first those that it asks for first. Pictures are decoded and encoded whole:
    /// a rung below finds out for itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let (width, height) = (image.width, image.height);
        let (dtype, tokens) = (self.precision.dtype, request.max_sequence_length as usize);
        let decode = |(h, w): (usize, usize)| match h * w {
            0 => Vec::new(),
            _ => self.vae.planned_to_decode((h, w), h, dtype),
        };
        match stage {
            ENCODE_TEXT => vec![
                self.clip.planned(self.clip_tokenizer.length(), dtype),
                self.t5.planned(tokens, dtype),
            ],
            ENCODE_IMAGE => match (&image.init_image, self.latent_sides(width, height)) {
                (None, _) | (_, (0, _) | (_, 0)) => Vec::new(),
                (Some(_), (h, w)) => self.vae.planned_to_encode((h, w), h, dtype),
            },
            DENOISE => {
                let picture = (width / PIXELS_PER_TOKEN) as usize * (height / PIXELS_PER_TOKEN) as usize;
                let mut planned = vec![Buffers::planned(&self.transformer, tokens + picture, dtype)];
                if request.preview {
                    // Half the size.
                    planned.extend(decode(self.latent_sides(width / 2, height / 2)));
                }
                planned
            }
            DECODE => decode(self.latent_sides(width, height)),
            _ => Vec::new(),
        }
    }
}
