//! Single pictures by the layers of films: diffusers' `AutoencoderKLQwenImage`, whose layers, tensors and scale of latents are those
//! of `AutoencoderKLWan`. Its place, its part in the plan of a request, and its stages.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use model::bounds::PIXELS_PER_TOKEN;
use model::plan::{names, of_rung, only_value, rungs_of};
use ops::Planned;
use residency::Bytes;

use super::config::WanVaeConfig;
use super::decoder::{FrameDecoding, WanVaeDecoder};
use super::encoder::WanVaeEncoder;
use super::names::diffusers_name_of_original;
use super::scratch::{Chunking, decode_ladder, decode_scratch, encode_ladder};
use crate::autoencoders::COMPONENT;
use crate::autoencoders::frames::frames_to_rgb8;
use crate::autoencoders::kl::plan::{DECODE, ENCODE_IMAGE, LATENT};
use crate::autoencoders::moments::Moments;
use crate::autoencoders::reference::reference_stage;
use crate::checkpoint::{
    ComponentFiles, ComponentPlace, ComponentSet, FilePart, Requested, VAE_IN_MODEL, companion,
};
use crate::files::{check_pairs, unsupported};
use crate::noise::Generator;
use crate::stage::Stage;
use crate::tensors::to_host;
use crate::{
    HostTensor, Image, InitImage, Medium, ModelError, Piece, PreviewNeed, Request, Role, Rung, StageError,
    StagePlan, ValueShape,
};

/// A picture is a film of one frame, which has one latent.
const ONE: usize = 1;

/// Channels of a picture.
const RGB: usize = 3;

/// The autoencoder of a pipeline of pictures: in its folder, or a single file in place of the folder.
pub(crate) struct PicturePlace {
    pub(crate) config: WanVaeConfig,
    place: ComponentPlace,
}

impl PicturePlace {
    /// The autoencoder of a pipeline's folder, for latents of so many channels. Where the transformer is `alone` in a file and the
    /// folder has no autoencoder, a file whose name begins with `stem` may be it, or it is in the transformer's file.
    ///
    /// # Errors
    /// When there is none, or it is not supported or does not fit.
    pub(crate) fn of(
        base: &Path,
        alone: Option<&Path>,
        stem: &str,
        channels: usize,
    ) -> Result<PicturePlace, ModelError> {
        let file = || -> Option<PathBuf> { companion(alone?, base, "vae", stem) };
        let (config, place) = ComponentPlace::of(
            &base.join(COMPONENT),
            FilePart::of_model(alone, VAE_IN_MODEL)?,
            file,
            config_of_file,
            WanVaeConfig::check,
        )?;
        let config = WanVaeConfig {
            is_of_pictures: true,
            ..config
        };
        let pairs = [
            ("the VAE's latent channels", config.z_dim, channels),
            (
                "the VAE's pixels per latent cell",
                config.factor(),
                PIXELS_PER_TOKEN as usize / 2,
            ),
            ("the VAE's channels of a picture", config.out_channels, RGB),
            (
                "the VAE's channels of a picture to encode",
                config.in_channels,
                RGB,
            ),
        ];
        check_pairs(base, &pairs)?;
        Ok(PicturePlace { config, place })
    }

    /// The autoencoder's tensors: not those of convolutions in time.
    ///
    /// # Errors
    /// The first that is missing, of another shape, or stored in an unsupported way.
    pub(crate) fn files(self, wanted: Requested) -> Result<ComponentFiles, ModelError> {
        let shapes = self.config.tensor_shapes();
        self.place.files(wanted, diffusers_name_of_original, |_| shapes)
    }
}

/// The configuration of an autoencoder in a file.
fn config_of_file(file: &FilePart) -> Result<WanVaeConfig, ModelError> {
    let checkpoint = file.checkpoint(diffusers_name_of_original)?;
    WanVaeConfig::of_shapes(|name| checkpoint.shape(name)).ok_or_else(|| {
        let problem =
            "it is named as the autoencoder, and its tensors are of another model. Download it again";
        unsupported(file.path(), problem)
    })
}

/// The autoencoder of pictures of an open model.
pub(crate) struct PictureAutoencoder<'a> {
    pub(crate) config: &'a WanVaeConfig,
    pub(crate) components: &'a ComponentSet,
    /// Dtype of maps.
    pub(crate) dtype: DType,
}

impl PictureAutoencoder<'_> {
    fn sides(&self, image: &Image) -> (usize, usize) {
        self.config.latent_sides(image.width, image.height)
    }

    /// Shape of the latent of a picture.
    pub(crate) fn latent(&self, image: &Image) -> ValueShape {
        let (h, w) = self.sides(image);
        ValueShape::new(LATENT, vec![1, self.config.z_dim, h, w])
    }

    /// The request for the picture that these values decode to; `None` if they are not a latent of this autoencoder.
    pub(crate) fn request_of(&self, values: &[ValueShape], defaults: Request) -> Option<Request> {
        let &[1, channels, h, w] = only_value(values, LATENT)? else {
            return None;
        };
        let side = |numbers: usize| u32::try_from(numbers.checked_mul(self.config.factor())?).ok();
        let medium = Medium::Image(Image::of(side(w)?, side(h)?));
        (channels == self.config.z_dim).then_some(Request { medium, ..defaults })
    }

    /// The stage from picture to latent.
    pub(crate) fn encode_stage(&self, image: &Image) -> StagePlan {
        let ladder = encode_ladder(self.config, self.sides(image), ONE, self.dtype);
        StagePlan {
            gives: names(&[LATENT]),
            ..self.stage(ENCODE_IMAGE, Role::Encode, image, ladder)
        }
    }

    /// A stage that encodes a reference picture alone, once for all items of a request. It is remembered for requests with the
    /// same picture.
    pub(crate) fn reference_stage(&self, name: &str, gives: &str, reference: &InitImage) -> StagePlan {
        reference_stage(name, gives, reference, |image| self.encode_stage(image))
    }

    /// The stage from latent to picture.
    pub(crate) fn decode_stage(&self, image: &Image) -> StagePlan {
        let ladder = decode_ladder(self.config, self.sides(image), ONE, self.dtype);
        StagePlan {
            takes: vec![self.latent(image)],
            // The unmasked part is pasted from the start picture.
            reads_media: image.mask.is_some(),
            ..self.stage(DECODE, Role::Decode, image, ladder)
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

    /// The needs of a preview, which is decoded at half the size while the sampler's buffers stay allocated.
    pub(crate) fn preview_need(&self, image: &Image) -> PreviewNeed {
        let sides = self.config.latent_sides(image.width / 2, image.height / 2);
        let decode = decode_scratch(self.config, sides, ONE, Chunking::Whole, self.dtype);
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
        match self.sides(image) {
            (0, _) | (_, 0) => Vec::new(),
            sides => self
                .config
                .planned_to_encode(sides, ONE, Chunking::Whole, self.dtype),
        }
    }

    /// Shapes for which [`Self::decode_stage`] uses cuDNN.
    pub(crate) fn planned_to_decode(&self, image: &Image) -> Vec<Planned> {
        match self.sides(image) {
            (0, _) | (_, 0) => Vec::new(),
            sides => self
                .config
                .planned_to_decode(sides, ONE, Chunking::Whole, self.dtype),
        }
    }

    /// Shapes for which a preview uses cuDNN.
    pub(crate) fn planned_to_preview(&self, image: &Image) -> Vec<Planned> {
        self.planned_to_decode(&Image::of(image.width / 2, image.height / 2))
    }

    /// Encodes a picture in a stage, on this rung of the stage.
    fn moments<M>(&self, stage: &Stage<'_, M>, picture: Option<&InitImage>) -> Result<Moments, StageError> {
        let picture =
            picture.ok_or_else(|| StageError::BadInput("there is no picture to encode".to_owned()))?;
        let tensors = (stage.run.tensors)(COMPONENT)?;
        let sides = self.config.latent_sides(picture.width, picture.height);
        let rungs = encode_ladder(self.config, sides, ONE, self.dtype);
        WanVaeEncoder::new(self.config, &tensors)?.encode_rgb8(
            &picture.rgb,
            ONE,
            (picture.width as usize, picture.height as usize),
            of_rung(&rungs, stage.run.rung)?,
            &|| stage.observer.cancelled(),
        )
    }

    /// A latent of the autoencoder in the transformer's scale, in host memory.
    fn scaled(&self, latent: &Tensor) -> Result<HostTensor, StageError> {
        to_host(&self.config.scaled(latent)?.squeeze(2)?)
    }

    /// Encodes a picture without drawing: the mode of its distribution.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn encode_mode<M>(
        &self,
        stage: &Stage<'_, M>,
        picture: Option<&InitImage>,
    ) -> Result<HostTensor, StageError> {
        self.scaled(&self.moments(stage, picture)?.mean)
    }

    /// Encodes a picture, and draws the sample that a generator of this seed draws first.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn encode_drawn<M>(
        &self,
        stage: &Stage<'_, M>,
        picture: Option<&InitImage>,
        seed: u64,
    ) -> Result<HostTensor, StageError> {
        let moments = self.moments(stage, picture)?;
        self.scaled(&moments.drawn(&mut Generator::new(seed))?)
    }

    /// The picture of a latent `[1, channels, h, w]` in the transformer's scale, in host memory: bytes of rows of RGB.
    fn rgb8<M>(
        &self,
        stage: &Stage<'_, M>,
        latent: &Tensor,
        chunking: Chunking,
    ) -> Result<Vec<u8>, StageError> {
        let tensors = (stage.run.tensors)(COMPONENT)?;
        let how = FrameDecoding {
            chunking,
            cancelled: &|| stage.observer.cancelled(),
        };
        let mut rgb = Vec::new();
        let latent = self.config.unscaled(&latent.unsqueeze(2)?)?;
        WanVaeDecoder::new(self.config, &tensors)?.decode_frames(&latent, &how, &mut |_, frames| {
            rgb = frames_to_rgb8(&frames)?;
            Ok(())
        })?;
        Ok(rgb)
    }

    /// Runs the last stage of a request: decodes its latent, and delivers the picture, with the unmasked part pasted from the
    /// start picture.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn decode<M: crate::Model>(&self, stage: &mut Stage<'_, M>) -> Result<(), StageError> {
        let image = stage.run.request.image()?;
        let rungs = decode_ladder(self.config, self.sides(image), ONE, self.dtype);
        let chunking = of_rung(&rungs, stage.run.rung)?;
        let mut rgb = self.rgb8(stage, &stage.host_value(LATENT)?, chunking)?;
        image.keep_unmasked(&mut rgb);
        stage
            .observer
            .deliver(Piece::image(image.width, image.height, rgb));
        Ok(())
    }

    /// Sends a preview of a latent in host memory, decoded at half its size. A failed preview does not fail the job.
    ///
    /// # Errors
    /// [`StageError::Cancelled`].
    pub(crate) fn preview<M>(&self, stage: &mut Stage<'_, M>, latent: &Tensor) -> Result<(), StageError> {
        let small = latent.to_device(&Device::Cpu)?.avg_pool2d(2)?;
        let (_, _, h, w) = small.dims4()?;
        match self.rgb8(stage, &small, Chunking::Whole) {
            Ok(rgb) => {
                let factor = self.config.factor();
                let (width, height) = ((w * factor) as u32, (h * factor) as u32);
                stage.observer.preview(width, height, rgb);
                Ok(())
            }
            Err(StageError::Cancelled) => Err(StageError::Cancelled),
            Err(error) => {
                tracing::warn!(%error, "a preview could not be decoded");
                Ok(())
            }
        }
    }
}
