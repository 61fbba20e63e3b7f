//! Latent to picture: diffusers' `Decoder`, and `AutoencoderKL.decode` around it.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;

use super::blocks::{Middle, Resnet, Source, Walk, enlarge, norm_and_convolve, plain};
use super::config::VaeConfig;
use super::conv::{Convolution, Padding};
use super::norm::GroupNorm;
use super::scratch::Chunking;
use super::tiles::decode_tiles;
use crate::family::StageError;

/// One resolution: residual blocks, then twice the size.
#[derive(Clone, Debug)]
struct UpBlock {
    resnets: Vec<Resnet>,
    upsampler: Option<Convolution>,
}

/// The decoder of an autoencoder. It borrows nothing: tensors are shared with the component that it is made of.
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

/// The dtype that maps have: that of a card's biases, which are in full precision always; f32 on the CPU.
pub(super) fn dtype_of_maps(
    tensors: &ComponentTensors,
    probe: &str,
) -> std::result::Result<DType, StageError> {
    let tensor = tensors.get(probe).map_err(|missing| StageError::Missing {
        component: "vae".to_owned(),
        missing,
    })?;
    Ok(if matches!(tensor.device(), Device::Cpu) {
        DType::F32
    } else {
        tensor.dtype()
    })
}

impl VaeDecoder {
    /// From the tensors of the `vae` component, by diffusers' names (`decoder.*`, `post_quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an autoencoder that is not known, [`StageError::Missing`] for a tensor that
    /// is not there or not of the configuration's shape.
    pub fn new(config: &VaeConfig, tensors: &ComponentTensors) -> Result<VaeDecoder, StageError> {
        VaeDecoder::in_dtype(config, tensors, dtype_of_maps(tensors, "decoder.conv_in.bias")?)
    }

    /// The same with maps of this dtype, wherever the tensors are: what a card computes in a narrow one can be walked on
    /// the CPU.
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
        let source = Source {
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

    /// Decodes `latent` `[1, latent_channels, h, w]` as the autoencoder gives it (see
    /// [`VaeConfig::unscaled`]) to `[1, out_channels, 8h, 8w]` in f32, -1 to 1 and not
    /// clamped: `AutoencoderKL.decode`. `cancelled` is asked before every layer and every strip.
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
        let expected = self.config.latent_channels;
        let latent_rows = match *latent.dims() {
            [1, channels, rows, columns] if channels == expected && rows > 0 && columns > 0 => rows,
            ref other => {
                let problem = format!("a latent of shape {other:?} where [1, {expected}, h, w] is expected");
                return Err(StageError::BadInput(problem));
            }
        };
        let latent = latent.to_dtype(self.dtype)?.contiguous()?;
        let picture = match chunking {
            Chunking::Whole => self.decode_map(&latent, latent_rows, cancelled)?,
            Chunking::Strips { latent_rows } => self.decode_map(&latent, latent_rows, cancelled)?,
            Chunking::Tiles { latent_size } => {
                decode_tiles(&latent, latent_size, self.config.factor(), &|tile| {
                    self.decode_map(tile, tile.dim(2)?, cancelled)
                })?
            }
        };
        let picture = picture.to_dtype(DType::F32)?;
        // A value that is not finite makes the sum so.
        if !picture.abs()?.sum_all()?.to_scalar::<f32>()?.is_finite() {
            return Err(StageError::NotFinite {
                component: "vae".to_owned(),
                step: 0,
            });
        }
        Ok(picture)
    }

    fn decode_map(
        &self,
        latent: &Tensor,
        latent_rows: usize,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let walk = Walk {
            latent_height: latent.dim(2)?,
            latent_rows,
            cancelled,
        };
        let latent = match &self.post_quant {
            Some(convolution) => plain(latent, convolution, Padding::NONE, walk)?,
            None => latent.clone(),
        };
        let mut map = plain(&latent, &self.conv_in, Padding::AROUND, walk)?;
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
