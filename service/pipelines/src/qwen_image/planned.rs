//! The cuDNN shapes of a request's stages, derived from the configurations.

use ops::{AttentionShape, Planned};

use super::model::QwenImageModel;
use super::references::{ENCODE_PICTURE, ENCODE_REFERENCE};
use super::stages::{DENOISE, ENCODE_TEXT};
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE};
use crate::{Image, InitImage, Request};

impl QwenImageModel {
    /// cuDNN shapes of a stage on a card, in order of use. Pictures are decoded and encoded whole: a lower rung
    /// compiles its plans itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
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
                // The negative prompt comes first.
                for prompt in prompts.negative.iter().chain([&prompts.prompt]) {
                    let all = tokens.all() - tokens.text + prompt.used();
                    let shapes = self.transformer.blocks().planned(all, tokens.generated, dtype);
                    let shapes = shapes.into_iter();
                    shapes
                        .map(|shape| in_buffers(shape, all, tokens.all()))
                        .for_each(&mut add);
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
                let of = |prefix: &str| -> Option<&InitImage> {
                    let number: usize = other.strip_prefix(prefix)?.parse().ok()?;
                    image.references.get(number)
                };
                if let Some(reference) = of(ENCODE_REFERENCE) {
                    let size = Image::of(reference.width, reference.height);
                    return autoencoder.planned_to_encode(&size);
                }
                if let Some(Ok(grid)) = of(ENCODE_PICTURE).map(|reference| self.grid(reference)) {
                    return self.text.vision.planned(grid, dtype);
                }
            }
        }
        planned
    }
}

/// The shape of an attention over `tokens` tokens in buffers that have more rows: those of the longest text.
fn in_buffers(shape: Planned, tokens: usize, rows: usize) -> Planned {
    let Planned::Attention(shape) = shape else {
        return shape;
    };
    let of = |[item, row, head]: [usize; 3]| [item / tokens.max(1) * rows, row, head];
    Planned::Attention(AttentionShape {
        q: of(shape.q),
        k: of(shape.k),
        v: of(shape.v),
        out: of(shape.out),
        ..shape
    })
}
