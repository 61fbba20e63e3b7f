//! What the stages of a request ask of cuDNN, known from the configurations.

use ops::Planned;

use super::buffers::Buffers;
use super::model::{TEXT_ENCODER, ZImageModel};
use super::stages::{DECODE, DENOISE, ENCODE_IMAGE, ENCODE_TEXT};
use crate::Request;

impl ZImageModel {
    /// Shapes that a stage asks for on a card, first those that it asks for first. Pictures are decoded and encoded whole:
    /// a rung below finds out for itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let (width, height) = (image.width, image.height);
        let dtype = self.precision.dtype;
        let decode = |(h, w): (usize, usize)| match h * w {
            0 => Vec::new(),
            _ => self.vae.planned_to_decode((h, w), h, dtype),
        };
        match stage {
            ENCODE_TEXT => {
                let is_quantized = self.components.is_quantized(TEXT_ENCODER);
                let planned = self.text.planned(self.text_tokens(request), is_quantized, dtype);
                planned.into_iter().collect()
            }
            ENCODE_IMAGE => match (&image.init_image, self.latent_sides(width, height)) {
                (None, _) | (_, (0, _) | (_, 0)) => Vec::new(),
                (Some(_), (h, w)) => self.vae.planned_to_encode((h, w), h, dtype),
            },
            DENOISE => {
                let lengths = self.lengths(image, self.text_tokens(request));
                let (picture, text, all) = (lengths.padded_picture(), lengths.padded_text(), lengths.all());
                let refine = [(text, text), (picture, all)];
                let refiners = refine
                    .into_iter()
                    .filter(|_| self.transformer.n_refiner_layers > 0);
                let mut planned: Vec<Planned> = Vec::new();
                for (tokens, of) in refiners.chain([(all, all)]) {
                    if tokens > 0 {
                        planned.push(Buffers::planned(&self.transformer, tokens, of, dtype));
                    }
                }
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
