//! The cuDNN shapes of a request's stages, derived from the configurations.

use model::bounds::PIXELS_PER_TOKEN;
use ops::Planned;

use super::edit::{ENCODE_CONTROL, ENCODE_MASKED, ENCODE_REFERENCE};
use super::model::FluxModel;
use super::stages::{DENOISE, ENCODE_TEXT};
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE};
use crate::{Image, Request};

impl FluxModel {
    /// cuDNN shapes of a stage on a card, in order of use. Pictures are decoded and encoded whole: a lower rung
    /// compiles its plans itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let (width, height) = (image.width, image.height);
        let (dtype, tokens) = (self.parts.dtype(), request.max_sequence_length as usize);
        let autoencoder = self.autoencoder();
        match stage {
            ENCODE_TEXT => vec![
                self.clip.planned(self.clip_tokenizer.length(), dtype),
                self.t5.planned(tokens, dtype),
            ],
            ENCODE_IMAGE if image.init_image.is_none() => Vec::new(),
            stage if stage.starts_with(ENCODE_CONTROL) => autoencoder.planned_to_encode(image),
            ENCODE_IMAGE | ENCODE_MASKED => autoencoder.planned_to_encode(image),
            ENCODE_REFERENCE => {
                let references = image.references.iter().map(|r| Image::of(r.width, r.height));
                references
                    .flat_map(|r| autoencoder.planned_to_encode(&r))
                    .collect()
            }
            DENOISE => {
                let picture = (width / PIXELS_PER_TOKEN) as usize * (height / PIXELS_PER_TOKEN) as usize
                    + self.reference_tokens(image);
                let generated = picture - self.reference_tokens(image);
                let blocks = self.transformer.blocks();
                let attention = AttentionPrecision::asked(request);
                let mut planned = blocks.planned(tokens + picture, generated, (dtype, attention));
                for (_, _, net) in self.controls_of(request, image) {
                    let all = net.config.text_tokens(tokens) + generated;
                    let in_full = (dtype, AttentionPrecision::Full);
                    planned.extend(net.config.trunk.blocks().planned(all, all, in_full));
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
