//! The cuDNN shapes of a request's stages, derived from the configurations.

use ops::Planned;

use super::model::Flux2Model;
use super::references::{ENCODE_REFERENCE, places};
use super::stages::{DENOISE, ENCODE_TEXT};
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE};
use crate::place::Place;
use crate::sampling::Prompts;
use crate::{Image, Request};

impl Flux2Model {
    /// cuDNN shapes of a stage on a card, in order of use. Pictures are decoded and encoded whole: a lower rung
    /// compiles its plans itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let (dtype, autoencoder) = (self.parts.dtype(), self.autoencoder());
        match stage {
            ENCODE_TEXT => {
                let tokens = request.max_sequence_length as usize;
                let mut planned = Vec::new();
                for (_, text) in Prompts::texts(request).iter() {
                    let Ok(ids) = self.tokens(request, text) else {
                        continue;
                    };
                    for shape in self.text.planned_of_states(ids.len(), tokens, dtype) {
                        if !planned.contains(&shape) {
                            planned.push(shape);
                        }
                    }
                }
                planned
            }
            ENCODE_IMAGE if image.init_image.is_none() => Vec::new(),
            ENCODE_IMAGE => autoencoder.planned_to_encode(image),
            DENOISE => {
                let text = request.max_sequence_length as usize;
                let generated = Place::of_picture(image.width, image.height).tokens();
                let references: usize = places(request, image).iter().map(|place| place.tokens()).sum();
                let tokens = text + generated + references;
                let attention = AttentionPrecision::asked(request);
                let blocks = self.transformer.blocks();
                let mut planned = blocks.planned(tokens, generated, (dtype, attention));
                if request.preview {
                    // At half the size.
                    planned.extend(autoencoder.planned_to_preview(image));
                }
                planned
            }
            DECODE => autoencoder.planned_to_decode(image),
            other => {
                let number = other
                    .strip_prefix(ENCODE_REFERENCE)
                    .and_then(|number| number.parse().ok());
                let reference = number.and_then(|number: usize| image.references.get(number));
                reference.map_or_else(Vec::new, |reference| {
                    autoencoder.planned_to_encode(&Image::of(reference.width, reference.height))
                })
            }
        }
    }
}
