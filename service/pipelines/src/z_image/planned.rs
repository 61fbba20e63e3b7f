//! The cuDNN shapes of a request's stages, derived from the configurations.

use ops::Planned;

use super::buffers::ZImageBuffers;
use super::model::{TEXT_ENCODER, ZImageModel};
use super::stages::{DENOISE, ENCODE_TEXT};
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE};
use crate::sampling::Prompts;
use crate::{Image, Request};

impl ZImageModel {
    /// cuDNN shapes of a stage on a card, in order of use. Pictures are decoded and encoded whole: a lower rung
    /// compiles its plans itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let dtype = self.parts.dtype();
        let autoencoder = self.autoencoder();
        match stage {
            ENCODE_TEXT => {
                let is_quantized = self.parts.components.is_quantized(TEXT_ENCODER);
                let texts = self.text_tokens(request);
                let texts = texts.iter().flat_map(Prompts::iter);
                texts
                    .filter_map(|tokens| self.text.planned(*tokens, is_quantized, dtype))
                    .collect()
            }
            ENCODE_IMAGE if image.init_image.is_none() => Vec::new(),
            ENCODE_IMAGE => autoencoder.planned_to_encode(image),
            DENOISE => {
                let mut planned = self.planned_to_denoise(image, request);
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

    /// Shapes of attention: the text of each prompt, refined alone; then, since a step predicts under one condition after the other in the
    /// buffers of the longest, the picture alone and together with the text. The negative prompt comes first.
    fn planned_to_denoise(&self, image: &Image, request: &Request) -> Vec<Planned> {
        let Ok(tokens) = self.text_tokens(request) else {
            return Vec::new();
        };
        let lengths = |tokens: &usize| self.lengths(image, *tokens);
        let buffers = tokens.iter().map(|tokens| lengths(tokens).all());
        let buffers = buffers.max().unwrap_or_default();
        let texts = tokens.iter().map(|tokens| lengths(tokens).padded_text());
        let picture = lengths(&tokens.prompt).padded_picture();
        let attention = AttentionPrecision::asked(request);
        let of_texts = texts.map(|text| (text, text, AttentionPrecision::Full));
        let refine = of_texts.chain([(picture, buffers, attention)]);
        let refiners = refine.filter(|_| self.transformer.n_refiner_layers > 0);
        let passes = tokens.negative.iter().chain([&tokens.prompt]);
        let together = passes.map(|tokens| (lengths(tokens).all(), buffers, attention));
        let mut planned = Vec::new();
        for (tokens, of, attention) in refiners.chain(together) {
            let shape = ZImageBuffers::planned(&self.transformer, tokens, of, self.parts.dtype());
            let shape = attention.planned(shape);
            if tokens > 0 && !planned.contains(&shape) {
                planned.push(shape);
            }
        }
        planned
    }
}
