//! Picture to latent: diffusers' `Encoder`, and `AutoencoderKL.encode` around it.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;

use super::blocks::{LayerSource, Middle, Resnet, Walk, norm_and_convolve, plain};
use super::config::VaeConfig;
use super::conv::{Convolution, Padding};
use super::decoder::{dtype_of_maps, finite};
use super::norm::GroupNorm;
use super::scratch::Chunking;
use super::tiles::encode_tiles;
use crate::noise::Generator;
use model::StageError;

/// One resolution: residual blocks, then downsampling.
#[derive(Clone, Debug)]
struct DownBlock {
    resnets: Vec<Resnet>,
    downsampler: Option<Convolution>,
}

/// The encoder of an autoencoder.
#[derive(Clone, Debug)]
pub struct VaeEncoder {
    config: VaeConfig,
    dtype: DType,
    conv_in: Convolution,
    down_blocks: Vec<DownBlock>,
    middle: Middle,
    norm_out: GroupNorm,
    conv_out: Convolution,
    quant: Option<Convolution>,
}

/// The encoder's output: a Gaussian per latent value (`DiagonalGaussianDistribution`). Both tensors are in host
/// memory: they are small, and few operations follow.
#[derive(Clone, Debug)]
pub struct Moments {
    /// f32 `[1, latent_channels, h, w]`: the distribution's `mode()`.
    pub mean: Tensor,
    /// f32 `[1, latent_channels, h, w]`, clamped to -30 to 20.
    pub log_variance: Tensor,
}

impl Moments {
    /// From the encoder's last map in host memory, `[1, 2 channels, ..]`: means, then logarithms of variances.
    pub(crate) fn of_planes(planes: &Tensor) -> candle_core::Result<Moments> {
        let channels = planes.dim(1)? / 2;
        Ok(Moments {
            mean: planes.narrow(1, 0, channels)?.contiguous()?,
            log_variance: planes
                .narrow(1, channels, channels)?
                .clamp(-30f32, 20f32)?
                .contiguous()?,
        })
    }

    /// The sample that a generator draws next.
    pub(crate) fn drawn(&self, generator: &mut Generator) -> candle_core::Result<Tensor> {
        let noise = generator.normal(self.mean.elem_count());
        self.sample(&Tensor::from_vec(noise, self.mean.shape(), &Device::Cpu)?)
    }

    /// The sample for standard-normal `noise` of the mean's shape: `mean + exp(log_variance / 2) * noise`.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn sample(&self, noise: &Tensor) -> candle_core::Result<Tensor> {
        &self.mean + ((&self.log_variance * 0.5)?.exp()? * noise)?
    }
}

impl VaeEncoder {
    /// From the tensors of the `vae` component, with diffusers' names (`encoder.*`, `quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &VaeConfig, tensors: &ComponentTensors) -> Result<VaeEncoder, StageError> {
        VaeEncoder::in_dtype(config, tensors, dtype_of_maps(tensors, "encoder.conv_in.bias")?)
    }

    /// [`VaeEncoder::new`] with maps of this dtype, on any device (see [`super::VaeDecoder::in_dtype`]).
    ///
    /// # Errors
    /// Those of [`VaeEncoder::new`].
    pub fn in_dtype(
        config: &VaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<VaeEncoder, StageError> {
        config
            .check()
            .map_err(|problem| StageError::BadInput(format!("the VAE has {problem}")))?;
        let source = LayerSource {
            tensors,
            dtype,
            groups: config.norm_num_groups,
        };
        let channels = &config.block_out_channels;
        let (finest, coarsest) = (channels[0], channels[channels.len() - 1]);
        let moments = 2 * config.latent_channels;
        let mut down_blocks = Vec::with_capacity(channels.len());
        let mut before = finest;
        for (level, &width) in channels.iter().enumerate() {
            let name = format!("encoder.down_blocks.{level}");
            let mut resnets = Vec::with_capacity(config.layers_per_block);
            for layer in 0..config.layers_per_block {
                resnets.push(Resnet::new(
                    source,
                    &format!("{name}.resnets.{layer}"),
                    (before, width),
                )?);
                before = width;
            }
            let downsampler = match level + 1 < channels.len() {
                true => {
                    Some(source.convolution(&format!("{name}.downsamplers.0.conv"), (width, width), 3, 2)?)
                }
                false => None,
            };
            down_blocks.push(DownBlock { resnets, downsampler });
        }
        Ok(VaeEncoder {
            dtype,
            conv_in: source.convolution("encoder.conv_in", (config.in_channels, finest), 3, 1)?,
            down_blocks,
            middle: Middle::new(
                source,
                "encoder.mid_block",
                coarsest,
                config.mid_block_add_attention,
            )?,
            norm_out: source.norm("encoder.conv_norm_out", coarsest)?,
            conv_out: source.convolution("encoder.conv_out", (coarsest, moments), 3, 1)?,
            quant: match config.use_quant_conv {
                true => Some(source.convolution("quant_conv", (moments, moments), 1, 1)?),
                false => None,
            },
            config: config.clone(),
        })
    }

    /// Encodes `picture`, f32 `[1, in_channels, height, width]` of -1 to 1, with dimensions that are multiples of
    /// [`VaeConfig::factor`]: `AutoencoderKL.encode`. Strips and tiles are in latent rows.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for a picture of another
    /// shape.
    pub fn encode(
        &self,
        picture: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        match *picture.dims() {
            [1, channels, height, width] => self.check([height, width, channels])?,
            ref other => {
                return Err(StageError::BadInput(format!(
                    "a picture of shape {other:?} where [1, {}, h, w] is expected",
                    self.config.in_channels
                )));
            }
        }
        let map = ops::planes_to_map(&picture.to_dtype(DType::F32)?, (1.0, 0.0), self.dtype)?;
        self.encoded(map, chunking, cancelled)
    }

    /// Encodes an 8-bit picture, row by row, with the autoencoder's number of channels
    /// (`VaeImageProcessor.preprocess` and [`VaeEncoder::encode`]).
    ///
    /// # Errors
    /// Those of [`VaeEncoder::encode`].
    pub fn encode_rgb8(
        &self,
        rgb: &[u8],
        (width, height): (usize, usize),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let shape = [height, width, self.config.in_channels];
        self.check(shape)?;
        let map = ops::bytes_to_map(rgb, shape, self.dtype, self.norm_out.device())?;
        self.encoded(map, chunking, cancelled)
    }

    fn check(&self, shape: [usize; 3]) -> Result<(), StageError> {
        let (factor, expected) = (self.config.factor(), self.config.in_channels);
        let [height, width, channels] = shape;
        let fits = |size: usize| size > 0 && size.is_multiple_of(factor);
        if channels == expected && fits(height) && fits(width) {
            return Ok(());
        }
        Err(StageError::BadInput(format!(
            "a picture of {width}x{height} with {channels} channels where {expected} and multiples of {factor} are expected"
        )))
    }

    fn encoded(
        &self,
        picture: Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let factor = self.config.factor();
        let height = picture.dim(0)? / factor;
        let moments = match chunking {
            Chunking::Whole => self.encode_map(picture, height, cancelled)?,
            Chunking::Strips { latent_rows } => self.encode_map(picture, latent_rows, cancelled)?,
            Chunking::Tiles { latent_size } => encode_tiles(&picture, latent_size, factor, &|tile| {
                let height = tile.dim(0)? / factor;
                self.encode_map(tile, height, cancelled)
            })?,
        };
        let (moments, is_finite) = ops::map_to_planes(&moments)?;
        finite(is_finite)?;
        Ok(Moments::of_planes(&moments.to_device(&Device::Cpu)?)?)
    }

    fn encode_map(
        &self,
        picture: Tensor,
        latent_rows: usize,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let walk = Walk {
            latent_height: picture.dim(0)? / self.config.factor(),
            latent_rows,
            cancelled,
        };
        let mut map = plain(&picture, &self.conv_in, Padding::AROUND, walk)?;
        drop(picture);
        for block in &self.down_blocks {
            for resnet in &block.resnets {
                map = resnet.forward(map, walk)?;
            }
            if let Some(convolution) = &block.downsampler {
                map = plain(&map, convolution, Padding::BEHIND, walk)?;
            }
        }
        map = self.middle.forward(map, walk)?;
        let moments = norm_and_convolve(&map, &self.norm_out, &self.conv_out, walk)?;
        match &self.quant {
            Some(convolution) => plain(&moments, convolution, Padding::NONE, walk),
            None => Ok(moments),
        }
    }
}
