//! The autoencoder's part in the plan of a request: its stages, and the memory of previews.

use candle_core::DType;
use model::plan::{names, only_value, rungs_of};
use ops::Planned;
use residency::Bytes;

use super::config::VaeConfig;
use super::scratch::{Chunking, decode_ladder, decode_scratch, encode_ladder};
use crate::autoencoders::COMPONENT;
use crate::autoencoders::reference::reference_stage;
use crate::checkpoint::ComponentSet;
use crate::{Image, InitImage, Medium, PreviewNeed, Request, Role, Rung, StagePlan, ValueShape};

/// Names of the stages.
pub(crate) const ENCODE_IMAGE: &str = "encode_image";
pub(crate) const DECODE: &str = "decode";

/// Name of the latent, in the transformer's scale: f32 `[1, channels, height / 8, width / 8]`; of FLUX.2 a 16th.
pub(crate) const LATENT: &str = "latent";

/// The autoencoder of an open model.
pub(crate) struct Autoencoder<'a> {
    pub(crate) config: &'a VaeConfig,
    pub(crate) components: &'a ComponentSet,
    /// Dtype of maps.
    pub(crate) dtype: DType,
}

impl Autoencoder<'_> {
    /// Shape of the latent of a picture.
    pub(crate) fn latent(&self, image: &Image) -> ValueShape {
        let factor = self.config.transformer_factor();
        let [h, w] = [image.height, image.width].map(|side| side as usize / factor);
        ValueShape::new(LATENT, vec![1, self.config.transformer_channels(), h, w])
    }

    /// The request for the picture that these values decode to; `None` if they are not a latent of this autoencoder.
    pub(crate) fn request_of(&self, values: &[ValueShape], defaults: Request) -> Option<Request> {
        let &[1, channels, h, w] = only_value(values, LATENT)? else {
            return None;
        };
        let side =
            |numbers: usize| u32::try_from(numbers.checked_mul(self.config.transformer_factor())?).ok();
        let medium = Medium::Image(Image::of(side(w)?, side(h)?));
        (channels == self.config.transformer_channels()).then_some(Request { medium, ..defaults })
    }

    /// The stage from picture to latent.
    pub(crate) fn encode_stage(&self, image: &Image) -> StagePlan {
        let (h, w) = self.config.latent_sides(image.width, image.height);
        StagePlan {
            gives: names(&[LATENT]),
            ..self.stage(
                ENCODE_IMAGE,
                Role::Encode,
                image,
                encode_ladder(self.config, h, w, self.dtype),
            )
        }
    }

    /// A stage that encodes another picture than the start picture, under other names.
    pub(crate) fn encode_stage_named(&self, name: &str, gives: &str, image: &Image) -> StagePlan {
        StagePlan {
            name: name.to_owned(),
            gives: names(&[gives]),
            ..self.encode_stage(image)
        }
    }

    /// A stage that encodes a reference picture alone, once for all items of a request. It is remembered for requests with the
    /// same picture.
    pub(crate) fn reference_stage(&self, name: &str, gives: &str, reference: &InitImage) -> StagePlan {
        reference_stage(name, gives, reference, |image| self.encode_stage(image))
    }

    /// The stage from latent to picture.
    pub(crate) fn decode_stage(&self, image: &Image) -> StagePlan {
        let (h, w) = self.config.latent_sides(image.width, image.height);
        StagePlan {
            takes: vec![self.latent(image)],
            // The unmasked part is pasted from the start picture.
            reads_media: image.mask.is_some(),
            ..self.stage(
                DECODE,
                Role::Decode,
                image,
                decode_ladder(self.config, h, w, self.dtype),
            )
        }
    }

    fn stage(&self, name: &str, role: Role, image: &Image, ladder: Vec<(Chunking, Rung)>) -> StagePlan {
        let rungs = rungs_of(ladder, self.dequantizing());
        StagePlan {
            shape: format!("{}x{}", image.width, image.height),
            per_item: true,
            reads_media: true,
            ..StagePlan::of(name, role, [COMPONENT], rungs)
        }
    }

    /// The needs of a preview, which is decoded whole at half the size while the sampler's buffers stay allocated.
    pub(crate) fn preview_need(&self, image: &Image) -> PreviewNeed {
        let (h, w) = self.config.latent_sides(image.width / 2, image.height / 2);
        let decode = decode_scratch(self.config, h, w, Chunking::Whole, self.dtype);
        PreviewNeed {
            components: names(&[COMPONENT]),
            scratch: decode + self.dequantizing(),
        }
    }

    /// Convolutions are dequantized in any format, independent of tokens.
    fn dequantizing(&self) -> Bytes {
        self.components.dequantizing(COMPONENT, 0, |_| true)
    }

    /// Shapes for which [`Self::encode_stage`] uses cuDNN.
    pub(crate) fn planned_to_encode(&self, image: &Image) -> Vec<Planned> {
        match self.config.latent_sides(image.width, image.height) {
            (0, _) | (_, 0) => Vec::new(),
            (h, w) => self.config.planned_to_encode((h, w), h, self.dtype),
        }
    }

    /// Shapes for which [`Self::decode_stage`] uses cuDNN.
    pub(crate) fn planned_to_decode(&self, image: &Image) -> Vec<Planned> {
        self.planned_at(image.width, image.height)
    }

    /// Shapes for which a preview uses cuDNN.
    pub(crate) fn planned_to_preview(&self, image: &Image) -> Vec<Planned> {
        self.planned_at(image.width / 2, image.height / 2)
    }

    fn planned_at(&self, width: u32, height: u32) -> Vec<Planned> {
        match self.config.latent_sides(width, height) {
            (0, _) | (_, 0) => Vec::new(),
            (h, w) => self.config.planned_to_decode((h, w), h, self.dtype),
        }
    }
}
