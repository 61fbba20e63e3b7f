//! Latent to picture: diffusers' `Decoder`, and `AutoencoderKL.decode` around it.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;

use super::blocks::{LayerSource, Middle, Resnet, Walk, enlarge, norm_and_convolve, plain};
use super::config::VaeConfig;
use super::conv::{Convolution, Padding};
use super::norm::GroupNorm;
use super::picture::Rgb8;
use super::scratch::Chunking;
use super::tiles::decode_tiles;
use model::StageError;

/// One resolution: residual blocks, then upsampling.
#[derive(Clone, Debug)]
struct UpBlock {
    resnets: Vec<Resnet>,
    upsampler: Option<Convolution>,
}

/// The decoder of an autoencoder. Tensors are shared with the component that it was made from.
#[derive(Clone, Debug)]
pub struct VaeDecoder {
    config: VaeConfig,
    dtype: DType,
    post_quant: Option<Convolution>,
    conv_in: Convolution,
    middle: Middle,
    up_blocks: Vec<UpBlock>,
    norm_out: GroupNorm,
    conv_out: Convolution,
}

/// The dtype of maps: on a card that of the biases, which are always in full precision; f32 on the CPU.
pub(crate) fn dtype_of_maps(
    tensors: &ComponentTensors,
    probe: &str,
) -> std::result::Result<DType, StageError> {
    let tensor = tensors.get(probe).map_err(|missing| StageError::Missing {
        component: super::COMPONENT.to_owned(),
        missing,
    })?;
    Ok(if matches!(tensor.device(), Device::Cpu) {
        DType::F32
    } else {
        tensor.dtype()
    })
}

impl VaeDecoder {
    /// From the tensors of the `vae` component, with diffusers' names (`decoder.*`, `post_quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(config: &VaeConfig, tensors: &ComponentTensors) -> Result<VaeDecoder, StageError> {
        VaeDecoder::in_dtype(config, tensors, dtype_of_maps(tensors, "decoder.conv_in.bias")?)
    }

    /// [`VaeDecoder::new`] with maps of this dtype, on any device: the computation of a card in a narrow dtype can be
    /// reproduced on the CPU.
    ///
    /// # Errors
    /// Those of [`VaeDecoder::new`].
    pub fn in_dtype(
        config: &VaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<VaeDecoder, StageError> {
        config
            .check()
            .map_err(|problem| StageError::BadInput(format!("the VAE has {problem}")))?;
        let source = LayerSource {
            tensors,
            dtype,
            groups: config.norm_num_groups,
        };
        let (latent, picture) = (config.latent_channels, config.out_channels);
        let channels = &config.block_out_channels;
        let (finest, coarsest) = (channels[0], channels[channels.len() - 1]);
        let mut up_blocks = Vec::with_capacity(channels.len());
        let mut before = coarsest;
        for (level, &width) in channels.iter().rev().enumerate() {
            let name = format!("decoder.up_blocks.{level}");
            let mut resnets = Vec::with_capacity(config.layers_per_block + 1);
            for layer in 0..=config.layers_per_block {
                resnets.push(Resnet::new(
                    source,
                    &format!("{name}.resnets.{layer}"),
                    (before, width),
                )?);
                before = width;
            }
            let upsampler = match level + 1 < channels.len() {
                true => {
                    Some(source.convolution(&format!("{name}.upsamplers.0.conv"), (width, width), 3, 1)?)
                }
                false => None,
            };
            up_blocks.push(UpBlock { resnets, upsampler });
        }
        Ok(VaeDecoder {
            dtype,
            post_quant: match config.use_post_quant_conv {
                true => Some(source.convolution("post_quant_conv", (latent, latent), 1, 1)?),
                false => None,
            },
            conv_in: source.convolution("decoder.conv_in", (latent, coarsest), 3, 1)?,
            middle: Middle::new(
                source,
                "decoder.mid_block",
                coarsest,
                config.mid_block_add_attention,
            )?,
            up_blocks,
            norm_out: source.norm("decoder.conv_norm_out", finest)?,
            conv_out: source.convolution("decoder.conv_out", (finest, picture), 3, 1)?,
            config: config.clone(),
        })
    }

    /// Decodes `latent`, f32 `[1, latent_channels, h, w]` in the autoencoder's scale (see [`VaeConfig::unscaled`]),
    /// to `[1, out_channels, 8h, 8w]` in f32, -1 to 1 and not clamped: `AutoencoderKL.decode`. `cancelled` is called
    /// before every layer and every strip.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for a latent of another
    /// shape.
    pub fn decode(
        &self,
        latent: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let map = self.decoded(latent, (1.0, 0.0), chunking, cancelled)?;
        let (picture, is_finite) = ops::map_to_planes(&map)?;
        finite(is_finite)?;
        Ok(picture)
    }

    /// Decodes `latent`, f32 `[1, latent_channels, h, w]` in the transformer's scale, to an 8-bit picture
    /// (`VaeImageProcessor.postprocess`): only bytes are copied from the card.
    ///
    /// # Errors
    /// Errors of [`VaeDecoder::decode`]; [`StageError::BadInput`] for an autoencoder without three channels.
    pub fn decode_to_rgb8(
        &self,
        latent: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Rgb8, StageError> {
        if self.config.out_channels != 3 {
            let problem = format!(
                "a picture of {} channels where 3 are expected",
                self.config.out_channels
            );
            return Err(StageError::BadInput(problem));
        }
        let map = self.decoded(latent, self.config.unscaling(), chunking, cancelled)?;
        let (height, width, _) = map.dims3()?;
        let (rgb, is_finite) = ops::map_to_bytes(&map)?;
        finite(is_finite)?;
        Ok(Rgb8 { width, height, rgb })
    }

    /// Decodes to a map `[8h, 8w, out_channels]`, after an affine transformation of the latent.
    fn decoded(
        &self,
        latent: &Tensor,
        affine: (f64, f64),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let expected = self.config.latent_channels;
        if !matches!(*latent.dims(), [1, channels, rows, columns] if channels == expected && rows > 0 && columns > 0)
        {
            let found = latent.dims();
            let problem = format!("a latent of shape {found:?} where [1, {expected}, h, w] is expected");
            return Err(StageError::BadInput(problem));
        }
        let latent = ops::planes_to_map(&latent.to_dtype(DType::F32)?, affine, self.dtype)?;
        let height = latent.dim(0)?;
        match chunking {
            Chunking::Whole => self.decode_map(latent, height, cancelled),
            Chunking::Strips { latent_rows } => self.decode_map(latent, latent_rows, cancelled),
            Chunking::Tiles { latent_size } => {
                decode_tiles(&latent, latent_size, self.config.factor(), &|tile| {
                    let height = tile.dim(0)?;
                    self.decode_map(tile, height, cancelled)
                })
            }
        }
    }

    fn decode_map(
        &self,
        latent: Tensor,
        latent_rows: usize,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let walk = Walk {
            latent_height: latent.dim(0)?,
            latent_rows,
            cancelled,
        };
        let latent = match &self.post_quant {
            Some(convolution) => plain(&latent, convolution, Padding::NONE, walk)?,
            None => latent,
        };
        let mut map = plain(&latent, &self.conv_in, Padding::AROUND, walk)?;
        drop(latent);
        map = self.middle.forward(map, walk)?;
        for block in &self.up_blocks {
            for resnet in &block.resnets {
                map = resnet.forward(map, walk)?;
            }
            if let Some(convolution) = &block.upsampler {
                map = enlarge(&map, convolution, walk)?;
            }
        }
        norm_and_convolve(&map, &self.norm_out, &self.conv_out, walk)
    }
}

/// The error for a result that is not finite.
pub(crate) fn finite(is_finite: bool) -> Result<(), StageError> {
    if is_finite {
        return Ok(());
    }
    Err(StageError::NotFinite {
        component: super::COMPONENT.to_owned(),
        step: 0,
    })
}
