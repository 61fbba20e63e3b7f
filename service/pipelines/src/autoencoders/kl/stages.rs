//! The autoencoder's stages: picture to latent, latent to picture, and previews.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use model::plan::of_rung;

use super::plan::{Autoencoder, LATENT};
use super::scratch::{Chunking, decode_ladder, encode_ladder};
use super::statistics::Statistics;
use super::{Moments, Rgb8, VaeConfig, VaeDecoder, VaeEncoder};
use crate::autoencoders::COMPONENT;
use crate::noise::Generator;
use crate::stage::Stage;
use crate::tensors::{from_host, to_host};
use crate::{HostTensor, Image, InitImage, Observer, Piece, StageError};

/// One run of the autoencoder for a request.
pub(crate) struct Run<'a> {
    pub(crate) config: &'a VaeConfig,
    pub(crate) tensors: &'a ComponentTensors,
    /// The dtype of the card, for which ladders were planned.
    pub(crate) dtype: DType,
    pub(crate) device: &'a Device,
    pub(crate) cancelled: &'a dyn Fn() -> bool,
}

impl Autoencoder<'_> {
    /// Runs `work` with the autoencoder of a stage.
    ///
    /// # Errors
    /// Errors of `work`; the error of a component that is not resident.
    pub(crate) fn with<R, M>(
        &self,
        stage: &Stage<'_, M>,
        work: impl FnOnce(&Run<'_>) -> Result<R, StageError>,
    ) -> Result<R, StageError> {
        let tensors = (stage.run.tensors)(COMPONENT)?;
        work(&Run {
            config: self.config,
            tensors: &tensors,
            dtype: self.dtype,
            device: stage.run.device,
            cancelled: &|| stage.observer.cancelled(),
        })
    }

    /// Runs the last stage of a request: decodes its latent, and delivers the picture.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn decode<M>(&self, stage: &mut Stage<'_, M>) -> Result<(), StageError> {
        let latent = stage.run.value(LATENT)?;
        let picture = self.with(stage, |vae| vae.decode(latent, stage.run.rung))?;
        deliver(picture, stage.run.request.image()?, stage.observer);
        Ok(())
    }
}

impl Run<'_> {
    /// Encodes a picture, draws the sample that `retrieve_latents` draws with this seed after `draws_before` draws of its size,
    /// and scales it as the transformer expects.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn encode(
        &self,
        image: Option<&InitImage>,
        (seed, draws_before): (u64, usize),
        rung: usize,
    ) -> Result<HostTensor, StageError> {
        let image = image.ok_or_else(|| StageError::BadInput("there is no image to encode".to_owned()))?;
        self.sample(&self.moments(image, rung)?, seed, draws_before)
    }

    /// Encodes a picture without drawing: the mode of its distribution, scaled.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn encode_mode(&self, image: &InitImage, rung: usize) -> Result<HostTensor, StageError> {
        to_host(&self.scaled(&self.moments(image, rung)?.mean)?)
    }

    /// Encodes the masked picture, f32 `[1, 3, height, width]` of -1 to 1 in host memory, and draws a sample after
    /// `draws_before` draws of its size.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn encode_masked(
        &self,
        picture: &Tensor,
        (seed, draws_before): (u64, usize),
        rung: usize,
    ) -> Result<HostTensor, StageError> {
        let (_, _, height, width) = picture.dims4()?;
        let chunking = self.chunking((width, height), rung)?;
        let encoder = VaeEncoder::new(self.config, self.tensors)?;
        let picture = picture.to_device(self.device)?;
        let moments = encoder.encode(&picture, chunking, self.cancelled)?;
        self.sample(&moments, seed, draws_before)
    }

    fn chunking(&self, (width, height): (usize, usize), rung: usize) -> Result<Chunking, StageError> {
        let factor = self.config.factor();
        let rungs = encode_ladder(self.config, height / factor, width / factor, self.dtype);
        of_rung(&rungs, rung)
    }

    fn moments(&self, image: &InitImage, rung: usize) -> Result<Moments, StageError> {
        let size = (image.width as usize, image.height as usize);
        let encoder = VaeEncoder::new(self.config, self.tensors)?;
        encoder.encode_rgb8(&image.rgb, size, self.chunking(size, rung)?, self.cancelled)
    }

    fn sample(&self, moments: &Moments, seed: u64, draws_before: usize) -> Result<HostTensor, StageError> {
        let mut generator = Generator::new(seed);
        let count = moments.mean.elem_count();
        (0..draws_before).for_each(|_| generator.skip_normal(count));
        to_host(&self.scaled(&moments.drawn(&mut generator)?)?)
    }

    /// The transformer's latent of an autoencoder's, in host memory.
    fn scaled(&self, latent: &Tensor) -> Result<Tensor, StageError> {
        Ok(match Statistics::of(self.config, self.tensors)? {
            Some(statistics) => statistics.to_transformer(latent)?.contiguous()?,
            None => self.config.scaled(latent)?,
        })
    }

    /// Decodes a latent `[1, channels, h, w]` in the transformer's scale.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn decode(&self, latent: &HostTensor, rung: usize) -> Result<Rgb8, StageError> {
        let [_, _, h, w] = *latent.shape.as_slice() else {
            let problem = format!(
                "a latent of shape {:?} where four axes are expected",
                latent.shape
            );
            return Err(StageError::BadInput(problem));
        };
        let patch = self.config.patch();
        let chunking = of_rung(
            &decode_ladder(self.config, h * patch, w * patch, self.dtype),
            rung,
        )?;
        let latent = match Statistics::of(self.config, self.tensors)? {
            Some(statistics) => {
                let latent = from_host(latent, "the latent", DType::F32, &Device::Cpu)?;
                let latent = statistics.to_autoencoder(&latent)?.contiguous()?;
                latent.to_device(self.device)?
            }
            None => from_host(latent, "the latent", DType::F32, self.device)?,
        };
        self.rgb8(&latent, chunking)
    }

    fn rgb8(&self, latent: &Tensor, chunking: Chunking) -> Result<Rgb8, StageError> {
        VaeDecoder::new(self.config, self.tensors)?.decode_to_rgb8(latent, chunking, self.cancelled)
    }

    /// Decodes a latent in host memory at half its size. A failed preview does not fail the job.
    ///
    /// # Errors
    /// [`StageError::Cancelled`].
    pub(crate) fn preview(&self, latent: &Tensor) -> Result<Option<Rgb8>, StageError> {
        let small = match Statistics::of(self.config, self.tensors)? {
            Some(statistics) => statistics.to_autoencoder(latent)?.contiguous()?.avg_pool2d(2)?,
            None => latent.avg_pool2d(2)?,
        };
        match self.rgb8(&small.to_device(self.device)?, Chunking::Whole) {
            Ok(picture) => Ok(Some(picture)),
            Err(StageError::Cancelled) => Err(StageError::Cancelled),
            Err(error) => {
                tracing::warn!(%error, "a preview could not be decoded");
                Ok(None)
            }
        }
    }
}

/// Delivers a picture as a request's result, with the unmasked part pasted from the start picture.
fn deliver(picture: Rgb8, image: &Image, observer: &mut dyn Observer) {
    let Rgb8 {
        width,
        height,
        mut rgb,
    } = picture;
    image.keep_unmasked(&mut rgb);
    observer.deliver(Piece::image(width as u32, height as u32, rgb));
}

/// Sends a preview, if there is one.
pub(crate) fn send_preview(preview: Option<Rgb8>, observer: &mut dyn Observer) {
    if let Some(Rgb8 { width, height, rgb }) = preview {
        observer.preview(width as u32, height as u32, rgb);
    }
}
