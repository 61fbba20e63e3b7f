//! The autoencoder's stages: picture to latent, latent to picture, and previews.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;

use super::scratch::{Chunking, encode_ladder, ladder};
use super::{Rgb8, VaeConfig, VaeDecoder, VaeEncoder};
use crate::noise::Generator;
use crate::tensors::{from_host, to_host};
use crate::{HostTensor, InitImage, Rung, StageError};

/// One run of the autoencoder for a request.
pub(crate) struct Run<'a> {
    pub(crate) config: &'a VaeConfig,
    pub(crate) tensors: &'a ComponentTensors,
    /// The dtype of the card, for which ladders were planned.
    pub(crate) dtype: DType,
    pub(crate) device: &'a Device,
    pub(crate) cancelled: &'a dyn Fn() -> bool,
}

impl Run<'_> {
    /// Encodes a picture, draws the sample that `retrieve_latents` draws with this seed, and scales it as the
    /// transformer expects.
    ///
    /// # Errors
    /// [`StageError`].
    pub(crate) fn encode(
        &self,
        image: Option<&InitImage>,
        seed: u64,
        rung: usize,
    ) -> Result<HostTensor, StageError> {
        let image = image.ok_or_else(|| StageError::BadInput("there is no image to encode".to_owned()))?;
        let (width, height) = (image.width as usize, image.height as usize);
        let factor = self.config.factor();
        let rungs = encode_ladder(self.config, height / factor, width / factor, self.dtype);
        let chunking = chunking_of(&rungs, rung)?;
        let encoder = VaeEncoder::new(self.config, self.tensors)?;
        let moments = encoder.encode_rgb8(&image.rgb, (width, height), chunking, self.cancelled)?;
        let noise = Generator::new(seed).normal(moments.mean.elem_count());
        let noise = Tensor::from_vec(noise, moments.mean.shape(), &Device::Cpu)?;
        to_host(&self.config.scaled(&moments.sample(&noise)?)?)
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
        let chunking = chunking_of(&ladder(self.config, h, w, self.dtype), rung)?;
        let latent = from_host(latent, "the latent", DType::F32, self.device)?;
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
        let small = latent.avg_pool2d(2)?;
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

fn chunking_of(rungs: &[(Chunking, Rung)], rung: usize) -> Result<Chunking, StageError> {
    let chosen = rungs.get(rung).map(|(chunking, _)| *chunking);
    chosen.ok_or_else(|| StageError::BadInput(format!("there is no rung {rung}; there are {}", rungs.len())))
}
