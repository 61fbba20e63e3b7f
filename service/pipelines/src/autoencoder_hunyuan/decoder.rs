//! Latents of one tile in time to frames: diffusers' `HunyuanVideoDecoder3D`.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use ops::Onto;

use super::blocks::{InPlace, Middle, Resnet, causal, convolve, norm_and_convolve_to_frames, of_positions};
use super::config::{HunyuanVaeConfig, Resize};
use super::conv::{Convolution, Reading, Walk};
use super::scratch::Chunking;
use super::space::in_tiles;
use crate::autoencoder_kl::{GroupNorm, LayerSource, dtype_of_maps};
use model::StageError;

/// One resolution: residual blocks, then upsampling.
#[derive(Clone, Debug)]
struct UpBlock {
    resnets: Vec<Resnet>,
    upsampler: Option<(Resize, Convolution)>,
}

/// The decoder of films. Tensors are shared with the component that it was made from.
#[derive(Clone, Debug)]
pub struct HunyuanVaeDecoder {
    config: HunyuanVaeConfig,
    dtype: DType,
    post_quant: Convolution,
    conv_in: Convolution,
    middle: Middle,
    up_blocks: Vec<UpBlock>,
    norm_out: GroupNorm,
    conv_out: Convolution,
}

impl HunyuanVaeDecoder {
    /// From the tensors of the `vae` component, with diffusers' names (`decoder.*`, `post_quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
    ) -> Result<HunyuanVaeDecoder, StageError> {
        let dtype = dtype_of_maps(tensors, "decoder.conv_in.conv.bias")?;
        HunyuanVaeDecoder::in_dtype(config, tensors, dtype)
    }

    /// [`HunyuanVaeDecoder::new`] with maps of this dtype, on any device: the computation of a card in a narrow dtype
    /// can be reproduced on the CPU.
    ///
    /// # Errors
    /// Those of [`HunyuanVaeDecoder::new`].
    pub fn in_dtype(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<HunyuanVaeDecoder, StageError> {
        config
            .check()
            .map_err(|problem| StageError::BadInput(format!("the VAE has {problem}")))?;
        let source = LayerSource {
            tensors,
            dtype,
            groups: config.norm_num_groups,
        };
        let (latent, frame) = (config.latent_channels, config.out_channels);
        let channels = &config.block_out_channels;
        let (finest, coarsest) = (channels[0], channels[channels.len() - 1]);
        let cubic = |name: &str, channels| causal(source, name, channels, 3, Resize::NONE);
        let mut up_blocks = Vec::with_capacity(channels.len());
        let mut before = coarsest;
        for (level, &width) in channels.iter().rev().enumerate() {
            let name = format!("decoder.up_blocks.{level}");
            let mut resnets = Vec::with_capacity(config.layers_per_block + 1);
            for layer in 0..=config.layers_per_block {
                let name = format!("{name}.resnets.{layer}");
                resnets.push(Resnet::new(source, &name, (before, width))?);
                before = width;
            }
            let upsampler = match config.resize(level) {
                None => None,
                Some(resize) => {
                    let name = format!("{name}.upsamplers.0.conv");
                    Some((resize, cubic(&name, (width, width))?))
                }
            };
            up_blocks.push(UpBlock { resnets, upsampler });
        }
        let attention = config.mid_block_add_attention;
        Ok(HunyuanVaeDecoder {
            dtype,
            post_quant: of_positions(source, "post_quant_conv", latent)?,
            conv_in: cubic("decoder.conv_in", (latent, coarsest))?,
            middle: Middle::new(source, "decoder.mid_block", coarsest, attention)?,
            up_blocks,
            norm_out: source.norm("decoder.conv_norm_out", finest)?,
            conv_out: cubic("decoder.conv_out", (finest, frame))?,
            config: config.clone(),
        })
    }

    /// The configuration that it was made from.
    pub fn config(&self) -> &HunyuanVaeConfig {
        &self.config
    }

    /// The dtype of maps.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Decodes latents `[l, h, w, c]` of one tile in time, contiguous, to frames `[t, 8h, 8w, c]`.
    pub(super) fn decode_tile(
        &self,
        latents: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let walk = Walk {
            strip_bytes: chunking.strip_bytes(),
            cancelled,
        };
        match chunking {
            Chunking::Whole | Chunking::Strips { .. } => self.decode_map(latents, walk),
            Chunking::Tiles { latent_size } => {
                let sizes = (latent_size, latent_size * self.config.factor());
                in_tiles(latents, sizes, &|tile| self.decode_map(&tile, walk))
            }
        }
    }

    fn decode_map(&self, latents: &Tensor, walk: Walk<'_>) -> Result<Tensor, StageError> {
        let latent = ops::blank(latents.dims(), self.dtype, latents.device())?;
        self.post_quant.of_positions(latents, &latent, Onto::Nothing)?;
        let mut map = convolve(
            &latent.permute((1, 0, 2, 3))?,
            Reading::PLAIN,
            &self.conv_in,
            walk,
        )?;
        drop(latent);
        map = self.middle.forward(map, walk)?;
        for block in &self.up_blocks {
            map = match &block.upsampler {
                Some((enlarge, convolution)) => {
                    for resnet in &block.resnets {
                        map = resnet.forward(map, walk)?;
                    }
                    let reading = Reading {
                        enlarge: *enlarge,
                        ..Reading::PLAIN
                    };
                    convolve(&map, reading, convolution, walk)?
                }
                None => {
                    let mut maps = InPlace::Whole(map);
                    for resnet in &block.resnets {
                        maps = resnet.forward_in_place(maps, walk)?;
                    }
                    maps.map()
                }
            };
        }
        norm_and_convolve_to_frames(&map, &self.norm_out, &self.conv_out, walk)
    }
}
