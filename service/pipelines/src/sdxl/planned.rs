//! The cuDNN shapes of a request's stages, derived from the configurations.

use ops::Planned;

use super::model::{SdxlModel, UNET};
use super::stages::{DENOISE, ENCODE_MASKED, ENCODE_TEXT, ways};
use crate::Request;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE};

impl SdxlModel {
    /// cuDNN shapes of a stage on a card, in order of use, in the best way to run it: a lower rung compiles its plans itself.
    pub(super) fn planned_of(&self, stage: &str, request: &Request) -> Vec<Planned> {
        let (Ok(image), Ok(chunks)) = (request.image(), self.chunk_count(request)) else {
            return Vec::new();
        };
        let (dtype, autoencoder) = (self.parts.dtype(), self.autoencoder());
        match stage {
            ENCODE_TEXT => self
                .encoders
                .iter()
                .map(|encoder| encoder.planned(self.chunk_length(), dtype))
                .collect(),
            ENCODE_IMAGE if image.init_image.is_none() => Vec::new(),
            ENCODE_IMAGE | ENCODE_MASKED => autoencoder.planned_to_encode(image),
            DENOISE => {
                let items = ways(request).first().map_or(1, |way| way.items());
                let ranks = self.adapters.convolution_ranks(UNET, &request.adapters);
                let mut planned = self.unet.planned(self.sizes(image, chunks, items), dtype, &ranks);
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
