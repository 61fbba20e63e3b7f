//! What the stages of a request ask of cuDNN, known from the configurations.

use ops::Planned;

use super::bounds::PIXELS_PER_TOKEN;
use super::buffers::Buffers;
use super::model::FluxModel;
use crate::{ImageRequest, StageKind};

impl FluxModel {
    /// Shapes that a stage asks for on a card, first those that it asks for first. Pictures are decoded and encoded whole:
    /// a rung below finds out for itself.
    pub(super) fn planned_of(&self, kind: StageKind, request: &ImageRequest) -> Vec<Planned> {
        let &ImageRequest {
            width,
            height,
            max_sequence_length,
            ..
        } = request;
        let (dtype, tokens) = (self.precision.dtype, max_sequence_length as usize);
        let decode = |(h, w): (usize, usize)| match h * w {
            0 => Vec::new(),
            _ => self.vae.planned_to_decode((h, w), h, dtype),
        };
        match kind {
            StageKind::EncodeText => vec![
                self.clip.planned(self.clip_tokenizer.length(), dtype),
                self.t5.planned(tokens, dtype),
            ],
            StageKind::EncodeImage => match (&request.init_image, self.latent_sides(width, height)) {
                (None, _) | (_, (0, _) | (_, 0)) => Vec::new(),
                (Some(_), (h, w)) => self.vae.planned_to_encode((h, w), h, dtype),
            },
            StageKind::Denoise => {
                let picture = (width / PIXELS_PER_TOKEN) as usize * (height / PIXELS_PER_TOKEN) as usize;
                let mut planned = vec![Buffers::planned(&self.transformer, tokens + picture, dtype)];
                if request.preview {
                    // Half the size.
                    planned.extend(decode(self.latent_sides(width / 2, height / 2)));
                }
                planned
            }
            StageKind::Decode => decode(self.latent_sides(width, height)),
        }
    }
}
