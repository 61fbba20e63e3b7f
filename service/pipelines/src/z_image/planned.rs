//! The cuDNN shapes of a request's stages, derived from the configurations.

use ops::Planned;

use super::buffers::ZImageBuffers;
use super::model::{TEXT_ENCODER, ZImageModel};
use super::stages::{DENOISE, ENCODE_TEXT};
use crate::Request;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE};

impl ZImageModel {
    /// cuDNN shapes of a stage on a card, in order of use. Pictures are decoded and encoded whole: a lower rung
    /// compiles its plans itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let dtype = self.precision.dtype;
        let autoencoder = self.autoencoder();
        match stage {
            ENCODE_TEXT => {
                let is_quantized = self.parts.components.is_quantized(TEXT_ENCODER);
                let planned = self.text.planned(self.text_tokens(request), is_quantized, dtype);
                planned.into_iter().collect()
            }
            ENCODE_IMAGE if image.init_image.is_none() => Vec::new(),
            ENCODE_IMAGE => autoencoder.planned_to_encode(image),
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
                        planned.push(ZImageBuffers::planned(&self.transformer, tokens, of, dtype));
                    }
                }
                if request.preview {
                    // At half the size.
                    planned.extend(autoencoder.planned_to_preview(image));
                }
                planned
            }
            DECODE => autoencoder.planned_to_decode(image),
            _ => Vec::new(),
        }
    }
}
