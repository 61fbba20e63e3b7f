//! What the stages of a request ask of cuDNN, known from the configurations.

use ops::Planned;

use super::buffers::Buffers;
use super::model::FluxModel;
use super::stages::{DENOISE, ENCODE_TEXT};
use crate::Request;
use crate::autoencoder_kl::plan::{DECODE, ENCODE_IMAGE};
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
        let autoencoder = self.autoencoder();
        match stage {
            ENCODE_TEXT => vec![
                self.clip.planned(self.clip_tokenizer.length(), dtype),
                self.t5.planned(tokens, dtype),
            ],
            ENCODE_IMAGE => autoencoder.planned_to_encode(image),
            DENOISE => {
                let picture = (width / PIXELS_PER_TOKEN) as usize * (height / PIXELS_PER_TOKEN) as usize;
                let mut planned = vec![Buffers::planned(&self.transformer, tokens + picture, dtype)];
                if request.preview {
                    // Half the size.
                    planned.extend(autoencoder.planned_to_preview(image));
                }
                planned
            }
            DECODE => autoencoder.planned_to_decode(image),
            _ => Vec::new(),
        }
    }
}
