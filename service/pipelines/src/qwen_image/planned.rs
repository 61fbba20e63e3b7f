//! The cuDNN shapes of a request's stages, derived from the configurations.

use ops::Planned;

use super::model::QwenImageModel;
use super::references::{ENCODE_PICTURE, ENCODE_REFERENCE};
use super::stages::{DENOISE, ENCODE_TEXT};
use crate::attention::AttentionPrecision;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE};
use crate::{Image, InitImage, Request};

impl QwenImageModel {
    /// cuDNN shapes of a stage on a card, in order of use. Pictures are decoded and encoded whole: a lower rung
    /// compiles its plans itself.
    pub(super) fn planned_of<'r>(&'r self, stage: &str, request: &'r Request) -> Vec<Planned> {
        let Ok(image) = request.image() else {
            return Vec::new();
        };
        let (dtype, autoencoder) = (self.parts.dtype(), self.autoencoder());
        let mut planned = Vec::new();
        let mut add = |shape: Planned| {
            if !planned.contains(&shape) {
                planned.push(shape);
            }
        };
        match stage {
            ENCODE_TEXT => {
                let Ok(prompts) = self.prompts(request, image) else {
                    return Vec::new();
                };
                for prompt in prompts.iter() {
                    add(self.text.planned(prompt.ids.len(), dtype));
                }
            }
            ENCODE_IMAGE if image.init_image.is_none() => {}
            ENCODE_IMAGE => return autoencoder.planned_to_encode(image),
            DENOISE => {
                let Ok(prompts) = self.prompts(request, image) else {
                    return Vec::new();
                };
                let tokens = self.tokens(&prompts, image);
                let blocks = self.transformer.blocks();
                let as_asked = (dtype, AttentionPrecision::asked(request));
                // The negative prompt comes first.
                for prompt in prompts.negative.iter().chain([&prompts.prompt]) {
                    let all = tokens.all() - tokens.text + prompt.used();
                    let shapes = blocks.planned_in((tokens.all(), 0), (all, tokens.generated, 0), as_asked);
                    shapes.into_iter().for_each(&mut add);
                }
                if request.preview {
                    // At half the size.
                    autoencoder
                        .planned_to_preview(image)
                        .into_iter()
                        .for_each(&mut add);
                }
            }
            DECODE => return autoencoder.planned_to_decode(image),
            other => {
                let of = |prefix: &str, pictures: &'r [InitImage]| -> Option<&'r InitImage> {
                    let number: usize = other.strip_prefix(prefix)?.parse().ok()?;
                    pictures.get(number)
                };
                if let Some(reference) = of(ENCODE_REFERENCE, &image.references) {
                    let size = Image::of(reference.width, reference.height);
                    return autoencoder.planned_to_encode(&size);
                }
                let seen = self.seen(image).unwrap_or_default();
                if let Some(Ok(grid)) = of(ENCODE_PICTURE, seen).map(|seen| self.grid(seen)) {
                    return self.text.vision.planned(grid, dtype);
                }
            }
        }
        planned
    }
}
