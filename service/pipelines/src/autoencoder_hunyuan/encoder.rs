//! Frames to latents: diffusers' `HunyuanVideoEncoder3D`, and `AutoencoderKLHunyuanVideo.encode` around it.

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use ops::Onto;

use super::blocks::{Middle, Resnet, causal, convolve, norm_and_convolve_to_frames, of_positions};
use super::config::{HunyuanVaeConfig, Resize};
use super::conv::{Convolution, Reading, Walk};
use super::film::blend;
use super::scratch::Chunking;
use super::space::{self, in_tiles};
use super::time::encode_tiles;
use crate::autoencoder_kl::{GroupNorm, LayerSource, Moments, dtype_of_maps, finite};
use model::StageError;

/// One resolution: residual blocks, then downsampling.
#[derive(Clone, Debug)]
struct DownBlock {
    resnets: Vec<Resnet>,
    downsampler: Option<Convolution>,
}

/// The encoder of pictures and films.
#[derive(Clone, Debug)]
pub struct HunyuanVaeEncoder {
    config: HunyuanVaeConfig,
    dtype: DType,
    device: Device,
    conv_in: Convolution,
    down_blocks: Vec<DownBlock>,
    middle: Middle,
    norm_out: GroupNorm,
    conv_out: Convolution,
    quant: Convolution,
}

impl HunyuanVaeEncoder {
    /// From the tensors of the `vae` component, with diffusers' names (`encoder.*`, `quant_conv.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported autoencoder, [`StageError::Missing`] for a tensor that is missing
    /// or not of the configuration's shape.
    pub fn new(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
    ) -> Result<HunyuanVaeEncoder, StageError> {
        let dtype = dtype_of_maps(tensors, "encoder.conv_in.conv.bias")?;
        HunyuanVaeEncoder::in_dtype(config, tensors, dtype)
    }

    /// [`HunyuanVaeEncoder::new`] with maps of this dtype, on any device (see
    /// [`super::HunyuanVaeDecoder::in_dtype`]).
    ///
    /// # Errors
    /// Those of [`HunyuanVaeEncoder::new`].
    pub fn in_dtype(
        config: &HunyuanVaeConfig,
        tensors: &ComponentTensors,
        dtype: DType,
    ) -> Result<HunyuanVaeEncoder, StageError> {
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
        let cubic = |name: &str, channels| causal(source, name, channels, 3, Resize::NONE);
        let mut down_blocks = Vec::with_capacity(channels.len());
        let mut before = finest;
        for (level, &width) in channels.iter().enumerate() {
            let name = format!("encoder.down_blocks.{level}");
            let mut resnets = Vec::with_capacity(config.layers_per_block);
            for layer in 0..config.layers_per_block {
                let name = format!("{name}.resnets.{layer}");
                resnets.push(Resnet::new(source, &name, (before, width))?);
                before = width;
            }
            let downsampler = match config.resize(level) {
                None => None,
                Some(halved) => {
                    let name = format!("{name}.downsamplers.0.conv");
                    Some(causal(source, &name, (width, width), 3, halved)?)
                }
            };
            down_blocks.push(DownBlock { resnets, downsampler });
        }
        let norm_out = source.norm("encoder.conv_norm_out", coarsest)?;
        let attention = config.mid_block_add_attention;
        Ok(HunyuanVaeEncoder {
            dtype,
            device: norm_out.device().clone(),
            conv_in: cubic("encoder.conv_in", (config.in_channels, finest))?,
            down_blocks,
            middle: Middle::new(source, "encoder.mid_block", coarsest, attention)?,
            norm_out,
            conv_out: cubic("encoder.conv_out", (coarsest, moments))?,
            quant: of_positions(source, "quant_conv", moments)?,
            config: config.clone(),
        })
    }

    /// Encodes `frames`, `[n, height, width, in_channels]` of -1 to 1 in f32, f16 or bf16 on the device of the
    /// weights, with sides that are multiples of [`HunyuanVaeConfig::factor`], to moments `[1, latent_channels,
    /// (n - 1) / 4 + 1, height / 8, width / 8]`: `AutoencoderKLHunyuanVideo.encode`, with its tiles in time.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for frames of another shape.
    pub fn encode(
        &self,
        frames: &Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let Ok((count, height, width, channels)) = frames.dims4() else {
            let problem = format!(
                "frames of shape {:?} where [n, h, w, c] are expected",
                frames.dims()
            );
            return Err(StageError::BadInput(problem));
        };
        let shape = [count, height, width, channels];
        self.encoded(shape, chunking, cancelled, &|first, count| {
            let tile = frames.narrow(0, first, count)?;
            let map = ops::blank(tile.dims(), self.dtype, &self.device)?;
            ops::copy_rows(&tile, &map)?;
            Ok(map)
        })
    }

    /// Encodes `count` 8-bit frames of this width and height, frame by frame and row by row, with the autoencoder's
    /// number of channels (`VideoProcessor.preprocess_video` and [`HunyuanVaeEncoder::encode`]). The frames of a tile
    /// at a time are brought to the card.
    ///
    /// # Errors
    /// Those of [`HunyuanVaeEncoder::encode`].
    pub fn encode_rgb8(
        &self,
        rgb: &[u8],
        count: usize,
        (width, height): (usize, usize),
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Moments, StageError> {
        let channels = self.config.in_channels;
        let of_frame = width * height * channels;
        if rgb.len() != count * of_frame {
            let problem = format!(
                "{} bytes where {count} frames of {width}x{height} have {}",
                rgb.len(),
                count * of_frame
            );
            return Err(StageError::BadInput(problem));
        }
        let shape = [count, height, width, channels];
        self.encoded(shape, chunking, cancelled, &|first, count| {
            let bytes = &rgb[first * of_frame..(first + count) * of_frame];
            let lines = [count * height, width, channels];
            let map = ops::bytes_to_map(bytes, lines, self.dtype, &self.device)?;
            map.reshape((count, height, width, channels))
        })
    }

    fn check(&self, [count, height, width, channels]: [usize; 4]) -> Result<(), StageError> {
        let (factor, expected) = (self.config.factor(), self.config.in_channels);
        let fits = |size: usize| size > 0 && size.is_multiple_of(factor);
        if channels == expected && count > 0 && fits(height) && fits(width) {
            return Ok(());
        }
        Err(StageError::BadInput(format!(
            "{count} frames of {width}x{height} with {channels} channels where {expected} and multiples of {factor} \
             are expected"
        )))
    }

    /// `bring` gives the map of some frames: the first, and how many.
    fn encoded(
        &self,
        shape: [usize; 4],
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
        bring: &dyn Fn(usize, usize) -> candle_core::Result<Tensor>,
    ) -> Result<Moments, StageError> {
        self.check(shape)?;
        let [frames, height, width, _] = shape;
        let factor = self.config.factor();
        let (length, h, w) = (self.config.latents(frames), height / factor, width / factor);
        let channels = self.config.latent_channels;
        let joined = ops::blank(&[length, h, w, 2 * channels], self.dtype, &self.device)?;
        let mut next = 0;
        let mut carried: Option<Tensor> = None;
        for tile in encode_tiles(&self.config, frames) {
            let moments = self.encode_tile(bring(tile.first, tile.count)?, chunking, cancelled)?;
            let outputs = moments.dim(0)? - tile.dropped;
            let moments = moments.narrow(0, tile.dropped, outputs)?;
            if let Some(before) = carried.take() {
                blend(&before, &moments, tile.blended)?;
            }
            if tile.carried > 0 {
                let last = moments.narrow(0, outputs - tile.carried, tile.carried)?;
                carried = Some(space::copy(&last)?);
            }
            let results = moments.narrow(0, 0, tile.kept)?;
            ops::copy_rows(&results, &joined.narrow(0, next, tile.kept)?)?;
            next += tile.kept;
        }
        let lines = joined.reshape((length * h, w, 2 * channels))?;
        let (planes, is_finite) = ops::map_to_planes(&lines)?;
        finite(is_finite)?;
        let planes = planes
            .to_device(&Device::Cpu)?
            .reshape((1, 2 * channels, length, h, w))?;
        Ok(Moments::of_planes(&planes)?)
    }

    /// Encodes frames `[t, h, w, c]` of one tile in time to moments `[l, h / 8, w / 8, 2 c]`.
    fn encode_tile(
        &self,
        frames: Tensor,
        chunking: Chunking,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let walk = Walk {
            strip_bytes: chunking.strip_bytes(),
            cancelled,
        };
        match chunking {
            Chunking::Whole | Chunking::Strips { .. } => self.encode_map(frames, walk),
            Chunking::Tiles { latent_size } => {
                let sizes = (latent_size * self.config.factor(), latent_size);
                in_tiles(&frames, sizes, &|tile| self.encode_map(tile, walk))
            }
        }
    }

    fn encode_map(&self, frames: Tensor, walk: Walk<'_>) -> Result<Tensor, StageError> {
        let rows_first = frames.permute((1, 0, 2, 3))?;
        let mut map = convolve(&rows_first, Reading::PLAIN, &self.conv_in, walk)?;
        drop((frames, rows_first));
        for block in &self.down_blocks {
            for resnet in &block.resnets {
                map = resnet.forward(map, walk)?;
            }
            if let Some(convolution) = &block.downsampler {
                map = convolve(&map, Reading::PLAIN, convolution, walk)?;
            }
        }
        map = self.middle.forward(map, walk)?;
        let moments = norm_and_convolve_to_frames(&map, &self.norm_out, &self.conv_out, walk)?;
        let out = ops::blank(moments.dims(), self.dtype, &self.device)?;
        self.quant.of_positions(&moments, &out, Onto::Nothing)?;
        Ok(out)
    }
}
